/* SPDX-License-Identifier: MIT */
/*
 * Who is served, and for how long: weighted fair queueing by virtual time, as
 * stride scheduling (Waldspurger and Weihl, 1995) and Linux's fair class do it.
 *
 * A queue's vtime grows while its commands execute, eight times as fast for
 * each step of priority that it is below the highest, and the least vtime is
 * served next: queues that always have work share the time 64 : 8 : 1. A queue
 * that wakes starts where those are that have work, so that nobody saves up time
 * by sleeping; when it is above all of them it is served at once, and when it is
 * below one of them it lets that one's short commands pass.
 *
 * A running program gives way between two instructions. When, is known
 * beforehand (due()), so a timer thread sleeps until then and nothing is looked
 * at meanwhile: the sequencer pays for its one look at `attention`, no clock is
 * read. The same thread keeps the watchdog, which also stops long instructions.
 */
#include <time.h>

#include "machine.h"

#define PRIORITY_MOST 2
#define NEVER UINT64_MAX
/* So much vtime lies between a queue that wakes and each step of priority above it. */
#define HEAD_START_NS 10000000

static unsigned vtime_shift(const VtpuQueue *queue)
{
    return 3 * (PRIORITY_MOST - queue->priority);
}

/* A stepped machine has to do the same each time: its clock counts stretches. */
static uint64_t sched_now(const VtpuCore *core)
{
    return core->stepped ? core->sched.steps : vtpu_now_ns();
}

void vtpu_sched_reset(VtpuCore *core)
{
    core->sched.slice_us = VTPU_QUEUE_SLICE_US;
    core->sched.next = -1;
    core->sched.watchdog = NEVER;
    core->sched.alarm = NEVER;
}

/* What the present stretch adds to the queue's time. */
static uint64_t stretch(VtpuCore *core, unsigned q, uint64_t now)
{
    const VtpuSched *sched = &core->sched;

    return core->running == (int)q && !sched->paused && now > sched->begin ? now - sched->begin : 0;
}

uint64_t vtpu_sched_command_ns(VtpuCore *core, unsigned q)
{
    const VtpuExec *x = &core->exec[q];
    uint64_t now = sched_now(core);

    uint64_t waits_until = core->sched.rests_from ? core->sched.rests_from : now;

    return x->ran_ns + stretch(core, q, now) + (x->waits_from ? waits_until - x->waits_from : 0);
}

uint64_t vtpu_sched_busy_ns(VtpuCore *core, unsigned q)
{
    return core->exec[q].busy_ns + stretch(core, q, sched_now(core));
}

bool vtpu_sched_has_work(const VtpuCore *core, unsigned q, uint64_t now)
{
    const VtpuQueue *queue = &core->queue[q];

    return (queue->state == VTPU_QUEUE_STATE_PREEMPTED &&
            (!queue->holding || queue->poll_ns <= now)) ||
           (core->enabled && queue->state == VTPU_QUEUE_STATE_READY &&
            (queue->bad_doorbell || (queue->head != queue->tail &&
                                     (!queue->holding || queue->poll_ns <= now))));
}

static bool comes_before(const VtpuQueue *a, const VtpuQueue *b)
{
    return a->vtime != b->vtime ? a->vtime < b->vtime : a->priority > b->priority;
}

/*
 * Without slices a program in progress gives way to a higher priority alone, and
 * that is not to cost it its place: the highest priority of these, or -1.
 */
static int highest_held(const VtpuCore *core)
{
    int highest = -1;

    for (unsigned q = 0; !core->sched.slice_us && q < VTPU_NUM_QUEUES; q++) {
        const VtpuQueue *queue = &core->queue[q];
        if (((queue->state == VTPU_QUEUE_STATE_PREEMPTED && !queue->holding) ||
             core->running == (int)q) &&
            (int)queue->priority > highest) {
            highest = (int)queue->priority;
        }
    }
    return highest;
}

/* The running queue counts as one with work, unless it is `besides`. */
static int pick(VtpuCore *core, int besides)
{
    uint64_t now = vtpu_now_ns();
    int best = -1, held = highest_held(core);

    bool resetting = core->resetting || core->engine_resetting;

    for (unsigned i = 1; !resetting && i <= VTPU_NUM_QUEUES; i++) {
        unsigned q = (core->turn + i) % VTPU_NUM_QUEUES;
        bool passes = (int)core->queue[q].priority > held ||
                      core->queue[q].state != VTPU_QUEUE_STATE_READY;
        if ((int)q != besides && passes &&
            (core->running == (int)q || vtpu_sched_has_work(core, q, now)) &&
            (best < 0 || comes_before(&core->queue[q], &core->queue[best]))) {
            best = (int)q;
        }
    }
    return best;
}

int vtpu_sched_pick(VtpuCore *core)
{
    int next = core->sched.next;

    core->sched.next = -1;
    return next >= 0 && vtpu_sched_has_work(core, (unsigned)next, 0) ? next : pick(core, -1);
}

/* Books what the running command has executed since it was booked last. */
static void charge(VtpuCore *core, uint64_t now)
{
    VtpuQueue *queue = &core->queue[core->running];
    VtpuExec *x = &core->exec[core->running];
    uint64_t ns = stretch(core, x->queue, now);

    queue->vtime += ns << vtime_shift(queue);
    x->ran_ns += ns;
    x->busy_ns += ns;
    vtpu_stat_add(&core->stat_busy_ns, ns);
    core->sched.begin = now;
}

/* When queue q takes the running one's place if nothing else happens. */
static uint64_t due(VtpuCore *core, unsigned q, uint64_t now)
{
    const VtpuSched *sched = &core->sched;
    const VtpuQueue *queue = &core->queue[q], *running = &core->queue[core->running];
    uint64_t soonest = vtpu_sched_has_work(core, q, now)    ? 0
                       : vtpu_sched_has_work(core, q, NEVER) ? queue->poll_ns
                                                             : NEVER;

    if (queue->priority <= running->priority && sched->slice_end > soonest) {
        soonest = sched->slice_end;
    }
    if (soonest != NEVER && queue->vtime > running->vtime) {
        /* One more, as ties go to the higher. */
        uint64_t passed = sched->begin + 1 +
                          ((queue->vtime - running->vtime) >> vtime_shift(running));
        soonest = passed > soonest ? passed : soonest;
    }
    return soonest;
}

/* Finds when to act next on the running command, and has that done. */
static void arm(VtpuCore *core, uint64_t now)
{
    VtpuSched *sched = &core->sched;
    uint64_t at = sched->watchdog;

    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        if ((int)q != core->running) {
            uint64_t its = due(core, q, now);
            at = its < at ? its : at;
        }
    }
    sched->alarm = at;
    if (at <= now && at != sched->watchdog) {
        atomic_store(&core->attention, 1);
        vtpu_core_kick(core);
    } else if (at < sched->asleep_until) {
        pthread_cond_signal(&core->timer);
    }
}

void vtpu_sched_changed(VtpuCore *core)
{
    if (core->running >= 0 && !core->sched.paused) {
        const VtpuQueue *queue = &core->queue[core->running];
        uint64_t limit = queue->watchdog_us * 1000ull, ran = core->exec[core->running].ran_ns;
        VtpuSched *sched = &core->sched;

        sched->watchdog = !limit        ? NEVER
                          : limit > ran ? sched->begin + limit - ran
                                        : sched->begin;
        arm(core, sched_now(core));
    }
}

void vtpu_sched_wake(VtpuCore *core, unsigned q)
{
    VtpuQueue *queue = &core->queue[q];
    uint64_t now = vtpu_now_ns(), clock = sched_now(core), least = NEVER, most = 0;
    int highest = -1;

    for (unsigned i = 0; i < VTPU_NUM_QUEUES; i++) {
        const VtpuQueue *other = &core->queue[i];
        uint64_t vtime = other->vtime + (stretch(core, i, clock) << vtime_shift(other));
        most = vtime > most ? vtime : most;
        if (i != q && (core->running == (int)i || vtpu_sched_has_work(core, i, now))) {
            least = vtime < least ? vtime : least;
            highest = (int)other->priority > highest ? (int)other->priority : highest;
        }
    }
    /* Where those are that have work; with none, nobody owes anything. */
    uint64_t start = highest < 0 ? most : least;
    int above = highest - (int)queue->priority;
    if (above > 0) {
        start += (uint64_t)above * HEAD_START_NS;
    }
    if (above < 0 || queue->vtime < start) {
        queue->vtime = start;
    }
    vtpu_sched_changed(core);
}

void vtpu_sched_begin(VtpuCore *core)
{
    VtpuSched *sched = &core->sched;

    sched->begin = sched_now(core);
    sched->slice_end = sched->slice_us ? sched->begin + sched->slice_us * 1000ull : NEVER;
    vtpu_sched_changed(core);
}

void vtpu_sched_end(VtpuCore *core)
{
    core->sched.steps++;
    charge(core, sched_now(core));
    core->sched.watchdog = core->sched.alarm = NEVER;
}

void vtpu_sched_pause(VtpuCore *core)
{
    VtpuSched *sched = &core->sched;

    if (core->running >= 0 && !sched->paused) {
        vtpu_sched_end(core);
        sched->slice_left = sched->slice_end == NEVER         ? NEVER
                            : sched->slice_end > sched->begin ? sched->slice_end - sched->begin
                                                              : 0;
    }
    sched->paused++;
}

void vtpu_sched_go_on(VtpuCore *core)
{
    VtpuSched *sched = &core->sched;

    sched->paused--;
    if (core->running >= 0 && !sched->paused) {
        /* With what was left of its slice: a new one each time would never end. */
        sched->begin = sched_now(core);
        sched->slice_end = sched->slice_left == NEVER ? NEVER : sched->begin + sched->slice_left;
        vtpu_sched_changed(core);
    }
}

void vtpu_sched_rest(VtpuCore *core)
{
    vtpu_sched_pause(core);
    core->sched.rests_from = sched_now(core);
}

void vtpu_sched_rested(VtpuCore *core)
{
    uint64_t rested = sched_now(core) - core->sched.rests_from;

    core->sched.rests_from = 0;
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        core->exec[q].waits_from += core->exec[q].waits_from ? rested : 0;
    }
    vtpu_sched_go_on(core);
}

void vtpu_sched_done(VtpuCore *core)
{
    core->sched.watchdog = NEVER;
}

bool vtpu_sched_waits(VtpuCore *core, unsigned q)
{
    uint64_t limit = core->queue[q].watchdog_us * 1000ull;

    core->exec[q].waits_from = sched_now(core);
    return !limit || core->exec[q].ran_ns < limit;
}

void vtpu_sched_waited(VtpuCore *core, unsigned q)
{
    VtpuExec *x = &core->exec[q];

    if (x->waits_from) {
        x->ran_ns += sched_now(core) - x->waits_from;
        x->waits_from = 0;
    }
}

bool vtpu_sched_yields(VtpuExec *x, bool at_random)
{
    VtpuCore *core = x->core;

    pthread_mutex_lock(&core->lock);
    uint64_t now = sched_now(core);
    charge(core, now);
    int next = pick(core, at_random ? (int)x->queue : -1);
    bool yields = next >= 0 && next != (int)x->queue;
    core->sched.next = yields ? next : -1;
    if (!yields) {
        arm(core, now);
    }
    pthread_mutex_unlock(&core->lock);
    if (!yields || vtpu_vmem_spare(core)) {
        return yields;
    }
    /* No memory for the other's VMEM: it has to wait. */
    pthread_mutex_lock(&core->lock);
    vtpu_sched_begin(core);
    pthread_mutex_unlock(&core->lock);
    return false;
}

/* The alarm has come. */
static void act(VtpuCore *core, uint64_t now)
{
    VtpuSched *sched = &core->sched;

    sched->alarm = NEVER;
    if (now >= sched->watchdog) {
        sched->watchdog = NEVER;
        if (!core->stuck) {
            sched->expired = true;
            atomic_store(&core->stop, 1);
        }
    }
    atomic_store(&core->attention, 1);
    vtpu_core_kick(core);
}

void *vtpu_timer_thread(void *opaque)
{
    VtpuCore *core = opaque;
    VtpuSched *sched = &core->sched;

    pthread_mutex_lock(&core->lock);
    while (!core->exiting) {
        uint64_t now = vtpu_now_ns(), at = sched->alarm;
        if (at <= now) {
            act(core, now);
            continue;
        }
        sched->asleep_until = at;
        if (at == NEVER) {
            pthread_cond_wait(&core->timer, &core->lock);
        } else {
            struct timespec t = { (time_t)(at / 1000000000u), (long)(at % 1000000000u) };
            pthread_cond_timedwait(&core->timer, &core->lock, &t);
        }
        sched->asleep_until = 0;
    }
    pthread_mutex_unlock(&core->lock);
    return NULL;
}
