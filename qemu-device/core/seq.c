/* SPDX-License-Identifier: MIT */
/*
 * The sequencer: runs scalar instructions (scalar.c), issues the others to their engine's
 * in-order queue, and decides who takes the next step. One step is one whole
 * instruction, carried out by all compute threads together; one that need not wait is
 * issued and carried out in one. Command thread only.
 */
#include <string.h>

#include "machine.h"

enum { STEP_SEQ = VTPU_ENGINE_SEQ, STEP_NONE = -1 };

static inline const VtpuDecoded *at_pc(const VtpuExec *x)
{
    return x->pc < x->program->size ? &x->program->code[x->pc / VTPU_INSTR_BYTES] : NULL;
}

static inline uint32_t wait_value(const VtpuExec *x, const struct vtpu_instr *in)
{
    return (uint32_t)x->s[in->wait_reg] + in->wait_imm;
}

static inline bool counter_reached(const VtpuExec *x, uint8_t counter, uint32_t value)
{
    return counter == 0 || x->counter[counter] >= value;
}

static inline bool engine_ready(VtpuExec *x, int engine)
{
    const VtpuEngine *e = &x->engine[engine];
    const VtpuIssued *i = &e->queue[e->head];

    return e->count && counter_reached(x, i->in->in.wait, i->wait_value) &&
           (engine != VTPU_ENGINE_LINK || vtpu_link_ready(x));
}

static inline uint64_t operand(const VtpuExec *x, const VtpuDecoded *d, unsigned i)
{
    return x->s[d->in.reg[i]] + d->in.imm[i];
}

static void read_operands(const VtpuExec *x, const VtpuDecoded *d, uint64_t v[8])
{
    for (unsigned i = 0; i < d->info->num_operands; i++) {
        v[i] = operand(x, d, i);
    }
}

static bool link_wait_over(const VtpuExec *x, const VtpuDecoded *d)
{
    uint64_t v[8];

    read_operands(x, d, v);
    return vtpu_link_wait_over(x, v);
}

/* The sequencer can take its next instruction, or fault on it. */
static inline bool seq_ready(const VtpuExec *x)
{
    const VtpuDecoded *d = at_pc(x);

    if (!d || d->cause) {
        return true;
    }
    if (d->info->engine != VTPU_ENGINE_SEQ) {
        return x->engine[d->info->engine].count < VTPU_ENGINE_DEPTH;
    }
    if (d->in.wait && !counter_reached(x, d->in.wait, wait_value(x, &d->in))) {
        return false;
    }
    if (d->in.opcode == VTPU_OP_LINK_WAIT && !link_wait_over(x, d)) {
        return false;
    }
    bool drains = d->in.opcode == VTPU_OP_HALT || d->in.opcode == VTPU_OP_SYNC;
    return !drains || x->pending == 0;
}

/* No step is possible, but something from another chip can make one so. */
static bool waits_for_link(const VtpuExec *x)
{
    const VtpuDecoded *d = at_pc(x);

    return x->send.begun ||
           (d && !d->cause && d->in.opcode == VTPU_OP_LINK_WAIT &&
            counter_reached(x, d->in.wait, wait_value(x, &d->in)));
}

static int choose_random(VtpuExec *x)
{
    int ready[VTPU_NUM_ENGINES], count = 0;

    if (seq_ready(x)) {
        ready[count++] = STEP_SEQ;
    }
    for (int e = VTPU_ENGINE_DMA; e < VTPU_NUM_ENGINES; e++) {
        if (engine_ready(x, e)) {
            ready[count++] = e;
        }
    }
    x->random ^= x->random << 13;
    x->random ^= x->random >> 7;
    x->random ^= x->random << 17;
    return count ? ready[(x->random >> 32) % (unsigned)count] : STEP_NONE;
}

/*
 * Who steps next: the oldest issued instruction that may start, so that by
 * default a program runs in its own order. With a seed, any legal order.
 */
static inline int choose(VtpuExec *x)
{
    if (x->core->schedule_seed) {
        return choose_random(x);
    }
    int best = STEP_NONE;
    if (x->pending) {
        uint64_t oldest = UINT64_MAX;
        for (int e = VTPU_ENGINE_DMA; e < VTPU_NUM_ENGINES; e++) {
            if (engine_ready(x, e) && x->engine[e].queue[x->engine[e].head].order < oldest) {
                oldest = x->engine[e].queue[x->engine[e].head].order;
                best = e;
            }
        }
    }
    return best == STEP_NONE && seq_ready(x) ? STEP_SEQ : best;
}

static inline void complete(VtpuExec *x, const struct vtpu_instr *in, int engine)
{
    if (in->signal) {
        x->counter[in->signal]++;
    }
    vtpu_stat_add(&x->core->stat_engine[engine], 1);
    vtpu_stat_add(&x->instructions, 1);
}

/* An instruction has been executed, for whoever keeps account of it. */
static bool observe(VtpuExec *x, const VtpuIssued *i)
{
    return (!x->core->check_races || vtpu_races_execute(x, i)) &&
           (!x->core->timed || vtpu_timing_execute(x, i));
}

static void observe_issue(VtpuExec *x, const VtpuIssued *i)
{
    if (x->core->check_races) {
        vtpu_races_issue(x, i);
    }
    if (x->core->timed) {
        vtpu_timing_issue(x, i);
    }
}

static bool step_engine(VtpuExec *x, int engine)
{
    VtpuEngine *e = &x->engine[engine];
    const VtpuIssued *i = &e->queue[e->head];
    bool moves = engine != VTPU_ENGINE_VPU || i->in->in.opcode == VTPU_OP_V_ATTN;
    uint64_t begin = moves ? vtpu_inject_slow_begin(x->core) : 0;
    bool is_long = !i->small && vtpu_restart_begin(x, i), ok, done = true;

    switch (engine) {
    case VTPU_ENGINE_DMA:
        ok = vtpu_dma_execute(x, i);
        break;
    case VTPU_ENGINE_MXU:
        ok = vtpu_mxu_execute(x, i);
        break;
    case VTPU_ENGINE_LINK:
        ok = vtpu_link_step(x, i, &done);
        break;
    default:
        ok = vtpu_vpu_execute(x, i);
        break;
    }
    vtpu_dirty_flush(x);
    if (is_long && vtpu_restart_end(x, ok)) {
        return true; /* to be set aside before it */
    }
    if (!ok || (begin && !vtpu_inject_slow_end(x, begin))) {
        x->fault.pc = i->pc;
        return false;
    }
    if (!done) {
        return true;
    }
    if (vtpu_observed(x) && !observe(x, i)) {
        return false;
    }
    complete(x, &i->in->in, engine);
    e->head = (e->head + 1) % VTPU_ENGINE_DEPTH;
    e->count--;
    x->pending--;
    return true;
}

static inline bool moves_data(const struct vtpu_op_info *info)
{
    return info->engine == VTPU_ENGINE_DMA || info->engine == VTPU_ENGINE_LINK;
}

static bool check_operand(VtpuExec *x, const struct vtpu_op_info *info, unsigned kind,
                          uint64_t value)
{
    switch (kind) {
    case VTPU_OPERAND_N:
        if (value > 1u << 20) {
            return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, value);
        }
        return true;
    case VTPU_OPERAND_STRIDE:
        if (value >> 31 || (!moves_data(info) && (value & 3))) {
            return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, value);
        }
        return true;
    case VTPU_OPERAND_V:
    case VTPU_OPERAND_V4:
        if (value & (kind == VTPU_OPERAND_V ? 63 : 3)) {
            return vtpu_fault(x, VTPU_FAULT_VMEM_RANGE, VTPU_ACCESS_NONE, value);
        }
        return true;
    default:
        return true;
    }
}

/* By kind: bits of which a usual operand has none, and a wrong one some. Those of engines that
 * move data are second. */
static const uint64_t unusual[2][VTPU_OPERAND_PC + 1] = {
    { [VTPU_OPERAND_N] = -(uint64_t)VTPU_SMALL_COUNT, [VTPU_OPERAND_STRIDE] = -1ull << 31 | 3,
      [VTPU_OPERAND_V] = 63, [VTPU_OPERAND_V4] = 3 },
    { [VTPU_OPERAND_N] = -(uint64_t)VTPU_SMALL_COUNT, [VTPU_OPERAND_STRIDE] = -1ull << 31,
      [VTPU_OPERAND_V] = 63, [VTPU_OPERAND_V4] = 3 },
};

static bool check_operands(VtpuExec *x, const struct vtpu_op_info *info, const uint64_t v[8])
{
    for (unsigned i = 0; i < info->num_operands; i++) {
        if (!check_operand(x, info, info->kind[i], v[i])) {
            return false;
        }
    }
    return true;
}

/* Reads and checks the operands of an engine's instruction; those that it does not have are
 * 0, of register 0. Most need no look at each. */
static inline bool take_operands(VtpuExec *x, const VtpuDecoded *d, VtpuIssued *i)
{
    const uint64_t *bits = unusual[moves_data(d->info)];
    uint64_t found = 0;

#pragma GCC unroll 8
    for (unsigned n = 0; n < 8; n++) {
        i->v[n] = operand(x, d, n);
        found |= i->v[n] & bits[d->info->kind[n]];
    }
    i->small = !found && d->in.opcode != VTPU_OP_V_ATTN;
    return !found || check_operands(x, d->info, i->v);
}

static bool issue(VtpuExec *x, const VtpuDecoded *d)
{
    VtpuEngine *e = &x->engine[d->info->engine];
    VtpuIssued *i = &e->queue[(e->head + e->count) % VTPU_ENGINE_DEPTH];

    if (!take_operands(x, d, i)) {
        return false;
    }
    i->in = d;
    i->pc = x->pc;
    i->order = x->order++;
    i->wait_value = wait_value(x, &d->in);
    e->count++;
    x->pending++;
    x->pc += VTPU_INSTR_BYTES;
    if (vtpu_observed(x)) {
        observe_issue(x, i);
    }
    return true;
}

/* What has just been issued would be chosen now: the only one, in the program's own order. */
static inline bool comes_next(VtpuExec *x, int engine)
{
    return x->pending == 1 && !x->watched && !x->core->schedule_seed && engine_ready(x, engine);
}

/* One sequencer instruction, or one of an engine that need not wait; *halt: the program is over. */
static bool step_seq(VtpuExec *x, bool *halt)
{
    const VtpuDecoded *d = at_pc(x);
    VtpuIssued self; /* as an engine's instruction would be */
    uint64_t *v = self.v;

    x->fault.pc = x->pc;
    if (!d) {
        return vtpu_fault(x, VTPU_FAULT_PC_RANGE, VTPU_ACCESS_EXEC, x->pc);
    }
    if (d->cause) {
        return vtpu_fault(x, d->cause, VTPU_ACCESS_EXEC, x->pc);
    }
    if (d->info->engine != VTPU_ENGINE_SEQ) {
        return issue(x, d) && (!comes_next(x, d->info->engine) || step_engine(x, d->info->engine));
    }
    self.wait_value = wait_value(x, &d->in); /* before it writes a register */
    read_operands(x, d, v);
    if (!check_operands(x, d->info, v)) {
        return false;
    }
    bool over;
    if (!vtpu_scalar_execute(x, d, v, &over)) {
        return false;
    }
    if (!over) {
        return true; /* its chip came back in time */
    }
    if (vtpu_observed(x)) {
        self.in = d;
        self.pc = x->fault.pc;
        if (!observe(x, &self)) {
            return false;
        }
    }
    *halt = d->in.opcode == VTPU_OP_HALT;
    complete(x, &d->in, VTPU_ENGINE_SEQ);
    return true;
}

/* Every step waits: blame the oldest instruction that does. */
static bool deadlock(VtpuExec *x)
{
    uint64_t oldest = UINT64_MAX;

    x->fault.pc = x->pc;
    for (int e = VTPU_ENGINE_DMA; e < VTPU_NUM_ENGINES; e++) {
        const VtpuIssued *i = &x->engine[e].queue[x->engine[e].head];
        if (x->engine[e].count && i->order < oldest) {
            oldest = i->order;
            x->fault.pc = i->pc;
        }
    }
    return vtpu_fault(x, VTPU_FAULT_DEADLOCK, VTPU_ACCESS_NONE, 0);
}

static inline uint32_t pc_of(const VtpuExec *x, int step)
{
    const VtpuEngine *e = &x->engine[step > STEP_SEQ ? step : STEP_SEQ];

    return step > STEP_SEQ ? e->queue[e->head].pc : x->pc;
}

/* What traces and injected hangs want to know of a step before it is made. */
static void watch(VtpuExec *x, int step)
{
    uint32_t pc = pc_of(x, step);
    const VtpuDecoded *d = step == STEP_NONE || pc >= x->program->size
                               ? NULL : &x->program->code[pc / VTPU_INSTR_BYTES];

    /* An engine's instruction is traced when it is executed, not when issued. */
    if (x->traced && d && d->info->name && (step > STEP_SEQ || !d->info->engine)) {
        vtpu_core_trace(x->core, VTPU_EVENT_INSTRUCTION, x->queue, d->in.opcode, pc);
    }
    if (step == STEP_SEQ) {
        vtpu_inject_hang_at(x, pc);
    }
}

static void watch_if_wanted(VtpuExec *x)
{
    const VtpuCoreOps *ops = &x->core->ops;

    x->traced = ops->trace && ops->trace_instructions &&
                ops->trace_instructions(x->core->opaque);
    x->observed = x->core->timed || x->core->check_races;
    x->watched = x->traced || vtpu_injecting(x->core, VTPU_INJECT_HANG_PC);
}

void vtpu_seq_start(VtpuExec *x)
{
    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        x->engine[e].head = x->engine[e].count = 0;
    }
    x->pending = 0;
    x->hung = false;
    x->order = 0;
    if (x->core->check_races) {
        vtpu_races_begin(x);
    }
    x->random = x->core->schedule_seed * 0x9e3779b97f4a7c15ull | 1;
    vtpu_link_begin(x);
}

/*
 * Attends to callers and to other queues, for as long as the program hangs;
 * false: it does not go on now, for the reason in *outcome.
 */
static bool boundary(VtpuExec *x, VtpuOutcome *outcome)
{
    x->fault.pc = x->pc;
    for (;;) {
        *outcome = VTPU_OUTCOME_PREEMPTED;
        if (vtpu_core_parking(x->core)) {
            return false;
        }
        if (!vtpu_core_boundary(x->core)) {
            *outcome = vtpu_core_parking(x->core) ? VTPU_OUTCOME_PREEMPTED : VTPU_OUTCOME_FAILED;
            return false;
        }
        /* It may be asked to park while it sleeps, where it must not take a step. */
        bool stuck = vtpu_core_stuck(x->core);
        if (vtpu_core_parking(x->core) || (!stuck && vtpu_sched_yields(x, false))) {
            return false;
        }
        if (!x->hung && !stuck) {
            watch_if_wanted(x);
            return true;
        }
        vtpu_engines_release(x->core);
        vtpu_core_wait_attention(x->core);
    }
}

/* With a schedule seed programs are set aside at random, too. */
static bool gives_way_at_random(VtpuExec *x)
{
    return x->core->schedule_seed && (x->random >> 40 & 7) == 0 && vtpu_sched_yields(x, true);
}

/*
 * Is set aside until another chip does something; where the host has no memory
 * for the VMEM of others meanwhile, it sleeps in their way. True: look again.
 */
static bool wait_for_link(VtpuExec *x, VtpuOutcome *outcome)
{
    x->fault.pc = x->pc;
    if (!vtpu_vmem_spare(x->core) && !x->core->stepped) {
        bool go_on = vtpu_link_pause(x);
        *outcome = vtpu_core_parking(x->core) ? VTPU_OUTCOME_PREEMPTED : VTPU_OUTCOME_FAILED;
        return go_on;
    }
    uint32_t events = atomic_load(&x->core->link.events);
    if (events != x->link_events) {
        x->link_events = events; /* something has happened since it looked last */
        return true;
    }
    *outcome = VTPU_OUTCOME_WAITING;
    return false;
}

VtpuOutcome vtpu_seq_run(VtpuExec *x)
{
    VtpuOutcome outcome;
    bool halt = false, ok = true;

    watch_if_wanted(x);
    /* Whoever gets the machine makes a step, however soon others want it back. */
    for (bool stepped = false;; stepped = true) {
        bool attention = atomic_load_explicit(&x->core->attention, memory_order_relaxed);
        if (((attention && stepped) || x->hung) && !boundary(x, &outcome)) {
            return outcome;
        }
        int step = choose(x);
        atomic_store_explicit(&x->last_pc, pc_of(x, step), memory_order_relaxed);
        if (step == STEP_NONE && waits_for_link(x)) {
            if (!wait_for_link(x, &outcome)) {
                return outcome;
            }
            continue;
        }
        if (x->watched) {
            watch(x, step);
            if (x->hung) {
                continue;
            }
        }
        ok = step == STEP_NONE  ? deadlock(x)
             : step == STEP_SEQ ? step_seq(x, &halt)
                                : step_engine(x, step);
        if (!ok && x->core->check_races && x->fault.cause != VTPU_FAULT_NONE) {
            vtpu_races_fault(x);
        }
        if (!ok || halt) {
            return ok ? VTPU_OUTCOME_DONE : VTPU_OUTCOME_FAILED;
        }
        if (gives_way_at_random(x)) {
            return VTPU_OUTCOME_PREEMPTED;
        }
    }
}

/* What issue() would have accepted. */
static bool restore_issued(VtpuExec *x, int engine, VtpuIssued *i)
{
    if (i->pc >= x->program->size || i->pc % VTPU_INSTR_BYTES || i->order >= x->order) {
        return false;
    }
    i->in = &x->program->code[i->pc / VTPU_INSTR_BYTES];
    i->small = false; /* not known: it may be */
    if (i->in->cause || i->in->info->engine != engine) {
        return false;
    }
    return check_operands(x, i->in->info, i->v);
}

bool vtpu_seq_restore(VtpuExec *x)
{
    x->pending = 0;
    x->send.begun = false;
    for (int e = VTPU_ENGINE_DMA; e < VTPU_NUM_ENGINES; e++) {
        for (unsigned n = 0; n < x->engine[e].count; n++) {
            if (!restore_issued(x, e, &x->engine[e].queue[n])) {
                return false;
            }
        }
        x->pending += x->engine[e].count;
    }
    /* One past the end is a fault that is to come. */
    return x->pc % VTPU_INSTR_BYTES == 0 && x->pc <= x->program->size;
}
