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
