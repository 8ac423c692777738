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

#endif
