// SPDX-License-Identifier: GPL-2.0
/*
 * Power.
 *
 * While the machine works the device sleeps, in D3hot, when nobody has had work
 * for it for a while. There it keeps all that it has, so nothing is saved; but
 * its BARs decode nothing, so who touches it wakes it first: a job from SUBMIT
 * until it is freed, everybody else by vtpu_dev_enter().
 *
 * Before the machine sleeps what runs may finish, within a bound. What waits in
 * the schedulers goes on after it, with HBM as it was: suspend to idle leaves it
 * to D3hot to keep that, what cuts the power has it saved (vtpu_save.c).
 */

#include <linux/iopoll.h>
#include <linux/mm.h>
#include <linux/pci.h>
#include <linux/pm_runtime.h>
#include <linux/suspend.h>
#include <drm/drm_print.h>

#include "vtpu_job.h"
#include "vtpu_pm.h"
#include "vtpu_queue.h"
#include "vtpu_reset.h"
#include "vtpu_usage.h"

/* Longer than the pauses of a server that answers: waking takes 10 ms and more. */
#define AUTOSUSPEND_MS		2000
#define DRAIN_POLL_US		1000
#define DRAIN_TIMEOUT_US	(2 * USEC_PER_SEC)

/* ---- Who keeps the device awake ---- */

int vtpu_pm_get(struct vtpu_device *vdev)
{
	return pm_runtime_resume_and_get(vdev->drm.dev) < 0 ? -ENODEV : 0;
}

void vtpu_pm_put(struct vtpu_device *vdev)
{
	pm_runtime_mark_last_busy(vdev->drm.dev);
	pm_runtime_put_autosuspend(vdev->drm.dev);
}

bool vtpu_dev_enter(struct vtpu_device *vdev, int *idx)
{
	if (!drm_dev_enter(&vdev->drm, idx))
		return false;
	if (!vtpu_pm_get(vdev))
		return true;
	drm_dev_exit(*idx);
	return false;
}

void vtpu_dev_exit(struct vtpu_device *vdev, int idx)
{
	vtpu_pm_put(vdev);
	drm_dev_exit(idx);
}

/*
 * Takes no lock that is held where the device is woken. The mappings of HBM go,
 * so that a process's next access is a page fault, which wakes it.
 */
static int vtpu_runtime_suspend(struct device *dev)
{
	struct vtpu_device *vdev = dev_get_drvdata(dev);

	unmap_mapping_range(vdev->drm.anon_inode->i_mapping, 0, 0, 1);
	vtpu_note_busy(vdev);
	return 0;
}

/* A hibernation takes its memory before it freezes devices, so ours is taken first. */
static int vtpu_sleep_notify(struct notifier_block *notifier, unsigned long event, void *unused)
{
	struct vtpu_device *vdev = container_of(notifier, struct vtpu_device, sleep_notifier);

	if (event == PM_HIBERNATION_PREPARE)
		return notifier_from_errno(vtpu_save_reserve(vdev));
	if (event == PM_POST_HIBERNATION)
		vtpu_save_drop(vdev);
	return NOTIFY_DONE;
}

static void vtpu_sleep_notifier_fini(void *data)
{
	struct vtpu_device *vdev = data;

	unregister_pm_notifier(&vdev->sleep_notifier);
	vtpu_save_drop(vdev);
}

int vtpu_pm_init(struct vtpu_device *vdev)
{
	int ret;

	xa_init(&vdev->saved);
	vdev->sleep_notifier.notifier_call = vtpu_sleep_notify;
	ret = register_pm_notifier(&vdev->sleep_notifier);
	if (ret)
		return ret;
	return devm_add_action_or_reset(vdev->drm.dev, vtpu_sleep_notifier_fini, vdev);
}

/* The device may sleep from here on. */
void vtpu_pm_start(struct vtpu_device *vdev)
{
	struct device *dev = vdev->drm.dev;

	/* Without power it would lose HBM, which nobody would notice. */
	pci_d3cold_disable(to_pci_dev(dev));
	pm_runtime_set_autosuspend_delay(dev, AUTOSUSPEND_MS);
	pm_runtime_use_autosuspend(dev);
	pm_runtime_allow(dev);
	vtpu_pm_put(vdev);
}

/* The core has woken the device, and keeps it awake until it has no driver. */
void vtpu_pm_stop(struct vtpu_device *vdev)
{
	struct device *dev = vdev->drm.dev;

	pm_runtime_get_noresume(dev);
	pm_runtime_forbid(dev);
	pm_runtime_dont_use_autosuspend(dev);
	pci_d3cold_enable(to_pci_dev(dev));
}

/* ---- The machine's sleep; processes are frozen ---- */

static bool vtpu_device_is_idle(struct vtpu_device *vdev)
{
	bool idle = true;

	for (unsigned int i = 0; i < vdev->num_queues && idle; i++) {
		struct vtpu_hwq *hwq = vdev->hwq[i];
		unsigned long flags;

		vtpu_hwq_complete(hwq);
		spin_lock_irqsave(&hwq->lock, flags);
		idle = list_empty(&hwq->inflight);
		spin_unlock_irqrestore(&hwq->lock, flags);
	}
	return idle;
}

/*
 * Nothing enters the rings any more, what is in them may finish, and then the
 * device does nothing. A job that takes longer is lost, with its queue: a
 * process must not be able to keep the machine awake.
 */
static void vtpu_quiesce(struct vtpu_device *vdev)
{
	bool idle;

	/* In this order: who starts a job starts its timer. */
	WRITE_ONCE(vdev->asleep, true);
	for (unsigned int i = 0; i < vdev->num_queues; i++) {
		drm_sched_wqueue_stop(&vdev->hwq[i]->sched);
		cancel_delayed_work_sync(&vdev->hwq[i]->sched.work_tdr);
	}
	if (read_poll_timeout(vtpu_device_is_idle, idle, idle, DRAIN_POLL_US,
			      DRAIN_TIMEOUT_US, false, vdev))
		drm_warn(&vdev->drm, "jobs are lost: the machine is about to sleep\n");

	mutex_lock(&vdev->reset_lock);
	/* Who is told that a job has ended may use the job's memory at once. */
	pci_clear_master(to_pci_dev(vdev->drm.dev));
	vtpu_device_lose(vdev, -ENODEV);
	if (!vtpu_device_is_away(vdev) && vtpu_hw_start(vdev))
		vtpu_device_give_up(vdev);
	mutex_unlock(&vdev->reset_lock);
}

static void vtpu_schedulers_start(struct vtpu_device *vdev)
{
	WRITE_ONCE(vdev->asleep, false);
	for (unsigned int i = 0; i < vdev->num_queues; i++)
		drm_sched_wqueue_start(&vdev->hwq[i]->sched);
}

static void vtpu_wake(struct vtpu_device *vdev)
{
	mutex_lock(&vdev->reset_lock);
	if (!vdev->wedged)
		vtpu_device_restart(vdev);
	mutex_unlock(&vdev->reset_lock);
	/* Queues are enabled by now, but have nothing to do. */
	vtpu_save_restore(vdev);
	vtpu_schedulers_start(vdev);
}

/* Unplugged while the machine slept, and so never woken: what is in line ends now. */
void vtpu_pm_gone(struct vtpu_device *vdev)
{
	if (vdev->asleep)
		vtpu_schedulers_start(vdev);
}

static int vtpu_freeze(struct device *dev)
{
	struct vtpu_device *vdev = dev_get_drvdata(dev);
	int ret;

	vtpu_quiesce(vdev);
	ret = vtpu_save(vdev);
	if (ret) {
		drm_err(&vdev->drm, "no memory for %llu bytes of HBM: no sleep\n", vdev->hbm_used);
		vtpu_wake(vdev);
	}
	return ret;
}

static int vtpu_thaw(struct device *dev)
{
	struct vtpu_device *vdev = dev_get_drvdata(dev);

	vtpu_save_drop(vdev);
	vtpu_wake(vdev);
	return 0;
}

/* The image has been made, HBM in it. */
static int vtpu_poweroff(struct device *dev)
{
	vtpu_quiesce(dev_get_drvdata(dev));
	return 0;
}

static int vtpu_suspend(struct device *dev)
{
	return pm_suspend_target_state == PM_SUSPEND_TO_IDLE ? vtpu_poweroff(dev) :
							       vtpu_freeze(dev);
}

static int vtpu_resume(struct device *dev)
{
	vtpu_wake(dev_get_drvdata(dev));
	return 0;
}

const struct dev_pm_ops vtpu_pm_ops = {
	.suspend = pm_sleep_ptr(vtpu_suspend),
	.resume = pm_sleep_ptr(vtpu_resume),
	.freeze = pm_sleep_ptr(vtpu_freeze),
	.thaw = pm_sleep_ptr(vtpu_thaw),
	.poweroff = pm_sleep_ptr(vtpu_poweroff),
	.restore = pm_sleep_ptr(vtpu_resume),
	RUNTIME_PM_OPS(vtpu_runtime_suspend, NULL, NULL)
};
