/* SPDX-License-Identifier: MIT */
/*
 * The command processor: queues, completion and faults. One ring command is at
 * work at a time; sched.c says which, and may have a program set aside.
 */
#include <string.h>
#include <time.h>

#include "machine.h"

/* A held WAIT is looked at again after this long, doubling up to the most. */
#define POLL_FIRST_NS 50000
#define POLL_MOST_NS 1000000
/* Commands that a doorbell's caller executes at most: it may be a processor of the guest. */
#define SHORT_MOST 16

static uint32_t ring_entries(const VtpuQueue *queue)
{
    return 1u << queue->ring_log2;
}

static void clear_state(VtpuCore *core, unsigned q)
{
    VtpuQueue *queue = &core->queue[q];
    VtpuExec *x = &core->exec[q];

    vtpu_command_drop(x);
    x->ran_ns = x->busy_ns = x->preemptions = 0;
    atomic_store(&x->instructions, 0);
    queue->state = VTPU_QUEUE_STATE_DISABLED;
    queue->head = queue->tail = 0;
    queue->bad_doorbell = queue->holding = false;
    queue->fault = (VtpuFault) { .pc = VTPU_PC_NONE };
    queue->fault_entry = 0;
    x->waits_from = 0;
}

void vtpu_queue_clear_all(VtpuCore *core)
{
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        core->queue[q] = (VtpuQueue) { .ring_log2 = VTPU_RING_LOG2_MIN };
        clear_state(core, q);
    }
}

/* Lock held, dropped meanwhile. */
static void record_fault(VtpuCore *core, unsigned q, const VtpuFault *fault, uint32_t entry)
{
    VtpuQueue *queue = &core->queue[q];

    queue->fault = *fault;
    queue->fault_entry = entry;
    queue->state = VTPU_QUEUE_STATE_FAULTED;
    queue->holding = false;
    core->exec[q].waits_from = 0;
    core->err_queues |= 1ull << q;
    vtpu_link_queue_died(core, queue->context);
    core->irqs |= 1;
    atomic_store(&core->attention, 1);
    pthread_mutex_unlock(&core->lock);
    vtpu_core_trace(core, VTPU_EVENT_FAULT, q, fault->cause, fault->addr);
    pthread_mutex_lock(&core->lock);
}

static bool config_ok(const VtpuQueue *queue)
{
    return queue->ring_log2 >= VTPU_RING_LOG2_MIN && queue->ring_log2 <= VTPU_RING_LOG2_MAX &&
           queue->ring_base % VTPU_RING_ENTRY == 0 && queue->fence_addr % 8 == 0 &&
           queue->context < VTPU_NUM_CONTEXTS && queue->vector < VTPU_NUM_MSIX;
}

bool vtpu_queue_in_progress(const VtpuQueue *queue)
{
    return queue->holding || queue->state == VTPU_QUEUE_STATE_PREEMPTED;
}

bool vtpu_queue_is_legal(const VtpuQueue *queue)
{
    static const char *const faults[] = VTPU_FAULT_NAMES;

    if (queue->priority > 2 || queue->fault.cause >= sizeof(faults) / sizeof(*faults) ||
        queue->fault.access > VTPU_ACCESS_EXEC ||
        (queue->state == VTPU_QUEUE_STATE_FAULTED) != (queue->fault.cause != VTPU_FAULT_NONE)) {
        return false;
    }
    if (queue->holding && (queue->state != VTPU_QUEUE_STATE_READY ||
                           queue->poll_interval < POLL_FIRST_NS ||
                           queue->poll_interval > POLL_MOST_NS)) {
        return false;
    }
    if (queue->state == VTPU_QUEUE_STATE_READY || queue->state == VTPU_QUEUE_STATE_PREEMPTED) {
        return config_ok(queue) && queue->tail - queue->head <= ring_entries(queue) &&
               (!vtpu_queue_in_progress(queue) || queue->head != queue->tail);
    }
    /* The configuration of the others is looked at when they are enabled. */
    return queue->state == VTPU_QUEUE_STATE_DISABLED || queue->state == VTPU_QUEUE_STATE_FAULTED;
}

bool vtpu_queue_enable(VtpuCore *core, unsigned q)
{
    VtpuQueue *queue = &core->queue[q];

    if (queue->state != VTPU_QUEUE_STATE_DISABLED) {
        return false;
    }
    clear_state(core, q);
    queue->state = VTPU_QUEUE_STATE_READY;
    if (!config_ok(queue)) {
        VtpuFault fault = { .cause = VTPU_FAULT_BAD_RING, .pc = VTPU_PC_NONE };
        record_fault(core, q, &fault, 0);
    }
    vtpu_core_kick(core);
    return true;
}

void vtpu_queue_reset(VtpuCore *core, unsigned q)
{
    VtpuQueue *queue = &core->queue[q];

    if (core->running == (int)q) {
        queue->state = VTPU_QUEUE_STATE_RESETTING;
        vtpu_link_queue_died(core, queue->context);
        if (!vtpu_inject_stuck(core)) {
            atomic_store(&core->stop, 1);
        }
        atomic_store(&core->attention, 1);
        vtpu_core_kick(core);
    } else {
        if (queue->state == VTPU_QUEUE_STATE_PREEMPTED) {
            vtpu_link_queue_died(core, queue->context);
        }
        clear_state(core, q);
    }
}

void vtpu_queue_abandon_all(VtpuCore *core)
{
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        if (core->queue[q].state == VTPU_QUEUE_STATE_PREEMPTED) {
            vtpu_queue_reset(core, q);
        }
    }
}

bool vtpu_queue_doorbell(VtpuCore *core, unsigned q, uint32_t tail)
{
    VtpuQueue *queue = &core->queue[q];

    bool idle = queue->state == VTPU_QUEUE_STATE_READY && queue->head == queue->tail;

    if (queue->state != VTPU_QUEUE_STATE_READY && queue->state != VTPU_QUEUE_STATE_RUNNING &&
        queue->state != VTPU_QUEUE_STATE_PREEMPTED) {
        return false;
    }
    /* Nor may it take back what may already run. */
    if (tail - queue->head > ring_entries(queue) ||
        tail - queue->head < queue->tail - queue->head) {
        queue->bad_doorbell = true;
    } else {
        queue->tail = tail;
    }
    if (idle) {
        vtpu_sched_wake(core, q);
    }
    return true;
}

/* Lock held: a completed command may have satisfied any held WAIT. */
static void poll_soon(VtpuCore *core)
{
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        core->queue[q].poll_ns = 0;
    }
}

static void hold(VtpuQueue *queue, uint64_t now)
{
    uint64_t twice = queue->poll_interval * 2;

    queue->poll_interval = !queue->holding       ? POLL_FIRST_NS
                           : twice < POLL_MOST_NS ? twice
                                                  : POLL_MOST_NS;
    queue->poll_ns = now + queue->poll_interval;
    queue->holding = true;
}

/*
 * Advances the head, then writes the fence and raises the interrupt: software
 * that sees the fence finds the entry free. Lock not held.
 */
static bool complete(VtpuExec *x, uint64_t fence_addr, unsigned vector)
{
    VtpuCore *core = x->core;
    const uint8_t *entry = x->entry;
    uint64_t fence;

    pthread_mutex_lock(&core->lock);
    bool stopped = vtpu_stopped(core);
    if (!stopped) {
        core->queue[x->queue].head++;
        core->queue[x->queue].holding = false;
        poll_soon(core);
        vtpu_sched_done(core);
    }
    pthread_mutex_unlock(&core->lock);
    if (stopped) {
        return false;
    }
    if (entry[VTPU_RING_FLAGS] & VTPU_RING_FLAG_FENCE) {
        memcpy(&fence, entry + VTPU_RING_FENCE, sizeof(fence));
        fence = vtpu_inject_fence(core, fence);
        if (!vtpu_bus_write(x, fence_addr, &fence, sizeof(fence))) {
            return false;
        }
    }
    if (entry[VTPU_RING_FLAGS] & VTPU_RING_FLAG_IRQ) {
        vtpu_raise_irq(core, vector);
    }
    return true;
}

/* Fetches the queue's next entry and begins its command, or goes on with the one in progress. */
static VtpuOutcome execute(VtpuExec *x, uint64_t entry_at, uint32_t head, bool resumed, bool fetched)
{
    VtpuCore *core = x->core;
    VtpuOutcome outcome;

    if (!resumed && !fetched && !vtpu_bus_read(x, entry_at, x->entry, VTPU_RING_ENTRY)) {
        return VTPU_OUTCOME_FAILED;
    }
    if (!resumed) {
        x->done = 0;
        vtpu_core_trace(core, VTPU_EVENT_BEGIN, x->queue, x->entry[VTPU_RING_OP], head);
    } else if (x->program) {
        vtpu_core_trace(core, VTPU_EVENT_RESUMED, x->queue, x->pc, head);
    }
    outcome = vtpu_command_execute(x);
    if ((outcome == VTPU_OUTCOME_PREEMPTED || outcome == VTPU_OUTCOME_WAITING) && x->program) {
        vtpu_core_trace(core, VTPU_EVENT_PREEMPTED, x->queue, x->pc, head);
    }
    return outcome;
}

/* Lock held: the program of queue q is set aside until another chip does something. */
static void wait_for_link(VtpuCore *core, unsigned q)
{
    VtpuQueue *queue = &core->queue[q];
    const VtpuExec *x = &core->exec[q];
    uint64_t look = vtpu_link_look_ns(x);

    if (x->link_events != atomic_load(&core->link.events)) {
        queue->holding = false; /* it did, as this one stopped looking */
        return;
    }
    hold(queue, vtpu_now_ns());
    if (look) {
        queue->poll_ns = look;
    }
}

void vtpu_queue_link_event(VtpuCore *core)
{
    atomic_fetch_add(&core->link.events, 1);
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        if (core->queue[q].state == VTPU_QUEUE_STATE_PREEMPTED && core->queue[q].holding) {
            core->queue[q].holding = false;
            vtpu_sched_wake(core, q); /* it slept */
        }
    }
    vtpu_core_kick(core);
}

static uint64_t entry_address(const VtpuQueue *queue)
{
    return queue->ring_base + (uint64_t)(queue->head & (ring_entries(queue) - 1)) * VTPU_RING_ENTRY;
}

/*
 * One stretch of the command of queue q, whose entry may have been fetched. Called
 * and returns with the lock held.
 */
static void serve(VtpuCore *core, unsigned q, bool fetched)
{
    VtpuQueue *queue = &core->queue[q];
    VtpuExec *x = &core->exec[q];
    uint64_t fence_addr = queue->fence_addr;
    unsigned vector = queue->vector;
    uint32_t head = queue->head;
    uint64_t at = entry_address(queue);
    bool held = queue->holding, preempted = queue->state == VTPU_QUEUE_STATE_PREEMPTED;
    VtpuOutcome outcome = VTPU_OUTCOME_FAILED;

    x->context = queue->context;
    x->fault = (VtpuFault) { .pc = VTPU_PC_NONE };
    queue->state = VTPU_QUEUE_STATE_RUNNING;
    core->running = (int)q;
    core->turn = q;
    core->sched.expired = false;
    if (!preempted) {
        x->ran_ns = 0;
    }
    vtpu_sched_waited(core, q);
    vtpu_sched_begin(core);
    if (queue->bad_doorbell && !preempted) {
        vtpu_fault(x, VTPU_FAULT_BAD_RING, VTPU_ACCESS_NONE, 0);
    } else {
        pthread_mutex_unlock(&core->lock);
        outcome = execute(x, at, head, held || preempted, fetched);
        if (outcome == VTPU_OUTCOME_DONE && !complete(x, fence_addr, vector)) {
            outcome = VTPU_OUTCOME_FAILED;
        }
        if (outcome == VTPU_OUTCOME_DONE) {
            vtpu_core_trace(core, VTPU_EVENT_END, q, x->entry[VTPU_RING_OP], head);
        }
        pthread_mutex_lock(&core->lock);
    }
    vtpu_sched_end(core);
    core->running = -1;
    core->stuck = false;
    if (outcome == VTPU_OUTCOME_WAITING && !vtpu_sched_waits(core, q)) {
        core->sched.expired = true;
    }
    if (core->sched.expired && x->fault.cause == VTPU_FAULT_NONE) {
        vtpu_fault(x, VTPU_FAULT_WATCHDOG, VTPU_ACCESS_NONE, 0);
        vtpu_command_drop(x);
    }
    if (queue->state == VTPU_QUEUE_STATE_RESETTING) {
        clear_state(core, q);
    } else if (!core->resetting && x->fault.cause != VTPU_FAULT_NONE) {
        record_fault(core, q, &x->fault, head);
    } else if (outcome == VTPU_OUTCOME_PREEMPTED) {
        queue->state = VTPU_QUEUE_STATE_PREEMPTED;
        queue->holding = false;
        if (core->park) {
            core->sched.next = (int)q; /* for nobody else: it goes on first */
        } else {
            x->preemptions++;
        }
    } else if (outcome == VTPU_OUTCOME_WAITING) {
        queue->state = VTPU_QUEUE_STATE_PREEMPTED;
        wait_for_link(core, q);
    } else {
        queue->state = VTPU_QUEUE_STATE_READY;
        if (outcome == VTPU_OUTCOME_HELD) {
            hold(queue, vtpu_now_ns());
        } else if (held) {
            vtpu_sched_wake(core, q); /* a WAIT is sleep */
        }
    }
    if (core->resetting || core->engine_resetting) {
        atomic_store(&core->attention, 1);
    } else if (!core->exiting) {
        atomic_store(&core->stop, 0);
    }
}

/* Lock held: sleeps until kicked or until the next WAIT is to be polled. */
static void idle(VtpuCore *core)
{
    uint64_t next = UINT64_MAX;

    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        const VtpuQueue *queue = &core->queue[q];
        bool polled = (core->enabled && queue->state == VTPU_QUEUE_STATE_READY) ||
                      queue->state == VTPU_QUEUE_STATE_PREEMPTED;
        if (polled && queue->holding && queue->poll_ns < next) {
            next = queue->poll_ns;
        }
    }
    core->busy = false;
    vtpu_engines_release(core);
    if (next == UINT64_MAX) {
        pthread_cond_wait(&core->wake, &core->lock);
    } else {
        struct timespec t = { (time_t)(next / 1000000000u), (long)(next % 1000000000u) };
        pthread_cond_timedwait(&core->wake, &core->lock, &t);
    }
    while (core->lent) {
        pthread_cond_wait(&core->wake, &core->lock);
    }
    core->busy = true;
}

/* One thing of those that there are to do; false: there is none. Lock held. */
static bool step(VtpuCore *core)
{
    int q;

    if (atomic_load(&core->attention)) {
        pthread_mutex_unlock(&core->lock);
        vtpu_core_boundary(core);
        pthread_mutex_lock(&core->lock);
        return true;
    }
    if ((q = vtpu_sched_pick(core)) < 0) {
        return false;
    }
    serve(core, (unsigned)q, false);
    return true;
}

/* Over after a few accesses to memory, and in need of no engine. */
static bool is_short(uint8_t op)
{
    return op == VTPU_CMD_NOP || op == VTPU_CMD_SIGNAL || op == VTPU_CMD_TIMESTAMP;
}

/* Lock held: the command thread is asleep, and would serve queue q next if it were woken. */
static bool may_lend(VtpuCore *core, unsigned q)
{
    const VtpuQueue *queue = &core->queue[q];

    return !core->busy && !core->park && !core->asleep && !atomic_load(&core->attention) &&
           !atomic_load(&core->inject_armed) && core->sched.next < 0 && !core->exiting &&
           queue->state == VTPU_QUEUE_STATE_READY && !queue->holding && !queue->bad_doorbell &&
           vtpu_sched_pick(core) == (int)q;
}

/* Lock held, dropped meanwhile. The copy that is looked at is the one that is executed. */
static bool fetch_short(VtpuCore *core, unsigned q)
{
    VtpuExec *x = &core->exec[q];
    uint64_t at = entry_address(&core->queue[q]);

    pthread_mutex_unlock(&core->lock);
    bool ok = core->ops.dma_read(core->opaque, at, x->entry, VTPU_RING_ENTRY) &&
              is_short(x->entry[VTPU_RING_OP]);
    pthread_mutex_lock(&core->lock);
    return ok && !atomic_load(&core->attention);
}

void vtpu_queue_serve_short(VtpuCore *core, unsigned q)
{
    for (unsigned n = 0; n < SHORT_MOST && may_lend(core, q); n++) {
        core->busy = core->lent = true;
        bool fetched = fetch_short(core, q);
        if (fetched) {
            serve(core, q, true);
        }
        core->busy = core->lent = false;
        if (!fetched) {
            break;
        }
    }
    /* The rest, and what was asked for meanwhile, is the command thread's. */
    if (core->busy || core->exiting || atomic_load(&core->attention) || vtpu_sched_pick(core) >= 0) {
        vtpu_core_kick(core);
    }
}

bool vtpu_core_step(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    core->busy = true;
    bool did = !core->park && !core->asleep && step(core);
    vtpu_engines_release(core);
    core->busy = false;
    pthread_mutex_unlock(&core->lock);
    return did;
}

void *vtpu_command_thread(void *opaque)
{
    VtpuCore *core = opaque;

    if (core->ops.thread_enter) {
        core->ops.thread_enter(core->opaque);
    }
    pthread_mutex_lock(&core->lock);
    while (!core->exiting) {
        if (!step(core)) {
            idle(core);
        }
    }
    vtpu_engines_release(core);
    pthread_mutex_unlock(&core->lock);
    if (core->ops.thread_leave) {
        core->ops.thread_leave(core->opaque);
    }
    return NULL;
}
