/* SPDX-License-Identifier: MIT */
/*
 * The kernel driver. One open file, one address space; a channel is a driver
 * queue with a timeline syncobj, whose points are the queue's points.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "backend.h"
#include "error.h"

#define DRIVER_NAME "vtpu"
#define MAX_NODES 64

struct drm_backend {
    struct rt_backend base;
    int fd;
    bool has_vm;
    uint32_t vm;
};

struct rt_memory {
    uint32_t handle;
    uint64_t bytes;
    void *data;
};

struct rt_channel {
    uint32_t queue, syncobj;
    uint64_t base;
};

static struct drm_backend *drm(struct rt_backend *be)
{
    return (struct drm_backend *)be;
}

static uint64_t user(const void *pointer)
{
    return (uint64_t)(uintptr_t)pointer;
}

/* 0 or an errno. */
static int call(struct rt_backend *be, unsigned long request, void *argument)
{
    while (ioctl(drm(be)->fd, request, argument) < 0)
        if (errno != EINTR && errno != EAGAIN)
            return errno;
    return 0;
}

static int query(struct rt_backend *be, uint32_t what, void *data, uint32_t bytes)
{
    struct drm_vtpu_dev_query q = { .query = what, .size = bytes, .data = user(data) };
    int error;

    memset(data, 0, bytes);
    error = call(be, DRM_IOCTL_VTPU_DEV_QUERY, &q);
    return error ? rt_fail_errno(error, "driver: DEV_QUERY %u", what) : TPURT_OK;
}

static int get_memory(struct rt_backend *be, uint64_t *hbm_bytes, uint64_t *hbm_used)
{
    struct drm_vtpu_memory memory;
    int status = query(be, DRM_VTPU_QUERY_MEMORY, &memory, sizeof(memory));

    *hbm_bytes = memory.hbm_bytes;
    *hbm_used = memory.hbm_used;
    return status;
}

static int get_stats(struct rt_backend *be, tpurt_device_stats *stats)
{
    struct drm_vtpu_reset reset;
    int status = query(be, DRM_VTPU_QUERY_RESET, &reset, sizeof(reset));

    stats->device_resets = reset.device_resets;
    stats->queue_resets = reset.queue_resets;
    return status;
}

static void gem_close(struct rt_backend *be, uint32_t handle)
{
    struct drm_gem_close close = { .handle = handle };

    call(be, DRM_IOCTL_GEM_CLOSE, &close);
}

static int memory_create(struct rt_backend *be, uint64_t bytes, bool hbm, struct rt_memory **memory)
{
    struct drm_vtpu_bo_create create = { .size = bytes, .flags = hbm ? DRM_VTPU_BO_HBM : 0 };
    struct rt_memory *mem;
    int error = call(be, DRM_IOCTL_VTPU_BO_CREATE, &create);

    if (error)
        return rt_fail_errno(error, "driver: creating a buffer of %" PRIu64 " bytes in %s", bytes,
                             hbm ? "HBM" : "host memory");
    mem = calloc(1, sizeof(*mem));
    if (!mem) {
        gem_close(be, create.handle);
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a buffer");
    }
    mem->handle = create.handle;
    mem->bytes = bytes;
    *memory = mem;
    return TPURT_OK;
}

static int memory_import(struct rt_backend *be, void *data, uint64_t bytes, bool read_only,
                         struct rt_memory **memory)
{
    struct drm_vtpu_bo_userptr import = {
        .addr = user(data),
        .size = bytes,
        .flags = read_only ? DRM_VTPU_USERPTR_READ_ONLY : 0,
    };
    struct rt_memory *mem;
    int error = call(be, DRM_IOCTL_VTPU_BO_USERPTR, &import);

    if (error)
        return rt_fail_errno(error, "driver: a buffer of the caller's %" PRIu64 " bytes at %p",
                             bytes, data);
    mem = calloc(1, sizeof(*mem));
    if (!mem) {
        gem_close(be, import.handle);
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a buffer");
    }
    mem->handle = import.handle;
    mem->bytes = bytes;
    *memory = mem;
    return TPURT_OK;
}

static void memory_destroy(struct rt_backend *be, struct rt_memory *memory)
{
    if (memory->data)
        munmap(memory->data, memory->bytes);
    gem_close(be, memory->handle);
    free(memory);
}

static int memory_map(struct rt_backend *be, struct rt_memory *memory, void **data)
{
    struct drm_vtpu_bo_info info = { .handle = memory->handle };
    void *expected = NULL, *address;
    int error = call(be, DRM_IOCTL_VTPU_BO_INFO, &info);

    if (error)
        return rt_fail_errno(error, "driver: BO_INFO");
    address = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, drm(be)->fd,
                   (off_t)info.mmap_offset);
    if (address == MAP_FAILED)
        return rt_fail_errno(errno, "driver: mapping a buffer of %" PRIu64 " bytes",
                             memory->bytes);
    /* Two threads may have come here: the first mapping stays. */
    if (!__atomic_compare_exchange_n(&memory->data, &expected, address, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
        munmap(address, memory->bytes);
        address = expected;
    }
    *data = address;
    return TPURT_OK;
}

static int bind(struct rt_backend *be, struct rt_memory *memory, uint64_t va, uint32_t rights)
{
    struct drm_vtpu_vm_bind map = {
        .vm_id = drm(be)->vm,
        .op = DRM_VTPU_VM_BIND_MAP,
        .handle = memory->handle,
        .flags = rights,
        .va = va,
        .size = memory->bytes,
    };
    int error = call(be, DRM_IOCTL_VTPU_VM_BIND, &map);

    return error ? rt_fail_errno(error, "driver: mapping %" PRIu64 " bytes at 0x%" PRIx64,
                                 memory->bytes, va) : TPURT_OK;
}

static void unbind(struct rt_backend *be, struct rt_memory *memory, uint64_t va)
{
    struct drm_vtpu_vm_bind unmap = {
        .vm_id = drm(be)->vm,
        .op = DRM_VTPU_VM_BIND_UNMAP,
        .va = va,
        .size = memory->bytes,
    };

    call(be, DRM_IOCTL_VTPU_VM_BIND, &unmap);
}

static void syncobj_destroy(struct rt_backend *be, uint32_t handle)
{
    struct drm_syncobj_destroy destroy = { .handle = handle };

    call(be, DRM_IOCTL_SYNCOBJ_DESTROY, &destroy);
}

static int channel_create(struct rt_backend *be, uint32_t priority, uint32_t timeout_ms,
                          uint64_t base, struct rt_channel **channel)
{
    struct drm_syncobj_create sync = { 0 };
    struct drm_vtpu_queue_create create = {
        .vm_id = drm(be)->vm,
        .priority = priority,
        .timeout_ms = timeout_ms,
    };
    struct rt_channel *ch = calloc(1, sizeof(*ch));
    int error;

    if (!ch)
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a queue");
    error = call(be, DRM_IOCTL_SYNCOBJ_CREATE, &sync);
    if (error) {
        free(ch);
        return rt_fail_errno(error, "driver: creating a timeline");
    }
    error = call(be, DRM_IOCTL_VTPU_QUEUE_CREATE, &create);
    if (error) {
        syncobj_destroy(be, sync.handle);
        free(ch);
        return rt_fail_errno(error, "driver: creating a queue of priority %u", priority);
    }
    *ch = (struct rt_channel){ create.queue_id, sync.handle, base };
    *channel = ch;
    return TPURT_OK;
}

static void channel_destroy(struct rt_backend *be, struct rt_channel *channel)
{
    struct drm_vtpu_queue_destroy destroy = { .queue_id = channel->queue };

    call(be, DRM_IOCTL_VTPU_QUEUE_DESTROY, &destroy);
    syncobj_destroy(be, channel->syncobj);
    free(channel);
}

static int submit(struct rt_backend *be, struct rt_channel *channel,
                  const struct drm_vtpu_cmd *commands, uint32_t num_commands,
                  const struct rt_wait *waits, uint32_t num_waits, uint64_t point)
{
    struct drm_vtpu_sync syncs[TPURT_MAX_WAITS + 1];
    struct drm_vtpu_submit job = {
        .queue_id = channel->queue,
        .cmds = user(commands),
        .syncs = user(syncs),
        .num_cmds = num_commands,
        .num_syncs = num_waits + 1,
    };
    int error;

    for (uint32_t i = 0; i < num_waits; i++)
        syncs[i] = (struct drm_vtpu_sync){ waits[i].channel->syncobj, DRM_VTPU_SYNC_TIMELINE,
                                           waits[i].point };
    syncs[num_waits] = (struct drm_vtpu_sync){
        channel->syncobj, DRM_VTPU_SYNC_SIGNAL | DRM_VTPU_SYNC_TIMELINE, point
    };
    error = call(be, DRM_IOCTL_VTPU_SUBMIT, &job);
    if (error == EIO)
        return TPURT_ERROR_CANCELLED;
    return error ? rt_fail_errno(error, "driver: SUBMIT of %u commands", num_commands) : TPURT_OK;
}

static int state(struct rt_backend *be, struct rt_channel *channel, tpurt_queue_state *out)
{
    static const int status_of[] = {
        [DRM_VTPU_QUEUE_OK] = TPURT_OK,
        [DRM_VTPU_QUEUE_FAULTED] = TPURT_ERROR_FAULT,
        [DRM_VTPU_QUEUE_HUNG] = TPURT_ERROR_HUNG,
        [DRM_VTPU_QUEUE_LOST] = TPURT_ERROR_LOST,
    };
    struct drm_vtpu_queue_state s = { .queue_id = channel->queue };
    int error = call(be, DRM_IOCTL_VTPU_QUEUE_STATE, &s);

    if (error && error != ENODEV)
        return rt_fail_errno(error, "driver: QUEUE_STATE");
    if (error || s.status > DRM_VTPU_QUEUE_LOST)
        s.status = DRM_VTPU_QUEUE_LOST;
    *out = (tpurt_queue_state){
        .status = status_of[s.status],
        .fault_cause = s.fault_cause,
        .fault_access = s.fault_access,
        .fault_address = s.fault_addr,
        .fault_pc = s.fault_pc,
        .completed = channel->base + s.completed,
    };
    return TPURT_OK;
}

/* The driver wants an absolute time. */
static int64_t deadline(int64_t timeout_ns)
{
    struct timespec now;
    int64_t ns;

    if (timeout_ns < 0)
        return INT64_MAX;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ns = now.tv_sec * 1000000000ll + now.tv_nsec;
    return timeout_ns > INT64_MAX - ns ? INT64_MAX : ns + timeout_ns;
}

static int wait(struct rt_backend *be, struct rt_channel *channel, uint64_t point,
                int64_t timeout_ns)
{
    struct drm_syncobj_timeline_wait w = {
        .handles = user(&channel->syncobj),
        .points = user(&point),
        .timeout_nsec = timeout_ns ? deadline(timeout_ns) : 0,
        .count_handles = 1,
    };
    tpurt_queue_state s;
    int error = call(be, DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT, &w);
    int status;

    if (error == ETIME || error == ETIMEDOUT)
        return rt_fail(TPURT_ERROR_TIMEOUT, "point %" PRIu64 " has not ended in time", point);
    if (error && error != ENODEV)
        return rt_fail_errno(error, "driver: waiting for point %" PRIu64, point);
    /* A syncobj does not tell success from failure: the queue does. */
    status = state(be, channel, &s);
    if (status)
        return status;
    return point <= s.completed || s.status == TPURT_OK ? TPURT_OK : TPURT_ERROR_CANCELLED;
}

static int notify(struct rt_backend *be, struct rt_channel *channel, uint64_t point, int eventfd)
{
    struct drm_syncobj_eventfd request = {
        .handle = channel->syncobj,
        .point = point,
        .fd = eventfd,
    };
    int error = call(be, DRM_IOCTL_SYNCOBJ_EVENTFD, &request);

    return error ? rt_fail_errno(error, "driver: asking for an event at point %" PRIu64, point)
                 : TPURT_OK;
}

static void close_backend(struct rt_backend *be)
{
    struct drm_vtpu_vm_destroy destroy = { .vm_id = drm(be)->vm };

    if (drm(be)->has_vm)
        call(be, DRM_IOCTL_VTPU_VM_DESTROY, &destroy);
    close(drm(be)->fd);
    free(be);
}

static const struct rt_backend_ops ops = {
    .close = close_backend,
    .get_memory = get_memory,
    .get_stats = get_stats,
    .memory_create = memory_create,
    .memory_import = memory_import,
    .memory_destroy = memory_destroy,
    .memory_map = memory_map,
    .bind = bind,
    .unbind = unbind,
    .channel_create = channel_create,
    .channel_destroy = channel_destroy,
    .submit = submit,
    .wait = wait,
    .notify = notify,
    .state = state,
};

/* Whether an open file is a vTPU; name gets the driver's name. */
static bool is_vtpu(int fd, char *name, size_t bytes)
{
    struct drm_version version = { .name = name, .name_len = bytes - 1 };

    memset(name, 0, bytes);
    return ioctl(fd, DRM_IOCTL_VERSION, &version) == 0 && !strcmp(name, DRIVER_NAME);
}

bool rt_drm_find(char *path, unsigned path_bytes)
{
    char name[32];

    for (unsigned i = 0; i < MAX_NODES; i++) {
        bool found;
        int fd;

        snprintf(path, path_bytes, "/dev/accel/accel%u", i);
        fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0 && errno == ENOENT)
            return false;
        found = fd >= 0 && is_vtpu(fd, name, sizeof(name));
        if (fd >= 0)
            close(fd);
        if (found)
            return true;
    }
    return false;
}

static int start(struct rt_backend *be, const char *path, tpurt_device_info *info)
{
    struct drm_vtpu_vm_create vm = { 0 };
    struct drm_vtpu_info hw;
    char name[32];
    int error, status;

    if (!is_vtpu(drm(be)->fd, name, sizeof(name)))
        return rt_fail(TPURT_ERROR_NO_DEVICE, "%s: its driver is \"%s\", not \"%s\"", path, name,
                       DRIVER_NAME);
    status = query(be, DRM_VTPU_QUERY_INFO, &hw, sizeof(hw));
    if (status)
        return status;
    error = call(be, DRM_IOCTL_VTPU_VM_CREATE, &vm);
    if (error)
        return rt_fail_errno(error, "%s: creating an address space", path);
    drm(be)->vm = vm.vm_id;
    drm(be)->has_vm = true;
    *info = (tpurt_device_info){
        .hw_version = hw.hw_version,
        .isa_version = hw.isa_version,
        .num_queues = hw.num_queues,
        .hbm_bytes = hw.hbm_bytes,
        .va_start = hw.va_start,
        .va_end = hw.va_end,
        .page_bytes = hw.page_bytes,
        .vmem_bytes = hw.vmem_bytes,
        .backend = "drm",
    };
    snprintf(info->name, sizeof(info->name), "%s", path);
    return TPURT_OK;
}

int rt_drm_open(const char *path, tpurt_device_info *info, struct rt_backend **be)
{
    struct drm_backend *d = calloc(1, sizeof(*d));
    int status;

    if (!d)
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a device");
    d->base.ops = &ops;
    d->fd = open(path, O_RDWR | O_CLOEXEC);
    if (d->fd < 0) {
        free(d);
        return rt_fail(errno == EACCES || errno == EPERM ? TPURT_ERROR_PERMISSION
                                                         : TPURT_ERROR_NO_DEVICE,
                       "%s: %s", path, strerror(errno));
    }
    status = start(&d->base, path, info);
    if (status) {
        close_backend(&d->base);
        return status;
    }
    *be = &d->base;
    return TPURT_OK;
}
