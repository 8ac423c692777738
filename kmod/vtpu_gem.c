// SPDX-License-Identifier: GPL-2.0
/* Buffers, their mappings into processes, and waiting for the jobs that use them. */

#include <linux/dma-fence-unwrap.h>
#include <linux/dma-mapping.h>
#include <linux/dma-resv.h>
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <drm/drm_utils.h>

#include "vtpu_compat.h"
#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_prime.h"
#include "vtpu_userptr.h"
#include "vtpu_vm.h"

void vtpu_bo_init(struct vtpu_bo *bo)
{
	mutex_init(&bo->lock);
	INIT_LIST_HEAD(&bo->mappings);
	INIT_LIST_HEAD(&bo->dma_link);
}

static void vtpu_bo_unmap_dma(struct vtpu_bo *bo)
{
	struct sg_table *sgt = bo->shmem.sgt;

	list_del_init(&bo->dma_link);
	if (bo->userptr) {
		vtpu_userptr_unmap_dma(bo);
		return;
	}
	if (bo->shmem.base.import_attach) {
		vtpu_import_unmap_dma(bo);
		return;
	}
	/* No copies: with bounce buffers nothing but an old one would come. */
	dma_unmap_sgtable(bo->shmem.base.dev->dev, sgt, DMA_BIDIRECTIONAL,
			  DMA_ATTR_SKIP_CPU_SYNC);
	sg_free_table(sgt);
	kfree(sgt);
	bo->shmem.sgt = NULL;
}

void vtpu_bo_fini(struct vtpu_bo *bo)
{
	struct vtpu_device *vdev = to_vtpu(bo->shmem.base.dev);

	/* Each mapping holds a reference, so the last one is gone. */
	WARN_ON(!list_empty(&bo->mappings));
	mutex_destroy(&bo->lock);
	mutex_lock(&vdev->dma_lock);
	if (!list_empty(&bo->dma_link))
		vtpu_bo_unmap_dma(bo);
	mutex_unlock(&vdev->dma_lock);
}

/* ---- System memory as the device sees it ---- */

/* Between drm_dev_enter() and drm_dev_exit(), as is the mapping itself. */
void vtpu_bo_track_dma(struct vtpu_bo *bo)
{
	struct vtpu_device *vdev = to_vtpu(bo->shmem.base.dev);

	mutex_lock(&vdev->dma_lock);
	if (list_empty(&bo->dma_link))
		list_add(&bo->dma_link, &vdev->dma_bos);
	mutex_unlock(&vdev->dma_lock);
}

/*
 * After the unplug, when the device reads nothing any more and nothing is
 * mapped any more. Buffers may live on, in open files; what belongs to the
 * device in the DMA layer does not.
 */
void vtpu_gem_unmap_dma(struct vtpu_device *vdev)
{
	struct vtpu_bo *bo, *next;

	mutex_lock(&vdev->drm.object_name_lock);
	mutex_lock(&vdev->dma_lock);
	list_for_each_entry_safe(bo, next, &vdev->dma_bos, dma_link)
		vtpu_bo_unmap_dma(bo);
	mutex_unlock(&vdev->dma_lock);
	mutex_unlock(&vdev->drm.object_name_lock);
}

/*
 * A copy and what it is of would differ, without anybody noticing. dma_need_sync() is no
 * answer: where DMA is checked (CONFIG_DMA_API_DEBUG) it says yes of all behind an IOMMU.
 */
bool vtpu_dma_bounces(struct vtpu_device *vdev)
{
	return dma_max_mapping_size(vdev->drm.dev) != SIZE_MAX;
}

/* Can the device reach all of it, page by page and itself? */
int vtpu_sgt_check(struct vtpu_device *vdev, struct sg_table *sgt)
{
	struct scatterlist *sg;
	unsigned int i;

	if (vtpu_dma_bounces(vdev)) {
		dev_err_once(vdev->drm.dev,
			     "system memory only through bounce buffers: not supported\n");
		return -EOPNOTSUPP;
	}
	for_each_sgtable_dma_sg(sgt, sg, i)
		if (!IS_ALIGNED(sg_dma_address(sg) | sg_dma_len(sg), VTPU_PAGE_BYTES))
			return -EINVAL;
	return 0;
}

/* Where its pages are for the device; what is not mapped yet is mapped for good. */
struct sg_table *vtpu_bo_sgt(struct vtpu_bo *bo)
{
	struct vtpu_device *vdev = to_vtpu(bo->shmem.base.dev);
	struct sg_table *sgt;
	int ret;

	if (bo->userptr || bo->shmem.base.import_attach)
		return bo->shmem.sgt;
	sgt = drm_gem_shmem_get_pages_sgt(&bo->shmem);
	if (IS_ERR(sgt))
		return sgt;
	vtpu_bo_track_dma(bo);
	ret = vtpu_sgt_check(vdev, sgt);
	return ret ? ERR_PTR(ret) : sgt;
}

/* ---- Kinds of buffers ---- */

static void vtpu_host_bo_free(struct drm_gem_object *obj)
{
	struct vtpu_bo *bo = to_vtpu_bo(obj);

	vtpu_bo_fini(bo);
	drm_gem_shmem_free(&bo->shmem);
}

static const struct drm_gem_object_funcs vtpu_host_bo_funcs = {
	.free = vtpu_host_bo_free,
	.export = vtpu_gem_export,
	.print_info = drm_gem_shmem_object_print_info,
	.pin = drm_gem_shmem_object_pin,
	.unpin = drm_gem_shmem_object_unpin,
	.get_sg_table = drm_gem_shmem_object_get_sg_table,
	.vmap = drm_gem_shmem_object_vmap,
	.vunmap = drm_gem_shmem_object_vunmap,
	.mmap = drm_gem_shmem_object_mmap,
	.vm_ops = &drm_gem_shmem_vm_ops,
};

struct drm_gem_object *vtpu_gem_create_object(struct drm_device *drm, size_t size)
{
	struct vtpu_bo *bo = kzalloc(sizeof(*bo), GFP_KERNEL_ACCOUNT);

	if (!bo)
		return ERR_PTR(-ENOMEM);
	vtpu_bo_init(bo);
	bo->shmem.base.funcs = &vtpu_host_bo_funcs;
	return &bo->shmem.base;
}

static void vtpu_hbm_bo_free(struct drm_gem_object *obj)
{
	struct vtpu_device *vdev = to_vtpu(obj->dev);
	struct vtpu_bo *bo = to_vtpu_bo(obj);

	vtpu_bo_fini(bo);
	/* At once: who looks for room finds it listed or its place free. */
	mutex_lock(&vdev->hbm_lock);
	list_del(&bo->hbm_link);
	if (bo->evicted)
		vdev->hbm_evicted -= obj->size;
	else
		vtpu_hbm_free_locked(vdev, &bo->hbm);
	mutex_unlock(&vdev->hbm_lock);
	vtpu_bo_contents_fini(bo);
	mem_cgroup_put(bo->memcg);
	drm_gem_object_release(obj);
	if (bo->unplugged)
		__free_page(bo->unplugged);
	kfree(bo);
}

/* After unplug a mapping reads zeroes and forgets writes, rather than SIGBUS. */
static vm_fault_t vtpu_hbm_fault_unplugged(struct vm_fault *vmf, struct vtpu_bo *bo)
{
	lockdep_assert_held(&bo->lock);
	if (!bo->unplugged)
		bo->unplugged = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (!bo->unplugged)
		return VM_FAULT_OOM;
	return vmf_insert_pfn_prot(vmf->vma, vmf->address, page_to_pfn(bo->unplugged),
				   vm_get_page_prot(vmf->vma->vm_flags));
}

/* Where the buffer's byte at that address of the vma lies on the bus. */
static u64 vtpu_hbm_phys(const struct vm_area_struct *vma, const struct vtpu_bo *bo,
			 unsigned long addr)
{
	u64 page = vma->vm_pgoff - drm_vma_node_start(&bo->shmem.base.vma_node);

	return to_vtpu(bo->shmem.base.dev)->hbm_base + bo->hbm.start + (page << PAGE_SHIFT) +
	       (addr - vma->vm_start);
}

/* A huge page around the address, if it lies in the vma and fits the memory. */
static vm_fault_t vtpu_hbm_insert_huge(struct vm_fault *vmf, struct vtpu_bo *bo)
{
	struct vm_area_struct *vma = vmf->vma;
	unsigned long addr = ALIGN_DOWN(vmf->address, PMD_SIZE);
	u64 phys = vtpu_hbm_phys(vma, bo, addr);

	if (addr < vma->vm_start || addr + PMD_SIZE > vma->vm_end || !IS_ALIGNED(phys, PMD_SIZE))
		return VM_FAULT_FALLBACK;
	return vtpu_insert_pfn_pmd(vmf, phys >> PAGE_SHIFT, vma->vm_flags & VM_WRITE);
}

/*
 * All of the 2 MiB around the address, as far as it lies in the vma: weights are
 * written from end to end, and a fault a page would be dear.
 */
static vm_fault_t vtpu_hbm_insert_pages(struct vm_fault *vmf, struct vtpu_bo *bo)
{
	struct vm_area_struct *vma = vmf->vma;
	unsigned long addr = max(ALIGN_DOWN(vmf->address, PMD_SIZE), vma->vm_start);
	unsigned long end = min(ALIGN_DOWN(vmf->address, PMD_SIZE) + PMD_SIZE, vma->vm_end);
	u64 phys = vtpu_hbm_phys(vma, bo, addr);
	vm_fault_t ret = VM_FAULT_NOPAGE;

	for (; addr < end && ret == VM_FAULT_NOPAGE; addr += PAGE_SIZE, phys += PAGE_SIZE)
		ret = vmf_insert_pfn(vma, addr, phys >> PAGE_SHIFT);
	return ret;
}

static vm_fault_t vtpu_hbm_fault_resident(struct vm_fault *vmf, struct vtpu_bo *bo, bool huge)
{
	struct vtpu_device *vdev = to_vtpu(bo->shmem.base.dev);
	vm_fault_t ret;
	int idx;

	vtpu_bar_lock(vdev);
	if (vtpu_dev_enter(vdev, &idx)) {
		ret = huge ? vtpu_hbm_insert_huge(vmf, bo) : vtpu_hbm_insert_pages(vmf, bo);
		vtpu_dev_exit(vdev, idx);
	} else {
		ret = huge ? VM_FAULT_FALLBACK : vtpu_hbm_fault_unplugged(vmf, bo);
	}
	vtpu_bar_unlock(vdev);
	return ret;
}

/* Under its lock the buffer stays where it is; who moves it unmaps it here. */
static vm_fault_t vtpu_hbm_fault_any(struct vm_fault *vmf, bool huge)
{
	struct vtpu_bo *bo = to_vtpu_bo(vmf->vma->vm_private_data);
	vm_fault_t ret;
	int error = 0;

	mutex_lock(&bo->lock);
	while (bo->evicted && !error) {
		mutex_unlock(&bo->lock);
		error = vtpu_bo_make_resident(bo);
		mutex_lock(&bo->lock);
	}
	if (!error)
		ret = vtpu_hbm_fault_resident(vmf, bo, huge);
	else if (error == -ENODEV)
		ret = huge ? VM_FAULT_FALLBACK : vtpu_hbm_fault_unplugged(vmf, bo);
	else if ((error == -EINTR || error == -ERESTARTSYS) && !fatal_signal_pending(current))
		ret = VM_FAULT_NOPAGE;
	else
		ret = VM_FAULT_SIGBUS;
	mutex_unlock(&bo->lock);
	return ret;
}

static vm_fault_t vtpu_hbm_fault(struct vm_fault *vmf)
{
	return vtpu_hbm_fault_any(vmf, false);
}

/* Where this falls back the kernel goes on with a page. */
static vm_fault_t vtpu_hbm_huge_fault(struct vm_fault *vmf, unsigned int order)
{
	return order == PMD_ORDER ? vtpu_hbm_fault_any(vmf, true) : VM_FAULT_FALLBACK;
}

static const struct vm_operations_struct vtpu_hbm_vm_ops = {
	.fault = vtpu_hbm_fault,
	.huge_fault = vtpu_hbm_huge_fault,
	.open = drm_gem_vm_open,
	.close = drm_gem_vm_close,
};

static int vtpu_hbm_mmap(struct drm_gem_object *obj, struct vm_area_struct *vma)
{
	/* A private copy of device memory would be of no use. */
	if (vma_is_cow_mapping(vma))
		return -EINVAL;

	vm_flags_set(vma, VM_PFNMAP | VM_IO | VM_DONTEXPAND | VM_DONTDUMP);
	vma->vm_page_prot = pgprot_writecombine(vm_get_page_prot(vma->vm_flags));
	vma->vm_ops = &vtpu_hbm_vm_ops;
	return 0;
}

#if IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE)
/* Buffers in HBM begin at a huge page, whatever their offset in the file. */
unsigned long vtpu_get_unmapped_area(struct file *file, unsigned long addr, unsigned long len,
				     unsigned long pgoff, unsigned long flags)
{
	return thp_get_unmapped_area(file, addr, len, 0, flags);
}
#endif

static const struct drm_gem_object_funcs vtpu_hbm_bo_funcs = {
	.free = vtpu_hbm_bo_free,
	.export = vtpu_gem_export,
	.mmap = vtpu_hbm_mmap,
	.vm_ops = &vtpu_hbm_vm_ops,
};

static struct vtpu_bo *vtpu_hbm_bo_create(struct vtpu_device *vdev, size_t size)
{
	struct vtpu_bo *bo;
	int ret;

	if (size > vdev->hbm_for_buffers)
		return ERR_PTR(-ENOSPC);

	bo = kzalloc(sizeof(*bo), GFP_KERNEL_ACCOUNT);
	if (!bo)
		return ERR_PTR(-ENOMEM);
	vtpu_bo_init(bo);
	bo->flags = DRM_VTPU_BO_HBM;
	bo->shmem.base.funcs = &vtpu_hbm_bo_funcs;
	drm_gem_private_object_init(&vdev->drm, &bo->shmem.base, size);
	/*
	 * Now, and not when somebody asks: mappings of an exported buffer rest on
	 * the offset, too, and it may not change under them.
	 */
	ret = drm_gem_create_mmap_offset(&bo->shmem.base);
	if (ret)
		goto err_free;
	ret = vtpu_bo_contents_init(bo);
	if (ret)
		goto err_free;
	bo->memcg = get_mem_cgroup_from_mm(current->mm);
	bo->last_use = atomic64_inc_return(&vdev->uses);
	bo->raw = true;
	ret = vtpu_bo_place(bo);
	if (ret)
		goto err_contents;
	vtpu_bar_lock(vdev);
	ret = vtpu_hbm_clear(vdev, &bo->hbm);
	vtpu_bar_unlock(vdev);

	/* Only now can it be evicted. */
	mutex_lock(&vdev->hbm_lock);
	bo->raw = false;
	vtpu_hbm_settled(vdev);
	mutex_unlock(&vdev->hbm_lock);
	if (!ret)
		return bo;
	drm_gem_object_put(&bo->shmem.base);
	return ERR_PTR(ret);

err_contents:
	mem_cgroup_put(bo->memcg);
	vtpu_bo_contents_fini(bo);
err_free:
	drm_gem_object_release(&bo->shmem.base);
	vtpu_bo_fini(bo);
	kfree(bo);
	return ERR_PTR(ret);
}

static struct vtpu_bo *vtpu_host_bo_create(struct vtpu_device *vdev, size_t size)
{
	struct drm_gem_shmem_object *shmem;

	if (size >> PAGE_SHIFT > totalram_pages())
		return ERR_PTR(-ENOMEM);

	shmem = drm_gem_shmem_create(&vdev->drm, size);
	if (IS_ERR(shmem))
		return ERR_CAST(shmem);
	return to_vtpu_bo(&shmem->base);
}

int vtpu_bo_create_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_vtpu_bo_create *args = data;
	struct vtpu_device *vdev = to_vtpu(drm);
	struct vtpu_bo *bo;
	size_t size;
	int ret;

	if (args->flags & ~DRM_VTPU_BO_HBM)
		return -EINVAL;
	if (!args->size || args->size > 1ull << VTPU_VA_BITS)
		return -EINVAL;
	size = PAGE_ALIGN(args->size);

	if (args->flags & DRM_VTPU_BO_HBM)
		bo = vtpu_hbm_bo_create(vdev, size);
	else
		bo = vtpu_host_bo_create(vdev, size);
	if (IS_ERR(bo))
		return PTR_ERR(bo);

	args->size = size;
	ret = drm_gem_handle_create(file, &bo->shmem.base, &args->handle);
	drm_gem_object_put(&bo->shmem.base);
	return ret;
}

int vtpu_bo_info_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_vtpu_bo_info *args = data;
	struct drm_gem_object *obj;

	obj = drm_gem_object_lookup(file, args->handle);
	if (!obj)
		return -ENOENT;
	args->flags = to_vtpu_bo(obj)->flags;
	args->size = obj->size;
	args->mmap_offset = obj->funcs->mmap ? drm_vma_node_offset_addr(&obj->vma_node) : 0;
	drm_gem_object_put(obj);
	return 0;
}

/*
 * One fence for all the jobs that can use the buffer now: those of every
 * address space it is mapped in. NULL when there is none.
 */
struct dma_fence *vtpu_bo_fence(struct vtpu_bo *bo)
{
	struct dma_fence *all = NULL;
	struct vtpu_mapping *mapping;

	mutex_lock(&bo->lock);
	list_for_each_entry(mapping, &bo->mappings, bo_link) {
		struct dma_fence *fence, *merged;
		int ret;

		ret = dma_resv_get_singleton(&mapping->vm->resv, DMA_RESV_USAGE_BOOKKEEP,
					     &fence);
		if (ret) {
			dma_fence_put(all);
			all = ERR_PTR(ret);
			break;
		}
		if (!fence)
			continue;
		if (!all) {
			all = fence;
			continue;
		}
		merged = dma_fence_unwrap_merge(all, fence);
		dma_fence_put(all);
		dma_fence_put(fence);
		if (!merged) {
			all = ERR_PTR(-ENOMEM);
			break;
		}
		all = merged;
	}
	mutex_unlock(&bo->lock);
	return all;
}

int vtpu_bo_wait_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_vtpu_bo_wait *args = data;
	struct drm_gem_object *obj;
	struct dma_fence *fence;
	long left = 1;

	if (args->pad)
		return -EINVAL;
	obj = drm_gem_object_lookup(file, args->handle);
	if (!obj)
		return -ENOENT;

	fence = vtpu_bo_fence(to_vtpu_bo(obj));
	drm_gem_object_put(obj);
	if (IS_ERR_OR_NULL(fence))
		return PTR_ERR_OR_ZERO(fence);

	if (!dma_fence_is_signaled(fence))
		left = dma_fence_wait_timeout(fence, true,
					      drm_timeout_abs_to_jiffies(args->timeout_ns));
	dma_fence_put(fence);
	if (left < 0)
		return left;
	return left ? 0 : -ETIMEDOUT;
}
