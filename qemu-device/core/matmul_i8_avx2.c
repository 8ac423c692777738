/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with I8 in AVX2, whose byte product saturates: bytes become pairs of 16 bits,
 * columns 0 and 2, then 1 and 3 of each four, as the quantised order of the block
 * formats has them.
 */
#include "lanes_avx2.h"

#include "kernels_simd.h"
#include "quantise_simd.h"

#define INLINE static inline __attribute__((always_inline))

/* A quantised row: k int16 in the quantised order, then the scale. */

static size_t row_bytes_of(uint32_t k)
{
    return odd_lines((size_t)k * 2 + 4);
}

size_t vtpu_avx2_i8_bytes(uint32_t k, uint32_t m)
{
    return m * row_bytes_of(k);
}

void vtpu_avx2_i8_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                           uint32_t m, uint32_t begin, uint32_t end)
{
    (void)m;
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        int16_t *q = (int16_t *)(quantised + row * row_bytes_of(k));
        float scale, inverse = i8_inverse(x, k, &scale);

        for (uint32_t i = 0; i < k; i += 16) {
            u_store_quant(q + i, u_round(v_mul(v_load(x + i), v_set1(inverse))));
        }
        memcpy(q + k, &scale, sizeof(scale));
    }
}

/* rows x 8 outputs, whose sums stay in registers */
INLINE void block(const VtpuMatmul *op, uint32_t row, int rows, uint32_t tile_row, uint32_t half)
{
    size_t row_bytes = row_bytes_of(op->k);
    const uint8_t *x = op->quantised + row * row_bytes;
    const uint8_t *tiles = op->weight + tile_row * vtpu_tile_row_bytes(VTPU_FMT_I8, op->k);
    const float *d = (const float *)(tiles + (size_t)op->k * 16) + half * 8;
    __m256i sums[4];

#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        sums[r] = _mm256_setzero_si256();
    }
    for (size_t i = 0; i < op->k; i += 4) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(tiles + i * 16 + half * 32));
        __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
        __m256i odd = _mm256_srai_epi16(bytes, 8);

#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            int32_t words[2];
            memcpy(words, x + (size_t)r * row_bytes + i * 2, sizeof(words));
            __m256i pairs = _mm256_madd_epi16(even, _mm256_set1_epi32(words[0]));
            sums[r] = _mm256_add_epi32(sums[r], pairs);
            pairs = _mm256_madd_epi16(odd, _mm256_set1_epi32(words[1]));
            sums[r] = _mm256_add_epi32(sums[r], pairs);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        float *dst = row_at(op->dst, op->dst_stride, row + (uint32_t)r) + tile_row * 16 + half * 8;
        float scale;

        memcpy(&scale, x + (size_t)r * row_bytes + (size_t)op->k * 2, sizeof(scale));
        __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r]), _mm256_loadu_ps(d));
        value = _mm256_mul_ps(value, _mm256_set1_ps(scale));
        if (op->accumulate) {
            value = _mm256_add_ps(_mm256_loadu_ps(dst), value);
        }
        _mm256_storeu_ps(dst, value);
    }
}

void vtpu_avx2_i8_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    for (uint32_t i = 2 * begin; i < 2 * end; i++) {
        uint32_t row = 0;

        for (; row + 4 <= op->m; row += 4) {
            block(op, row, 4, i / 2, i % 2);
        }
        for (; row < op->m; row++) {
            block(op, row, 1, i / 2, i % 2);
        }
    }
}
