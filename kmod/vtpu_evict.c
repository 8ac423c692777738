// SPDX-License-Identifier: GPL-2.0
/*
 * When HBM is short: which buffers leave it, and how they come back.
 *
 * A buffer is moved as a whole, by whoever holds residency_lock and nobody
 * else: so a submission that has made its address space resident under it, and
 * holds its dma_resv when it lets go, runs with all its buffers in place. Jobs
 * of address spaces with nothing evicted never come here.
 *
 * What is used least recently goes first, what jobs use not before they are
 * done. Nothing is held while one waits long for that: such a job may itself
 * wait for memory that a process, or a job yet to be submitted, is to write.
 */

#include <linux/list_sort.h>
#include <linux/slab.h>
#include <drm/drm_vma_manager.h>

#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_vm.h"

#define DRAIN_MS	200	/* how long a busy address space is held back at once */
#define DRAIN_TRIES	50	/* and how often, before it is left alone: ENOSPC */
#define DRAIN_CALLS	1000	/* as when buffers come and go all the time */

/* ---- One buffer; residency_lock is held ---- */

static struct vtpu_device *vtpu_bo_device(struct vtpu_bo *bo)
{
	return to_vtpu(bo->shmem.base.dev);
}

/* Is the next mapping of the buffer one of another address space, or none? */
static bool vtpu_mapping_ends_row(struct vtpu_bo *bo, struct vtpu_mapping *mapping)
{
	return list_is_last(&mapping->bo_link, &bo->mappings) ||
	       list_next_entry(mapping, bo_link)->vm != mapping->vm;
}

/* -EBUSY when jobs use it for long. */
static int vtpu_bo_detach(struct vtpu_bo *bo)
{
	struct vtpu_mapping *mapping;

	list_for_each_entry(mapping, &bo->mappings, bo_link) {
		struct dma_resv *resv = &mapping->vm->resv;
		long left;
		int ret;

		ret = dma_resv_lock_interruptible(resv, NULL);
		if (ret)
			return ret;
		left = dma_resv_wait_timeout(resv, DMA_RESV_USAGE_BOOKKEEP, true,
					     msecs_to_jiffies(DRAIN_MS));
		if (left > 0)
			ret = vtpu_mapping_detach(mapping);
		else
			ret = left ?: -EBUSY;
		/* A process may have mapped it a million times. */
		if (!ret && vtpu_mapping_ends_row(bo, mapping))
			vtpu_vm_flush_detached(mapping->vm);
		dma_resv_unlock(resv);
		if (ret)
			return ret;
		cond_resched();
	}
	return 0;
}

static void vtpu_bo_attach(struct vtpu_bo *bo)
{
	struct vtpu_mapping *mapping;

	list_for_each_entry(mapping, &bo->mappings, bo_link)
		vtpu_mapping_attach(mapping);
}

/* First the device is done with it, then processes, then it is saved. */
static int vtpu_bo_evict(struct vtpu_bo *bo)
{
	struct vtpu_device *vdev = vtpu_bo_device(bo);
	int ret;

	mutex_lock(&bo->lock);
	bo->evicted = true;
	ret = vtpu_bo_detach(bo);
	if (!ret) {
		drm_vma_node_unmap(&bo->shmem.base.vma_node, vdev->drm.anon_inode->i_mapping);
		ret = vtpu_bo_save(bo);
	}
	if (ret) {
		bo->evicted = false;
		vtpu_bo_attach(bo);
	} else {
		vtpu_hbm_free(vdev, &bo->hbm);
		mutex_lock(&vdev->hbm_lock);
		vdev->hbm_evicted += bo->shmem.base.size;
		vdev->hbm_evictions++;
		mutex_unlock(&vdev->hbm_lock);
	}
	mutex_unlock(&bo->lock);
	return ret;
}

/* ---- Who has to leave; residency_lock is held ---- */

enum vtpu_use {
	VTPU_IDLE,
	VTPU_IN_JOBS,
	VTPU_PINNED,
};

/* What holds it now; and when it was used last, by a process or by a job. */
static enum vtpu_use vtpu_bo_look_at_use(struct vtpu_bo *bo)
{
	enum vtpu_use use = VTPU_IDLE;
	struct vtpu_mapping *mapping;

	bo->age = bo->last_use;
	list_for_each_entry(mapping, &bo->mappings, bo_link) {
		struct vtpu_vm *vm = mapping->vm;

		bo->age = max(bo->age, READ_ONCE(vm->last_use));
		if (vm->pins)
			use = VTPU_PINNED;
		else if (!dma_resv_test_signaled(&vm->resv, DMA_RESV_USAGE_BOOKKEEP))
			use = max(use, VTPU_IN_JOBS);
	}
	return use;
}

static int vtpu_older_first(void *unused, const struct list_head *a, const struct list_head *b)
{
	const struct vtpu_bo *one = list_entry(a, struct vtpu_bo, candidate);
	const struct vtpu_bo *other = list_entry(b, struct vtpu_bo, candidate);

	return one->age > other->age;
}

static void vtpu_candidates_put(struct list_head *candidates)
{
	struct vtpu_bo *bo, *next;

	list_for_each_entry_safe(bo, next, candidates, candidate) {
		list_del(&bo->candidate);
		drm_gem_object_put(&bo->shmem.base);
	}
}

/*
 * Buffers in HBM that the current validation does not want, held by nothing
 * worse than most; the oldest first, with references. Are there others that
 * cannot leave just now, because they have only come or are about to be freed?
 */
static bool vtpu_candidates_get(struct vtpu_device *vdev, enum vtpu_use most,
				struct list_head *candidates)
{
	struct vtpu_bo *bo, *next;
	bool unsettled = false;
	LIST_HEAD(others);

	mutex_lock(&vdev->hbm_lock);
	list_for_each_entry(bo, &vdev->hbm_buffers, hbm_link) {
		if (bo->evicted || bo->validation == vdev->validation)
			continue;
		if (!bo->raw && kref_get_unless_zero(&bo->shmem.base.refcount))
			list_add_tail(&bo->candidate, candidates);
		else
			unsettled = true;
	}
	mutex_unlock(&vdev->hbm_lock);

	list_for_each_entry_safe(bo, next, candidates, candidate) {
		mutex_lock(&bo->lock);
		if (vtpu_bo_look_at_use(bo) > most)
			list_move(&bo->candidate, &others);
		mutex_unlock(&bo->lock);
	}
	vtpu_candidates_put(&others);
	list_sort(NULL, candidates, vtpu_older_first);
	return unsettled;
}

/* Moves those to victims whose going makes a hole of the size at from or above. */
static int vtpu_choose_victims(struct vtpu_device *vdev, u64 size, u64 from,
			       struct list_head *candidates, struct list_head *victims)
{
	struct vtpu_bo *bo, *next;
	struct drm_mm_scan scan;
	bool found = false;

	mutex_lock(&vdev->hbm_lock);
	drm_mm_scan_init_with_range(&scan, &vdev->hbm_mm, size, vtpu_hbm_alignment(size), 0,
				    from, vdev->hbm_for_buffers, DRM_MM_INSERT_BEST);
	list_for_each_entry_safe(bo, next, candidates, candidate) {
		/* In reverse, as they have to be taken out again. */
		list_move(&bo->candidate, victims);
		found = drm_mm_scan_add_block(&scan, &bo->hbm);
		if (found)
			break;
	}
	list_for_each_entry_safe(bo, next, victims, candidate)
		if (!drm_mm_scan_remove_block(&scan, &bo->hbm))
			list_move(&bo->candidate, candidates);
	mutex_unlock(&vdev->hbm_lock);
	return found ? 0 : -ENOSPC;
}

/* What has the same memory cgroup as one that could not be saved is no candidate any more. */
static void vtpu_spare_alike(struct vtpu_bo *refused)
{
	struct vtpu_device *vdev = vtpu_bo_device(refused);
	struct vtpu_bo *bo;

	mutex_lock(&vdev->hbm_lock);
	list_for_each_entry(bo, &vdev->hbm_buffers, hbm_link)
		if (bo->memcg == refused->memcg)
			bo->validation = vdev->validation;
	mutex_unlock(&vdev->hbm_lock);
}

/* -ENOMEM: one could not be saved, because its creator's memory cgroup is full, say. */
static int vtpu_evict_list(struct list_head *victims)
{
	struct vtpu_bo *bo;
	int ret = 0;

	list_for_each_entry(bo, victims, candidate) {
		ret = vtpu_bo_evict(bo);
		if (ret == -ENOMEM)
			vtpu_spare_alike(bo);
		if (ret)
			break;
	}
	vtpu_candidates_put(victims);
	return ret;
}

static int vtpu_evict_chosen(struct vtpu_device *vdev, u64 size, u64 from, enum vtpu_use most)
{
	LIST_HEAD(candidates);
	LIST_HEAD(victims);
	bool unsettled;
	int ret;

	unsettled = vtpu_candidates_get(vdev, most, &candidates);
	ret = vtpu_choose_victims(vdev, size, from, &candidates, &victims);
	vtpu_candidates_put(&candidates);
	if (ret == -ENOSPC && unsettled)
		return -EAGAIN;
	return ret ?: vtpu_evict_list(&victims);
}

/* All that can leave. */
static int vtpu_evict_all(struct vtpu_device *vdev, enum vtpu_use most)
{
	LIST_HEAD(candidates);
	int ret;

	do {
		vtpu_candidates_get(vdev, most, &candidates);
		ret = vtpu_evict_list(&candidates);
	} while (ret == -ENOMEM);
	return ret;
}

/* A place in HBM, at from or above, if need be where others were. */
static int vtpu_place(struct vtpu_device *vdev, struct drm_mm_node *node, u64 size, u64 from)
{
	bool refused = false;
	int ret;

	if (vtpu_inject(vdev, VTPU_INJECT_HBM))
		return -ENOSPC;
	/* Again, because page tables are allocated without the lock. */
	while ((ret = vtpu_hbm_place(vdev, node, size, from)) == -ENOSPC) {
		ret = vtpu_evict_chosen(vdev, size, from, VTPU_IDLE);
		if (ret == -ENOSPC)
			ret = vtpu_evict_chosen(vdev, size, from, VTPU_IN_JOBS);
		/* Whose owner has no memory stays; others may leave. */
		if (ret == -ENOMEM) {
			refused = true;
			continue;
		}
		if (ret)
			break;
	}
	return ret == -ENOSPC && refused ? -ENOMEM : ret;
}

static int vtpu_bo_restore(struct vtpu_bo *bo)
{
	struct vtpu_device *vdev = vtpu_bo_device(bo);
	int ret;

	if (!bo->evicted)
		return 0;
	ret = vtpu_place(vdev, &bo->hbm, bo->shmem.base.size, 0);
	if (ret)
		return ret;

	mutex_lock(&bo->lock);
	ret = vtpu_bo_load(bo);
	if (ret) {
		vtpu_hbm_free(vdev, &bo->hbm);
	} else {
		vtpu_bo_drop_contents(bo);
		bo->evicted = false;
		bo->last_use = atomic64_inc_return(&vdev->uses);
		vtpu_bo_attach(bo);
		mutex_lock(&vdev->hbm_lock);
		vdev->hbm_evicted -= bo->shmem.base.size;
		mutex_unlock(&vdev->hbm_lock);
	}
	mutex_unlock(&bo->lock);
	return ret;
}

/* ---- An address space; residency_lock is held ---- */

/* Marks its buffers as wanted. How much HBM do they take? */
static u64 vtpu_vm_claim(struct vtpu_vm *vm)
{
	u64 validation = ++vm->vdev->validation;
	struct drm_mm_node *node;
	u64 size = 0;

	mutex_lock(&vm->lock);
	drm_mm_for_each_node(node, &vm->mm) {
		struct vtpu_bo *bo = container_of(node, struct vtpu_mapping, node)->bo;

		if (vtpu_bo_is_hbm(bo) && bo->validation != validation) {
			bo->validation = validation;
			size += bo->shmem.base.size;
		}
	}
	mutex_unlock(&vm->lock);
	return size;
}

/* Its largest evicted buffer, held, or NULL. */
static struct vtpu_bo *vtpu_vm_largest_evicted(struct vtpu_vm *vm)
{
	struct vtpu_mapping *mapping;
	struct vtpu_bo *bo = NULL;

	mutex_lock(&vm->lock);
	list_for_each_entry(mapping, &vm->evicted, evicted_link)
		if (!bo || mapping->bo->shmem.base.size > bo->shmem.base.size)
			bo = mapping->bo;
	if (bo)
		drm_gem_object_get(&bo->shmem.base);
	mutex_unlock(&vm->lock);
	return bo;
}

static int vtpu_vm_restore_buffers(struct vtpu_vm *vm)
{
	struct vtpu_bo *bo;
	int ret = 0;

	while (!ret && (bo = vtpu_vm_largest_evicted(vm))) {
		ret = vtpu_bo_restore(bo);
		drm_gem_object_put(&bo->shmem.base);
	}
	return ret;
}

static int vtpu_vm_make_resident(struct vtpu_vm *vm)
{
	struct vtpu_device *vdev = vm->vdev;
	int ret;

	if (vtpu_vm_claim(vm) > vdev->hbm_for_buffers)
		return -ENOSPC;
	ret = vtpu_vm_restore_buffers(vm);
	if (ret != -ENOSPC)
		return ret;
	/* They lie in each other's way: from the largest on, into an empty HBM. */
	vdev->validation++;
	ret = vtpu_evict_all(vdev, VTPU_IN_JOBS);
	if (ret)
		return ret;
	vtpu_vm_claim(vm);
	return vtpu_vm_restore_buffers(vm);
}

/* ---- From elsewhere ---- */

/*
 * Calls with residency_lock held, again as long as jobs keep busy what is in
 * the way (-EBUSY), or buffers come and go (-EAGAIN). In between everybody else
 * can go on. It is given up when nothing has changed for a while, or when others
 * were quicker every time.
 */
static int vtpu_with_residency(struct vtpu_device *vdev, int (*function)(void *), void *data)
{
	unsigned int tries = 0;
	long ret;

	for (unsigned int calls = 0; tries < DRAIN_TRIES && calls < DRAIN_CALLS; calls++) {
		u64 settlings = READ_ONCE(vdev->hbm_settlings);

		if (calls && signal_pending(current))
			return -ERESTARTSYS;

		ret = mutex_lock_interruptible(&vdev->residency_lock);
		if (ret)
			return ret;
		ret = function(data);
		mutex_unlock(&vdev->residency_lock);
		if (ret == -EAGAIN) {
			ret = wait_event_interruptible_timeout(vdev->hbm_wait,
							       READ_ONCE(vdev->hbm_settlings) !=
							       settlings,
							       msecs_to_jiffies(DRAIN_MS));
			if (ret < 0)
				return ret;
			tries += !ret;
		} else if (ret == -EBUSY) {
			tries++;
		} else {
			return ret;
		}
	}
	return -ENOSPC;
}

static int vtpu_bo_place_locked(void *data)
{
	struct vtpu_bo *bo = data;
	struct vtpu_device *vdev = vtpu_bo_device(bo);
	int ret;

	vdev->validation++;
	ret = vtpu_place(vdev, &bo->hbm, bo->shmem.base.size, 0);
	if (ret)
		return ret;
	mutex_lock(&vdev->hbm_lock);
	list_add_tail(&bo->hbm_link, &vdev->hbm_buffers);
	mutex_unlock(&vdev->hbm_lock);
	return 0;
}

/* A place for a new buffer, which stays there as long as it is raw. */
int vtpu_bo_place(struct vtpu_bo *bo)
{
	return vtpu_with_residency(vtpu_bo_device(bo), vtpu_bo_place_locked, bo);
}

static int vtpu_bo_make_resident_locked(void *data)
{
	struct vtpu_bo *bo = data;

	vtpu_bo_device(bo)->validation++;
	return vtpu_bo_restore(bo);
}

int vtpu_bo_make_resident(struct vtpu_bo *bo)
{
	return vtpu_with_residency(vtpu_bo_device(bo), vtpu_bo_make_resident_locked, bo);
}

struct vtpu_room {
	struct vtpu_device *vdev;
	u64 size;
};

struct vtpu_hole {
	struct list_head link;
	struct drm_mm_node node;
};

/* In pieces: where tables lie strewn there is no large one, and they need none. */
static int vtpu_evict_for_locked(void *data)
{
	const struct vtpu_room *room = data;
	struct vtpu_device *vdev = room->vdev;
	u64 piece = VTPU_HUGE_PAGE_BYTES, left = room->size;
	struct vtpu_hole *hole, *next;
	LIST_HEAD(holes);
	int ret = 0;

	vdev->validation++;
	while (left && !ret) {
		piece = min(piece, left);
		hole = kzalloc(sizeof(*hole), GFP_KERNEL);
		if (!hole) {
			ret = -ENOMEM;
			break;
		}
		ret = vtpu_place(vdev, &hole->node, piece, vdev->hbm_tables_from);
		if (!ret) {
			list_add(&hole->link, &holes);
			left -= piece;
			continue;
		}
		kfree(hole);
		if (ret == -ENOSPC && piece > VTPU_PAGE_BYTES) {
			piece = ALIGN(piece / 2, VTPU_PAGE_BYTES);
			ret = 0;
		}
	}
	list_for_each_entry_safe(hole, next, &holes, link) {
		vtpu_hbm_free(vdev, &hole->node);
		kfree(hole);
	}
	return ret;
}

/* Room for page tables of that size, which the caller then allocates. */
int vtpu_evict_for_tables(struct vtpu_device *vdev, u64 size)
{
	struct vtpu_room room = { vdev, size };

	if (size > vdev->hbm_size - vdev->hbm_tables_from)
		return -ENOSPC;
	return vtpu_with_residency(vdev, vtpu_evict_for_locked, &room);
}

static int vtpu_vm_lock_resident_locked(void *data)
{
	struct vtpu_vm *vm = data;
	int ret;

	ret = vtpu_vm_make_resident(vm);
	if (ret)
		return ret;
	ret = dma_resv_lock_interruptible(&vm->resv, NULL);
	if (ret || list_empty(&vm->evicted))
		return ret;
	/* Another thread has mapped an evicted buffer in between. */
	dma_resv_unlock(&vm->resv);
	return -EBUSY;
}

/* Locks vm->resv with all its buffers in HBM, where they stay until it is unlocked. */
int vtpu_vm_lock_resident(struct vtpu_vm *vm)
{
	int ret;

	ret = dma_resv_lock_interruptible(&vm->resv, NULL);
	if (ret || list_empty(&vm->evicted))
		return ret;
	dma_resv_unlock(&vm->resv);
	return vtpu_with_residency(vm->vdev, vtpu_vm_lock_resident_locked, vm);
}

static int vtpu_vm_pin_locked(void *data)
{
	struct vtpu_vm *vm = data;
	int ret;

	/* First: what is mapped meanwhile is seen either here or there. */
	vm->pins++;
	ret = vtpu_vm_make_resident(vm);
	if (ret)
		vm->pins--;
	return ret;
}

/*
 * The address space's buffers come to HBM and stay, with those that are mapped
 * later: for queues of whose jobs the driver does not know.
 */
int vtpu_vm_pin(struct vtpu_vm *vm)
{
	return vtpu_with_residency(vm->vdev, vtpu_vm_pin_locked, vm);
}

void vtpu_vm_unpin(struct vtpu_vm *vm)
{
	mutex_lock(&vm->vdev->residency_lock);
	vm->pins--;
	mutex_unlock(&vm->vdev->residency_lock);
}

/* Are there jobs, or is there a queue of whose jobs the driver does not know? */
static bool vtpu_vm_in_use(struct vtpu_vm *vm)
{
	return READ_ONCE(vm->pins) ||
	       !dma_resv_test_signaled(&vm->resv, DMA_RESV_USAGE_BOOKKEEP);
}

static int vtpu_vm_keep_resident_locked(void *data)
{
	struct vtpu_vm *vm = data;

	return vtpu_vm_in_use(vm) ? vtpu_vm_make_resident(vm) : 0;
}

/*
 * After something has been mapped: who is at work finds it there. Without evicted
 * buffers that is so already, but for the claim of a queue that pins them.
 */
int vtpu_vm_keep_resident(struct vtpu_vm *vm)
{
	if (!READ_ONCE(vm->pins) && (list_empty(&vm->evicted) || !vtpu_vm_in_use(vm)))
		return 0;
	return vtpu_with_residency(vm->vdev, vtpu_vm_keep_resident_locked, vm);
}
