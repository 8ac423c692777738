/* SPDX-License-Identifier: MIT */
/*
 * The timing model: how long a program would take on a chip that is described
 * by struct vtpu_timing_params. docs/timing.md defines it.
 *
 * It is a discrete-event simulation of the sequencer and the engines that is
 * fed with what the machine executes: the machine says *what* happens, in
 * whatever legal order it chose, the model *when*. It goes on only as far as
 * nothing that it does not know yet could have happened before, so its results
 * depend on the program and the parameters alone.
 *
 * All of it is state of the command: no pointers, and nothing of the host.
 * Command thread only.
 */
#ifndef VTPU_CORE_TIMING_H
#define VTPU_CORE_TIMING_H

#include <stdbool.h>
#include <stdint.h>

#include "vtpu_hw.h"
#include "vtpu_isa.h"
#include "vtpu_timing.h"

/*
 * How far the machine may be ahead of the model, in instructions of one engine.
 * In program order it is by a few more than an engine's queue holds; in a random
 * order, more is possible and as likely as never drawing one of four in a hundred.
 */
#define VTPU_TIMING_RING 128

/* An instruction's own cost. Cycles, bytes, operations. */
typedef struct VtpuCost {
    uint64_t lead; /* until memory answers and work begins, at least 1 */
    uint64_t work; /* beside the stream of bytes from or to HBM */
    uint64_t tail; /* once both are over */
    uint64_t hbm_read, hbm_written, vmem, ops;
} VtpuCost;

/* An instruction from its issue to its modelled end. */
typedef struct VtpuTimed {
    uint32_t pc, wait_value;
    uint8_t opcode, engine, signal, wait;
    VtpuCost cost;
    uint64_t issue, full;
} VtpuTimed;

/* The sequencer or an engine. Counts are of instructions since the program's start. */
typedef struct VtpuActor {
    VtpuTimed ring[VTPU_TIMING_RING]; /* instruction n is at n % VTPU_TIMING_RING */
    uint32_t issued; /* by the machine */
    uint32_t known;  /* executed by the machine: their cost is known */
    uint32_t queued; /* issued in model time */
    uint32_t done;   /* ended in model time */
    uint32_t phase, blocked;
    uint64_t start, until, work_until, left; /* of the instruction in progress */
    uint64_t stalled[4];                     /* cycles of the next one, by what blocked it */
    uint64_t hbm_stall;
} VtpuActor;

typedef struct VtpuTiming {
    uint64_t now;
    bool over, lost;
    uint32_t counter[VTPU_NUM_COUNTERS];
    uint8_t signaller[VTPU_NUM_COUNTERS]; /* the engine that signalled it last */
    uint8_t last;                         /* the engine that ended an instruction last */
    uint64_t profile_va, trace_base;
    uint64_t profile_records; /* room for so many */
    struct vtpu_profile_header total;
    VtpuActor actor[VTPU_NUM_ENGINES];
} VtpuTiming;

struct VtpuExec;
struct VtpuIssued;
struct VtpuCore;

/* timing_params.c: false with *error, a string that lasts until the thread's next call. */
bool vtpu_timing_params(const char *name, const char *file, struct vtpu_timing_params *params,
                        const char **error);

/* timing_cost.c: of an instruction that has just been executed */
VtpuCost vtpu_timing_cost(struct VtpuExec *x, const struct VtpuIssued *i);

/* timing.c. False: a fault, the profile could not be written. */
bool vtpu_timing_begin(struct VtpuExec *x, uint64_t profile_va, uint32_t profile_bytes);
void vtpu_timing_issue(struct VtpuExec *x, const struct VtpuIssued *i);
/* Executed; of the sequencer's own instructions the first that is heard. */
bool vtpu_timing_execute(struct VtpuExec *x, const struct VtpuIssued *i);
bool vtpu_timing_end(struct VtpuExec *x); /* after HALT */

/* timing_trace.c: a Chrome trace of all that is timed, in a file */
bool vtpu_timing_trace_open(struct VtpuCore *core, const char *file, const char **error);
void vtpu_timing_trace_close(struct VtpuCore *core);
void vtpu_timing_trace(struct VtpuExec *x, const struct vtpu_profile_record *record);

#endif
