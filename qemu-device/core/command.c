/* SPDX-License-Identifier: MIT */
/*
 * The ring commands. An entry has been copied from the ring: what is checked
 * here is what is used. Command thread only.
 */
#include <string.h>

#include "machine.h"

#define COPY_STEP (4u << 20) /* bytes between looks at the stop flag */

static uint64_t field64(const uint8_t *entry, unsigned offset)
{
    uint64_t value;
    memcpy(&value, entry + offset, sizeof(value));
    return value;
}

static uint32_t field32(const uint8_t *entry, unsigned offset)
{
    uint32_t value;
    memcpy(&value, entry + offset, sizeof(value));
    return value;
}

/* The payload's bytes from `end` on are unused and must be zero. */
static bool check_entry(const uint8_t *entry, unsigned end)
{
    uint8_t known = VTPU_RING_FLAG_FENCE | VTPU_RING_FLAG_IRQ;

    if ((entry[VTPU_RING_FLAGS] & ~known) || entry[VTPU_RING_RESERVED0] ||
        entry[VTPU_RING_RESERVED0 + 1] || field64(entry, VTPU_RING_RESERVED1)) {
        return false;
    }
    for (unsigned i = end; i < VTPU_RING_ENTRY; i++) {
        if (entry[i]) {
            return false;
        }
    }
    return true;
}

static bool bad_command(VtpuExec *x)
{
    return vtpu_fault(x, VTPU_FAULT_BAD_COMMAND, VTPU_ACCESS_NONE, 0);
}

void vtpu_command_drop(VtpuExec *x)
{
    vtpu_program_put(x->program);
    vtpu_vmem_give_back(x->core, x->vmem);
    x->program = NULL;
    x->vmem = NULL;
    atomic_store_explicit(&x->last_pc, VTPU_PC_NONE, memory_order_relaxed);
}

static bool check_profile(const VtpuExec *x, const uint8_t *entry)
{
    uint64_t va = field64(entry, VTPU_CMD_RUN_PROFILE_VA);
    uint32_t bytes = field32(entry, VTPU_CMD_RUN_PROFILE_BYTES);

    return bytes == 0 ? va == 0
                      : x->core->timed && va && va % 8 == 0 && bytes >= VTPU_PROFILE_HEADER_BYTES;
}

/* Everything of a RUN up to its first instruction. */
static bool begin_program(VtpuExec *x)
{
    VtpuCore *core = x->core;
    const uint8_t *entry = x->entry;
    uint64_t code_va = field64(entry, VTPU_CMD_RUN_CODE_VA);
    uint32_t code_bytes = field32(entry, VTPU_CMD_RUN_CODE_BYTES);
    uint32_t start = field32(entry, VTPU_CMD_RUN_ENTRY);
    uint64_t args_va = field64(entry, VTPU_CMD_RUN_ARGS_VA);
    uint32_t num_args = field32(entry, VTPU_CMD_RUN_NUM_ARGS);

    if (!check_entry(entry, VTPU_CMD_RUN_PROFILE_VA + 8) || !check_profile(x, entry) || code_va % VTPU_INSTR_BYTES ||
        code_bytes % VTPU_INSTR_BYTES || code_bytes == 0 || code_bytes > VTPU_MAX_CODE_BYTES ||
        start % VTPU_INSTR_BYTES || start >= code_bytes || args_va % 8 ||
        num_args > VTPU_MAX_ARGS) {
        return bad_command(x);
    }
    memset(x->s, 0, sizeof(x->s));
    memset(x->counter, 0, sizeof(x->counter));
    uint8_t *code = vtpu_buffer(x, VTPU_BUFFER_BOUNCE, code_bytes);
    if (!code || !vtpu_mem_read(x, code_va, code, code_bytes, VTPU_ACCESS_EXEC) ||
        !vtpu_mem_read(x, args_va, &x->s[VTPU_FIRST_ARG], num_args * 8, VTPU_ACCESS_READ)) {
        return false;
    }
    x->program = vtpu_program_get(core, code, code_bytes);
    x->vmem = x->program ? vtpu_vmem_take(core, x->context) : NULL;
    if (!x->vmem) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_EXEC, code_va);
    }
    if (core->timed && !vtpu_timing_begin(x, field64(entry, VTPU_CMD_RUN_PROFILE_VA),
                                          field32(entry, VTPU_CMD_RUN_PROFILE_BYTES))) {
        return false;
    }
    x->pc = start;
    vtpu_seq_start(x);
    vtpu_inject_hang(x);
    return true;
}

static VtpuOutcome run(VtpuExec *x)
{
    VtpuCore *core = x->core;
    VtpuOutcome outcome = VTPU_OUTCOME_FAILED;

    if (x->program || begin_program(x)) {
        outcome = vtpu_seq_run(x);
        if (outcome == VTPU_OUTCOME_DONE && core->timed && !vtpu_timing_end(x)) {
            outcome = VTPU_OUTCOME_FAILED;
        }
    }
    if (outcome == VTPU_OUTCOME_PREEMPTED || outcome == VTPU_OUTCOME_WAITING) {
        return outcome;
    }
    if (outcome == VTPU_OUTCOME_DONE) {
        vtpu_stat_add(&core->stat_programs, 1);
    }
    pthread_mutex_lock(&core->lock);
    vtpu_command_drop(x);
    pthread_mutex_unlock(&core->lock);
    vtpu_vmem_trim(core);
    return outcome;
}

typedef struct CopyJob {
    uint8_t *dst;
    const uint8_t *src;
    uint64_t bytes, part;
} CopyJob;

static void copy_part(void *arg, uint32_t begin, uint32_t end, unsigned slot)
{
    const CopyJob *job = arg;
    uint64_t from = begin * job->part, to = end * job->part;

    (void)slot;
    to = to < job->bytes ? to : job->bytes;
    /* Two virtual ranges apart may still be the same memory. */
    memmove(job->dst + from, job->src + from, to - from);
}

static bool copy_piece(VtpuExec *x, const VtpuSpan *dst, const VtpuSpan *src, uint64_t bytes)
{
    if (dst->host && src->host) {
        CopyJob job = { dst->host, src->host, bytes, 256u << 10 };
        vtpu_dirty(x, dst->host, bytes);
        return vtpu_pool_for(x->core->pool, (uint32_t)((bytes + job.part - 1) / job.part), 1,
                             copy_part, &job);
    }
    if (dst->host) {
        vtpu_dirty(x, dst->host, bytes);
        return vtpu_bus_read(x, src->bus, dst->host, bytes);
    }
    if (src->host) {
        return vtpu_bus_write(x, dst->bus, src->host, bytes);
    }
    for (uint64_t done = 0, n; done < bytes; done += n) {
        uint8_t *buffer = vtpu_buffer(x, VTPU_BUFFER_DMA, VTPU_DMA_CHUNK);
        n = bytes - done < VTPU_DMA_CHUNK ? bytes - done : VTPU_DMA_CHUNK;
        if (!buffer || !vtpu_bus_read(x, src->bus + done, buffer, n) ||
            !vtpu_bus_write(x, dst->bus + done, buffer, n)) {
            return false;
        }
    }
    return true;
}

/* Between two pieces of a long command; false: it does not go on now, as *outcome says. */
static bool boundary(VtpuExec *x, VtpuOutcome *outcome)
{
    *outcome = VTPU_OUTCOME_PREEMPTED;
    if (vtpu_core_parking(x->core)) {
        return false;
    }
    if (vtpu_engines_boundary(x->core) && !vtpu_stopped(x->core)) {
        return true;
    }
    *outcome = vtpu_core_parking(x->core) ? VTPU_OUTCOME_PREEMPTED : VTPU_OUTCOME_FAILED;
    return false;
}

static VtpuOutcome copy(VtpuExec *x)
{
    const uint8_t *entry = x->entry;
    uint64_t dst = field64(entry, VTPU_CMD_COPY_DST), src = field64(entry, VTPU_CMD_COPY_SRC);
    uint64_t bytes = field64(entry, VTPU_CMD_COPY_BYTES);
    VtpuOutcome outcome;

    if (!check_entry(entry, VTPU_CMD_COPY_BYTES + 8) ||
        (dst > src ? dst - src < bytes : src - dst < bytes && bytes)) {
        bad_command(x);
        return VTPU_OUTCOME_FAILED;
    }
    for (uint64_t n; x->done < bytes; x->done += n) {
        VtpuSpan to, from;
        n = bytes - x->done < COPY_STEP ? bytes - x->done : COPY_STEP;
        if (!boundary(x, &outcome)) {
            return outcome;
        }
        if (!vtpu_mmu_span(x, src + x->done, n, VTPU_ACCESS_READ, &from) ||
            !vtpu_mmu_span(x, dst + x->done, n, VTPU_ACCESS_WRITE, &to)) {
            return VTPU_OUTCOME_FAILED;
        }
        n = from.len < to.len ? from.len : to.len;
        if (!copy_piece(x, &to, &from, n)) {
            return VTPU_OUTCOME_FAILED;
        }
    }
    return VTPU_OUTCOME_DONE;
}

static VtpuOutcome fill(VtpuExec *x)
{
    const uint8_t *entry = x->entry;
    uint64_t dst = field64(entry, VTPU_CMD_FILL_DST);
    uint64_t bytes = field64(entry, VTPU_CMD_FILL_BYTES);
    uint32_t pattern = field32(entry, VTPU_CMD_FILL_PATTERN);
    VtpuOutcome outcome;

    if (!check_entry(entry, VTPU_CMD_FILL_PATTERN + 4) || bytes % 4) {
        bad_command(x);
        return VTPU_OUTCOME_FAILED;
    }
    uint64_t chunk = bytes < VTPU_DMA_CHUNK ? bytes : VTPU_DMA_CHUNK;
    uint8_t *buffer = vtpu_buffer(x, VTPU_BUFFER_DMA, chunk);
    if (!buffer) {
        return VTPU_OUTCOME_FAILED;
    }
    for (uint64_t i = 0; i < chunk; i += 4) {
        memcpy(buffer + i, &pattern, 4);
    }
    for (uint64_t n; x->done < bytes; x->done += n) {
        n = bytes - x->done < chunk ? bytes - x->done : chunk;
        if (!boundary(x, &outcome)) {
            return outcome;
        }
        if (!vtpu_mem_write(x, dst + x->done, buffer, n)) {
            return VTPU_OUTCOME_FAILED;
        }
    }
    return VTPU_OUTCOME_DONE;
}

/* A command that takes its time where HBM is slow. */
static VtpuOutcome slowly(VtpuExec *x, VtpuOutcome (*move)(VtpuExec *x))
{
    uint64_t begin = vtpu_inject_slow_begin(x->core);
    VtpuOutcome outcome = move(x);

    return outcome != VTPU_OUTCOME_DONE || vtpu_inject_slow_end(x, begin) ? outcome
                                                                          : VTPU_OUTCOME_FAILED;
}

static bool write_word(VtpuExec *x, uint64_t addr, uint64_t value)
{
    return addr % 8 ? bad_command(x) : vtpu_mem_write(x, addr, &value, sizeof(value));
}

static VtpuOutcome wait(VtpuExec *x)
{
    uint64_t addr = field64(x->entry, VTPU_CMD_WAIT_ADDR), word;

    if (!check_entry(x->entry, VTPU_CMD_WAIT_VALUE + 8) || addr % 8) {
        bad_command(x);
        return VTPU_OUTCOME_FAILED;
    }
    if (!vtpu_mem_read(x, addr, &word, sizeof(word), VTPU_ACCESS_READ)) {
        return VTPU_OUTCOME_FAILED;
    }
    return word < field64(x->entry, VTPU_CMD_WAIT_VALUE) ? VTPU_OUTCOME_HELD : VTPU_OUTCOME_DONE;
}

static uint64_t now(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    uint64_t time = vtpu_core_time(core);
    pthread_mutex_unlock(&core->lock);
    return time;
}

/* A command that is over, well or not, once this returns. */
static bool execute(VtpuExec *x)
{
    const uint8_t *entry = x->entry;

    switch (entry[VTPU_RING_OP]) {
    case VTPU_CMD_NOP:
        return check_entry(entry, VTPU_RING_PAYLOAD) || bad_command(x);
    case VTPU_CMD_SIGNAL:
        return check_entry(entry, VTPU_CMD_SIGNAL_VALUE + 8)
                   ? write_word(x, field64(entry, VTPU_CMD_SIGNAL_ADDR),
                                field64(entry, VTPU_CMD_SIGNAL_VALUE))
                   : bad_command(x);
    case VTPU_CMD_TIMESTAMP:
        return check_entry(entry, VTPU_CMD_TIMESTAMP_ADDR + 8)
                   ? write_word(x, field64(entry, VTPU_CMD_TIMESTAMP_ADDR),
                                now(x->core))
                   : bad_command(x);
    default:
        return bad_command(x);
    }
}

static bool needs_engines(uint8_t op)
{
    return op == VTPU_CMD_RUN || op == VTPU_CMD_COPY || op == VTPU_CMD_FILL;
}

VtpuOutcome vtpu_command_execute(VtpuExec *x)
{
    VtpuOutcome outcome;

    if (needs_engines(x->entry[VTPU_RING_OP]) && !vtpu_engines_take(x->core)) {
        return vtpu_core_parking(x->core) ? VTPU_OUTCOME_PREEMPTED : VTPU_OUTCOME_FAILED;
    }
    switch (x->entry[VTPU_RING_OP]) {
    case VTPU_CMD_RUN:
        outcome = run(x);
        break;
    case VTPU_CMD_COPY:
        outcome = slowly(x, copy);
        break;
    case VTPU_CMD_FILL:
        outcome = slowly(x, fill);
        break;
    case VTPU_CMD_WAIT:
        outcome = wait(x);
        break;
    default:
        outcome = execute(x) ? VTPU_OUTCOME_DONE : VTPU_OUTCOME_FAILED;
        break;
    }
    vtpu_dirty_flush(x);
    return outcome;
}
