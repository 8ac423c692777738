/* SPDX-License-Identifier: MIT */
/*
 * The timing model's part of the machine's state: the chip that is described,
 * what it has counted, and the simulation of each program in progress.
 */
#include <string.h>

#include "machine.h"
#include "state.h"

/* More than any program comes to, and far from where sums wrap around. */
#define MOST (1ull << 48)

static bool is_legal_timed(const VtpuTimed *i)
{
    const VtpuCost *c = &i->cost;

    return i->engine < VTPU_NUM_ENGINES && i->signal < VTPU_NUM_COUNTERS &&
           i->wait < VTPU_NUM_COUNTERS && c->lead <= MOST && c->work <= MOST && c->tail <= MOST &&
           c->hbm_read <= MOST && c->hbm_written <= MOST;
}

/* What has begun is known, and ends before the next: `done` never overtakes the rest. */
static bool is_legal_actor(const VtpuActor *a, unsigned e)
{
    uint32_t ahead = a->issued - a->done, queued = a->queued - a->done;
    bool is_engine = e != VTPU_ENGINE_SEQ, idle = a->phase == 0;

    return ahead <= VTPU_TIMING_RING && a->known - a->done <= ahead && a->phase <= 3 &&
           (idle || a->known != a->done) &&
           (is_engine ? queued <= ahead && (idle || queued) : a->queued == 0) &&
           a->blocked <= 3 && a->left <= MOST * 120 && a->start <= MOST &&
           a->until <= 2 * MOST && a->work_until <= 3 * MOST && a->hbm_stall <= MOST;
}

static void visit_timed(VtpuStream *s, VtpuTimed *i)
{
    VTPU_STREAM(s, i->pc);
    VTPU_STREAM(s, i->wait_value);
    VTPU_STREAM(s, i->opcode);
    VTPU_STREAM(s, i->engine);
    VTPU_STREAM(s, i->signal);
    VTPU_STREAM(s, i->wait);
    VTPU_STREAM(s, i->cost);
    VTPU_STREAM(s, i->issue);
    VTPU_STREAM(s, i->full);
    vtpu_stream_check(s, is_legal_timed(i), "an impossible instruction of the timing model");
}

static void visit_actor(VtpuStream *s, VtpuActor *a, unsigned e)
{
    VTPU_STREAM(s, a->issued);
    VTPU_STREAM(s, a->known);
    VTPU_STREAM(s, a->queued);
    VTPU_STREAM(s, a->done);
    VTPU_STREAM(s, a->phase);
    VTPU_STREAM(s, a->blocked);
    VTPU_STREAM(s, a->start);
    VTPU_STREAM(s, a->until);
    VTPU_STREAM(s, a->work_until);
    VTPU_STREAM(s, a->left);
    VTPU_STREAM(s, a->stalled);
    VTPU_STREAM(s, a->hbm_stall);
    if (!vtpu_stream_check(s, is_legal_actor(a, e), "an impossible state of the timing model")) {
        return;
    }
    for (uint32_t n = a->done; n != a->issued && !s->error; n++) {
        visit_timed(s, &a->ring[n % VTPU_TIMING_RING]);
    }
}

static void visit_simulation(VtpuStream *s, VtpuTiming *t)
{
    bool legal = true;

    if (s->loading) {
        memset(t, 0, sizeof(*t));
    }
    VTPU_STREAM(s, t->now);
    vtpu_stream_bool(s, &t->over);
    vtpu_stream_bool(s, &t->lost);
    VTPU_STREAM(s, t->counter);
    VTPU_STREAM(s, t->signaller);
    VTPU_STREAM(s, t->last);
    VTPU_STREAM(s, t->profile_va);
    VTPU_STREAM(s, t->trace_base);
    VTPU_STREAM(s, t->profile_records);
    VTPU_STREAM(s, t->total);
    for (unsigned c = 0; c < VTPU_NUM_COUNTERS; c++) {
        legal = legal && t->signaller[c] < VTPU_NUM_ENGINES;
    }
    vtpu_stream_check(s, legal && t->last < VTPU_NUM_ENGINES && t->now <= MOST,
                      "an impossible state of the timing model");
    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        visit_actor(s, &t->actor[e], e);
    }
}

void vtpu_state_visit_timing(VtpuCore *core, VtpuStream *s, uint32_t version)
{
    bool timed = core->timed;
    struct vtpu_timing_params chip = core->timing;

    (void)version;
    vtpu_stream_bool(s, &timed);
    VTPU_STREAM(s, chip);
    if (!vtpu_stream_check(s, timed == core->timed && !memcmp(&chip, &core->timing, sizeof(chip)),
                           "timing or timing-file differs")) {
        return;
    }
    for (unsigned n = 0; n < VTPU_NUM_MODEL_STATS; n++) {
        uint64_t value = atomic_load(&core->stat_model[n]);
        VTPU_STREAM(s, value);
        atomic_store(&core->stat_model[n], value);
    }
    for (unsigned q = 0; timed && q < VTPU_NUM_QUEUES; q++) {
        if (core->exec[q].program) {
            visit_simulation(s, &core->exec[q].timing);
        }
    }
}
