/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_VM_WALK_H_
#define _VTPU_VM_WALK_H_

#include <linux/types.h>

struct drm_printer;
struct vtpu_bo;
struct vtpu_vm;

/* Addresses that follow one another and reach one buffer with the same rights. */
struct vtpu_range {
	u64 va;
	u64 size;
	u64 pte;		/* the first leaf, as the device reads it */
	const struct vtpu_bo *bo;	/* to tell apart only; NULL: none known */
	u64 bo_offset;
	u64 bo_size;
};

int vtpu_vm_next_range(struct vtpu_vm *vm, u64 va, struct vtpu_range *range);
void vtpu_range_print(const struct vtpu_range *range, struct drm_printer *p);
void vtpu_vm_print_walk(struct vtpu_vm *vm, u64 va, struct drm_printer *p);
size_t vtpu_vm_read(struct vtpu_vm *vm, u64 va, void *data, size_t size);

#endif
