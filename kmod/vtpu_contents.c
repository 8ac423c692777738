// SPDX-License-Identifier: GPL-2.0
/*
 * What an evicted buffer holds: pages of shmem, which the kernel may swap out,
 * charged to the memory cgroup of who made the buffer, whoever needs its room.
 */

#include <linux/highmem.h>
#include <linux/io.h>
#include <linux/iosys-map.h>
#include <linux/pagemap.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/shmem_fs.h>
#include <drm/drm_cache.h>

#include "vtpu_compat.h"
#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_pm.h"

/* Between one page and the next a reset of the function may come in between. */
static int vtpu_hbm_read_page(struct vtpu_device *vdev, void *to, u64 from)
{
	struct iosys_map src = IOSYS_MAP_INIT_VADDR_IOMEM(vdev->hbm + from);
	struct iosys_map dst = IOSYS_MAP_INIT_VADDR(to);
	int ret = -ENODEV;
	int idx;

	vtpu_bar_lock(vdev);
	if (vtpu_dev_enter(vdev, &idx)) {
		drm_memcpy_from_wc(&dst, &src, PAGE_SIZE);
		vtpu_dev_exit(vdev, idx);
		ret = 0;
	}
	vtpu_bar_unlock(vdev);
	return ret;
}

static int vtpu_hbm_write_page(struct vtpu_device *vdev, u64 to, const void *from)
{
	int ret = -ENODEV;
	int idx;

	vtpu_bar_lock(vdev);
	if (vtpu_dev_enter(vdev, &idx)) {
		__iowrite64_copy(vdev->hbm + to, from, PAGE_SIZE / sizeof(u64));
		vtpu_dev_exit(vdev, idx);
		ret = 0;
	}
	vtpu_bar_unlock(vdev);
	return ret;
}

static int vtpu_copy_page(struct vtpu_bo *bo, pgoff_t index, bool save)
{
	struct vtpu_device *vdev = to_vtpu(bo->shmem.base.dev);
	u64 place = bo->hbm.start + ((u64)index << PAGE_SHIFT);
	struct folio *folio;
	void *page;
	int ret;

	folio = shmem_read_folio(bo->contents->f_mapping, index);
	if (IS_ERR(folio))
		return PTR_ERR(folio);
	page = kmap_local_folio(folio, offset_in_folio(folio, (loff_t)index << PAGE_SHIFT));
	if (save)
		ret = vtpu_hbm_read_page(vdev, page, place);
	else
		ret = vtpu_hbm_write_page(vdev, place, page);
	kunmap_local(page);
	if (save)
		folio_mark_dirty(folio);
	folio_put(folio);
	return ret;
}

static int vtpu_copy_all(struct vtpu_bo *bo, bool save)
{
	struct mem_cgroup *caller = set_active_memcg(bo->memcg);
	int ret = 0;

	for (pgoff_t i = 0; i < bo->shmem.base.size >> PAGE_SHIFT && !ret; i++) {
		ret = fatal_signal_pending(current) ? -EINTR : vtpu_copy_page(bo, i, save);
		cond_resched();
	}
	set_active_memcg(caller);
	return ret;
}

/*
 * By the buffer's creator, who has it charged, and not when another one needs its
 * room. It has no pages before it is evicted.
 */
int vtpu_bo_contents_init(struct vtpu_bo *bo)
{
	struct file *file;

	file = shmem_file_setup("vtpu", bo->shmem.base.size, VTPU_SHMEM_NORESERVE);
	if (IS_ERR(file))
		return PTR_ERR(file);
	/* To refuse a buffer is better than to kill a process for it. */
	mapping_set_gfp_mask(file->f_mapping,
			     GFP_HIGHUSER_MOVABLE | __GFP_RETRY_MAYFAIL | __GFP_NOWARN);
	bo->contents = file;
	return 0;
}

void vtpu_bo_contents_fini(struct vtpu_bo *bo)
{
	/* At once: the last fput() is put off until the process leaves the kernel. */
	vtpu_bo_drop_contents(bo);
	fput(bo->contents);
}

/* From HBM; under bo->lock, and nothing writes it any more. */
int vtpu_bo_save(struct vtpu_bo *bo)
{
	int ret = vtpu_copy_all(bo, true);

	if (ret)
		vtpu_bo_drop_contents(bo);
	/* Of memory, where it is not overcommitted; it is not HBM that is short. */
	return ret == -ENOSPC ? -ENOMEM : ret;
}

/* To the HBM that the buffer has been given. */
int vtpu_bo_load(struct vtpu_bo *bo)
{
	int ret = vtpu_copy_all(bo, false);

	wmb();	/* in HBM before any doorbell */
	return ret;
}

void vtpu_bo_drop_contents(struct vtpu_bo *bo)
{
	shmem_truncate_range(file_inode(bo->contents), 0, -1);
}
