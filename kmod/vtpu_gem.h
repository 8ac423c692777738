/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_GEM_H_
#define _VTPU_GEM_H_

#include <linux/list.h>
#include <linux/mutex.h>
#include <drm/drm_gem_shmem_helper.h>
#include <drm/drm_mm.h>

struct dma_buf;
struct dma_fence;
struct mem_cgroup;
struct vtpu_device;
struct vtpu_userptr;
struct vtpu_vm;

/*
 * A buffer: system memory through the shmem helpers, be it our own or imported, a
 * contiguous piece of HBM, or pages of a process. HBM uses only the GEM object of
 * shmem, and a process's pages that and its sgt.
 */
struct vtpu_bo {
	struct drm_gem_shmem_object shmem;
	u32 flags;			/* DRM_VTPU_BO_*, fixed at creation */
	bool read_only;			/* not to be written by the device; fixed, too */
	struct vtpu_userptr *userptr;	/* NULL in others; once mapped: dma_lock */
	struct list_head dma_link;	/* vdev->dma_bos while sgt is mapped; dma_lock */
	struct dma_buf *detached;	/* an import's, once import_attach is gone; dma_lock */
	struct page *unplugged;		/* what mappings show once the device is gone; lock */
	struct mutex lock;
	struct list_head mappings;	/* of struct vtpu_mapping; lock */

	/*
	 * Where an HBM buffer is, for who has its lock or residency_lock;
	 * changed only under both.
	 */
	bool evicted;
	struct drm_mm_node hbm;		/* unless evicted */
	struct file *contents;		/* while evicted: shmem, so that it can be swapped out */
	struct mem_cgroup *memcg;	/* the creator's, charged for the contents */

	struct list_head hbm_link;	/* vdev->hbm_buffers; hbm_lock */
	bool raw;			/* not cleared yet, and stays until then; hbm_lock */
	u64 last_use;			/* by vdev->uses, its address spaces' apart; lock */
	u64 age;			/* last use of all; residency_lock */
	u64 validation;			/* the last that wants it; residency_lock */
	struct list_head candidate;	/* for eviction; residency_lock */
};

/* The shmem helpers free what contains the object by its own address. */
static_assert(!offsetof(struct vtpu_bo, shmem));

static inline struct vtpu_bo *to_vtpu_bo(struct drm_gem_object *obj)
{
	return container_of(obj, struct vtpu_bo, shmem.base);
}

static inline bool vtpu_bo_is_hbm(const struct vtpu_bo *bo)
{
	return bo->flags & DRM_VTPU_BO_HBM;
}

/* vtpu_contents.c */
int vtpu_bo_save(struct vtpu_bo *bo);
int vtpu_bo_load(struct vtpu_bo *bo);
void vtpu_bo_drop_contents(struct vtpu_bo *bo);
int vtpu_bo_contents_init(struct vtpu_bo *bo);
void vtpu_bo_contents_fini(struct vtpu_bo *bo);

/* vtpu_evict.c */
int vtpu_evict_for_tables(struct vtpu_device *vdev, u64 size);
int vtpu_bo_place(struct vtpu_bo *bo);
int vtpu_bo_make_resident(struct vtpu_bo *bo);
int vtpu_vm_lock_resident(struct vtpu_vm *vm);
int vtpu_vm_pin(struct vtpu_vm *vm);
void vtpu_vm_unpin(struct vtpu_vm *vm);
int vtpu_vm_keep_resident(struct vtpu_vm *vm);

/* vtpu_gem.c */
void vtpu_bo_init(struct vtpu_bo *bo);
void vtpu_bo_fini(struct vtpu_bo *bo);
struct dma_fence *vtpu_bo_fence(struct vtpu_bo *bo);
struct sg_table *vtpu_bo_sgt(struct vtpu_bo *bo);
void vtpu_bo_track_dma(struct vtpu_bo *bo);
void vtpu_gem_unmap_dma(struct vtpu_device *vdev);
bool vtpu_dma_bounces(struct vtpu_device *vdev);
int vtpu_sgt_check(struct vtpu_device *vdev, struct sg_table *sgt);
struct drm_gem_object *vtpu_gem_create_object(struct drm_device *drm, size_t size);
#if IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE)
unsigned long vtpu_get_unmapped_area(struct file *file, unsigned long addr, unsigned long len,
				     unsigned long pgoff, unsigned long flags);
#else
#define vtpu_get_unmapped_area NULL
#endif
int vtpu_bo_create_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int vtpu_bo_info_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int vtpu_bo_wait_ioctl(struct drm_device *drm, void *data, struct drm_file *file);

#endif
