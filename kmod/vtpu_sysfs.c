// SPDX-License-Identifier: GPL-2.0
/* Attributes of the PCI device; docs/driver-sysfs.md. */

#include <linux/device.h>
#include <linux/sysfs.h>

#include "vtpu_device.h"
#include "vtpu_usage.h"

static ssize_t hw_version_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	u32 version = ((struct vtpu_device *)dev_get_drvdata(dev))->hw_version;

	return sysfs_emit(buf, "%u.%u\n", version >> 16, version & 0xffff);
}
static DEVICE_ATTR_RO(hw_version);

static ssize_t isa_version_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct vtpu_device *vdev = dev_get_drvdata(dev);

	return sysfs_emit(buf, "%u\n", vdev->isa_version);
}
static DEVICE_ATTR_RO(isa_version);

static ssize_t device_resets_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct vtpu_device *vdev = dev_get_drvdata(dev);

	return sysfs_emit(buf, "%llu\n", (u64)atomic64_read(&vdev->device_resets));
}
static DEVICE_ATTR_RO(device_resets);

static ssize_t engine_resets_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct vtpu_device *vdev = dev_get_drvdata(dev);

	return sysfs_emit(buf, "%llu\n", (u64)atomic64_read(&vdev->engine_resets));
}
static DEVICE_ATTR_RO(engine_resets);

static ssize_t queue_resets_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct vtpu_device *vdev = dev_get_drvdata(dev);

	return sysfs_emit(buf, "%llu\n", (u64)atomic64_read(&vdev->queue_resets));
}
static DEVICE_ATTR_RO(queue_resets);

static ssize_t hbm_total_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct vtpu_device *vdev = dev_get_drvdata(dev);

	return sysfs_emit(buf, "%llu\n", vdev->hbm_size);
}
static DEVICE_ATTR_RO(hbm_total);

static ssize_t hbm_used_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct vtpu_device *vdev = dev_get_drvdata(dev);

	guard(mutex)(&vdev->hbm_lock);
	return sysfs_emit(buf, "%llu\n", vdev->hbm_used);
}
static DEVICE_ATTR_RO(hbm_used);

static ssize_t busy_time_us_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%llu\n",
			  div_u64(vtpu_busy_ns(dev_get_drvdata(dev), NULL), NSEC_PER_USEC));
}
static DEVICE_ATTR_RO(busy_time_us);

static struct attribute *vtpu_sysfs_attrs[] = {
	&dev_attr_hw_version.attr,
	&dev_attr_isa_version.attr,
	&dev_attr_device_resets.attr,
	&dev_attr_engine_resets.attr,
	&dev_attr_queue_resets.attr,
	&dev_attr_hbm_total.attr,
	&dev_attr_hbm_used.attr,
	&dev_attr_busy_time_us.attr,
	NULL
};

static const struct attribute_group vtpu_sysfs_group = { .attrs = vtpu_sysfs_attrs };

const struct attribute_group *vtpu_sysfs_groups[] = { &vtpu_sysfs_group, NULL };
