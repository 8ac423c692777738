/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_HWMON_H_
#define _VTPU_HWMON_H_

#include <linux/kconfig.h>

struct vtpu_device;

#if IS_REACHABLE(CONFIG_HWMON)
int vtpu_hwmon_init(struct vtpu_device *vdev);
#else
static inline int vtpu_hwmon_init(struct vtpu_device *vdev)
{
	return 0;
}
#endif

#endif
