/* SPDX-License-Identifier: MIT */
/* The objects behind the public handles, and what their files share. */
#ifndef RT_INTERNAL_H
#define RT_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "backend.h"
#include "error.h"
#include "va.h"

#define RT_HUGE_BYTES 0x200000ull /* the hardware's large page */

struct tpurt_device {
    atomic_uint refs;
    struct rt_backend *be;
    tpurt_device_info info;
    pthread_mutex_t lock; /* of va */
    struct rt_va va;
    _Atomic uint64_t hbm, host, jobs, commands;
};

struct tpurt_buffer {
    atomic_uint refs;
    tpurt_device *device;
    struct rt_memory *memory;
    uint64_t bytes, allocated, va;
    uint32_t flags;
    _Atomic(void *) data; /* once mapped */
    char name[48];
};

/* Adds a reference; an object with none left is the caller's bug. */
#define RT_RETAIN(object) \
    ((void)((object) && atomic_fetch_add_explicit(&(object)->refs, 1, memory_order_relaxed)), \
     (object))
/* True when that was the last reference. */
#define RT_DROP(object) \
    ((object) && atomic_fetch_sub_explicit(&(object)->refs, 1, memory_order_acq_rel) == 1)

/*
 * Structures across versions: copies the caller's descriptor into a zeroed
 * one of ours, or ours out to the caller's. what names it in the message.
 */
int rt_struct_in(void *ours, uint32_t our_bytes, const void *theirs, uint32_t minimum,
                 const char *what);
int rt_struct_out(void *theirs, const void *ours, uint32_t our_bytes, uint32_t minimum,
                  const char *what);

#endif
