/* SPDX-License-Identifier: MIT */
/* The definition of the element-wise operations, and the scalar path. */
#include <math.h>

#include "convert.h"
#include "kernels_internal.h"
#include "sample.h"
#include "vmath.h"

static void rmsnorm(float *dst, size_t dst_stride, const float *src, size_t src_stride,
                    const float *weight, uint32_t width, float epsilon,
                    uint32_t begin, uint32_t end)
{
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        float *y = row_at(dst, dst_stride, row);
        float lane[16] = { 0 };

        for (uint32_t i = 0; i < width; i++) {
            lane[i % 16] = fmaf(x[i], x[i], lane[i % 16]);
        }
        float r = 1.0f / sqrtf(vtpu_tree(lane) / (float)width + epsilon);
        for (uint32_t i = 0; i < width; i++) {
            y[i] = (x[i] * r) * weight[i];
        }
    }
}

static void add(float *dst, size_t dst_stride, const float *a, size_t a_stride,
                const float *b, size_t b_stride, uint32_t width, uint32_t begin, uint32_t end)
{
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(a, a_stride, row);
        const float *y = const_row_at(b, b_stride, row);
        float *z = row_at(dst, dst_stride, row);

        for (uint32_t i = 0; i < width; i++) {
            z[i] = x[i] + y[i];
        }
    }
}

static void mul(float *dst, size_t dst_stride, const float *a, size_t a_stride,
                const float *b, size_t b_stride, uint32_t width, uint32_t begin, uint32_t end)
{
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(a, a_stride, row);
        const float *y = const_row_at(b, b_stride, row);
        float *z = row_at(dst, dst_stride, row);

        for (uint32_t i = 0; i < width; i++) {
            z[i] = x[i] * y[i];
        }
    }
}

static void silu_mul(float *dst, size_t dst_stride, const float *gate, size_t gate_stride,
                     const float *up, size_t up_stride, uint32_t width,
                     uint32_t begin, uint32_t end)
{
    for (uint32_t row = begin; row < end; row++) {
        const float *g = const_row_at(gate, gate_stride, row);
        const float *u = const_row_at(up, up_stride, row);
        float *z = row_at(dst, dst_stride, row);

        for (uint32_t i = 0; i < width; i++) {
            z[i] = (g[i] / (1.0f + vtpu_exp(-g[i]))) * u[i];
        }
    }
}

static void rope(float *dst, size_t dst_stride, const float *src, size_t src_stride,
                 const float *cos_sin, uint32_t heads, uint32_t head_dim, bool halves,
                 uint32_t begin, uint32_t end)
{
    uint32_t half = head_dim / 2;

    for (uint32_t row = begin; row < end; row++) {
        const float *cosine = cos_sin + (size_t)row * head_dim;
        const float *sine = cosine + half;

        for (uint32_t head = 0; head < heads; head++) {
            const float *x = const_row_at(src, src_stride, row) + head * head_dim;
            float *y = row_at(dst, dst_stride, row) + head * head_dim;

            for (uint32_t i = 0; i < half; i++) {
                uint32_t first = halves ? i : 2 * i;
                uint32_t second = halves ? i + half : 2 * i + 1;
                float a = x[first];
                float b = x[second];
                y[first] = fmaf(a, cosine[i], -(b * sine[i]));
                y[second] = fmaf(a, sine[i], b * cosine[i]);
            }
        }
    }
}

static float sample_max(const float *x, uint32_t n, bool *has_nan)
{
    float most = -INFINITY;

    *has_nan = false;
    for (uint32_t i = 0; i < n; i++) {
        *has_nan = *has_nan || x[i] != x[i];
        most = x[i] > most ? x[i] : most;
    }
    return most;
}

static float sample_sum_exp(const float *x, uint32_t n, float max)
{
    float lane[16] = { 0 };

    for (uint32_t i = 0; i < n; i++) {
        lane[i % 16] += vtpu_exp(x[i] - max);
    }
    return vtpu_tree(lane);
}

static uint32_t sample_next_above(const float *x, uint32_t from, uint32_t n, float threshold)
{
    while (from < n && !(x[from] > threshold)) {
        from++;
    }
    return from;
}

static void sample_weights(uint32_t *w, const float *x, uint32_t n, SampleScale scale)
{
    for (uint32_t i = 0; i < n; i++) {
        w[i] = sample_weight(x[i], scale);
    }
}

static uint64_t sample_mass_above(const uint32_t *w, const float *x, uint32_t n, float threshold)
{
    uint64_t mass = 0;

    for (uint32_t i = 0; i < n; i++) {
        mass += x[i] > threshold ? w[i] : 0;
    }
    return mass;
}

static uint32_t sample_noisy_argmax(const float *x, uint32_t n, SampleScale scale,
                                    SampleNoise noise)
{
    float best = -INFINITY;
    uint32_t token = 0;

    for (uint32_t i = 0; i < n; i++) {
        float value = sample_value(x[i], scale) + sample_noise(noise, i);
        if (value > best) {
            best = value;
            token = i;
        }
    }
    return token;
}

static void sample(struct vtpu_sample_result *dst, const float *logits, size_t logits_stride,
                   const struct vtpu_sample_params *params, uint32_t vocab,
                   uint8_t *scratch, uint32_t begin, uint32_t end)
{
    static const SampleLoops loops = {
        .max = sample_max,
        .sum_exp = sample_sum_exp,
        .next_above = sample_next_above,
        .weights = sample_weights,
        .mass_above = sample_mass_above,
        .noisy_argmax = sample_noisy_argmax,
    };
    vtpu_sample(&loops, dst, logits, logits_stride, params, vocab, scratch, begin, end);
}

static uint8_t q_byte(const uint8_t *tile, uint32_t r, uint32_t col)
{
    return tile[tile_byte(r, col)];
}

static float half_at(const uint8_t *p, uint32_t r)
{
    uint16_t half;
    memcpy(&half, p + 2 * r, sizeof(half));
    return vtpu_f16_to_f32(half);
}

/* tail: what lies behind the row of tiles */
static float tile_element(const uint8_t *tile, const uint8_t *tail, uint32_t fmt, uint32_t r,
                          uint32_t col)
{
    if (fmt == VTPU_FMT_I8) {
        float d;
        memcpy(&d, tail + 4 * r, sizeof(d));
        return (float)(int8_t)q_byte(tile, r, col) * d;
    }
    if (fmt == VTPU_FMT_BF16_TILES) {
        return tile_bf16(tile, r, col);
    }
    if (fmt == VTPU_FMT_Q8_0) {
        return (float)(int8_t)q_byte(tile, r, col) * half_at(tile + 512, r);
    }
    uint8_t byte = q_byte(tile, r, col % 16);
    int q = col < 16 ? byte & 15 : byte >> 4;
    float d = half_at(tile + 256, r);
    return fmt == VTPU_FMT_Q4_0 ? (float)(q - 8) * d : fmaf((float)q, d, half_at(tile + 288, r));
}

void vtpu_scalar_gather_row(float *dst, const uint8_t *table, uint32_t row, uint32_t width,
                            uint32_t fmt)
{
    uint32_t cols = vtpu_tile_cols(fmt);

    if (fmt == VTPU_FMT_F32) {
        memcpy(dst, table, width * sizeof(*dst));
        return;
    }
    if (cols) {
        size_t tile_bytes = vtpu_tile_bytes(fmt);
        const uint8_t *tile = table + row / VTPU_TILE_ROWS * vtpu_tile_row_bytes(fmt, width);
        const uint8_t *tail = tile + width / cols * tile_bytes;

        for (; width > 0; width -= cols, dst += cols, tile += tile_bytes) {
            for (uint32_t i = 0; i < cols; i++) {
                dst[i] = tile_element(tile, tail, fmt, row % VTPU_TILE_ROWS, i);
            }
        }
        return;
    }
    for (uint32_t i = 0; i < width; i++) {
        uint16_t half = vtpu_half_at(table, i);
        dst[i] = fmt == VTPU_FMT_BF16 ? vtpu_bf16_to_f32(half) : vtpu_f16_to_f32(half);
    }
}

void vtpu_scalar_scatter_row(uint8_t *dst, const float *src, uint32_t width, uint32_t fmt)
{
    if (fmt == VTPU_FMT_F32) {
        memcpy(dst, src, width * sizeof(*src));
        return;
    }
    for (uint32_t i = 0; i < width; i++) {
        uint16_t half = fmt == VTPU_FMT_F16 ? vtpu_f32_to_f16(src[i]) : vtpu_f32_to_bf16(src[i]);
        memcpy(dst + 2 * (size_t)i, &half, sizeof(half));
    }
}

const VtpuKernels vtpu_kernels_scalar = {
    .name = "scalar",
    .blocks = { quant_bytes, vtpu_scalar_quantise, vtpu_scalar_matmul, 0 },
    .i8 = { vtpu_scalar_i8_bytes, vtpu_scalar_i8_quantise, vtpu_scalar_i8_matmul, 1 << 17 },
    .bf16 = { vtpu_scalar_bf16_bytes, vtpu_scalar_bf16_quantise, vtpu_scalar_bf16_matmul, 1 << 17 },
    .rmsnorm = rmsnorm,
    .add = add,
    .mul = mul,
    .silu_mul = silu_mul,
    .rope = rope,
    .attn_scratch_bytes = vtpu_scalar_attn_scratch_bytes,
    .attn = vtpu_scalar_attn,
    .sample_scratch_bytes = vtpu_sample_scratch_bytes,
    .sample = sample,
    .gather_row = vtpu_scalar_gather_row,
    .scatter_row = vtpu_scalar_scatter_row,
};
