// SPDX-License-Identifier: GPL-2.0
/*
 * Page tables: in HBM, written through the BAR. All of this under bar_sem and
 * vtpu_vm.lock, between vtpu_dev_enter() and vtpu_dev_exit().
 */

#include <linux/log2.h>
#include <linux/slab.h>

#include "vtpu_device.h"
#include "vtpu_user.h"
#include "vtpu_vm.h"

static u64 vtpu_pt_span(unsigned int level)
{
	return (u64)VTPU_PAGE_BYTES << (level * ilog2(VTPU_PT_ENTRIES));
}

static unsigned int vtpu_pt_index(u64 va, unsigned int level)
{
	return (va / vtpu_pt_span(level)) % VTPU_PT_ENTRIES;
}

static void vtpu_pt_set(struct vtpu_vm *vm, struct vtpu_pt *pt, unsigned int i, u64 entry)
{
	writeq(entry, vm->vdev->hbm + pt->node.start + i * sizeof(u64));
}

static struct vtpu_pt *vtpu_pt_alloc(struct vtpu_device *vdev, unsigned int level)
{
	struct vtpu_pt *pt;
	int ret;

	pt = kzalloc(struct_size(pt, child, level ? VTPU_PT_ENTRIES : 0), GFP_KERNEL_ACCOUNT);
	if (!pt)
		return ERR_PTR(-ENOMEM);
	pt->level = level;
	ret = vtpu_hbm_alloc_table(vdev, &pt->node);
	if (ret) {
		kfree(pt);
		return ERR_PTR(ret);
	}
	return pt;
}

struct vtpu_pt *vtpu_pt_alloc_root(struct vtpu_device *vdev)
{
	return vtpu_pt_alloc(vdev, VTPU_PTE_LEVELS - 1);
}

void vtpu_pt_free(struct vtpu_device *vdev, struct vtpu_pt *pt)
{
	for (unsigned int i = 0; pt->level && i < VTPU_PT_ENTRIES; i++) {
		if (pt->child[i])
			vtpu_pt_free(vdev, pt->child[i]);
	}
	vtpu_hbm_free(vdev, &pt->node);
	if (pt->user)
		vtpu_user_uncharge(pt->user, VTPU_USER_TABLES);
	kfree(pt);
}

/* -EDQUOT: the user has its share, and nobody else is to make room for more. */
static struct vtpu_pt *vtpu_pt_alloc_child(struct vtpu_vm *vm, unsigned int level)
{
	struct vtpu_pt *pt;

	if (vtpu_user_charge(vm->user, VTPU_USER_TABLES))
		return ERR_PTR(-EDQUOT);
	pt = vtpu_pt_alloc(vm->vdev, level);
	if (IS_ERR(pt))
		vtpu_user_uncharge(vm->user, VTPU_USER_TABLES);
	else
		pt->user = vm->user;
	return pt;
}

/* Tables on the way to an address that have nothing in them: a call that failed has made them. */
void vtpu_pt_prune(struct vtpu_vm *vm, struct vtpu_pt *pt, u64 va, struct list_head *dead)
{
	unsigned int i = vtpu_pt_index(va, pt->level);
	struct vtpu_pt *child = pt->level ? pt->child[i] : NULL;

	if (!child)
		return;
	vtpu_pt_prune(vm, child, va, dead);
	if (child->used)
		return;
	pt->child[i] = NULL;
	vtpu_pt_set(vm, pt, i, 0);
	pt->used--;
	list_add(&child->dead, dead);
}

/* The table of a level that covers an address, made when there is none. */
static struct vtpu_pt *vtpu_pt_get(struct vtpu_vm *vm, u64 va, unsigned int level)
{
	struct vtpu_pt *pt = vm->root;

	while (pt->level > level) {
		unsigned int i = vtpu_pt_index(va, pt->level);

		if (!pt->child[i]) {
			struct vtpu_pt *child = vtpu_pt_alloc_child(vm, pt->level - 1);

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

/*
 * Makes [*va, *va + size) reach addr on; *va moves past what was done. Without
 * VTPU_PTE_VALID in its bits it reaches nothing, but has its tables, of the
 * same shape if addr is of the same alignment: written again it needs no more
 * and cannot fail.
 */
int vtpu_pt_map(struct vtpu_vm *vm, u64 *va, u64 addr, u64 size, u64 bits, bool again)
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
		pt->used += !again;
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
void vtpu_pt_unmap(struct vtpu_vm *vm, struct vtpu_pt *pt, u64 va, u64 end,
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
