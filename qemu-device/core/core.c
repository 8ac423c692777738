/* SPDX-License-Identifier: MIT */
/*
 * The machine as a whole: its birth and its end, its clock, its voice.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "machine.h"

uint64_t vtpu_now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t vtpu_core_clock(const VtpuCore *core)
{
    return (core->parked ? core->parked_ns : vtpu_now_ns()) - core->still_ns;
}

uint64_t vtpu_core_time(const VtpuCore *core)
{
    return vtpu_core_clock(core) - core->time_base;
}

void vtpu_core_set_time(VtpuCore *core, uint64_t time)
{
    core->time_base = vtpu_core_clock(core) - time;
}

void vtpu_core_log(VtpuCore *core, const char *message)
{
    if (core->ops.guest_error) {
        core->ops.guest_error(core->opaque, message);
    }
}

void vtpu_core_trace(VtpuCore *core, VtpuCoreEvent event, unsigned queue, uint64_t a, uint64_t b)
{
    if (core->ops.trace) {
        core->ops.trace(core->opaque, event, queue, a, b);
    }
}

const char *vtpu_core_isa_path(const VtpuCore *core)
{
    return core->kernels->name;
}

static const char *check_config(const VtpuCoreConfig *config, const VtpuCoreOps *ops)
{
    if (!ops->dma_read || !ops->dma_write || !ops->raise_irq) {
        return "dma_read, dma_write and raise_irq are required";
    }
    if (!config->hbm || config->hbm_bytes < 16u << 20 ||
        (config->hbm_bytes & (config->hbm_bytes - 1))) {
        return "HBM must be a power of two of at least 16 MiB";
    }
    if (!vtpu_kernels_get(config->isa_path)) {
        return "isa-path must be amx, avx512, avx2 or scalar, and one that this host has";
    }
    if (config->timing_trace && !config->timing && !config->timing_file) {
        return "timing-trace needs a timing model: timing or timing-file";
    }
    return config->fabric ? vtpu_fabric_check(config->fabric, config->fabric_chip) : NULL;
}

static void stop_timer(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    core->exiting = true;
    pthread_cond_signal(&core->timer);
    pthread_mutex_unlock(&core->lock);
    pthread_join(core->timer_thread, NULL);
}

static bool start_threads(VtpuCore *core)
{
    sigset_t all, old;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bool ok = pthread_create(&core->timer_thread, NULL, vtpu_timer_thread, core) == 0;
    if (ok && pthread_create(&core->thread, NULL, vtpu_command_thread, core)) {
        stop_timer(core);
        ok = false;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (ok) {
        pthread_setname_np(core->thread, "vtpu-command");
        pthread_setname_np(core->timer_thread, "vtpu-timer");
    }
    return ok;
}

/* Everything but the threads. */
static void destroy(VtpuCore *core)
{
    vtpu_chip_leave(core);
    vtpu_chip_free(core->own_chip);
    vtpu_timing_trace_close(core);
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        vtpu_races_free(core->exec[q].races);
    }
    for (unsigned i = 0; i < VTPU_NUM_BUFFERS; i++) {
        free(core->buffer[i].data);
    }
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        vtpu_command_drop(&core->exec[q]);
    }
    vtpu_program_free_all(core);
    vtpu_vmem_free_all(core);
    vtpu_link_destroy(core);
    pthread_cond_destroy(&core->timer);
    pthread_cond_destroy(&core->share.come);
    pthread_cond_destroy(&core->changed);
    pthread_cond_destroy(&core->wake);
    pthread_mutex_destroy(&core->lock);
    free(core);
}

VtpuCore *vtpu_core_new(const VtpuCoreConfig *config, const VtpuCoreOps *ops,
                        void *opaque, const char **error)
{
    pthread_condattr_t monotonic;

    *error = check_config(config, ops);
    struct vtpu_timing_params timing = { 0 };
    bool timed = config->timing || config->timing_file;
    if (*error ||
        (timed && !vtpu_timing_params(config->timing, config->timing_file, &timing, error))) {
        return NULL;
    }
    unsigned threads = config->stepped ? 1 : config->threads;
    VtpuChip *own = config->chip ? NULL : vtpu_chip_new(threads, error);
    if (!config->chip && !own) {
        return NULL;
    }
    VtpuCore *core = calloc(1, sizeof(*core));
    if (!core || !vtpu_vmem_init(core)) {
        vtpu_chip_free(own);
        free(core);
        *error = "out of memory";
        return NULL;
    }
    core->own_chip = own;
    core->function = config->function;
    core->ops = *ops;
    core->opaque = opaque;
    core->hbm = config->hbm;
    core->hbm_bytes = config->hbm_bytes;
    core->kernels = vtpu_kernels_get(config->isa_path);
    core->stepped = config->stepped;
    core->serve_short = config->serve_short && !config->stepped;
    core->schedule_seed = config->schedule_seed;
    core->check_races = config->check_races;
    core->timed = timed;
    core->timing = timing;
    core->running = -1;
    core->busy = !config->stepped;
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        core->exec[q].core = core;
        core->exec[q].queue = q;
    }
    vtpu_core_set_time(core, 0);
    vtpu_inject_init(core);
    vtpu_link_init(core, config->fabric, config->fabric_chip);
    vtpu_queue_clear_all(core);
    vtpu_sched_reset(core);
    pthread_mutex_init(&core->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&core->wake, &monotonic);
    pthread_cond_init(&core->timer, &monotonic);
    pthread_cond_init(&core->changed, NULL);
    pthread_cond_init(&core->share.come, &monotonic);
    pthread_condattr_destroy(&monotonic);
    vtpu_chip_join(own ? own : config->chip, core);
    vtpu_sensors_init(core);
    if (config->timing_trace && !vtpu_timing_trace_open(core, config->timing_trace, error)) {
        destroy(core);
        return NULL;
    }
    if (!core->stepped && !start_threads(core)) {
        destroy(core);
        *error = "cannot start threads";
        return NULL;
    }
    if (config->fabric && !vtpu_fabric_attach(config->fabric, config->fabric_chip, core)) {
        core->link.fabric = NULL;
        vtpu_core_free(core);
        *error = vtpu_fabric_check(config->fabric, config->fabric_chip);
        return NULL;
    }
    return core;
}

void vtpu_core_free(VtpuCore *core)
{
    if (!core) {
        return;
    }
    pthread_mutex_lock(&core->lock);
    core->exiting = true;
    pthread_cond_broadcast(&core->link.received); /* whoever brings a packet is refused */
    atomic_store(&core->stop, 1);
    atomic_store(&core->attention, 1);
    vtpu_core_kick(core);
    pthread_mutex_unlock(&core->lock);
    if (!core->stepped) {
        pthread_join(core->thread, NULL);
    }
    if (core->link.fabric) {
        vtpu_fabric_detach(core->link.fabric, core->link.chip);
    }
    if (!core->stepped) {
        stop_timer(core);
    }
    destroy(core);
}
