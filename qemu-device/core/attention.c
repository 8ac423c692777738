/* SPDX-License-Identifier: MIT */
/*
 * The meeting point between callers' threads and the command thread: what the
 * former want and the latter attends to between instructions. Contexts that
 * change, resets, parking, sleep.
 */
#include <string.h>

#include "machine.h"

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
    core->enabled = core->engine_resetting = core->stuck = false;
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
    vtpu_sensors_update(core);
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

/* Lock held; no command executes. Queues that have not begun their next one keep it. */
static void finish_engine_reset(VtpuCore *core)
{
    vtpu_queue_abandon_all(core);
    vtpu_inject_unstick(core);
    core->engine_resetting = false;
    atomic_store(&core->stop, core->exiting);
}

void vtpu_core_start_engine_reset(VtpuCore *core)
{
    core->enabled = false;
    if (core->resetting) {
        return; /* which does more */
    }
    core->engine_resetting = true;
    if (core->running >= 0) {
        vtpu_queue_reset(core, (unsigned)core->running);
    }
    if (vtpu_inject_engines_stuck(core)) {
        return;
    }
    if (!core->busy) {
        finish_engine_reset(core);
        return;
    }
    core->stuck = false;
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
        vtpu_sched_rest(core);
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
        vtpu_sched_rested(core);
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

bool vtpu_core_stuck(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    bool stuck = core->stuck && !vtpu_stopped(core);
    pthread_mutex_unlock(&core->lock);
    return stuck;
}

bool vtpu_core_boundary(VtpuCore *core)
{
    bool held = core->share.held;

    pthread_mutex_lock(&core->lock);
    atomic_store(&core->attention, 0);
    apply_contexts(core);
    /* Before it rests: whoever saves it then finds no command that is to be abandoned. */
    if (core->engine_resetting && core->running < 0 && !vtpu_inject_engines_stuck(core)) {
        finish_engine_reset(core);
    }
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
    vtpu_sensors_update(core);
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
    vtpu_sched_rest(core);
    while (must_wait(core)) {
        vtpu_engines_release(core);
        pthread_cond_wait(&core->wake, &core->lock);
    }
    vtpu_sched_rested(core);
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
