/* SPDX-License-Identifier: MIT */
/*
 * Quantising activations for MATMUL in sixteen lanes. A path includes its
 * lanes_*.h first; matmul_scalar.c has the definition.
 */
#ifndef VTPU_QUANTISE_SIMD_H
#define VTPU_QUANTISE_SIMD_H

#include "kernels_internal.h"

/* The block's integers, its scale and the sum of the integers. */
static inline void quantise_block(u16v *q_low, u16v *q_high, float *scale, float *sum,
                                  const float *x)
{
    v16 low = v_load(x), high = v_load(x + 16);
    v16 magnitude_low = v_abs(low), magnitude_high = v_abs(high);
    v16 infinity = v_set1(INFINITY);
    bool finite = (v_mask_above(infinity, magnitude_low) &
                   v_mask_above(infinity, magnitude_high)) == 0xffff;
    float amax = v_reduce_max(v_max(magnitude_low, magnitude_high));

    if (!finite || amax < VTPU_QUANT_TINY) {
        *q_low = *q_high = u_set1(0);
        *scale = finite ? 0.0f : vtpu_nan();
        *sum = 0.0f;
        return;
    }
    v16 inverse = v_set1(VTPU_QUANT_MAX / amax);
    *q_low = u_round(v_mul(low, inverse));
    *q_high = u_round(v_mul(high, inverse));
    *scale = amax / VTPU_QUANT_MAX;
    *sum = (float)u_reduce_add(u_add(*q_low, *q_high));
}

static inline void simd_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                          uint32_t m, uint32_t begin, uint32_t end)
{
    (void)m;
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        QuantRow to = quant_row(quantised, k, row);

        for (uint32_t block = 0; block < k / VTPU_BLOCK; block++) {
            int16_t *q = (int16_t *)to.q + block * VTPU_BLOCK;
            u16v low, high;

            quantise_block(&low, &high, (float *)to.scale + block, (float *)to.sum + block,
                           x + block * VTPU_BLOCK);
            u_store_quant(q, low);
            u_store_quant(q + 16, high);
        }
    }
}

/* I8: what a row is multiplied with to be rounded, and its scale: 0 and 0 for a row of tiny
 * numbers, 0 and the NaN for one that is not finite, whose integers then do not matter. k a
 * multiple of 64. */
static inline float i8_inverse(const float *x, uint32_t k, float *scale)
{
    /* Magnitudes compare as integers, NaN above infinity above all numbers. */
    u16v magnitude = u_set1(0x7fffffff), most[4];

    most[0] = most[1] = most[2] = most[3] = u_set1(0);
    for (uint32_t i = 0; i < k; i += 64) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            most[j] = u_max(most[j], u_and(u_bits(v_load(x + i + 16 * j)), magnitude));
        }
    }
    most[0] = u_max(u_max(most[0], most[1]), u_max(most[2], most[3]));
    float amax = vtpu_f32_from_bits(u_reduce_max(most[0]));
    if (!(amax < INFINITY) || amax < VTPU_QUANT_TINY) {
        *scale = amax < INFINITY ? 0.0f : vtpu_nan();
        return 0.0f;
    }
    *scale = amax / VTPU_I8_MAX;
    return VTPU_I8_MAX / amax;
}

#endif
