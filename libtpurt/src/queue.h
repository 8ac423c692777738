/* SPDX-License-Identifier: MIT */
#ifndef RT_QUEUE_H
#define RT_QUEUE_H

#include "internal.h"

/*
 * A queue's life between failures: one channel of the back end. Points up to
 * base belong to earlier epochs. Once over, final is all that is left of it.
 */
struct rt_epoch {
    struct rt_epoch *before;
    uint64_t base;
    _Atomic uint64_t completed; /* known to have succeeded: spares a call */
    struct rt_channel *channel;
    unsigned users;   /* calls that hold the channel, and one while it is current */
    atomic_bool over; /* final is set, and the channel may be gone */
    tpurt_queue_state final;
};

#define RT_COOKIES 1024 /* jobs whose cookies are remembered */

struct tpurt_queue {
    atomic_uint refs;
    tpurt_device *device;
    tpurt_queue_desc desc;
    pthread_mutex_t submit_lock; /* orders jobs; taken before lock */
    pthread_mutex_t lock;        /* of the epochs */
    struct rt_epoch *current;
    _Atomic uint64_t submitted;
    _Atomic uint32_t cookies[RT_COOKIES]; /* by point: a hang leaves the device no record */
};

/* Submits one job; *point is its point. */
int rt_queue_submit(tpurt_queue *queue, const struct drm_vtpu_cmd *commands, uint32_t num_commands,
                    const tpurt_fence *waits, uint32_t num_waits, uint64_t *point);

/*
 * The epoch of a point, held: unless it is over, its channel stays. NULL with a
 * message when the point was never handed out. Give it back with put.
 */
struct rt_epoch *rt_epoch_get(tpurt_queue *queue, uint64_t point);
void rt_epoch_put(tpurt_queue *queue, struct rt_epoch *epoch);
/* Of an epoch that get returned. */
int rt_epoch_state(tpurt_queue *queue, struct rt_epoch *epoch, tpurt_queue_state *state);

#endif
