// SPDX-License-Identifier: GPL-2.0
/*
 * Buffers made of a process's own memory.
 *
 * The pages are pinned for as long as the buffer lives, not the addresses: what
 * the process unmaps or discards stays the device's, and what it then finds
 * there are other pages. A fork gives the child copies.
 */

#include <linux/capability.h>
#include <linux/dma-mapping.h>
#include <linux/mm.h>
#include <linux/overflow.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/sched/user.h>
#include <linux/uaccess.h>
#include <drm/drm_prime.h>

#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_userptr.h"

#define PIN_STEP	SZ_64K

/* By user, so that neither a fork nor another file gets around the limit. */
static int vtpu_userptr_charge(struct vtpu_userptr *up)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
	long locked;

	up->user = get_uid(current_user());
	locked = atomic_long_read(&up->user->locked_vm);
	do {
		if (locked + up->num_pages > limit && !capable(CAP_IPC_LOCK)) {
			free_uid(up->user);
			return -ENOMEM;
		}
	} while (!atomic_long_try_cmpxchg(&up->user->locked_vm, &locked, locked + up->num_pages));

	up->mm = current->mm;
	mmgrab(up->mm);
	atomic64_add(up->num_pages, &up->mm->pinned_vm);
	return 0;
}

static void vtpu_userptr_uncharge(struct vtpu_userptr *up)
{
	atomic64_sub(up->num_pages, &up->mm->pinned_vm);
	mmdrop(up->mm);
	atomic_long_sub(up->num_pages, &up->user->locked_vm);
	free_uid(up->user);
}

static void vtpu_userptr_unpin(struct vtpu_userptr *up)
{
	unpin_user_pages_dirty_lock(up->pages, up->num_pages, up->writable);
	kvfree(up->pages);
	vtpu_userptr_uncharge(up);
	kfree(up);
}

static int vtpu_userptr_pin_pages(struct vtpu_userptr *up, unsigned long addr)
{
	const unsigned int flags = FOLL_LONGTERM | (up->writable ? FOLL_WRITE : 0);
	unsigned long done = 0;

	while (done < up->num_pages) {
		int ret = pin_user_pages_fast(addr + done * PAGE_SIZE,
					      min_t(unsigned long, up->num_pages - done, PIN_STEP),
					      flags, up->pages + done);

		if (ret <= 0) {
			unpin_user_pages(up->pages, done);
			return ret ?: -EFAULT;
		}
		done += ret;
	}
	return 0;
}

static struct vtpu_userptr *vtpu_userptr_pin(const struct drm_vtpu_bo_userptr *args)
{
	struct vtpu_userptr *up;
	int ret;

	up = kzalloc(sizeof(*up), GFP_KERNEL_ACCOUNT);
	if (!up)
		return ERR_PTR(-ENOMEM);
	up->num_pages = args->size >> PAGE_SHIFT;
	up->writable = !(args->flags & DRM_VTPU_USERPTR_READ_ONLY);

	/* The charge first: it bounds what the rest may cost. */
	ret = vtpu_userptr_charge(up);
	if (ret)
		goto err_free;
	up->pages = kvmalloc_array(up->num_pages, sizeof(*up->pages), GFP_KERNEL_ACCOUNT);
	if (!up->pages) {
		ret = -ENOMEM;
		goto err_uncharge;
	}
	ret = vtpu_userptr_pin_pages(up, args->addr);
	if (ret)
		goto err_pages;
	return up;

err_pages:
	kvfree(up->pages);
err_uncharge:
	vtpu_userptr_uncharge(up);
err_free:
	kfree(up);
	return ERR_PTR(ret);
}

static enum dma_data_direction vtpu_userptr_dir(const struct vtpu_userptr *up)
{
	return up->writable ? DMA_BIDIRECTIONAL : DMA_TO_DEVICE;
}

/*
 * No copies at either end: pages that need some are refused, and then what the
 * process wrote in the meantime is not to be overwritten with an old one.
 */
static int vtpu_userptr_map_dma(struct vtpu_bo *bo)
{
	struct drm_device *drm = bo->shmem.base.dev;
	struct vtpu_userptr *up = bo->userptr;
	struct sg_table *sgt;
	int ret, idx;

	sgt = drm_prime_pages_to_sg(drm, up->pages, up->num_pages);
	if (IS_ERR(sgt))
		return PTR_ERR(sgt);
	if (!drm_dev_enter(drm, &idx)) {
		ret = -ENODEV;
		goto err_sgt;
	}
	ret = dma_map_sgtable(drm->dev, sgt, vtpu_userptr_dir(up), DMA_ATTR_SKIP_CPU_SYNC);
	if (!ret) {
		bo->shmem.sgt = sgt;
		vtpu_bo_track_dma(bo);
	}
	drm_dev_exit(idx);
	if (!ret)
		return vtpu_sgt_check(to_vtpu(drm), sgt);

err_sgt:
	sg_free_table(sgt);
	kfree(sgt);
	return ret;
}

/* The last use of the pages: by the buffer's end, or that of the device. */
void vtpu_userptr_unmap_dma(struct vtpu_bo *bo)
{
	struct vtpu_userptr *up = bo->userptr;

	dma_unmap_sgtable(bo->shmem.base.dev->dev, bo->shmem.sgt, vtpu_userptr_dir(up),
			  DMA_ATTR_SKIP_CPU_SYNC);
	sg_free_table(bo->shmem.sgt);
	kfree(bo->shmem.sgt);
	bo->shmem.sgt = NULL;
	vtpu_userptr_unpin(up);
	bo->userptr = NULL;
}

static void vtpu_userptr_bo_free(struct drm_gem_object *obj)
{
	struct vtpu_bo *bo = to_vtpu_bo(obj);

	vtpu_bo_fini(bo);
	if (bo->userptr)
		vtpu_userptr_unpin(bo->userptr);
	drm_gem_object_release(obj);
	kfree(bo);
}

/* Whoever else got the pages could keep them, at the expense of their owner. */
static struct dma_buf *vtpu_userptr_export(struct drm_gem_object *obj, int flags)
{
	return ERR_PTR(-EPERM);
}

static const struct drm_gem_object_funcs vtpu_userptr_bo_funcs = {
	.free = vtpu_userptr_bo_free,
	.export = vtpu_userptr_export,
};

int vtpu_bo_userptr_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_vtpu_bo_userptr *args = data;
	struct vtpu_userptr *up;
	struct vtpu_bo *bo;
	u64 end;
	int ret;

	if (args->flags & ~DRM_VTPU_USERPTR_READ_ONLY || !args->size ||
	    !PAGE_ALIGNED(args->addr | args->size) ||
	    check_add_overflow(args->addr, args->size, &end))
		return -EINVAL;
	if (!access_ok(u64_to_user_ptr(args->addr), args->size))
		return -EFAULT;
	if (args->size >> PAGE_SHIFT > min_t(unsigned long, totalram_pages(), INT_MAX))
		return -ENOMEM;

	bo = kzalloc(sizeof(*bo), GFP_KERNEL_ACCOUNT);
	if (!bo)
		return -ENOMEM;
	up = vtpu_userptr_pin(args);
	if (IS_ERR(up)) {
		kfree(bo);
		return PTR_ERR(up);
	}
	vtpu_bo_init(bo);
	bo->userptr = up;
	bo->read_only = !up->writable;
	bo->shmem.base.funcs = &vtpu_userptr_bo_funcs;
	drm_gem_private_object_init(drm, &bo->shmem.base, args->size);

	ret = vtpu_userptr_map_dma(bo);
	if (!ret)
		ret = drm_gem_handle_create(file, &bo->shmem.base, &args->handle);
	drm_gem_object_put(&bo->shmem.base);
	return ret;
}
