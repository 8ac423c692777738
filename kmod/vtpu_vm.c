// SPDX-License-Identifier: GPL-2.0
/* Address spaces: contexts, page tables, mappings. */

#include <linux/overflow.h>
#include <linux/scatterlist.h>
#include <drm/drm_print.h>

#include "vtpu_coredump.h"
#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_queue.h"
#include "vtpu_user.h"
#include "vtpu_vm.h"

#define PT_ENTRIES	(VTPU_PAGE_BYTES / sizeof(u64))
#define PT_ROOT_LEVEL	(VTPU_PTE_LEVELS - 1)

/* ---- Page tables, under bar_sem and vm->lock, between vtpu_dev_enter and _exit ---- */

static u64 vtpu_pt_span(unsigned int level)
{
	return (u64)VTPU_PAGE_BYTES << (level * ilog2(PT_ENTRIES));
}

static unsigned int vtpu_pt_index(u64 va, unsigned int level)
{
	return (va / vtpu_pt_span(level)) % PT_ENTRIES;
}

static void vtpu_pt_set(struct vtpu_vm *vm, struct vtpu_pt *pt, unsigned int i, u64 entry)
{
	writeq(entry, vm->vdev->hbm + pt->node.start + i * sizeof(u64));
}

static struct vtpu_pt *vtpu_pt_alloc(struct vtpu_device *vdev, unsigned int level)
{
	struct vtpu_pt *pt;
	int ret;

	pt = kzalloc(struct_size(pt, child, level ? PT_ENTRIES : 0), GFP_KERNEL);
	if (!pt)
		return ERR_PTR(-ENOMEM);
	pt->level = level;
	ret = vtpu_hbm_alloc(vdev, &pt->node, VTPU_PAGE_BYTES);
	if (ret) {
		kfree(pt);
		return ERR_PTR(ret);
	}
	return pt;
}

static void vtpu_pt_free(struct vtpu_device *vdev, struct vtpu_pt *pt)
{
	for (unsigned int i = 0; pt->level && i < PT_ENTRIES; i++) {
		if (pt->child[i])
			vtpu_pt_free(vdev, pt->child[i]);
	}
	vtpu_hbm_free(vdev, &pt->node);
	kfree(pt);
}

/* The table of a level that covers an address, made when there is none. */
static struct vtpu_pt *vtpu_pt_get(struct vtpu_vm *vm, u64 va, unsigned int level)
{
	struct vtpu_pt *pt = vm->root;

	while (pt->level > level) {
		unsigned int i = vtpu_pt_index(va, pt->level);

		if (!pt->child[i]) {
			struct vtpu_pt *child = vtpu_pt_alloc(vm->vdev, pt->level - 1);

			if (IS_ERR(child))
				return child;
			/* The device may walk here at once: zeroes first. */
			wmb();
			vtpu_pt_set(vm, pt, i, child->node.start | VTPU_PTE_VALID);
			pt->child[i] = child;
			pt->used++;
		}
		pt = pt->child[i];
	}
	return pt;
}

/* Makes [*va, *va + size) reach addr on; *va moves past what was done. */
static int vtpu_pt_map(struct vtpu_vm *vm, u64 *va, u64 addr, u64 size, u64 bits)
{
	while (size) {
		bool huge = IS_ALIGNED(*va | addr, VTPU_HUGE_PAGE_BYTES) &&
			    size >= VTPU_HUGE_PAGE_BYTES;
		u64 step = huge ? VTPU_HUGE_PAGE_BYTES : VTPU_PAGE_BYTES;
		struct vtpu_pt *pt = vtpu_pt_get(vm, *va, huge);

		if (IS_ERR(pt))
			return PTR_ERR(pt);
		vtpu_pt_set(vm, pt, vtpu_pt_index(*va, pt->level),
			    addr | bits | (huge ? VTPU_PTE_HUGE : 0));
		pt->used++;
		*va += step;
		addr += step;
		size -= step;
	}
	return 0;
}

/*
 * Clears the leaves of a range that is wholly mapped. Tables that this empties
 * go to a list: the device may be in the middle of walking them.
 */
static void vtpu_pt_unmap(struct vtpu_vm *vm, struct vtpu_pt *pt, u64 va, u64 end,
			  struct list_head *dead)
{
	u64 span = vtpu_pt_span(pt->level);
	u64 next;

	for (; va < end; va = next) {
		unsigned int i = vtpu_pt_index(va, pt->level);
		struct vtpu_pt *child = pt->level ? pt->child[i] : NULL;

		next = min(ALIGN_DOWN(va, span) + span, end);
		if (child) {
			vtpu_pt_unmap(vm, child, va, next, dead);
			if (child->used)
				continue;
			pt->child[i] = NULL;
			list_add(&child->dead, dead);
		}
		vtpu_pt_set(vm, pt, i, 0);
		pt->used--;
	}
}

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

static void vtpu_vm_clear(struct vtpu_vm *vm, u64 va, u64 end)
{
	struct vtpu_pt *pt, *next;
	LIST_HEAD(dead);
	int idx;

	/* A device that is gone reads no tables; the last put frees them. */
	if (va == end || !vtpu_dev_enter(vm->vdev, &idx))
		return;
	vtpu_pt_unmap(vm, vm->root, va, end, &dead);
	vtpu_vm_flush(vm);
	vtpu_dev_exit(vm->vdev, idx);

	list_for_each_entry_safe(pt, next, &dead, dead)
		vtpu_pt_free(vm->vdev, pt);
}

/* ---- Mappings ---- */

static int vtpu_vm_fill_host(struct vtpu_vm *vm, u64 *va, u64 end, struct vtpu_bo *bo,
			     u64 skip, u64 bits)
{
	struct sg_table *sgt = vtpu_bo_sgt(bo);
	struct scatterlist *sg;
	unsigned int i;

	if (IS_ERR(sgt))
		return PTR_ERR(sgt);

	for_each_sgtable_dma_sg(sgt, sg, i) {
		u64 addr = sg_dma_address(sg);
		u64 size = sg_dma_len(sg);
		int ret;

		if (skip >= size) {
			skip -= size;
			continue;
		}
		size = min(size - skip, end - *va);
		ret = vtpu_pt_map(vm, va, addr + skip, size, bits);
		skip = 0;
		if (ret || *va == end)
			return ret;
	}
	/* The table is shorter than the buffer. */
	return -EINVAL;
}

static int vtpu_vm_fill(struct vtpu_vm *vm, struct vtpu_mapping *mapping, u64 bo_offset,
			u64 bits)
{
	struct vtpu_bo *bo = mapping->bo;
	u64 start = mapping->node.start;
	u64 end = start + mapping->node.size;
	u64 va = start;
	int ret, idx;

	if (!vtpu_dev_enter(vm->vdev, &idx))
		return -ENODEV;
	if (vtpu_bo_is_hbm(bo))
		ret = vtpu_pt_map(vm, &va, bo->hbm.start + bo_offset, mapping->node.size,
				  bits | VTPU_PTE_HBM);
	else
		ret = vtpu_vm_fill_host(vm, &va, end, bo, bo_offset, bits);
	if (ret)
		vtpu_vm_clear(vm, start, va);
	else
		wmb();	/* in HBM before any doorbell */
	vtpu_dev_exit(vm->vdev, idx);
	return ret;
}

static void vtpu_mapping_free(struct vtpu_mapping *mapping)
{
	mutex_lock(&mapping->bo->lock);
	list_del(&mapping->bo_link);
	mutex_unlock(&mapping->bo->lock);
	drm_mm_remove_node(&mapping->node);
	drm_gem_object_put(&mapping->bo->shmem.base);
	kfree(mapping);
}

static int vtpu_vm_map(struct vtpu_vm *vm, struct vtpu_bo *bo,
		       const struct drm_vtpu_vm_bind *args)
{
	struct vtpu_mapping *mapping;
	u64 bits = VTPU_PTE_VALID;
	int ret;

	if (args->flags & DRM_VTPU_VM_READ)
		bits |= VTPU_PTE_READ;
	if (args->flags & DRM_VTPU_VM_WRITE)
		bits |= VTPU_PTE_WRITE;
	if (args->flags & DRM_VTPU_VM_EXEC)
		bits |= VTPU_PTE_EXEC;

	mapping = kzalloc(sizeof(*mapping), GFP_KERNEL);
	if (!mapping)
		return -ENOMEM;
	mapping->vm = vm;
	mapping->node.start = args->va;
	mapping->node.size = args->size;

	down_read(&vm->vdev->bar_sem);
	mutex_lock(&vm->lock);
	if (drm_mm_reserve_node(&vm->mm, &mapping->node)) {
		mutex_unlock(&vm->lock);
		up_read(&vm->vdev->bar_sem);
		kfree(mapping);
		return -EEXIST;
	}
	drm_gem_object_get(&bo->shmem.base);
	mapping->bo = bo;
	mapping->bo_offset = args->bo_offset;
	mutex_lock(&bo->lock);
	list_add(&mapping->bo_link, &bo->mappings);
	mutex_unlock(&bo->lock);

	ret = vtpu_vm_fill(vm, mapping, args->bo_offset, bits);
	if (ret)
		vtpu_mapping_free(mapping);
	mutex_unlock(&vm->lock);
	up_read(&vm->vdev->bar_sem);
	return ret;
}

static int vtpu_vm_unmap(struct vtpu_vm *vm, u64 va, u64 size)
{
	struct drm_mm_node *node;
	int ret = -ENOENT;

	down_read(&vm->vdev->bar_sem);
	mutex_lock(&vm->lock);
	drm_mm_for_each_node_in_range(node, &vm->mm, va, va + size) {
		if (node->start == va && node->size == size) {
			vtpu_vm_clear(vm, va, va + size);
			vtpu_mapping_free(container_of(node, struct vtpu_mapping, node));
			ret = 0;
		}
		break;
	}
	mutex_unlock(&vm->lock);
	up_read(&vm->vdev->bar_sem);
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

static struct vtpu_vm *vtpu_vm_create(struct vtpu_device *vdev, struct vtpu_user *user)
{
	struct vtpu_vm *vm;
	int ret;

	vm = kzalloc(sizeof(*vm), GFP_KERNEL);
	if (!vm)
		return ERR_PTR(-ENOMEM);
	vm->vdev = vdev;
	vm->pid = task_tgid_nr(current);
	get_task_comm(vm->comm, current);
	vm->user = user;
	ret = vtpu_user_charge(user, VTPU_USER_CONTEXTS);
	if (ret)
		goto err_free;
	down_read(&vdev->bar_sem);
	vm->root = vtpu_pt_alloc(vdev, PT_ROOT_LEVEL);
	up_read(&vdev->bar_sem);
	if (IS_ERR(vm->root)) {
		ret = PTR_ERR(vm->root);
		goto err_user;
	}
	kref_init(&vm->ref);
	mutex_init(&vm->lock);
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
	down_read(&vdev->bar_sem);
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
	up_read(&vdev->bar_sem);

	drm_mm_for_each_node_safe(node, next, &vm->mm)
		vtpu_mapping_free(container_of(node, struct vtpu_mapping, node));
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
