// SPDX-License-Identifier: GPL-2.0
/* Ring entries in words. */

#include <linux/unaligned.h>
#include <drm/drm_print.h>

#include "vtpu_queue.h"

static const char * const op_names[] = {
	[VTPU_CMD_NOP] = "NOP",
	[VTPU_CMD_RUN] = "RUN",
	[VTPU_CMD_COPY] = "COPY",
	[VTPU_CMD_FILL] = "FILL",
	[VTPU_CMD_WAIT] = "WAIT",
	[VTPU_CMD_SIGNAL] = "SIGNAL",
	[VTPU_CMD_TIMESTAMP] = "TIMESTAMP",
};

u64 vtpu_ring_entry_get(const struct vtpu_ring_entry *entry, unsigned int offset,
			unsigned int size)
{
	const void *at = (const void *)entry + offset;

	return size == 4 ? get_unaligned_le32(at) : get_unaligned_le64(at);
}

#define GET32(field)	((u32)vtpu_ring_entry_get(entry, VTPU_CMD_##field, 4))
#define GET64(field)	vtpu_ring_entry_get(entry, VTPU_CMD_##field, 8)

/* n counts as Q_HEAD and Q_TAIL do. */
void vtpu_ring_entry_print(const struct vtpu_ring_entry *entry, u32 n, struct drm_printer *p)
{
	const char *name = entry->op < ARRAY_SIZE(op_names) ? op_names[entry->op] : NULL;

	drm_printf(p, "%u: %s cookie=%#x", n, name ?: "?", le32_to_cpu(entry->cookie));
	if (entry->flags & VTPU_RING_FLAG_FENCE)
		drm_printf(p, " fence=%llu", le64_to_cpu(entry->fence));
	if (entry->flags & VTPU_RING_FLAG_IRQ)
		drm_puts(p, " irq");
	switch (entry->op) {
	case VTPU_CMD_RUN:
		drm_printf(p, " code=%#llx/%#x entry=%#x args=%#llx/%u", GET64(RUN_CODE_VA),
			   GET32(RUN_CODE_BYTES), GET32(RUN_ENTRY), GET64(RUN_ARGS_VA),
			   GET32(RUN_NUM_ARGS));
		break;
	case VTPU_CMD_COPY:
		drm_printf(p, " dst=%#llx src=%#llx bytes=%#llx", GET64(COPY_DST), GET64(COPY_SRC),
			   GET64(COPY_BYTES));
		break;
	case VTPU_CMD_FILL:
		drm_printf(p, " dst=%#llx bytes=%#llx pattern=%#x", GET64(FILL_DST),
			   GET64(FILL_BYTES), GET32(FILL_PATTERN));
		break;
	case VTPU_CMD_WAIT:
		drm_printf(p, " addr=%#llx value=%llu", GET64(WAIT_ADDR), GET64(WAIT_VALUE));
		break;
	case VTPU_CMD_SIGNAL:
		drm_printf(p, " addr=%#llx value=%llu", GET64(SIGNAL_ADDR), GET64(SIGNAL_VALUE));
		break;
	case VTPU_CMD_TIMESTAMP:
		drm_printf(p, " addr=%#llx", GET64(TIMESTAMP_ADDR));
		break;
	}
	drm_puts(p, "\n");
}
