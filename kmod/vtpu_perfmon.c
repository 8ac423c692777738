// SPDX-License-Identifier: GPL-2.0
/*
 * PERFMON: counters of a process's queue, and those of the device.
 *
 * What the device counts is what all its clients do together, from which one
 * could watch another: that takes CAP_PERFMON. A queue's counters are its own.
 */

#include <linux/capability.h>
#include <linux/cleanup.h>
#include <linux/nospec.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "vtpu_device.h"
#include "vtpu_perfmon.h"
#include "vtpu_queue.h"

#define WIDE		BIT(0)	/* a register of 64 bits */
#define MODELLED	BIT(1)	/* there when the device times programs on a model */

/* Register 0 is the device's ID, no counter. */
struct vtpu_counter {
	u16 reg;
	u16 flags;
};

static const struct vtpu_counter queue_counters[] = {
	[DRM_VTPU_COUNTER_QUEUE_BUSY_NS] = { VTPU_REG_Q_BUSY_NS, WIDE },
	[DRM_VTPU_COUNTER_QUEUE_COMMAND_NS] = { VTPU_REG_Q_COMMAND_NS, WIDE },
	[DRM_VTPU_COUNTER_QUEUE_INSTRUCTIONS] = { VTPU_REG_Q_INSTRUCTIONS, WIDE },
	[DRM_VTPU_COUNTER_QUEUE_PREEMPTIONS] = { VTPU_REG_Q_PREEMPTIONS, 0 },
};

static const struct vtpu_counter device_counters[] = {
	[DRM_VTPU_COUNTER_TIME_NS] = { VTPU_REG_TIME, WIDE },
	[DRM_VTPU_COUNTER_BUSY_NS] = { VTPU_REG_STAT_BUSY_NS, WIDE },
	[DRM_VTPU_COUNTER_PROGRAMS] = { VTPU_REG_STAT_PROGRAMS, WIDE },
	[DRM_VTPU_COUNTER_INSTRUCTIONS] = { VTPU_REG_STAT_INSTRUCTIONS, WIDE },
	[DRM_VTPU_COUNTER_HBM_BYTES] = { VTPU_REG_STAT_HBM_BYTES, WIDE },
	[DRM_VTPU_COUNTER_ECC_CORRECTED] = { VTPU_REG_STAT_ECC_CORRECTED, WIDE },
	[DRM_VTPU_COUNTER_MODEL_MHZ] = { VTPU_REG_MODEL_MHZ, MODELLED },
	[DRM_VTPU_COUNTER_MODEL_CYCLES] = { VTPU_REG_STAT_MODEL_CYCLES, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_HBM_READ] = { VTPU_REG_STAT_MODEL_HBM_READ, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_HBM_WRITTEN] = { VTPU_REG_STAT_MODEL_HBM_WRITTEN, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_VMEM_BYTES] = { VTPU_REG_STAT_MODEL_VMEM_BYTES, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_OPS] = { VTPU_REG_STAT_MODEL_OPS, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_BUSY_SEQ] = { VTPU_REG_STAT_MODEL_BUSY_SEQ, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_BUSY_DMA] = { VTPU_REG_STAT_MODEL_BUSY_DMA, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_BUSY_MXU] = { VTPU_REG_STAT_MODEL_BUSY_MXU, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_BUSY_VPU] = { VTPU_REG_STAT_MODEL_BUSY_VPU, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_BUSY_LINK] = { VTPU_REG_STAT_MODEL_BUSY_LINK, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_WAIT] = { VTPU_REG_STAT_MODEL_WAIT, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_FULL] = { VTPU_REG_STAT_MODEL_FULL, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_SYNC] = { VTPU_REG_STAT_MODEL_SYNC, WIDE | MODELLED },
	[DRM_VTPU_COUNTER_MODEL_HBM_STALL] = { VTPU_REG_STAT_MODEL_HBM_STALL, WIDE | MODELLED },
};

static int vtpu_counters_read(struct vtpu_device *vdev, const struct vtpu_counter *table,
			      unsigned int known, unsigned int offset,
			      struct drm_vtpu_counter *counters, unsigned int num)
{
	bool timing = vtpu_read(vdev, VTPU_REG_CAPS) & VTPU_CAPS_TIMING;

	for (unsigned int i = 0; i < num; i++) {
		u32 id = counters[i].id;
		const struct vtpu_counter *counter;

		if (id >= known || counters[i].pad)
			return -EINVAL;
		counter = &table[array_index_nospec(id, known)];
		if (!counter->reg)
			return -EINVAL;
		if (counter->flags & MODELLED && !timing)
			return -EOPNOTSUPP;
		counters[i].value = counter->flags & WIDE ?
				    vtpu_read64(vdev, counter->reg + offset) :
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
		return PTR_ERR(counters);

	if (args->queue_id) {
		queue = vtpu_queue_get(file->driver_priv, args->queue_id);
		if (!queue)
			return -ENOENT;
	} else if (!perfmon_capable()) {
		return -EACCES;
	}

	ret = -ENODEV;
	if (vtpu_dev_enter(vdev, &idx)) {
		ret = vtpu_perfmon_read(vdev, queue, counters, args->num_counters);
		vtpu_dev_exit(vdev, idx);
	}
	if (queue)
		vtpu_queue_put(queue);
	if (!ret && copy_to_user(user, counters, bytes))
		ret = -EFAULT;
	return ret;
}
