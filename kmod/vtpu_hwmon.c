// SPDX-License-Identifier: GPL-2.0
/*
 * The chip's sensors, as the kernel's Documentation/hwmon/sysfs-interface.rst has
 * them; docs/driver-sysfs.md. The hwmon core lets readers finish before it
 * unregisters, and that is before the registers are unmapped.
 */

#include <linux/hwmon.h>

#include "vtpu_device.h"
#include "vtpu_hwmon.h"
#include "vtpu_regs.h"

/* Everything reads all ones when the device is no longer there. */
static int vtpu_sensor_read(struct vtpu_device *vdev, unsigned int reg, u32 *value)
{
	*value = vtpu_read(vdev, reg);
	return *value == U32_MAX ? -ENODEV : 0;
}

static int vtpu_temp_read(struct vtpu_device *vdev, u32 attr, long *value)
{
	u32 temp, critical;
	int ret;

	ret = vtpu_sensor_read(vdev, VTPU_REG_SENSOR_TEMP, &temp);
	if (ret)
		return ret;
	ret = vtpu_sensor_read(vdev, VTPU_REG_SENSOR_TEMP_CRITICAL, &critical);
	if (ret)
		return ret;
	switch (attr) {
	case hwmon_temp_input:
		*value = (s32)temp;
		return 0;
	case hwmon_temp_crit:
		*value = (s32)critical;
		return 0;
	case hwmon_temp_crit_alarm:
		*value = (s32)temp > (s32)critical;
		return 0;
	default:
		return -EOPNOTSUPP;
	}
}

static int vtpu_power_read(struct vtpu_device *vdev, long *value)
{
	u32 power;
	int ret;

	ret = vtpu_sensor_read(vdev, VTPU_REG_SENSOR_POWER, &power);
	*value = power;
	return ret;
}

static int vtpu_energy_read(struct vtpu_device *vdev, long *value)
{
	u64 energy = vtpu_read64(vdev, VTPU_REG_SENSOR_ENERGY);

	*value = energy;
	return energy == U64_MAX ? -ENODEV : 0;
}

static int vtpu_hwmon_read_awake(struct vtpu_device *vdev, enum hwmon_sensor_types type, u32 attr,
				 long *value)
{
	switch (type) {
	case hwmon_temp:
		return vtpu_temp_read(vdev, attr, value);
	case hwmon_power:
		return vtpu_power_read(vdev, value);
	case hwmon_energy:
		return vtpu_energy_read(vdev, value);
	default:
		return -EOPNOTSUPP;
	}
}

static int vtpu_hwmon_read(struct device *dev, enum hwmon_sensor_types type, u32 attr, int channel,
			   long *value)
{
	struct vtpu_device *vdev = dev_get_drvdata(dev);
	int ret, idx;

	ret = vtpu_peek_begin(vdev, &idx);
	if (ret)
		return ret;
	ret = vtpu_hwmon_read_awake(vdev, type, attr, value);
	vtpu_peek_end(vdev, idx);
	return ret;
}

static umode_t vtpu_hwmon_is_visible(const void *data, enum hwmon_sensor_types type, u32 attr,
				     int channel)
{
	return 0444;
}

static const struct hwmon_channel_info *const vtpu_hwmon_channels[] = {
	HWMON_CHANNEL_INFO(temp, HWMON_T_INPUT | HWMON_T_CRIT | HWMON_T_CRIT_ALARM),
	HWMON_CHANNEL_INFO(power, HWMON_P_AVERAGE),
	HWMON_CHANNEL_INFO(energy, HWMON_E_INPUT),
	NULL
};

static const struct hwmon_ops vtpu_hwmon_ops = {
	.is_visible = vtpu_hwmon_is_visible,
	.read = vtpu_hwmon_read,
};

static const struct hwmon_chip_info vtpu_hwmon_chip = {
	.ops = &vtpu_hwmon_ops,
	.info = vtpu_hwmon_channels,
};

int vtpu_hwmon_init(struct vtpu_device *vdev)
{
	struct device *hwmon;

	if (!(vtpu_read(vdev, VTPU_REG_CAPS) & VTPU_CAPS_SENSORS))
		return 0;
	hwmon = devm_hwmon_device_register_with_info(vdev->drm.dev, "vtpu", vdev, &vtpu_hwmon_chip,
						     NULL);
	return PTR_ERR_OR_ZERO(hwmon);
}
