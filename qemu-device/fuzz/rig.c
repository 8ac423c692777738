/* SPDX-License-Identifier: MIT */
#include "rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#define GUARD (1u << 20)
#define TICK_NS 1000
#define DISPATCH 256 /* multiply-adds that an instruction costs besides its own */
#define TRIES 64 /* steps in which a reset machine must have served one entry */

/* The machine's clock, through the linker's --wrap: it goes on as it is looked at. */
int __wrap_clock_gettime(clockid_t id, struct timespec *t);
static uint64_t now_ns;
static bool clock_stands;

int __wrap_clock_gettime(clockid_t id, struct timespec *t)
{
    (void)id;
    now_ns += clock_stands ? 0 : TICK_NS;
    t->tv_sec = (time_t)(now_ns / 1000000000u);
    t->tv_nsec = (long)(now_ns % 1000000000u);
    return 0;
}

void rig_stop_clock(bool stop)
{
    clock_stands = stop;
}

uint64_t input_uint(Input *in, unsigned bytes)
{
    uint64_t value = 0;

    input_bytes(in, &value, bytes);
    return value;
}

void input_bytes(Input *in, void *to, size_t len)
{
    size_t have = len < in->left ? len : in->left;

    memcpy(to, in->at, have);
    memset((uint8_t *)to + have, 0, len - have);
    in->at += have;
    in->left -= have;
}

void rig_fail(const char *what, const char *file, int line)
{
    fprintf(stderr, "%s:%d: this does not hold: %s\n", file, line, what);
    abort();
}

static void spend(Rig *rig, uint64_t work)
{
    if (rig->work_left > work) {
        rig->work_left -= work;
    } else if (!rig->gave_up) {
        rig->work_left = 0;
        rig->gave_up = true;
        vtpu_core_reset(rig->core);
    }
}

static void interlude(Rig *rig)
{
    spend(rig, 1);
    if (rig->interlude) {
        rig->interlude(rig);
    }
}

static bool bus(Rig *rig, bool write, uint64_t addr, void *buf, size_t len)
{
    uint64_t at = addr - RIG_BUS;
    bool ok;

    if (at < RIG_BUS_BYTES && len <= RIG_BUS_BYTES - at) {
        ok = !rig->fails || !rig->fails(rig);
        if (ok) {
            write ? memcpy(rig->system + at, buf, len) : memcpy(buf, rig->system + at, len);
        }
    } else {
        ok = rig->bus && rig->bus(rig, write, addr, buf, len);
    }
    interlude(rig);
    return ok;
}

static bool dma_read(void *opaque, uint64_t addr, void *buf, size_t len)
{
    return bus(opaque, false, addr, buf, len);
}

static bool dma_write(void *opaque, uint64_t addr, const void *buf, size_t len)
{
    return bus(opaque, true, addr, (void *)buf, len);
}

static void raise_irq(void *opaque, unsigned vector)
{
    Rig *rig = opaque;

    RIG_REQUIRE(vector < VTPU_NUM_MSIX);
    rig->irqs[vector]++;
    interlude(rig);
}

static void guest_error(void *opaque, const char *message)
{
    (void)opaque;
    RIG_REQUIRE(message && *message);
}

static void hbm_dirty(void *opaque, uint64_t offset, uint64_t len)
{
    Rig *rig = opaque;

    RIG_REQUIRE(len && offset < RIG_HBM_BYTES && len <= RIG_HBM_BYTES - offset);
    if (rig->dirty) {
        rig->dirty(rig, offset, len);
    }
    interlude(rig);
}

/* About what an instruction costs: the product of its counts, which it loops over. */
static uint64_t cost(const VtpuIssued *i)
{
    uint64_t work = 1, imm = i->in->in.imm64;

    for (unsigned n = 0; n < i->in->info->num_operands; n++) {
        if (i->in->info->kind[n] == VTPU_OPERAND_N && i->v[n]) {
            work = i->v[n] > UINT32_MAX / work ? UINT32_MAX : work * i->v[n];
        }
    }
    if (i->in->in.opcode == VTPU_OP_V_ATTN) { /* keys are data: as many as there may be */
        work = i->v[VTPU_V_ATTN_ROWS] * (VTPU_V_ATTN_GET_BLOCK_SIZE(imm) *
               VTPU_V_ATTN_GET_MAX_BLOCKS(imm) / 16 + 1) * VTPU_V_ATTN_GET_HEADS(imm) *
               VTPU_V_ATTN_GET_HEAD_DIM(imm);
    }
    return work;
}

/*
 * An instruction that is too much work for a fuzzer begins all the same, with the
 * reset already there: all its checks are made, and it must end soon.
 */
static void trace(void *opaque, VtpuCoreEvent event, unsigned queue, uint64_t a, uint64_t b)
{
    Rig *rig = opaque;
    VtpuExec *x = &rig->core->exec[queue % VTPU_NUM_QUEUES];

    (void)b;
    if (event == VTPU_EVENT_INSTRUCTION) {
        const struct vtpu_op_info *info = &vtpu_op_table[a];
        RIG_REQUIRE(queue < VTPU_NUM_QUEUES && a < 256 && info->name && x->program);
        if (rig->before_instruction) {
            rig->before_instruction(rig, x, (uint8_t)a);
        }
        const VtpuEngine *e = &x->engine[info->engine];
        spend(rig, DISPATCH + (info->engine == VTPU_ENGINE_SEQ ? 0 : cost(&e->queue[e->head])));
    } else {
        RIG_REQUIRE(event != VTPU_EVENT_FAULT || a);
    }
}

static bool trace_instructions(void *opaque)
{
    (void)opaque;
    return true;
}

static const VtpuCoreOps ops = {
    .dma_read = dma_read,
    .dma_write = dma_write,
    .raise_irq = raise_irq,
    .guest_error = guest_error,
    .hbm_dirty = hbm_dirty,
    .trace = trace,
    .trace_instructions = trace_instructions,
};

static uint8_t *guarded(size_t bytes)
{
    uint8_t *map = mmap(NULL, bytes + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    RIG_REQUIRE(map != MAP_FAILED);
    RIG_REQUIRE(mprotect(map + GUARD, bytes, PROT_READ | PROT_WRITE) == 0);
    return map + GUARD;
}

void rig_open(Rig *rig, const char *isa, uint64_t schedule_seed, uint64_t work)
{
    static uint8_t *hbm, *system;

    if (!hbm) {
        prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0); /* an input touches little */
        hbm = guarded(RIG_HBM_BYTES);
        system = guarded(RIG_BUS_BYTES);
    }
    madvise(hbm, RIG_HBM_BYTES, MADV_DONTNEED); /* zeros again */
    madvise(system, RIG_BUS_BYTES, MADV_DONTNEED);
    now_ns = 0;
    rig->hbm = hbm;
    rig->system = system;
    rig->work_left = work;
    rig->gave_up = false;
    memset(rig->irqs, 0, sizeof(rig->irqs));
    rig_open_core(rig, isa, schedule_seed);
}

void rig_open_core(Rig *rig, const char *isa, uint64_t schedule_seed)
{
    const char *error;
    VtpuCoreConfig config = {
        .hbm = rig->hbm, .hbm_bytes = RIG_HBM_BYTES, .isa_path = isa,
        .schedule_seed = schedule_seed, .stepped = true, .timing = rig->timing,
        .check_races = rig->check_races, .fabric = rig->fabric,
    };
    rig->core = vtpu_core_new(&config, &ops, rig, &error);
    RIG_REQUIRE(rig->core);
}

void rig_close(Rig *rig)
{
    vtpu_core_free(rig->core);
    rig->core = NULL;
}

void rig_run(Rig *rig, unsigned most)
{
    for (unsigned idle = 0; most && idle < 2; most--) {
        if (vtpu_core_step(rig->core)) {
            idle = 0;
        } else {
            now_ns += 2000000; /* more than a held WAIT waits */
            idle++;
        }
    }
}

void rig_check(Rig *rig)
{
    const VtpuCore *core = rig->core;

    RIG_REQUIRE(core->running == -1 && !core->busy);
    RIG_REQUIRE(core->dirty_start == core->dirty_end);
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        const VtpuQueue *queue = &core->queue[q];
        RIG_REQUIRE(core->vmem[q].used <= VTPU_VMEM_BYTES);
        /* Only a queue that will go on with it keeps what a program has. */
        RIG_REQUIRE(!core->exec[q].program == (queue->state != VTPU_QUEUE_STATE_PREEMPTED));
        RIG_REQUIRE(!core->exec[q].program == !core->exec[q].vmem);
        RIG_REQUIRE(queue->state == VTPU_QUEUE_STATE_DISABLED ||
                    queue->state == VTPU_QUEUE_STATE_READY ||
                    queue->state == VTPU_QUEUE_STATE_PREEMPTED ||
                    queue->state == VTPU_QUEUE_STATE_FAULTED);
        RIG_REQUIRE((queue->state == VTPU_QUEUE_STATE_FAULTED) ==
                    (queue->fault.cause != VTPU_FAULT_NONE));
        RIG_REQUIRE(queue->priority <= 2);
        if (queue->state == VTPU_QUEUE_STATE_READY) {
            RIG_REQUIRE(queue->context < VTPU_NUM_CONTEXTS && queue->vector < VTPU_NUM_MSIX);
            RIG_REQUIRE(queue->tail - queue->head <= 1u << queue->ring_log2);
        }
    }
}

void rig_check_works(Rig *rig)
{
    const uint64_t fence = 0x0123456789abcdef;
    uint8_t *entry = rig->system;
    uint64_t seen = 0;

    rig->bus = NULL;
    rig->interlude = NULL;
    rig->dirty = NULL;
    rig->before_instruction = NULL;
    rig->fails = NULL;
    rig->gave_up = false;
    rig->work_left = UINT32_MAX;
    vtpu_core_resume(rig->core);
    vtpu_core_inject(rig->core, VTPU_INJECT_DEAD, 0);
    vtpu_core_inject(rig->core, VTPU_INJECT_RESET_STUCK, 0);
    vtpu_core_inject(rig->core, VTPU_INJECT_DMA_ERROR, 0);
    vtpu_core_inject(rig->core, VTPU_INJECT_FENCE_CORRUPT, 0);
    rig_write(rig, VTPU_REG_CTRL, VTPU_CTRL_RESET, 4);
    rig_run(rig, TRIES);
    RIG_REQUIRE(rig_read(rig, VTPU_REG_STATUS, 4) == 0);

    memset(entry, 0, VTPU_RING_ENTRY);
    entry[VTPU_RING_OP] = VTPU_CMD_NOP;
    entry[VTPU_RING_FLAGS] = VTPU_RING_FLAG_FENCE;
    memcpy(entry + VTPU_RING_FENCE, &fence, sizeof(fence));
    memset(rig->system + 4096, 0, sizeof(fence));
    rig_write(rig, VTPU_REG_Q_RING_BASE, RIG_BUS, 8);
    rig_write(rig, VTPU_REG_Q_FENCE_ADDR, RIG_BUS + 4096, 8);
    rig_write(rig, VTPU_REG_Q_CTRL, VTPU_Q_CTRL_ENABLE, 4);
    rig_write(rig, VTPU_REG_CTRL, VTPU_CTRL_ENABLE, 4);
    vtpu_core_doorbell(rig->core, 0, 1);
    rig_run(rig, TRIES);
    memcpy(&seen, rig->system + 4096, sizeof(seen));
    RIG_REQUIRE(seen == fence);
    RIG_REQUIRE(rig_read(rig, VTPU_REG_Q_HEAD, 4) == 1);
    rig_check(rig);
}

static uint64_t take_table(Rig *rig, Tables *tables)
{
    uint64_t table = tables->next;

    RIG_REQUIRE(table < RIG_HBM_BYTES);
    memset(rig->hbm + table, 0, VTPU_PAGE_BYTES);
    tables->next += VTPU_PAGE_BYTES;
    return table;
}

static void map_page(Rig *rig, Tables *tables, uint64_t va, uint64_t target, uint64_t size,
                     uint64_t bits)
{
    int leaf = size == VTPU_HUGE_PAGE_BYTES ? 1 : 0;

    if (!tables->root) {
        tables->root = take_table(rig, tables);
    }
    uint64_t table = tables->root;
    for (int level = VTPU_PTE_LEVELS - 1;; level--) {
        uint64_t *entry = (uint64_t *)(rig->hbm + table) + (va >> (12 + 9 * level) & 511);
        if (level == leaf) {
            *entry = target | bits | VTPU_PTE_VALID | (leaf ? VTPU_PTE_HUGE : 0);
            return;
        }
        if (!*entry) {
            *entry = take_table(rig, tables) | VTPU_PTE_VALID;
        }
        table = *entry & VTPU_PTE_ADDR_MASK;
    }
}

void rig_map(Rig *rig, Tables *tables, uint64_t va, uint64_t target, uint64_t bytes,
             uint64_t size, uint64_t bits)
{
    for (uint64_t done = 0; done < bytes; done += size) {
        map_page(rig, tables, va + done, target + done, size, bits);
    }
}
