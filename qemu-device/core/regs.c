/* SPDX-License-Identifier: MIT */
/*
 * BAR0 and the doorbells. Callers' threads; the lock is held per access.
 */
#include "machine.h"

/* A register's offset inside its array, or the register itself. */
typedef struct Reg {
    uint64_t offset; /* as VTPU_REG_*, of element 0 */
    unsigned index;  /* context or queue */
    unsigned size;   /* 4 or 8; 0: no register starts here */
} Reg;

static unsigned queue_reg_size(uint64_t offset)
{
    switch (offset) {
    case VTPU_REG_Q_RING_BASE:
    case VTPU_REG_Q_FENCE_ADDR:
    case VTPU_REG_Q_FAULT_ADDR:
    case VTPU_REG_Q_COMMAND_NS:
    case VTPU_REG_Q_BUSY_NS:
    case VTPU_REG_Q_INSTRUCTIONS:
        return 8;
    case VTPU_REG_Q_RING_LOG2:
    case VTPU_REG_Q_CONTEXT:
    case VTPU_REG_Q_VECTOR:
    case VTPU_REG_Q_PRIORITY:
    case VTPU_REG_Q_CTRL:
    case VTPU_REG_Q_QSTATUS:
    case VTPU_REG_Q_HEAD:
    case VTPU_REG_Q_TAIL:
    case VTPU_REG_Q_FAULT_CAUSE:
    case VTPU_REG_Q_FAULT_ACCESS:
    case VTPU_REG_Q_FAULT_PC:
    case VTPU_REG_Q_FAULT_ENTRY:
    case VTPU_REG_Q_FAULT_OTHER_PC:
    case VTPU_REG_Q_DOORBELL:
    case VTPU_REG_Q_PC:
    case VTPU_REG_Q_WATCHDOG_US:
    case VTPU_REG_Q_PREEMPTIONS:
        return 4;
    default:
        return 0;
    }
}

/* STAT_MODEL_*, which follow one another. */
static bool is_model_stat(uint64_t offset)
{
    return offset >= VTPU_REG_STAT_MODEL_CYCLES && offset <= VTPU_REG_STAT_MODEL_BUSY_LINK &&
           offset % 8 == 0;
}

static unsigned device_reg_size(uint64_t offset)
{
    if (is_model_stat(offset)) {
        return 8;
    }
    switch (offset) {
    case VTPU_REG_HBM_SIZE:
    case VTPU_REG_TIME:
    case VTPU_REG_STAT_PROGRAMS:
    case VTPU_REG_STAT_INSTRUCTIONS:
    case VTPU_REG_STAT_BUSY_NS:
    case VTPU_REG_STAT_HBM_BYTES:
    case VTPU_REG_STAT_ECC_CORRECTED:
    case VTPU_REG_SENSOR_ENERGY:
        return 8;
    case VTPU_REG_ID:
    case VTPU_REG_VERSION:
    case VTPU_REG_ISA_VERSION:
    case VTPU_REG_CAPS:
    case VTPU_REG_VMEM_SIZE:
    case VTPU_REG_NUM_QUEUES:
    case VTPU_REG_NUM_CONTEXTS:
    case VTPU_REG_NUM_MSIX:
    case VTPU_REG_FUNCTION:
    case VTPU_REG_CTRL:
    case VTPU_REG_STATUS:
    case VTPU_REG_RESET_COUNT:
    case VTPU_REG_ERR_QUEUES:
    case VTPU_REG_ERR_QUEUES_HIGH:
    case VTPU_REG_TEST_SCRATCH:
    case VTPU_REG_TEST_IRQ:
    case VTPU_REG_TLB_INVALIDATE:
    case VTPU_REG_TLB_PENDING:
    case VTPU_REG_SLICE_US:
    case VTPU_REG_MODEL_MHZ:
    case VTPU_REG_SENSOR_TEMP:
    case VTPU_REG_SENSOR_TEMP_CRITICAL:
    case VTPU_REG_SENSOR_POWER:
        return 4;
    default:
        return 0;
    }
}

static bool is_link(uint64_t offset)
{
    return offset >= VTPU_REG_LINK_ID && offset < VTPU_QUEUE_OFFSET;
}

static Reg find_reg(uint64_t offset)
{
    uint64_t ctx = offset - VTPU_REG_CTX_ROOT, queue = offset - VTPU_QUEUE_OFFSET;

    if (offset >= VTPU_REG_CTX_ROOT && ctx < VTPU_NUM_CONTEXTS * 8) {
        return (Reg) { VTPU_REG_CTX_ROOT, (unsigned)(ctx / 8), ctx % 8 ? 0 : 8 };
    }
    if (offset >= VTPU_QUEUE_OFFSET && queue < VTPU_NUM_QUEUES * VTPU_QUEUE_STRIDE) {
        uint64_t reg = VTPU_QUEUE_OFFSET + queue % VTPU_QUEUE_STRIDE;
        return (Reg) { reg, (unsigned)(queue / VTPU_QUEUE_STRIDE), queue_reg_size(reg) };
    }
    if (is_link(offset)) {
        return (Reg) { offset, 0, vtpu_link_reg_size(offset) };
    }
    return (Reg) { offset, 0, device_reg_size(offset) };
}

static uint64_t read_queue(VtpuCore *core, const Reg *reg)
{
    const VtpuQueue *queue = &core->queue[reg->index];
    const VtpuExec *x = &core->exec[reg->index];

    switch (reg->offset) {
    case VTPU_REG_Q_RING_BASE:
        return queue->ring_base;
    case VTPU_REG_Q_FENCE_ADDR:
        return queue->fence_addr;
    case VTPU_REG_Q_RING_LOG2:
        return queue->ring_log2;
    case VTPU_REG_Q_CONTEXT:
        return queue->context;
    case VTPU_REG_Q_VECTOR:
        return queue->vector;
    case VTPU_REG_Q_PRIORITY:
        return queue->priority;
    case VTPU_REG_Q_CTRL:
        return queue->state == VTPU_QUEUE_STATE_DISABLED ? 0 : VTPU_Q_CTRL_ENABLE;
    case VTPU_REG_Q_QSTATUS:
        return queue->state;
    case VTPU_REG_Q_HEAD:
        return queue->head;
    case VTPU_REG_Q_TAIL:
    case VTPU_REG_Q_DOORBELL:
        return queue->tail;
    case VTPU_REG_Q_FAULT_CAUSE:
        return queue->fault.cause;
    case VTPU_REG_Q_FAULT_ACCESS:
        return queue->fault.access;
    case VTPU_REG_Q_FAULT_ADDR:
        return queue->fault.addr;
    case VTPU_REG_Q_FAULT_PC:
        return queue->fault.pc;
    case VTPU_REG_Q_FAULT_OTHER_PC:
        return queue->fault.other_pc;
    case VTPU_REG_Q_FAULT_ENTRY:
        return queue->fault_entry;
    case VTPU_REG_Q_PC:
        return atomic_load_explicit(&x->last_pc, memory_order_relaxed);
    case VTPU_REG_Q_WATCHDOG_US:
        return queue->watchdog_us;
    case VTPU_REG_Q_PREEMPTIONS:
        return x->preemptions;
    case VTPU_REG_Q_COMMAND_NS:
        return vtpu_sched_command_ns(core, reg->index);
    case VTPU_REG_Q_BUSY_NS:
        return vtpu_sched_busy_ns(core, reg->index);
    case VTPU_REG_Q_INSTRUCTIONS:
        return atomic_load_explicit(&x->instructions, memory_order_relaxed);
    default:
        return 0;
    }
}

static uint32_t status(const VtpuCore *core)
{
    bool busy = core->running >= 0;

    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        busy |= core->queue[q].state == VTPU_QUEUE_STATE_PREEMPTED;
    }
    bool resetting = core->resetting || core->engine_resetting;

    return (core->enabled && !resetting ? VTPU_STATUS_READY : 0) |
           (resetting ? VTPU_STATUS_RESETTING : 0) |
           (busy ? VTPU_STATUS_BUSY : 0);
}

static uint64_t instructions(const VtpuCore *core)
{
    uint64_t sum = 0;

    for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
        sum += atomic_load_explicit(&core->stat_engine[e], memory_order_relaxed);
    }
    return sum;
}

static uint64_t read_reg(VtpuCore *core, const Reg *reg)
{
    if (reg->offset >= VTPU_QUEUE_OFFSET) {
        return read_queue(core, reg);
    }
    if (is_link(reg->offset)) {
        return vtpu_link_reg_read(core, reg->offset);
    }
    if (is_model_stat(reg->offset)) {
        return atomic_load_explicit(
            &core->stat_model[(reg->offset - VTPU_REG_STAT_MODEL_CYCLES) / 8],
            memory_order_relaxed);
    }
    switch (reg->offset) {
    case VTPU_REG_ID:
        return VTPU_MAGIC;
    case VTPU_REG_VERSION:
        return VTPU_HW_VERSION;
    case VTPU_REG_ISA_VERSION:
        return VTPU_ISA_VERSION;
    case VTPU_REG_CAPS:
        return VTPU_CAPS_ENGINE_RESET | (core->timed ? VTPU_CAPS_TIMING : 0) |
               (core->function == 0 ? VTPU_CAPS_SENSORS : 0);
    case VTPU_REG_MODEL_MHZ:
        return core->timed ? core->timing.clock_mhz : 0;
    case VTPU_REG_HBM_SIZE:
        return core->hbm_bytes;
    case VTPU_REG_VMEM_SIZE:
        return VTPU_VMEM_BYTES;
    case VTPU_REG_NUM_QUEUES:
        return VTPU_NUM_QUEUES;
    case VTPU_REG_NUM_CONTEXTS:
        return VTPU_NUM_CONTEXTS;
    case VTPU_REG_NUM_MSIX:
        return VTPU_NUM_MSIX;
    case VTPU_REG_FUNCTION:
        return core->function;
    case VTPU_REG_CTRL:
        return core->enabled ? VTPU_CTRL_ENABLE : 0;
    case VTPU_REG_STATUS:
        return status(core);
    case VTPU_REG_RESET_COUNT:
        return core->reset_count;
    case VTPU_REG_TIME:
        return vtpu_core_time(core);
    case VTPU_REG_ERR_QUEUES:
        return (uint32_t)core->err_queues;
    case VTPU_REG_ERR_QUEUES_HIGH:
        return core->err_queues >> 32;
    case VTPU_REG_TEST_SCRATCH:
        return core->scratch;
    case VTPU_REG_TLB_PENDING:
        return core->context_changed != 0;
    case VTPU_REG_SLICE_US:
        return core->sched.slice_us;
    case VTPU_REG_STAT_PROGRAMS:
        return atomic_load_explicit(&core->stat_programs, memory_order_relaxed);
    case VTPU_REG_STAT_INSTRUCTIONS:
        return instructions(core);
    case VTPU_REG_STAT_BUSY_NS:
        return atomic_load_explicit(&core->stat_busy_ns, memory_order_relaxed);
    case VTPU_REG_STAT_HBM_BYTES:
        return atomic_load_explicit(&core->stat_hbm_bytes, memory_order_relaxed);
    case VTPU_REG_STAT_ECC_CORRECTED:
        return atomic_load_explicit(&core->stat_ecc_corrected, memory_order_relaxed);
    case VTPU_REG_SENSOR_TEMP:
    case VTPU_REG_SENSOR_TEMP_CRITICAL:
    case VTPU_REG_SENSOR_POWER:
    case VTPU_REG_SENSOR_ENERGY:
        return vtpu_sensor_read(core, reg->offset);
    case VTPU_REG_CTX_ROOT:
        return core->ctx_root[reg->index];
    default:
        return 0;
    }
}

/* Of a queue's configuration: only while it is disabled. */
static bool write_queue_config(VtpuQueue *queue, const Reg *reg, uint64_t value)
{
    if (queue->state != VTPU_QUEUE_STATE_DISABLED) {
        return false;
    }
    switch (reg->offset) {
    case VTPU_REG_Q_RING_BASE:
        queue->ring_base = value;
        return true;
    case VTPU_REG_Q_FENCE_ADDR:
        queue->fence_addr = value;
        return true;
    case VTPU_REG_Q_RING_LOG2:
        queue->ring_log2 = (uint32_t)value;
        return true;
    case VTPU_REG_Q_CONTEXT:
        queue->context = (uint32_t)value;
        return true;
    case VTPU_REG_Q_VECTOR:
        queue->vector = (uint32_t)value;
        return true;
    default:
        return false;
    }
}

/* False: the guest may not write this. */
static bool write_queue(VtpuCore *core, const Reg *reg, uint64_t value)
{
    VtpuQueue *queue = &core->queue[reg->index];

    switch (reg->offset) {
    case VTPU_REG_Q_PRIORITY:
        if (value > 2) {
            return false;
        }
        queue->priority = (uint32_t)value;
        vtpu_sched_changed(core);
        return true;
    case VTPU_REG_Q_WATCHDOG_US:
        queue->watchdog_us = (uint32_t)value;
        vtpu_sched_changed(core);
        return true;
    case VTPU_REG_Q_CTRL:
        if (value & VTPU_Q_CTRL_RESET) {
            vtpu_queue_reset(core, reg->index);
        } else if ((value & VTPU_Q_CTRL_ENABLE) && !vtpu_queue_enable(core, reg->index)) {
            return false;
        }
        return !(value & ~(uint64_t)(VTPU_Q_CTRL_RESET | VTPU_Q_CTRL_ENABLE));
    default:
        return write_queue_config(queue, reg, value);
    }
}

static bool write_reg(VtpuCore *core, const Reg *reg, uint64_t value)
{
    if (reg->offset >= VTPU_QUEUE_OFFSET) {
        return write_queue(core, reg, value);
    }
    if (is_link(reg->offset)) {
        return vtpu_link_reg_write(core, reg->offset, value);
    }
    switch (reg->offset) {
    case VTPU_REG_CTRL:
        if (value & VTPU_CTRL_RESET) {
            vtpu_core_start_reset(core);
        } else if (value & VTPU_CTRL_ENGINE_RESET) {
            vtpu_core_start_engine_reset(core);
        } else {
            core->enabled = value & VTPU_CTRL_ENABLE;
            vtpu_core_kick(core);
        }
        return !(value & ~(uint64_t)(VTPU_CTRL_RESET | VTPU_CTRL_ENGINE_RESET | VTPU_CTRL_ENABLE));
    case VTPU_REG_ERR_QUEUES:
        core->err_queues &= ~(uint64_t)(uint32_t)value;
        return true;
    case VTPU_REG_ERR_QUEUES_HIGH:
        core->err_queues &= ~(value << 32);
        return true;
    case VTPU_REG_TEST_SCRATCH:
        core->scratch = (uint32_t)value;
        return true;
    case VTPU_REG_SLICE_US:
        core->sched.slice_us = (uint32_t)value;
        return true; /* from the next stretch on */
    case VTPU_REG_TEST_IRQ:
        if (value >= VTPU_NUM_MSIX) {
            return false;
        }
        core->irqs |= 1ull << value;
        atomic_store(&core->attention, 1);
        vtpu_core_kick(core);
        return true;
    case VTPU_REG_TLB_INVALIDATE:
        if (value >= VTPU_NUM_CONTEXTS) {
            return false;
        }
        vtpu_core_context_changed(core, (unsigned)value);
        return true;
    case VTPU_REG_CTX_ROOT:
        core->ctx_root[reg->index] = value;
        vtpu_core_context_changed(core, reg->index);
        return true;
    default:
        return false;
    }
}

/* The low half of an 8-byte register keeps the high one for the next read. */
static bool read_half(VtpuCore *core, uint64_t offset, uint64_t *value)
{
    Reg reg = find_reg(offset);

    if (reg.size == 4) {
        *value = read_reg(core, &reg);
        return true;
    }
    if (reg.size == 8) {
        *value = read_reg(core, &reg);
        core->latch_offset = (uint32_t)offset + 4;
        core->latch_high = (uint32_t)(*value >> 32);
        *value = (uint32_t)*value;
        return true;
    }
    reg = offset >= 4 ? find_reg(offset - 4) : reg;
    if (reg.size != 8) {
        return false;
    }
    *value = core->latch_offset == offset ? core->latch_high : read_reg(core, &reg) >> 32;
    core->latch_offset = 0;
    return true;
}

static bool write_half(VtpuCore *core, uint64_t offset, uint32_t value)
{
    Reg reg = find_reg(offset);

    if (reg.size == 4) {
        return write_reg(core, &reg, value);
    }
    if (reg.size == 8) {
        return write_reg(core, &reg, (read_reg(core, &reg) & ~(uint64_t)UINT32_MAX) | value);
    }
    reg = offset >= 4 ? find_reg(offset - 4) : reg;
    return reg.size == 8 &&
           write_reg(core, &reg, (uint32_t)read_reg(core, &reg) | (uint64_t)value << 32);
}

uint64_t vtpu_core_mmio_read(VtpuCore *core, uint64_t offset, unsigned size)
{
    uint64_t value = 0;
    bool ok = false;

    if (vtpu_injecting(core, VTPU_INJECT_DEAD)) {
        return size == 8 ? UINT64_MAX : UINT32_MAX;
    }
    pthread_mutex_lock(&core->lock);
    if (size == 4) {
        ok = read_half(core, offset, &value);
    } else if (size == 8) {
        Reg reg = find_reg(offset);
        ok = reg.size == 8;
        value = ok ? read_reg(core, &reg) : 0;
    }
    pthread_mutex_unlock(&core->lock);
    if (!ok) {
        vtpu_core_log(core, "read of no register");
    }
    return value;
}

void vtpu_core_mmio_write(VtpuCore *core, uint64_t offset, uint64_t value, unsigned size)
{
    Reg reg = find_reg(offset);
    bool ok = false;

    if (vtpu_injecting(core, VTPU_INJECT_DEAD)) {
        return;
    }
    if (size == 4 && reg.offset == VTPU_REG_Q_DOORBELL) {
        vtpu_core_doorbell(core, reg.index, (uint32_t)value);
        return;
    }
    pthread_mutex_lock(&core->lock);
    if (size == 4) {
        ok = write_half(core, offset, (uint32_t)value);
    } else if (size == 8) {
        ok = reg.size == 8 && write_reg(core, &reg, value);
    }
    pthread_mutex_unlock(&core->lock);
    if (!ok) {
        vtpu_core_log(core, "write of no register, or of a value or at a time it does not allow");
    }
}

void vtpu_core_doorbell(VtpuCore *core, unsigned queue, uint32_t tail)
{
    bool ok = false;

    if (vtpu_injecting(core, VTPU_INJECT_DEAD)) {
        return;
    }
    vtpu_core_trace(core, VTPU_EVENT_DOORBELL, queue, tail, 0);
    if (queue < VTPU_NUM_QUEUES) {
        pthread_mutex_lock(&core->lock);
        ok = vtpu_queue_doorbell(core, queue, tail);
        if (ok && core->serve_short) {
            vtpu_queue_serve_short(core, queue);
        } else {
            vtpu_core_kick(core);
        }
        pthread_mutex_unlock(&core->lock);
    }
    if (!ok) {
        vtpu_core_log(core, "doorbell of no queue, or of one that does not run");
    }
}
