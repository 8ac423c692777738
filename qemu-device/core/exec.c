/* SPDX-License-Identifier: MIT */
/*
 * What commands and engines share: faults, scratch memory, checked VMEM
 * ranges, dirty HBM. Command thread only.
 */
#include <stdlib.h>
#include <string.h>

#include "machine.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

bool vtpu_fault(VtpuExec *x, uint32_t cause, uint32_t access, uint64_t addr)
{
    x->fault.cause = cause;
    x->fault.access = access;
    x->fault.addr = addr;
    return false;
}

uint8_t *vtpu_buffer(VtpuExec *x, unsigned which, uint64_t bytes)
{
    VtpuBuffer *buffer = &x->core->buffer[which];

    if (bytes > buffer->bytes || !buffer->data) {
        free(buffer->data);
        *buffer = (VtpuBuffer) { NULL, 0 };
        uint64_t size = (bytes + 4095) & ~4095ull;
        size = size ? size : 4096;
        if (size < bytes || size > SIZE_MAX / 2 ||
            !(buffer->data = aligned_alloc(4096, size))) {
            vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, 0);
            return NULL;
        }
        buffer->bytes = size;
    }
    /* A sanitiser is to see a user that wants more than was asked for. */
    ASAN_UNPOISON_MEMORY_REGION(buffer->data, buffer->bytes);
    ASAN_POISON_MEMORY_REGION(buffer->data + bytes, buffer->bytes - bytes);
    return buffer->data;
}

/* One past the last byte of the rows, from their start: no overflow, since a
 * row count and its stride are below 2^21 and 2^31 and row_bytes below 2^40. */
static uint64_t extent(uint64_t rows, uint64_t row_bytes, uint64_t stride)
{
    return rows && row_bytes ? (rows - 1) * stride + row_bytes : 0;
}

static uint8_t *vmem(VtpuExec *x, uint64_t addr, uint64_t bytes, uint32_t access)
{
    if (addr > VTPU_VMEM_BYTES || bytes > VTPU_VMEM_BYTES - addr) {
        vtpu_fault(x, VTPU_FAULT_VMEM_RANGE, access, addr);
        return NULL;
    }
    return x->vmem->data + addr;
}

uint8_t *vtpu_vmem_read(VtpuExec *x, uint64_t addr, uint64_t rows, uint64_t row_bytes,
                        uint64_t stride)
{
    return vmem(x, addr, extent(rows, row_bytes, stride), VTPU_ACCESS_READ);
}

uint8_t *vtpu_vmem_write(VtpuExec *x, uint64_t addr, uint64_t rows, uint64_t row_bytes,
                         uint64_t stride)
{
    uint64_t bytes = extent(rows, row_bytes, stride);
    uint8_t *host;

    /* Threads write different rows at once: rows must not overlap. */
    if (rows > 1 && stride < row_bytes) {
        vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_WRITE, addr);
        return NULL;
    }
    host = vmem(x, addr, bytes, VTPU_ACCESS_WRITE);
    if (host && !vtpu_restart_keep(x, addr, bytes)) {
        return NULL;
    }
    if (host && addr + bytes > x->vmem->used) {
        x->vmem->used = addr + bytes;
    }
    return host;
}

bool vtpu_vmem_apart(VtpuExec *x, uint64_t list, uint64_t list_bytes, uint64_t dst,
                     uint64_t rows, uint64_t row_bytes, uint64_t stride)
{
    uint64_t bytes = extent(rows, row_bytes, stride);

    if (list_bytes && bytes && list < dst + bytes && dst < list + list_bytes) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_WRITE, list);
    }
    return true;
}

void vtpu_dirty_flush(VtpuExec *x)
{
    VtpuCore *core = x->core;

    if (core->dirty_end > core->dirty_start && core->ops.hbm_dirty) {
        core->ops.hbm_dirty(core->opaque, core->dirty_start, core->dirty_end - core->dirty_start);
    }
    core->dirty_start = core->dirty_end = 0;
}

void vtpu_dirty(VtpuExec *x, const uint8_t *host, uint64_t len)
{
    VtpuCore *core = x->core;
    uint64_t start = (uint64_t)(host - core->hbm);

    if (start != core->dirty_end) {
        vtpu_dirty_flush(x);
        core->dirty_start = start;
    }
    core->dirty_end = start + len;
}
