/* SPDX-License-Identifier: MIT */
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

#include "queue.h"

static int fail_fault(const tpurt_queue_state *state, uint64_t point)
{
    static const char *const verbs[] = { "code", "read at", "write at", "execute at" };
    char pc[32] = "";

    if (state->fault_pc != ~0u)
        snprintf(pc, sizeof(pc), ", pc 0x%x", state->fault_pc);
    return rt_fail(TPURT_ERROR_FAULT, "point %" PRIu64 " (cookie %u): fault: %s, %s 0x%" PRIx64 "%s",
                   point, state->fault_cookie, tpurt_fault_name(state->fault_cause),
                   verbs[state->fault_access & 3], state->fault_address, pc);
}

/* How the job of a failed epoch's point ended. */
static int outcome(const tpurt_queue_state *state, uint64_t point)
{
    if (point <= state->completed || state->status == TPURT_OK)
        return TPURT_OK;
    if (state->status == TPURT_ERROR_LOST)
        return rt_fail(TPURT_ERROR_LOST, "point %" PRIu64 ": the device was reset or is gone",
                       point);
    if (point > state->completed + 1)
        return rt_fail(TPURT_ERROR_CANCELLED,
                       "point %" PRIu64 ": cancelled behind point %" PRIu64 ", which failed (%s)",
                       point, state->completed + 1, tpurt_status_name(state->status));
    if (state->status == TPURT_ERROR_HUNG)
        return rt_fail(TPURT_ERROR_HUNG,
                       "point %" PRIu64 " (cookie %u) passed the queue's time limit", point,
                       state->fault_cookie);
    return fail_fault(state, point);
}

static int wait_in(tpurt_queue *queue, struct rt_epoch *epoch, uint64_t point, int64_t timeout_ns)
{
    struct rt_backend *be = queue->device->be;
    tpurt_queue_state state = { 0 };
    int status;

    if (point <= atomic_load_explicit(&epoch->completed, memory_order_acquire))
        return TPURT_OK;
    if (!epoch->over) {
        status = be->ops->wait(be, epoch->channel, point, timeout_ns);
        if (status == TPURT_OK) {
            uint64_t known = atomic_load(&epoch->completed);

            while (known < point && !atomic_compare_exchange_weak(&epoch->completed, &known, point))
                ;
        }
        if (status != TPURT_ERROR_CANCELLED)
            return status;
    }
    status = rt_epoch_state(queue, epoch, &state);
    return status ? status : outcome(&state, point);
}

int tpurt_fence_wait(tpurt_queue *queue, uint64_t point, int64_t timeout_ns)
{
    struct rt_epoch *epoch = rt_epoch_get(queue, point);
    int status;

    if (!epoch)
        return TPURT_ERROR_INVALID;
    status = wait_in(queue, epoch, point, timeout_ns);
    rt_epoch_put(queue, epoch);
    return status;
}

int tpurt_fence_get_state(tpurt_queue *queue, uint64_t point, tpurt_queue_state *state)
{
    struct rt_epoch *epoch = rt_epoch_get(queue, point);
    tpurt_queue_state ours = { 0 };
    int status;

    if (!epoch)
        return TPURT_ERROR_INVALID;
    status = rt_epoch_state(queue, epoch, &ours);
    rt_epoch_put(queue, epoch);
    if (status)
        return status;
    return rt_struct_out(state, &ours, sizeof(ours), offsetof(tpurt_queue_state, submitted),
                         "tpurt_queue_state");
}

int tpurt_fence_notify(tpurt_queue *queue, uint64_t point, int eventfd)
{
    struct rt_epoch *epoch = rt_epoch_get(queue, point);
    struct rt_backend *be = queue->device->be;
    uint64_t one = 1;
    int status = TPURT_OK;

    if (!epoch)
        return TPURT_ERROR_INVALID;
    if (!epoch->over && point > atomic_load(&epoch->completed))
        status = be->ops->notify(be, epoch->channel, point, eventfd);
    else if (write(eventfd, &one, sizeof(one)) != sizeof(one))
        status = rt_fail_errno(errno, "fence: writing the eventfd");
    rt_epoch_put(queue, epoch);
    return status;
}
