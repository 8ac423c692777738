/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_RESET_H_
#define _VTPU_RESET_H_

#include <drm/vtpu_accel.h>

struct vtpu_device;
struct vtpu_hwq;

/* All but the last two under vtpu_device.reset_lock. */
void vtpu_hwq_force_off(struct vtpu_hwq *hwq, enum drm_vtpu_queue_status status);
void vtpu_hwq_hang(struct vtpu_hwq *hwq);
void vtpu_device_stop_running(struct vtpu_device *vdev);
void vtpu_device_lose(struct vtpu_device *vdev, int error);
void vtpu_device_give_up(struct vtpu_device *vdev);
void vtpu_device_restart(struct vtpu_device *vdev);
void vtpu_device_reset(struct vtpu_device *vdev);

bool vtpu_device_is_away(struct vtpu_device *vdev);

void vtpu_reset_init(struct vtpu_device *vdev);
void vtpu_reset_fini(struct vtpu_device *vdev);

#endif
