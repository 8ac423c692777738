// SPDX-License-Identifier: GPL-2.0
/* Hardware queues, and the queues that processes see. */

#include <linux/capability.h>
#include <linux/dma-mapping.h>
#include <linux/iopoll.h>
#include <linux/pci.h>
#include <drm/drm_print.h>

#include "vtpu_hang.h"
#include "vtpu_job.h"
#include "vtpu_queue.h"
#include "vtpu_reset.h"
#include "vtpu_usage.h"
#include "vtpu_user.h"
#include "vtpu_userq.h"
#include "vtpu_vm.h"

#define STOP_POLL_US		10
#define STOP_TIMEOUT_US		(1 * USEC_PER_SEC)

static_assert(sizeof(struct vtpu_ring_entry) == VTPU_RING_ENTRY);
static_assert(offsetof(struct vtpu_ring_entry, op) == VTPU_RING_OP);
static_assert(offsetof(struct vtpu_ring_entry, flags) == VTPU_RING_FLAGS);
static_assert(offsetof(struct vtpu_ring_entry, cookie) == VTPU_RING_COOKIE);
static_assert(offsetof(struct vtpu_ring_entry, fence) == VTPU_RING_FENCE);
static_assert(offsetof(struct vtpu_ring_entry, payload) == VTPU_RING_PAYLOAD);
static_assert(VTPU_RING_LOG2 >= VTPU_RING_LOG2_MIN && VTPU_RING_LOG2 <= VTPU_RING_LOG2_MAX);
static_assert(VTPU_RING_ENTRIES >= DRM_VTPU_MAX_CMDS);

/* ---- Hardware queues ---- */

static void vtpu_hwq_release(struct kref *ref)
{
	struct vtpu_hwq *hwq = container_of(ref, struct vtpu_hwq, ref);

	/* Whoever asks for a fence's name may have it a little longer. */
	kfree_rcu(hwq, rcu);
}

void vtpu_hwq_get(struct vtpu_hwq *hwq)
{
	kref_get(&hwq->ref);
}

void vtpu_hwq_put(struct vtpu_hwq *hwq)
{
	kref_put(&hwq->ref, vtpu_hwq_release);
}

int vtpu_hwq_init(struct vtpu_device *vdev, unsigned int index)
{
	const size_t ring_bytes = VTPU_RING_ENTRIES * sizeof(struct vtpu_ring_entry);
	struct device *dev = vdev->drm.dev;
	struct vtpu_hwq *hwq;

	hwq = kzalloc(sizeof(*hwq), GFP_KERNEL);
	if (!hwq)
		return -ENOMEM;
	kref_init(&hwq->ref);
	hwq->vdev = vdev;
	hwq->index = index;
	hwq->vector = vdev->num_vectors > 1 ? 1 + index % (vdev->num_vectors - 1) : 0;
	snprintf(hwq->name, sizeof(hwq->name), "vtpu-q%u", index);
	hwq->fence_context = dma_fence_context_alloc(1);
	spin_lock_init(&hwq->lock);
	INIT_LIST_HEAD(&hwq->inflight);

	hwq->ring = dmam_alloc_coherent(dev, ring_bytes, &hwq->ring_dma, GFP_KERNEL);
	hwq->fence_word = dmam_alloc_coherent(dev, sizeof(*hwq->fence_word),
					      &hwq->fence_dma, GFP_KERNEL);
	if (!hwq->ring || !hwq->fence_word) {
		kfree(hwq);
		return -ENOMEM;
	}
	/* From here the scheduler's release frees it. */
	vdev->hwq[index] = hwq;
	return vtpu_sched_init(hwq);
}

/* Starts the queue for its owner, with what is in flight; reset_lock is held. */
int vtpu_hwq_start(struct vtpu_hwq *hwq)
{
	struct vtpu_device *vdev = hwq->vdev;
	struct vtpu_queue *queue = hwq->queue;
	struct vtpu_userq *userq = queue->userq;
	unsigned long flags;
	u32 state;

	vtpu_write64(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_RING_BASE),
		     userq ? userq->pages.ring_dma : hwq->ring_dma);
	vtpu_write64(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_FENCE_ADDR),
		     userq ? userq->pages.fence_dma : hwq->fence_dma);
	vtpu_write(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_WATCHDOG_US),
		   userq ? vtpu_userq_watchdog_us(queue) : 0);
	vtpu_write(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_RING_LOG2), VTPU_RING_LOG2);
	vtpu_write(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_CONTEXT), queue->vm->context);
	vtpu_write(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_VECTOR), hwq->vector);
	vtpu_write(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_PRIORITY), queue->priority);
	vtpu_write(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_ENABLE);
	state = vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_QSTATUS));
	if (state != VTPU_QUEUE_STATE_READY) {
		if (!pci_device_is_present(to_pci_dev(vdev->drm.dev)))
			return -ENODEV;
		drm_err(&vdev->drm, "queue %u does not start, state %u\n", hwq->index, state);
		return -EIO;
	}

	spin_lock_irqsave(&hwq->lock, flags);
	hwq->tail = 0;
	hwq->enabled = true;
	vtpu_hwq_restart_busy(hwq);
	vtpu_hwq_push_all_locked(hwq);
	spin_unlock_irqrestore(&hwq->lock, flags);
	return 0;
}

/*
 * Stops the queue for the reason given and returns once the device no longer
 * works for it, or -ETIMEDOUT. reset_lock is held. Jobs in flight are the
 * caller's to signal.
 */
int vtpu_hwq_stop(struct vtpu_hwq *hwq, enum drm_vtpu_queue_status status)
{
	struct vtpu_device *vdev = hwq->vdev;
	unsigned long flags;
	u32 state;
	int ret;

	/* Nothing of a device that was given up is worth waiting for; a link reset stops all. */
	if (vtpu_device_is_away(vdev))
		return 0;

	spin_lock_irqsave(&hwq->lock, flags);
	hwq->enabled = false;
	vtpu_hwq_note_busy(hwq);
	if (hwq->queue && hwq->queue->status == DRM_VTPU_QUEUE_OK)
		hwq->queue->status = status;
	/* Of an idle queue, and so in the ordinary course, it is not counted. */
	if (!list_empty(&hwq->inflight) || status == DRM_VTPU_QUEUE_HUNG)
		atomic64_inc(&vdev->queue_resets);
	spin_unlock_irqrestore(&hwq->lock, flags);

	vtpu_write(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_RESET);
	if (vtpu_inject(vdev, VTPU_INJECT_STOP))
		return -ETIMEDOUT;
	ret = readl_poll_timeout(vdev->regs + vtpu_hwq_reg(hwq, VTPU_REG_Q_QSTATUS), state,
				 state == VTPU_QUEUE_STATE_DISABLED || state == U32_MAX,
				 STOP_POLL_US, STOP_TIMEOUT_US);
	/* All ones come from a device that is no longer there. */
	return state == U32_MAX ? -ENODEV : ret;
}

/* ---- Queues of processes ---- */

static void vtpu_queue_release(struct kref *ref)
{
	struct vtpu_queue *queue = container_of(ref, struct vtpu_queue, ref);

	if (queue->userq)
		vtpu_userq_release(queue);
	kfree(queue);
}

void vtpu_queue_put(struct vtpu_queue *queue)
{
	kref_put(&queue->ref, vtpu_queue_release);
}

struct vtpu_queue *vtpu_queue_get(struct vtpu_file *vfile, u32 id)
{
	struct vtpu_queue *queue;

	mutex_lock(&vfile->lock);
	queue = xa_load(&vfile->queues, id);
	if (queue)
		kref_get(&queue->ref);
	mutex_unlock(&vfile->lock);
	return queue;
}

static void vtpu_hwq_set_owner(struct vtpu_hwq *hwq, struct vtpu_queue *queue)
{
	unsigned long flags;

	spin_lock_irqsave(&hwq->lock, flags);
	if (!queue)
		vtpu_hwq_retire_busy(hwq);
	hwq->queue = queue;
	spin_unlock_irqrestore(&hwq->lock, flags);
}

/*
 * Lends a free hardware queue to a new queue and starts it. If it does not start
 * it is lent nevertheless: queue->hwq.
 */
static int vtpu_queue_take_hwq(struct vtpu_device *vdev, struct vtpu_queue *queue)
{
	int ret = -ENOSPC;
	int idx;

	if (!vtpu_dev_enter(vdev, &idx))
		return -ENODEV;
	/* Not amid a reset, which a user queue does not outlive. */
	vtpu_bar_lock(vdev);
	mutex_lock(&vdev->reset_lock);
	for (unsigned int i = 0; i < vdev->num_queues; i++) {
		struct vtpu_hwq *hwq = vdev->hwq[i];

		if (hwq->queue)
			continue;
		if (vdev->wedged) {
			ret = -EIO;
			break;
		}
		queue->hwq = hwq;
		vtpu_hang_set_limits(hwq, queue->timeout_ms, queue->stall_ms);
		vtpu_hwq_set_owner(hwq, queue);
		ret = vtpu_hwq_start(hwq);
		break;
	}
	mutex_unlock(&vdev->reset_lock);
	vtpu_bar_unlock(vdev);
	vtpu_dev_exit(vdev, idx);
	return ret;
}

static void vtpu_queue_return_hwq(struct vtpu_queue *queue)
{
	struct vtpu_hwq *hwq = queue->hwq;
	struct vtpu_device *vdev = hwq->vdev;
	bool entered;
	int idx;

	entered = vtpu_dev_enter(vdev, &idx);
	mutex_lock(&vdev->reset_lock);
	if (entered)
		vtpu_hwq_force_off(hwq, DRM_VTPU_QUEUE_LOST);
	vtpu_hwq_fail(hwq, DRM_VTPU_QUEUE_LOST, -ECANCELED, -ECANCELED);
	if (queue->userq)
		vtpu_userq_drop_pages(queue);
	vtpu_hwq_set_owner(hwq, NULL);
	mutex_unlock(&vdev->reset_lock);
	if (entered)
		vtpu_dev_exit(vdev, idx);
}

/*
 * Ends the queue: what it has in flight and in line is cancelled, and the
 * device is done with its address space. Bounded, whatever the device does.
 * Jobs that wait for others' fences are freed when these signal.
 */
void vtpu_queue_kill(struct vtpu_queue *queue)
{
	struct vtpu_hwq *hwq = queue->hwq;
	struct vtpu_vm *vm = queue->vm;
	unsigned long flags;

	dma_resv_lock(&vm->resv, NULL);
	queue->dead = true;
	dma_resv_unlock(&vm->resv);

	/* Nothing new enters the scheduler now, and nothing in it the ring. */
	spin_lock_irqsave(&hwq->lock, flags);
	if (queue->status == DRM_VTPU_QUEUE_OK)
		queue->status = DRM_VTPU_QUEUE_LOST;
	spin_unlock_irqrestore(&hwq->lock, flags);

	/*
	 * A scheduler that has just picked the entity would put it back among those
	 * with jobs after it was taken from there, so it stands still meanwhile.
	 */
	drm_sched_wqueue_stop(&hwq->sched);
	drm_sched_entity_fini(&queue->entity);
	if (!READ_ONCE(hwq->vdev->asleep))
		drm_sched_wqueue_start(&hwq->sched);
	if (queue->userq)
		vtpu_userq_revoke(queue);
	vtpu_queue_return_hwq(queue);
	if (queue->userq)
		vtpu_userq_fini(queue);
	vtpu_user_uncharge(queue->user, VTPU_USER_QUEUES);
	queue->vm = NULL;
	vtpu_vm_put(vm);
	vtpu_queue_put(queue);
}

static struct vtpu_queue *vtpu_queue_create(struct vtpu_file *vfile, struct vtpu_vm *vm,
					    const struct drm_vtpu_queue_create *args)
{
	struct vtpu_device *vdev = vm->vdev;
	struct drm_gpu_scheduler *sched;
	struct vtpu_queue *queue;
	int ret;

	queue = kzalloc(sizeof(*queue), GFP_KERNEL);
	if (!queue)
		return ERR_PTR(-ENOMEM);
	kref_init(&queue->ref);
	kref_get(&vm->ref);
	queue->vm = vm;
	queue->priority = args->priority;
	queue->timeout_ms = args->timeout_ms;
	queue->stall_ms = args->stall_ms;
	queue->pid = task_tgid_nr(current);
	get_task_comm(queue->comm, current);
	queue->fault_pc = U32_MAX;
	queue->file = vfile;
	queue->user = vfile->user;

	ret = vtpu_user_charge(queue->user, VTPU_USER_QUEUES);
	if (ret)
		goto err_free;
	if (args->flags & DRM_VTPU_QUEUE_USER) {
		ret = vtpu_userq_init(vdev, queue, vfile);
		if (ret)
			goto err_user;
	}
	ret = vtpu_queue_take_hwq(vdev, queue);
	if (ret && !queue->hwq)
		goto err_pages;
	if (ret)
		goto err_hwq;
	sched = &queue->hwq->sched;
	ret = drm_sched_entity_init(&queue->entity, DRM_SCHED_PRIORITY_NORMAL, &sched, 1, NULL);
	if (ret)
		goto err_hwq;
	if (queue->userq)
		vtpu_userq_start(queue);
	return queue;

err_hwq:
	/* Another thread may have found and mapped it already. */
	if (queue->userq)
		vtpu_userq_revoke(queue);
	vtpu_queue_return_hwq(queue);
err_pages:
	if (queue->userq)
		vtpu_userq_fini(queue);
err_user:
	vtpu_user_uncharge(queue->user, VTPU_USER_QUEUES);
err_free:
	vtpu_vm_put(vm);
	vtpu_queue_put(queue);
	return ERR_PTR(ret);
}

int vtpu_queue_create_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct vtpu_file *vfile = file->driver_priv;
	struct drm_vtpu_queue_create *args = data;
	struct vtpu_queue *queue;
	struct vtpu_vm *vm;
	int ret, idx;

	if (args->flags & ~DRM_VTPU_QUEUE_USER || args->priority > DRM_VTPU_PRIORITY_HIGH ||
	    args->timeout_ms > DRM_VTPU_MAX_TIMEOUT_MS ||
	    args->stall_ms > DRM_VTPU_MAX_TIMEOUT_MS)
		return -EINVAL;
	if (args->priority == DRM_VTPU_PRIORITY_HIGH && !capable(CAP_SYS_NICE))
		return -EPERM;

	/* A user queue's pages are not to be made while the device goes. */
	if (!vtpu_dev_enter(to_vtpu(drm), &idx))
		return -ENODEV;
	mutex_lock(&vfile->lock);
	vm = xa_load(&vfile->vms, args->vm_id);
	if (!vm) {
		ret = -ENOENT;
		goto unlock;
	}
	/* The slot first: a file at its limit takes no hardware queue at all. */
	ret = xa_alloc(&vfile->queues, &args->queue_id, NULL,
		       XA_LIMIT(1, VTPU_FILE_MAX_QUEUES), GFP_KERNEL);
	if (ret) {
		ret = ret == -EBUSY ? -ENOSPC : ret;
		goto unlock;
	}
	queue = vtpu_queue_create(vfile, vm, args);
	if (IS_ERR(queue)) {
		xa_erase(&vfile->queues, args->queue_id);
		ret = PTR_ERR(queue);
		goto unlock;
	}
	xa_store(&vfile->queues, args->queue_id, queue, GFP_KERNEL);
	vm->num_queues++;
unlock:
	mutex_unlock(&vfile->lock);
	vtpu_dev_exit(to_vtpu(drm), idx);
	return ret;
}

int vtpu_queue_destroy_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct vtpu_file *vfile = file->driver_priv;
	const struct drm_vtpu_queue_destroy *args = data;
	struct vtpu_queue *queue;

	if (args->pad)
		return -EINVAL;

	mutex_lock(&vfile->lock);
	queue = xa_erase(&vfile->queues, args->queue_id);
	if (queue)
		queue->vm->num_queues--;
	mutex_unlock(&vfile->lock);
	if (!queue)
		return -ENOENT;

	vtpu_queue_kill(queue);
	return 0;
}

int vtpu_queue_state_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_vtpu_queue_state *args = data;
	struct vtpu_queue *queue;

	queue = vtpu_queue_get(file->driver_priv, args->queue_id);
	if (!queue)
		return -ENOENT;

	spin_lock_irq(&queue->hwq->lock);
	if (queue->userq)
		vtpu_userq_progress_locked(queue);
	args->status = queue->status;
	args->fault_cause = queue->fault_cause;
	args->fault_access = queue->fault_access;
	args->fault_addr = queue->fault_addr;
	args->fault_pc = queue->fault_pc;
	args->fault_cookie = queue->fault_cookie;
	args->completed = queue->completed;
	spin_unlock_irq(&queue->hwq->lock);
	vtpu_queue_put(queue);
	return 0;
}
