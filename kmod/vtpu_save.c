// SPDX-License-Identifier: GPL-2.0
/*
 * What HBM holds, in system memory, while the machine sleeps and may cut the
 * device's power. All of it goes back to where it was, page tables among it, so
 * jobs that wait in the schedulers find everything in its place.
 */

#include <linux/gfp.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/xarray.h>

#include "vtpu_device.h"
#include "vtpu_pm.h"

/* Refused rather than at the cost of a process. */
static void *vtpu_save_page_alloc(void)
{
	struct page *page = alloc_page(GFP_KERNEL | __GFP_RETRY_MAYFAIL | __GFP_NOWARN);

	return page ? page_address(page) : NULL;
}

/* Reserved pages are chained by their first words. */
static void vtpu_save_page_reserve(struct vtpu_device *vdev, void *page)
{
	*(void **)page = vdev->save_reserve;
	vdev->save_reserve = page;
}

static void *vtpu_save_page_get(struct vtpu_device *vdev)
{
	void *page = vdev->save_reserve;

	if (!page)
		return vtpu_save_page_alloc();
	vdev->save_reserve = *(void **)page;
	return page;
}

void vtpu_save_drop(struct vtpu_device *vdev)
{
	unsigned long index;
	void *page;

	xa_for_each(&vdev->saved, index, page)
		free_page((unsigned long)page);
	xa_destroy(&vdev->saved);
	while (vdev->save_reserve)
		free_page((unsigned long)vtpu_save_page_get(vdev));
}

/* Memory for all that is in HBM now; for a time when there may be none to be had. */
int vtpu_save_reserve(struct vtpu_device *vdev)
{
	u64 pages;

	mutex_lock(&vdev->hbm_lock);
	pages = vdev->hbm_used >> PAGE_SHIFT;
	mutex_unlock(&vdev->hbm_lock);
	if (pages > si_mem_available())
		return -ENOMEM;
	for (; pages; pages--) {
		void *page = vtpu_save_page_alloc();

		if (!page) {
			vtpu_save_drop(vdev);
			return -ENOMEM;
		}
		vtpu_save_page_reserve(vdev, page);
		cond_resched();
	}
	return 0;
}

static int vtpu_save_one(struct vtpu_device *vdev, u64 offset)
{
	void *page = vtpu_save_page_get(vdev);
	int ret;

	if (!page)
		return -ENOMEM;
	ret = xa_err(xa_store(&vdev->saved, offset >> PAGE_SHIFT, page, GFP_KERNEL));
	if (ret) {
		free_page((unsigned long)page);
		return ret;
	}
	memcpy_fromio(page, vdev->hbm + offset, PAGE_SIZE);
	return 0;
}

/* The device does nothing, processes are frozen. */
int vtpu_save(struct vtpu_device *vdev)
{
	struct drm_mm_node *node;
	int ret = 0;

	mutex_lock(&vdev->hbm_lock);
	drm_mm_for_each_node(node, &vdev->hbm_mm) {
		for (u64 at = node->start; at < node->start + node->size && !ret; at += PAGE_SIZE)
			ret = vtpu_save_one(vdev, at);
		if (ret)
			break;
		cond_resched();
	}
	mutex_unlock(&vdev->hbm_lock);
	if (ret)
		vtpu_save_drop(vdev);
	return ret;
}

/* Nothing if nothing was saved. */
void vtpu_save_restore(struct vtpu_device *vdev)
{
	unsigned long index;
	void *page;

	xa_for_each(&vdev->saved, index, page) {
		__iowrite64_copy(vdev->hbm + ((u64)index << PAGE_SHIFT), page,
				 PAGE_SIZE / sizeof(u64));
		cond_resched();
	}
	wmb();	/* in HBM before contexts are valid */
	vtpu_save_drop(vdev);
}
