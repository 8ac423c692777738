/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_USERPTR_H_
#define _VTPU_USERPTR_H_

#include <linux/types.h>

struct drm_device;
struct drm_file;
struct mm_struct;
struct page;
struct user_struct;
struct vtpu_bo;

/* Pages of a process that the device reaches. A buffer has them until it is freed. */
struct vtpu_userptr {
	struct page **pages;
	unsigned long num_pages;
	bool writable;
	struct user_struct *user;	/* charged, against RLIMIT_MEMLOCK */
	struct mm_struct *mm;		/* shows them, as VmPin */
};

void vtpu_userptr_unmap_dma(struct vtpu_bo *bo);
int vtpu_bo_userptr_ioctl(struct drm_device *drm, void *data, struct drm_file *file);

#endif
