/* SPDX-License-Identifier: MIT */
/*
 * What memory an instruction touches: told to whoever models its cost or
 * checks its order. Command thread only.
 */
#ifndef VTPU_FOOTPRINT_H
#define VTPU_FOOTPRINT_H

#include <stdbool.h>
#include <stdint.h>

struct VtpuExec;
struct VtpuIssued;

/* `rows` pieces of `row_bytes`, `stride` bytes from start to start. */
typedef struct VtpuAccess {
    bool vmem, write; /* vmem: else global, by virtual address */
    uint64_t addr, rows, row_bytes, stride;
} VtpuAccess;

typedef void VtpuAccessFn(void *arg, const VtpuAccess *access);

/*
 * Calls fn for all that the instruction read and wrote, adjacent pieces as one.
 * It has been executed without a fault, and nothing since: its operands are in
 * their ranges, and the lists that it went by still lie in VMEM.
 */
void vtpu_footprint(struct VtpuExec *x, const struct VtpuIssued *i, VtpuAccessFn *fn, void *arg);

#endif
