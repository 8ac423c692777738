/* SPDX-License-Identifier: MIT */
/*
 * The machine's inside, shared by the files of this folder.
 *
 * Threads: the *command thread* runs ring commands and programs and alone
 * touches what is marked [command]. Callers' threads (vCPUs) touch what is
 * marked [lock] with VtpuCore.lock held, and so does the command thread.
 * While it sleeps a doorbell's caller may take its place (VtpuCore.lent).
 * Compute workers see only the job that the pool hands to them. The lock is
 * held for a few instructions only: never over a callback or a computation.
 *
 * Errors: an operation that cannot go on records a fault in its VtpuExec and
 * returns false; false without a fault means that the command was stopped.
 */
#ifndef VTPU_MACHINE_H
#define VTPU_MACHINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "footprint.h"
#include "kernels.h"
#include "link.h"
#include "races.h"
#include "timing.h"
#include "vtpu_core.h"
#include "vtpu_hw.h"
#include "vtpu_isa.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the machine reads guest structures in place: little-endian hosts only"
#endif

#define VTPU_PC_NONE UINT32_MAX
#define VTPU_TEMPERATURE_NONE UINT32_MAX
#define VTPU_DMA_CHUNK (1u << 20) /* most bytes of one callback */

enum { VTPU_ACCESS_NONE, VTPU_ACCESS_READ, VTPU_ACCESS_WRITE, VTPU_ACCESS_EXEC };

typedef struct VtpuFault {
    uint32_t cause; /* VTPU_FAULT_* */
    uint32_t access;
    uint64_t addr;
    uint32_t pc;
    uint32_t other_pc; /* RACE_*: of the other instruction */
} VtpuFault;

/* ---- pool.c: compute threads ---- */

typedef struct VtpuPool VtpuPool;

/* Part [begin, end) of a job; slot numbers the calling thread, 0..threads-1. */
typedef void (*VtpuPoolFn)(void *arg, uint32_t begin, uint32_t end, unsigned slot);

VtpuPool *vtpu_pool_new(unsigned threads); /* NULL: out of threads */
void vtpu_pool_free(VtpuPool *pool);
/*
 * Calls fn over [0, total) in parts of `grain`, on the caller and the workers,
 * and returns when all are done; false when stopped. One caller at a time.
 */
bool vtpu_pool_for(VtpuPool *pool, uint32_t total, uint32_t grain, VtpuPoolFn fn, void *arg);
/*
 * To the one caller to come, whose parts not yet begun are skipped while *stop is
 * non-zero; idle workers spin a while then before they sleep. NULL: to nobody.
 */
void vtpu_pool_lend(VtpuPool *pool, const atomic_uint *stop);

/* ---- chip.c: the engines, shared by the machines of a chip ---- */

#define VTPU_SLICE_NS 1000000

/* A machine's share. [chip's lock] but for what is marked */
typedef struct VtpuShare {
    struct VtpuCore *next;
    pthread_cond_t come; /* its turn has */
    bool waiting;
    uint64_t used;   /* ns, at least the chip's clock as it began to wait */
    bool held;       /* [command] */
    uint64_t waited; /* ns, all time. [command] */
} VtpuShare;

/* Nanoseconds for which any machine held them; takes the chip's lock. */
uint64_t vtpu_engines_held_ns(VtpuChip *chip);
void vtpu_chip_join(VtpuChip *chip, struct VtpuCore *core);
void vtpu_chip_leave(struct VtpuCore *core);
/* Returns once they are held, also if they were before; false: stopped. [command] */
bool vtpu_engines_take(struct VtpuCore *core);
/* The same within an instruction that gave them away to wait. [command] */
bool vtpu_engines_take_back(struct VtpuCore *core);
void vtpu_engines_release(struct VtpuCore *core); /* if held. [command] */
/*
 * Between instructions: gives way when the slice is over and another's turn has
 * come, and waits for the next one if a command is running; false: stopped. [command]
 */
bool vtpu_engines_boundary(struct VtpuCore *core);

/* ---- mmu.c: translation ---- */

#define VTPU_TLB_SPANS 64

/* A virtually and physically contiguous range with the same rights. */
typedef struct VtpuTlbSpan {
    uint64_t start, end; /* virtual; end 0: empty */
    uint64_t target;     /* HBM offset or bus address of start */
    uint8_t rights;      /* VTPU_PTE_READ | WRITE | EXEC */
    bool hbm;
} VtpuTlbSpan;

typedef struct VtpuTlb {
    VtpuTlbSpan span[VTPU_TLB_SPANS];
    unsigned hint, next;
} VtpuTlb;

typedef struct VtpuSpan {
    uint8_t *host; /* NULL: system memory at bus */
    uint64_t bus;
    uint64_t len;
} VtpuSpan;

/* ---- decode.c: programs ---- */

typedef struct VtpuDecoded {
    struct vtpu_instr in;
    const struct vtpu_op_info *info;
    uint32_t cause; /* fault on reaching it, or VTPU_FAULT_NONE */
} VtpuDecoded;

/* Kept while the cache or a command in progress refers to it. */
typedef struct VtpuProgram {
    uint8_t *bytes; /* the private copy */
    VtpuDecoded *code;
    uint32_t size;  /* bytes */
    uint64_t used;  /* for eviction */
    atomic_uint references;
} VtpuProgram;

#define VTPU_PROGRAM_CACHE 16

/* ---- vmem.c: images of VMEM ---- */

/* What one program has in VMEM. All but the bytes is [lock]. */
typedef struct VtpuVmem {
    uint8_t *data;  /* NULL: not allocated */
    void *map;      /* where it lies, to be unmapped */
    uint64_t used;  /* bytes above it are zero; of the program that has it, [command] */
    int owner;      /* context whose data it may hold, -1 none */
    bool taken;     /* by a program in progress */
} VtpuVmem;

/* ---- seq.c, engine_*.c: one command ---- */

#define VTPU_ENGINE_DEPTH 16
#define VTPU_NUM_MODEL_STATS ((VTPU_REG_STAT_MODEL_BUSY_LINK - VTPU_REG_STAT_MODEL_CYCLES) / 8 + 1)

typedef struct VtpuIssued {
    const VtpuDecoded *in; /* the program's, at pc */
    uint64_t v[8]; /* operands */
    uint64_t order;
    uint32_t pc;
    uint32_t wait_value;
    bool small; /* certainly no long instruction (restart.c) */
} VtpuIssued;

typedef struct VtpuEngine {
    VtpuIssued queue[VTPU_ENGINE_DEPTH];
    unsigned head, count;
} VtpuEngine;

typedef struct VtpuBuffer {
    uint8_t *data; /* 64-byte aligned */
    size_t bytes;
} VtpuBuffer;

enum { VTPU_BUFFER_QUANTISED, VTPU_BUFFER_BOUNCE, VTPU_BUFFER_THREADS, VTPU_BUFFER_LISTS,
       VTPU_BUFFER_DMA, VTPU_BUFFER_UNDO, VTPU_NUM_BUFFERS };

/*
 * The command of one queue, as far as it has come: with the queue's registers,
 * HBM and VMEM it is all that is needed to go on with it, so it can be set
 * aside, resumed and saved. The only pointers in it are to what it owns, and
 * `in` of the instructions issued, which follows from their pc. [command] for
 * the command that runs, [lock] for the others.
 */
typedef struct VtpuExec {
    struct VtpuCore *core;
    unsigned queue, context;
    VtpuFault fault;
    uint8_t entry[VTPU_RING_ENTRY]; /* copied from the ring */
    uint64_t done; /* bytes of a COPY or FILL */

    /* Of a RUN; a program is in progress while `program` is not NULL. */
    VtpuProgram *program;
    VtpuVmem *vmem;
    uint64_t s[VTPU_NUM_SREGS];
    uint32_t counter[VTPU_NUM_COUNTERS];
    uint32_t pc; /* the sequencer's */
    VtpuEngine engine[VTPU_NUM_ENGINES];
    unsigned pending; /* instructions in all engine queues */
    uint64_t order;
    uint64_t random;
    bool hung; /* by injection: goes no further */

    uint64_t waits_from; /* waits for another chip since then; 0: it does not. [lock] */
    uint64_t ran_ns; /* executed so far; [lock], as all of the next three */
    uint64_t busy_ns; /* since ENABLE, like the rest */
    uint32_t preemptions;
    _Atomic uint64_t instructions;
    VtpuLinkSend send;
    uint32_t generation[VTPU_MAX_CHIPS]; /* of the chips' links when the program began */

    /* No state: found again whenever it runs. */
    bool watched; /* look at each instruction before it is executed */
    bool traced;
    _Atomic uint32_t last_pc; /* of the instruction begun last; read by all */
    uint32_t link_events; /* VtpuLink.events when it was last looked at */
    bool observed; /* tell the timing model or the race checker of each instruction */
    VtpuRaces *races; /* or NULL; a program that is resumed elsewhere goes on unchecked */

    VtpuTiming timing; /* state of a RUN where there is a timing model */
} VtpuExec;

/* How far a command got. */
typedef enum VtpuOutcome {
    VTPU_OUTCOME_FAILED, /* with a fault, or stopped */
    VTPU_OUTCOME_HELD,   /* a WAIT that is not satisfied yet */
    VTPU_OUTCOME_PREEMPTED, /* set aside: for another queue's command, or to be parked */
    VTPU_OUTCOME_WAITING, /* a RUN that can go on only when another chip does something */
    VTPU_OUTCOME_DONE,
} VtpuOutcome;

/* ---- queues ---- */

typedef struct VtpuQueue {
    /* configuration, [lock] */
    uint64_t ring_base, fence_addr;
    uint32_t ring_log2, context, vector, priority, watchdog_us;
    /* state, [lock] */
    uint32_t state; /* VTPU_QUEUE_STATE_* */
    uint32_t head, tail;
    bool bad_doorbell;
    VtpuFault fault;
    uint32_t fault_entry;
    bool holding;       /* a WAIT, or a program's wait for a chip: looked at again at poll_ns */
    uint64_t poll_ns, poll_interval;
    uint64_t vtime;     /* sched.c: what the queue has had of the machine */
} VtpuQueue;

/* [lock] */
typedef struct VtpuSched {
    uint32_t slice_us;
    uint64_t begin;      /* of the running command's present stretch */
    unsigned paused;     /* it waits for something else than a queue */
    uint64_t rests_from; /* the whole machine stands still since then; 0: it does not */
    uint64_t slice_end;
    uint64_t slice_left; /* of the slice, while paused */
    uint64_t watchdog;   /* when the running command is over its limit; UINT64_MAX never */
    bool expired;        /* it is */
    uint64_t alarm;      /* when the timer thread is to act; UINT64_MAX never */
    uint64_t asleep_until; /* when it wakes by itself */
    uint64_t steps;      /* a stepped machine's clock */
    int next;            /* for whom the last program was set aside, -1 nobody */
} VtpuSched;

/* sensors.c: of the physical function's machine. [lock] */
typedef struct VtpuSensors {
    uint64_t seen_ns, held_ns; /* up to where clock and engines are accounted for */
    uint64_t energy_nj;
    int64_t power_uw, temperature_uc;
} VtpuSensors;

/* restart.c: what a long instruction overwrites in VMEM; bytes 0: nothing yet. [command] */
typedef struct VtpuUndo {
    bool wanted;
    uint64_t addr, bytes;
} VtpuUndo;

#define VTPU_STOP_TO_PARK 2u /* a value of VtpuCore.stop: only a long instruction is */

struct VtpuCore {
    VtpuCoreOps ops;
    void *opaque;
    uint8_t *hbm;
    uint64_t hbm_bytes;
    const VtpuKernels *kernels;
    VtpuChip *chip;
    VtpuChip *own_chip; /* to be freed with the machine */
    VtpuShare share;
    unsigned threads;
    unsigned function;
    uint64_t schedule_seed;
    bool stepped; /* there is no command thread: who calls vtpu_core_step() is it */
    bool serve_short; /* callers of vtpu_core_doorbell() may make its callbacks */
    bool check_races;
    bool timed; /* programs are timed on the chip that is described by: */
    struct vtpu_timing_params timing;

    pthread_mutex_t lock;
    pthread_cond_t wake;    /* the command thread has something to look at */
    pthread_cond_t changed; /* parked, reset or left */
    pthread_cond_t timer;   /* the timer thread has to sleep less */
    pthread_t thread, timer_thread;
    VtpuPool *pool;

    /* Read by the command thread without the lock; written with it. */
    atomic_uint attention; /* call vtpu_core_boundary() */
    atomic_uint stop;      /* abandon the running command */

    /* [lock] */
    bool busy; /* the command thread is at work with the lock dropped */
    bool lent; /* or a caller is in its place, while it sleeps; then it stays out */
    bool exiting, park, parked, asleep, resetting, enabled;
    bool engine_resetting;
    bool stuck; /* by injection: the running program ignores the reset of its queue */
    bool clear; /* HBM, before the reset ends */
    bool restartable; /* a long instruction is in progress */
    int running; /* queue of the running command, -1 none */
    unsigned turn; /* queue served last, for round robin */
    VtpuSched sched;
    uint32_t reset_count, scratch;
    uint64_t err_queues; /* bit q: it has faulted */
    uint64_t irqs;             /* TEST_IRQ vectors to raise */
    uint64_t context_changed;  /* bit c: flush context c and take its root */
    uint64_t ctx_root[VTPU_NUM_CONTEXTS];
    uint64_t time_base, parked_ns, still_ns; /* see vtpu_core_time() */
    uint32_t latch_offset, latch_high; /* upper half of an 8-byte read in halves */
    VtpuQueue queue[VTPU_NUM_QUEUES];
    VtpuLink link;
    VtpuVmem vmem[VTPU_NUM_QUEUES]; /* allocated as programs are in progress at once */
    VtpuSensors sensors;
    uint64_t inject[VTPU_NUM_INJECTIONS];

    atomic_uint inject_armed; /* bit VTPU_INJECT_*: the value is not its idle one */

    /* Statistics: written by the command thread, read by all. */
    _Atomic uint64_t stat_programs, stat_busy_ns, stat_hbm_bytes, stat_ecc_corrected;
    _Atomic uint64_t stat_engine[VTPU_NUM_ENGINES]; /* instructions */
    _Atomic uint64_t stat_model[VTPU_NUM_MODEL_STATS]; /* as STAT_MODEL_CYCLES and on */

    /* [command] for the running command's context, [lock] for the others */
    uint64_t root[VTPU_NUM_CONTEXTS]; /* roots in use */
    VtpuTlb tlb[VTPU_NUM_CONTEXTS];

    VtpuExec exec[VTPU_NUM_QUEUES];

    /* [command] */
    VtpuProgram *program[VTPU_PROGRAM_CACHE];
    uint64_t program_clock;
    VtpuUndo undo;
    VtpuBuffer buffer[VTPU_NUM_BUFFERS];
    uint64_t dirty_start, dirty_end; /* HBM written, not yet reported */
    FILE *timing_trace;              /* or NULL */
    uint64_t timing_trace_end;       /* cycles that it covers */
};

/* core.c, attention.c */
uint64_t vtpu_now_ns(void);
void vtpu_core_log(VtpuCore *core, const char *message);
void vtpu_core_trace(VtpuCore *core, VtpuCoreEvent event, unsigned queue, uint64_t a, uint64_t b);
/* Applies what callers asked for while a command runs; false: abandon it. [command] */
bool vtpu_core_boundary(VtpuCore *core);
/* Makes the command thread look again; lock held. */
void vtpu_core_kick(VtpuCore *core);
/* Sleeps until somebody asks for attention. [command] */
void vtpu_core_wait_attention(VtpuCore *core);
void vtpu_core_start_reset(VtpuCore *core);          /* lock held */
void vtpu_core_start_engine_reset(VtpuCore *core);   /* lock held */
/* clear.c; lock held, in a reset: true once HBM is zero, if that was asked for. [command] */
bool vtpu_clear_if_asked(VtpuCore *core);
/* Lock held; the command thread, or anyone while it is idle or parked. */
void vtpu_core_finish_reset(VtpuCore *core);
/* Whether the command in hand is to be set aside, for the machine to be parked. [command] */
bool vtpu_core_parking(VtpuCore *core);
/* Whether it stands still although its queue is reset: by injection. [command] */
bool vtpu_core_stuck(VtpuCore *core);
bool vtpu_core_is_parked(const VtpuCore *core);      /* lock held */
/* The machine's own clock: it stands still while the machine is parked. Lock held. */
uint64_t vtpu_core_clock(const VtpuCore *core);
/* TIME: nanoseconds since a reset, those while parked excepted. Lock held. */
uint64_t vtpu_core_time(const VtpuCore *core);
void vtpu_core_set_time(VtpuCore *core, uint64_t time);
void vtpu_core_context_changed(VtpuCore *core, unsigned context); /* lock held */
void vtpu_core_received(VtpuCore *core); /* lock held: a packet has just been written */

/* sensors.c; lock held */
void vtpu_sensors_init(VtpuCore *core);
void vtpu_sensors_update(VtpuCore *core); /* up to now, as the machine sleeps or wakes */
/* They go on from now with the values that were loaded; false: no such values. */
bool vtpu_sensors_resume(VtpuCore *core);
uint64_t vtpu_sensor_read(VtpuCore *core, uint64_t offset);

/* inject.c. What returns a bool: false: stopped, as with a fault that is none. [command] */
void vtpu_inject_init(VtpuCore *core);
void vtpu_inject_reset(VtpuCore *core); /* lock held: no program is left to hang */
static inline bool vtpu_injecting(const VtpuCore *core, VtpuInjection what)
{
    return atomic_load_explicit(&core->inject_armed, memory_order_relaxed) >> what & 1;
}
/* Every interrupt goes through here. */
void vtpu_raise_irq(VtpuCore *core, unsigned vector);
uint64_t vtpu_inject_fence(VtpuCore *core, uint64_t fence); /* what to write instead */
bool vtpu_inject_dma_error(VtpuCore *core, bool read); /* true: this transfer fails */
uint32_t vtpu_inject_ecc(VtpuCore *core);    /* of a read of HBM: cause or VTPU_FAULT_NONE */
/* lock held; false: not a value of that fault */
bool vtpu_inject_restore(VtpuCore *core, VtpuInjection what, uint64_t value);
/* A queue reset has met a running program: whether that stays; lock held. */
bool vtpu_inject_stuck(VtpuCore *core);
/* Whether an engine reset stays unfinished; lock held. */
bool vtpu_inject_engines_stuck(const VtpuCore *core);
void vtpu_inject_unstick(VtpuCore *core); /* an engine reset has ended; lock held */
/* These two set x->hung. */
void vtpu_inject_hang(VtpuExec *x);
void vtpu_inject_hang_at(VtpuExec *x, uint32_t pc);
/* Around what moves data: begin is the time, or 0 when HBM is not slow. */
uint64_t vtpu_inject_slow_begin(const VtpuCore *core);
bool vtpu_inject_slow_end(VtpuExec *x, uint64_t begin);

/* sched.c; lock held where nothing else is said */
void vtpu_sched_reset(VtpuCore *core);
bool vtpu_sched_has_work(const VtpuCore *core, unsigned q, uint64_t now);
/* The queue to serve, or -1. */
int vtpu_sched_pick(VtpuCore *core);
/* Queue q has work after a time without. */
void vtpu_sched_wake(VtpuCore *core, unsigned q);
/* Around each stretch of the running command. [command] */
void vtpu_sched_begin(VtpuCore *core);
void vtpu_sched_end(VtpuCore *core);
/* Around a wait that is not the running command's time, if one runs; they nest. [command] */
void vtpu_sched_pause(VtpuCore *core);
void vtpu_sched_go_on(VtpuCore *core);
/* The same while the whole machine stands still: nor is that time spent waiting for chips. */
void vtpu_sched_rest(VtpuCore *core);
void vtpu_sched_rested(VtpuCore *core);
/* It is done: from here it cannot be over its limit. */
void vtpu_sched_done(VtpuCore *core);
/*
 * Queue q's program waits for another chip from now on, or does no longer: the
 * time counts as the command's, not as the queue's. False: it is over its limit.
 */
bool vtpu_sched_waits(VtpuCore *core, unsigned q);
void vtpu_sched_waited(VtpuCore *core, unsigned q);
/* What the choice depends on has changed: looks when it is due. */
void vtpu_sched_changed(VtpuCore *core);
/* COMMAND_NS and BUSY_NS, the present stretch included. */
uint64_t vtpu_sched_command_ns(VtpuCore *core, unsigned q);
uint64_t vtpu_sched_busy_ns(VtpuCore *core, unsigned q);
/*
 * Whether the running program is to be set aside now, because another queue's
 * turn has come, or at random for a test. Lock not held. [command]
 */
bool vtpu_sched_yields(VtpuExec *x, bool at_random);
void *vtpu_timer_thread(void *core);

/* queue.c; lock held for the first four; false: the guest may not do that now */
bool vtpu_queue_enable(VtpuCore *core, unsigned q);
void vtpu_queue_reset(VtpuCore *core, unsigned q);
bool vtpu_queue_doorbell(VtpuCore *core, unsigned q, uint32_t tail);
/*
 * After a doorbell: executes the queue's short commands in the place of the command
 * thread if that is idle, and wakes it for the rest. Lock held, dropped meanwhile.
 */
void vtpu_queue_serve_short(VtpuCore *core, unsigned q);
void vtpu_queue_clear_all(VtpuCore *core);
/* Ends what is set aside; for the running command, see vtpu_core_start_engine_reset(). */
void vtpu_queue_abandon_all(VtpuCore *core); /* lock held */
bool vtpu_queue_in_progress(const VtpuQueue *queue); /* at rest, but its command has begun */
bool vtpu_queue_is_legal(const VtpuQueue *queue); /* at rest, whatever it was loaded from */
/* Another chip did something that programs may wait for; lock held. */
void vtpu_queue_link_event(VtpuCore *core);
void *vtpu_command_thread(void *core);

/* command.c: begins the command of x->entry, or goes on with it */
VtpuOutcome vtpu_command_execute(VtpuExec *x);
/* Gives back what a program in progress owns, if there is one; lock held. */
void vtpu_command_drop(VtpuExec *x);

/* Of operands that count something: with all below, an instruction is not a long one.
 * Attention has its own rule. */
#define VTPU_SMALL_COUNT (1u << 11)

/* restart.c. Around a long instruction: begin() says whether it is one. [command] */
bool vtpu_restart_begin(VtpuExec *x, const VtpuIssued *i);
/* True: it was abandoned for the machine to be parked, and is as if it had not begun. */
bool vtpu_restart_end(VtpuExec *x, bool done);
/* Where undo.wanted: of what is about to be written. False: a fault. */
bool vtpu_restart_keep(VtpuExec *x, uint64_t addr, uint64_t bytes);
void vtpu_restart_ask(VtpuCore *core); /* lock held: the machine is to be parked */

/* decode.c */
/* A reference for the caller; NULL: out of memory. [command] */
VtpuProgram *vtpu_program_get(VtpuCore *core, const uint8_t *bytes, uint32_t size);
/* Takes one reference back. Any thread. */
void vtpu_program_put(VtpuProgram *program);
void vtpu_program_free_all(VtpuCore *core);

/* vmem.c */
bool vtpu_vmem_init(VtpuCore *core); /* false: out of memory */
void vtpu_vmem_free_all(VtpuCore *core);
bool vtpu_vmem_clear(VtpuVmem *vmem); /* allocated and all zero; false: out of memory */
/* What the context's last program left, or zeros. NULL: all are taken. [command] */
VtpuVmem *vtpu_vmem_take(VtpuCore *core, unsigned context);
/* Whether one more program can have an image; makes one if need be. [command] */
bool vtpu_vmem_spare(VtpuCore *core);
/* Returns the memory of images that have become too many to the host. [command] */
void vtpu_vmem_trim(VtpuCore *core);
void vtpu_vmem_give_back(VtpuCore *core, VtpuVmem *vmem); /* lock held; NULL: does nothing */
/* The context's number may get a new owner, who is not to see what is left; lock held. */
void vtpu_vmem_disown(VtpuCore *core, unsigned context);
void vtpu_vmem_disown_all(VtpuCore *core); /* lock held */

/*
 * scalar.c: an instruction of the sequencer's own, its operands read; moves the pc.
 * *over false: it is to be executed again, since what it waits for came and went.
 */
bool vtpu_scalar_execute(VtpuExec *x, const VtpuDecoded *d, const uint64_t v[8], bool *over);

/* seq.c */
void vtpu_seq_start(VtpuExec *x); /* a program at its x->pc */
VtpuOutcome vtpu_seq_run(VtpuExec *x); /* until HALT */
/* After its state was loaded from what is not trusted: false: no program gets there. */
bool vtpu_seq_restore(VtpuExec *x);

/* engine_*.c */
bool vtpu_dma_execute(VtpuExec *x, const VtpuIssued *i);
bool vtpu_mxu_execute(VtpuExec *x, const VtpuIssued *i);
bool vtpu_vpu_execute(VtpuExec *x, const VtpuIssued *i);
bool vtpu_attn_execute(VtpuExec *x, const VtpuIssued *i);
/* Unlike the others it takes many steps, each of which is to find it ready. */
bool vtpu_link_step(VtpuExec *x, const VtpuIssued *i, bool *done);
bool vtpu_link_ready(VtpuExec *x);
/* LINK_WAIT and LINK_LD. *over: the wait has ended; wait_over: it is worth a look. */
bool vtpu_link_wait(VtpuExec *x, const uint64_t v[8], bool *over);
bool vtpu_link_wait_over(const VtpuExec *x, const uint64_t v[8]);
bool vtpu_link_counter(VtpuExec *x, uint64_t counter, uint64_t *value);
/* Sleeps until something may have changed of what the two wait for; false: stopped. */
bool vtpu_link_pause(VtpuExec *x);
/* When to look again although nothing happened, or 0: as often as at a WAIT. */
uint64_t vtpu_link_look_ns(const VtpuExec *x);

/* exec.c: what commands and engines share */
bool vtpu_fault(VtpuExec *x, uint32_t cause, uint32_t access, uint64_t addr); /* false */
/* A scratch buffer of at least `bytes`; its contents are lost. NULL with a fault. */
uint8_t *vtpu_buffer(VtpuExec *x, unsigned which, uint64_t bytes);
/* A list that threads read while others write `dst` must lie apart from it. */
bool vtpu_vmem_apart(VtpuExec *x, uint64_t list, uint64_t list_bytes, uint64_t dst,
                     uint64_t rows, uint64_t row_bytes, uint64_t stride);
void vtpu_dirty(VtpuExec *x, const uint8_t *host, uint64_t len);
void vtpu_dirty_report(VtpuExec *x);
static inline void vtpu_dirty_flush(VtpuExec *x)
{
    if (x->core->dirty_end) {
        vtpu_dirty_report(x);
    }
}
static inline void vtpu_stat_add(_Atomic uint64_t *stat, uint64_t n)
{
    /* One writer: no locked instruction is needed. */
    atomic_store_explicit(stat, atomic_load_explicit(stat, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

/* mmu.c */
/* The first 1..len bytes at va that lie together. */
bool vtpu_mmu_span(VtpuExec *x, uint64_t va, uint64_t len, uint32_t access, VtpuSpan *span);
/* By a root and without the TLB, up to the page's end; any thread. Returns the cause. */
uint32_t vtpu_mmu_translate(const VtpuCore *core, uint64_t root, uint64_t va, uint32_t access,
                            VtpuSpan *span);
/* The whole range as one piece of HBM, or NULL, without a fault. */
uint8_t *vtpu_mmu_direct(VtpuExec *x, uint64_t va, uint64_t len, uint32_t access);
/* The range in place when it is one piece of HBM, else a copy in `buffer`. */
const uint8_t *vtpu_mmu_view(VtpuExec *x, uint64_t va, uint64_t len, unsigned buffer);
void vtpu_tlb_flush(VtpuTlb *tlb);
/* Copies; a fault may leave a part done. */
bool vtpu_mem_read(VtpuExec *x, uint64_t va, void *buf, uint64_t len, uint32_t access);
bool vtpu_mem_write(VtpuExec *x, uint64_t va, const void *buf, uint64_t len);
/* Bus accesses that record BUS faults. */
bool vtpu_bus_read(VtpuExec *x, uint64_t bus, void *buf, uint64_t len);
bool vtpu_bus_write(VtpuExec *x, uint64_t bus, const void *buf, uint64_t len);

/* -DVTPU_UNOBSERVED leaves the hooks out, to measure what they cost when off. */
static inline bool vtpu_observed(const VtpuExec *x)
{
#ifdef VTPU_UNOBSERVED
    (void)x;
    return false;
#else
    return __builtin_expect(x->observed, false);
#endif
}

static inline void vtpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static inline bool vtpu_stopped(const VtpuCore *core)
{
    return atomic_load_explicit(&core->stop, memory_order_acquire) != 0;
}

#include "vmem_rows.h"

#endif
