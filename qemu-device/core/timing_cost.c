/* SPDX-License-Identifier: MIT */
/*
 * What one instruction costs on the modelled chip, alone on it. The arrays are
 * weight-stationary: of each round they hold one tile of weights each, and the
 * next tiles are loaded while rows of activations pass through. A round by
 * itself is the 2R + C + T - 2 cycles of SCALE-Sim (Samajdar et al., 2018:
 * R cycles of loading, T rows, R + C - 2 until the last has left).
 */
#include "machine.h"

static uint64_t ceil_div(uint64_t a, uint64_t b)
{
    return (a + b - 1) / b;
}

static uint64_t max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

typedef struct Traffic {
    VtpuCost *cost;
    uint64_t burst;
} Traffic;

static void count(void *arg, const VtpuAccess *access)
{
    const Traffic *traffic = arg;
    uint64_t burst = traffic->burst;

    if (access->vmem) {
        traffic->cost->vmem += access->rows * access->row_bytes;
    } else {
        *(access->write ? &traffic->cost->hbm_written : &traffic->cost->hbm_read) +=
            access->rows * ceil_div(access->row_bytes, burst) * burst;
    }
}

static void dma(const struct vtpu_timing_params *p, VtpuCost *cost)
{
    uint64_t bytes = cost->hbm_read + cost->hbm_written;

    cost->lead = p->dma_setup + (bytes ? p->hbm_latency : 0);
    cost->work = ceil_div(bytes, p->hbm_bytes_per_cycle);
}

static uint64_t rate(const struct vtpu_timing_params *p, uint32_t fmt)
{
    return fmt == VTPU_FMT_I8           ? p->mxu_rate_i8
           : fmt == VTPU_FMT_BF16_TILES ? p->mxu_rate_bf16
                                        : p->mxu_rate_quant;
}

static void matmul(const struct vtpu_timing_params *p, const VtpuIssued *i, VtpuCost *cost)
{
    uint64_t m = i->v[VTPU_MATMUL_M], n = i->v[VTPU_MATMUL_N], k = i->v[VTPU_MATMUL_K];
    uint64_t tiles = ceil_div(k, p->mxu_rows) * ceil_div(n, p->mxu_cols);
    uint64_t rounds = ceil_div(tiles, p->mxu_count);
    uint64_t load = ceil_div(p->mxu_rows, p->mxu_load_rows);
    uint64_t pass = ceil_div(m * 100, rate(p, i->in->in.fmt_a));

    if (m == 0 || n == 0) {
        return;
    }
    cost->lead = p->hbm_latency;
    cost->work = load + (rounds - 1) * max(pass, load) + pass;
    cost->tail = p->mxu_rows + p->mxu_cols - 2;
    cost->ops = 2 * m * n * k;
}

/* Elements of rows lie densely in the lanes. */
static void lanes(const struct vtpu_timing_params *p, VtpuCost *cost, uint64_t elements,
                  unsigned operations)
{
    cost->lead = p->vpu_latency;
    cost->work = operations * ceil_div(elements, p->vpu_lanes);
    cost->ops = operations * elements;
}

static void attention(VtpuExec *x, const struct vtpu_timing_params *p, const VtpuIssued *i,
                      VtpuCost *cost)
{
    uint64_t rows = i->v[VTPU_V_ATTN_ROWS], keys = 0, imm = i->in->in.imm64;
    const uint32_t *info = (const uint32_t *)vtpu_vmem_read(x, i->v[VTPU_V_ATTN_ROW_INFO], 1,
                                                            rows * 8, 0);

    for (uint64_t r = 0; r < rows; r++) {
        keys += info[2 * r];
    }
    uint64_t scores = keys * VTPU_V_ATTN_GET_HEADS(imm);
    uint64_t products = 2 * scores * VTPU_V_ATTN_GET_HEAD_DIM(imm);
    lanes(p, cost, scores, VTPU_TIMING_OPS_V_ATTN);
    cost->lead += cost->hbm_read ? p->hbm_latency : 0;
    cost->work += ceil_div(products, p->vpu_lanes);
    cost->ops += 2 * products;
}

static void vpu(VtpuExec *x, const struct vtpu_timing_params *p, const VtpuIssued *i,
                VtpuCost *cost)
{
    const uint64_t *v = i->v;

    switch (i->in->in.opcode) {
    case VTPU_OP_V_RMSNORM:
        lanes(p, cost, v[VTPU_V_RMSNORM_ROWS] * v[VTPU_V_RMSNORM_WIDTH],
              VTPU_TIMING_OPS_V_RMSNORM);
        break;
    case VTPU_OP_V_ADD:
        lanes(p, cost, v[VTPU_V_ADD_ROWS] * v[VTPU_V_ADD_WIDTH], VTPU_TIMING_OPS_V_ADD);
        break;
    case VTPU_OP_V_MUL:
        lanes(p, cost, v[VTPU_V_MUL_ROWS] * v[VTPU_V_MUL_WIDTH], VTPU_TIMING_OPS_V_MUL);
        break;
    case VTPU_OP_V_SILU_MUL:
        lanes(p, cost, v[VTPU_V_SILU_MUL_ROWS] * v[VTPU_V_SILU_MUL_WIDTH],
              VTPU_TIMING_OPS_V_SILU_MUL);
        break;
    case VTPU_OP_V_TAKE:
        lanes(p, cost, v[VTPU_V_TAKE_ROWS] * v[VTPU_V_TAKE_WIDTH], VTPU_TIMING_OPS_V_TAKE);
        cost->ops = 0; /* it only moves */
        break;
    case VTPU_OP_V_ROPE:
        lanes(p, cost, v[VTPU_V_ROPE_ROWS] * v[VTPU_V_ROPE_HEADS] * v[VTPU_V_ROPE_HEAD_DIM],
              VTPU_TIMING_OPS_V_ROPE);
        break;
    case VTPU_OP_V_ATTN:
        attention(x, p, i, cost);
        break;
    default:
        lanes(p, cost, v[VTPU_V_SAMPLE_ROWS] * v[VTPU_V_SAMPLE_VOCAB], VTPU_TIMING_OPS_V_SAMPLE);
        break;
    }
}

static void seq(const struct vtpu_timing_params *p, uint8_t opcode, VtpuCost *cost)
{
    cost->lead = p->issue_cycles + (opcode == VTPU_OP_LD    ? p->hbm_latency
                                    : opcode == VTPU_OP_LDV ? p->vmem_latency
                                                            : 0);
    cost->work = ceil_div(cost->hbm_read + cost->hbm_written, p->hbm_bytes_per_cycle);
}

/* Packets follow each other without gaps; the last one's answer comes back. */
static void remote(VtpuExec *x, const struct vtpu_timing_params *p, const VtpuIssued *i,
                   VtpuCost *cost)
{
    const uint64_t *v = i->v;
    bool store = i->in->in.opcode == VTPU_OP_REMOTE_STORE;
    uint64_t chip = v[store ? VTPU_REMOTE_STORE_CHIP : VTPU_REMOTE_SIGNAL_CHIP];
    uint64_t bytes = store ? v[VTPU_REMOTE_STORE_ROWS] * v[VTPU_REMOTE_STORE_ROW_BYTES] : 0;

    cost->lead = p->link_setup + (cost->hbm_read ? p->hbm_latency : 0);
    cost->work = ceil_div(bytes, p->link_bytes_per_cycle);
    cost->tail = 2 * p->link_hop_latency *
                 vtpu_fabric_distance(x->core->link.fabric, x->core->link.chip, (unsigned)chip);
}

VtpuCost vtpu_timing_cost(VtpuExec *x, const VtpuIssued *i)
{
    const struct vtpu_timing_params *p = &x->core->timing;
    VtpuCost cost = { 0 };
    Traffic traffic = { &cost, p->hbm_burst };

    vtpu_footprint(x, i, count, &traffic);
    switch (i->in->info->engine) {
    case VTPU_ENGINE_SEQ:
        seq(p, i->in->in.opcode, &cost);
        break;
    case VTPU_ENGINE_MXU:
        matmul(p, i, &cost);
        break;
    case VTPU_ENGINE_VPU:
        vpu(x, p, i, &cost);
        break;
    case VTPU_ENGINE_LINK:
        remote(x, p, i, &cost);
        break;
    default:
        dma(p, &cost);
        break;
    }
    cost.lead = max(cost.lead, 1);
    return cost;
}
