/* SPDX-License-Identifier: MIT */
/*
 * What commands and engines share: faults, scratch memory, lists that lie
 * apart from results, dirty HBM. Command thread only.
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

bool vtpu_vmem_apart(VtpuExec *x, uint64_t list, uint64_t list_bytes, uint64_t dst,
                     uint64_t rows, uint64_t row_bytes, uint64_t stride)
{
    uint64_t bytes = vtpu_extent(rows, row_bytes, stride);

    if (list_bytes && bytes && list < dst + bytes && dst < list + list_bytes) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_WRITE, list);
    }
    return true;
}

void vtpu_dirty_report(VtpuExec *x)
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
