// SPDX-License-Identifier: GPL-2.0
/* The allocator of device memory. What it hands out to processes is always zero. */

#include <linux/sched.h>
#include <linux/sizes.h>
#include <drm/drm_managed.h>

#include "vtpu_device.h"

/*
 * The top of HBM is kept for page tables, which cannot move: among buffers they
 * would cut HBM into pieces for good. It holds the tables of twice as much
 * memory as HBM is, in small pages. More of them take the place of buffers, but
 * of those in the last quarter only: a large buffer always finds the rest whole.
 */
#define TABLES_SHARE	256
#define TABLES_AT_MOST	4

static void vtpu_hbm_fini(struct drm_device *drm, void *unused)
{
	drm_mm_takedown(&to_vtpu(drm)->hbm_mm);
}

int vtpu_hbm_init(struct vtpu_device *vdev)
{
	vdev->hbm_for_buffers = vdev->hbm_size - vdev->hbm_size / TABLES_SHARE;
	vdev->hbm_tables_from = vdev->hbm_size - vdev->hbm_size / TABLES_AT_MOST;
	INIT_LIST_HEAD(&vdev->hbm_buffers);
	init_waitqueue_head(&vdev->hbm_wait);
	drm_mm_init(&vdev->hbm_mm, 0, vdev->hbm_size);
	return drmm_add_action_or_reset(&vdev->drm, vtpu_hbm_fini, NULL);
}

/*
 * Zeroed here, at allocation, so that no client ever sees what another one
 * left, whatever way the memory was freed. Under bar_sem.
 */
int vtpu_hbm_clear(struct vtpu_device *vdev, const struct drm_mm_node *node)
{
	u64 start = node->start;
	u64 size = node->size;
	int idx;

	if (!vtpu_dev_enter(vdev, &idx))
		return -ENODEV;
	while (size) {
		size_t chunk = min_t(u64, size, SZ_1M);

		/* Whole words: memset_io() may go byte by byte, as emulators do too. */
		for (size_t i = 0; i < chunk; i += sizeof(u64))
			__raw_writeq(0, vdev->hbm + start + i);
		start += chunk;
		size -= chunk;
		cond_resched();
	}
	vtpu_dev_exit(vdev, idx);
	return 0;
}

static int vtpu_hbm_insert(struct vtpu_device *vdev, struct drm_mm_node *node, u64 size,
			   u64 from, u64 end, enum drm_mm_insert_mode mode)
{
	int ret;

	mutex_lock(&vdev->hbm_lock);
	ret = drm_mm_insert_node_in_range(&vdev->hbm_mm, node, size, vtpu_hbm_alignment(size),
					  0, from, end, mode);
	if (!ret)
		vdev->hbm_used += node->size;
	mutex_unlock(&vdev->hbm_lock);
	return ret;
}

/* A place for a buffer at from or above, with whatever was there before. */
int vtpu_hbm_place(struct vtpu_device *vdev, struct drm_mm_node *node, u64 size, u64 from)
{
	/* Small ones keep out of the way of those that need huge pages. */
	bool large = vtpu_hbm_alignment(size) > VTPU_PAGE_BYTES;

	return vtpu_hbm_insert(vdev, node, size, from, vdev->hbm_for_buffers,
			       large ? DRM_MM_INSERT_BEST : DRM_MM_INSERT_HIGH);
}

/* A page of zeroes for a table; under bar_sem. */
int vtpu_hbm_alloc_table(struct vtpu_device *vdev, struct drm_mm_node *node)
{
	int ret;

	if (vtpu_inject(vdev, VTPU_INJECT_HBM))
		return -ENOSPC;
	ret = vtpu_hbm_insert(vdev, node, VTPU_PAGE_BYTES, vdev->hbm_tables_from, vdev->hbm_size,
			      DRM_MM_INSERT_HIGH);
	if (ret)
		return ret;
	ret = vtpu_hbm_clear(vdev, node);
	if (ret)
		vtpu_hbm_free(vdev, node);
	return ret;
}

void vtpu_hbm_free_locked(struct vtpu_device *vdev, struct drm_mm_node *node)
{
	lockdep_assert_held(&vdev->hbm_lock);
	vdev->hbm_used -= node->size;
	drm_mm_remove_node(node);
	vtpu_hbm_settled(vdev);
}

void vtpu_hbm_free(struct vtpu_device *vdev, struct drm_mm_node *node)
{
	mutex_lock(&vdev->hbm_lock);
	vtpu_hbm_free_locked(vdev, node);
	mutex_unlock(&vdev->hbm_lock);
}

/* Under hbm_lock: there is more free, or more that can be evicted, than before. */
void vtpu_hbm_settled(struct vtpu_device *vdev)
{
	lockdep_assert_held(&vdev->hbm_lock);
	WRITE_ONCE(vdev->hbm_settlings, vdev->hbm_settlings + 1);
	wake_up_all(&vdev->hbm_wait);
}
