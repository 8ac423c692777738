/* SPDX-License-Identifier: MIT */
/*
 * Channels of the in-process machine: a hardware queue each. Every job ends
 * with a fence write of its point and an interrupt. A job that waits for other
 * channels, or for room in the ring, is held here and pushed when it can be.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core.h"

#define RING_LOG2 10
#define RING_ENTRIES (1u << RING_LOG2)
#define RING_BYTES (RING_ENTRIES * VTPU_RING_ENTRY)
#define RESET_POLL_NS 20000

struct held_job {
    struct held_job *next;
    uint64_t point;
    uint32_t num_commands, num_waits;
    struct rt_wait waits[TPURT_MAX_WAITS];
    struct drm_vtpu_cmd commands[];
};

struct event {
    struct event *next;
    uint64_t point;
    int fd;
};

struct rt_channel {
    unsigned queue; /* hardware queue */
    uint64_t *fence; /* the device writes it; in the page behind the ring */
    uint8_t *ring;
    uint32_t tail;
    uint64_t pushed;    /* the last point in the ring */
    uint64_t completed; /* as last seen */
    struct held_job *held, **held_end;
    struct event *events;
    int64_t timeout_ns, head_since; /* when the job at the head got there */
    tpurt_queue_state state;        /* status and fault */
};

static uint64_t reg(const struct rt_channel *channel, uint64_t queue0_register)
{
    return queue0_register + channel->queue * VTPU_QUEUE_STRIDE;
}

static uint64_t fence_value(const struct rt_channel *channel)
{
    return __atomic_load_n(channel->fence, __ATOMIC_ACQUIRE);
}

static bool failed(const struct rt_channel *channel)
{
    return channel->state.status != TPURT_OK;
}

/* ---- Ending jobs; all under lock ---- */

static void fire_events(struct rt_channel *channel)
{
    struct event **link = &channel->events;
    uint64_t one = 1;

    while (*link) {
        struct event *event = *link;

        if (event->point > channel->completed && !failed(channel)) {
            link = &event->next;
            continue;
        }
        while (write(event->fd, &one, sizeof(one)) < 0 && errno == EINTR)
            ;
        close(event->fd);
        *link = event->next;
        free(event);
    }
}

static void drop_held(struct rt_channel *channel)
{
    while (channel->held) {
        struct held_job *next = channel->held->next;

        free(channel->held);
        channel->held = next;
    }
    channel->held_end = &channel->held;
}

static void see_progress(struct rt_channel *channel)
{
    uint64_t value = fence_value(channel);

    if (value <= channel->completed)
        return;
    channel->completed = value;
    channel->head_since = core_now();
    fire_events(channel);
}

static void fail(struct core_backend *core, struct rt_channel *channel, int status)
{
    channel->state.status = status;
    channel->state.fault_pc = ~0u;
    if (status == TPURT_ERROR_FAULT) {
        channel->state.fault_cause = (uint32_t)core_read(core, reg(channel, VTPU_REG_Q_FAULT_CAUSE), 4);
        channel->state.fault_access = (uint32_t)core_read(core, reg(channel, VTPU_REG_Q_FAULT_ACCESS), 4);
        channel->state.fault_address = core_read(core, reg(channel, VTPU_REG_Q_FAULT_ADDR), 8);
        channel->state.fault_pc = (uint32_t)core_read(core, reg(channel, VTPU_REG_Q_FAULT_PC), 4);
    }
    drop_held(channel);
    fire_events(channel);
    pthread_cond_broadcast(&core->progress);
}

/* ---- Pushing jobs; all under lock ---- */

static bool ready(const struct rt_wait *waits, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (waits[i].channel && !failed(waits[i].channel) &&
            fence_value(waits[i].channel) < waits[i].point)
            return false;
    return true;
}

static bool has_room(struct core_backend *core, const struct rt_channel *channel, uint32_t entries)
{
    uint32_t head;

    if (channel->pushed == fence_value(channel))
        return true;
    head = (uint32_t)core_read(core, reg(channel, VTPU_REG_Q_HEAD), 4);
    return RING_ENTRIES - (channel->tail - head) >= entries;
}

static void push(struct core_backend *core, struct rt_channel *channel,
                 const struct drm_vtpu_cmd *commands, uint32_t count, uint64_t point)
{
    for (uint32_t i = 0; i < count; i++, channel->tail++) {
        uint8_t *entry = channel->ring + channel->tail % RING_ENTRIES * VTPU_RING_ENTRY;

        memset(entry, 0, VTPU_RING_PAYLOAD);
        entry[VTPU_RING_OP] = (uint8_t)commands[i].op;
        memcpy(entry + VTPU_RING_COOKIE, &commands[i].cookie, 4);
        memcpy(entry + VTPU_RING_PAYLOAD, commands[i].payload, sizeof(commands[i].payload));
        if (i + 1 == count) {
            entry[VTPU_RING_FLAGS] = VTPU_RING_FLAG_FENCE | VTPU_RING_FLAG_IRQ;
            memcpy(entry + VTPU_RING_FENCE, &point, 8);
        }
    }
    if (channel->pushed == fence_value(channel))
        channel->head_since = core_now();
    channel->pushed = point;
    core->lib->doorbell(core->machine, channel->queue, channel->tail);
}

static void push_held(struct core_backend *core, struct rt_channel *channel)
{
    struct held_job *job;

    while ((job = channel->held) && ready(job->waits, job->num_waits) &&
           has_room(core, channel, job->num_commands)) {
        push(core, channel, job->commands, job->num_commands, job->point);
        channel->held = job->next;
        if (!channel->held)
            channel->held_end = &channel->held;
        free(job);
    }
}

static void pump(struct core_backend *core)
{
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++)
        if (core->channels[q] && core->channels[q]->held)
            push_held(core, core->channels[q]);
}

int core_submit(struct rt_backend *be, struct rt_channel *channel,
                const struct drm_vtpu_cmd *commands, uint32_t num_commands,
                const struct rt_wait *waits, uint32_t num_waits, uint64_t point)
{
    struct core_backend *core = core_of(be);
    struct held_job *job;
    int status = TPURT_OK;

    pthread_mutex_lock(&core->lock);
    if (failed(channel)) {
        status = TPURT_ERROR_CANCELLED;
    } else if (!channel->held && ready(waits, num_waits) && has_room(core, channel, num_commands)) {
        push(core, channel, commands, num_commands, point);
    } else if (!(job = malloc(sizeof(*job) + num_commands * sizeof(*commands)))) {
        status = rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a job");
    } else {
        *job = (struct held_job){ .point = point, .num_commands = num_commands,
                                  .num_waits = num_waits };
        memcpy(job->waits, waits, num_waits * sizeof(*waits));
        memcpy(job->commands, commands, num_commands * sizeof(*commands));
        *channel->held_end = job;
        channel->held_end = &job->next;
    }
    pthread_mutex_unlock(&core->lock);
    return status;
}

/* ---- The machine's interrupts, on its threads ---- */

void core_irq(void *opaque, unsigned vector)
{
    struct core_backend *core = opaque;

    pthread_mutex_lock(&core->lock);
    if (vector == 0) {
        uint32_t low = (uint32_t)core_read(core, VTPU_REG_ERR_QUEUES, 4);
        uint32_t high = (uint32_t)core_read(core, VTPU_REG_ERR_QUEUES_HIGH, 4);
        uint64_t bits = low | (uint64_t)high << 32;

        core_write(core, VTPU_REG_ERR_QUEUES, low, 4);
        core_write(core, VTPU_REG_ERR_QUEUES_HIGH, high, 4);
        for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
            struct rt_channel *channel = core->channels[q];

            if (!(bits >> q & 1) || !channel || failed(channel))
                continue;
            see_progress(channel);
            fail(core, channel, TPURT_ERROR_FAULT);
        }
    } else {
        for (unsigned q = vector - 1; q < VTPU_NUM_QUEUES; q += VTPU_NUM_MSIX - 1)
            if (core->channels[q])
                see_progress(core->channels[q]);
        pthread_cond_broadcast(&core->progress);
    }
    pump(core);
    pthread_mutex_unlock(&core->lock);
}

int64_t core_check_deadlines(struct core_backend *core)
{
    int64_t now = core_now(), next = INT64_MAX;

    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        struct rt_channel *channel = core->channels[q];
        int64_t end;

        if (!channel || failed(channel))
            continue;
        see_progress(channel);
        end = channel->pushed > channel->completed ? channel->head_since + channel->timeout_ns
                                                   : now + channel->timeout_ns;
        if (end <= now) {
            core->queue_resets++;
            core_write(core, reg(channel, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_RESET, 4);
            fail(core, channel, TPURT_ERROR_HUNG);
            pump(core);
        } else if (end < next) {
            next = end;
        }
    }
    return next;
}

/* ---- Waiting ---- */

int core_wait(struct rt_backend *be, struct rt_channel *channel, uint64_t point, int64_t timeout_ns)
{
    struct core_backend *core = core_of(be);
    struct timespec until;
    int64_t now = core_now(), end;
    int status = TPURT_OK;

    if (fence_value(channel) >= point)
        return TPURT_OK;
    end = timeout_ns < 0 || timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
    until = (struct timespec){ end / 1000000000, end % 1000000000 };
    pthread_mutex_lock(&core->lock);
    while (fence_value(channel) < point && !failed(channel) && status == TPURT_OK) {
        int error = pthread_cond_timedwait(&core->progress, &core->lock, &until);

        if (error == ETIMEDOUT && fence_value(channel) < point && !failed(channel))
            status = rt_fail(TPURT_ERROR_TIMEOUT, "point %" PRIu64 " has not ended in time", point);
    }
    if (status == TPURT_OK && fence_value(channel) < point)
        status = TPURT_ERROR_CANCELLED;
    pthread_mutex_unlock(&core->lock);
    return status;
}

int core_notify(struct rt_backend *be, struct rt_channel *channel, uint64_t point, int eventfd)
{
    struct core_backend *core = core_of(be);
    struct event *event;
    int fd = fcntl(eventfd, F_DUPFD_CLOEXEC, 0); /* the caller may close its own */

    if (fd < 0)
        return rt_fail_errno(errno, "fence: keeping the eventfd");
    event = malloc(sizeof(*event));
    if (!event) {
        close(fd);
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for an event");
    }
    pthread_mutex_lock(&core->lock);
    *event = (struct event){ channel->events, point, fd };
    channel->events = event;
    see_progress(channel);
    fire_events(channel);
    pthread_mutex_unlock(&core->lock);
    return TPURT_OK;
}

int core_state(struct rt_backend *be, struct rt_channel *channel, tpurt_queue_state *state)
{
    struct core_backend *core = core_of(be);

    pthread_mutex_lock(&core->lock);
    if (!failed(channel))
        see_progress(channel);
    *state = channel->state;
    state->completed = channel->completed;
    pthread_mutex_unlock(&core->lock);
    return TPURT_OK;
}

/* ---- Beginning and end ---- */

static bool take_queue(struct core_backend *core, struct rt_channel *channel)
{
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++)
        if (!core->channels[q]) {
            channel->queue = q;
            core->channels[q] = channel;
            return true;
        }
    return false;
}

static void enable(struct core_backend *core, struct rt_channel *channel, uint32_t priority)
{
    core_write(core, reg(channel, VTPU_REG_Q_RING_BASE), (uintptr_t)channel->ring, 8);
    core_write(core, reg(channel, VTPU_REG_Q_FENCE_ADDR), (uintptr_t)channel->fence, 8);
    core_write(core, reg(channel, VTPU_REG_Q_RING_LOG2), RING_LOG2, 4);
    core_write(core, reg(channel, VTPU_REG_Q_CONTEXT), 0, 4);
    core_write(core, reg(channel, VTPU_REG_Q_VECTOR), channel->queue % (VTPU_NUM_MSIX - 1) + 1, 4);
    core_write(core, reg(channel, VTPU_REG_Q_PRIORITY), priority, 4);
    core_write(core, reg(channel, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_ENABLE, 4);
}

int core_channel_create(struct rt_backend *be, const tpurt_queue_desc *desc, uint64_t base,
                        struct rt_channel **channel)
{
    struct core_backend *core = core_of(be);
    struct rt_channel *ch = calloc(1, sizeof(*ch));
    bool ok;

    if (ch)
        ch->ring = core_host_alloc(core, RING_BYTES + VTPU_PAGE_BYTES);
    if (!ch || !ch->ring) {
        free(ch);
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a queue");
    }
    ch->fence = (uint64_t *)(void *)(ch->ring + RING_BYTES);
    *ch->fence = ch->completed = ch->pushed = base;
    ch->held_end = &ch->held;
    ch->timeout_ns = desc->timeout_ms * 1000000ll;
    pthread_mutex_lock(&core->lock);
    ok = take_queue(core, ch);
    if (ok)
        enable(core, ch, desc->priority);
    /* From here on the watchdog looks at least once a time limit. */
    if (ok && core_now() + ch->timeout_ns < core->next_look)
        pthread_cond_signal(&core->watch);
    pthread_mutex_unlock(&core->lock);
    if (!ok) {
        core_host_free(core, ch->ring, RING_BYTES + VTPU_PAGE_BYTES);
        free(ch);
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "all %u hardware queues are in use",
                       VTPU_NUM_QUEUES);
    }
    *channel = ch;
    return TPURT_OK;
}

/* Held jobs elsewhere no longer wait for a channel that goes away. */
static void forget_waits(struct core_backend *core, const struct rt_channel *channel)
{
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++)
        for (struct held_job *job = core->channels[q] ? core->channels[q]->held : NULL; job;
             job = job->next)
            for (uint32_t i = 0; i < job->num_waits; i++)
                if (job->waits[i].channel == channel)
                    job->waits[i].channel = NULL;
}

void core_channel_destroy(struct rt_backend *be, struct rt_channel *channel)
{
    static const struct timespec pause = { 0, RESET_POLL_NS };
    struct core_backend *core = core_of(be);

    core_write(core, reg(channel, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_RESET, 4);
    while (core_read(core, reg(channel, VTPU_REG_Q_QSTATUS), 4) != VTPU_QUEUE_STATE_DISABLED)
        nanosleep(&pause, NULL);
    pthread_mutex_lock(&core->lock);
    if (!failed(channel)) {
        see_progress(channel);
        channel->state.status = TPURT_ERROR_CANCELLED; /* lets the events go */
    }
    drop_held(channel);
    fire_events(channel);
    forget_waits(core, channel);
    core->channels[channel->queue] = NULL;
    pump(core);
    pthread_mutex_unlock(&core->lock);
    core_host_free(core, channel->ring, RING_BYTES + VTPU_PAGE_BYTES);
    free(channel);
}
