/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_PM_H_
#define _VTPU_PM_H_

#include <linux/pm.h>

#include "vtpu_device.h"

extern const struct dev_pm_ops vtpu_pm_ops;

/* vtpu_pm.c */
int vtpu_pm_init(struct vtpu_device *vdev);
void vtpu_pm_start(struct vtpu_device *vdev);
void vtpu_pm_stop(struct vtpu_device *vdev);
void vtpu_pm_gone(struct vtpu_device *vdev);
int vtpu_pm_get(struct vtpu_device *vdev);
void vtpu_pm_put(struct vtpu_device *vdev);

/* vtpu_save.c */
int vtpu_save_reserve(struct vtpu_device *vdev);
int vtpu_save(struct vtpu_device *vdev);
void vtpu_save_restore(struct vtpu_device *vdev);
void vtpu_save_drop(struct vtpu_device *vdev);

#endif
