// SPDX-License-Identifier: GPL-2.0
/*
 * Recovery, in steps: a queue that hangs is reset; if it does not stop in time
 * the engines are; if they do not stop, the device is; if that does not end, the
 * device is given up. Each step has its bound.
 *
 * What others had in flight is not lost with the guilty: a reset keeps HBM and
 * what is in system memory, so a job that had not begun is put into the ring
 * again, and one that was half done if its process said that it may be.
 * Otherwise its queue is lost, for nobody knows what the job has done.
 */

#include <linux/pci.h>
#include <linux/workqueue.h>
#include <drm/drm_file.h>
#include <drm/drm_print.h>

#include "vtpu_compat.h"
#include "vtpu_coredump.h"
#include "vtpu_device.h"
#include "vtpu_job.h"
#include "vtpu_queue.h"
#include "vtpu_reset.h"
#include "vtpu_usage.h"
#include "vtpu_userq.h"
#include "vtpu_vm.h"

/* ---- Telling the system ---- */

static void vtpu_wedged_work(struct work_struct *work)
{
	struct vtpu_device *vdev = container_of(work, struct vtpu_device, wedged_work);
	bool wedged = READ_ONCE(vdev->wedged);
	char *env[2] = { wedged ? "WEDGED=bus-reset" : "WEDGED=none", NULL };
	int idx;

	if (!drm_dev_enter(&vdev->drm, &idx))
		return;
	kobject_uevent_env(&vdev->drm.accel->kdev->kobj, KOBJ_CHANGE, env);
	drm_dev_exit(idx);
}

/*
 * The event of Documentation/gpu/drm-uapi.rst, of the device's own node: the
 * core's drm_dev_wedged_event() knows only those that accel devices do not have.
 * From a work item, since memory is allocated for it.
 */
static void vtpu_tell_wedged(struct vtpu_device *vdev)
{
	queue_work(system_dfl_wq, &vdev->wedged_work);
}

void vtpu_reset_init(struct vtpu_device *vdev)
{
	INIT_WORK(&vdev->wedged_work, vtpu_wedged_work);
}

/* After the unplug, when no reset comes any more. */
void vtpu_reset_fini(struct vtpu_device *vdev)
{
	cancel_work_sync(&vdev->wedged_work);
}

/* There is no use in asking it anything: for good, or until its link has been reset. */
bool vtpu_device_is_away(struct vtpu_device *vdev)
{
	return READ_ONCE(vdev->wedged) || READ_ONCE(vdev->frozen);
}

/* ---- What is in flight ---- */

/*
 * Ends every job in flight with an error, because the device forgot or is
 * about to forget it. Queues with nothing in flight stay usable if they are
 * started again, but for user queues: their processes count on from where they were.
 */
void vtpu_device_lose(struct vtpu_device *vdev, int error)
{
	for (unsigned int i = 0; i < vdev->num_queues; i++) {
		struct vtpu_hwq *hwq = vdev->hwq[i];
		unsigned long flags;

		spin_lock_irqsave(&hwq->lock, flags);
		hwq->enabled = false;
		hwq->begun = 0;
		if (!vtpu_device_is_away(vdev))
			vtpu_hwq_note_busy(hwq);
		if (hwq->queue && hwq->queue->status == DRM_VTPU_QUEUE_HUNG)
			vtpu_hwq_fail_locked(hwq, DRM_VTPU_QUEUE_HUNG, -ETIMEDOUT, -ECANCELED);
		else if (!list_empty(&hwq->inflight) || vtpu_hwq_is_user(hwq))
			vtpu_hwq_fail_locked(hwq, DRM_VTPU_QUEUE_LOST, error, error);
		spin_unlock_irqrestore(&hwq->lock, flags);
	}
}

/* For good, but for a reset of the function; reset_lock is held. */
void vtpu_device_give_up(struct vtpu_device *vdev)
{
	drm_err(&vdev->drm, "the device is lost\n");
	/* First: it may not write into memory that its clients then give back. */
	pci_clear_master(to_pci_dev(vdev->drm.dev));
	WRITE_ONCE(vdev->wedged, true);
	vtpu_device_lose(vdev, -ENODEV);
	vtpu_tell_wedged(vdev);
}

/*
 * Remembers a job that a reset is going to interrupt: nothing begins any more, so
 * where the queue is not at work, HEAD is where it stays.
 */
static void vtpu_hwq_freeze(struct vtpu_hwq *hwq, bool all)
{
	struct vtpu_device *vdev = hwq->vdev;
	struct vtpu_fence *first;
	unsigned long flags;
	u32 state, head;

	spin_lock_irqsave(&hwq->lock, flags);
	if (!hwq->queue || hwq->queue->status != DRM_VTPU_QUEUE_OK)
		goto unlock;
	state = vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_QSTATUS));
	head = vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_HEAD));
	vtpu_hwq_complete_locked(hwq);
	first = list_first_entry_or_null(&hwq->inflight, struct vtpu_fence, link);
	if (first && hwq->enabled && !vtpu_hwq_is_user(hwq) &&
	    (state != VTPU_QUEUE_STATE_READY || head != first->job->first_entry))
		hwq->begun = first->base.seqno;
	/* What is set aside until the reset enters the ring after it. */
	if (all || state == VTPU_QUEUE_STATE_RUNNING || state == VTPU_QUEUE_STATE_PREEMPTED) {
		hwq->enabled = false;
		vtpu_hwq_note_busy(hwq);
	}
unlock:
	spin_unlock_irqrestore(&hwq->lock, flags);
}

static void vtpu_device_freeze(struct vtpu_device *vdev, bool all)
{
	vtpu_write(vdev, VTPU_REG_CTRL, 0);
	for (unsigned int i = 0; i < vdev->num_queues; i++) {
		vtpu_hwq_fault(vdev->hwq[i]);
		vtpu_hwq_freeze(vdev->hwq[i], all);
	}
}

/* Starts a queue that is disabled, with the jobs that it had, if they may run again. */
static void vtpu_hwq_thaw(struct vtpu_hwq *hwq)
{
	struct vtpu_device *vdev = hwq->vdev;
	struct vtpu_fence *first;
	unsigned long flags;
	bool start;

	spin_lock_irqsave(&hwq->lock, flags);
	vtpu_hwq_complete_locked(hwq);
	first = list_first_entry_or_null(&hwq->inflight, struct vtpu_fence, link);
	if (vtpu_hwq_is_user(hwq) ||
	    (first && first->base.seqno == hwq->begun && !first->job->restartable)) {
		atomic64_inc(&vdev->queues_lost);
		vtpu_hwq_fail_locked(hwq, DRM_VTPU_QUEUE_LOST, -ENODEV, -ECANCELED);
	}
	hwq->begun = 0;
	start = hwq->queue->status == DRM_VTPU_QUEUE_OK;
	if (start)
		atomic64_add(list_count_nodes(&hwq->inflight), &vdev->jobs_replayed);
	spin_unlock_irqrestore(&hwq->lock, flags);
	if (start && vtpu_hwq_start(hwq))
		vtpu_hwq_fail(hwq, DRM_VTPU_QUEUE_LOST, -ENODEV, -ECANCELED);
}

/* ---- Engines ---- */

/* A queue after the engines' reset. One that was not at work is as it was. */
static void vtpu_hwq_after_engines(struct vtpu_hwq *hwq)
{
	struct vtpu_device *vdev = hwq->vdev;
	unsigned long flags;
	u32 state;

	if (!hwq->queue || hwq->queue->status != DRM_VTPU_QUEUE_OK || hwq->enabled)
		return;
	state = vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_QSTATUS));
	if (state == VTPU_QUEUE_STATE_FAULTED ||
	    (state == VTPU_QUEUE_STATE_READY && vtpu_hwq_is_user(hwq))) {
		/* It was done in time, or has faulted, which the interrupt may have passed over. */
		spin_lock_irqsave(&hwq->lock, flags);
		hwq->enabled = true;
		spin_unlock_irqrestore(&hwq->lock, flags);
		vtpu_hwq_fault(hwq);
		return;
	}
	if (state == VTPU_QUEUE_STATE_READY)
		vtpu_write(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_RESET);
	vtpu_hwq_thaw(hwq);
}

static int vtpu_engine_reset(struct vtpu_device *vdev)
{
	int ret;

	vtpu_device_freeze(vdev, false);
	ret = vtpu_hw_reset_engines(vdev);
	if (ret)
		return ret;
	atomic64_inc(&vdev->engine_resets);
	for (unsigned int i = 0; i < vdev->num_queues; i++)
		vtpu_hwq_after_engines(vdev->hwq[i]);
	vtpu_write(vdev, VTPU_REG_CTRL, VTPU_CTRL_ENABLE);
	return 0;
}

/* ---- The device ---- */

/*
 * Resets the device and sets it up again: address spaces go on, and so do queues
 * that are good, with what they have in flight. When that fails the device is
 * given up.
 */
void vtpu_device_restart(struct vtpu_device *vdev)
{
	if (vtpu_hw_start(vdev)) {
		vtpu_device_give_up(vdev);
		return;
	}
	/* Not before it does nothing: it may have been given up while it wrote. */
	pci_set_master(to_pci_dev(vdev->drm.dev));
	vtpu_vm_restore(vdev);
	for (unsigned int i = 0; i < vdev->num_queues; i++) {
		struct vtpu_hwq *hwq = vdev->hwq[i];

		if (hwq->queue && hwq->queue->status == DRM_VTPU_QUEUE_OK)
			vtpu_hwq_thaw(hwq);
	}
}

void vtpu_device_reset(struct vtpu_device *vdev)
{
	atomic64_inc(&vdev->device_resets);
	vtpu_device_freeze(vdev, true);
	vtpu_device_restart(vdev);
	if (!vdev->wedged)
		vtpu_tell_wedged(vdev);
}

/* ---- One queue ---- */

/*
 * Returns once the device no longer works for the queue, whatever that takes.
 * What it has in flight is the caller's to end.
 */
void vtpu_hwq_force_off(struct vtpu_hwq *hwq, enum drm_vtpu_queue_status status)
{
	struct vtpu_device *vdev = hwq->vdev;

	if (!vtpu_hwq_stop(hwq, status))
		return;
	drm_err(&vdev->drm, "queue %u does not stop, resetting the engines\n", hwq->index);
	if (!vtpu_engine_reset(vdev))
		return;
	drm_err(&vdev->drm, "the engines do not stop, resetting the device\n");
	vtpu_device_reset(vdev);
}

/* Takes a queue off the device because its first job in flight hangs. */
void vtpu_hwq_hang(struct vtpu_hwq *hwq)
{
	vtpu_coredump(hwq->vdev, hwq->queue);
	vtpu_hwq_force_off(hwq, DRM_VTPU_QUEUE_HUNG);
	/* The job may even have finished in the meantime, and then it counts. */
	vtpu_hwq_fail(hwq, DRM_VTPU_QUEUE_HUNG, -ETIMEDOUT, -ECANCELED);
}

/* Ends the program that runs now, if one does. */
void vtpu_device_stop_running(struct vtpu_device *vdev)
{
	for (unsigned int i = 0; i < vdev->num_queues && !vtpu_device_is_away(vdev); i++) {
		struct vtpu_hwq *hwq = vdev->hwq[i];

		if (vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_QSTATUS)) !=
		    VTPU_QUEUE_STATE_RUNNING)
			continue;
		drm_warn(&vdev->drm, "queue %u holds up the device\n", hwq->index);
		vtpu_hwq_hang(hwq);
	}
}
