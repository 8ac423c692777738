/* SPDX-License-Identifier: MIT */
/* The definition of V_ATTN: docs/numerics.md. */
#include <math.h>
#include <string.h>

#include "convert.h"
#include "kernels_internal.h"
#include "vmath.h"

#define MAX_HEAD_DIM 256

static inline float element(const uint8_t *cache, size_t index, uint32_t fmt)
{
    if (fmt == VTPU_FMT_F32) {
        float f;
        memcpy(&f, cache + 4 * index, sizeof(f));
        return f;
    }
    uint16_t bits = vtpu_half_at(cache, index);
    return fmt == VTPU_FMT_F16 ? vtpu_f16_to_f32(bits) : vtpu_bf16_to_f32(bits);
}

static float score(const VtpuAttn *op, const float *q, size_t key)
{
    float lane[16] = { 0 };

    for (uint32_t i = 0; i < op->head_dim; i++) {
        lane[i % 16] = fmaf(q[i], element(op->k_cache, key + i, op->fmt), lane[i % 16]);
    }
    return vtpu_tree(lane) * op->scale;
}

static void attend(const VtpuAttn *op, float *scores, uint32_t row, uint32_t head, uint32_t kv_head)
{
    AttnRow info = attn_row(op, row);
    size_t at = ((size_t)row * op->heads + head) * op->head_dim;
    float lane[16] = { 0 };
    float out[MAX_HEAD_DIM] = { 0 };
    float most = -INFINITY;

    for (uint32_t j = 0; j < info.keys && !attn_stopped(op); j++) {
        scores[j] = score(op, op->q + at, attn_key_at(op, info, j, kv_head));
        most = scores[j] > most ? scores[j] : most;
    }
    for (uint32_t j = 0; j < info.keys && !attn_stopped(op); j++) {
        float p = vtpu_exp(scores[j] - most);
        size_t value = attn_key_at(op, info, j, kv_head);

        lane[j % 16] += p;
        for (uint32_t i = 0; i < op->head_dim; i++) {
            out[i] = fmaf(p, element(op->v_cache, value + i, op->fmt), out[i]);
        }
    }
    float total = vtpu_tree(lane);
    for (uint32_t i = 0; i < op->head_dim; i++) {
        op->dst[at + i] = info.keys ? out[i] / total : 0.0f;
    }
}

size_t vtpu_scalar_attn_scratch_bytes(const VtpuAttn *op)
{
    return ((size_t)attn_max_keys(op) * sizeof(float) + 63) & ~(size_t)63;
}

void vtpu_scalar_attn(const VtpuAttn *op, uint8_t *scratch, uint32_t begin, uint32_t end)
{
    uint32_t group = op->heads / op->kv_heads;

    for (uint32_t item = begin; item < end; item++) {
        uint32_t kv_head = item / op->rows;

        for (uint32_t h = 0; h < group; h++) {
            attend(op, (float *)scratch, item % op->rows, kv_head * group + h, kv_head);
        }
    }
}
