/* SPDX-License-Identifier: MIT */
/*
 * The in-process back end: the machine of qemu-device/core without a kernel,
 * and here the part of the kernel driver. Context 0 is the one address space.
 *
 * Locks: lock guards the channels and the page tables; host_lock the host
 * regions. The machine's callbacks take either, and call the machine with lock
 * held, so the machine must hold no lock of its own in a callback (it says so).
 */
#ifndef RT_CORE_H
#define RT_CORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <vtpu_core.h>
#include <vtpu_hw.h>

#include "backend.h"
#include "error.h"
#include "va.h"

/* The machine's library, loaded once: the runtime itself must not need it. */
struct core_library {
    __typeof__(vtpu_core_new) *create;
    __typeof__(vtpu_core_free) *destroy;
    __typeof__(vtpu_core_mmio_read) *mmio_read;
    __typeof__(vtpu_core_mmio_write) *mmio_write;
    __typeof__(vtpu_core_doorbell) *doorbell;
    __typeof__(vtpu_core_isa_path) *isa_path;
};

struct core_region { /* host memory that the machine may reach; bus address = pointer */
    struct core_region *next;
    uint64_t start, bytes;
};

struct core_backend {
    struct rt_backend base;
    const struct core_library *lib;
    VtpuCore *machine;

    uint8_t *hbm;
    uint64_t hbm_bytes;
    struct rt_va hbm_free; /* under lock */
    uint64_t root;         /* HBM offset of the top page table */

    pthread_rwlock_t host_lock;
    struct core_region *regions;

    pthread_mutex_t lock;
    pthread_cond_t progress; /* a job ended */
    struct rt_channel *channels[VTPU_NUM_QUEUES];
    uint64_t queue_resets;

    pthread_t watchdog;
    pthread_cond_t watch; /* the watchdog must look earlier than it planned, or end */
    int64_t next_look;
    bool closing;
};

static inline struct core_backend *core_of(struct rt_backend *be)
{
    return (struct core_backend *)be;
}

static inline uint64_t core_read(struct core_backend *core, uint64_t reg, unsigned size)
{
    return core->lib->mmio_read(core->machine, reg, size);
}

static inline void core_write(struct core_backend *core, uint64_t reg, uint64_t value,
                              unsigned size)
{
    core->lib->mmio_write(core->machine, reg, value, size);
}

int64_t core_now(void); /* CLOCK_MONOTONIC, ns */

/* core_memory.c */
int core_memory_init(struct core_backend *core);
void core_memory_fini(struct core_backend *core);
int core_memory_create(struct rt_backend *be, uint64_t bytes, bool hbm, struct rt_memory **memory);
int core_memory_import(struct rt_backend *be, void *data, uint64_t bytes, bool read_only,
                       struct rt_memory **memory);
void core_memory_destroy(struct rt_backend *be, struct rt_memory *memory);
int core_memory_map(struct rt_backend *be, struct rt_memory *memory, void **data);
int core_bind(struct rt_backend *be, struct rt_memory *memory, uint64_t va, uint32_t rights);
void core_unbind(struct rt_backend *be, struct rt_memory *memory, uint64_t va);
/* Host memory for the machine, zeroed; NULL: none left. */
void *core_host_alloc(struct core_backend *core, uint64_t bytes);
void core_host_free(struct core_backend *core, void *data, uint64_t bytes);
bool core_dma_read(void *opaque, uint64_t address, void *data, size_t bytes);
bool core_dma_write(void *opaque, uint64_t address, const void *data, size_t bytes);

/* core_channel.c */
int core_channel_create(struct rt_backend *be, uint32_t priority, uint32_t timeout_ms,
                        uint64_t base, struct rt_channel **channel);
void core_channel_destroy(struct rt_backend *be, struct rt_channel *channel);
int core_submit(struct rt_backend *be, struct rt_channel *channel,
                const struct drm_vtpu_cmd *commands, uint32_t num_commands,
                const struct rt_wait *waits, uint32_t num_waits, uint64_t point);
int core_wait(struct rt_backend *be, struct rt_channel *channel, uint64_t point,
              int64_t timeout_ns);
int core_notify(struct rt_backend *be, struct rt_channel *channel, uint64_t point, int eventfd);
int core_state(struct rt_backend *be, struct rt_channel *channel, tpurt_queue_state *state);
void core_irq(void *opaque, unsigned vector);
/* Fails the jobs that are past their time; returns when to look again. Under lock. */
int64_t core_check_deadlines(struct core_backend *core);

#endif
