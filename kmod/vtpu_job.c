// SPDX-License-Identifier: GPL-2.0
/* SUBMIT: from a process's arrays to a job that the scheduler has. */

#include <linux/dma-fence-chain.h>
#include <linux/dma-resv.h>
#include <linux/uaccess.h>
#include <linux/wait_bit.h>
#include <drm/drm_syncobj.h>

#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_job.h"
#include "vtpu_pm.h"
#include "vtpu_queue.h"
#include "vtpu_trace.h"
#include "vtpu_vm.h"

/* A syncobj to signal; chain is made ahead for a point of a timeline. */
struct vtpu_signal {
	struct drm_syncobj *syncobj;
	struct dma_fence_chain *chain;
	u64 point;
};

/* Words of payload that each command uses, bytes of the last one that it does. */
static const struct {
	u8 words;
	u8 last_bytes;
} vtpu_cmd_shape[] = {
	[DRM_VTPU_OP_NOP] = { 0, 0 },
	[DRM_VTPU_OP_RUN] = { 4, 4 },
	[DRM_VTPU_OP_COPY] = { 3, 8 },
	[DRM_VTPU_OP_FILL] = { 3, 4 },
	[DRM_VTPU_OP_WAIT] = { 2, 8 },
	[DRM_VTPU_OP_SIGNAL] = { 2, 8 },
	[DRM_VTPU_OP_TIMESTAMP] = { 1, 8 },
};

static_assert((int)DRM_VTPU_OP_NOP == VTPU_CMD_NOP);
static_assert((int)DRM_VTPU_OP_RUN == VTPU_CMD_RUN);
static_assert((int)DRM_VTPU_OP_COPY == VTPU_CMD_COPY);
static_assert((int)DRM_VTPU_OP_FILL == VTPU_CMD_FILL);
static_assert((int)DRM_VTPU_OP_WAIT == VTPU_CMD_WAIT);
static_assert((int)DRM_VTPU_OP_SIGNAL == VTPU_CMD_SIGNAL);
static_assert((int)DRM_VTPU_OP_TIMESTAMP == VTPU_CMD_TIMESTAMP);

/*
 * Form only. Addresses are the MMU's business: they reach nothing but what the
 * process itself mapped.
 */
static bool vtpu_cmd_valid(const struct drm_vtpu_cmd *cmd)
{
	unsigned int words, last_bytes;

	if (cmd->op < DRM_VTPU_OP_NOP || cmd->op >= ARRAY_SIZE(vtpu_cmd_shape))
		return false;
	words = vtpu_cmd_shape[cmd->op].words;
	last_bytes = vtpu_cmd_shape[cmd->op].last_bytes;
	if (last_bytes == 4 && upper_32_bits(cmd->payload[words - 1]))
		return false;
	return !memchr_inv(cmd->payload + words, 0,
			   sizeof(cmd->payload) - words * sizeof(cmd->payload[0]));
}

static int vtpu_job_read_cmds(struct vtpu_job *job, u64 ptr)
{
	const struct drm_vtpu_cmd __user *user = u64_to_user_ptr(ptr);

	for (unsigned int i = 0; i < job->num_entries; i++) {
		struct vtpu_ring_entry *entry = &job->entries[i];
		struct drm_vtpu_cmd cmd;

		if (copy_from_user(&cmd, user + i, sizeof(cmd)))
			return -EFAULT;
		if (!vtpu_cmd_valid(&cmd))
			return -EINVAL;
		entry->op = cmd.op;
		entry->cookie = cpu_to_le32(cmd.cookie);
		for (unsigned int w = 0; w < ARRAY_SIZE(cmd.payload); w++)
			entry->payload[w] = cpu_to_le64(cmd.payload[w]);
	}
	return 0;
}

void vtpu_job_free(struct vtpu_job *job)
{
	struct vtpu_device *vdev = job->vdev;

	vtpu_fence_free(job->fence);
	atomic_dec(&job->queue->num_jobs);
	vtpu_queue_put(job->queue);
	kfree(job);
	vtpu_pm_put(vdev);
	if (atomic_dec_and_test(&vdev->num_jobs))
		wake_up_var(&vdev->num_jobs);
}

/*
 * Takes over the caller's reference to the queue, also when it fails. The device
 * is awake until the job is freed.
 */
static struct vtpu_job *vtpu_job_alloc(struct vtpu_device *vdev, struct vtpu_queue *queue,
				       unsigned int num_entries)
{
	struct vtpu_job *job;
	int ret = -EBUSY;

	if (atomic_inc_return(&queue->num_jobs) > VTPU_QUEUE_MAX_JOBS)
		goto err_queue;
	ret = vtpu_pm_get(vdev);
	if (ret)
		goto err_queue;
	ret = -ENOMEM;
	job = vtpu_inject(vdev, VTPU_INJECT_MEMORY) ? NULL :
	      kzalloc(struct_size(job, entries, num_entries), GFP_KERNEL_ACCOUNT);
	if (!job)
		goto err_pm;
	atomic_inc(&vdev->num_jobs);
	job->vdev = vdev;
	job->queue = queue;
	job->num_entries = num_entries;
	job->fence = vtpu_fence_alloc();
	if (!job->fence) {
		vtpu_job_free(job);
		return ERR_PTR(-ENOMEM);
	}
	return job;

err_pm:
	vtpu_pm_put(vdev);
err_queue:
	atomic_dec(&queue->num_jobs);
	vtpu_queue_put(queue);
	return ERR_PTR(ret);
}

static int vtpu_signal_init(struct vtpu_signal *signal, const struct drm_vtpu_sync *sync,
			    struct drm_file *file)
{
	if (sync->flags & DRM_VTPU_SYNC_TIMELINE) {
		/* Zero would be the binary payload. */
		if (!sync->point)
			return -EINVAL;
		signal->chain = dma_fence_chain_alloc();
		if (!signal->chain)
			return -ENOMEM;
	}
	signal->point = sync->point;
	signal->syncobj = drm_syncobj_find(file, sync->handle);
	return signal->syncobj ? 0 : -ENOENT;
}

static void vtpu_signals_fini(struct vtpu_signal *signals, unsigned int num)
{
	for (unsigned int i = 0; i < num; i++) {
		dma_fence_chain_free(signals[i].chain);
		if (signals[i].syncobj)
			drm_syncobj_put(signals[i].syncobj);
	}
}

/* Waits become dependencies of the job, signals are collected for later. */
static int vtpu_job_read_syncs(struct vtpu_job *job, struct drm_file *file,
			       const struct drm_vtpu_submit *args,
			       struct vtpu_signal *signals, unsigned int *num_signals)
{
	const struct drm_vtpu_sync __user *user = u64_to_user_ptr(args->syncs);

	for (unsigned int i = 0; i < args->num_syncs; i++) {
		struct drm_vtpu_sync sync;
		int ret;

		if (copy_from_user(&sync, user + i, sizeof(sync)))
			return -EFAULT;
		if (sync.flags & ~(DRM_VTPU_SYNC_SIGNAL | DRM_VTPU_SYNC_TIMELINE))
			return -EINVAL;
		if (!(sync.flags & DRM_VTPU_SYNC_TIMELINE) && sync.point)
			return -EINVAL;

		if (sync.flags & DRM_VTPU_SYNC_SIGNAL) {
			ret = vtpu_signal_init(&signals[(*num_signals)++], &sync, file);
		} else {
			struct dma_fence *fence;

			ret = drm_syncobj_find_fence(file, sync.handle, sync.point, 0, &fence);
			if (!ret)
				ret = drm_sched_job_add_dependency(&job->base, fence);
		}
		if (ret)
			return ret;
	}
	return 0;
}

/*
 * Under the VM's lock, so that the queue's jobs are armed in the order in which
 * they are pushed and none is pushed to a queue that is being killed. After
 * drm_sched_job_arm() nothing may fail.
 */
static int vtpu_job_push(struct vtpu_job *job, struct vtpu_vm *vm, struct dma_fence **done)
{
	struct vtpu_queue *queue = job->queue;
	int ret;

	ret = vtpu_vm_lock_resident(vm);
	if (ret)
		return ret;
	ret = -EIO;
	if (queue->dead || READ_ONCE(queue->status) != DRM_VTPU_QUEUE_OK)
		goto unlock;
	ret = dma_resv_reserve_fences(&vm->resv, 1);
	if (ret)
		goto unlock;

	vm->last_use = atomic64_inc_return(&job->vdev->uses);
	drm_sched_job_arm(&job->base);
	*done = dma_fence_get(&job->base.s_fence->finished);
	dma_resv_add_fence(&vm->resv, *done, DMA_RESV_USAGE_BOOKKEEP);
	trace_vtpu_job_submit(queue->hwq->index, (*done)->context, (*done)->seqno,
			      job->num_entries, le32_to_cpu(job->entries[0].cookie));
	drm_sched_entity_push_job(&job->base);
unlock:
	dma_resv_unlock(&vm->resv);
	return ret;
}

int vtpu_submit_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct vtpu_file *vfile = file->driver_priv;
	const struct drm_vtpu_submit *args = data;
	struct vtpu_device *vdev = to_vtpu(drm);
	struct vtpu_signal *signals = NULL;
	unsigned int num_signals = 0;
	struct dma_fence *done = NULL;
	struct vtpu_queue *queue;
	struct vtpu_job *job;
	struct vtpu_vm *vm;
	int ret;

	if (args->flags & ~DRM_VTPU_SUBMIT_RESTARTABLE || !args->num_cmds ||
	    args->num_cmds > DRM_VTPU_MAX_CMDS || args->num_syncs > DRM_VTPU_MAX_SYNCS)
		return -EINVAL;

	/* The queue drops its VM when it is killed, so both are taken at once. */
	mutex_lock(&vfile->lock);
	queue = xa_load(&vfile->queues, args->queue_id);
	if (queue) {
		kref_get(&queue->ref);
		vm = queue->vm;
		kref_get(&vm->ref);
	}
	mutex_unlock(&vfile->lock);
	if (!queue)
		return -ENOENT;
	if (queue->userq) {
		vtpu_queue_put(queue);
		ret = -EINVAL;
		goto put_vm;
	}

	job = vtpu_job_alloc(vdev, queue, args->num_cmds);
	if (IS_ERR(job)) {
		ret = PTR_ERR(job);
		goto put_vm;
	}
	job->restartable = args->flags & DRM_VTPU_SUBMIT_RESTARTABLE;
	ret = vtpu_job_read_cmds(job, args->cmds);
	if (ret)
		goto free_job;
	ret = drm_sched_job_init(&job->base, &queue->entity, args->num_cmds, vfile,
				 file->client_id);
	if (ret)
		goto free_job;
	if (args->num_syncs) {
		signals = kcalloc(args->num_syncs, sizeof(*signals), GFP_KERNEL);
		ret = signals ? vtpu_job_read_syncs(job, file, args, signals, &num_signals) :
		      -ENOMEM;
		if (ret)
			goto cleanup_job;
	}
	ret = vtpu_job_push(job, vm, &done);
	if (ret)
		goto cleanup_job;

	for (unsigned int i = 0; i < num_signals; i++) {
		struct vtpu_signal *signal = &signals[i];

		if (signal->chain) {
			drm_syncobj_add_point(signal->syncobj, signal->chain, done,
					      signal->point);
			signal->chain = NULL;
		} else {
			drm_syncobj_replace_fence(signal->syncobj, done);
		}
	}
	dma_fence_put(done);
	goto put_signals;

cleanup_job:
	drm_sched_job_cleanup(&job->base);
free_job:
	vtpu_job_free(job);
put_signals:
	vtpu_signals_fini(signals, num_signals);
	kfree(signals);
put_vm:
	vtpu_vm_put(vm);
	return ret;
}
