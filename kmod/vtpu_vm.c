// SPDX-License-Identifier: GPL-2.0
/* Address spaces: contexts, page tables, mappings. */

#include <linux/overflow.h>
#include <linux/scatterlist.h>
#include <drm/drm_print.h>

#include "vtpu_coredump.h"
#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_queue.h"
#include "vtpu_reset.h"
#include "vtpu_user.h"
#include "vtpu_vm.h"

/* How often room is made for tables: others may be quicker to take it. */
#define TABLE_TRIES	10

/* ---- The device and the tables ---- */

/*
 * After this the device has no way to what the tables no longer map. A program
 * that does not reach an instruction boundary in time loses its queue, and one
 * that even then goes on costs everyone a reset: the memory is about to be
 * someone else's.
 */
static void vtpu_vm_flush(struct vtpu_vm *vm)
{
	struct vtpu_device *vdev = vm->vdev;

	if (READ_ONCE(vdev->wedged) || !vtpu_hw_flush_tlb(vdev, vm->context))
		return;

	mutex_lock(&vdev->reset_lock);
	if (vtpu_read(vdev, VTPU_REG_TLB_PENDING))
		vtpu_device_stop_running(vdev);
	if (!vdev->wedged && vtpu_hw_flush_tlb(vdev, vm->context)) {
		drm_err(&vdev->drm,
			"translations of context %u stay in use, resetting the device\n",
			vm->context);
		vtpu_device_reset(vdev);
	}
	mutex_unlock(&vdev->reset_lock);
}

static void vtpu_vm_free_tables(struct vtpu_vm *vm, struct list_head *dead)
{
	struct vtpu_pt *pt, *next;

	list_for_each_entry_safe(pt, next, dead, dead)
		vtpu_pt_free(vm->vdev, pt);
}

static void vtpu_vm_clear(struct vtpu_vm *vm, u64 va, u64 end)
{
	LIST_HEAD(dead);
	int idx;

	/* A device that is gone reads no tables; the last put frees them. */
	if (!vtpu_dev_enter(vm->vdev, &idx))
		return;
	vtpu_pt_unmap(vm, vm->root, va, end, &dead);
	vtpu_vm_flush(vm);
	vtpu_dev_exit(vm->vdev, idx);
	vtpu_vm_free_tables(vm, &dead);
}

/* Of a mapping that came as far as end: what it has, and the tables that it was to have there. */
static void vtpu_vm_undo_fill(struct vtpu_vm *vm, u64 va, u64 end)
{
	LIST_HEAD(dead);

	vtpu_pt_unmap(vm, vm->root, va, end, &dead);
	vtpu_pt_prune(vm, vm->root, end, &dead);
	if (va == end && list_empty(&dead))
		return;
	vtpu_vm_flush(vm);
	vtpu_vm_free_tables(vm, &dead);
}

/* ---- Mappings ---- */

static int vtpu_vm_fill_host(struct vtpu_mapping *mapping, u64 *va, bool again)
{
	struct vtpu_vm *vm = mapping->vm;
	u64 end = mapping->node.start + mapping->node.size;
	u64 bits = mapping->rights | VTPU_PTE_VALID;
	u64 skip = mapping->bo_offset;
	struct scatterlist *sg;
	unsigned int i;

	for_each_sgtable_dma_sg(mapping->bo->shmem.sgt, sg, i) {
		u64 addr = sg_dma_address(sg);
		u64 size = sg_dma_len(sg);
		int ret;

		if (skip >= size) {
			skip -= size;
			continue;
		}
		size = min(size - skip, end - *va);
		ret = vtpu_pt_map(vm, va, addr + skip, size, bits, again);
		skip = 0;
		if (ret || *va == end)
			return ret;
	}
	/* The table is shorter than the buffer. */
	return -EINVAL;
}

/*
 * Writes the leaves of a mapping, for the first time or again; they are not
 * valid while the buffer is evicted. Where it is must be known to stay.
 */
static int vtpu_vm_fill(struct vtpu_mapping *mapping, bool again)
{
	struct vtpu_vm *vm = mapping->vm;
	struct vtpu_bo *bo = mapping->bo;
	u64 bits = mapping->rights | VTPU_PTE_HBM;
	u64 addr = mapping->bo_offset;
	u64 start = mapping->node.start;
	u64 va = start;
	int ret, idx;

	lockdep_assert_held(&vm->lock);
	if (!vtpu_dev_enter(vm->vdev, &idx))
		return -ENODEV;
	if (vtpu_bo_is_hbm(bo)) {
		if (!bo->evicted) {
			bits |= VTPU_PTE_VALID;
			addr += bo->hbm.start;
		}
		ret = vtpu_pt_map(vm, &va, addr, mapping->node.size, bits, again);
	} else {
		ret = vtpu_vm_fill_host(mapping, &va, again);
	}
	if (ret && !again)
		vtpu_vm_undo_fill(vm, start, va);
	wmb();	/* in HBM before any doorbell */
	vtpu_dev_exit(vm->vdev, idx);
	return ret;
}

/*
 * The buffer is being evicted and no job uses it; vm->resv is held. After this
 * and vtpu_vm_flush_detached() the device cannot reach it, and the next job
 * brings it back before.
 */
int vtpu_mapping_detach(struct vtpu_mapping *mapping)
{
	struct vtpu_vm *vm = mapping->vm;
	int ret;

	dma_resv_assert_held(&vm->resv);
	vtpu_bar_lock(vm->vdev);
	mutex_lock(&vm->lock);
	list_add_tail(&mapping->evicted_link, &vm->evicted);
	ret = vtpu_vm_fill(mapping, true);
	mutex_unlock(&vm->lock);
	vtpu_bar_unlock(vm->vdev);
	return ret;
}

void vtpu_vm_flush_detached(struct vtpu_vm *vm)
{
	int idx;

	vtpu_bar_lock(vm->vdev);
	if (vtpu_dev_enter(vm->vdev, &idx)) {
		vtpu_vm_flush(vm);
		vtpu_dev_exit(vm->vdev, idx);
	}
	vtpu_bar_unlock(vm->vdev);
}

/* The buffer is in HBM again; nothing to do where it was not detached. */
void vtpu_mapping_attach(struct vtpu_mapping *mapping)
{
	struct vtpu_vm *vm = mapping->vm;

	vtpu_bar_lock(vm->vdev);
	mutex_lock(&vm->lock);
	if (!list_empty(&mapping->evicted_link)) {
		vtpu_vm_fill(mapping, true);
		list_del_init(&mapping->evicted_link);
	}
	mutex_unlock(&vm->lock);
	vtpu_bar_unlock(vm->vdev);
}

/* Under the locks of both. The reference to the buffer is the caller's then. */
static void vtpu_mapping_free(struct vtpu_mapping *mapping)
{
	list_del(&mapping->bo_link);
	list_del(&mapping->evicted_link);
	drm_mm_remove_node(&mapping->node);
	kfree(mapping);
}

static int vtpu_vm_insert(struct vtpu_vm *vm, struct vtpu_mapping *mapping)
{
	struct vtpu_bo *bo = mapping->bo;
	int ret;

	if (drm_mm_reserve_node(&vm->mm, &mapping->node)) {
		kfree(mapping);
		return -EEXIST;
	}
	drm_gem_object_get(&bo->shmem.base);
	list_add(&mapping->bo_link, &bo->mappings);
	if (bo->evicted)
		list_add_tail(&mapping->evicted_link, &vm->evicted);

	ret = vtpu_vm_fill(mapping, false);
	if (ret) {
		vtpu_mapping_free(mapping);
		/* Not the last: the caller has one. */
		drm_gem_object_put(&bo->shmem.base);
	}
	return ret;
}

static int vtpu_vm_map_once(struct vtpu_vm *vm, struct vtpu_bo *bo,
			    const struct drm_vtpu_vm_bind *args)
{
	struct vtpu_mapping *mapping;
	int ret;

	mapping = kzalloc(sizeof(*mapping), GFP_KERNEL_ACCOUNT);
	if (!mapping)
		return -ENOMEM;
	mapping->vm = vm;
	mapping->bo = bo;
	mapping->bo_offset = args->bo_offset;
	mapping->node.start = args->va;
	mapping->node.size = args->size;
	INIT_LIST_HEAD(&mapping->evicted_link);
	if (args->flags & DRM_VTPU_VM_READ)
		mapping->rights |= VTPU_PTE_READ;
	if (args->flags & DRM_VTPU_VM_WRITE)
		mapping->rights |= VTPU_PTE_WRITE;
	if (args->flags & DRM_VTPU_VM_EXEC)
		mapping->rights |= VTPU_PTE_EXEC;

	mutex_lock(&bo->lock);
	/* A job that is being submitted finds it evicted, or is found by vtpu_vm_in_use(). */
	dma_resv_lock(&vm->resv, NULL);
	vtpu_bar_lock(vm->vdev);
	mutex_lock(&vm->lock);
	ret = vtpu_vm_insert(vm, mapping);
	mutex_unlock(&vm->lock);
	vtpu_bar_unlock(vm->vdev);
	dma_resv_unlock(&vm->resv);
	mutex_unlock(&bo->lock);
	return ret;
}

static struct vtpu_mapping *vtpu_vm_find(struct vtpu_vm *vm, u64 va, u64 size)
{
	struct drm_mm_node *node;

	drm_mm_for_each_node_in_range(node, &vm->mm, va, va + size) {
		if (node->start == va && node->size == size)
			return container_of(node, struct vtpu_mapping, node);
		break;
	}
	return NULL;
}

static int vtpu_vm_unmap(struct vtpu_vm *vm, u64 va, u64 size)
{
	struct vtpu_mapping *mapping;
	struct vtpu_bo *bo = NULL;
	int ret = -ENOENT;

	/* The buffer's lock comes before that of the VM, which tells the buffer. */
	mutex_lock(&vm->lock);
	mapping = vtpu_vm_find(vm, va, size);
	if (mapping) {
		bo = mapping->bo;
		drm_gem_object_get(&bo->shmem.base);
	}
	mutex_unlock(&vm->lock);
	if (!bo)
		return -ENOENT;

	mutex_lock(&bo->lock);
	vtpu_bar_lock(vm->vdev);
	mutex_lock(&vm->lock);
	mapping = vtpu_vm_find(vm, va, size);
	/* If not, another thread has unmapped it in between. */
	if (mapping && mapping->bo == bo) {
		vtpu_vm_clear(vm, va, va + size);
		vtpu_mapping_free(mapping);
		ret = 0;
	}
	mutex_unlock(&vm->lock);
	vtpu_bar_unlock(vm->vdev);
	mutex_unlock(&bo->lock);

	if (!ret)
		drm_gem_object_put(&bo->shmem.base);
	drm_gem_object_put(&bo->shmem.base);
	return ret;
}

static int vtpu_vm_map_dma(struct vtpu_vm *vm, struct vtpu_bo *bo)
{
	struct sg_table *sgt;
	int idx;

	if (!drm_dev_enter(&vm->vdev->drm, &idx))
		return -ENODEV;
	sgt = vtpu_bo_sgt(bo);
	drm_dev_exit(idx);
	return PTR_ERR_OR_ZERO(sgt);
}

static int vtpu_vm_map(struct vtpu_vm *vm, struct vtpu_bo *bo,
		       const struct drm_vtpu_vm_bind *args)
{
	bool huge = vtpu_bo_is_hbm(bo) && bo->shmem.base.size >= VTPU_HUGE_PAGE_BYTES &&
		    IS_ALIGNED(args->va - args->bo_offset, VTPU_HUGE_PAGE_BYTES);
	u64 leaf = huge ? VTPU_HUGE_PAGE_BYTES : VTPU_PAGE_BYTES;
	/* At most a table for what one of leaves reaches, two at the ends of each level. */
	u64 tables = args->size / (leaf * VTPU_PT_ENTRIES) + 2 * VTPU_PTE_LEVELS;
	int ret;

	/* Ahead, because it takes the buffer's dma_resv. */
	if (!vtpu_bo_is_hbm(bo)) {
		ret = vtpu_vm_map_dma(vm, bo);
		if (ret)
			return ret;
	}
	ret = vtpu_vm_map_once(vm, bo, args);
	for (unsigned int i = 0; ret == -ENOSPC && i < TABLE_TRIES; i++) {
		ret = vtpu_evict_for_tables(vm->vdev, tables * VTPU_PAGE_BYTES);
		if (ret)
			return ret;
		ret = vtpu_vm_map_once(vm, bo, args);
	}
	if (ret)
		return ret == -EDQUOT ? -ENOSPC : ret;
	ret = vtpu_vm_keep_resident(vm);
	if (ret)
		vtpu_vm_unmap(vm, args->va, args->size);
	return ret;
}

int vtpu_vm_bind_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	const u32 rights = DRM_VTPU_VM_READ | DRM_VTPU_VM_WRITE | DRM_VTPU_VM_EXEC;
	const struct drm_vtpu_vm_bind *args = data;
	struct drm_gem_object *obj;
	struct vtpu_vm *vm;
	u64 end;
	int ret;

	if (!args->size || !IS_ALIGNED(args->va | args->size | args->bo_offset, VTPU_PAGE_BYTES) ||
	    check_add_overflow(args->va, args->size, &end) ||
	    args->va < VTPU_VA_START || end > VTPU_VA_END)
		return -EINVAL;

	vm = vtpu_vm_get(file->driver_priv, args->vm_id);
	if (!vm)
		return -ENOENT;

	switch (args->op) {
	case DRM_VTPU_VM_BIND_MAP:
		ret = -EINVAL;
		if (!args->flags || args->flags & ~rights)
			break;
		ret = -ENOENT;
		obj = drm_gem_object_lookup(file, args->handle);
		if (!obj)
			break;
		if (check_add_overflow(args->bo_offset, args->size, &end) || end > obj->size)
			ret = -EINVAL;
		else if (args->flags & DRM_VTPU_VM_WRITE && to_vtpu_bo(obj)->read_only)
			ret = -EACCES;
		else
			ret = vtpu_vm_map(vm, to_vtpu_bo(obj), args);
		drm_gem_object_put(obj);
		break;
	case DRM_VTPU_VM_BIND_UNMAP:
		ret = -EINVAL;
		vtpu_coredump_wait(vm);
		if (!args->handle && !args->flags && !args->bo_offset)
			ret = vtpu_vm_unmap(vm, args->va, args->size);
		break;
	default:
		ret = -EINVAL;
	}
	vtpu_vm_put(vm);
	return ret;
}

/* ---- Life ---- */

static void vtpu_ctx_write(struct vtpu_device *vdev, unsigned int context, u64 value)
{
	vtpu_write64(vdev, VTPU_REG_CTX_ROOT + context * sizeof(u64), value);
}

static int vtpu_vm_take_context(struct vtpu_vm *vm)
{
	struct vtpu_device *vdev = vm->vdev;
	int ret = -ENOSPC;
	int idx;

	if (!vtpu_dev_enter(vdev, &idx))
		return -ENODEV;
	mutex_lock(&vdev->reset_lock);
	for (unsigned int i = 0; i < vdev->num_contexts; i++) {
		if (!vdev->contexts[i]) {
			vdev->contexts[i] = vm;
			vm->context = i;
			vtpu_ctx_write(vdev, i, vm->root->node.start | VTPU_CTX_VALID);
			ret = 0;
			break;
		}
	}
	mutex_unlock(&vdev->reset_lock);
	vtpu_dev_exit(vdev, idx);
	return ret;
}

/* After a device reset; reset_lock is held. HBM keeps its contents. */
void vtpu_vm_restore(struct vtpu_device *vdev)
{
	for (unsigned int i = 0; i < vdev->num_contexts; i++) {
		struct vtpu_vm *vm = vdev->contexts[i];

		if (vm && !vm->lost)
			vtpu_ctx_write(vdev, i, vm->root->node.start | VTPU_CTX_VALID);
	}
}

/* HBM was cleared, the tables with it: what runs in an address space of before faults. */
void vtpu_vm_lose_all(struct vtpu_device *vdev)
{
	lockdep_assert_held(&vdev->reset_lock);
	for (unsigned int i = 0; i < vdev->num_contexts; i++)
		if (vdev->contexts[i])
			vdev->contexts[i]->lost = true;
}

static struct vtpu_pt *vtpu_vm_alloc_root(struct vtpu_device *vdev)
{
	struct vtpu_pt *root;

	vtpu_bar_lock(vdev);
	root = vtpu_pt_alloc_root(vdev);
	vtpu_bar_unlock(vdev);
	return root;
}

static struct vtpu_vm *vtpu_vm_create(struct vtpu_device *vdev, struct vtpu_user *user)
{
	struct vtpu_vm *vm;
	int ret;

	vm = kzalloc(sizeof(*vm), GFP_KERNEL_ACCOUNT);
	if (!vm)
		return ERR_PTR(-ENOMEM);
	vm->vdev = vdev;
	vm->pid = task_tgid_nr(current);
	get_task_comm(vm->comm, current);
	vm->user = user;
	ret = vtpu_user_charge(user, VTPU_USER_CONTEXTS);
	if (ret)
		goto err_free;
	vm->root = vtpu_vm_alloc_root(vdev);
	for (unsigned int i = 0; vm->root == ERR_PTR(-ENOSPC) && i < TABLE_TRIES; i++) {
		ret = vtpu_evict_for_tables(vdev, VTPU_PAGE_BYTES);
		vm->root = ret ? ERR_PTR(ret) : vtpu_vm_alloc_root(vdev);
		if (ret)
			break;
	}
	if (IS_ERR(vm->root)) {
		ret = PTR_ERR(vm->root);
		goto err_user;
	}
	kref_init(&vm->ref);
	mutex_init(&vm->lock);
	INIT_LIST_HEAD(&vm->evicted);
	dma_resv_init(&vm->resv);
	drm_mm_init(&vm->mm, VTPU_VA_START, VTPU_VA_END - VTPU_VA_START);

	/* From here on it can be seen. */
	ret = vtpu_vm_take_context(vm);
	if (!ret)
		return vm;

	drm_mm_takedown(&vm->mm);
	dma_resv_fini(&vm->resv);
	mutex_destroy(&vm->lock);
	vtpu_pt_free(vdev, vm->root);
err_user:
	vtpu_user_uncharge(user, VTPU_USER_CONTEXTS);
err_free:
	kfree(vm);
	return ERR_PTR(ret);
}

static void vtpu_vm_release(struct kref *ref)
{
	struct vtpu_vm *vm = container_of(ref, struct vtpu_vm, ref);
	struct vtpu_device *vdev = vm->vdev;
	struct drm_mm_node *node, *next;
	int idx;

	/*
	 * First the device forgets the tables, then they and the buffers go. The
	 * slot may have its next owner before the flush, which does it no harm.
	 */
	vtpu_bar_lock(vdev);
	if (vtpu_dev_enter(vdev, &idx)) {
		mutex_lock(&vdev->reset_lock);
		vdev->contexts[vm->context] = NULL;
		vtpu_ctx_write(vdev, vm->context, 0);
		mutex_unlock(&vdev->reset_lock);
		vtpu_vm_flush(vm);
		vtpu_dev_exit(vdev, idx);
	} else {
		mutex_lock(&vdev->reset_lock);
		vdev->contexts[vm->context] = NULL;
		mutex_unlock(&vdev->reset_lock);
	}
	vtpu_bar_unlock(vdev);

	/* A buffer that is being evicted still leads here. */
	drm_mm_for_each_node_safe(node, next, &vm->mm) {
		struct vtpu_mapping *mapping = container_of(node, struct vtpu_mapping, node);
		struct vtpu_bo *bo = mapping->bo;

		mutex_lock(&bo->lock);
		mutex_lock(&vm->lock);
		vtpu_mapping_free(mapping);
		mutex_unlock(&vm->lock);
		mutex_unlock(&bo->lock);
		drm_gem_object_put(&bo->shmem.base);
	}
	drm_mm_takedown(&vm->mm);
	vtpu_pt_free(vdev, vm->root);
	dma_resv_fini(&vm->resv);
	mutex_destroy(&vm->lock);
	vtpu_user_uncharge(vm->user, VTPU_USER_CONTEXTS);
	kfree(vm);
}

void vtpu_vm_put(struct vtpu_vm *vm)
{
	kref_put(&vm->ref, vtpu_vm_release);
}

struct vtpu_vm *vtpu_vm_get(struct vtpu_file *vfile, u32 id)
{
	struct vtpu_vm *vm;

	mutex_lock(&vfile->lock);
	vm = xa_load(&vfile->vms, id);
	if (vm)
		kref_get(&vm->ref);
	mutex_unlock(&vfile->lock);
	return vm;
}

int vtpu_vm_create_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct vtpu_file *vfile = file->driver_priv;
	struct drm_vtpu_vm_create *args = data;
	struct vtpu_vm *vm;
	int ret;

	if (args->flags)
		return -EINVAL;

	vm = vtpu_vm_create(to_vtpu(drm), vfile->user);
	if (IS_ERR(vm))
		return PTR_ERR(vm);

	ret = xa_alloc(&vfile->vms, &args->vm_id, vm, XA_LIMIT(1, VTPU_FILE_MAX_VMS),
		       GFP_KERNEL);
	if (ret) {
		vtpu_vm_put(vm);
		return ret == -EBUSY ? -ENOSPC : ret;
	}
	return 0;
}

int vtpu_vm_destroy_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct vtpu_file *vfile = file->driver_priv;
	const struct drm_vtpu_vm_destroy *args = data;
	struct vtpu_vm *vm;
	int ret = 0;

	if (args->pad)
		return -EINVAL;

	mutex_lock(&vfile->lock);
	vm = xa_load(&vfile->vms, args->vm_id);
	if (!vm)
		ret = -ENOENT;
	else if (vm->num_queues)
		ret = -EBUSY;
	else
		xa_erase(&vfile->vms, args->vm_id);
	mutex_unlock(&vfile->lock);

	if (!ret)
		vtpu_vm_put(vm);
	return ret;
}
