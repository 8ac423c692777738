/* SPDX-License-Identifier: MIT */
/*
 * The machine as a whole: its life, its reset, and the meeting point between
 * callers' threads and the command thread.
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

/* The machine's own clock: it stands still while the machine is parked. Lock held. */
static uint64_t clock_ns(const VtpuCore *core)
{
    return (core->parked ? core->parked_ns : vtpu_now_ns()) - core->still_ns;
}

uint64_t vtpu_core_time(const VtpuCore *core)
{
    return clock_ns(core) - core->time_base;
}

void vtpu_core_set_time(VtpuCore *core, uint64_t time)
{
    core->time_base = clock_ns(core) - time;
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

void vtpu_core_kick(VtpuCore *core)
{
    pthread_cond_signal(&core->wake);
}

void vtpu_core_wait_attention(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    while (!atomic_load(&core->attention)) {
        pthread_cond_wait(&core->wake, &core->lock);
    }
    pthread_mutex_unlock(&core->lock);
}

/* Lock held; nothing runs in the context, or it is the command thread that asks. */
static void apply_context(VtpuCore *core, unsigned context)
{
    if (vtpu_link_uses(core, context)) {
        return; /* vtpu_core_received() comes back to it */
    }
    core->context_changed &= ~(1ull << context);
    vtpu_tlb_flush(&core->tlb[context]);
    if (core->root[context] != core->ctx_root[context]) {
        core->root[context] = core->ctx_root[context];
        vtpu_vmem_disown(core, context);
    }
}

/* Lock held; the command thread, or anyone while it is idle. */
static void apply_contexts(VtpuCore *core)
{
    for (uint64_t left = core->context_changed; left; left &= left - 1) {
        apply_context(core, (unsigned)__builtin_ctzll(left));
    }
}

void vtpu_core_finish_reset(VtpuCore *core)
{
    vtpu_queue_clear_all(core);
    vtpu_sched_reset(core);
    memset(core->ctx_root, 0, sizeof(core->ctx_root));
    core->context_changed = UINT64_MAX;
    apply_contexts(core);
    vtpu_vmem_disown_all(core);
    core->err_queues = core->scratch = 0;
    core->irqs = 0;
    core->enabled = false;
    vtpu_inject_reset(core);
    vtpu_link_reset(core);
    atomic_store(&core->stat_programs, 0);
    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        atomic_store(&core->stat_engine[e], 0);
    }
    atomic_store(&core->stat_ecc_corrected, 0);
    atomic_store(&core->stat_busy_ns, 0);
    atomic_store(&core->stat_hbm_bytes, 0);
    for (unsigned n = 0; n < VTPU_NUM_MODEL_STATS; n++) {
        atomic_store(&core->stat_model[n], 0);
    }
    vtpu_core_set_time(core, 0);
    core->reset_count++;
    core->resetting = false;
    atomic_store(&core->stop, core->exiting);
    pthread_cond_broadcast(&core->changed);
}

void vtpu_core_start_reset(VtpuCore *core)
{
    core->resetting = true;
    core->asleep = false;
    vtpu_link_stop(core);
    if (!core->busy && !core->link.receiving && !core->clear &&
        !vtpu_injecting(core, VTPU_INJECT_RESET_STUCK)) {
        vtpu_core_finish_reset(core);
        return;
    }
    atomic_store(&core->stop, 1);
    atomic_store(&core->attention, 1);
    vtpu_core_kick(core);
}

/*
 * Only a command of the context itself delays it: a long instruction of one
 * process is not to keep others from their memory.
 */
void vtpu_core_context_changed(VtpuCore *core, unsigned context)
{
    core->context_changed |= 1ull << context;
    if (core->running < 0 || core->queue[core->running].context != context) {
        apply_context(core, context);
        return;
    }
    atomic_store(&core->attention, 1);
    vtpu_core_kick(core); /* it may be in a pause */
}

void vtpu_core_received(VtpuCore *core)
{
    if (core->context_changed >> core->link.context & 1) {
        vtpu_core_context_changed(core, core->link.context);
    }
    if (core->resetting) {
        atomic_store(&core->attention, 1); /* it can end now */
        vtpu_core_kick(core);
    }
    pthread_cond_broadcast(&core->changed);
    pthread_cond_broadcast(&core->wake); /* rest() */
}

/*
 * Lock held. With a command in hand it sleeps where it is, but is parked only
 * once that is set aside, or over. A stepped machine stands still by not being
 * stepped.
 */
static bool stands_still(const VtpuCore *core)
{
    if (core->exiting || core->stepped) {
        return false;
    }
    return core->park ? core->running < 0 : core->asleep && !vtpu_stopped(core);
}

/* Lock held, dropped meanwhile. Who resets or changes it while it is parked does it at once. */
static void become_parked(VtpuCore *core)
{
    core->busy = false;
    core->parked_ns = vtpu_now_ns();
    core->parked = true;
    pthread_cond_broadcast(&core->changed);
    if (core->ops.parked) {
        pthread_mutex_unlock(&core->lock);
        core->ops.parked(core->opaque);
        pthread_mutex_lock(&core->lock);
    }
}

/* Lock held: stays while the machine is to be parked, or sleeps. */
static void rest(VtpuCore *core)
{
    bool rests = stands_still(core);

    if (rests) {
        vtpu_sched_pause(core);
    }
    while (stands_still(core)) {
        vtpu_engines_release(core);
        if (core->park && !core->parked && !core->link.receiving) {
            become_parked(core);
        } else {
            pthread_cond_wait(&core->wake, &core->lock);
        }
    }
    if (core->park && core->running >= 0) {
        atomic_store(&core->attention, 1);
    }
    if (rests) {
        vtpu_sched_go_on(core);
    }
}

bool vtpu_core_parking(VtpuCore *core)
{
    if (!atomic_load_explicit(&core->attention, memory_order_relaxed)) {
        return false;
    }
    pthread_mutex_lock(&core->lock);
    bool park = core->park && !core->stepped && !vtpu_stopped(core);
    pthread_mutex_unlock(&core->lock);
    return park;
}

bool vtpu_core_boundary(VtpuCore *core)
{
    bool held = core->share.held;

    pthread_mutex_lock(&core->lock);
    atomic_store(&core->attention, 0);
    apply_contexts(core);
    rest(core);
    /* Between commands nothing is left to abandon for a reset: it is done. */
    if (core->resetting && core->running < 0 && !core->link.receiving &&
        !vtpu_injecting(core, VTPU_INJECT_RESET_STUCK) && vtpu_clear_if_asked(core)) {
        vtpu_core_finish_reset(core);
    }
    uint64_t irqs = core->irqs;
    core->irqs = 0;
    bool go_on = !vtpu_stopped(core);
    pthread_mutex_unlock(&core->lock);
    for (; irqs; irqs &= irqs - 1) {
        vtpu_raise_irq(core, (unsigned)__builtin_ctzll(irqs));
    }
    /* A command that had the engines gets them back, after others in their turn. */
    return go_on && (!held || ((core->running < 0 || vtpu_engines_take(core)) &&
                               vtpu_engines_boundary(core)));
}

void vtpu_core_reset(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    vtpu_core_start_reset(core);
    pthread_mutex_unlock(&core->lock);
}

void vtpu_core_sleep(VtpuCore *core, bool asleep)
{
    pthread_mutex_lock(&core->lock);
    core->asleep = asleep;
    atomic_store(&core->attention, 1);
    vtpu_core_kick(core);
    pthread_mutex_unlock(&core->lock);
    if (core->link.fabric) {
        vtpu_fabric_wake(core->link.fabric); /* packets may wait for it */
    }
}

/* Lock held. */
static bool must_wait(const VtpuCore *core)
{
    return core->asleep && !core->park && !core->exiting && !vtpu_stopped(core);
}

bool vtpu_core_asleep(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    bool asleep = must_wait(core);
    pthread_mutex_unlock(&core->lock);
    return asleep;
}

void vtpu_core_wait_awake(VtpuCore *core)
{
    bool held = core->share.held;

    pthread_mutex_lock(&core->lock);
    vtpu_sched_pause(core);
    while (must_wait(core)) {
        vtpu_engines_release(core);
        pthread_cond_wait(&core->wake, &core->lock);
    }
    vtpu_sched_go_on(core);
    pthread_mutex_unlock(&core->lock);
    if (held) {
        vtpu_engines_take_back(core); /* not when it is stopped: then they are not used */
    }
}

bool vtpu_core_resetting(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    bool resetting = core->resetting;
    pthread_mutex_unlock(&core->lock);
    return resetting;
}

/* Lock held. */
static void park(VtpuCore *core)
{
    core->park = true;
    vtpu_restart_ask(core);
    atomic_store(&core->attention, 1);
    vtpu_core_kick(core);
}

void vtpu_core_park(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    park(core);
    pthread_mutex_unlock(&core->lock);
}

void vtpu_core_quiesce(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    park(core);
    while (core->stepped ? core->link.receiving : !core->parked) {
        pthread_cond_wait(&core->changed, &core->lock);
    }
    pthread_mutex_unlock(&core->lock);
}

bool vtpu_core_is_parked(const VtpuCore *core)
{
    return core->park && (core->parked || core->stepped);
}

void vtpu_core_resume(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    core->park = false;
    if (core->parked) {
        core->still_ns += vtpu_now_ns() - core->parked_ns;
        core->parked = false; /* who parks it again is to be told again */
        core->busy = true;    /* its thread looks for work */
    }
    vtpu_core_kick(core);
    pthread_mutex_unlock(&core->lock);
    if (core->link.fabric) {
        vtpu_fabric_wake(core->link.fabric); /* packets may wait for it */
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
        return "this host has no such vector path";
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
