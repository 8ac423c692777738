// SPDX-License-Identifier: GPL-2.0
/*
 * What each client uses: the device's time, as the device counts it, and memory.
 *
 * A hardware queue counts what it executed since it was enabled, and belongs to
 * one client at a time. So the count is read once more before the queue is
 * reset, and kept with the queue, then with its file.
 */

#include <drm/drm_file.h>
#include <drm/drm_gem.h>
#include <drm/drm_print.h>

#include "vtpu_compat.h"
#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_queue.h"
#include "vtpu_regs.h"
#include "vtpu_usage.h"
#include "vtpu_vm.h"

/* Under hwq->lock, with the device within reach. */
void vtpu_hwq_note_busy(struct vtpu_hwq *hwq)
{
	u64 now;

	if (!hwq->queue)
		return;
	now = vtpu_read64(hwq->vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_BUSY_NS));
	/* All ones come from a device that is no longer there. */
	if (now != U64_MAX && now > hwq->queue->busy_now)
		hwq->queue->busy_now = now;
}

/* Before the device goes where nobody may look; it has nothing in flight. */
void vtpu_note_busy(struct vtpu_device *vdev)
{
	for (unsigned int i = 0; i < vdev->num_queues; i++) {
		struct vtpu_hwq *hwq = vdev->hwq[i];
		unsigned long flags;

		spin_lock_irqsave(&hwq->lock, flags);
		vtpu_hwq_note_busy(hwq);
		spin_unlock_irqrestore(&hwq->lock, flags);
	}
}

/* Under hwq->lock: the device begins to count anew. */
void vtpu_hwq_restart_busy(struct vtpu_hwq *hwq)
{
	hwq->queue->busy_before += hwq->queue->busy_now;
	hwq->queue->busy_now = 0;
}

/* Under hwq->lock: the queue is about to lose its owner. */
void vtpu_hwq_retire_busy(struct vtpu_hwq *hwq)
{
	u64 busy = hwq->queue->busy_before + hwq->queue->busy_now;

	atomic64_add(busy, &hwq->queue->file->busy_ns);
	atomic64_add(busy, &hwq->vdev->busy_ns);
}

/* Of one file, or of all: never less than it was. A sleeping device is left alone. */
u64 vtpu_busy_ns(struct vtpu_device *vdev, const struct vtpu_file *vfile)
{
	const atomic64_t *retired = vfile ? &vfile->busy_ns : &vdev->busy_ns;
	u64 before, sum;
	int ret, idx;

	ret = vtpu_peek_begin(vdev, &idx);
	do {
		before = atomic64_read(retired);
		sum = before;
		for (unsigned int i = 0; i < vdev->num_queues; i++) {
			struct vtpu_hwq *hwq = vdev->hwq[i];
			unsigned long flags;

			spin_lock_irqsave(&hwq->lock, flags);
			if (hwq->queue && (!vfile || hwq->queue->file == vfile)) {
				if (!ret)
					vtpu_hwq_note_busy(hwq);
				sum += hwq->queue->busy_before + hwq->queue->busy_now;
			}
			spin_unlock_irqrestore(&hwq->lock, flags);
		}
		/* A queue that has retired meanwhile may be counted twice or not at all. */
	} while (atomic64_read(retired) != before);
	if (!ret)
		vtpu_peek_end(vdev, idx);
	return sum;
}

/* Nobody waits to look: one that is being moved, or reached for amid a reset, is active. */
static bool vtpu_bo_is_active(struct vtpu_bo *bo)
{
	struct vtpu_mapping *mapping;
	bool active = false;

	if (!mutex_trylock(&bo->lock))
		return true;
	list_for_each_entry(mapping, &bo->mappings, bo_link) {
		active = !dma_resv_test_signaled(&mapping->vm->resv, DMA_RESV_USAGE_BOOKKEEP);
		if (active)
			break;
	}
	mutex_unlock(&bo->lock);
	return active;
}

static void vtpu_add_bo(struct drm_memory_stats *stats, struct drm_gem_object *obj)
{
	struct vtpu_bo *bo = to_vtpu_bo(obj);

	if (drm_gem_object_is_shared_for_memory_stats(obj))
		stats->shared += obj->size;
	else
		stats->private += obj->size;
	if (vtpu_bo_is_hbm(bo) ? !READ_ONCE(bo->evicted) : bo->shmem.pages || bo->shmem.sgt)
		stats->resident += obj->size;
	if (vtpu_bo_is_active(bo))
		stats->active += obj->size;
}

/* Documentation/gpu/drm-usage-stats.rst */
void vtpu_show_fdinfo(struct drm_printer *p, struct drm_file *file)
{
	struct vtpu_file *vfile = file->driver_priv;
	struct drm_memory_stats hbm = {}, system = {};
	struct drm_gem_object *obj;
	int id = 0;

	drm_printf(p, "drm-engine-tpu:\t%llu ns\n",
		   vtpu_busy_ns(to_vtpu(file->minor->dev), vfile));

	for (;; id++) {
		spin_lock(&file->table_lock);
		obj = idr_get_next(&file->object_idr, &id);
		if (obj)
			drm_gem_object_get(obj);
		spin_unlock(&file->table_lock);
		if (!obj)
			break;
		vtpu_add_bo(vtpu_bo_is_hbm(to_vtpu_bo(obj)) ? &hbm : &system, obj);
		drm_gem_object_put(obj);
	}
	drm_print_memory_stats(p, &hbm, DRM_GEM_OBJECT_RESIDENT | DRM_GEM_OBJECT_ACTIVE, "hbm");
	drm_print_memory_stats(p, &system, DRM_GEM_OBJECT_RESIDENT | DRM_GEM_OBJECT_ACTIVE,
			       "system");
}
