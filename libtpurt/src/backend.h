/* SPDX-License-Identifier: MIT */
/*
 * What a back end does. Everything above it (names, lifetimes, address choice,
 * recordings, points that outlive a failure) is common.
 *
 * A channel is a queue until its first failure. Points on it are the queue's,
 * ascending from base + 1 in the order of submit(), one a job. Calls on one
 * channel may come from several threads, except that submit() is serialised
 * and destroy comes last. Failures leave a message (rt_fail).
 */
#ifndef RT_BACKEND_H
#define RT_BACKEND_H

#include <stdbool.h>
#include <tpurt.h>

/* The driver's command, which the in-process machine takes as well. */
#include <drm/vtpu_accel.h>

struct rt_backend {
    const struct rt_backend_ops *ops; /* the rest is the back end's */
};

struct rt_memory;  /* a buffer's bytes */
struct rt_channel;

struct rt_wait {
    struct rt_channel *channel;
    uint64_t point;
};

struct rt_backend_ops {
    void (*close)(struct rt_backend *be);
    int (*get_memory)(struct rt_backend *be, uint64_t *hbm_bytes, uint64_t *hbm_used);
    /* Fills what the back end knows: resets and counters. */
    int (*get_stats)(struct rt_backend *be, tpurt_device_stats *stats);

    /* Zeroed; bytes is a multiple of pages. */
    int (*memory_create)(struct rt_backend *be, uint64_t bytes, bool hbm,
                         struct rt_memory **memory);
    /* The caller's, from data on; both multiples of pages. Never mapped. */
    int (*memory_import)(struct rt_backend *be, void *data, uint64_t bytes, bool read_only,
                         struct rt_memory **memory);
    void (*memory_destroy)(struct rt_backend *be, struct rt_memory *memory);
    /* Idempotent; the mapping lives as long as the memory. */
    int (*memory_map)(struct rt_backend *be, struct rt_memory *memory, void **data);
    /* The whole memory at va, with DRM_VTPU_VM_* rights. */
    int (*bind)(struct rt_backend *be, struct rt_memory *memory, uint64_t va, uint32_t rights);
    void (*unbind)(struct rt_backend *be, struct rt_memory *memory, uint64_t va);

    int (*channel_create)(struct rt_backend *be, uint32_t priority, uint32_t timeout_ms,
                          uint64_t base, struct rt_channel **channel);
    void (*channel_destroy)(struct rt_backend *be, struct rt_channel *channel);
    /* TPURT_ERROR_LOST and the like; TPURT_ERROR_CANCELLED: the channel has failed. */
    int (*submit)(struct rt_backend *be, struct rt_channel *channel,
                  const struct drm_vtpu_cmd *commands, uint32_t num_commands,
                  const struct rt_wait *waits, uint32_t num_waits, uint64_t point);
    /* TPURT_OK: the job succeeded. TPURT_ERROR_CANCELLED: it did not, see state(). */
    int (*wait)(struct rt_backend *be, struct rt_channel *channel, uint64_t point,
                int64_t timeout_ns);
    int (*notify)(struct rt_backend *be, struct rt_channel *channel, uint64_t point, int eventfd);
    /* Everything but submitted and fault_cookie. */
    int (*state)(struct rt_backend *be, struct rt_channel *channel, tpurt_queue_state *state);
};

/* Opens the driver at a device file, and fills *info but struct_size. */
int rt_drm_open(const char *path, tpurt_device_info *info, struct rt_backend **be);
/* Finds the first vTPU under /dev/accel; false when there is none. */
bool rt_drm_find(char *path, unsigned path_bytes);
/* Starts a machine in this process. */
int rt_core_open(const tpurt_device_desc *desc, tpurt_device_info *info, struct rt_backend **be);

#endif
