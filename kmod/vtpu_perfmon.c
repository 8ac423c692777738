// SPDX-License-Identifier: GPL-2.0
/*
 * PERFMON: counters of a process's queue, and those of the device.
 *
 * What the device counts is what all its clients do together, from which one
 * could watch another: that takes CAP_PERFMON. A queue's counters are its own.
 */

#include <linux/capability.h>
#include <linux/cleanup.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "vtpu_device.h"
#include "vtpu_perfmon.h"
#include "vtpu_queue.h"
#include "vtpu_regs.h"

struct vtpu_counter {
	u16 reg;
	bool wide;
	bool modelled;		/* there when the device times programs on a model */
};

#define COUNTER32(id, reg)	[DRM_VTPU_COUNTER_##id] = { VTPU_REG_##reg, false, false }
#define COUNTER64(id, reg)	[DRM_VTPU_COUNTER_##id] = { VTPU_REG_##reg, true, false }
#define MODELLED(id)		[DRM_VTPU_COUNTER_MODEL_##id] = { VTPU_REG_STAT_MODEL_##id, true, true }

/* Register 0 is the device's ID, no counter. */
static const struct vtpu_counter queue_counters[] = {
	COUNTER64(QUEUE_BUSY_NS, Q_BUSY_NS),
	COUNTER64(QUEUE_COMMAND_NS, Q_COMMAND_NS),
	COUNTER64(QUEUE_INSTRUCTIONS, Q_INSTRUCTIONS),
	COUNTER32(QUEUE_PREEMPTIONS, Q_PREEMPTIONS),
};

static const struct vtpu_counter device_counters[] = {
	COUNTER64(TIME_NS, TIME),
	COUNTER64(BUSY_NS, STAT_BUSY_NS),
	COUNTER64(PROGRAMS, STAT_PROGRAMS),
	COUNTER64(INSTRUCTIONS, STAT_INSTRUCTIONS),
	COUNTER64(HBM_BYTES, STAT_HBM_BYTES),
	COUNTER64(ECC_CORRECTED, STAT_ECC_CORRECTED),
	[DRM_VTPU_COUNTER_MODEL_MHZ] = { VTPU_REG_MODEL_MHZ, false, true },
	MODELLED(CYCLES),
	MODELLED(HBM_READ),
	MODELLED(HBM_WRITTEN),
	MODELLED(VMEM_BYTES),
	MODELLED(OPS),
	MODELLED(BUSY_SEQ),
	MODELLED(BUSY_DMA),
	MODELLED(BUSY_MXU),
	MODELLED(BUSY_VPU),
	MODELLED(BUSY_LINK),
	MODELLED(WAIT),
	MODELLED(FULL),
	MODELLED(SYNC),
	MODELLED(HBM_STALL),
};

static int vtpu_counters_read(struct vtpu_device *vdev, const struct vtpu_counter *table,
			      unsigned int known, unsigned int offset,
			      struct drm_vtpu_counter *counters, unsigned int num)
{
	bool timing = vtpu_read(vdev, VTPU_REG_CAPS) & VTPU_CAPS_TIMING;

	for (unsigned int i = 0; i < num; i++) {
		u32 id = counters[i].id;
		const struct vtpu_counter *counter;

		if (id >= known || !table[id].reg || counters[i].pad)
			return -EINVAL;
		counter = &table[id];
		if (counter->modelled && !timing)
			return -EOPNOTSUPP;
		counters[i].value = counter->wide ? vtpu_read64(vdev, counter->reg + offset) :
						    vtpu_read(vdev, counter->reg + offset);
	}
	return 0;
}

/*
 * The device's reset would be read as zeroes and ones, and a queue that is
 * destroyed meanwhile may have lent its place to another client.
 */
static int vtpu_perfmon_read(struct vtpu_device *vdev, struct vtpu_queue *queue,
			     struct drm_vtpu_counter *counters, unsigned int num)
{
	guard(mutex)(&vdev->reset_lock);
	if (!queue)
		return vtpu_counters_read(vdev, device_counters, ARRAY_SIZE(device_counters), 0,
					  counters, num);
	if (queue->hwq->queue != queue)
		return -ENOENT;
	return vtpu_counters_read(vdev, queue_counters, ARRAY_SIZE(queue_counters),
				  vtpu_hwq_reg(queue->hwq, 0), counters, num);
}

int vtpu_perfmon_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_vtpu_counter *counters __free(kfree) = NULL;
	const struct drm_vtpu_perfmon *args = data;
	struct vtpu_device *vdev = to_vtpu(drm);
	struct vtpu_queue *queue = NULL;
	void __user *user = u64_to_user_ptr(args->counters);
	size_t bytes;
	int ret, idx;

	if (!args->num_counters || args->num_counters > DRM_VTPU_MAX_COUNTERS)
		return -EINVAL;
	bytes = args->num_counters * sizeof(*counters);
	counters = memdup_user(user, bytes);
	if (IS_ERR(counters))
		return PTR_ERR(no_free_ptr(counters));

	if (args->queue_id) {
		queue = vtpu_queue_get(file->driver_priv, args->queue_id);
		if (!queue)
			return -ENOENT;
	} else if (!perfmon_capable()) {
		return -EACCES;
	}

	ret = vtpu_peek_begin(vdev, &idx);
	if (!ret) {
		ret = vtpu_perfmon_read(vdev, queue, counters, args->num_counters);
		vtpu_peek_end(vdev, idx);
	}
	if (queue)
		vtpu_queue_put(queue);
	if (!ret && copy_to_user(user, counters, bytes))
		ret = -EFAULT;
	return ret;
}
