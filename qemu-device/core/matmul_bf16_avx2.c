/* SPDX-License-Identifier: MIT */
/* MATMUL with BF16_TILES: the AVX2 path. */
#include "lanes_avx2.h"

#define BF16_ROWS 2
#include "matmul_bf16_simd.h"

size_t vtpu_avx2_bf16_bytes(uint32_t k, uint32_t m)
{
    return m * simd_bf16_bytes(k);
}

void vtpu_avx2_bf16_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                             uint32_t m, uint32_t begin, uint32_t end)
{
    simd_bf16_quantise(quantised, src, src_stride, k, m, begin, end);
}

void vtpu_avx2_bf16_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    simd_bf16_matmul(op, begin, end);
}
