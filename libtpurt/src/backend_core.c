/* SPDX-License-Identifier: MIT */
/* Opening and closing the in-process machine. */
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core.h"

#define LIBRARY "libvtpucore.so"
#define DEFAULT_HBM (2ull << 30)
#define MIN_HBM (16ull << 20)
#define MAX_HBM (1ull << 40)

int64_t core_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static const struct core_library *load_library(void)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct core_library lib;
    static void *handle;
    const char *path = getenv("VTPU_CORE_LIBRARY");
    const struct core_library *result = NULL;

    pthread_mutex_lock(&lock);
    if (!handle) {
        handle = dlopen(path && *path ? path : LIBRARY, RTLD_NOW | RTLD_LOCAL);
        if (handle) {
            lib.create = dlsym(handle, "vtpu_core_new");
            lib.destroy = dlsym(handle, "vtpu_core_free");
            lib.mmio_read = dlsym(handle, "vtpu_core_mmio_read");
            lib.mmio_write = dlsym(handle, "vtpu_core_mmio_write");
            lib.doorbell = dlsym(handle, "vtpu_core_doorbell");
            lib.isa_path = dlsym(handle, "vtpu_core_isa_path");
        }
    }
    if (!handle)
        rt_fail(TPURT_ERROR_NO_DEVICE, "core: %s", dlerror());
    else if (!lib.create || !lib.destroy || !lib.mmio_read || !lib.mmio_write || !lib.doorbell ||
             !lib.isa_path)
        rt_fail(TPURT_ERROR_NO_DEVICE, "core: the library lacks a function of vtpu_core.h");
    else
        result = &lib;
    pthread_mutex_unlock(&lock);
    return result;
}

static int get_memory(struct rt_backend *be, uint64_t *hbm_bytes, uint64_t *hbm_used)
{
    struct core_backend *core = core_of(be);

    pthread_mutex_lock(&core->lock);
    *hbm_bytes = core->hbm_bytes;
    *hbm_used = core->hbm_free.used;
    pthread_mutex_unlock(&core->lock);
    return TPURT_OK;
}

static int get_stats(struct rt_backend *be, tpurt_device_stats *stats)
{
    struct core_backend *core = core_of(be);

    pthread_mutex_lock(&core->lock);
    stats->queue_resets = core->queue_resets;
    pthread_mutex_unlock(&core->lock);
    stats->has_counters = 1;
    stats->device_resets = core_read(core, VTPU_REG_RESET_COUNT, 4);
    stats->programs = core_read(core, VTPU_REG_STAT_PROGRAMS, 8);
    stats->instructions = core_read(core, VTPU_REG_STAT_INSTRUCTIONS, 8);
    stats->busy_ns = core_read(core, VTPU_REG_STAT_BUSY_NS, 8);
    stats->hbm_streamed = core_read(core, VTPU_REG_STAT_HBM_BYTES, 8);
    return TPURT_OK;
}

/* Sleeps until the earliest time limit that could pass. */
static void *watch(void *opaque)
{
    struct core_backend *core = opaque;

    pthread_mutex_lock(&core->lock);
    while (!core->closing) {
        struct timespec until;

        core->next_look = core_check_deadlines(core);
        until = (struct timespec){ core->next_look / 1000000000, core->next_look % 1000000000 };
        pthread_cond_timedwait(&core->watch, &core->lock, &until);
    }
    pthread_mutex_unlock(&core->lock);
    return NULL;
}

static void close_machine(struct rt_backend *be)
{
    struct core_backend *core = core_of(be);

    pthread_mutex_lock(&core->lock);
    core->closing = true;
    pthread_cond_signal(&core->watch);
    pthread_mutex_unlock(&core->lock);
    pthread_join(core->watchdog, NULL);
    core->lib->destroy(core->machine);
    core_memory_fini(core);
    pthread_cond_destroy(&core->watch);
    pthread_cond_destroy(&core->progress);
    pthread_mutex_destroy(&core->lock);
    pthread_rwlock_destroy(&core->host_lock);
    free(core);
}

static const struct rt_backend_ops ops = {
    .close = close_machine,
    .get_memory = get_memory,
    .get_stats = get_stats,
    .memory_create = core_memory_create,
    .memory_import = core_memory_import,
    .memory_destroy = core_memory_destroy,
    .memory_map = core_memory_map,
    .bind = core_bind,
    .unbind = core_unbind,
    .channel_create = core_channel_create,
    .channel_destroy = core_channel_destroy,
    .submit = core_submit,
    .wait = core_wait,
    .notify = core_notify,
    .state = core_state,
};

static int check_desc(const tpurt_device_desc *desc, uint64_t *hbm_bytes)
{
    *hbm_bytes = desc->core_hbm_bytes ? desc->core_hbm_bytes : DEFAULT_HBM;
    if (*hbm_bytes & (*hbm_bytes - 1) || *hbm_bytes < MIN_HBM || *hbm_bytes > MAX_HBM)
        return rt_fail(TPURT_ERROR_INVALID,
                       "core: %" PRIu64 " bytes of HBM is no power of two in %llu..%llu",
                       *hbm_bytes, MIN_HBM, MAX_HBM);
    return TPURT_OK;
}

/* What only tools set; empty as unset. */
static const char *from_environment(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

static int start_machine(struct core_backend *core, const tpurt_device_desc *desc)
{
    static const VtpuCoreOps machine_ops = {
        .dma_read = core_dma_read,
        .dma_write = core_dma_write,
        .raise_irq = core_irq,
    };
    VtpuCoreConfig config = {
        .hbm = core->hbm,
        .hbm_bytes = core->hbm_bytes,
        .threads = desc->core_threads,
        .isa_path = desc->core_isa,
        .check_races = from_environment("VTPU_CORE_CHECK_RACES"),
        .timing = from_environment("VTPU_CORE_TIMING"),
        .timing_trace = from_environment("VTPU_CORE_TIMING_TRACE"),
    };
    const char *error = NULL;

    core->machine = core->lib->create(&config, &machine_ops, core, &error);
    if (!core->machine)
        return rt_fail(TPURT_ERROR_NO_DEVICE, "core: %s", error ? error : "no machine");
    core_write(core, VTPU_REG_CTX_ROOT, core->root | VTPU_CTX_VALID, 8);
    core_write(core, VTPU_REG_CTRL, VTPU_CTRL_ENABLE, 4);
    if (pthread_create(&core->watchdog, NULL, watch, core)) {
        core->lib->destroy(core->machine);
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "core: no thread for its watchdog");
    }
    return TPURT_OK;
}

static void init_locks(struct core_backend *core)
{
    pthread_condattr_t monotonic;

    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&core->progress, &monotonic);
    pthread_cond_init(&core->watch, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&core->lock, NULL);
    pthread_rwlock_init(&core->host_lock, NULL);
}

int rt_core_open(const tpurt_device_desc *desc, tpurt_device_info *info, struct rt_backend **be)
{
    const struct core_library *lib = load_library();
    struct core_backend *core;
    uint64_t hbm_bytes;
    int status;

    if (!lib)
        return TPURT_ERROR_NO_DEVICE;
    status = check_desc(desc, &hbm_bytes);
    if (status)
        return status;
    core = calloc(1, sizeof(*core));
    if (!core)
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a device");
    core->base.ops = &ops;
    core->lib = lib;
    core->hbm_bytes = hbm_bytes;
    init_locks(core);
    status = core_memory_init(core);
    if (status) {
        free(core);
        return status;
    }
    status = start_machine(core, desc);
    if (status) {
        core_memory_fini(core);
        free(core);
        return status;
    }
    *info = (tpurt_device_info){
        .hw_version = (uint32_t)core_read(core, VTPU_REG_VERSION, 4),
        .isa_version = (uint32_t)core_read(core, VTPU_REG_ISA_VERSION, 4),
        .num_queues = (uint32_t)core_read(core, VTPU_REG_NUM_QUEUES, 4),
        .hbm_bytes = core_read(core, VTPU_REG_HBM_SIZE, 8),
        .va_start = VTPU_HUGE_PAGE_BYTES, /* a small number is never an address */
        .va_end = 1ull << VTPU_VA_BITS,
        .page_bytes = VTPU_PAGE_BYTES,
        .vmem_bytes = (uint32_t)core_read(core, VTPU_REG_VMEM_SIZE, 4),
        .backend = "core",
    };
    snprintf(info->name, sizeof(info->name), "%s", lib->isa_path(core->machine));
    *be = &core->base;
    return TPURT_OK;
}
