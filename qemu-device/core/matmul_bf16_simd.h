/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with BF16_TILES in sixteen lanes: a matrix unit's two chains of fma and its
 * flushing of denormals, which the vector units can be told to do as well. A path
 * includes its lanes_*.h first and defines BF16_ROWS, the rows whose chains fit into
 * its registers; matmul_tiles_scalar.c has the definition.
 */
#ifndef VTPU_MATMUL_BF16_SIMD_H
#define VTPU_MATMUL_BF16_SIMD_H

#include "kernels_simd.h"

/* A quantised row: k f32 that are bf16. */

static inline size_t simd_bf16_bytes(uint32_t k)
{
    return odd_lines((size_t)k * sizeof(float));
}

static inline void simd_bf16_quantise(uint8_t *quantised, const float *src, size_t src_stride,
                                      uint32_t k, uint32_t m, uint32_t begin, uint32_t end)
{
    uint8_t half[32];

    (void)m;
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        float *to = (float *)(quantised + row * simd_bf16_bytes(k));

        for (uint32_t i = 0; i < k; i += 16) {
            v_store_bf16(half, v_load(x + i));
            v_store(to + i, v_load_bf16(half));
        }
    }
}

#endif
