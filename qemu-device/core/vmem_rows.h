/* SPDX-License-Identifier: MIT */
/*
 * An instruction's operands in VMEM: rows of bytes, checked. Every engine's
 * instruction has some, so they are here to be inlined. Command thread only.
 */
#ifndef VTPU_VMEM_ROWS_H
#define VTPU_VMEM_ROWS_H

#include "machine.h"

/* One past the last byte of the rows, from their start: no overflow, since a
 * row count and its stride are below 2^21 and 2^31 and row_bytes below 2^40. */
static inline uint64_t vtpu_extent(uint64_t rows, uint64_t row_bytes, uint64_t stride)
{
    return rows && row_bytes ? (rows - 1) * stride + row_bytes : 0;
}

static inline uint8_t *vtpu_vmem_bytes(VtpuExec *x, uint64_t addr, uint64_t bytes, uint32_t access)
{
    if (addr > VTPU_VMEM_BYTES || bytes > VTPU_VMEM_BYTES - addr) {
        vtpu_fault(x, VTPU_FAULT_VMEM_RANGE, access, addr);
        return NULL;
    }
    return x->vmem->data + addr;
}

/* Rows or row_bytes 0 touch nothing. NULL with a fault. */
static inline uint8_t *vtpu_vmem_read(VtpuExec *x, uint64_t addr, uint64_t rows, uint64_t row_bytes,
                                      uint64_t stride)
{
    return vtpu_vmem_bytes(x, addr, vtpu_extent(rows, row_bytes, stride), VTPU_ACCESS_READ);
}

static inline uint8_t *vtpu_vmem_write(VtpuExec *x, uint64_t addr, uint64_t rows,
                                       uint64_t row_bytes, uint64_t stride)
{
    uint64_t bytes = vtpu_extent(rows, row_bytes, stride);

    /* Threads write different rows at once: rows must not overlap. */
    if (rows > 1 && stride < row_bytes) {
        vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_WRITE, addr);
        return NULL;
    }
    uint8_t *host = vtpu_vmem_bytes(x, addr, bytes, VTPU_ACCESS_WRITE);
    if (!host || (x->core->undo.wanted && !vtpu_restart_keep(x, addr, bytes))) {
        return NULL;
    }
    if (addr + bytes > x->vmem->used) {
        x->vmem->used = addr + bytes;
    }
    return host;
}

#endif
