// SPDX-License-Identifier: GPL-2.0
/* Reading registers for those who only look: debugfs, sysfs, core dumps. */

#include <linux/pm_runtime.h>
#include <drm/drm_print.h>

#include "vtpu_device.h"
#include "vtpu_queue.h"
#include "vtpu_regs.h"

struct vtpu_reg {
	const char *name;
	u32 offset;
	bool wide;
};

#define REG32(name)	{ #name, VTPU_REG_##name, false }
#define REG64(name)	{ #name, VTPU_REG_##name, true }

static const struct vtpu_reg device_regs[] = {
	REG32(ID),
	REG32(VERSION),
	REG32(ISA_VERSION),
	REG32(CAPS),
	REG64(HBM_SIZE),
	REG32(VMEM_SIZE),
	REG32(NUM_QUEUES),
	REG32(NUM_CONTEXTS),
	REG32(NUM_MSIX),
	REG32(FUNCTION),
	REG32(CTRL),
	REG32(STATUS),
	REG32(RESET_COUNT),
	REG64(TIME),
	REG32(ERR_QUEUES),
	REG32(TLB_PENDING),
	REG32(SLICE_US),
	REG64(STAT_PROGRAMS),
	REG64(STAT_INSTRUCTIONS),
	REG64(STAT_BUSY_NS),
	REG64(STAT_HBM_BYTES),
	REG64(STAT_ECC_CORRECTED),
	REG32(SENSOR_TEMP),
	REG32(SENSOR_TEMP_CRITICAL),
	REG32(SENSOR_POWER),
	REG64(SENSOR_ENERGY),
	REG32(LINK_ID),
	REG32(LINK_SHAPE),
	REG32(LINK_NEIGHBOURS),
	REG32(LINK_STATUS),
	REG32(LINK_PEERS),
	REG32(LINK_CTRL),
	REG32(LINK_CONTEXT),
	REG32(LINK_ACCEPT),
	REG32(LINK_ERR),
	REG32(LINK_RX_REASON),
	REG64(LINK_RX_ADDR),
	REG64(LINK_RX_PACKETS),
	REG64(LINK_RX_BYTES),
	REG64(LINK_RX_REFUSED),
	REG32(MODEL_MHZ),
};

static const struct vtpu_reg queue_regs[] = {
	REG64(Q_RING_BASE),
	REG64(Q_FENCE_ADDR),
	REG32(Q_RING_LOG2),
	REG32(Q_CONTEXT),
	REG32(Q_VECTOR),
	REG32(Q_PRIORITY),
	REG32(Q_CTRL),
	REG32(Q_QSTATUS),
	REG32(Q_HEAD),
	REG32(Q_TAIL),
	REG32(Q_FAULT_CAUSE),
	REG32(Q_FAULT_ACCESS),
	REG64(Q_FAULT_ADDR),
	REG32(Q_FAULT_PC),
	REG32(Q_FAULT_OTHER_PC),
	REG32(Q_FAULT_ENTRY),
	REG32(Q_PC),
	REG32(Q_WATCHDOG_US),
	REG32(Q_PREEMPTIONS),
	REG64(Q_COMMAND_NS),
	REG64(Q_BUSY_NS),
	REG64(Q_INSTRUCTIONS),
};

static_assert(ARRAY_SIZE(device_regs) == VTPU_NUM_DEVICE_REGS);
static_assert(ARRAY_SIZE(queue_regs) == VTPU_NUM_QUEUE_REGS);

static void vtpu_peek_put(struct vtpu_device *vdev, int idx)
{
	/* To be looked at is no work: it does not put off its sleep. */
	if (IS_ENABLED(CONFIG_PM))
		__pm_runtime_put_autosuspend(vdev->drm.dev);
	drm_dev_exit(idx);
}

/*
 * Whoever only looks neither wakes a sleeping device nor waits for one, nor for
 * its reset: ENODATA, or ENODEV when it is gone.
 */
int vtpu_peek_begin(struct vtpu_device *vdev, int *idx)
{
	if (!drm_dev_enter(&vdev->drm, idx))
		return -ENODEV;
	if (IS_ENABLED(CONFIG_PM) && pm_runtime_get_if_active(vdev->drm.dev) <= 0) {
		drm_dev_exit(*idx);
		return -ENODATA;
	}
	if (!vtpu_bar_trylock(vdev)) {
		vtpu_peek_put(vdev, *idx);
		return -ENODATA;
	}
	return 0;
}

void vtpu_peek_end(struct vtpu_device *vdev, int idx)
{
	vtpu_bar_unlock(vdev);
	vtpu_peek_put(vdev, idx);
}

static u64 vtpu_reg_read(struct vtpu_device *vdev, const struct vtpu_reg *reg, u32 shift)
{
	return reg->wide ? vtpu_read64(vdev, reg->offset + shift) :
			   vtpu_read(vdev, reg->offset + shift);
}

static void vtpu_reg_print(const struct vtpu_reg *reg, u64 value, struct drm_printer *p)
{
	drm_printf(p, "%s: %#llx\n", reg->name, value);
}

void vtpu_device_regs_read(struct vtpu_device *vdev, struct vtpu_device_regs *regs)
{
	for (unsigned int i = 0; i < ARRAY_SIZE(device_regs); i++)
		regs->value[i] = vtpu_reg_read(vdev, &device_regs[i], 0);
}

void vtpu_device_regs_print(const struct vtpu_device_regs *regs, struct drm_printer *p)
{
	for (unsigned int i = 0; i < ARRAY_SIZE(device_regs); i++)
		vtpu_reg_print(&device_regs[i], regs->value[i], p);
}

void vtpu_queue_regs_read(struct vtpu_hwq *hwq, struct vtpu_queue_regs *regs)
{
	for (unsigned int i = 0; i < ARRAY_SIZE(queue_regs); i++)
		regs->value[i] = vtpu_reg_read(hwq->vdev, &queue_regs[i], vtpu_hwq_reg(hwq, 0));
}

void vtpu_queue_regs_print(const struct vtpu_queue_regs *regs, struct drm_printer *p)
{
	for (unsigned int i = 0; i < ARRAY_SIZE(queue_regs); i++)
		vtpu_reg_print(&queue_regs[i], regs->value[i], p);
}

u64 vtpu_queue_regs_get(const struct vtpu_queue_regs *regs, unsigned int reg)
{
	for (unsigned int i = 0; i < ARRAY_SIZE(queue_regs); i++) {
		if (queue_regs[i].offset == reg)
			return regs->value[i];
	}
	return 0;
}
