/* SPDX-License-Identifier: MIT */
/*
 * The vector engine: row-wise operations on VMEM. Each checks its operands,
 * then runs the kernel over rows in the pool. Command thread; arithmetic in
 * the pool. Attention is in engine_attn.c.
 */
#include <math.h>
#include <string.h>

#include "machine.h"

/* Elements a part handles: some microseconds of work. */
#define CHEAP_PART 16384
#define DEAR_PART 4096

typedef struct RowJob {
    const VtpuKernels *kernels;
    uint8_t *dst;
    const uint8_t *a, *b;
    const uint32_t *index;
    uint64_t dst_stride, a_stride, b_stride;
    uint32_t width, heads;
    float epsilon;
    uint8_t opcode;
    bool halves;
    uint8_t *scratch;
    size_t scratch_bytes;
} RowJob;

static void row_part(void *arg, uint32_t begin, uint32_t end, unsigned slot)
{
    const RowJob *j = arg;
    const VtpuKernels *k = j->kernels;
    float *dst = (float *)j->dst;
    const float *a = (const float *)j->a, *b = (const float *)j->b;

    switch (j->opcode) {
    case VTPU_OP_V_RMSNORM:
        k->rmsnorm(dst, j->dst_stride, a, j->a_stride, b, j->width, j->epsilon, begin, end);
        break;
    case VTPU_OP_V_ADD:
        k->add(dst, j->dst_stride, a, j->a_stride, b, j->b_stride, j->width, begin, end);
        break;
    case VTPU_OP_V_MUL:
        k->mul(dst, j->dst_stride, a, j->a_stride, b, j->b_stride, j->width, begin, end);
        break;
    case VTPU_OP_V_SILU_MUL:
        k->silu_mul(dst, j->dst_stride, a, j->a_stride, b, j->b_stride, j->width, begin, end);
        break;
    case VTPU_OP_V_ROPE:
        k->rope(dst, j->dst_stride, a, j->a_stride, b, j->heads, j->width, j->halves,
                begin, end);
        break;
    case VTPU_OP_V_TAKE:
        for (uint64_t r = begin; r < end; r++) {
            memmove(j->dst + r * j->dst_stride, j->a + j->index[r] * j->a_stride,
                    (size_t)j->width * 4);
        }
        break;
    case VTPU_OP_V_SAMPLE:
        k->sample((struct vtpu_sample_result *)j->dst, a, j->a_stride,
                  (const struct vtpu_sample_params *)j->b, j->width,
                  j->scratch + slot * j->scratch_bytes, begin, end);
        break;
    }
}

static bool run_rows(VtpuExec *x, RowJob *job, uint64_t rows, uint64_t row_elements,
                     uint32_t part)
{
    if (rows == 0 || row_elements == 0) {
        return true;
    }
    job->kernels = x->core->kernels;
    if (rows * row_elements <= part) {
        row_part(job, 0, (uint32_t)rows, 0);
        return true;
    }
    return vtpu_pool_for(x->core->pool, (uint32_t)rows, (uint32_t)(part / row_elements + 1),
                         row_part, job);
}

static bool rmsnorm(VtpuExec *x, const VtpuIssued *i)
{
    const uint64_t *v = i->v;
    uint64_t rows = v[VTPU_V_RMSNORM_ROWS], width = v[VTPU_V_RMSNORM_WIDTH];
    RowJob job = {
        .opcode = VTPU_OP_V_RMSNORM, .width = (uint32_t)width,
        .dst_stride = v[VTPU_V_RMSNORM_DST_STRIDE], .a_stride = v[VTPU_V_RMSNORM_SRC_STRIDE],
    };

    if (width % 16) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, width);
    }
    memcpy(&job.epsilon, &i->in->in.aux, 4);
    return (job.dst = vtpu_vmem_write(x, v[VTPU_V_RMSNORM_DST], rows, width * 4,
                                      job.dst_stride)) &&
           (job.a = vtpu_vmem_read(x, v[VTPU_V_RMSNORM_SRC], rows, width * 4, job.a_stride)) &&
           (job.b = vtpu_vmem_read(x, v[VTPU_V_RMSNORM_WEIGHT], 1, width * 4, 0)) &&
           run_rows(x, &job, rows, width, CHEAP_PART);
}

/* V_ADD, V_MUL and V_SILU_MUL name their operands in the same places. */
static bool binary(VtpuExec *x, const VtpuIssued *i)
{
    const uint64_t *v = i->v;
    uint64_t rows = v[VTPU_V_ADD_ROWS], width = v[VTPU_V_ADD_WIDTH];
    RowJob job = {
        .opcode = i->in->in.opcode, .width = (uint32_t)width,
        .dst_stride = v[VTPU_V_ADD_DST_STRIDE], .a_stride = v[VTPU_V_ADD_A_STRIDE],
        .b_stride = v[VTPU_V_ADD_B_STRIDE],
    };

    return (job.dst = vtpu_vmem_write(x, v[VTPU_V_ADD_DST], rows, width * 4, job.dst_stride)) &&
           (job.a = vtpu_vmem_read(x, v[VTPU_V_ADD_A], rows, width * 4, job.a_stride)) &&
           (job.b = vtpu_vmem_read(x, v[VTPU_V_ADD_B], rows, width * 4, job.b_stride)) &&
           run_rows(x, &job, rows, width,
                    job.opcode == VTPU_OP_V_SILU_MUL ? DEAR_PART : CHEAP_PART);
}

static bool take(VtpuExec *x, const VtpuIssued *i)
{
    const uint64_t *v = i->v;
    uint64_t rows = v[VTPU_V_TAKE_ROWS], width = v[VTPU_V_TAKE_WIDTH];
    uint64_t src_rows = v[VTPU_V_TAKE_SRC_ROWS];
    RowJob job = {
        .opcode = VTPU_OP_V_TAKE, .width = (uint32_t)width,
        .dst_stride = v[VTPU_V_TAKE_DST_STRIDE], .a_stride = v[VTPU_V_TAKE_SRC_STRIDE],
    };

    if (!(job.dst = vtpu_vmem_write(x, v[VTPU_V_TAKE_DST], rows, width * 4, job.dst_stride)) ||
        !(job.a = vtpu_vmem_read(x, v[VTPU_V_TAKE_SRC], src_rows, width * 4, job.a_stride)) ||
        !(job.index = (const uint32_t *)vtpu_vmem_read(x, v[VTPU_V_TAKE_INDEX], 1, rows * 4, 0)) ||
        !vtpu_vmem_apart(x, v[VTPU_V_TAKE_INDEX], rows * 4, v[VTPU_V_TAKE_DST], rows,
                         width * 4, job.dst_stride)) {
        return false;
    }
    for (uint64_t r = 0; r < rows; r++) {
        if (job.index[r] >= src_rows) {
            return vtpu_fault(x, VTPU_FAULT_INDEX_RANGE, VTPU_ACCESS_READ,
                              v[VTPU_V_TAKE_INDEX] + r * 4);
        }
    }
    return run_rows(x, &job, rows, width, CHEAP_PART);
}

static bool rope(VtpuExec *x, const VtpuIssued *i)
{
    const uint64_t *v = i->v;
    uint64_t rows = v[VTPU_V_ROPE_ROWS], heads = v[VTPU_V_ROPE_HEADS];
    uint64_t head_dim = v[VTPU_V_ROPE_HEAD_DIM], width = heads * head_dim;
    RowJob job = {
        .opcode = VTPU_OP_V_ROPE, .width = (uint32_t)head_dim, .heads = (uint32_t)heads,
        .halves = i->in->in.mode == VTPU_V_ROPE_MODE_HALVES,
        .dst_stride = v[VTPU_V_ROPE_DST_STRIDE], .a_stride = v[VTPU_V_ROPE_SRC_STRIDE],
    };

    if (head_dim % 16) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, head_dim);
    }
    return (job.dst = vtpu_vmem_write(x, v[VTPU_V_ROPE_DST], rows, width * 4, job.dst_stride)) &&
           (job.a = vtpu_vmem_read(x, v[VTPU_V_ROPE_SRC], rows, width * 4, job.a_stride)) &&
           (job.b = vtpu_vmem_read(x, v[VTPU_V_ROPE_COS_SIN], rows, head_dim * 4,
                                   head_dim * 4)) &&
           run_rows(x, &job, rows, width, DEAR_PART);
}

static bool legal_params(const struct vtpu_sample_params *p)
{
    bool temperature = p->temperature == 0.0f ||
                       (p->temperature >= 0x1p-14f && isfinite(p->temperature));

    return temperature && p->top_p > 0.0f && p->top_p <= 1.0f && p->num_logprobs <= 20 &&
           p->reserved == 0;
}

static bool sample(VtpuExec *x, const VtpuIssued *i)
{
    const uint64_t *v = i->v;
    uint64_t rows = v[VTPU_V_SAMPLE_ROWS], vocab = v[VTPU_V_SAMPLE_VOCAB];
    RowJob job = {
        .opcode = VTPU_OP_V_SAMPLE, .width = (uint32_t)vocab,
        .a_stride = v[VTPU_V_SAMPLE_LOGITS_STRIDE],
    };

    if (rows == 0) {
        return true;
    }
    if (vocab == 0) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, vocab);
    }
    if (!(job.dst = vtpu_vmem_write(x, v[VTPU_V_SAMPLE_DST], rows, VTPU_SAMPLE_RESULT_BYTES,
                                    VTPU_SAMPLE_RESULT_BYTES)) ||
        !(job.a = vtpu_vmem_read(x, v[VTPU_V_SAMPLE_LOGITS], rows, vocab * 4, job.a_stride)) ||
        !(job.b = vtpu_vmem_read(x, v[VTPU_V_SAMPLE_PARAMS], rows, VTPU_SAMPLE_PARAMS_BYTES,
                                 VTPU_SAMPLE_PARAMS_BYTES)) ||
        !vtpu_vmem_apart(x, v[VTPU_V_SAMPLE_PARAMS], rows * VTPU_SAMPLE_PARAMS_BYTES,
                         v[VTPU_V_SAMPLE_DST], rows, VTPU_SAMPLE_RESULT_BYTES,
                         VTPU_SAMPLE_RESULT_BYTES) ||
        /* The selection trusts that logits stay what they were. */
        !vtpu_vmem_apart(x, v[VTPU_V_SAMPLE_LOGITS], (rows - 1) * job.a_stride + vocab * 4,
                         v[VTPU_V_SAMPLE_DST], rows, VTPU_SAMPLE_RESULT_BYTES,
                         VTPU_SAMPLE_RESULT_BYTES)) {
        return false;
    }
    for (uint64_t r = 0; r < rows; r++) {
        struct vtpu_sample_params params;
        memcpy(&params, job.b + r * VTPU_SAMPLE_PARAMS_BYTES, sizeof(params));
        if (!legal_params(&params)) {
            return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_READ,
                              v[VTPU_V_SAMPLE_PARAMS] + r * VTPU_SAMPLE_PARAMS_BYTES);
        }
    }
    /* An 8-byte member lies in each row: rows are only 4-byte aligned in VMEM. */
    if (v[VTPU_V_SAMPLE_PARAMS] & 7) {
        uint8_t *copy = vtpu_buffer(x, VTPU_BUFFER_LISTS, rows * VTPU_SAMPLE_PARAMS_BYTES);
        if (!copy) {
            return false;
        }
        job.b = memcpy(copy, job.b, rows * VTPU_SAMPLE_PARAMS_BYTES);
    }
    job.scratch_bytes = (x->core->kernels->sample_scratch_bytes((uint32_t)vocab) + 63) & ~63ull;
    job.scratch = vtpu_buffer(x, VTPU_BUFFER_THREADS, job.scratch_bytes * x->core->threads);
    return job.scratch && run_rows(x, &job, rows, vocab, 1);
}

bool vtpu_vpu_execute(VtpuExec *x, const VtpuIssued *i)
{
    switch (i->in->in.opcode) {
    case VTPU_OP_V_RMSNORM:
        return rmsnorm(x, i);
    case VTPU_OP_V_TAKE:
        return take(x, i);
    case VTPU_OP_V_ROPE:
        return rope(x, i);
    case VTPU_OP_V_ATTN:
        return vtpu_attn_execute(x, i);
    case VTPU_OP_V_SAMPLE:
        return sample(x, i);
    default:
        return binary(x, i);
    }
}
