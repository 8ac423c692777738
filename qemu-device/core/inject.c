/* SPDX-License-Identifier: MIT */
/*
 * Faults on demand. Each kind has one value, set by callers and used up by the
 * command thread; a bit of `inject_armed` says that it is worth a look, so that
 * a machine without injections pays one load of a word that never changes.
 */
#include <time.h>

#include "machine.h"

#define SLOWEST (1u << 20)

/* As legal() has it. */
const char *vtpu_core_injection_values(VtpuInjection what)
{
    switch (what) {
    case VTPU_INJECT_HANG_PC:
        return "a multiple of 64 below 1048576, or 4294967295 for none";
    case VTPU_INJECT_IRQ_SPURIOUS:
        return "0 to 32";
    case VTPU_INJECT_HBM_SLOW:
        return "1 to 1048576";
    case VTPU_INJECT_STUCK:
        return "0 to 2";
    case VTPU_INJECT_TEMPERATURE:
        return "0 to 1000000, or 4294967295 for the model's";
    default:
        return "any";
    }
}

_Static_assert(VTPU_INSTR_BYTES == 64 && VTPU_MAX_CODE_BYTES == 1048576 && VTPU_NUM_MSIX == 33 &&
               SLOWEST == 1048576, "these words");

static bool legal(VtpuInjection what, uint64_t value)
{
    switch (what) {
    case VTPU_INJECT_HANG:
    case VTPU_INJECT_RESET_STUCK:
    case VTPU_INJECT_DEAD:
        return value <= 1;
    case VTPU_INJECT_HANG_PC:
        return value == VTPU_PC_NONE ||
               (value < VTPU_MAX_CODE_BYTES && value % VTPU_INSTR_BYTES == 0);
    case VTPU_INJECT_IRQ_SPURIOUS:
        return value < VTPU_NUM_MSIX;
    case VTPU_INJECT_HBM_SLOW:
        return value >= 1 && value <= SLOWEST;
    case VTPU_INJECT_STUCK:
        return value <= 2;
    case VTPU_INJECT_TEMPERATURE:
        return value <= 1000000 || value == VTPU_TEMPERATURE_NONE;
    default:
        return true;
    }
}

/* The value with which nothing is injected. */
static uint64_t idle_value(VtpuInjection what)
{
    switch (what) {
    case VTPU_INJECT_HANG_PC:
        return VTPU_PC_NONE;
    case VTPU_INJECT_HBM_SLOW:
        return 1;
    case VTPU_INJECT_TEMPERATURE:
        return VTPU_TEMPERATURE_NONE;
    default:
        return 0;
    }
}

/* Lock held. */
static void set(VtpuCore *core, VtpuInjection what, uint64_t value)
{
    core->inject[what] = value;
    if (value == idle_value(what)) {
        atomic_fetch_and(&core->inject_armed, ~(1u << what));
    } else {
        atomic_fetch_or(&core->inject_armed, 1u << what);
    }
}

void vtpu_inject_init(VtpuCore *core)
{
    for (unsigned i = 0; i < VTPU_NUM_INJECTIONS; i++) {
        core->inject[i] = idle_value(i);
    }
}

void vtpu_inject_reset(VtpuCore *core)
{
    set(core, VTPU_INJECT_HANG, 0);
    set(core, VTPU_INJECT_HANG_PC, VTPU_PC_NONE);
    set(core, VTPU_INJECT_STUCK, 0);
}

bool vtpu_inject_restore(VtpuCore *core, VtpuInjection what, uint64_t value)
{
    bool ok = legal(what, value);

    if (ok) {
        set(core, what, value);
    }
    return ok;
}

bool vtpu_core_inject(VtpuCore *core, VtpuInjection what, uint64_t value)
{
    if (what >= VTPU_NUM_INJECTIONS || !legal(what, value)) {
        return false;
    }
    pthread_mutex_lock(&core->lock);
    set(core, what, value);
    if (what == VTPU_INJECT_IRQ_SPURIOUS) {
        core->irqs |= 1ull << value;
    } else if (what == VTPU_INJECT_DEAD && value) {
        vtpu_core_start_reset(core); /* what it was doing is lost */
    } else if (what == VTPU_INJECT_STUCK && !value && core->stuck) {
        core->stuck = false;
        atomic_store(&core->stop, 1);
    }
    /* The command thread may be in a pause, or before a reset that was stuck. */
    atomic_store(&core->attention, 1);
    vtpu_core_kick(core);
    pthread_mutex_unlock(&core->lock);
    return true;
}

uint64_t vtpu_core_injected(VtpuCore *core, VtpuInjection what)
{
    pthread_mutex_lock(&core->lock);
    uint64_t value = what < VTPU_NUM_INJECTIONS ? core->inject[what] : 0;
    pthread_mutex_unlock(&core->lock);
    return value;
}

/* Takes `most` off the value, down to zero; returns what it was. */
static uint64_t use(VtpuCore *core, VtpuInjection what, uint64_t most)
{
    if (!vtpu_injecting(core, what)) {
        return 0;
    }
    pthread_mutex_lock(&core->lock);
    uint64_t value = core->inject[what];
    set(core, what, value > most ? value - most : 0);
    unsigned queue = core->turn;
    pthread_mutex_unlock(&core->lock);
    if (value) {
        vtpu_core_trace(core, VTPU_EVENT_INJECTED, queue, what, value);
    }
    return value;
}

void vtpu_raise_irq(VtpuCore *core, unsigned vector)
{
    if (vtpu_injecting(core, VTPU_INJECT_DEAD) || use(core, VTPU_INJECT_IRQ_LOSS, 1)) {
        return;
    }
    core->ops.raise_irq(core->opaque, vector);
    if (use(core, VTPU_INJECT_IRQ_DUPLICATE, 1)) {
        core->ops.raise_irq(core->opaque, vector);
    }
}

uint64_t vtpu_inject_fence(VtpuCore *core, uint64_t fence)
{
    return fence ^ use(core, VTPU_INJECT_FENCE_CORRUPT, UINT64_MAX);
}

static void report(VtpuCore *core, VtpuHardwareError what)
{
    if (core->ops.hardware_error) {
        core->ops.hardware_error(core->opaque, what);
    }
}

bool vtpu_inject_dma_error(VtpuCore *core, bool read)
{
    if (use(core, VTPU_INJECT_DMA_ERROR, 1) != 1) {
        return false;
    }
    if (read) { /* a write has no answer that could carry an error */
        report(core, VTPU_ERROR_POISONED);
    }
    return true;
}

uint32_t vtpu_inject_ecc(VtpuCore *core)
{
    if (use(core, VTPU_INJECT_ECC_SINGLE, 1)) {
        vtpu_stat_add(&core->stat_ecc_corrected, 1);
        report(core, VTPU_ERROR_CORRECTED);
    }
    if (!use(core, VTPU_INJECT_ECC_DOUBLE, 1)) {
        return VTPU_FAULT_NONE;
    }
    report(core, VTPU_ERROR_UNCORRECTED);
    return VTPU_FAULT_ECC;
}

/*
 * Stays at the end of an instruction until `until`, or while HBM is slow if
 * that is shorter, and meanwhile serves what callers ask and leaves the engines
 * to others; false: stopped.
 */
static bool pause_here(VtpuExec *x, uint64_t until)
{
    VtpuCore *core = x->core;
    struct timespec end = { (time_t)(until / 1000000000u), (long)(until % 1000000000u) };

    vtpu_engines_release(core);
    for (;;) {
        if (vtpu_core_parking(core)) {
            return true; /* slow enough: what comes next sets it aside */
        }
        if (!vtpu_core_boundary(core)) {
            return false;
        }
        if (vtpu_now_ns() >= until || !vtpu_injecting(core, VTPU_INJECT_HBM_SLOW)) {
            /* Another queue's turn may have come, which was no matter here. */
            atomic_store(&core->attention, 1);
            return vtpu_engines_take(core);
        }
        pthread_mutex_lock(&core->lock);
        if (!atomic_load(&core->attention)) {
            pthread_cond_timedwait(&core->wake, &core->lock, &end);
        }
        pthread_mutex_unlock(&core->lock);
    }
}

bool vtpu_inject_stuck(VtpuCore *core)
{
    core->stuck = vtpu_injecting(core, VTPU_INJECT_STUCK);
    return core->stuck;
}

bool vtpu_inject_engines_stuck(const VtpuCore *core)
{
    return core->inject[VTPU_INJECT_STUCK] > 1;
}

void vtpu_inject_unstick(VtpuCore *core)
{
    core->stuck = false;
    set(core, VTPU_INJECT_STUCK, 0);
}

void vtpu_inject_hang(VtpuExec *x)
{
    x->hung = use(x->core, VTPU_INJECT_HANG, 1) != 0;
}

void vtpu_inject_hang_at(VtpuExec *x, uint32_t pc)
{
    VtpuCore *core = x->core;

    if (!vtpu_injecting(core, VTPU_INJECT_HANG_PC)) {
        return;
    }
    pthread_mutex_lock(&core->lock);
    bool hangs = core->inject[VTPU_INJECT_HANG_PC] == pc;
    if (hangs) {
        set(core, VTPU_INJECT_HANG_PC, VTPU_PC_NONE);
    }
    pthread_mutex_unlock(&core->lock);
    if (hangs) {
        x->hung = true;
        vtpu_core_trace(core, VTPU_EVENT_INJECTED, x->queue, VTPU_INJECT_HANG_PC, pc);
    }
}

uint64_t vtpu_inject_slow_begin(const VtpuCore *core)
{
    return vtpu_injecting(core, VTPU_INJECT_HBM_SLOW) ? vtpu_now_ns() - core->share.waited : 0;
}

bool vtpu_inject_slow_end(VtpuExec *x, uint64_t begin)
{
    if (!begin) {
        return true;
    }
    uint64_t now = vtpu_now_ns(), took = now - x->core->share.waited - begin;
    uint64_t factor = vtpu_core_injected(x->core, VTPU_INJECT_HBM_SLOW);
    return pause_here(x, now + took * (factor - 1));
}
