/* SPDX-License-Identifier: GPL-2.0 */
/* What kernels name differently, under its newest name. Kbuild finds out which it is. */
#ifndef _VTPU_COMPAT_H_
#define _VTPU_COMPAT_H_

#include <linux/mm.h>

#ifndef VTPU_HAVE_VMA_IS_COW_MAPPING
static inline bool vma_is_cow_mapping(const struct vm_area_struct *vma)
{
	return is_cow_mapping(vma->vm_flags);
}
#endif

#ifdef VTPU_HAVE_SHMEM_VM_FLAGS
#define VTPU_SHMEM_NORESERVE VM_NORESERVE
#else
#define VTPU_SHMEM_NORESERVE mk_vma_flags(VMA_NORESERVE_BIT)
#endif

#endif
