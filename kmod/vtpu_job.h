/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_JOB_H_
#define _VTPU_JOB_H_

#include <linux/dma-fence.h>
#include <drm/gpu_scheduler.h>

#include "vtpu_queue.h"

/*
 * The device's part of a job. The list of jobs in flight holds one reference,
 * so that whoever takes it off the list can signal it.
 */
struct vtpu_fence {
	struct dma_fence base;
	struct vtpu_hwq *hwq;		/* held from initialisation on */
	struct vtpu_job *job;		/* there until the fence has signalled */
	struct list_head link;		/* hwq->inflight; hwq->lock */
};

struct vtpu_job {
	struct drm_sched_job base;
	struct vtpu_device *vdev;
	struct vtpu_queue *queue;
	struct vtpu_fence *fence;	/* made ahead; NULL once the job is in the ring */
	bool restartable;		/* may run again when it was half done */
	u32 first_entry;		/* in the ring, as HEAD counts; hwq->lock */
	unsigned int num_entries;
	struct vtpu_ring_entry entries[] __counted_by(num_entries);
};

static inline struct vtpu_job *to_vtpu_job(struct drm_sched_job *job)
{
	return container_of(job, struct vtpu_job, base);
}

/* vtpu_sched.c */
struct vtpu_fence *vtpu_fence_alloc(void);
void vtpu_fence_free(struct vtpu_fence *fence);
void vtpu_hwq_complete(struct vtpu_hwq *hwq);
void vtpu_hwq_complete_locked(struct vtpu_hwq *hwq);
void vtpu_hwq_push_all_locked(struct vtpu_hwq *hwq);
void vtpu_hwq_fail_locked(struct vtpu_hwq *hwq, enum drm_vtpu_queue_status status,
			  int first, int rest);
void vtpu_hwq_fail(struct vtpu_hwq *hwq, enum drm_vtpu_queue_status status,
		   int first, int rest);

/* vtpu_job.c */
void vtpu_job_free(struct vtpu_job *job);
int vtpu_submit_ioctl(struct drm_device *drm, void *data, struct drm_file *file);

#endif
