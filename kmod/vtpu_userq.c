// SPDX-License-Identifier: GPL-2.0
/*
 * Queues whose ring the process fills itself, and whose doorbell it rings. All
 * that it writes there is checked by the device alone: addresses translate
 * through the queue's context, fences go to the one word and interrupts to the
 * one vector that the driver has set.
 */

#include <linux/dma-mapping.h>
#include <linux/mm.h>
#include <linux/sizes.h>
#include <drm/drm_gem.h>
#include <drm/drm_utils.h>
#include <drm/drm_vma_manager.h>

#include "vtpu_compat.h"
#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_hang.h"
#include "vtpu_pm.h"
#include "vtpu_queue.h"
#include "vtpu_userq.h"
#include "vtpu_vm.h"

#define RING_BYTES	(VTPU_RING_ENTRIES * VTPU_RING_ENTRY)

/*
 * A hardware queue's places in the device file's offsets, which begin far below
 * those of buffers. No two queues share one: taking one queue's mappings away
 * leaves all others.
 */
#define MMAP_STRIDE	((u64)SZ_64K)
#define MMAP_RING	0
#define MMAP_FENCE	RING_BYTES
#define MMAP_DOORBELL	(RING_BYTES + PAGE_SIZE)

static_assert(IS_ALIGNED(RING_BYTES, PAGE_SIZE) && MMAP_DOORBELL + PAGE_SIZE <= MMAP_STRIDE);
static_assert((1 + VTPU_NUM_QUEUES) * MMAP_STRIDE <= DRM_FILE_PAGE_OFFSET_START << PAGE_SHIFT);
static_assert(sizeof(struct drm_vtpu_ring_entry) == VTPU_RING_ENTRY);
static_assert(offsetof(struct drm_vtpu_ring_entry, flags) == VTPU_RING_FLAGS);
static_assert(offsetof(struct drm_vtpu_ring_entry, cookie) == VTPU_RING_COOKIE);
static_assert(offsetof(struct drm_vtpu_ring_entry, fence) == VTPU_RING_FENCE);
static_assert(offsetof(struct drm_vtpu_ring_entry, payload) == VTPU_RING_PAYLOAD);
static_assert(DRM_VTPU_RING_FENCE == VTPU_RING_FLAG_FENCE);
static_assert(DRM_VTPU_RING_IRQ == VTPU_RING_FLAG_IRQ);

static u64 vtpu_userq_offset(const struct vtpu_queue *queue)
{
	return (1 + queue->hwq->index) * MMAP_STRIDE;
}

/* ---- Progress ---- */

/* hwq->lock is held. The last value stays known when the page is gone. */
static u64 vtpu_userq_word_locked(struct vtpu_queue *queue)
{
	const struct page *page = queue->userq->pages.fence;
	const __le64 *word;

	lockdep_assert_held(&queue->hwq->lock);
	if (page) {
		word = page_address(page);
		queue->completed = le64_to_cpu(READ_ONCE(*word));
	}
	return queue->completed;
}

/* The word may have changed, or the queue's status. */
void vtpu_userq_progress_locked(struct vtpu_queue *queue)
{
	vtpu_userq_word_locked(queue);
	wake_up_all(&queue->userq->wait);
}

/* 1: reached, 0: not yet, -EIO: never. */
static int vtpu_userq_reached(struct vtpu_queue *queue, u64 value)
{
	int ret = 0;

	spin_lock_irq(&queue->hwq->lock);
	if (vtpu_userq_word_locked(queue) >= value)
		ret = 1;
	else if (queue->status != DRM_VTPU_QUEUE_OK)
		ret = -EIO;
	spin_unlock_irq(&queue->hwq->lock);
	return ret;
}

/*
 * The word is looked at after each interrupt of the queue, and now and then: an
 * interrupt may be lost, or not have been asked for.
 */
int vtpu_queue_wait_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	const struct drm_vtpu_queue_wait *args = data;
	const u64 value = args->value;
	struct vtpu_queue *queue;
	int reached = 0;
	long left, ret;

	if (args->pad)
		return -EINVAL;
	queue = vtpu_queue_get(file->driver_priv, args->queue_id);
	if (!queue)
		return -ENOENT;
	ret = -EINVAL;
	if (!queue->userq)
		goto put;

	do {
		left = drm_timeout_abs_to_jiffies(args->timeout_ns);
		ret = wait_event_interruptible_timeout(queue->userq->wait,
						       (reached = vtpu_userq_reached(queue, value)),
						       min(left, (long)HZ));
	} while (!ret && left > HZ);
	if (ret >= 0)
		ret = reached < 0 ? reached : reached ? 0 : -ETIMEDOUT;
put:
	vtpu_queue_put(queue);
	return ret;
}

/* For reports, while the queue is started. */
const struct vtpu_ring_entry *vtpu_hwq_ring(const struct vtpu_hwq *hwq)
{
	return vtpu_hwq_is_user(hwq) ? page_address(hwq->queue->userq->pages.ring) : hwq->ring;
}

const __le64 *vtpu_hwq_fence_word(const struct vtpu_hwq *hwq)
{
	return vtpu_hwq_is_user(hwq) ? page_address(hwq->queue->userq->pages.fence) :
				       hwq->fence_word;
}

/* ---- Commands that do not end ---- */

u32 vtpu_userq_watchdog_us(const struct vtpu_queue *queue)
{
	return jiffies_to_usecs(queue->hwq->progress.limit);
}

/*
 * The hardware's watchdog ends what executes for too long. This is for what makes no
 * progress, and for hardware that does not: others would wait for it for ever.
 */
static void vtpu_userq_watch(struct work_struct *work)
{
	struct vtpu_userq *userq = container_of(work, struct vtpu_userq, watch.work);
	struct vtpu_hwq *hwq = userq->queue->hwq;

	if (vtpu_hang_watch_user(hwq))
		queue_delayed_work(hwq->vdev->timeout_wq, &userq->watch, hwq->sched.timeout);
}

/* ---- Mappings ---- */

/*
 * What is left of a queue reads zero; what is written there is forgotten. The page
 * of zeroes that all share is only for who can never make the mapping writable.
 */
static vm_fault_t vtpu_userq_fault_revoked(struct vm_fault *vmf, struct vtpu_userq *userq)
{
	struct vm_area_struct *vma = vmf->vma;
	struct page *page = ZERO_PAGE(vmf->address);

	if (vma->vm_flags & VM_MAYWRITE) {
		mutex_lock(&userq->lock);
		if (!userq->dummy)
			userq->dummy = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
		page = userq->dummy;
		mutex_unlock(&userq->lock);
	}
	if (!page)
		return VM_FAULT_OOM;
	return vmf_insert_pfn_prot(vma, vmf->address, page_to_pfn(page),
				   vm_get_page_prot(vma->vm_flags));
}

static unsigned long vtpu_userq_pfn(const struct vtpu_queue *queue, u64 offset)
{
	const struct vtpu_userq *userq = queue->userq;

	if (offset >= MMAP_DOORBELL)
		return (queue->hwq->vdev->doorbell_base + queue->hwq->index * VTPU_PAGE_BYTES) >>
		       PAGE_SHIFT;
	if (offset >= MMAP_FENCE)
		return page_to_pfn(userq->pages.fence);
	return page_to_pfn(userq->pages.ring) + (offset >> PAGE_SHIFT);
}

static vm_fault_t vtpu_userq_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct vtpu_queue *queue = vma->vm_private_data;
	struct vtpu_userq *userq = queue->userq;
	struct vtpu_device *vdev = queue->hwq->vdev;
	u64 offset = ((u64)vmf->pgoff << PAGE_SHIFT) - vtpu_userq_offset(queue);
	vm_fault_t ret = 0;
	int idx;

	vtpu_bar_lock(vdev);
	mutex_lock(&userq->lock);
	if (!userq->revoked && drm_dev_enter(&vdev->drm, &idx)) {
		ret = vmf_insert_pfn(vma, vmf->address, vtpu_userq_pfn(queue, offset));
		drm_dev_exit(idx);
	}
	mutex_unlock(&userq->lock);
	vtpu_bar_unlock(vdev);
	return ret ?: vtpu_userq_fault_revoked(vmf, userq);
}

static void vtpu_userq_vm_open(struct vm_area_struct *vma)
{
	struct vtpu_queue *queue = vma->vm_private_data;

	kref_get(&queue->ref);
}

static void vtpu_userq_vm_close(struct vm_area_struct *vma)
{
	vtpu_queue_put(vma->vm_private_data);
}

static const struct vm_operations_struct vtpu_userq_vm_ops = {
	.fault = vtpu_userq_fault,
	.open = vtpu_userq_vm_open,
	.close = vtpu_userq_vm_close,
};

/*
 * The queue that has this place and is the file's, with a reference. Not through
 * the file's own lock: that of the process's mappings is held.
 */
static struct vtpu_queue *vtpu_userq_find(struct vtpu_device *vdev, struct vtpu_file *owner,
					  u64 offset)
{
	u64 index = offset / MMAP_STRIDE - 1;
	struct vtpu_queue *queue;
	struct vtpu_hwq *hwq;

	if (index >= vdev->num_queues)
		return NULL;
	hwq = vdev->hwq[index];
	spin_lock_irq(&hwq->lock);
	queue = hwq->queue;
	if (queue && queue->userq && queue->userq->owner == owner)
		kref_get(&queue->ref);
	else
		queue = NULL;
	spin_unlock_irq(&hwq->lock);
	return queue;
}

static int vtpu_userq_mmap(struct vtpu_device *vdev, struct vtpu_file *owner,
			   struct vm_area_struct *vma)
{
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT;
	u64 size = vma->vm_end - vma->vm_start;
	struct vtpu_queue *queue;
	int ret = -EINVAL;

	queue = vtpu_userq_find(vdev, owner, offset);
	if (!queue)
		return -EINVAL;
	if (vma_is_cow_mapping(vma) || (vma->vm_flags & VM_EXEC))
		goto put;
	switch (offset % MMAP_STRIDE) {
	case MMAP_RING:
		if (size != RING_BYTES)
			goto put;
		break;
	case MMAP_FENCE:
		if (size != PAGE_SIZE)
			goto put;
		ret = -EACCES;
		if (vma->vm_flags & VM_WRITE)
			goto put;
		vm_flags_clear(vma, VM_MAYWRITE);
		break;
	case MMAP_DOORBELL:
		if (size != PAGE_SIZE)
			goto put;
		vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
		break;
	default:
		goto put;
	}
	/* A child has its own queues, or none. */
	vm_flags_mod(vma, VM_PFNMAP | VM_IO | VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY,
		     VM_MAYEXEC);
	vma->vm_private_data = queue;
	vma->vm_ops = &vtpu_userq_vm_ops;
	return 0;
put:
	vtpu_queue_put(queue);
	return ret;
}

int vtpu_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct drm_file *file = filp->private_data;
	struct drm_device *drm = file->minor->dev;

	if (vma->vm_pgoff >= DRM_FILE_PAGE_OFFSET_START)
		return drm_gem_mmap(filp, vma);
	if (drm_dev_is_unplugged(drm))
		return -ENODEV;
	return vtpu_userq_mmap(to_vtpu(drm), file->driver_priv, vma);
}

int vtpu_queue_map_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_vtpu_queue_map *args = data;
	struct vtpu_queue *queue;
	int ret = -EINVAL;
	u64 offset;

	if (args->pad)
		return -EINVAL;
	queue = vtpu_queue_get(file->driver_priv, args->queue_id);
	if (!queue)
		return -ENOENT;
	if (queue->userq) {
		offset = vtpu_userq_offset(queue);
		args->ring_offset = offset + MMAP_RING;
		args->ring_bytes = RING_BYTES;
		args->fence_offset = offset + MMAP_FENCE;
		args->doorbell_offset = offset + MMAP_DOORBELL;
		ret = 0;
	}
	vtpu_queue_put(queue);
	return ret;
}

/* ---- Life ---- */

static void vtpu_userq_pages_free(struct vtpu_device *vdev, struct vtpu_userq_pages *pages)
{
	struct device *dev = vdev->drm.dev;

	if (pages->ring)
		dma_free_pages(dev, RING_BYTES, pages->ring, pages->ring_dma, DMA_BIDIRECTIONAL);
	if (pages->fence)
		dma_free_pages(dev, PAGE_SIZE, pages->fence, pages->fence_dma, DMA_BIDIRECTIONAL);
	*pages = (struct vtpu_userq_pages){ };
}

/* Before the queue has its hardware, between drm_dev_enter() and drm_dev_exit(). */
int vtpu_userq_init(struct vtpu_device *vdev, struct vtpu_queue *queue, struct vtpu_file *owner)
{
	struct device *dev = vdev->drm.dev;
	struct vtpu_userq_pages *pages;
	struct vtpu_userq *userq;
	int ret = -ENOMEM;

	/* A larger page would hold the doorbells of others. */
	if (PAGE_SIZE != VTPU_PAGE_BYTES)
		return -EOPNOTSUPP;
	/* Nobody would tell the process's mappings what the device has written elsewhere. */
	if (vtpu_dma_bounces(vdev))
		return -EOPNOTSUPP;
	userq = kzalloc(sizeof(*userq), GFP_KERNEL);
	if (!userq)
		return -ENOMEM;
	userq->vdev = vdev;
	userq->owner = owner;
	userq->queue = queue;
	mutex_init(&userq->lock);
	init_waitqueue_head(&userq->wait);
	INIT_DELAYED_WORK(&userq->watch, vtpu_userq_watch);
	queue->userq = userq;

	pages = &userq->pages;
	pages->ring = dma_alloc_pages(dev, RING_BYTES, &pages->ring_dma, DMA_BIDIRECTIONAL,
				      GFP_KERNEL_ACCOUNT);
	pages->fence = dma_alloc_pages(dev, PAGE_SIZE, &pages->fence_dma, DMA_BIDIRECTIONAL,
				       GFP_KERNEL_ACCOUNT);
	if (!pages->ring || !pages->fence)
		goto err_pages;
	/* The process may ring at any time, and use what it has mapped. */
	ret = vtpu_pm_get(vdev);
	if (ret)
		goto err_pages;
	ret = vtpu_vm_pin(queue->vm);
	if (ret)
		goto err_pm;
	memset(page_address(pages->ring), 0, RING_BYTES);
	memset(page_address(pages->fence), 0, PAGE_SIZE);
	return 0;

err_pm:
	vtpu_pm_put(vdev);
err_pages:
	vtpu_userq_pages_free(vdev, pages);
	return ret;
}

/* Of a queue that has no hardware, be it yet or any more. */
void vtpu_userq_fini(struct vtpu_queue *queue)
{
	struct vtpu_userq *userq = queue->userq;

	/* Gone if it had some. */
	vtpu_userq_pages_free(userq->vdev, &userq->pages);
	vtpu_vm_unpin(queue->vm);
	vtpu_pm_put(userq->vdev);
}

/* The last reference is gone, and with it the last mapping. */
void vtpu_userq_release(struct vtpu_queue *queue)
{
	struct vtpu_userq *userq = queue->userq;

	WARN_ON(userq->pages.ring || userq->pages.fence);
	if (userq->dummy)
		__free_page(userq->dummy);
	mutex_destroy(&userq->lock);
	kfree(userq);
}

void vtpu_userq_start(struct vtpu_queue *queue)
{
	struct vtpu_hwq *hwq = queue->hwq;

	queue_delayed_work(hwq->vdev->timeout_wq, &queue->userq->watch, hwq->sched.timeout);
}

/* From here the process reaches neither doorbell nor ring. */
void vtpu_userq_revoke(struct vtpu_queue *queue)
{
	struct vtpu_userq *userq = queue->userq;
	struct vtpu_device *vdev = queue->hwq->vdev;

	cancel_delayed_work_sync(&userq->watch);
	mutex_lock(&userq->lock);
	userq->revoked = true;
	mutex_unlock(&userq->lock);
	unmap_mapping_range(vdev->drm.anon_inode->i_mapping, vtpu_userq_offset(queue),
			    MMAP_STRIDE, 1);
}

/*
 * The device is done with the pages, and no mapping shows them any more. What the
 * fence word was stays known. Under reset_lock, so that this ends before the
 * device's removal does.
 */
void vtpu_userq_drop_pages(struct vtpu_queue *queue)
{
	struct vtpu_hwq *hwq = queue->hwq;
	struct vtpu_userq_pages pages;

	lockdep_assert_held(&hwq->vdev->reset_lock);
	spin_lock_irq(&hwq->lock);
	vtpu_userq_progress_locked(queue);
	pages = queue->userq->pages;
	queue->userq->pages = (struct vtpu_userq_pages){ };
	spin_unlock_irq(&hwq->lock);
	vtpu_userq_pages_free(hwq->vdev, &pages);
}

/* After the unplug: the pages may not outlive the device's DMA. */
void vtpu_userq_drop_all_pages(struct vtpu_device *vdev)
{
	mutex_lock(&vdev->reset_lock);
	for (unsigned int i = 0; i < vdev->num_queues; i++) {
		struct vtpu_queue *queue = vdev->hwq[i]->queue;

		if (queue && queue->userq)
			vtpu_userq_drop_pages(queue);
	}
	mutex_unlock(&vdev->reset_lock);
}
