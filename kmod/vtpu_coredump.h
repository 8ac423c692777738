/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_COREDUMP_H_
#define _VTPU_COREDUMP_H_

struct vtpu_device;
struct vtpu_queue;
struct vtpu_vm;

int vtpu_coredump_init(struct vtpu_device *vdev);
void vtpu_coredump(struct vtpu_device *vdev, struct vtpu_queue *queue);
void vtpu_coredump_flush(struct vtpu_device *vdev);
void vtpu_coredump_wait(struct vtpu_vm *vm);

#endif
