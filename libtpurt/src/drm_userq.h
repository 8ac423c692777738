/* SPDX-License-Identifier: MIT */
/*
 * The driver's user queues: jobs go into a ring that this process shares with the
 * device, without the kernel. Points are the fence values of the jobs' last
 * entries.
 */
#ifndef RT_DRM_USERQ_H
#define RT_DRM_USERQ_H

#include <stdbool.h>
#include <stdint.h>

#include <drm/vtpu_accel.h>

struct rt_userq;

/* Of a driver queue that was created as one. Points begin at base + 1. */
int rt_userq_open(int fd, uint32_t queue, uint64_t base, struct rt_userq **userq);
/* Before the driver's queue is destroyed. */
void rt_userq_close(struct rt_userq *userq);
/*
 * Calls are serialised. Sleeps while the ring is full; 0 or an errno, EIO: it has
 * failed, as a wait has found. Before that it takes jobs which will not run.
 */
int rt_userq_submit(struct rt_userq *userq, const struct drm_vtpu_cmd *commands, uint32_t count,
                    uint64_t point);
/* The last point whose job has ended well, base when there is none. */
uint64_t rt_userq_completed(const struct rt_userq *userq);
/* Until an absolute time; 0 or an errno, EIO: it has failed before. */
int rt_userq_wait(struct rt_userq *userq, uint64_t point, int64_t deadline_ns);
/* Adds 1 to a copy of the eventfd when the point has ended or the queue has failed. */
int rt_userq_notify(struct rt_userq *userq, uint64_t point, int eventfd);

#endif
