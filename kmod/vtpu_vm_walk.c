// SPDX-License-Identifier: GPL-2.0
/*
 * Address spaces as the device sees them: what its page tables say, and what
 * lies behind them. For those who only look.
 */

#include <linux/highmem.h>
#include <linux/sched/signal.h>
#include <drm/drm_print.h>

#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_regs.h"
#include "vtpu_vm.h"
#include "vtpu_vm_walk.h"

#define LEVEL_BITS	ilog2(VTPU_PAGE_BYTES / sizeof(u64))
#define FLAGS		(~VTPU_PTE_ADDR_MASK)
/* Leaves looked at under the locks at one time. */
#define MAX_STEPS	4096

/* The entry at a level of a walk, given the table; 0 when there is none. */
static u64 vtpu_walk_entry(struct vtpu_vm *vm, u64 table, u64 va, unsigned int level)
{
	unsigned int i = (va >> (PAGE_SHIFT + level * LEVEL_BITS)) & (BIT(LEVEL_BITS) - 1);
	u64 entry;

	if (table > vm->vdev->hbm_size - VTPU_PAGE_BYTES)
		return 0;
	entry = readq(vm->vdev->hbm + table + i * sizeof(u64));
	return entry & VTPU_PTE_VALID ? entry : 0;
}

/* The leaf of an address, or 0; and where what it, or the hole, covers ends. */
static u64 vtpu_walk(struct vtpu_vm *vm, u64 va, u64 *end)
{
	u64 table = vm->root->node.start;
	unsigned int level = VTPU_PTE_LEVELS;
	u64 entry;

	do {
		u64 span = 1ULL << (PAGE_SHIFT + --level * LEVEL_BITS);

		entry = vtpu_walk_entry(vm, table, va, level);
		*end = ALIGN_DOWN(va, span) + span;
		table = entry & VTPU_PTE_ADDR_MASK;
	} while (entry && level && !(entry & VTPU_PTE_HUGE));
	return entry;
}

static struct vtpu_mapping *vtpu_walk_mapping(struct vtpu_vm *vm, u64 va)
{
	struct drm_mm_node *node;

	drm_mm_for_each_node_in_range(node, &vm->mm, va, va + 1)
		return container_of(node, struct vtpu_mapping, node);
	return NULL;
}

static int vtpu_walk_lock(struct vtpu_vm *vm, int *idx)
{
	int ret;

	ret = vtpu_peek_begin(vm->vdev, idx);
	if (ret)
		return ret;
	ret = mutex_lock_interruptible(&vm->lock);
	if (ret)
		vtpu_peek_end(vm->vdev, *idx);
	return ret;
}

static void vtpu_walk_unlock(struct vtpu_vm *vm, int idx)
{
	mutex_unlock(&vm->lock);
	vtpu_peek_end(vm->vdev, idx);
}

/* As below; -EAGAIN: there is none yet, look on from *from. */
static int vtpu_vm_range_from(struct vtpu_vm *vm, u64 *from, struct vtpu_range *range)
{
	struct vtpu_mapping *mapping;
	u64 va = *from, pte = 0, end, next, stop;
	int ret, idx;

	ret = vtpu_walk_lock(vm, &idx);
	if (ret)
		return ret;
	end = va;
	for (unsigned int step = 0; end < VTPU_VA_END && !pte && step < MAX_STEPS; step++) {
		va = end;
		pte = vtpu_walk(vm, va, &end);
	}
	*from = end;
	ret = end < VTPU_VA_END ? -EAGAIN : -ENOENT;
	if (!pte)
		goto unlock;

	*range = (struct vtpu_range) { .va = va, .pte = pte };
	mapping = vtpu_walk_mapping(vm, va);
	stop = VTPU_VA_END;
	if (mapping) {
		stop = mapping->node.start + mapping->node.size;
		range->bo = mapping->bo;
		range->bo_offset = mapping->bo_offset + (va - mapping->node.start);
		range->bo_size = mapping->bo->shmem.base.size;
	}
	for (unsigned int step = 0; end < stop && step < MAX_STEPS; step++) {
		u64 more = vtpu_walk(vm, end, &next);

		if ((more ^ pte) & FLAGS ||
		    (pte & VTPU_PTE_HBM && (more & VTPU_PTE_ADDR_MASK) !=
		     (pte & VTPU_PTE_ADDR_MASK) + (end - va)))
			break;
		end = next;
	}
	range->size = end - va;
	ret = 0;
unlock:
	vtpu_walk_unlock(vm, idx);
	return ret;
}

/*
 * The first range at or behind an address; ENOENT when nothing is mapped there.
 * A long one is given in parts, so that no lock is held for long.
 */
int vtpu_vm_next_range(struct vtpu_vm *vm, u64 va, struct vtpu_range *range)
{
	int ret;

	do {
		ret = vtpu_vm_range_from(vm, &va, range);
	} while (ret == -EAGAIN && !fatal_signal_pending(current));
	return ret;
}

void vtpu_range_print(const struct vtpu_range *range, struct drm_printer *p)
{
	u64 pte = range->pte;

	drm_printf(p, "%#llx-%#llx %c%c%c %s %s %#llx", range->va, range->va + range->size,
		   pte & VTPU_PTE_READ ? 'r' : '-', pte & VTPU_PTE_WRITE ? 'w' : '-',
		   pte & VTPU_PTE_EXEC ? 'x' : '-', pte & VTPU_PTE_HUGE ? "2M" : "4K",
		   pte & VTPU_PTE_HBM ? "hbm" : "system", pte & VTPU_PTE_ADDR_MASK);
	if (range->bo)
		drm_printf(p, " bo=%p+%#llx/%#llx", range->bo, range->bo_offset, range->bo_size);
	drm_puts(p, "\n");
}

/* Each entry on the way to an address, down to the one where it ends. */
void vtpu_vm_print_walk(struct vtpu_vm *vm, u64 va, struct drm_printer *p)
{
	unsigned int level = VTPU_PTE_LEVELS;
	u64 table, entry;
	int idx;

	if (va >= VTPU_VA_END || vtpu_walk_lock(vm, &idx))
		return;
	table = vm->root->node.start;
	do {
		entry = vtpu_walk_entry(vm, table, va, --level);
		drm_printf(p, "level %u: table %#llx entry %#llx\n", level, table, entry);
		table = entry & VTPU_PTE_ADDR_MASK;
	} while (entry && level && !(entry & VTPU_PTE_HUGE));
	vtpu_walk_unlock(vm, idx);
}

/* What of a page lies in memory that the processor reaches. */
static bool vtpu_walk_copy(struct vtpu_vm *vm, u64 va, void *data, size_t size)
{
	struct vtpu_mapping *mapping;
	u64 end, pte = vtpu_walk(vm, va, &end);
	struct drm_gem_shmem_object *shmem;
	u64 offset;

	if (!pte)
		return false;
	if (pte & VTPU_PTE_HBM) {
		u64 addr = (pte & VTPU_PTE_ADDR_MASK) +
			   (va & (pte & VTPU_PTE_HUGE ? VTPU_HUGE_PAGE_BYTES - 1 :
							VTPU_PAGE_BYTES - 1));

		if (addr > vm->vdev->hbm_size - size)
			return false;
		memcpy_fromio(data, vm->vdev->hbm + addr, size);
		return true;
	}

	mapping = vtpu_walk_mapping(vm, va);
	if (!mapping || vtpu_bo_is_hbm(mapping->bo))
		return false;
	/* Pinned as long as they are mapped; buffers of others have none here. */
	shmem = &mapping->bo->shmem;
	offset = mapping->bo_offset + (va - mapping->node.start);
	if (!shmem->pages || offset >= shmem->base.size)
		return false;
	memcpy_from_page(data, shmem->pages[offset >> PAGE_SHIFT], offset_in_page(offset), size);
	return true;
}

/* Copies what is mapped from an address on, up to the first page that is not. */
size_t vtpu_vm_read(struct vtpu_vm *vm, u64 va, void *data, size_t size)
{
	size_t done = 0;
	int idx;

	if (va >= VTPU_VA_END || vtpu_walk_lock(vm, &idx))
		return 0;
	size = min_t(u64, size, VTPU_VA_END - va);
	while (done < size) {
		size_t chunk = min(size - done, PAGE_SIZE - offset_in_page(va + done));

		if (!vtpu_walk_copy(vm, va + done, data + done, chunk))
			break;
		done += chunk;
	}
	vtpu_walk_unlock(vm, idx);
	return done;
}
