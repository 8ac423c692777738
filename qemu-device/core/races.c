/* SPDX-License-Identifier: MIT */
/*
 * What a program does between two points where all engines are idle (its start,
 * SYNC, HALT) is logged and then judged: each step gets a vector clock (Fidge,
 * Mattern, 1988), and accesses that conflict are compared by the clocks.
 *
 * A clock says how many steps of each engine have ended, in *every* legal order,
 * when a step starts. That is computed as it is said: for each engine e, one
 * schedule that puts e off as long as possible. Everybody else goes on as far as
 * the rules allow, and only when nobody can does e make one step. A step that
 * could start before e's step n did so. What is possible only grows with what
 * has happened (counters count up), so the order among the others does not
 * matter and the schedule is the extreme one. Counters that several engines
 * signal, and signals that come later in the program, need no rule of their own.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

/* Steps and accesses that are kept; a program that does more without a SYNC goes on unchecked. */
#define MOST_STEPS (1u << 17)
#define MOST_ACCESSES (1u << 20)

typedef struct Step {
    uint32_t pc, wait_value;
    uint8_t opcode, engine, signal, wait;
    bool executed;
    uint32_t nth;                     /* of its engine; the sequencer's: of all */
    uint32_t first, accesses;         /* what it touched */
    uint32_t clock[VTPU_NUM_ENGINES];
} Step;

typedef struct List {
    void *data;
    uint32_t count, room;
} List;

struct VtpuRaces {
    List steps;                       /* Step, in program order */
    List accesses;                    /* VtpuAccess */
    List of_engine[VTPU_NUM_ENGINES]; /* uint32_t: its steps; not of the sequencer */
    List order;                       /* uint32_t: steps in a legal order */
    uint32_t executed[VTPU_NUM_ENGINES];
    uint32_t counter[VTPU_NUM_COUNTERS]; /* as they were before the first step */
    bool full;
    VtpuShadow *shadow;
    VtpuExec *exec;   /* while judging: */
    uint32_t judged;  /* the step */
    const VtpuAccess *access;
};

static void *append(List *list, size_t size, uint32_t most)
{
    if (list->count == list->room) {
        uint32_t room = list->room ? list->room * 2 : 256;
        void *more = list->count < most ? realloc(list->data, room * size) : NULL;
        if (!more) {
            return NULL;
        }
        list->data = more;
        list->room = room;
    }
    return (char *)list->data + list->count++ * size;
}

static Step *step_at(const VtpuRaces *r, uint32_t n)
{
    return (Step *)r->steps.data + n;
}

static uint32_t nth_of(const VtpuRaces *r, unsigned e, uint32_t n)
{
    return ((uint32_t *)r->of_engine[e].data)[n];
}

static void forget(VtpuRaces *r)
{
    r->steps.count = r->accesses.count = 0;
    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        r->of_engine[e].count = r->executed[e] = 0;
    }
    r->full = false;
}

static void give_up(VtpuExec *x)
{
    VtpuRaces *r = x->races;

    forget(r);
    r->full = true;
    vtpu_core_log(x->core, "race check: too much between two SYNCs, not checked");
}

/* ---- the log ---- */

static Step *add_step(VtpuExec *x, const VtpuIssued *i)
{
    VtpuRaces *r = x->races;
    const struct vtpu_instr *in = &i->in->in;
    unsigned e = i->in->info->engine;

    if (r->steps.count == 0) {
        memcpy(r->counter, x->counter, sizeof(r->counter));
    }
    Step *step = append(&r->steps, sizeof(*step), MOST_STEPS);
    uint32_t number = r->steps.count - 1, nth = number;
    if (step && e != VTPU_ENGINE_SEQ) {
        uint32_t *mine = append(&r->of_engine[e], sizeof(*mine), MOST_STEPS);
        nth = r->of_engine[e].count - 1;
        if (mine) {
            *mine = number;
        } else {
            step = NULL;
        }
    }
    if (!step) {
        give_up(x);
        return NULL;
    }
    *step = (Step) {
        .pc = i->pc, .wait_value = i->wait_value, .opcode = in->opcode, .engine = (uint8_t)e,
        .signal = in->signal, .wait = in->wait, .nth = nth,
    };
    return step;
}

typedef struct Adder {
    VtpuRaces *races;
    bool ok;
} Adder;

static void add_access(void *arg, const VtpuAccess *access)
{
    Adder *adder = arg;
    VtpuAccess *kept = append(&adder->races->accesses, sizeof(*kept), MOST_ACCESSES);

    if (kept) {
        *kept = *access;
    }
    adder->ok &= kept != NULL;
}

static void end_step(VtpuExec *x, Step *step, const VtpuIssued *i)
{
    VtpuRaces *r = x->races;
    Adder adder = { r, true };

    step->executed = true;
    step->first = r->accesses.count;
    vtpu_footprint(x, i, add_access, &adder);
    step->accesses = r->accesses.count - step->first;
    if (!adder.ok) {
        give_up(x);
    }
}

/* ---- clocks ---- */

/* A schedule of the logged steps, as far as it has got. */
typedef struct Schedule {
    const VtpuRaces *races;
    unsigned lazy;                     /* the engine that is put off */
    uint32_t issued[VTPU_NUM_ENGINES]; /* steps that the sequencer has issued */
    uint32_t done[VTPU_NUM_ENGINES];   /* steps that have ended; the sequencer's: taken */
    uint32_t counter[VTPU_NUM_COUNTERS];
    List *order; /* receives the engines' and the sequencer's own steps; or NULL */
} Schedule;

static bool satisfied(const Schedule *s, const Step *step)
{
    return !step->wait || s->counter[step->wait] >= step->wait_value;
}

static bool carry_out(Schedule *s, Step *step, uint32_t n)
{
    step->clock[s->lazy] = s->done[s->lazy];
    if (step->signal) {
        s->counter[step->signal]++;
    }
    if (s->order) {
        uint32_t *entry = append(s->order, sizeof(*entry), MOST_STEPS);
        if (!entry) {
            return false;
        }
        *entry = n;
    }
    return true;
}

/* One step of the engine, if it may; *no_memory goes with false. */
static bool advance(Schedule *s, unsigned e, bool *no_memory)
{
    const VtpuRaces *r = s->races;
    uint32_t n = s->done[e];

    if (e == VTPU_ENGINE_SEQ) {
        if (n == r->steps.count) {
            return false;
        }
        Step *step = step_at(r, n);
        if (step->engine != VTPU_ENGINE_SEQ) {
            s->issued[step->engine]++;
        } else {
            /* SYNC and HALT end a log: nothing in it comes after the idle engines. */
            if (!step->executed || !satisfied(s, step)) {
                return false;
            }
            *no_memory |= !carry_out(s, step, n);
        }
    } else {
        if (n == s->issued[e]) {
            return false;
        }
        uint32_t at = nth_of(r, e, n);
        Step *step = step_at(r, at);
        if (!step->executed || !satisfied(s, step)) {
            return false;
        }
        *no_memory |= !carry_out(s, step, at);
    }
    s->done[e]++;
    return true;
}

/* Everything that can happen while `lazy` makes as few steps as it can. */
static bool schedule(VtpuRaces *r, unsigned lazy, List *order)
{
    Schedule s = { .races = r, .lazy = lazy, .order = order };
    bool no_memory = false, moved;

    memcpy(s.counter, r->counter, sizeof(s.counter));
    do {
        moved = false;
        for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
            while (e != lazy && advance(&s, e, &no_memory)) {
                moved = true;
            }
        }
    } while (!no_memory && (moved || advance(&s, lazy, &no_memory)));
    return !no_memory;
}

/* ---- judgement ---- */

/* In every legal order, the step comes after the other one. */
static bool is_after(const Step *step, const Step *other)
{
    return step->engine == other->engine || step->clock[other->engine] > other->nth;
}

static void report(VtpuExec *x, const Step *late, const Step *early, bool late_writes,
                   bool early_writes, bool vmem, uint64_t addr, uint64_t bytes)
{
    static const char *const faults[] = VTPU_FAULT_NAMES;
    char text[256];
    const char *before = x->fault.cause ? faults[x->fault.cause] : "";

    snprintf(text, sizeof(text),
             "race: %s at 0x%x %s %s 0x%" PRIx64 " to 0x%" PRIx64 ", and %s at 0x%x, which %s "
             "it, is not ordered to it%s%s",
             vtpu_op_table[late->opcode].name, late->pc, late_writes ? "writes" : "reads",
             vmem ? "VMEM" : "memory", addr, addr + bytes - 1, vtpu_op_table[early->opcode].name,
             early->pc, early_writes ? "writes" : "reads", *before ? "; it ended with " : "",
             before);
    vtpu_core_log(x->core, text);
    vtpu_core_trace(x->core, VTPU_EVENT_RACE, x->queue, late->pc, early->pc);
    vtpu_fault(x, vmem ? VTPU_FAULT_RACE_VMEM : VTPU_FAULT_RACE_GLOBAL,
               late_writes ? VTPU_ACCESS_WRITE : VTPU_ACCESS_READ, addr);
    x->fault.pc = late->pc;
    x->fault.other_pc = early->pc;
}

static bool compare(void *arg, uint32_t number, bool other_writes, uint64_t addr, uint64_t bytes)
{
    VtpuRaces *r = arg;
    uint32_t other_index = number - 1;
    const Step *step = step_at(r, r->judged), *other = step_at(r, other_index);

    if (is_after(step, other)) {
        return true;
    }
    bool vmem = r->access->vmem, writes = r->access->write;
    if (r->judged > other_index) {
        report(r->exec, step, other, writes, other_writes, vmem, addr, bytes);
    } else {
        report(r->exec, other, step, other_writes, writes, vmem, addr, bytes);
    }
    return false;
}

/* Judges what is logged; false: a race, now the fault of the command. */
static bool judge(VtpuExec *x)
{
    VtpuRaces *r = x->races;
    bool ok = true, no_memory = false;

    r->order.count = 0;
    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        /* Engines first is the machine's own order, near enough, and the same for every seed. */
        no_memory |= !schedule(r, e, e == VTPU_ENGINE_SEQ ? &r->order : NULL);
    }
    r->exec = x;
    for (uint32_t n = 0; ok && !no_memory && n < r->order.count; n++) {
        r->judged = ((uint32_t *)r->order.data)[n];
        const Step *step = step_at(r, r->judged);
        for (uint32_t a = 0; ok && a < step->accesses; a++) {
            r->access = (VtpuAccess *)r->accesses.data + step->first + a;
            ok = vtpu_shadow_access(r->shadow, r->access, r->judged + 1, step->engine, compare, r,
                                    &no_memory);
        }
    }
    vtpu_shadow_clear(r->shadow);
    forget(r);
    if (no_memory) {
        vtpu_core_log(x->core, "race check: out of memory, not checked");
    }
    return ok || no_memory;
}

/* ---- what the machine tells ---- */

void vtpu_races_begin(VtpuExec *x)
{
    if (!x->races) {
        x->races = calloc(1, sizeof(*x->races));
        if (x->races && !(x->races->shadow = vtpu_shadow_new())) {
            free(x->races);
            x->races = NULL;
        }
    }
    if (x->races) {
        forget(x->races);
    } else {
        vtpu_core_log(x->core, "race check: out of memory, not checked");
    }
}

void vtpu_races_resume(VtpuExec *x)
{
    if (x->races) {
        forget(x->races);
        x->races->full = true;
    }
}

void vtpu_races_issue(VtpuExec *x, const VtpuIssued *i)
{
    if (x->races && !x->races->full) {
        add_step(x, i);
    }
}

bool vtpu_races_execute(VtpuExec *x, const VtpuIssued *i)
{
    VtpuRaces *r = x->races;
    unsigned e = i->in->info->engine;

    if (!r) {
        return true;
    }
    if (e != VTPU_ENGINE_SEQ && r->executed[e] == r->of_engine[e].count) {
        r->full = true; /* issued before the log began */
    }
    if (!r->full) {
        Step *step = e == VTPU_ENGINE_SEQ ? add_step(x, i)
                                          : step_at(r, nth_of(r, e, r->executed[e]++));
        if (step) {
            end_step(x, step, i);
        }
    }
    if (i->in->in.opcode != VTPU_OP_SYNC && i->in->in.opcode != VTPU_OP_HALT) {
        return true;
    }
    if (r->full) {
        forget(r); /* all is idle: from here on again */
        return true;
    }
    return judge(x);
}

void vtpu_races_fault(VtpuExec *x)
{
    if (x->races && !x->races->full) {
        judge(x);
    }
}

void vtpu_races_free(VtpuRaces *r)
{
    if (!r) {
        return;
    }
    free(r->steps.data);
    free(r->accesses.data);
    free(r->order.data);
    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        free(r->of_engine[e].data);
    }
    vtpu_shadow_free(r->shadow);
    free(r);
}
