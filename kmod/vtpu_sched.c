// SPDX-License-Identifier: GPL-2.0
/* Between the DRM scheduler and the rings: pushing jobs, and completing them. */

#include <linux/module.h>
#include <linux/wait_bit.h>
#include <drm/drm_managed.h>
#include <drm/drm_print.h>

#include "vtpu_device.h"
#include "vtpu_hang.h"
#include "vtpu_job.h"
#include "vtpu_queue.h"
#include "vtpu_reset.h"
#include "vtpu_trace.h"
#include "vtpu_userq.h"

/* ---- Fences of the device ---- */

static const char *vtpu_fence_driver_name(struct dma_fence *fence)
{
	return "vtpu";
}

static const char *vtpu_fence_timeline_name(struct dma_fence *fence)
{
	return container_of(fence, struct vtpu_fence, base)->hwq->name;
}

/* The module stays while a sync_file may call the fence's ops, or the scheduler's. */
struct vtpu_fence *vtpu_fence_alloc(void)
{
	struct vtpu_fence *fence = kzalloc(sizeof(*fence), GFP_KERNEL_ACCOUNT);

	if (fence)
		__module_get(THIS_MODULE);
	return fence;
}

/* Of a job that nobody has heard of. */
void vtpu_fence_free(struct vtpu_fence *fence)
{
	if (!fence)
		return;
	kfree(fence);
	module_put(THIS_MODULE);
}

static void vtpu_fence_release(struct dma_fence *base)
{
	struct vtpu_fence *fence = container_of(base, struct vtpu_fence, base);

	vtpu_hwq_put(fence->hwq);
	kfree_rcu(fence, base.rcu);
	module_put(THIS_MODULE);
}

static const struct dma_fence_ops vtpu_fence_ops = {
	.get_driver_name = vtpu_fence_driver_name,
	.get_timeline_name = vtpu_fence_timeline_name,
	.release = vtpu_fence_release,
};

/* Under hwq->lock. */
static void vtpu_fence_init(struct vtpu_fence *fence, struct vtpu_hwq *hwq, u64 context,
			    u64 seqno)
{
	vtpu_hwq_get(hwq);
	fence->hwq = hwq;
	dma_fence_init(&fence->base, &vtpu_fence_ops, &hwq->lock, context, seqno);
}

static void vtpu_fence_finish(struct vtpu_fence *fence, int error)
{
	lockdep_assert_held(&fence->hwq->lock);
	list_del(&fence->link);
	fence->hwq->head_since = jiffies;
	if (error)
		dma_fence_set_error(&fence->base, error);
	trace_vtpu_job_done(fence->hwq->index, fence->base.seqno, error);
	dma_fence_signal_locked(&fence->base);
	dma_fence_put(&fence->base);
}

/*
 * Of no job yet: it is taken back, lest it end one that comes later. The next one
 * that the device writes is right, or it is a hang.
 */
static void vtpu_hwq_distrust_fence(struct vtpu_hwq *hwq, u64 done)
{
	struct vtpu_fence *first = list_first_entry(&hwq->inflight, struct vtpu_fence, link);

	drm_err(&hwq->vdev->drm, "queue %u: fence %llu is written, the last job has %llu\n",
		hwq->index, done, hwq->seq);
	cmpxchg(hwq->fence_word, cpu_to_le64(done), cpu_to_le64(first->base.seqno - 1));
}

void vtpu_hwq_complete_locked(struct vtpu_hwq *hwq)
{
	struct vtpu_fence *fence, *next;
	u64 done;

	if (vtpu_hwq_is_user(hwq))
		vtpu_userq_progress_locked(hwq->queue);
	/* With nothing in flight the word may be gone, with the device. */
	if (list_empty(&hwq->inflight))
		return;
	done = le64_to_cpu(READ_ONCE(*hwq->fence_word));
	/* What the jobs wrote is seen after the word that says so. */
	dma_rmb();
	if (done > hwq->seq) {
		vtpu_hwq_distrust_fence(hwq, done);
		return;
	}
	list_for_each_entry_safe(fence, next, &hwq->inflight, link) {
		if (fence->base.seqno > done)
			break;
		if (hwq->queue)
			hwq->queue->completed++;
		vtpu_fence_finish(fence, 0);
	}
}

/* Signals what the device has finished; from its interrupt or instead of it. */
void vtpu_hwq_complete(struct vtpu_hwq *hwq)
{
	unsigned long flags;

	spin_lock_irqsave(&hwq->lock, flags);
	vtpu_hwq_complete_locked(hwq);
	spin_unlock_irqrestore(&hwq->lock, flags);
}

/*
 * Ends the queue's life as a good one: what is finished is finished, the first
 * job in flight gets one error and those behind it another.
 */
void vtpu_hwq_fail_locked(struct vtpu_hwq *hwq, enum drm_vtpu_queue_status status,
			  int first, int rest)
{
	struct vtpu_fence *fence, *next;
	int error = first;

	vtpu_hwq_complete_locked(hwq);
	if (hwq->queue && hwq->queue->status == DRM_VTPU_QUEUE_OK)
		hwq->queue->status = status;
	list_for_each_entry_safe(fence, next, &hwq->inflight, link) {
		vtpu_fence_finish(fence, error);
		error = rest;
	}
}

void vtpu_hwq_fail(struct vtpu_hwq *hwq, enum drm_vtpu_queue_status status,
		   int first, int rest)
{
	unsigned long flags;

	spin_lock_irqsave(&hwq->lock, flags);
	vtpu_hwq_fail_locked(hwq, status, first, rest);
	spin_unlock_irqrestore(&hwq->lock, flags);
}

/* ---- The ring ---- */

/* There is room: the scheduler's credits count entries. Under hwq->lock. */
static void vtpu_hwq_push_locked(struct vtpu_hwq *hwq, struct vtpu_fence *fence)
{
	struct vtpu_job *job = fence->job;
	const struct dma_fence *finished = &job->base.s_fence->finished;

	job->first_entry = hwq->tail;
	for (unsigned int i = 0; i < job->num_entries; i++)
		hwq->ring[(hwq->tail + i) % VTPU_RING_ENTRIES] = job->entries[i];
	hwq->tail += job->num_entries;
	trace_vtpu_job_run(hwq->index, finished->context, finished->seqno, fence->base.seqno,
			   job->first_entry, hwq->tail, le32_to_cpu(job->entries[0].cookie));
}

/* writel() orders the ring before it. */
static void vtpu_hwq_ring_doorbell(struct vtpu_hwq *hwq)
{
	writel(hwq->tail, hwq->vdev->doorbells + hwq->index * VTPU_PAGE_BYTES);
}

/* Into a ring that is empty, after a reset. */
void vtpu_hwq_push_all_locked(struct vtpu_hwq *hwq)
{
	struct vtpu_fence *fence;

	lockdep_assert_held(&hwq->lock);
	if (list_empty(&hwq->inflight))
		return;
	list_for_each_entry(fence, &hwq->inflight, link)
		vtpu_hwq_push_locked(hwq, fence);
	hwq->head_since = jiffies;
	vtpu_hwq_ring_doorbell(hwq);
}

/* ---- The scheduler's calls ---- */

/*
 * A queue that is no longer good takes nothing, and the error ends the job. While
 * the device is being reset the job is in flight already: whoever starts the queue
 * again finds it there.
 */
static struct dma_fence *vtpu_run_job(struct drm_sched_job *sched_job)
{
	struct vtpu_job *job = to_vtpu_job(sched_job);
	struct vtpu_queue *queue = job->queue;
	struct vtpu_hwq *hwq = queue->hwq;
	struct vtpu_device *vdev = job->vdev;
	struct vtpu_fence *fence = job->fence;
	struct vtpu_ring_entry *last;
	unsigned long flags;
	int idx;

	if (!drm_dev_enter(&vdev->drm, &idx))
		return ERR_PTR(-ENODEV);

	spin_lock_irqsave(&hwq->lock, flags);
	if (queue->status != DRM_VTPU_QUEUE_OK || READ_ONCE(vdev->wedged)) {
		if (queue->status == DRM_VTPU_QUEUE_OK)
			queue->status = DRM_VTPU_QUEUE_LOST;
		spin_unlock_irqrestore(&hwq->lock, flags);
		drm_dev_exit(idx);
		return ERR_PTR(-ECANCELED);
	}

	vtpu_fence_init(fence, hwq, hwq->fence_context, ++hwq->seq);
	last = &job->entries[job->num_entries - 1];
	last->flags = VTPU_RING_FLAG_FENCE | VTPU_RING_FLAG_IRQ;
	last->fence = cpu_to_le64(fence->base.seqno);
	fence->job = job;
	if (list_empty(&hwq->inflight))
		hwq->head_since = jiffies;
	else if (vtpu_hang_is_due(hwq))
		drm_sched_fault(&hwq->sched);
	if (hwq->enabled)
		vtpu_hwq_push_locked(hwq, fence);

	/* One reference for the list, one for the scheduler. */
	list_add_tail(&fence->link, &hwq->inflight);
	dma_fence_get(&fence->base);
	job->fence = NULL;

	if (hwq->enabled) {
		vtpu_hwq_ring_doorbell(hwq);
		/* A short job may be over already: here that costs less than its interrupt. */
		vtpu_hwq_complete_locked(hwq);
	}
	spin_unlock_irqrestore(&hwq->lock, flags);
	drm_dev_exit(idx);
	return &fence->base;
}

/*
 * The scheduler's fence of a job that was ended before it ran: its timeline is
 * named by the hardware queue, which the device's fence holds.
 */
static void vtpu_job_hold_name(struct vtpu_job *job)
{
	struct vtpu_fence *fence = job->fence;
	struct vtpu_hwq *hwq = job->queue->hwq;
	unsigned long flags;

	spin_lock_irqsave(&hwq->lock, flags);
	vtpu_fence_init(fence, hwq, dma_fence_context_alloc(1), 1);
	dma_fence_signal_locked(&fence->base);
	spin_unlock_irqrestore(&hwq->lock, flags);
	job->fence = NULL;
	/* As the scheduler sets it: who sets a deadline may be reading it. */
	smp_store_release(&job->base.s_fence->parent, &fence->base);
}

static void vtpu_free_job(struct drm_sched_job *sched_job)
{
	struct vtpu_job *job = to_vtpu_job(sched_job);

	if (job->fence)
		vtpu_job_hold_name(job);
	drm_sched_job_cleanup(sched_job);
	vtpu_job_free(job);
}

/* Is the job, of whom the scheduler says that it is late, still with the device? */
static bool vtpu_job_inflight(struct vtpu_hwq *hwq, struct drm_sched_job *sched_job)
{
	unsigned long flags;
	bool inflight;

	/* Signalled jobs wait to be freed, and the queue may have a new owner. */
	if (dma_fence_is_signaled(&sched_job->s_fence->finished))
		return false;
	spin_lock_irqsave(&hwq->lock, flags);
	inflight = !list_empty(&hwq->inflight);
	spin_unlock_irqrestore(&hwq->lock, flags);
	return inflight;
}

/*
 * The scheduler is not stopped: jobs leave the ring only by their fences, which
 * are ours to signal, and a queue that is not OK lets none in. So this job goes
 * back on the list, and the scheduler frees it with the others once they have
 * signalled.
 */
static enum drm_gpu_sched_stat vtpu_timedout_job(struct drm_sched_job *sched_job)
{
	struct vtpu_hwq *hwq = container_of(sched_job->sched, struct vtpu_hwq, sched);
	struct vtpu_device *vdev = hwq->vdev;
	int idx;

	mutex_lock(&vdev->reset_lock);
	if (drm_dev_enter(&vdev->drm, &idx)) {
		/* A lost interrupt is no hang. */
		vtpu_hwq_complete(hwq);
		if (!vtpu_device_is_away(vdev)) {
			vtpu_hwq_fault(hwq);
			if (vtpu_job_inflight(hwq, sched_job) && vtpu_hwq_is_hung(hwq))
				vtpu_hwq_hang(hwq);
		}
		drm_dev_exit(idx);
	} else {
		vtpu_hwq_fail(hwq, DRM_VTPU_QUEUE_LOST, -ENODEV, -ENODEV);
	}
	mutex_unlock(&vdev->reset_lock);

#ifdef VTPU_HAVE_SCHED_NO_HANG
	return DRM_GPU_SCHED_STAT_NO_HANG;
#else
	/*
	 * It may have signalled while off the list, when nobody could free it. The
	 * scheduler itself may have been stopped meanwhile, and stays so. Once the
	 * lock is given up the job may be gone.
	 */
	spin_lock(&hwq->sched.job_list_lock);
	list_add(&sched_job->list, &hwq->sched.pending_list);
	queue_work(hwq->sched.submit_wq, &hwq->sched.work_free_job);
	spin_unlock(&hwq->sched.job_list_lock);
	return DRM_GPU_SCHED_STAT_NOMINAL;
#endif
}

static const struct drm_sched_backend_ops vtpu_sched_ops = {
	.run_job = vtpu_run_job,
	.timedout_job = vtpu_timedout_job,
	.free_job = vtpu_free_job,
};

/* ---- Life ---- */

/* The last file is closed, so jobs only wait for others' fences, or to be freed. */
static void vtpu_sched_fini(struct drm_device *drm, void *data)
{
	struct vtpu_device *vdev = to_vtpu(drm);
	struct vtpu_hwq *hwq = data;

	wait_var_event(&vdev->num_jobs, !atomic_read(&vdev->num_jobs));
	drm_sched_fini(&hwq->sched);
	vtpu_hwq_put(hwq);
}

int vtpu_sched_init(struct vtpu_hwq *hwq)
{
	const struct drm_sched_init_args args = {
		.ops = &vtpu_sched_ops,
		.submit_wq = hwq->vdev->submit_wq,
		.num_rqs = DRM_SCHED_PRIORITY_COUNT,
		.credit_limit = VTPU_RING_ENTRIES,
		.timeout = MAX_SCHEDULE_TIMEOUT,	/* see vtpu_hang_set_limits() */
		.timeout_wq = hwq->vdev->timeout_wq,
		.name = hwq->name,
		.dev = hwq->vdev->drm.dev,
	};
	int ret;

	ret = drm_sched_init(&hwq->sched, &args);
	if (ret) {
		vtpu_hwq_put(hwq);
		return ret;
	}
	return drmm_add_action_or_reset(&hwq->vdev->drm, vtpu_sched_fini, hwq);
}
