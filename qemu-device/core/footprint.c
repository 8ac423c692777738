/* SPDX-License-Identifier: MIT */
#include "footprint.h"

#include "machine.h"

typedef struct Sink {
    VtpuAccessFn *fn;
    void *arg;
} Sink;

static void put(const Sink *sink, bool vmem, bool write, uint64_t addr, uint64_t rows,
                uint64_t row_bytes, uint64_t stride)
{
    if (rows == 0 || row_bytes == 0) {
        return;
    }
    if (stride == row_bytes) {
        row_bytes *= rows;
        rows = 1;
    }
    VtpuAccess access = { vmem, write, addr, rows, row_bytes, rows > 1 ? stride : 0 };
    sink->fn(sink->arg, &access);
}

static void vmem_read(const Sink *sink, uint64_t addr, uint64_t rows, uint64_t row_bytes,
                      uint64_t stride)
{
    put(sink, true, false, addr, rows, row_bytes, stride);
}

static void vmem_write(const Sink *sink, uint64_t addr, uint64_t rows, uint64_t row_bytes,
                       uint64_t stride)
{
    put(sink, true, true, addr, rows, row_bytes, stride);
}

static const uint32_t *list(VtpuExec *x, const Sink *sink, uint64_t addr, uint64_t words)
{
    vmem_read(sink, addr, 1, words * 4, 0);
    return (const uint32_t *)vtpu_vmem_read(x, addr, 1, words * 4, 0);
}

/* Units of a table that a list names, in its order; runs of neighbours as one piece. */
static void units(const Sink *sink, bool vmem, bool write, uint64_t base, uint64_t unit_bytes,
                  uint64_t stride, uint32_t divisor, const uint32_t *index, uint64_t count)
{
    for (uint64_t i = 0, run; i < count; i += run) {
        run = 1;
        if (index[i] == UINT32_MAX) {
            continue;
        }
        uint64_t first = index[i] / divisor;
        while (stride == unit_bytes && i + run < count && index[i + run] != UINT32_MAX &&
               index[i + run] / divisor == first + run) {
            run++;
        }
        put(sink, vmem, write, base + first * stride, 1, run * unit_bytes, 0);
    }
}

static uint64_t element_bytes(uint32_t fmt)
{
    return fmt == VTPU_FMT_F32 ? 4 : 2;
}

static void gather(VtpuExec *x, const VtpuIssued *i, const Sink *sink)
{
    const uint64_t *v = i->v;
    uint64_t count = v[VTPU_DMA_GATHER_COUNT], width = v[VTPU_DMA_GATHER_WIDTH];
    uint32_t fmt = i->in->in.fmt_a;
    bool tiled = vtpu_tile_cols(fmt) != 0;
    uint64_t unit = tiled ? vtpu_tile_row_bytes(fmt, (uint32_t)width) : width * element_bytes(fmt);
    const uint32_t *index = list(x, sink, v[VTPU_DMA_GATHER_INDEX], count);

    vmem_write(sink, v[VTPU_DMA_GATHER_DST], count, width * 4, v[VTPU_DMA_GATHER_DST_STRIDE]);
    units(sink, false, false, v[VTPU_DMA_GATHER_TABLE], unit, unit, tiled ? VTPU_TILE_ROWS : 1,
          index, count);
}

static void scatter(VtpuExec *x, const VtpuIssued *i, const Sink *sink)
{
    const uint64_t *v = i->v;
    uint64_t count = v[VTPU_DMA_SCATTER_COUNT], width = v[VTPU_DMA_SCATTER_WIDTH];
    uint64_t unit = width * element_bytes(i->in->in.fmt_a);
    const uint32_t *index = list(x, sink, v[VTPU_DMA_SCATTER_INDEX], count);

    vmem_read(sink, v[VTPU_DMA_SCATTER_SRC], count, width * 4, v[VTPU_DMA_SCATTER_SRC_STRIDE]);
    units(sink, false, true, v[VTPU_DMA_SCATTER_TABLE], unit, unit, 1, index, count);
}

static void matmul(const VtpuIssued *i, const Sink *sink)
{
    const uint64_t *v = i->v;
    uint64_t m = v[VTPU_MATMUL_M], n = v[VTPU_MATMUL_N], k = v[VTPU_MATMUL_K];

    if (m == 0) {
        return;
    }
    vmem_read(sink, v[VTPU_MATMUL_SRC], m, k * 4, v[VTPU_MATMUL_SRC_STRIDE]);
    if (i->in->in.flags & VTPU_MATMUL_FLAG_ACCUMULATE) {
        vmem_read(sink, v[VTPU_MATMUL_DST], m, n * 4, v[VTPU_MATMUL_DST_STRIDE]);
    }
    vmem_write(sink, v[VTPU_MATMUL_DST], m, n * 4, v[VTPU_MATMUL_DST_STRIDE]);
    put(sink, false, false, v[VTPU_MATMUL_WEIGHT], 1,
        n / VTPU_TILE_ROWS * vtpu_tile_row_bytes(i->in->in.fmt_a, (uint32_t)k), 0);
}

static void take(VtpuExec *x, const VtpuIssued *i, const Sink *sink)
{
    const uint64_t *v = i->v;
    uint64_t rows = v[VTPU_V_TAKE_ROWS], bytes = v[VTPU_V_TAKE_WIDTH] * 4;
    const uint32_t *index = list(x, sink, v[VTPU_V_TAKE_INDEX], rows);

    vmem_write(sink, v[VTPU_V_TAKE_DST], rows, bytes, v[VTPU_V_TAKE_DST_STRIDE]);
    units(sink, true, false, v[VTPU_V_TAKE_SRC], bytes, v[VTPU_V_TAKE_SRC_STRIDE], 1, index, rows);
}

/* Rows in a row of one sequence share its keys: each is read once, for the longest. */
static void attention(VtpuExec *x, const VtpuIssued *i, const Sink *sink)
{
    const uint64_t *v = i->v;
    uint64_t imm = i->in->in.imm64, rows = v[VTPU_V_ATTN_ROWS];
    uint64_t row_bytes = VTPU_V_ATTN_GET_HEADS(imm) * VTPU_V_ATTN_GET_HEAD_DIM(imm) * 4;
    uint64_t block = VTPU_V_ATTN_GET_BLOCK_SIZE(imm), blocks = VTPU_V_ATTN_GET_MAX_BLOCKS(imm);
    uint64_t slot = VTPU_V_ATTN_GET_KV_HEADS(imm) * VTPU_V_ATTN_GET_HEAD_DIM(imm) *
                    element_bytes(i->in->in.fmt_a);
    const uint32_t *info = list(x, sink, v[VTPU_V_ATTN_ROW_INFO], rows * 2);

    vmem_write(sink, v[VTPU_V_ATTN_DST], rows, row_bytes, row_bytes);
    vmem_read(sink, v[VTPU_V_ATTN_Q], rows, row_bytes, row_bytes);
    for (uint64_t r = 0, keys; r < rows; r++) {
        uint32_t table = info[2 * r + 1];
        for (keys = info[2 * r]; r + 1 < rows && info[2 * r + 3] == table; r++) {
            keys = info[2 * r + 2] > keys ? info[2 * r + 2] : keys;
        }
        uint64_t used = (keys + block - 1) / block, last = keys - (used ? used - 1 : 0) * block;
        if (used == 0) {
            continue;
        }
        const uint32_t *entry = list(x, sink, v[VTPU_V_ATTN_BLOCK_TABLES] + table * blocks * 4,
                                     used);
        for (unsigned cache = VTPU_V_ATTN_K_CACHE; cache <= VTPU_V_ATTN_V_CACHE; cache++) {
            units(sink, false, false, v[cache], block * slot, block * slot, 1, entry, used - 1);
            put(sink, false, false, v[cache] + entry[used - 1] * block * slot, 1, last * slot, 0);
        }
    }
}

static void rows_of_f32(const VtpuIssued *i, const Sink *sink)
{
    const uint64_t *v = i->v;
    uint64_t rows, bytes;

    switch (i->in->in.opcode) {
    case VTPU_OP_V_RMSNORM:
        rows = v[VTPU_V_RMSNORM_ROWS];
        bytes = v[VTPU_V_RMSNORM_WIDTH] * 4;
        vmem_write(sink, v[VTPU_V_RMSNORM_DST], rows, bytes, v[VTPU_V_RMSNORM_DST_STRIDE]);
        vmem_read(sink, v[VTPU_V_RMSNORM_SRC], rows, bytes, v[VTPU_V_RMSNORM_SRC_STRIDE]);
        vmem_read(sink, v[VTPU_V_RMSNORM_WEIGHT], rows != 0, bytes, 0);
        break;
    case VTPU_OP_V_ROPE:
        rows = v[VTPU_V_ROPE_ROWS];
        bytes = v[VTPU_V_ROPE_HEADS] * v[VTPU_V_ROPE_HEAD_DIM] * 4;
        vmem_write(sink, v[VTPU_V_ROPE_DST], rows, bytes, v[VTPU_V_ROPE_DST_STRIDE]);
        vmem_read(sink, v[VTPU_V_ROPE_SRC], rows, bytes, v[VTPU_V_ROPE_SRC_STRIDE]);
        vmem_read(sink, v[VTPU_V_ROPE_COS_SIN], rows, v[VTPU_V_ROPE_HEAD_DIM] * 4,
                  v[VTPU_V_ROPE_HEAD_DIM] * 4);
        break;
    case VTPU_OP_V_SAMPLE:
        rows = v[VTPU_V_SAMPLE_ROWS];
        vmem_write(sink, v[VTPU_V_SAMPLE_DST], rows, VTPU_SAMPLE_RESULT_BYTES,
                   VTPU_SAMPLE_RESULT_BYTES);
        vmem_read(sink, v[VTPU_V_SAMPLE_LOGITS], rows, v[VTPU_V_SAMPLE_VOCAB] * 4,
                  v[VTPU_V_SAMPLE_LOGITS_STRIDE]);
        vmem_read(sink, v[VTPU_V_SAMPLE_PARAMS], rows, VTPU_SAMPLE_PARAMS_BYTES,
                  VTPU_SAMPLE_PARAMS_BYTES);
        break;
    default: /* V_ADD, V_MUL and V_SILU_MUL name their operands in the same places */
        rows = v[VTPU_V_ADD_ROWS];
        bytes = v[VTPU_V_ADD_WIDTH] * 4;
        vmem_write(sink, v[VTPU_V_ADD_DST], rows, bytes, v[VTPU_V_ADD_DST_STRIDE]);
        vmem_read(sink, v[VTPU_V_ADD_A], rows, bytes, v[VTPU_V_ADD_A_STRIDE]);
        vmem_read(sink, v[VTPU_V_ADD_B], rows, bytes, v[VTPU_V_ADD_B_STRIDE]);
        break;
    }
}

void vtpu_footprint(VtpuExec *x, const VtpuIssued *i, VtpuAccessFn *fn, void *arg)
{
    const Sink sink = { fn, arg };
    const uint64_t *v = i->v;
    bool wide = i->in->in.mode == VTPU_LD_MODE_U64;

    switch (i->in->in.opcode) {
    case VTPU_OP_LD:
        put(&sink, false, false, v[VTPU_LD_ADDR], 1, wide ? 8 : 4, 0);
        break;
    case VTPU_OP_ST:
        put(&sink, false, true, v[VTPU_ST_ADDR], 1, wide ? 8 : 4, 0);
        break;
    case VTPU_OP_LDV:
        vmem_read(&sink, v[VTPU_LDV_ADDR], 1, 4, 0);
        break;
    case VTPU_OP_DMA_LOAD:
    case VTPU_OP_DMA_STORE: {
        bool load = i->in->in.opcode == VTPU_OP_DMA_LOAD;
        put(&sink, load, true, v[VTPU_DMA_LOAD_DST], v[VTPU_DMA_LOAD_ROWS],
            v[VTPU_DMA_LOAD_ROW_BYTES], v[VTPU_DMA_LOAD_DST_STRIDE]);
        put(&sink, !load, false, v[VTPU_DMA_LOAD_SRC], v[VTPU_DMA_LOAD_ROWS],
            v[VTPU_DMA_LOAD_ROW_BYTES], v[VTPU_DMA_LOAD_SRC_STRIDE]);
        break;
    }
    case VTPU_OP_REMOTE_STORE: /* what it writes is another chip's */
        put(&sink, i->in->in.mode == VTPU_REMOTE_STORE_MODE_VMEM, false,
            v[VTPU_REMOTE_STORE_SRC], v[VTPU_REMOTE_STORE_ROWS],
            v[VTPU_REMOTE_STORE_ROW_BYTES], v[VTPU_REMOTE_STORE_SRC_STRIDE]);
        break;
    case VTPU_OP_DMA_GATHER:
        gather(x, i, &sink);
        break;
    case VTPU_OP_DMA_SCATTER:
        scatter(x, i, &sink);
        break;
    case VTPU_OP_MATMUL:
        matmul(i, &sink);
        break;
    case VTPU_OP_V_TAKE:
        take(x, i, &sink);
        break;
    case VTPU_OP_V_ATTN:
        attention(x, i, &sink);
        break;
    case VTPU_OP_V_RMSNORM:
    case VTPU_OP_V_ADD:
    case VTPU_OP_V_MUL:
    case VTPU_OP_V_SILU_MUL:
    case VTPU_OP_V_ROPE:
    case VTPU_OP_V_SAMPLE:
        rows_of_f32(i, &sink);
        break;
    default:
        break; /* registers only */
    }
}
