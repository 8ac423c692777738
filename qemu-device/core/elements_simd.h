/* SPDX-License-Identifier: MIT */
/*
 * The element-wise operations in sixteen lanes. A path includes its lanes_*.h
 * first; kernels_scalar.c has the definitions.
 */
#ifndef VTPU_ELEMENTS_SIMD_H
#define VTPU_ELEMENTS_SIMD_H

#include "kernels_internal.h"
#include "lanes_math.h"

static void simd_rmsnorm(float *dst, size_t dst_stride, const float *src, size_t src_stride,
                         const float *weight, uint32_t width, float epsilon,
                         uint32_t begin, uint32_t end)
{
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        float *y = row_at(dst, dst_stride, row);
        v16 sum = v_zero();

        for (uint32_t i = 0; i < width; i += 16) {
            v16 part = v_load(x + i);
            sum = v_fma(part, part, sum);
        }
        v16 r = v_set1(1.0f / sqrtf(v_tree(sum) / (float)width + epsilon));
        for (uint32_t i = 0; i < width; i += 16) {
            v_store(y + i, v_mul(v_mul(v_load(x + i), r), v_load(weight + i)));
        }
    }
}

static inline v16 op_add(v16 a, v16 b)
{
    return v_add(a, b);
}

static inline v16 op_mul(v16 a, v16 b)
{
    return v_mul(a, b);
}

static inline v16 op_silu_mul(v16 gate, v16 up)
{
    v16 minus = v_sub(v_set1(-0.0f), gate);
    return v_mul(v_div(gate, v_add(v_set1(1.0f), v_exp(minus))), up);
}

/* dst = op(a, b) */
static inline __attribute__((always_inline)) void
rows_of_two(v16 (*op)(v16, v16), float *dst, size_t dst_stride, const float *a, size_t a_stride,
            const float *b, size_t b_stride, uint32_t width, uint32_t begin, uint32_t end)
{
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(a, a_stride, row);
        const float *y = const_row_at(b, b_stride, row);
        float *z = row_at(dst, dst_stride, row);
        uint32_t i = 0;

        for (; i + 16 <= width; i += 16) {
            v_store(z + i, op(v_load(x + i), v_load(y + i)));
        }
        if (i < width) {
            uint32_t rest = width - i;
            v_store_n(z + i, rest, op(v_load_n(x + i, rest, v_zero()),
                                      v_load_n(y + i, rest, v_zero())));
        }
    }
}

static void simd_add(float *dst, size_t dst_stride, const float *a, size_t a_stride,
                     const float *b, size_t b_stride, uint32_t width, uint32_t begin, uint32_t end)
{
    rows_of_two(op_add, dst, dst_stride, a, a_stride, b, b_stride, width, begin, end);
}

static void simd_mul(float *dst, size_t dst_stride, const float *a, size_t a_stride,
                     const float *b, size_t b_stride, uint32_t width, uint32_t begin, uint32_t end)
{
    rows_of_two(op_mul, dst, dst_stride, a, a_stride, b, b_stride, width, begin, end);
}

static void simd_silu_mul(float *dst, size_t dst_stride, const float *gate, size_t gate_stride,
                          const float *up, size_t up_stride, uint32_t width,
                          uint32_t begin, uint32_t end)
{
    rows_of_two(op_silu_mul, dst, dst_stride, gate, gate_stride, up, up_stride, width, begin, end);
}

/* Pairs (2i, 2i + 1): head_dim is a multiple of 16, so 8 pairs at a time. */
static void rope_pairs(float *y, const float *x, const float *cosine, const float *sine,
                       uint32_t half)
{
    for (uint32_t i = 0; i < half; i += 8) {
        v16 in = v_load(x + 2 * i);
        v16 cos_sin = v_interleave8(cosine + i, sine + i);
        v16 product = v_mul(v_odd_twice(in), v_swap_pairs(cos_sin));
        v_store(y + 2 * i, v_fma_sub_add(v_even_twice(in), cos_sin, product));
    }
}

/* Pairs (i, i + half) */
static void rope_halves(float *y, const float *x, const float *cosine, const float *sine,
                        uint32_t half)
{
    v16 none = v_zero();

    for (uint32_t i = 0; i < half; i += 16) {
        bool whole = half - i >= 16;
        v16 a = whole ? v_load(x + i) : v_load_n(x + i, 8, none);
        v16 b = whole ? v_load(x + half + i) : v_load_n(x + half + i, 8, none);
        v16 c = whole ? v_load(cosine + i) : v_load_n(cosine + i, 8, none);
        v16 s = whole ? v_load(sine + i) : v_load_n(sine + i, 8, none);
        v16 first = v_fma(a, c, v_sub(v_set1(-0.0f), v_mul(b, s)));
        v16 second = v_fma(a, s, v_mul(b, c));

        if (whole) {
            v_store(y + i, first);
            v_store(y + half + i, second);
        } else {
            v_store_n(y + i, 8, first);
            v_store_n(y + half + i, 8, second);
        }
    }
}

static void simd_rope(float *dst, size_t dst_stride, const float *src, size_t src_stride,
                      const float *cos_sin, uint32_t heads, uint32_t head_dim, bool halves,
                      uint32_t begin, uint32_t end)
{
    uint32_t half = head_dim / 2;

    for (uint32_t row = begin; row < end; row++) {
        const float *cosine = cos_sin + (size_t)row * head_dim;

        for (uint32_t head = 0; head < heads; head++) {
            const float *x = const_row_at(src, src_stride, row) + head * head_dim;
            float *y = row_at(dst, dst_stride, row) + head * head_dim;
            if (halves) {
                rope_halves(y, x, cosine, cosine + half, half);
            } else {
                rope_pairs(y, x, cosine, cosine + half, half);
            }
        }
    }
}

static void simd_gather_row(float *dst, const uint8_t *table, uint32_t row, uint32_t width,
                            uint32_t fmt)
{
    uint32_t i = 0;

    if (fmt != VTPU_FMT_F16 && fmt != VTPU_FMT_BF16) {
        vtpu_scalar_gather_row(dst, table, row, width, fmt);
        return;
    }
    for (; i + 16 <= width; i += 16) {
        const uint8_t *from = table + 2 * (size_t)i;
        v_store(dst + i, fmt == VTPU_FMT_F16 ? v_load_f16(from) : v_load_bf16(from));
    }
    vtpu_scalar_gather_row(dst + i, table + 2 * (size_t)i, 0, width - i, fmt);
}

static void simd_scatter_row(uint8_t *dst, const float *src, uint32_t width, uint32_t fmt)
{
    uint32_t i = 0;

    if (fmt == VTPU_FMT_F16) {
        for (; i + 16 <= width; i += 16) {
            v_store_f16(dst + 2 * (size_t)i, v_load(src + i));
        }
    } else if (fmt == VTPU_FMT_BF16) {
        for (; i + 16 <= width; i += 16) {
            v_store_bf16(dst + 2 * (size_t)i, v_load(src + i));
        }
    }
    size_t done = i * (fmt == VTPU_FMT_F32 ? 4 : 2);
    vtpu_scalar_scatter_row(dst + done, src + i, width - i, fmt);
}

#endif
