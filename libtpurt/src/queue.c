/* SPDX-License-Identifier: MIT */
#include "queue.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>

#define DEFAULT_TIMEOUT_MS 10000
#define MAX_TIMEOUT_MS 600000

/* Makes a new epoch the current one. */
static int begin_epoch(tpurt_queue *queue)
{
    struct rt_backend *be = queue->device->be;
    struct rt_epoch *epoch = calloc(1, sizeof(*epoch));
    int status;

    if (!epoch)
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a queue");
    epoch->base = queue->submitted;
    epoch->users = 1;
    atomic_init(&epoch->completed, epoch->base);
    status = be->ops->channel_create(be, &queue->desc, epoch->base, &epoch->channel);
    if (status) {
        free(epoch);
        return status;
    }
    pthread_mutex_lock(&queue->lock);
    epoch->before = queue->current;
    queue->current = epoch;
    pthread_mutex_unlock(&queue->lock);
    return TPURT_OK;
}

int tpurt_queue_create(tpurt_device *device, const tpurt_queue_desc *desc, tpurt_queue **queue)
{
    tpurt_queue_desc ours = { .priority = TPURT_PRIORITY_NORMAL };
    tpurt_queue *q;
    int status = TPURT_OK;

    if (!device || !queue)
        return rt_fail(TPURT_ERROR_INVALID, "device or queue is NULL");
    if (desc)
        status = rt_struct_in(&ours, sizeof(ours), desc, offsetof(tpurt_queue_desc, timeout_ms),
                              "tpurt_queue_desc");
    if (status)
        return status;
    if (ours.flags & ~(uint32_t)TPURT_QUEUE_USER)
        return rt_fail(TPURT_ERROR_INVALID, "queue: flags 0x%x are not known", ours.flags);
    if (ours.priority > TPURT_PRIORITY_HIGH || ours.timeout_ms > MAX_TIMEOUT_MS)
        return rt_fail(TPURT_ERROR_INVALID,
                       "queue: priority %u and time limit %u ms; the limits are 2 and %u",
                       ours.priority, ours.timeout_ms, MAX_TIMEOUT_MS);
    q = calloc(1, sizeof(*q));
    if (!q)
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a queue");
    atomic_init(&q->refs, 1);
    q->device = device;
    q->desc = ours;
    if (!ours.timeout_ms)
        q->desc.timeout_ms = DEFAULT_TIMEOUT_MS;
    pthread_mutex_init(&q->submit_lock, NULL);
    pthread_mutex_init(&q->lock, NULL);
    status = begin_epoch(q);
    if (status) {
        pthread_mutex_destroy(&q->submit_lock);
        pthread_mutex_destroy(&q->lock);
        free(q);
        return status;
    }
    tpurt_device_retain(device);
    *queue = q;
    return TPURT_OK;
}

tpurt_queue *tpurt_queue_retain(tpurt_queue *queue)
{
    return RT_RETAIN(queue);
}

void tpurt_queue_release(tpurt_queue *queue)
{
    if (!RT_DROP(queue))
        return;
    rt_epoch_put(queue, queue->current);
    while (queue->current) {
        struct rt_epoch *before = queue->current->before;

        free(queue->current);
        queue->current = before;
    }
    pthread_mutex_destroy(&queue->submit_lock);
    pthread_mutex_destroy(&queue->lock);
    tpurt_device_release(queue->device);
    free(queue);
}

struct rt_epoch *rt_epoch_get(tpurt_queue *queue, uint64_t point)
{
    struct rt_epoch *epoch = NULL;
    uint64_t submitted;

    pthread_mutex_lock(&queue->lock);
    submitted = queue->submitted;
    if (point <= submitted) {
        epoch = queue->current;
        while (epoch->before && point <= epoch->base)
            epoch = epoch->before;
        epoch->users++;
    }
    pthread_mutex_unlock(&queue->lock);
    if (!epoch)
        rt_fail(TPURT_ERROR_INVALID, "fence: point %" PRIu64 ", the queue has reached %" PRIu64,
                point, submitted);
    return epoch;
}

void rt_epoch_put(tpurt_queue *queue, struct rt_epoch *epoch)
{
    struct rt_channel *channel = NULL;

    pthread_mutex_lock(&queue->lock);
    if (--epoch->users == 0) {
        channel = epoch->channel;
        epoch->channel = NULL;
    }
    pthread_mutex_unlock(&queue->lock);
    if (channel)
        queue->device->be->ops->channel_destroy(queue->device->be, channel);
}

int rt_epoch_state(tpurt_queue *queue, struct rt_epoch *epoch, tpurt_queue_state *state)
{
    struct rt_backend *be = queue->device->be;
    int status = TPURT_OK;

    if (epoch->over) {
        *state = epoch->final;
    } else {
        status = be->ops->state(be, epoch->channel, state);
        if (state->status != TPURT_OK && queue->submitted - state->completed < RT_COOKIES)
            state->fault_cookie = queue->cookies[(state->completed + 1) % RT_COOKIES];
    }
    state->submitted = queue->submitted;
    return status;
}

int tpurt_queue_get_state(tpurt_queue *queue, tpurt_queue_state *state)
{
    struct rt_epoch *epoch;
    tpurt_queue_state ours = { 0 };
    int status;

    pthread_mutex_lock(&queue->lock);
    epoch = queue->current;
    epoch->users++;
    pthread_mutex_unlock(&queue->lock);
    status = rt_epoch_state(queue, epoch, &ours);
    rt_epoch_put(queue, epoch);
    if (status)
        return status;
    return rt_struct_out(state, &ours, sizeof(ours), offsetof(tpurt_queue_state, submitted),
                         "tpurt_queue_state");
}

static int recover(tpurt_queue *queue)
{
    struct rt_epoch *old = queue->current; /* stays current: submit_lock is held */
    tpurt_queue_state state = { 0 };
    int status = rt_epoch_state(queue, old, &state);

    if (status || state.status == TPURT_OK)
        return status;
    status = begin_epoch(queue);
    if (status)
        return status;
    pthread_mutex_lock(&queue->lock);
    old->final = state;
    old->over = true;
    pthread_mutex_unlock(&queue->lock);
    rt_epoch_put(queue, old);
    return TPURT_OK;
}

int tpurt_queue_recover(tpurt_queue *queue)
{
    int status;

    pthread_mutex_lock(&queue->submit_lock);
    status = recover(queue);
    pthread_mutex_unlock(&queue->submit_lock);
    return status;
}

/* Says why a queue takes no more jobs. */
static int fail_unusable(tpurt_queue *queue)
{
    tpurt_queue_state state = { 0 };
    int status = rt_epoch_state(queue, queue->current, &state);

    if (status)
        return status;
    return rt_fail(state.status ? state.status : TPURT_ERROR_CANCELLED,
                   "the queue failed after point %" PRIu64
                   " (%s) and takes no more work: recover it or create another",
                   state.completed, tpurt_status_name(state.status));
}

/* Turns public fences into the channels' points; drops those that are past. */
static int hold_waits(tpurt_queue *queue, const tpurt_fence *fences, uint32_t count,
                      struct rt_wait *waits, struct rt_epoch **held, uint32_t *num_held)
{
    for (uint32_t i = 0; i < count; i++) {
        struct rt_epoch *epoch;

        if (!fences[i].queue || fences[i].queue->device != queue->device)
            return rt_fail(TPURT_ERROR_INVALID, "submit: fence %u is of another device", i);
        epoch = rt_epoch_get(fences[i].queue, fences[i].point);
        if (!epoch)
            return TPURT_ERROR_INVALID;
        waits[*num_held] = (struct rt_wait){ epoch->channel, fences[i].point };
        held[(*num_held)++] = epoch;
    }
    return TPURT_OK;
}

int rt_queue_submit(tpurt_queue *queue, const struct drm_vtpu_cmd *commands, uint32_t num_commands,
                    const tpurt_fence *fences, uint32_t num_fences, uint64_t *point)
{
    struct rt_backend *be = queue->device->be;
    struct rt_wait waits[TPURT_MAX_WAITS], live[TPURT_MAX_WAITS];
    struct rt_epoch *held[TPURT_MAX_WAITS];
    uint32_t num_held = 0, num_live = 0;
    int status;

    if (num_fences > TPURT_MAX_WAITS)
        return rt_fail(TPURT_ERROR_INVALID, "submit: %u fences, at most %u", num_fences,
                       TPURT_MAX_WAITS);
    status = hold_waits(queue, fences, num_fences, waits, held, &num_held);
    for (uint32_t i = 0; i < num_held; i++)
        if (!held[i]->over)
            live[num_live++] = waits[i];
    if (!status) {
        pthread_mutex_lock(&queue->submit_lock);
        queue->cookies[(queue->submitted + 1) % RT_COOKIES] = commands[0].cookie;
        status = be->ops->submit(be, queue->current->channel, commands, num_commands, live,
                                 num_live, queue->submitted + 1);
        if (status == TPURT_OK) {
            *point = ++queue->submitted;
        } else if (status == TPURT_ERROR_CANCELLED) {
            status = fail_unusable(queue);
        }
        pthread_mutex_unlock(&queue->submit_lock);
    }
    for (uint32_t i = 0; i < num_held; i++)
        rt_epoch_put(fences[i].queue, held[i]);
    if (!status) {
        atomic_fetch_add_explicit(&queue->device->jobs, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&queue->device->commands, num_commands, memory_order_relaxed);
    }
    return status;
}

int tpurt_queue_nop(tpurt_queue *queue, uint64_t *point)
{
    struct drm_vtpu_cmd command = { .op = DRM_VTPU_OP_NOP };

    return rt_queue_submit(queue, &command, 1, NULL, 0, point);
}

int tpurt_queue_copy(tpurt_queue *queue, uint64_t dst_va, uint64_t src_va, uint64_t bytes,
                     uint64_t *point)
{
    struct drm_vtpu_cmd command = { .op = DRM_VTPU_OP_COPY, .payload = { dst_va, src_va, bytes } };

    return rt_queue_submit(queue, &command, 1, NULL, 0, point);
}

int tpurt_queue_fill(tpurt_queue *queue, uint64_t dst_va, uint64_t bytes, uint32_t pattern,
                     uint64_t *point)
{
    struct drm_vtpu_cmd command = { .op = DRM_VTPU_OP_FILL, .payload = { dst_va, bytes, pattern } };

    if (bytes % 4)
        return rt_fail(TPURT_ERROR_INVALID, "fill: %" PRIu64 " bytes is no multiple of 4", bytes);
    return rt_queue_submit(queue, &command, 1, NULL, 0, point);
}
