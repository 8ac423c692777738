// SPDX-License-Identifier: GPL-2.0
/*
 * When is a job hung? Its command has executed for longer than its queue's time
 * limit, or gets nowhere: the device counts the instructions that it completes,
 * and how long it executes. So a long job lives, and one that stands still is
 * found early. What is late because the device works for others is neither.
 *
 * The scheduler's timer looks a few times in what a job may stand still.
 */

#include <linux/jiffies.h>
#include <linux/module.h>
#include <drm/drm_print.h>

#include "vtpu_hang.h"
#include "vtpu_job.h"
#include "vtpu_queue.h"
#include "vtpu_reset.h"

#define LOOKS	4	/* while it may stand still */

static unsigned int timeout_ms = 60000;
module_param(timeout_ms, uint, 0644);
MODULE_PARM_DESC(timeout_ms, "Time limit of a command whose queue has none of its own, in ms");

static unsigned int stall_ms = 10000;
module_param(stall_ms, uint, 0644);
MODULE_PARM_DESC(stall_ms, "How long a command whose queue does not say may make no progress, in ms");

static unsigned long vtpu_limit(u32 ms, u32 default_ms)
{
	return max(msecs_to_jiffies(min_t(u32, ms ?: default_ms, DRM_VTPU_MAX_TIMEOUT_MS)), 1UL);
}

/*
 * For the queue's next owner; nothing is in flight. 0: the driver's; but who sets a
 * time limit alone may use it up on one instruction.
 */
void vtpu_hang_set_limits(struct vtpu_hwq *hwq, u32 limit_ms, u32 still_ms)
{
	struct vtpu_progress *progress = &hwq->progress;

	*progress = (struct vtpu_progress){
		.limit = vtpu_limit(limit_ms, READ_ONCE(timeout_ms)),
		.stall = vtpu_limit(still_ms ?: limit_ms, READ_ONCE(stall_ms)),
		.looked = jiffies,
		.since = jiffies,
	};
	hwq->sched.timeout = max(min(progress->limit, progress->stall / LOOKS), 1UL);
}

/*
 * The scheduler's timer starts anew with every job, so one that comes late is not
 * to prolong the life of one that hangs. Under hwq->lock.
 */
bool vtpu_hang_is_due(const struct vtpu_hwq *hwq)
{
	unsigned long from = READ_ONCE(hwq->progress.looked);

	if (time_before(from, hwq->head_since))
		from = hwq->head_since;
	return time_after(jiffies, from + hwq->sched.timeout);
}

static bool vtpu_hwq_in_progress(struct vtpu_hwq *hwq)
{
	u32 state = vtpu_read(hwq->vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_QSTATUS));

	return state == VTPU_QUEUE_STATE_RUNNING || state == VTPU_QUEUE_STATE_PREEMPTED;
}

static bool vtpu_others_in_progress(struct vtpu_hwq *hwq)
{
	struct vtpu_device *vdev = hwq->vdev;

	for (unsigned int i = 0; i < vdev->num_queues; i++)
		if (vdev->hwq[i] != hwq && vtpu_hwq_in_progress(vdev->hwq[i]))
			return true;
	return false;
}

/* Less an eighth, for the way to the device. */
static bool vtpu_is_over(u64 ns, unsigned long limit)
{
	u64 limit_ns = jiffies_to_nsecs(limit);

	return ns >= limit_ns - limit_ns / 8;
}

/* Remembers what is seen; true: it is not what was seen before. */
static bool vtpu_progress_update(struct vtpu_hwq *hwq, u64 command_ns)
{
	struct vtpu_progress *progress = &hwq->progress;
	struct vtpu_device *vdev = hwq->vdev;
	struct vtpu_progress now = *progress;
	struct vtpu_fence *first;
	unsigned long flags;

	now.head = vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_HEAD));
	now.instructions = vtpu_read64(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_INSTRUCTIONS));
	spin_lock_irqsave(&hwq->lock, flags);
	first = list_first_entry_or_null(&hwq->inflight, struct vtpu_fence, link);
	now.job = first ? first->base.seqno : 0;
	now.since = now.job != progress->job ? hwq->head_since : jiffies;
	spin_unlock_irqrestore(&hwq->lock, flags);

	if (now.job == progress->job && now.head == progress->head &&
	    now.instructions == progress->instructions)
		return false;
	now.command_ns = command_ns;
	*progress = now;
	return true;
}

/*
 * Its command executes, or is set aside. The hardware's own watchdog comes first
 * where it is used.
 */
static bool vtpu_command_is_hung(struct vtpu_hwq *hwq)
{
	struct vtpu_device *vdev = hwq->vdev;
	u64 ran = vtpu_read64(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_COMMAND_NS));
	unsigned long limit = hwq->progress.limit;

	if (vtpu_is_over(ran, vtpu_hwq_is_user(hwq) ? 2 * limit : limit)) {
		drm_warn(&vdev->drm, "queue %u is over its time limit, pc 0x%x\n", hwq->index,
			 vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_PC)));
		return true;
	}
	if (vtpu_progress_update(hwq, ran) || ran < hwq->progress.command_ns ||
	    !vtpu_is_over(ran - hwq->progress.command_ns, hwq->progress.stall))
		return false;
	drm_warn(&vdev->drm, "queue %u makes no progress, pc 0x%x\n", hwq->index,
		 vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_PC)));
	return true;
}

/*
 * Of a queue that has work; reset_lock is held. A WAIT that nobody satisfies in the
 * time limit is a hang, too, and so is a device that does nothing for anybody.
 */
bool vtpu_hwq_is_hung(struct vtpu_hwq *hwq)
{
	struct vtpu_progress *progress = &hwq->progress;
	struct vtpu_device *vdev = hwq->vdev;
	unsigned long limit;
	bool waits;

	lockdep_assert_held(&vdev->reset_lock);
	WRITE_ONCE(progress->looked, jiffies);
	if (vtpu_hwq_in_progress(hwq))
		return vtpu_command_is_hung(hwq);

	vtpu_progress_update(hwq, 0);
	/* Where HEAD is at the end there is but what the ring had a round ago. */
	waits = progress->head != READ_ONCE(hwq->tail) &&
		vtpu_hwq_ring(hwq)[progress->head % VTPU_RING_ENTRIES].op == VTPU_CMD_WAIT;
	limit = waits ? progress->limit : min(progress->limit, progress->stall);
	if (!waits && vtpu_others_in_progress(hwq))
		progress->since = jiffies;
	/* Once more: it may have got its turn while we looked. */
	if (vtpu_hwq_in_progress(hwq))
		return false;
	if (vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_QSTATUS)) == VTPU_QUEUE_STATE_READY &&
	    time_before(jiffies, progress->since + limit))
		return false;
	drm_warn(&vdev->drm, "queue %u %s\n", hwq->index, waits ? "waits without end" :
								  "is not served");
	return true;
}

/*
 * Of a queue whose process fills the ring: there alone, nothing is known of
 * what waits. False: it has ended.
 */
bool vtpu_hang_watch_user(struct vtpu_hwq *hwq)
{
	struct vtpu_device *vdev = hwq->vdev;
	bool ok = false;
	int idx;

	mutex_lock(&vdev->reset_lock);
	if (drm_dev_enter(&vdev->drm, &idx)) {
		if (hwq->queue->status == DRM_VTPU_QUEUE_OK && !vtpu_device_is_away(vdev) &&
		    vtpu_hwq_in_progress(hwq) && vtpu_command_is_hung(hwq))
			vtpu_hwq_hang(hwq);
		ok = hwq->queue->status == DRM_VTPU_QUEUE_OK;
		drm_dev_exit(idx);
	}
	mutex_unlock(&vdev->reset_lock);
	return ok;
}
