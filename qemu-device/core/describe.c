/* SPDX-License-Identifier: MIT */
/*
 * The state of the machine in words, for whoever looks at it from outside. The
 * state is copied with the lock held and written out without it.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "machine.h"

typedef struct Text {
    char *at;
    size_t left;
} Text;

__attribute__((format(printf, 2, 3))) static void put(Text *text, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    int n = vsnprintf(text->at, text->left, format, args);
    va_end(args);
    size_t written = n < 0 ? 0 : (size_t)n < text->left ? (size_t)n : text->left - 1;
    text->at += written;
    text->left -= written;
}

static const char *name_of(const char *const names[], size_t count, uint32_t value)
{
    return value < count && names[value] ? names[value] : "?";
}
#define NAME_OF(names, value) name_of(names, sizeof(names) / sizeof(*(names)), value)

static void put_queue(Text *text, unsigned q, const VtpuQueue *queue, uint32_t pc)
{
    static const char *const states[] = VTPU_QUEUE_STATE_NAMES;
    static const char *const faults[] = VTPU_FAULT_NAMES;

    put(text, "queue %u: %s, context %u, priority %u, vector %u, head %u, tail %u%s", q,
        NAME_OF(states, queue->state), queue->context, queue->priority, queue->vector,
        queue->head, queue->tail, queue->holding ? ", waits for a word" : "");
    if (pc != VTPU_PC_NONE) {
        put(text, ", program at pc 0x%x", pc);
    }
    if (queue->fault.cause) {
        put(text, ", fault %s access %u address 0x%" PRIx64 " pc 0x%x entry %u",
            NAME_OF(faults, queue->fault.cause), queue->fault.access, queue->fault.addr,
            queue->fault.pc, queue->fault_entry);
        if (queue->fault.cause == VTPU_FAULT_RACE_VMEM ||
            queue->fault.cause == VTPU_FAULT_RACE_GLOBAL) {
            put(text, " with pc 0x%x", queue->fault.other_pc);
        }
    }
    put(text, "\n");
}

/* The timing model's totals, as the registers give them. */
static void put_model(Text *text, const VtpuCore *core)
{
    static const char *const names[VTPU_NUM_MODEL_STATS] = {
        "cycles", "HBM bytes read", "HBM bytes written", "VMEM bytes", "operations", "SEQ busy",
        "DMA busy", "MXU busy", "VPU busy", "waiting for counters", "waiting for room",
        "waiting in SYNC", "waiting for HBM", "LINK busy",
    };

    put(text, "model: %u MHz", core->timing.clock_mhz);
    for (unsigned n = 0; n < VTPU_NUM_MODEL_STATS; n++) {
        put(text, ", %s %" PRIu64, names[n],
            atomic_load_explicit(&core->stat_model[n], memory_order_relaxed));
    }
    put(text, "\n");
}

void vtpu_core_describe(VtpuCore *core, char *out, size_t size)
{
    static const char *const engines[] = VTPU_ENGINE_NAMES;
    VtpuQueue queue[VTPU_NUM_QUEUES];
    uint64_t root[VTPU_NUM_CONTEXTS];
    uint32_t pc[VTPU_NUM_QUEUES];
    Text text = { out, size };

    pthread_mutex_lock(&core->lock);
    memcpy(queue, core->queue, sizeof(queue));
    memcpy(root, core->ctx_root, sizeof(root));
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        pc[q] = atomic_load(&core->exec[q].last_pc);
    }
    bool enabled = core->enabled, resetting = core->resetting || core->engine_resetting, asleep = core->asleep;
    int running = core->running;
    uint32_t resets = core->reset_count;
    bool link_enabled = core->link.enabled;
    uint32_t link_context = core->link.context, link_accept = core->link.accept;
    uint32_t link_errors = core->link.errors;
    pthread_mutex_unlock(&core->lock);

    put(&text, "device: %s, %u resets",
        resetting ? "resetting" : asleep ? "asleep" : enabled ? "ready" : "disabled", resets);
    if (running >= 0) {
        put(&text, ", serves queue %d", running);
    }
    put(&text, "\n");
    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        put(&text, "engine %s: %" PRIu64 " instructions\n", NAME_OF(engines, e),
            atomic_load_explicit(&core->stat_engine[e], memory_order_relaxed));
    }
    if (core->link.fabric) {
        put(&text, "link: chip %u, %s, context %u, accepts 0x%04x, errors 0x%x\n",
            core->link.chip, link_enabled ? "enabled" : "disabled", link_context, link_accept,
            link_errors);
    }
    if (core->timed) {
        put_model(&text, core);
    }
    for (unsigned c = 0; c < VTPU_NUM_CONTEXTS; c++) {
        if (root[c]) {
            put(&text, "context %u: root 0x%" PRIx64 "%s\n", c, root[c] & ~(uint64_t)VTPU_CTX_VALID,
                root[c] & VTPU_CTX_VALID ? "" : " (not valid)");
        }
    }
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        if (queue[q].state != VTPU_QUEUE_STATE_DISABLED) {
            put_queue(&text, q, &queue[q], pc[q]);
        }
    }
}
