/* SPDX-License-Identifier: MIT */
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

#define READ_STEP (1u << 20) /* a signal or a full pipe cannot hold more than this */

static const uint32_t known_flags =
    TPURT_BUFFER_HBM | TPURT_BUFFER_READ_ONLY | TPURT_BUFFER_EXECUTABLE;

/* A page nobody maps follows each range, so that overruns fault. */
static uint64_t va_bytes(const tpurt_buffer *buffer)
{
    return buffer->allocated + buffer->device->info.page_bytes;
}

static int place(tpurt_buffer *buffer, uint64_t wanted)
{
    tpurt_device *dev = buffer->device;
    uint64_t page = dev->info.page_bytes;
    uint64_t align = buffer->allocated >= RT_HUGE_BYTES ? RT_HUGE_BYTES : page;
    bool ok;

    if (wanted & (page - 1))
        return rt_fail(TPURT_ERROR_INVALID,
                       "buffer \"%s\": address 0x%" PRIx64 " is no multiple of %" PRIu64,
                       buffer->name, wanted, page);
    pthread_mutex_lock(&dev->lock);
    if (wanted) {
        ok = rt_va_take(&dev->va, wanted, va_bytes(buffer));
        buffer->va = wanted;
    } else {
        ok = rt_va_alloc(&dev->va, va_bytes(buffer), align, &buffer->va);
    }
    pthread_mutex_unlock(&dev->lock);
    if (ok)
        return TPURT_OK;
    if (wanted)
        return rt_fail(TPURT_ERROR_INVALID,
                       "buffer \"%s\": %" PRIu64 " bytes at 0x%" PRIx64
                       " are not free within 0x%" PRIx64 "..0x%" PRIx64,
                       buffer->name, buffer->allocated, wanted, dev->info.va_start,
                       dev->info.va_end);
    return rt_fail(TPURT_ERROR_OUT_OF_MEMORY,
                   "buffer \"%s\": no free device addresses for %" PRIu64 " bytes", buffer->name,
                   buffer->allocated);
}

static void unplace(tpurt_buffer *buffer)
{
    pthread_mutex_lock(&buffer->device->lock);
    rt_va_free(&buffer->device->va, buffer->va, va_bytes(buffer));
    pthread_mutex_unlock(&buffer->device->lock);
}

static uint32_t rights(uint32_t flags)
{
    uint32_t value = DRM_VTPU_VM_READ;

    if (flags & TPURT_BUFFER_EXECUTABLE)
        value |= DRM_VTPU_VM_EXEC;
    else if (!(flags & TPURT_BUFFER_READ_ONLY))
        value |= DRM_VTPU_VM_WRITE;
    return value;
}

static _Atomic uint64_t *account(tpurt_buffer *buffer)
{
    return buffer->flags & TPURT_BUFFER_HBM ? &buffer->device->hbm : &buffer->device->host;
}

static int create(tpurt_buffer *buffer, uint64_t wanted_va)
{
    struct rt_backend *be = buffer->device->be;
    void *data = atomic_load_explicit(&buffer->data, memory_order_relaxed);
    int status;

    if (data)
        status = be->ops->memory_import(be, data, buffer->allocated,
                                        buffer->flags & TPURT_BUFFER_READ_ONLY, &buffer->memory);
    else
        status = be->ops->memory_create(be, buffer->allocated, buffer->flags & TPURT_BUFFER_HBM,
                                        &buffer->memory);
    if (status)
        return status;
    status = place(buffer, wanted_va);
    if (!status) {
        status = be->ops->bind(be, buffer->memory, buffer->va, rights(buffer->flags));
        if (status)
            unplace(buffer);
    }
    if (status)
        be->ops->memory_destroy(be, buffer->memory);
    return status;
}

/* Of the caller's memory when there is data. */
static int buffer_new(tpurt_device *device, const tpurt_buffer_desc *desc, void *data,
                      tpurt_buffer **buffer)
{
    tpurt_buffer_desc ours;
    tpurt_buffer *buf;
    uint64_t page;
    int status;

    if (!device || !buffer)
        return rt_fail(TPURT_ERROR_INVALID, "device or buffer is NULL");
    status = rt_struct_in(&ours, sizeof(ours), desc, offsetof(tpurt_buffer_desc, va),
                          "tpurt_buffer_desc");
    if (status)
        return status;
    page = device->info.page_bytes;
    if (ours.flags & ~known_flags)
        return rt_fail(TPURT_ERROR_INVALID, "buffer: unknown flags 0x%x", ours.flags & ~known_flags);
    if (!ours.bytes || ours.bytes > device->info.va_end - device->info.va_start - page)
        return rt_fail(TPURT_ERROR_INVALID,
                       "buffer \"%s\": %" PRIu64 " bytes is not 1..%" PRIu64,
                       ours.name ? ours.name : "", ours.bytes,
                       device->info.va_end - device->info.va_start - page);
    if (data && (ours.flags & TPURT_BUFFER_HBM || ((uintptr_t)data | ours.bytes) & (page - 1)))
        return rt_fail(TPURT_ERROR_INVALID,
                       "buffer \"%s\": %" PRIu64 " bytes at %p are not whole pages of %" PRIu64
                       " in host memory",
                       ours.name ? ours.name : "", ours.bytes, data, page);
    buf = calloc(1, sizeof(*buf));
    if (!buf)
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a buffer");
    atomic_init(&buf->refs, 1);
    atomic_init(&buf->data, data);
    buf->device = device;
    buf->bytes = ours.bytes;
    buf->allocated = (ours.bytes + page - 1) & ~(page - 1);
    buf->flags = ours.flags;
    if (buf->flags & TPURT_BUFFER_EXECUTABLE)
        buf->flags |= TPURT_BUFFER_READ_ONLY;
    snprintf(buf->name, sizeof(buf->name), "%s", ours.name ? ours.name : "");
    status = create(buf, ours.va);
    if (status) {
        free(buf);
        return status;
    }
    tpurt_device_retain(device);
    atomic_fetch_add(account(buf), buf->allocated);
    *buffer = buf;
    return TPURT_OK;
}

int tpurt_buffer_create(tpurt_device *device, const tpurt_buffer_desc *desc, tpurt_buffer **buffer)
{
    return buffer_new(device, desc, NULL, buffer);
}

int tpurt_buffer_import(tpurt_device *device, const tpurt_buffer_desc *desc, void *data,
                        tpurt_buffer **buffer)
{
    if (!data)
        return rt_fail(TPURT_ERROR_INVALID, "data is NULL");
    return buffer_new(device, desc, data, buffer);
}

tpurt_buffer *tpurt_buffer_retain(tpurt_buffer *buffer)
{
    return RT_RETAIN(buffer);
}

void tpurt_buffer_release(tpurt_buffer *buffer)
{
    struct rt_backend *be;
    tpurt_device *device;

    if (!RT_DROP(buffer))
        return;
    device = buffer->device;
    be = device->be;
    be->ops->unbind(be, buffer->memory, buffer->va);
    be->ops->memory_destroy(be, buffer->memory);
    unplace(buffer);
    atomic_fetch_sub(account(buffer), buffer->allocated);
    free(buffer);
    tpurt_device_release(device);
}

int tpurt_buffer_get_info(tpurt_buffer *buffer, tpurt_buffer_info *info)
{
    tpurt_buffer_info ours = {
        .flags = buffer->flags,
        .bytes = buffer->bytes,
        .allocated = buffer->allocated,
        .va = buffer->va,
        .name = buffer->name,
    };

    return rt_struct_out(info, &ours, sizeof(ours), offsetof(tpurt_buffer_info, name),
                         "tpurt_buffer_info");
}

int tpurt_buffer_map(tpurt_buffer *buffer, void **data)
{
    void *address = atomic_load_explicit(&buffer->data, memory_order_acquire);
    int status;

    if (!address) {
        status = buffer->device->be->ops->memory_map(buffer->device->be, buffer->memory, &address);
        if (status)
            return status;
        atomic_store_explicit(&buffer->data, address, memory_order_release);
    }
    *data = address;
    return TPURT_OK;
}

static int range_of(tpurt_buffer *buffer, uint64_t offset, uint64_t bytes, char **data)
{
    void *start;
    int status;

    if (offset > buffer->bytes || bytes > buffer->bytes - offset)
        return rt_fail(TPURT_ERROR_INVALID,
                       "buffer \"%s\": %" PRIu64 " bytes at offset %" PRIu64
                       " end past its %" PRIu64 " bytes",
                       buffer->name, bytes, offset, buffer->bytes);
    status = tpurt_buffer_map(buffer, &start);
    if (!status)
        *data = (char *)start + offset;
    return status;
}

int tpurt_buffer_write(tpurt_buffer *buffer, uint64_t offset, const void *data, uint64_t bytes)
{
    char *at = NULL;
    int status = range_of(buffer, offset, bytes, &at);

    if (!status)
        memcpy(at, data, bytes);
    return status;
}

int tpurt_buffer_read(tpurt_buffer *buffer, uint64_t offset, void *data, uint64_t bytes)
{
    char *at = NULL;
    int status = range_of(buffer, offset, bytes, &at);

    if (!status)
        memcpy(data, at, bytes);
    return status;
}

int tpurt_buffer_read_fd(tpurt_buffer *buffer, uint64_t offset, int fd, uint64_t fd_offset,
                         uint64_t bytes)
{
    uint64_t done = 0;
    char *at = NULL;
    int status = range_of(buffer, offset, bytes, &at);

    if (status)
        return status;
    if (fd_offset > INT64_MAX || bytes > INT64_MAX - fd_offset)
        return rt_fail(TPURT_ERROR_INVALID, "file offset %" PRIu64 " is past any file", fd_offset);
    while (done < bytes) {
        size_t step = bytes - done < READ_STEP ? bytes - done : READ_STEP;
        ssize_t got = pread(fd, at + done, step, (off_t)(fd_offset + done));

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return rt_fail_errno(errno, "buffer \"%s\": reading the file at %" PRIu64,
                                 buffer->name, fd_offset + done);
        if (got == 0)
            return rt_fail(TPURT_ERROR_IO,
                           "buffer \"%s\": the file ends at %" PRIu64 ", %" PRIu64
                           " bytes short",
                           buffer->name, fd_offset + done, bytes - done);
        done += (uint64_t)got;
    }
    return TPURT_OK;
}
