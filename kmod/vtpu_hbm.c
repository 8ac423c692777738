// SPDX-License-Identifier: GPL-2.0
/* The allocator of device memory. What it hands out is always zero. */

#include <linux/sched.h>
#include <linux/sizes.h>
#include <drm/drm_managed.h>

#include "vtpu_device.h"

static void vtpu_hbm_fini(struct drm_device *drm, void *unused)
{
	drm_mm_takedown(&to_vtpu(drm)->hbm_mm);
}

int vtpu_hbm_init(struct vtpu_device *vdev)
{
	drm_mm_init(&vdev->hbm_mm, 0, vdev->hbm_size);
	return drmm_add_action_or_reset(&vdev->drm, vtpu_hbm_fini, NULL);
}

/*
 * Zeroed here, at allocation, so that no client ever sees what another one
 * left, whatever way the memory was freed.
 */
static int vtpu_hbm_clear(struct vtpu_device *vdev, u64 start, u64 size)
{
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

int vtpu_hbm_alloc(struct vtpu_device *vdev, struct drm_mm_node *node, u64 size)
{
	/* Single pages, page tables most of all, keep to the top and out of the way. */
	bool large = size >= VTPU_HUGE_PAGE_BYTES;
	int ret;

	if (vtpu_inject(vdev, VTPU_INJECT_HBM))
		return -ENOSPC;
	mutex_lock(&vdev->hbm_lock);
	ret = drm_mm_insert_node_generic(&vdev->hbm_mm, node, size,
					 large ? VTPU_HUGE_PAGE_BYTES : VTPU_PAGE_BYTES, 0,
					 large ? DRM_MM_INSERT_BEST : DRM_MM_INSERT_HIGH);
	if (!ret)
		vdev->hbm_used += node->size;
	mutex_unlock(&vdev->hbm_lock);
	if (ret)
		return ret;

	ret = vtpu_hbm_clear(vdev, node->start, node->size);
	if (ret)
		vtpu_hbm_free(vdev, node);
	return ret;
}

void vtpu_hbm_free(struct vtpu_device *vdev, struct drm_mm_node *node)
{
	mutex_lock(&vdev->hbm_lock);
	vdev->hbm_used -= node->size;
	drm_mm_remove_node(node);
	mutex_unlock(&vdev->hbm_lock);
}
