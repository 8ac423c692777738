/* SPDX-License-Identifier: MIT */
/*
 * Allocator of address ranges, first fit. It hands out device addresses and,
 * for the in-process machine, HBM. Not locked: the owner is.
 */
#ifndef RT_VA_H
#define RT_VA_H

#include <stdbool.h>
#include <stdint.h>

struct rt_range {
    uint64_t start, end; /* free: [start, end) */
    struct rt_range *next;
};

struct rt_va {
    struct rt_range *free; /* ascending, never adjacent */
    uint64_t used;
};

bool rt_va_init(struct rt_va *va, uint64_t start, uint64_t end);
void rt_va_fini(struct rt_va *va);
/* align is a power of two, bytes not 0; false: no such range, or no host memory. */
bool rt_va_alloc(struct rt_va *va, uint64_t bytes, uint64_t align, uint64_t *address);
/* Takes exactly [address, address + bytes); false: not all of it is free. */
bool rt_va_take(struct rt_va *va, uint64_t address, uint64_t bytes);
/* Gives back what was allocated or taken, whole. */
void rt_va_free(struct rt_va *va, uint64_t address, uint64_t bytes);

#endif
