/* SPDX-License-Identifier: MIT */
/*
 * Long instructions. One instruction of a program may compute for minutes, and
 * whoever parks the machine, QEMU's main loop, is not to wait for that. So one
 * that is longer than most is abandoned where it is when the machine is to be
 * parked, as if it were stopped for a reset, and then undone: it begins again
 * when the machine goes on, here or elsewhere.
 *
 * To be undone is to have put back what was in VMEM where it writes, which is
 * copied before it begins. What transfers data needs no copy: doing it again
 * writes the same. Command thread, but for vtpu_restart_ask().
 */
#include <string.h>

#include "machine.h"

/* Multiply-adds: a tenth of a second on a vector path, seconds on the scalar one. */
#define LONG (1ull << 33)

_Static_assert((uint64_t)VTPU_SMALL_COUNT * VTPU_SMALL_COUNT * VTPU_SMALL_COUNT <= LONG,
               "three counts");

/* At least what it computes or moves. No product overflows: three counts of at most 2^20. */
static uint64_t work_of(const VtpuIssued *i)
{
    const struct vtpu_op_info *info = i->in->info;
    uint64_t work = 1, imm = i->in->in.imm64;

    if (i->in->in.opcode == VTPU_OP_V_ATTN) {
        uint64_t keys = (uint64_t)VTPU_V_ATTN_GET_BLOCK_SIZE(imm) *
                        VTPU_V_ATTN_GET_MAX_BLOCKS(imm);
        keys = keys < i->v[VTPU_V_ATTN_NUM_SLOTS] ? keys : i->v[VTPU_V_ATTN_NUM_SLOTS];
        return i->v[VTPU_V_ATTN_ROWS] * VTPU_V_ATTN_GET_HEADS(imm) *
               VTPU_V_ATTN_GET_HEAD_DIM(imm) * 2 * keys;
    }
    for (unsigned n = 0; n < info->num_operands; n++) {
        work *= info->kind[n] == VTPU_OPERAND_N ? i->v[n] : 1;
    }
    return work;
}

void vtpu_restart_ask(VtpuCore *core)
{
    if (core->restartable && !vtpu_stopped(core)) {
        atomic_store(&core->stop, VTPU_STOP_TO_PARK);
    }
}

bool vtpu_restart_begin(VtpuExec *x, const VtpuIssued *i)
{
    VtpuCore *core = x->core;

    if (work_of(i) < LONG) {
        return false;
    }
    core->undo = (VtpuUndo) { .wanted = i->in->info->engine != VTPU_ENGINE_DMA };
    pthread_mutex_lock(&core->lock);
    core->restartable = true;
    if (core->park) {
        vtpu_restart_ask(core);
    }
    pthread_mutex_unlock(&core->lock);
    return true;
}

bool vtpu_restart_keep(VtpuExec *x, uint64_t addr, uint64_t bytes)
{
    VtpuUndo *undo = &x->core->undo;
    uint8_t *copy = vtpu_buffer(x, VTPU_BUFFER_UNDO, bytes);

    if (copy) {
        memcpy(copy, x->vmem->data + addr, bytes);
        *undo = (VtpuUndo) { .addr = addr, .bytes = bytes }; /* there is one result */
    }
    return copy != NULL;
}

bool vtpu_restart_end(VtpuExec *x, bool done)
{
    VtpuCore *core = x->core;
    VtpuUndo *undo = &core->undo;

    pthread_mutex_lock(&core->lock);
    bool abandoned = atomic_load(&core->stop) == VTPU_STOP_TO_PARK;
    core->restartable = false;
    if (abandoned) {
        atomic_store(&core->stop, 0);
    }
    pthread_mutex_unlock(&core->lock);
    abandoned = abandoned && !done && x->fault.cause == VTPU_FAULT_NONE;
    if (abandoned && undo->bytes) {
        memcpy(x->vmem->data + undo->addr, core->buffer[VTPU_BUFFER_UNDO].data, undo->bytes);
    }
    *undo = (VtpuUndo) { 0 };
    return abandoned;
}
