/* SPDX-License-Identifier: MIT */
/*
 * The discrete-event simulation. Each actor (the sequencer, an engine) takes up
 * its next instruction as soon as it may, passes through a lead, a stream of
 * bytes and a tail, and ends it. The stream's bandwidth is shared equally by
 * the actors that stream: processor sharing, in whole cycles and exact
 * fractions of a byte, so that nothing is rounded along the way.
 *
 * All that ends in a cycle has ended before anything starts in it. The order of
 * starts within a cycle does not matter, since every instruction takes one at
 * least. So time may pass once every actor is at work, blocked, or out of work.
 */
#include <string.h>

#include "machine.h"

/* Of a byte: shares of 1 to 5 actors are whole numbers of it. */
#define SHARE 60
_Static_assert(VTPU_NUM_ENGINES <= 5, "SHARE is a multiple of every number of actors");

enum { IDLE, LEAD, STREAM, TAIL };
enum { BY_NOTHING, BY_COUNTER, BY_DRAIN, BY_ROOM };
_Static_assert(BY_COUNTER == VTPU_STALL_COUNTER && BY_DRAIN == VTPU_STALL_SYNC, "enum stall");

/* What an actor does when it is asked to take up its next instruction. */
typedef enum Taken { STARTS, WAITS, UNKNOWN } Taken;

static VtpuTimed *slot(VtpuActor *a, uint32_t n)
{
    return &a->ring[n % VTPU_TIMING_RING];
}

static uint64_t saturating_sub(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* ---- records ---- */

static void add_totals(VtpuTiming *t, const VtpuTimed *i, const VtpuActor *a, unsigned e)
{
    struct vtpu_profile_header *total = &t->total;

    total->instructions++;
    total->hbm_read += i->cost.hbm_read;
    total->hbm_written += i->cost.hbm_written;
    total->vmem_bytes += i->cost.vmem;
    total->ops += i->cost.ops;
    total->hbm_stall[e] += a->hbm_stall;
    total->wait[e * 8 + t->signaller[i->wait]] += a->stalled[BY_COUNTER];
    total->sync += a->stalled[BY_DRAIN];
}

static bool put_record(VtpuExec *x, const VtpuTimed *i, const VtpuActor *a, unsigned e)
{
    VtpuTiming *t = &x->timing;
    unsigned cause = a->stalled[BY_DRAIN] ? BY_DRAIN : a->stalled[BY_COUNTER] ? BY_COUNTER
                                                                             : BY_NOTHING;
    const struct vtpu_profile_record record = {
        .pc = i->pc, .opcode = i->opcode, .engine = (uint8_t)e, .stall_cause = (uint8_t)cause,
        .stall_engine = cause == BY_DRAIN     ? t->last
                        : cause == BY_COUNTER ? t->signaller[i->wait]
                                              : 0,
        .issue = i->issue, .start = a->start, .end = t->now,
        .stall = a->stalled[BY_COUNTER] + a->stalled[BY_DRAIN], .full = i->full,
        .hbm_stall = a->hbm_stall, .hbm_read = i->cost.hbm_read,
        .hbm_written = i->cost.hbm_written, .vmem_bytes = i->cost.vmem, .ops = i->cost.ops,
    };

    if (x->core->timing_trace) {
        vtpu_timing_trace(x, &record);
    }
    if (t->total.records == t->profile_records) {
        return true;
    }
    uint64_t va = t->profile_va + VTPU_PROFILE_HEADER_BYTES +
                  t->total.records++ * VTPU_PROFILE_RECORD_BYTES;
    x->fault.pc = VTPU_PC_NONE;
    return vtpu_mem_write(x, va, &record, sizeof(record));
}

/* ---- one actor ---- */

static Taken block(VtpuActor *a, unsigned why)
{
    a->blocked = why;
    return WAITS;
}

static bool drained(const VtpuTiming *t)
{
    for (unsigned e = VTPU_ENGINE_SEQ + 1; e < VTPU_NUM_ENGINES; e++) {
        if (t->actor[e].queued != t->actor[e].done) {
            return false;
        }
    }
    return true;
}

/* The actor is idle: may it start, in this cycle, and is it known what? */
static Taken may_start(VtpuTiming *t, unsigned e)
{
    VtpuActor *a = &t->actor[e];
    const VtpuTimed *i = slot(a, a->done);

    a->blocked = BY_NOTHING;
    if (e == VTPU_ENGINE_SEQ) {
        if (a->known == a->done) {
            return t->over ? WAITS : UNKNOWN;
        }
        if (i->engine != VTPU_ENGINE_SEQ) {
            const VtpuActor *to = &t->actor[i->engine];
            return to->queued - to->done < VTPU_ENGINE_DEPTH ? STARTS : block(a, BY_ROOM);
        }
    } else if (a->queued == a->done) {
        return WAITS; /* for work, and that is nobody's fault */
    }
    if (i->wait && t->counter[i->wait] < i->wait_value) {
        return block(a, BY_COUNTER);
    }
    if ((i->opcode == VTPU_OP_SYNC || i->opcode == VTPU_OP_HALT) && !drained(t)) {
        return block(a, BY_DRAIN);
    }
    return a->known == a->done ? UNKNOWN : STARTS;
}

static void start(VtpuExec *x, unsigned e)
{
    VtpuTiming *t = &x->timing;
    VtpuActor *a = &t->actor[e];
    VtpuTimed *i = slot(a, a->done);

    if (e == VTPU_ENGINE_SEQ) {
        i->issue = t->now - a->stalled[BY_COUNTER] - a->stalled[BY_DRAIN];
    }
    a->phase = LEAD;
    a->start = t->now;
    a->until = t->now + i->cost.lead;
    a->work_until = a->until + i->cost.work;
    a->left = (i->cost.hbm_read + i->cost.hbm_written) * SHARE;
    a->hbm_stall = 0;
}

/* The sequencer has issued an engine's instruction. */
static void enqueue(VtpuTiming *t, unsigned e)
{
    VtpuActor *from = &t->actor[VTPU_ENGINE_SEQ], *to = &t->actor[e];
    VtpuTimed *i = slot(to, to->queued++);

    i->issue = t->now;
    i->full = from->stalled[BY_ROOM];
    t->total.full[e] += i->full;
}

static bool end(VtpuExec *x, unsigned e)
{
    VtpuTiming *t = &x->timing;
    VtpuActor *a = &t->actor[e];
    const VtpuTimed *i = slot(a, a->done);
    bool ok = true;

    t->total.busy[e] += t->now - a->start;
    if (i->engine != e) {
        enqueue(t, i->engine);
    } else {
        add_totals(t, i, a, e);
        ok = put_record(x, i, a, e);
        if (i->signal) {
            t->counter[i->signal]++;
            t->signaller[i->signal] = (uint8_t)e;
        }
        t->over = i->opcode == VTPU_OP_HALT;
        t->last = (uint8_t)e;
    }
    memset(a->stalled, 0, sizeof(a->stalled));
    a->phase = IDLE;
    a->done++;
    return ok;
}

/* The actor's phase is over; the next one may be empty. */
static bool next_phase(VtpuExec *x, unsigned e)
{
    VtpuTiming *t = &x->timing;
    VtpuActor *a = &t->actor[e];

    if (a->phase == TAIL) {
        return end(x, e);
    }
    if (a->phase == LEAD && a->left) {
        a->phase = STREAM;
        return true;
    }
    a->hbm_stall = saturating_sub(t->now, a->work_until);
    a->phase = TAIL;
    a->until = (a->hbm_stall ? t->now : a->work_until) + slot(a, a->done)->cost.tail;
    return true;
}

/* ---- time ---- */

static bool phase_over(const VtpuActor *a, uint64_t now)
{
    return a->phase == STREAM ? a->left == 0 : a->phase != IDLE && a->until <= now;
}

/* What ends now, then what starts now; *wait: something is not known yet. */
static bool settle(VtpuExec *x, bool *unknown)
{
    VtpuTiming *t = &x->timing;

    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        while (phase_over(&t->actor[e], t->now)) {
            if (!next_phase(x, e)) {
                return false;
            }
        }
    }
    *unknown = false;
    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        if (t->actor[e].phase != IDLE) {
            continue;
        }
        Taken taken = may_start(t, e);
        if (taken == STARTS) {
            start(x, e);
        }
        *unknown |= taken == UNKNOWN;
    }
    return true;
}

/* To the next cycle in which something ends; false: there is none. */
static bool advance(VtpuTiming *t, uint64_t bytes_per_cycle)
{
    uint64_t streams = 0, step = UINT64_MAX;

    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        streams += t->actor[e].phase == STREAM;
    }
    uint64_t rate = streams ? bytes_per_cycle * SHARE / streams : 1;
    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        const VtpuActor *a = &t->actor[e];
        uint64_t left = a->phase == IDLE     ? UINT64_MAX
                        : a->phase == STREAM ? (a->left + rate - 1) / rate
                                             : a->until - t->now;
        step = left < step ? left : step;
    }
    if (step == UINT64_MAX) {
        return false;
    }
    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        VtpuActor *a = &t->actor[e];
        if (a->phase == STREAM) {
            a->left = saturating_sub(a->left, rate * step);
        } else if (a->phase == IDLE && a->blocked) {
            a->stalled[a->blocked] += step;
        }
    }
    t->now += step;
    return true;
}

static bool go_on(VtpuExec *x)
{
    VtpuTiming *t = &x->timing;
    bool unknown;

    do {
        if (!settle(x, &unknown)) {
            return false;
        }
    } while (!unknown && advance(t, x->core->timing.hbm_bytes_per_cycle));
    return true;
}

/* ---- what the machine tells ---- */

static void push(VtpuTiming *t, unsigned e, unsigned target, const VtpuIssued *i, uint32_t value)
{
    VtpuActor *a = &t->actor[e];
    const struct vtpu_instr *in = &i->in->in;

    if (a->issued - a->done == VTPU_TIMING_RING) {
        t->lost = true;
        return;
    }
    *slot(a, a->issued++) = (VtpuTimed) {
        .pc = i->pc, .wait_value = value, .opcode = in->opcode, .engine = (uint8_t)target,
        .signal = in->signal, .wait = in->wait,
    };
}

void vtpu_timing_issue(VtpuExec *x, const VtpuIssued *i)
{
    VtpuTiming *t = &x->timing;
    VtpuActor *seq = &t->actor[VTPU_ENGINE_SEQ];
    unsigned e = i->in->info->engine;

    push(t, VTPU_ENGINE_SEQ, e, i, 0);
    push(t, e, e, i, i->wait_value);
    if (!t->lost) {
        slot(seq, seq->known++)->cost.lead = x->core->timing.issue_cycles;
    }
}

bool vtpu_timing_execute(VtpuExec *x, const VtpuIssued *i)
{
    VtpuTiming *t = &x->timing;
    VtpuActor *a = &t->actor[i->in->info->engine];

    if (i->in->info->engine == VTPU_ENGINE_SEQ) {
        push(t, VTPU_ENGINE_SEQ, VTPU_ENGINE_SEQ, i, i->wait_value);
    }
    if (t->lost) {
        return true;
    }
    slot(a, a->known++)->cost = vtpu_timing_cost(x, i);
    return go_on(x);
}

static bool write_header(VtpuExec *x)
{
    const VtpuTiming *t = &x->timing;

    x->fault.pc = VTPU_PC_NONE;
    return t->profile_va == 0 ||
           vtpu_mem_write(x, t->profile_va, &t->total, sizeof(t->total));
}

bool vtpu_timing_begin(VtpuExec *x, uint64_t profile_va, uint32_t profile_bytes)
{
    VtpuTiming *t = &x->timing;

    _Static_assert(sizeof(t->total) == VTPU_PROFILE_HEADER_BYTES, "profile_header");
    _Static_assert(sizeof(struct vtpu_profile_record) == VTPU_PROFILE_RECORD_BYTES, "record");
    memset(t, 0, sizeof(*t));
    t->trace_base = x->core->timing_trace_end;
    t->total.bytes = VTPU_PROFILE_HEADER_BYTES;
    t->total.record_bytes = VTPU_PROFILE_RECORD_BYTES;
    t->total.clock_mhz = x->core->timing.clock_mhz;
    if (profile_bytes) {
        t->profile_va = profile_va;
        t->profile_records =
            (profile_bytes - VTPU_PROFILE_HEADER_BYTES) / VTPU_PROFILE_RECORD_BYTES;
    }
    return write_header(x);
}

bool vtpu_timing_end(VtpuExec *x)
{
    VtpuTiming *t = &x->timing;
    VtpuCore *core = x->core;
    struct vtpu_profile_header *total = &t->total;

    /* Only counters that wrap around could leave the model short of the end. */
    total->flags = t->lost || !t->over;
    total->cycles = t->now;
    uint64_t wait = 0, stall = 0, full = 0;
    for (unsigned n = 0; n < 64; n++) {
        wait += total->wait[n];
    }
    for (unsigned e = 0; e < 8; e++) {
        stall += total->hbm_stall[e];
        full += total->full[e];
    }
    const uint64_t stats[VTPU_NUM_MODEL_STATS] = {
        total->cycles, total->hbm_read, total->hbm_written, total->vmem_bytes, total->ops,
        total->busy[VTPU_ENGINE_SEQ], total->busy[VTPU_ENGINE_DMA], total->busy[VTPU_ENGINE_MXU],
        total->busy[VTPU_ENGINE_VPU], wait, full, total->sync, stall, total->busy[VTPU_ENGINE_LINK],
    };
    for (unsigned n = 0; n < VTPU_NUM_MODEL_STATS; n++) {
        vtpu_stat_add(&core->stat_model[n], stats[n]);
    }
    if (t->trace_base + t->now > core->timing_trace_end) {
        core->timing_trace_end = t->trace_base + t->now;
    }
    if (core->timing_trace) {
        fflush(core->timing_trace);
    }
    vtpu_core_trace(core, VTPU_EVENT_TIMED, x->queue, total->cycles, total->instructions);
    return write_header(x);
}
