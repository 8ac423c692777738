/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with I8 in AVX-512 VNNI. The byte product takes one unsigned factor: weights
 * become 128 more, and 128 times the sum of a row's activations is taken off in the end.
 * All of it is modulo 2^32, where the result fits.
 */
#include "lanes_avx512.h"

#include "kernels_simd.h"
#include "quantise_simd.h"

#define INLINE static inline __attribute__((always_inline))

/* A quantised row: k int8, then the scale and the integers' sum. */

static size_t row_bytes_of(uint32_t k)
{
    return odd_lines((size_t)k + 8);
}

size_t vtpu_avx512_i8_bytes(uint32_t k, uint32_t m)
{
    return m * row_bytes_of(k);
}

void vtpu_avx512_i8_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                             uint32_t m, uint32_t begin, uint32_t end)
{
    (void)m;
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        uint8_t *q = quantised + row * row_bytes_of(k);
        float scale, inverse = i8_inverse(x, k, &scale);
        u16v sum = u_set1(0);
        int32_t total;

        for (uint32_t i = 0; i < k; i += 16) {
            u16v rounded = u_round(v_mul(v_load(x + i), v_set1(inverse)));
            _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtepi32_epi8(rounded));
            sum = u_add(sum, rounded);
        }
        total = u_reduce_add(sum);
        memcpy(q + k, &scale, sizeof(scale));
        memcpy(q + k + 4, &total, sizeof(total));
    }
}

/* rows x tiles, whose sums stay in registers */
INLINE void block(const VtpuMatmul *op, uint32_t row, int rows, uint32_t tile_row, int tiles)
{
    size_t row_bytes = row_bytes_of(op->k);
    size_t tile_row_bytes = vtpu_tile_row_bytes(VTPU_FMT_I8, op->k);
    const uint8_t *x = op->quantised + row * row_bytes;
    const uint8_t *w = op->weight + tile_row * tile_row_bytes;
    __m512i sums[8][4], flip = _mm512_set1_epi8(-128);

#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int t = 0; t < tiles; t++) {
            sums[r][t] = _mm512_setzero_si512();
        }
    }
    for (size_t i = 0; i < op->k; i += 4) {
        __m512i weights[4];

#pragma GCC unroll 4
        for (int t = 0; t < tiles; t++) {
            weights[t] = _mm512_loadu_si512(w + (size_t)t * tile_row_bytes + i * 16);
            weights[t] = _mm512_xor_si512(weights[t], flip);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int32_t word;
            memcpy(&word, x + (size_t)r * row_bytes + i, sizeof(word));
#pragma GCC unroll 4
            for (int t = 0; t < tiles; t++) {
                sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], weights[t], _mm512_set1_epi32(word));
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        float *dst = row_at(op->dst, op->dst_stride, row + (uint32_t)r) + (size_t)tile_row * 16;
        const uint8_t *tail = x + (size_t)r * row_bytes + op->k;
        float scale;
        int32_t sum;

        memcpy(&scale, tail, sizeof(scale));
        memcpy(&sum, tail + 4, sizeof(sum));
#pragma GCC unroll 4
        for (int t = 0; t < tiles; t++) {
            const uint8_t *end = w + (size_t)(t + 1) * tile_row_bytes;
            u16v dot = u_sub(sums[r][t], u_set1((uint32_t)sum * 128));
            v16 value = v_mul(v_from_int(dot), v_load((const float *)(end - VTPU_TILE_TAIL_I8)));

            value = v_mul(value, v_set1(scale));
            v_store(dst + 16 * t, op->accumulate ? v_add(v_load(dst + 16 * t), value) : value);
        }
    }
}

/* All rows times some tiles: the weights come from memory for the first rows only. */
INLINE void panel(const VtpuMatmul *op, uint32_t tile_row, int tiles)
{
    uint32_t row = 0;

    for (; row + 6 <= op->m; row += 6) {
        block(op, row, 6, tile_row, tiles);
    }
    for (; row + 2 <= op->m; row += 2) {
        block(op, row, 2, tile_row, tiles);
    }
    for (; row < op->m; row++) {
        block(op, row, 1, tile_row, tiles);
    }
}

void vtpu_avx512_i8_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    for (; begin + 4 <= end; begin += 4) {
        panel(op, begin, 4);
    }
    for (; begin < end; begin++) {
        panel(op, begin, 1);
    }
}
