/* SPDX-License-Identifier: MIT */
/*
 * V_ATTN: checks the lists that name cache slots, then runs the kernel over
 * (row, key head) items in the pool. Command thread; arithmetic in the pool.
 */
#include <string.h>

#include "machine.h"

/* Multiply-adds of one part: some microseconds. */
#define PART_WORK 65536
/* At most, for the sake of what rows share: a stop waits for a part. */
#define PART_MOST (1u << 26)
/* Scores that the query heads of one key head keep for a row: bounds the
 * scratch memory, and the one part that cannot be cut. */
#define MOST_SCORES (1u << 22)

typedef struct AttnJob {
    const VtpuKernels *kernels;
    VtpuAttn op;
    uint8_t *scratch;
    size_t scratch_bytes;
} AttnJob;

static void attend(void *arg, uint32_t begin, uint32_t end, unsigned slot)
{
    const AttnJob *job = arg;

    job->kernels->attn(&job->op, job->scratch + slot * job->scratch_bytes, begin, end);
}

static uint32_t element_bytes(uint32_t fmt)
{
    return fmt == VTPU_FMT_F32 ? 4 : 2;
}

static uint64_t slot_bytes(const VtpuAttn *op)
{
    return (uint64_t)op->kv_heads * op->head_dim * element_bytes(op->fmt);
}

static bool check_shape(const VtpuAttn *op, uint64_t num_slots)
{
    return op->heads && op->kv_heads && op->heads % op->kv_heads == 0 && op->head_dim &&
           op->head_dim % 16 == 0 && op->head_dim <= 256 && op->block_size && op->max_blocks &&
           (uint64_t)op->block_size * op->max_blocks <= 1u << 20 && num_slots;
}

/* Row r's table entries: in VMEM, and every slot that its keys use exists. */
static bool check_row(VtpuExec *x, const VtpuIssued *i, const VtpuAttn *op, uint32_t keys,
                      uint32_t table_row, uint64_t info_addr)
{
    uint64_t num_slots = i->v[VTPU_V_ATTN_NUM_SLOTS], tables = i->v[VTPU_V_ATTN_BLOCK_TABLES];
    uint64_t heads_bytes = (uint64_t)op->heads * op->head_dim * 4;

    if (keys == 0) {
        return true;
    }
    if (keys > op->block_size * op->max_blocks ||
        (uint64_t)keys * (op->heads / op->kv_heads) > MOST_SCORES) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_READ, info_addr);
    }
    uint64_t blocks = (keys + op->block_size - 1) / op->block_size;
    uint64_t at = tables + (uint64_t)table_row * op->max_blocks * 4;
    const uint8_t *entries = vtpu_vmem_read(x, at, 1, blocks * 4, 0);
    if (!entries || !vtpu_vmem_apart(x, at, blocks * 4, i->v[VTPU_V_ATTN_DST], op->rows,
                                     heads_bytes, heads_bytes)) {
        return false;
    }
    for (uint64_t b = 0; b < blocks; b++) {
        uint32_t block;
        memcpy(&block, entries + b * 4, 4);
        uint64_t used = b + 1 < blocks ? op->block_size : keys - b * op->block_size;
        if ((uint64_t)block * op->block_size + used > num_slots) {
            return vtpu_fault(x, VTPU_FAULT_INDEX_RANGE, VTPU_ACCESS_READ, at + b * 4);
        }
    }
    return true;
}

/* Checks every row; *work: multiply-adds of all. */
static bool check_lists(VtpuExec *x, const VtpuIssued *i, const VtpuAttn *op, uint64_t *work)
{
    uint64_t keys = 0, checked_keys = 0;
    uint32_t checked_row = 0;

    for (uint32_t r = 0; r < op->rows; r++) {
        if (vtpu_stopped(x->core)) {
            return false;
        }
        uint32_t row_keys = op->row_info[2 * r], row = op->row_info[2 * r + 1];
        /* A prompt's rows share a table: check only what is new. */
        if (row != checked_row || row_keys > checked_keys) {
            if (!check_row(x, i, op, row_keys, row, i->v[VTPU_V_ATTN_ROW_INFO] + r * 8ull)) {
                return false;
            }
            checked_row = row;
            checked_keys = row_keys;
        }
        keys += row_keys;
    }
    *work = keys * op->heads * op->head_dim * 2;
    return true;
}

static bool run_items(VtpuExec *x, AttnJob *job, uint64_t work)
{
    uint32_t items = job->op.rows * job->op.kv_heads;
    uint64_t each = work / items + 1;
    uint64_t grain = PART_WORK / each + 1, most = PART_MOST / each + 1;
    uint32_t share = items / (2 * x->core->threads) + 1;

    /* Enough items to share what neighbouring rows have in common. */
    grain = grain < VTPU_ATTN_GRAIN ? VTPU_ATTN_GRAIN : grain;
    grain = grain < share ? grain : share;
    grain = grain < most ? grain : most;

    job->scratch_bytes = (job->kernels->attn_scratch_bytes(&job->op) + 63) & ~(size_t)63;
    job->scratch = vtpu_buffer(x, VTPU_BUFFER_THREADS, job->scratch_bytes * x->core->threads);
    return job->scratch &&
           vtpu_pool_for(x->core->pool, items, (uint32_t)grain, attend, job);
}

static bool copy_slots(VtpuExec *x, uint64_t cache, const VtpuAttn *op, const uint32_t *blocks,
                       uint32_t keys, uint8_t *to)
{
    uint64_t bytes = slot_bytes(op);

    for (uint32_t done = 0; done < keys; done += op->block_size) {
        uint64_t used = keys - done < op->block_size ? keys - done : op->block_size;
        uint64_t first = (uint64_t)blocks[done / op->block_size] * op->block_size;
        if (vtpu_stopped(x->core) ||
            !vtpu_mem_read(x, cache + first * bytes, to + done * bytes, used * bytes,
                           VTPU_ACCESS_READ)) {
            return false;
        }
    }
    return true;
}

/*
 * Caches that are not one piece of HBM: for each row, the keys and values that
 * it uses are copied together and its table renumbered. Slow and rare.
 */
static bool attend_scattered(VtpuExec *x, const VtpuIssued *i, const AttnJob *all)
{
    uint64_t row_floats = (uint64_t)all->op.heads * all->op.head_dim;

    for (uint32_t r = 0; r < all->op.rows; r++) {
        uint32_t info[2] = { all->op.row_info[2 * r], 0 };
        uint32_t blocks = (info[0] + all->op.block_size - 1) / all->op.block_size;
        uint64_t bytes = (uint64_t)info[0] * slot_bytes(&all->op);
        if (bytes > x->core->hbm_bytes) { /* only by naming slots twice */
            return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_READ,
                              i->v[VTPU_V_ATTN_ROW_INFO] + r * 8ull);
        }
        uint8_t *copy = vtpu_buffer(x, VTPU_BUFFER_BOUNCE, 2 * bytes);
        uint32_t *table = (uint32_t *)vtpu_buffer(x, VTPU_BUFFER_LISTS,
                                                  all->op.max_blocks * 4ull);
        if (!copy || !table) {
            return false;
        }
        const uint32_t *from = all->op.block_tables +
                               (size_t)all->op.row_info[2 * r + 1] * all->op.max_blocks;
        if (!copy_slots(x, i->v[VTPU_V_ATTN_K_CACHE], &all->op, from, info[0], copy) ||
            !copy_slots(x, i->v[VTPU_V_ATTN_V_CACHE], &all->op, from, info[0], copy + bytes)) {
            return false;
        }
        for (uint32_t b = 0; b < blocks; b++) {
            table[b] = b;
        }
        AttnJob one = *all;
        one.op.rows = 1;
        one.op.dst += r * row_floats;
        one.op.q += r * row_floats;
        one.op.row_info = info;
        one.op.block_tables = table;
        one.op.k_cache = copy;
        one.op.v_cache = copy + bytes;
        if (!run_items(x, &one, info[0] * row_floats * 2)) {
            return false;
        }
    }
    return true;
}

bool vtpu_attn_execute(VtpuExec *x, const VtpuIssued *i)
{
    const uint64_t *v = i->v;
    uint64_t imm = i->in->in.imm64, num_slots = v[VTPU_V_ATTN_NUM_SLOTS], work;
    AttnJob job = {
        .kernels = x->core->kernels,
        .op = {
            .stop = &x->core->stop,
            .rows = (uint32_t)v[VTPU_V_ATTN_ROWS],
            .heads = VTPU_V_ATTN_GET_HEADS(imm), .kv_heads = VTPU_V_ATTN_GET_KV_HEADS(imm),
            .head_dim = VTPU_V_ATTN_GET_HEAD_DIM(imm),
            .block_size = VTPU_V_ATTN_GET_BLOCK_SIZE(imm),
            .max_blocks = VTPU_V_ATTN_GET_MAX_BLOCKS(imm), .fmt = i->in->in.fmt_a,
        },
    };
    VtpuAttn *op = &job.op;

    memcpy(&op->scale, &i->in->in.aux, 4);
    if (!check_shape(op, num_slots)) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, imm);
    }
    if (op->rows == 0) {
        return true;
    }
    uint64_t row_bytes = (uint64_t)op->heads * op->head_dim * 4;
    if (!(op->dst = (float *)vtpu_vmem_write(x, v[VTPU_V_ATTN_DST], op->rows, row_bytes,
                                             row_bytes)) ||
        !(op->q = (const float *)vtpu_vmem_read(x, v[VTPU_V_ATTN_Q], op->rows, row_bytes,
                                                row_bytes)) ||
        !(op->row_info = (const uint32_t *)vtpu_vmem_read(x, v[VTPU_V_ATTN_ROW_INFO], op->rows,
                                                          8, 8)) ||
        !(op->block_tables = (const uint32_t *)vtpu_vmem_read(x, v[VTPU_V_ATTN_BLOCK_TABLES],
                                                              0, 0, 0)) ||
        !vtpu_vmem_apart(x, v[VTPU_V_ATTN_ROW_INFO], op->rows * 8ull, v[VTPU_V_ATTN_DST],
                         op->rows, row_bytes, row_bytes) ||
        !check_lists(x, i, op, &work)) {
        return false;
    }
    uint64_t bytes = num_slots * slot_bytes(op);
    op->k_cache = vtpu_mmu_direct(x, v[VTPU_V_ATTN_K_CACHE], bytes, VTPU_ACCESS_READ);
    op->v_cache = vtpu_mmu_direct(x, v[VTPU_V_ATTN_V_CACHE], bytes, VTPU_ACCESS_READ);
    vtpu_stat_add(&x->core->stat_hbm_bytes,
                  work / (2ull * op->heads) * op->kv_heads * element_bytes(op->fmt) * 2);
    return op->k_cache && op->v_cache ? run_items(x, &job, work) : attend_scattered(x, i, &job);
}
