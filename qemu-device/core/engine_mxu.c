/* SPDX-License-Identifier: MIT */
/*
 * The matrix engine: quantises the activations once, then streams the weight
 * tiles through the pool. Command thread; arithmetic in the pool.
 */
#include "machine.h"

/* Activations of one pass; more rows take several passes over the weights. */
#define PASS_BYTES (32u << 20)

typedef struct MatmulJob {
    VtpuExec *x;
    const VtpuProduct *product;
    VtpuMatmul op;
    uint8_t *quantised;
    const uint8_t *src;
    uint64_t src_stride;
} MatmulJob;

static void quantise_rows(void *arg, uint32_t begin, uint32_t end, unsigned slot)
{
    const MatmulJob *job = arg;

    (void)slot;
    job->product->quantise(job->quantised, (const float *)job->src, job->src_stride, job->op.k,
                           job->op.m, begin, end);
}

static void multiply(void *arg, uint32_t begin, uint32_t end, unsigned slot)
{
    const MatmulJob *job = arg;

    (void)slot;
    job->product->matmul(&job->op, begin, end);
}

/* Tile rows a part computes: several microseconds, several parts a thread, and no few more
 * than that, which would leave the other threads without. */
static uint32_t part_rows(const MatmulJob *job, uint64_t tile_row_bytes)
{
    const VtpuMatmul *op = &job->op;
    uint64_t tile_rows = op->n / VTPU_TILE_ROWS;
    uint64_t work = tile_row_bytes * (1 + op->m / 4);
    uint64_t rows = (48u << 10) / work + 1;
    uint64_t parts = 4 * job->x->core->threads;
    uint64_t most = (tile_rows + parts - 1) / parts;
    uint32_t grain = VTPU_MATMUL_GRAIN;

    if (job->product->call) {
        rows = job->product->call / ((uint64_t)op->m * op->k * VTPU_TILE_ROWS) + 1;
        grain = VTPU_TILES_GRAIN;
    }
    rows = rows < most ? rows : most;
    return (uint32_t)((rows + grain - 1) / grain * grain);
}

/* Weights that are not one piece of HBM: a row of tiles at a time. */
static bool multiply_scattered(MatmulJob *job, uint64_t va, uint64_t tile_row_bytes)
{
    uint32_t tile_rows = job->op.n / VTPU_TILE_ROWS;
    VtpuMatmul one = job->op;

    one.n = VTPU_TILE_ROWS;
    for (uint32_t t = 0; t < tile_rows; t++) {
        one.weight = vtpu_mmu_view(job->x, va + t * tile_row_bytes, tile_row_bytes,
                                   VTPU_BUFFER_BOUNCE);
        if (!one.weight || vtpu_stopped(job->x->core)) {
            return false;
        }
        one.dst = job->op.dst + (size_t)t * VTPU_TILE_ROWS;
        job->product->matmul(&one, 0, 1);
    }
    return true;
}

static bool pass(MatmulJob *job, uint64_t va)
{
    VtpuExec *x = job->x;
    VtpuPool *pool = x->core->pool;
    uint64_t tile_row_bytes = vtpu_tile_row_bytes(job->op.fmt, job->op.k);
    uint32_t tile_rows = job->op.n / VTPU_TILE_ROWS;

    if (!vtpu_pool_for(pool, job->op.m, 16384 / (job->op.k + 1) + 1, quantise_rows, job)) {
        return false;
    }
    job->op.weight = vtpu_mmu_direct(x, va, tile_rows * tile_row_bytes, VTPU_ACCESS_READ);
    vtpu_stat_add(&x->core->stat_hbm_bytes, tile_rows * tile_row_bytes);
    return job->op.weight
               ? vtpu_pool_for(pool, tile_rows, part_rows(job, tile_row_bytes),
                               multiply, job)
               : multiply_scattered(job, va, tile_row_bytes);
}

bool vtpu_mxu_execute(VtpuExec *x, const VtpuIssued *i)
{
    const uint64_t *v = i->v;
    uint64_t m = v[VTPU_MATMUL_M], n = v[VTPU_MATMUL_N], k = v[VTPU_MATMUL_K];
    uint64_t dst_stride = v[VTPU_MATMUL_DST_STRIDE], src_stride = v[VTPU_MATMUL_SRC_STRIDE];
    uint32_t fmt = i->in->in.fmt_a;
    const VtpuProduct *product = vtpu_product(x->core->kernels, fmt);

    if (n % VTPU_TILE_ROWS || k == 0 || k % vtpu_tile_cols(fmt) ||
        (fmt == VTPU_FMT_I8 && k > VTPU_MATMUL_I8_MAX_K)) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE,
                          n % VTPU_TILE_ROWS ? n : k);
    }
    uint8_t *dst = vtpu_vmem_write(x, v[VTPU_MATMUL_DST], m, n * 4, dst_stride);
    const uint8_t *src = dst ? vtpu_vmem_read(x, v[VTPU_MATMUL_SRC], m, k * 4, src_stride) : NULL;
    if (!src || m == 0 || n == 0) {
        return src != NULL;
    }
    /* Rows are quantised pass by pass: a later one must not read results. */
    uint64_t rows = PASS_BYTES / product->quantise_bytes((uint32_t)k, 16) * 16;
    rows = rows == 0 ? 16 : rows;
    rows = rows < m ? rows : m;
    if (rows < m && !vtpu_vmem_apart(x, v[VTPU_MATMUL_SRC], (m - 1) * src_stride + k * 4,
                                     v[VTPU_MATMUL_DST], m, n * 4, dst_stride)) {
        return false;
    }
    uint8_t *quantised = vtpu_buffer(x, VTPU_BUFFER_QUANTISED,
                                     product->quantise_bytes((uint32_t)k, (uint32_t)rows));
    if (!quantised) {
        return false;
    }
    for (uint64_t done = 0; done < m; done += rows) {
        uint64_t now = m - done < rows ? m - done : rows;
        MatmulJob job = {
            x, product,
            {
                .dst = (float *)(dst + done * dst_stride), .dst_stride = dst_stride,
                .quantised = quantised, .m = (uint32_t)now, .n = (uint32_t)n,
                .k = (uint32_t)k, .fmt = fmt,
                .accumulate = i->in->in.flags & VTPU_MATMUL_FLAG_ACCUMULATE,
            },
            quantised, src + done * src_stride, src_stride,
        };
        if (!pass(&job, v[VTPU_MATMUL_WEIGHT])) {
            return false;
        }
    }
    return true;
}
