/* SPDX-License-Identifier: MIT */
/*
 * A chip: compute threads and the turn to use its engines, which the machines
 * of its functions share. A turn lasts a slice, and goes on while nobody else
 * waits; it ends at an instruction boundary, and earlier when its holder has
 * nothing to do, hangs or is parked: what one function does to itself holds up
 * no other.
 *
 * Next is who has used the engines least, in time, so that functions with long
 * instructions and with short ones get the same. The chip's clock is the least
 * of those that hold or wait for the turn; who comes back from idleness starts
 * at it at the earliest, so that sleeping saves nothing up, and time that
 * nobody else wanted is not owed. (The virtual time of start-time fair
 * queueing: Goyal, Vin and Cheng, 1997.)
 *
 * The chip's lock may be taken with a machine's lock held, never the other way
 * round, and is never held over a callback or a computation.
 */
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "machine.h"

#define MAX_THREADS 256

struct VtpuChip {
    VtpuPool *pool;
    unsigned threads;

    pthread_mutex_t lock;
    VtpuCore *cores;     /* list by share.next */
    VtpuCore *holder;    /* NULL: the engines are free */
    uint64_t slice_from; /* when the holder's slice began */
    uint64_t used_to;    /* up to when its time is counted */
    uint64_t held;       /* time of all holders so far */
    uint64_t clock;
};

/* Lock held, as in all that follows without vtpu_ in its name. */
static void count_time(VtpuChip *chip, uint64_t now)
{
    uint64_t least = UINT64_MAX;

    if (chip->holder) {
        chip->holder->share.used += now - chip->used_to;
        chip->held += now - chip->used_to;
        chip->used_to = now;
    }
    for (const VtpuCore *core = chip->cores; core; core = core->share.next) {
        if ((core->share.waiting || core == chip->holder) && core->share.used < least) {
            least = core->share.used;
        }
    }
    if (least != UINT64_MAX && least > chip->clock) {
        chip->clock = least;
    }
}

static VtpuCore *next_in_turn(const VtpuChip *chip)
{
    VtpuCore *best = NULL;

    for (VtpuCore *core = chip->cores; core; core = core->share.next) {
        if (core->share.waiting && (!best || core->share.used < best->share.used)) {
            best = core;
        }
    }
    return best;
}

/* To nobody: NULL. */
static void give_turn(VtpuChip *chip, VtpuCore *core, uint64_t now)
{
    chip->holder = core;
    chip->slice_from = chip->used_to = now;
    vtpu_pool_lend(chip->pool, core ? &core->stop : NULL);
    if (core) {
        core->share.waiting = false;
        pthread_cond_signal(&core->share.come);
    }
}

/*
 * Sleeps until the turn comes, and no longer than a slice: there may be something
 * else to look at. Once the holder's slice is over it is asked to come to a
 * boundary, and again after every further slice.
 */
static void wait_for_turn(VtpuChip *chip, VtpuCore *core, uint64_t now)
{
    uint64_t until = chip->slice_from + VTPU_SLICE_NS;

    if (until <= now) {
        atomic_store(&chip->holder->attention, 1);
        until = now + VTPU_SLICE_NS;
    }
    struct timespec t = { (time_t)(until / 1000000000u), (long)(until % 1000000000u) };
    core->share.waiting = true;
    pthread_cond_timedwait(&core->share.come, &chip->lock, &t);
    core->share.waiting = false;
}

/* Neither lock held. */
static void set_paused(VtpuCore *core, bool paused)
{
    pthread_mutex_lock(&core->lock);
    if (paused) {
        vtpu_sched_pause(core);
    } else {
        vtpu_sched_go_on(core);
    }
    pthread_mutex_unlock(&core->lock);
}

/* Within an instruction it does not come to rest, and asks only for a stop. */
static bool take(VtpuCore *core, bool within)
{
    VtpuChip *chip = core->chip;
    bool go_on = true;

    if (core->share.held) {
        return true;
    }
    uint64_t begin = vtpu_now_ns(), now = begin;
    pthread_mutex_lock(&chip->lock);
    count_time(chip, now);
    if (core->share.used < chip->clock) {
        core->share.used = chip->clock;
    }
    bool waits = chip->holder != NULL;
    if (waits) {
        /* What its command waits here is not its own time. */
        pthread_mutex_unlock(&chip->lock);
        set_paused(core, true);
        pthread_mutex_lock(&chip->lock);
    }
    while (go_on && chip->holder != core) {
        if (!chip->holder) {
            give_turn(chip, core, now);
        } else if (within) {
            wait_for_turn(chip, core, now);
            go_on = !vtpu_stopped(core);
        } else if (atomic_load(&core->attention)) {
            /* Not in the queue meanwhile: it may be parked there. */
            pthread_mutex_unlock(&chip->lock);
            go_on = !vtpu_core_parking(core) && vtpu_core_boundary(core);
            pthread_mutex_lock(&chip->lock);
        } else {
            wait_for_turn(chip, core, now);
        }
        now = vtpu_now_ns();
    }
    /* Its turn may have come as it was stopped: that ends like any other. */
    core->share.held = chip->holder == core;
    pthread_mutex_unlock(&chip->lock);
    if (waits) {
        set_paused(core, false);
    }
    core->share.waited += now - begin;
    return go_on;
}

bool vtpu_engines_take(VtpuCore *core)
{
    return take(core, false);
}

bool vtpu_engines_take_back(VtpuCore *core)
{
    return take(core, true);
}

void vtpu_engines_release(VtpuCore *core)
{
    VtpuChip *chip = core->chip;

    if (!core->share.held) {
        return;
    }
    core->share.held = false;
    uint64_t now = vtpu_now_ns();
    pthread_mutex_lock(&chip->lock);
    count_time(chip, now);
    give_turn(chip, next_in_turn(chip), now);
    pthread_mutex_unlock(&chip->lock);
}

bool vtpu_engines_boundary(VtpuCore *core)
{
    VtpuChip *chip = core->chip;
    bool over = false;

    if (!core->share.held) {
        return true;
    }
    uint64_t now = vtpu_now_ns();
    pthread_mutex_lock(&chip->lock);
    if (now - chip->slice_from >= VTPU_SLICE_NS) {
        count_time(chip, now);
        const VtpuCore *next = next_in_turn(chip);
        over = next && next->share.used < core->share.used;
        chip->slice_from = now;
    }
    pthread_mutex_unlock(&chip->lock);
    if (over) {
        vtpu_engines_release(core);
        return core->running < 0 || vtpu_engines_take(core);
    }
    return true;
}

uint64_t vtpu_engines_held_ns(VtpuChip *chip)
{
    pthread_mutex_lock(&chip->lock);
    count_time(chip, vtpu_now_ns());
    uint64_t held = chip->held;
    pthread_mutex_unlock(&chip->lock);
    return held;
}

void vtpu_chip_join(VtpuChip *chip, VtpuCore *core)
{
    core->chip = chip;
    core->pool = chip->pool;
    core->threads = chip->threads;
    pthread_mutex_lock(&chip->lock);
    core->share.next = chip->cores;
    chip->cores = core;
    pthread_mutex_unlock(&chip->lock);
}

void vtpu_chip_leave(VtpuCore *core)
{
    VtpuChip *chip = core->chip;
    VtpuCore **link = &chip->cores;

    pthread_mutex_lock(&chip->lock);
    while (*link != core) {
        link = &(*link)->share.next;
    }
    *link = core->share.next;
    pthread_mutex_unlock(&chip->lock);
}

static unsigned host_threads(void)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof(set), &set) ? 1 : (unsigned)CPU_COUNT(&set);
}

VtpuChip *vtpu_chip_new(unsigned threads, const char **error)
{
    if (threads > MAX_THREADS) {
        *error = "threads must be at most 256";
        return NULL;
    }
    VtpuChip *chip = calloc(1, sizeof(*chip));
    if (!chip) {
        *error = "out of memory";
        return NULL;
    }
    chip->threads = threads ? threads : host_threads();
    chip->pool = vtpu_pool_new(chip->threads);
    if (!chip->pool) {
        free(chip);
        *error = "cannot start threads";
        return NULL;
    }
    pthread_mutex_init(&chip->lock, NULL);
    return chip;
}

void vtpu_chip_free(VtpuChip *chip)
{
    if (!chip) {
        return;
    }
    vtpu_pool_free(chip->pool);
    pthread_mutex_destroy(&chip->lock);
    free(chip);
}
