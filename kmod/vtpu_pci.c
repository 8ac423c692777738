// SPDX-License-Identifier: GPL-2.0
/*
 * Resets that the PCI core makes: of the function, by sysfs, and of the link,
 * after a fatal error on the bus. Until one is over the BARs decode nothing, so
 * whoever reaches HBM or page tables through them waits: vtpu_bar_lock().
 */

#include <linux/lockdep.h>
#include <linux/mm.h>
#include <linux/pci.h>
#include <drm/drm_managed.h>
#include <drm/drm_print.h>

#include "vtpu_compat.h"
#include "vtpu_device.h"
#include "vtpu_pci.h"
#include "vtpu_reset.h"
#include "vtpu_vm.h"

/* The core may wait a minute for a device that comes out of a reset. */
#define RECOVERY_TIMEOUT	(90 * HZ)

/* ---- Who needs the BARs ---- */

void vtpu_bar_init(struct vtpu_device *vdev)
{
	init_rwsem(&vdev->bar_sem);
	init_waitqueue_head(&vdev->thawed);
}

/* Not under reset_lock; vtpu_bar_unlock() ends it. */
void vtpu_bar_lock(struct vtpu_device *vdev)
{
	down_read(&vdev->bar_sem);
	while (vdev->frozen) {
		up_read(&vdev->bar_sem);
		wait_event(vdev->thawed, !READ_ONCE(vdev->frozen));
		down_read(&vdev->bar_sem);
	}
}

/* For who only looks: that is nothing to wait for. */
bool vtpu_bar_trylock(struct vtpu_device *vdev)
{
	if (!down_read_trylock(&vdev->bar_sem))
		return false;
	if (!vdev->frozen)
		return true;
	up_read(&vdev->bar_sem);
	return false;
}

void vtpu_bar_unlock(struct vtpu_device *vdev)
{
	up_read(&vdev->bar_sem);
}

/* Nobody is in the BARs after this; processes come back by page faults. */
static void vtpu_bar_close(struct vtpu_device *vdev)
{
	down_write(&vdev->bar_sem);
	unmap_mapping_range(vdev->drm.anon_inode->i_mapping, 0, 0, 1);
}

static void vtpu_bar_open(struct vtpu_device *vdev)
{
	WRITE_ONCE(vdev->frozen, false);
	up_write(&vdev->bar_sem);
	wake_up_all(&vdev->thawed);
}

/*
 * After a reset of the link nobody else does. What the core saves is gone once it
 * was restored, be it after D3hot.
 */
static void vtpu_pci_restore(struct vtpu_device *vdev)
{
	struct pci_dev *pdev = to_pci_dev(vdev->drm.dev);

	pci_load_saved_state(pdev, vdev->pci_state);
	pci_restore_state(pdev);
}

/* ---- Resets of the function: the core calls both from one thread ---- */

/*
 * In between the core takes locks that it also holds over a removal. Neither
 * waits for the other in there: both have the device's own lock before. Lockdep
 * does not follow that one, so it is not to know that ours are held.
 */
static void vtpu_reset_hide_locks(struct vtpu_device *vdev)
{
	mutex_release(&vdev->reset_lock.dep_map, _THIS_IP_);
	rwsem_release(&vdev->bar_sem.dep_map, _THIS_IP_);
}

static void vtpu_reset_show_locks(struct vtpu_device *vdev)
{
	rwsem_acquire(&vdev->bar_sem.dep_map, 0, 1, _THIS_IP_);
	mutex_acquire(&vdev->reset_lock.dep_map, 0, 1, _THIS_IP_);
}

static void vtpu_reset_prepare(struct pci_dev *pdev)
{
	struct vtpu_device *vdev = pci_get_drvdata(pdev);

	vtpu_bar_close(vdev);
	mutex_lock(&vdev->reset_lock);
	/* Who is told that a job has ended may use the job's memory at once. */
	pci_clear_master(pdev);
	/* Amid a link reset it is lost, and what has come since waits for the end. */
	if (!vdev->frozen)
		vtpu_device_lose(vdev, -ENODEV);
	vtpu_reset_hide_locks(vdev);
}

static void vtpu_reset_done(struct pci_dev *pdev)
{
	struct vtpu_device *vdev = pci_get_drvdata(pdev);

	vtpu_reset_show_locks(vdev);
	/* It may be the way back from an error, too. */
	if (vdev->frozen) {
		cancel_delayed_work(&vdev->recovery);
		vtpu_pci_restore(vdev);
	}
	if (drm_dev_is_unplugged(&vdev->drm))
		goto unlock;
	/* The one way back for a device that was given up. */
	WRITE_ONCE(vdev->wedged, false);
	/* To a virtual function it means that it may get another owner. */
	if (pdev->is_virtfn)
		vtpu_vm_lose_all(vdev);
	/* With the jobs that have come meanwhile. */
	atomic64_inc(&vdev->device_resets);
	vtpu_device_restart(vdev);
unlock:
	mutex_unlock(&vdev->reset_lock);
	vtpu_bar_open(vdev);
}

/* ---- Errors on the bus ---- */

/* Once: what was lost may be lost again, and is removed. The callers exclude each other. */
void vtpu_unplug(struct vtpu_device *vdev)
{
	if (!drm_dev_is_unplugged(&vdev->drm))
		drm_dev_unplug(&vdev->drm);
}

/* For good: those who wait go on, and then find it unplugged. */
static void vtpu_pci_lost(struct vtpu_device *vdev)
{
	down_write(&vdev->bar_sem);
	/* A reset of the function has brought it back. */
	if (!vdev->frozen) {
		up_write(&vdev->bar_sem);
		return;
	}
	drm_err(&vdev->drm, "no recovery from the error on the bus\n");
	/* If the link was not reset, it may be at work. */
	pci_clear_master(to_pci_dev(vdev->drm.dev));
	/* If it was, the next driver is to find the BARs in their places. */
	vtpu_pci_restore(vdev);
	mutex_lock(&vdev->reset_lock);
	WRITE_ONCE(vdev->wedged, true);
	vtpu_device_lose(vdev, -ENODEV);
	mutex_unlock(&vdev->reset_lock);
	vtpu_bar_open(vdev);
	vtpu_unplug(vdev);
}

static void vtpu_recovery_late(struct work_struct *work)
{
	vtpu_pci_lost(container_of(work, struct vtpu_device, recovery.work));
}

/* What is in flight is lost; nothing is started, and nobody in the BARs, until it is over. */
static void vtpu_pci_freeze(struct vtpu_device *vdev)
{
	vtpu_bar_close(vdev);
	WRITE_ONCE(vdev->frozen, true);
	up_write(&vdev->bar_sem);
	mutex_lock(&vdev->reset_lock);
	pci_clear_master(to_pci_dev(vdev->drm.dev));
	vtpu_device_lose(vdev, -ENODEV);
	mutex_unlock(&vdev->reset_lock);
	/* The core does not always tell when it gives up, for a function without a driver, say. */
	mod_delayed_work(system_dfl_wq, &vdev->recovery, RECOVERY_TIMEOUT);
}

/*
 * One that is not fatal has ended the job that met it, if any. A fatal one makes
 * the core reset the link: what was in flight is lost, and nothing is started
 * until the device is there again.
 */
static pci_ers_result_t vtpu_error_detected(struct pci_dev *pdev, pci_channel_state_t state)
{
	struct vtpu_device *vdev = pci_get_drvdata(pdev);

	if (state == pci_channel_io_normal)
		return PCI_ERS_RESULT_CAN_RECOVER;

	vtpu_pci_freeze(vdev);
	if (state == pci_channel_io_frozen)
		return PCI_ERS_RESULT_NEED_RESET;
	cancel_delayed_work_sync(&vdev->recovery);
	vtpu_pci_lost(vdev);
	return PCI_ERS_RESULT_DISCONNECT;
}

/* Of our own error, or of another function's, of which nobody has told us yet. */
static pci_ers_result_t vtpu_slot_reset(struct pci_dev *pdev)
{
	struct vtpu_device *vdev = pci_get_drvdata(pdev);

	if (!READ_ONCE(vdev->frozen))
		vtpu_pci_freeze(vdev);
	vtpu_pci_restore(vdev);
	return PCI_ERS_RESULT_RECOVERED;
}

static void vtpu_error_resume(struct pci_dev *pdev)
{
	struct vtpu_device *vdev = pci_get_drvdata(pdev);

	cancel_delayed_work_sync(&vdev->recovery);
	/* After an error that was not fatal nothing was reset. */
	if (!READ_ONCE(vdev->frozen))
		return;
	vtpu_reset_prepare(pdev);
	vtpu_reset_done(pdev);
}

const struct pci_error_handlers vtpu_err_handlers = {
	.error_detected = vtpu_error_detected,
	.slot_reset = vtpu_slot_reset,
	.resume = vtpu_error_resume,
	.reset_prepare = vtpu_reset_prepare,
	.reset_done = vtpu_reset_done,
};

/* ---- Life ---- */

static void vtpu_pci_state_fini(struct drm_device *drm, void *state)
{
	kfree(state);
}

/* The function is as it is to be after a reset of the link: it does not master the bus yet. */
int vtpu_pci_init(struct vtpu_device *vdev)
{
	struct pci_dev *pdev = to_pci_dev(vdev->drm.dev);

	INIT_DELAYED_WORK(&vdev->recovery, vtpu_recovery_late);
	pci_clear_master(pdev);
	pci_save_state(pdev);
	vdev->pci_state = pci_store_saved_state(pdev);
	if (!vdev->pci_state)
		return -ENOMEM;
	return drmm_add_action_or_reset(&vdev->drm, vtpu_pci_state_fini, vdev->pci_state);
}

/* The driver lets go; nobody waits for a recovery any more. */
void vtpu_pci_stop(struct vtpu_device *vdev)
{
	cancel_delayed_work_sync(&vdev->recovery);
	if (vdev->frozen)
		vtpu_pci_restore(vdev);
	down_write(&vdev->bar_sem);
	vtpu_bar_open(vdev);
}
