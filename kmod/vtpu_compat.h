/* SPDX-License-Identifier: GPL-2.0 */
/* What kernels name differently, under its newest name. Kbuild finds out which it is. */
#ifndef _VTPU_COMPAT_H_
#define _VTPU_COMPAT_H_

#include <linux/mm.h>
#include <linux/workqueue.h>

#ifndef VTPU_HAVE_VMA_IS_COW_MAPPING
static inline bool vma_is_cow_mapping(const struct vm_area_struct *vma)
{
	return is_cow_mapping(vma->vm_flags);
}
#endif

#if !IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE)
static inline vm_fault_t vtpu_insert_pfn_pmd(struct vm_fault *vmf, unsigned long pfn, bool write)
{
	return VM_FAULT_FALLBACK;
}
#elif !defined(VTPU_HAVE_PMD_PFN)
#include <linux/pfn_t.h>

static inline vm_fault_t vtpu_insert_pfn_pmd(struct vm_fault *vmf, unsigned long pfn, bool write)
{
	return vmf_insert_pfn_pmd(vmf, __pfn_to_pfn_t(pfn, PFN_DEV), write);
}
#else
#define vtpu_insert_pfn_pmd vmf_insert_pfn_pmd
#endif

/* Where it has no name, active memory is printed without being asked for. */
#ifndef VTPU_HAVE_OBJECT_ACTIVE
#define DRM_GEM_OBJECT_ACTIVE 0
#endif

/* Where it has no name it is what a queue is that does not ask for WQ_UNBOUND. */
#ifndef VTPU_HAVE_WQ_PERCPU
#define WQ_PERCPU 0
#endif

#ifndef VTPU_HAVE_SYSTEM_DFL_WQ
#define system_dfl_wq system_unbound_wq
#endif

#ifdef VTPU_HAVE_SHMEM_VM_FLAGS
#define VTPU_SHMEM_NORESERVE VM_NORESERVE
#else
#define VTPU_SHMEM_NORESERVE mk_vma_flags(VMA_NORESERVE_BIT)
#endif

#endif
