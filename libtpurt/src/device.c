/* SPDX-License-Identifier: MIT */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static int open_backend(const char *name, const tpurt_device_desc *desc, tpurt_device_info *info,
                        struct rt_backend **be)
{
    char path[64];

    if (!name || !*name)
        name = getenv("VTPU_DEVICE");
    if (!name || !*name) {
        if (rt_drm_find(path, sizeof(path)))
            return rt_drm_open(path, info, be);
        name = "core";
    }
    if (!strncmp(name, "drm:", 4))
        return rt_drm_open(name + 4, info, be);
    if (!strcmp(name, "core"))
        return rt_core_open(desc, info, be);
    return rt_fail(TPURT_ERROR_INVALID,
                   "device \"%s\": the name is neither \"core\" nor \"drm:/dev/accel/accelN\"",
                   name);
}

int tpurt_device_open(const char *name, const tpurt_device_desc *desc, tpurt_device **device)
{
    tpurt_device_desc ours = { 0 };
    tpurt_device *dev;
    int status = TPURT_OK;

    if (!device)
        return rt_fail(TPURT_ERROR_INVALID, "device is NULL");
    if (desc)
        status = rt_struct_in(&ours, sizeof(ours), desc, sizeof(uint32_t), "tpurt_device_desc");
    if (status)
        return status;
    dev = calloc(1, sizeof(*dev));
    if (!dev)
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a device");
    status = open_backend(name, &ours, &dev->info, &dev->be);
    if (status) {
        free(dev);
        return status;
    }
    if (!rt_va_init(&dev->va, dev->info.va_start, dev->info.va_end)) {
        dev->be->ops->close(dev->be);
        free(dev);
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a device");
    }
    pthread_mutex_init(&dev->lock, NULL);
    atomic_init(&dev->refs, 1);
    *device = dev;
    return TPURT_OK;
}

tpurt_device *tpurt_device_retain(tpurt_device *device)
{
    return RT_RETAIN(device);
}

void tpurt_device_release(tpurt_device *device)
{
    if (!RT_DROP(device))
        return;
    device->be->ops->close(device->be);
    rt_va_fini(&device->va);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

int tpurt_device_get_info(tpurt_device *device, tpurt_device_info *info)
{
    return rt_struct_out(info, &device->info, sizeof(device->info),
                         offsetof(tpurt_device_info, backend), "tpurt_device_info");
}

int tpurt_device_get_memory(tpurt_device *device, tpurt_device_memory *memory)
{
    tpurt_device_memory ours = { 0 };
    int status = device->be->ops->get_memory(device->be, &ours.hbm_bytes, &ours.hbm_used);

    if (status)
        return status;
    ours.client_hbm = atomic_load(&device->hbm);
    ours.client_host = atomic_load(&device->host);
    return rt_struct_out(memory, &ours, sizeof(ours), offsetof(tpurt_device_memory, client_hbm),
                         "tpurt_device_memory");
}

int tpurt_device_get_stats(tpurt_device *device, tpurt_device_stats *stats)
{
    tpurt_device_stats ours = { 0 };
    int status = device->be->ops->get_stats(device->be, &ours);

    if (status)
        return status;
    ours.jobs_submitted = atomic_load(&device->jobs);
    ours.commands_submitted = atomic_load(&device->commands);
    return rt_struct_out(stats, &ours, sizeof(ours), offsetof(tpurt_device_stats, programs),
                         "tpurt_device_stats");
}
