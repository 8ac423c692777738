/* SPDX-License-Identifier: MIT */
/*
 * The DMA engine: strided copies between global memory and VMEM, gather and
 * scatter of table rows. Command thread; copies and conversions in the pool.
 */
#include <string.h>

#include "machine.h"

/* Bytes a part copies: small enough to balance, large against its claim. */
#define COPY_PART (128u << 10)

typedef struct CopyJob {
    uint8_t *dst;
    const uint8_t *src;
    uint64_t rows, row_bytes, dst_stride, src_stride, part;
} CopyJob;

static void copy_rows(void *arg, uint32_t begin, uint32_t end, unsigned slot)
{
    const CopyJob *job = arg;

    (void)slot;
    for (uint64_t r = begin; r < end; r++) {
        memmove(job->dst + r * job->dst_stride, job->src + r * job->src_stride, job->row_bytes);
    }
}

static void copy_bytes(void *arg, uint32_t begin, uint32_t end, unsigned slot)
{
    const CopyJob *job = arg;
    uint64_t from = begin * job->part, to = end * job->part;

    (void)slot;
    to = to < job->row_bytes ? to : job->row_bytes;
    memcpy(job->dst + from, job->src + from, to - from);
}

/* VMEM and HBM never overlap: rows may be copied in any order. */
static bool copy_parallel(VtpuExec *x, CopyJob *job)
{
    if (job->rows == 1) {
        job->part = COPY_PART;
        uint64_t parts = (job->row_bytes + COPY_PART - 1) / COPY_PART;
        return vtpu_pool_for(x->core->pool, (uint32_t)parts, 1, copy_bytes, job);
    }
    uint64_t grain = COPY_PART / job->row_bytes + 1;
    return vtpu_pool_for(x->core->pool, (uint32_t)job->rows, (uint32_t)grain, copy_rows, job);
}

static bool dma_copy(VtpuExec *x, const VtpuIssued *i, bool to_vmem)
{
    /* LOAD and STORE name their operands in the same places. */
    uint64_t rows = i->v[VTPU_DMA_LOAD_ROWS], row_bytes = i->v[VTPU_DMA_LOAD_ROW_BYTES];
    uint64_t dst_stride = i->v[VTPU_DMA_LOAD_DST_STRIDE];
    uint64_t src_stride = i->v[VTPU_DMA_LOAD_SRC_STRIDE];
    uint64_t va = i->v[to_vmem ? VTPU_DMA_LOAD_SRC : VTPU_DMA_STORE_DST];
    uint64_t vm = i->v[to_vmem ? VTPU_DMA_LOAD_DST : VTPU_DMA_STORE_SRC];
    uint64_t va_stride = to_vmem ? src_stride : dst_stride;
    uint64_t vm_stride = to_vmem ? dst_stride : src_stride;
    uint32_t access = to_vmem ? VTPU_ACCESS_READ : VTPU_ACCESS_WRITE;

    if (row_bytes & 3) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, row_bytes);
    }
    uint8_t *vmem = to_vmem ? vtpu_vmem_write(x, vm, rows, row_bytes, vm_stride)
                            : vtpu_vmem_read(x, vm, rows, row_bytes, vm_stride);
    if (!vmem || rows == 0 || row_bytes == 0) {
        return vmem != NULL;
    }
    if (!to_vmem && rows > 1 && va_stride < row_bytes) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_WRITE, va);
    }
    if (va_stride == row_bytes && vm_stride == row_bytes) {
        row_bytes *= rows;
        rows = 1;
    }
    uint8_t *host = vtpu_mmu_direct(x, va, (rows - 1) * va_stride + row_bytes, access);
    vtpu_stat_add(&x->core->stat_hbm_bytes, rows * row_bytes);
    if (host) {
        CopyJob job = {
            to_vmem ? vmem : host, to_vmem ? host : vmem, rows, row_bytes,
            to_vmem ? vm_stride : va_stride, to_vmem ? va_stride : vm_stride, 0,
        };
        if (!to_vmem) {
            vtpu_dirty(x, host, (rows - 1) * va_stride + row_bytes);
        }
        return copy_parallel(x, &job);
    }
    for (uint64_t r = 0; r < rows; r++, va += va_stride, vmem += vm_stride) {
        if (vtpu_stopped(x->core) ||
            !(to_vmem ? vtpu_mem_read(x, va, vmem, row_bytes, VTPU_ACCESS_READ)
                      : vtpu_mem_write(x, va, vmem, row_bytes))) {
            return false;
        }
    }
    return true;
}

static uint32_t element_bytes(uint32_t fmt)
{
    return fmt == VTPU_FMT_F32 ? 4 : 2;
}

typedef struct GatherJob {
    const VtpuKernels *kernels;
    uint8_t *dst;
    const uint8_t *table;
    const uint32_t *index;
    uint64_t dst_stride, unit_bytes; /* a table row, or a row of tiles */
    uint32_t width, fmt;
    bool tiled;
} GatherJob;

static void gather_rows(void *arg, uint32_t begin, uint32_t end, unsigned slot)
{
    const GatherJob *job = arg;

    (void)slot;
    for (uint32_t r = begin; r < end; r++) {
        uint32_t row = job->index[r];
        uint64_t unit = job->tiled ? row / VTPU_TILE_ROWS : row;
        job->kernels->gather_row((float *)(job->dst + r * job->dst_stride),
                                 job->table + unit * job->unit_bytes,
                                 job->tiled ? row % VTPU_TILE_ROWS : 0, job->width, job->fmt);
    }
}

/* Rows one by one, through a copy where the table is not one piece of HBM. */
static bool gather_scattered(VtpuExec *x, GatherJob job, uint64_t va, uint64_t count)
{
    for (uint64_t r = 0; r < count; r++) {
        uint32_t row = job.index[r];
        uint64_t unit = job.tiled ? row / VTPU_TILE_ROWS : row;
        const uint8_t *from = vtpu_mmu_view(x, va + unit * job.unit_bytes, job.unit_bytes,
                                            VTPU_BUFFER_BOUNCE);
        if (!from || vtpu_stopped(x->core)) {
            return false;
        }
        job.kernels->gather_row((float *)(job.dst + r * job.dst_stride), from,
                                job.tiled ? row % VTPU_TILE_ROWS : 0, job.width, job.fmt);
    }
    return true;
}

static bool gather(VtpuExec *x, const VtpuIssued *i)
{
    const uint64_t *v = i->v;
    uint64_t count = v[VTPU_DMA_GATHER_COUNT], width = v[VTPU_DMA_GATHER_WIDTH];
    uint64_t table_rows = v[VTPU_DMA_GATHER_TABLE_ROWS], va = v[VTPU_DMA_GATHER_TABLE];
    uint64_t dst_stride = v[VTPU_DMA_GATHER_DST_STRIDE];
    uint32_t fmt = i->in->in.fmt_a;
    uint32_t cols = vtpu_tile_cols(fmt);
    bool tiled = cols != 0;

    if ((dst_stride & 3) || (tiled && (width % cols || table_rows % VTPU_TILE_ROWS))) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, width);
    }
    uint8_t *dst = vtpu_vmem_write(x, v[VTPU_DMA_GATHER_DST], count, width * 4, dst_stride);
    const uint32_t *index = dst ? (const uint32_t *)vtpu_vmem_read(
                                      x, v[VTPU_DMA_GATHER_INDEX], 1, count * 4, 0) : NULL;
    if (!index || !vtpu_vmem_apart(x, v[VTPU_DMA_GATHER_INDEX], count * 4,
                                   v[VTPU_DMA_GATHER_DST], count, width * 4, dst_stride)) {
        return false;
    }
    for (uint64_t r = 0; r < count; r++) {
        if (index[r] >= table_rows) {
            return vtpu_fault(x, VTPU_FAULT_INDEX_RANGE, VTPU_ACCESS_READ,
                              v[VTPU_DMA_GATHER_INDEX] + r * 4);
        }
    }
    if (count == 0 || width == 0) {
        return true;
    }
    GatherJob job = {
        x->core->kernels, dst, NULL, index, dst_stride,
        tiled ? vtpu_tile_row_bytes(fmt, (uint32_t)width) : width * element_bytes(fmt),
        (uint32_t)width, fmt, tiled,
    };
    uint64_t units = tiled ? table_rows / VTPU_TILE_ROWS : table_rows;
    job.table = vtpu_mmu_direct(x, va, units * job.unit_bytes, VTPU_ACCESS_READ);
    vtpu_stat_add(&x->core->stat_hbm_bytes,
                  count * job.unit_bytes / (tiled ? VTPU_TILE_ROWS : 1));
    if (!job.table) {
        return gather_scattered(x, job, va, count);
    }
    return vtpu_pool_for(x->core->pool, (uint32_t)count, (uint32_t)(16384 / width + 1),
                         gather_rows, &job);
}

/* In order on one thread: of two rows with the same index the later one stays. */
static bool scatter(VtpuExec *x, const VtpuIssued *i)
{
    const uint64_t *v = i->v;
    uint64_t count = v[VTPU_DMA_SCATTER_COUNT], width = v[VTPU_DMA_SCATTER_WIDTH];
    uint64_t table_rows = v[VTPU_DMA_SCATTER_TABLE_ROWS];
    uint64_t src_stride = v[VTPU_DMA_SCATTER_SRC_STRIDE];
    uint32_t fmt = i->in->in.fmt_a;

    if (src_stride & 3) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, src_stride);
    }
    const uint8_t *src = vtpu_vmem_read(x, v[VTPU_DMA_SCATTER_SRC], count, width * 4, src_stride);
    const uint32_t *index = src ? (const uint32_t *)vtpu_vmem_read(
                                      x, v[VTPU_DMA_SCATTER_INDEX], 1, count * 4, 0) : NULL;
    if (!index) {
        return false;
    }
    for (uint64_t r = 0; r < count; r++) {
        if (index[r] >= table_rows && index[r] != UINT32_MAX) {
            return vtpu_fault(x, VTPU_FAULT_INDEX_RANGE, VTPU_ACCESS_WRITE,
                              v[VTPU_DMA_SCATTER_INDEX] + r * 4);
        }
    }
    uint64_t row_bytes = width * element_bytes(fmt);
    for (uint64_t r = 0; row_bytes && r < count; r++) {
        if (index[r] == UINT32_MAX) {
            continue;
        }
        if (vtpu_stopped(x->core)) {
            return false;
        }
        const float *from = (const float *)(src + r * src_stride);
        uint64_t va = v[VTPU_DMA_SCATTER_TABLE] + index[r] * row_bytes;
        uint8_t *to = vtpu_mmu_direct(x, va, row_bytes, VTPU_ACCESS_WRITE);
        if (to) {
            x->core->kernels->scatter_row(to, from, (uint32_t)width, fmt);
            vtpu_dirty(x, to, row_bytes);
            continue;
        }
        uint8_t *copy = vtpu_buffer(x, VTPU_BUFFER_BOUNCE, row_bytes);
        if (!copy) {
            return false;
        }
        x->core->kernels->scatter_row(copy, from, (uint32_t)width, fmt);
        if (!vtpu_mem_write(x, va, copy, row_bytes)) {
            return false;
        }
    }
    vtpu_stat_add(&x->core->stat_hbm_bytes, count * row_bytes);
    return true;
}

bool vtpu_dma_execute(VtpuExec *x, const VtpuIssued *i)
{
    switch (i->in->in.opcode) {
    case VTPU_OP_DMA_LOAD:
        return dma_copy(x, i, true);
    case VTPU_OP_DMA_STORE:
        return dma_copy(x, i, false);
    case VTPU_OP_DMA_GATHER:
        return gather(x, i);
    default:
        return scatter(x, i);
    }
}
