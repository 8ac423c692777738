/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_REGS_H_
#define _VTPU_REGS_H_

#include <linux/types.h>

struct drm_printer;
struct vtpu_device;
struct vtpu_hwq;

/* Registers that can be read without consequence, of the device and of a queue. */
#define VTPU_NUM_DEVICE_REGS	41
#define VTPU_NUM_QUEUE_REGS	22

struct vtpu_device_regs {
	u64 value[VTPU_NUM_DEVICE_REGS];
};

struct vtpu_queue_regs {
	u64 value[VTPU_NUM_QUEUE_REGS];
};

int vtpu_peek_begin(struct vtpu_device *vdev, int *idx);
void vtpu_peek_end(struct vtpu_device *vdev, int idx);

void vtpu_device_regs_read(struct vtpu_device *vdev, struct vtpu_device_regs *regs);
void vtpu_device_regs_print(const struct vtpu_device_regs *regs, struct drm_printer *p);
void vtpu_queue_regs_read(struct vtpu_hwq *hwq, struct vtpu_queue_regs *regs);
void vtpu_queue_regs_print(const struct vtpu_queue_regs *regs, struct drm_printer *p);
u64 vtpu_queue_regs_get(const struct vtpu_queue_regs *regs, unsigned int reg);

#endif
