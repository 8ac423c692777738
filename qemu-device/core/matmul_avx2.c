/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with AVX2. A tile is unpacked to 16-bit pairs in the first-level
 * cache; vpmaddwd multiplies them with broadcast pairs of activations.
 */
#include <immintrin.h>

#include "kernels_simd.h"

#define INLINE static inline __attribute__((always_inline))

/* Rows whose accumulators stay in the first-level cache. */
#define ROW_BLOCK 64

typedef struct Tile {
    __m256i w[16][2];             /* pair i of the quantised order, for 8 + 8 outputs */
    __m256 d[2], minimum[2];
} Tile;

INLINE __m256 load_halves(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

INLINE void load_half_tile(Tile *tile, const uint8_t *p, uint32_t fmt, int half)
{
    __m256i nibble = _mm256_set1_epi16(15);
    size_t scales = fmt == VTPU_FMT_Q8_0 ? 512 : 256;

    for (int g = 0; g < (fmt == VTPU_FMT_Q8_0 ? 8 : 4); g++) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(p + 64 * g + 32 * half));
        if (fmt == VTPU_FMT_Q8_0) {
            tile->w[2 * g][half] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
            tile->w[2 * g + 1][half] = _mm256_srai_epi16(bytes, 8);
        } else {
            tile->w[2 * g][half] = _mm256_and_si256(bytes, nibble);
            tile->w[2 * g + 1][half] = _mm256_and_si256(_mm256_srli_epi16(bytes, 8), nibble);
            tile->w[8 + 2 * g][half] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
            tile->w[9 + 2 * g][half] = _mm256_srli_epi16(bytes, 12);
        }
    }
    tile->d[half] = load_halves(p + scales + 16 * half);
    if (fmt == VTPU_FMT_Q4_1) {
        tile->minimum[half] = load_halves(p + scales + 32 + 16 * half);
    }
}

INLINE __m256 scale_block(__m256i dot, const Tile *tile, int half, uint32_t fmt, float scale,
                          float sum, __m256 acc)
{
    if (fmt == VTPU_FMT_Q4_0) {
        dot = _mm256_add_epi32(dot, _mm256_cvtps_epi32(_mm256_set1_ps(-8.0f * sum)));
    }
    __m256 t = _mm256_cvtepi32_ps(dot);
    if (fmt == VTPU_FMT_Q4_1) {
        t = _mm256_fmadd_ps(t, tile->d[half],
                            _mm256_mul_ps(_mm256_set1_ps(sum), tile->minimum[half]));
    } else {
        t = _mm256_mul_ps(t, tile->d[half]);
    }
    return _mm256_fmadd_ps(t, _mm256_set1_ps(scale), acc);
}

/* acc[r] += the tile's block times rows [row, row + rows) */
INLINE void tile_rows(__m256 (*acc)[2], const Tile *tile, const VtpuMatmul *op, uint32_t fmt,
                      uint32_t row, uint32_t block, int rows)
{
    __m256i dot[4][2];
    QuantRow x[4];

    for (int r = 0; r < rows; r++) {
        x[r] = quant_row(op->quantised, op->k, row + (uint32_t)r);
        x[r].q += (size_t)block * VTPU_BLOCK;
        dot[r][0] = dot[r][1] = _mm256_setzero_si256();
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        __m256i low = tile->w[i][0], high = tile->w[i][1];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            int32_t word;
            memcpy(&word, x[r].q + 2 * i, sizeof(word));
            __m256i q = _mm256_set1_epi32(word);
            dot[r][0] = _mm256_add_epi32(dot[r][0], _mm256_madd_epi16(low, q));
            dot[r][1] = _mm256_add_epi32(dot[r][1], _mm256_madd_epi16(high, q));
        }
    }
    for (int r = 0; r < rows; r++) {
        for (int half = 0; half < 2; half++) {
            acc[r][half] = scale_block(dot[r][half], tile, half, fmt, x[r].scale[block],
                                       x[r].sum[block], acc[r][half]);
        }
    }
}

INLINE void tile_row_product(const VtpuMatmul *op, uint32_t fmt, uint32_t tile_row, uint32_t row,
                             uint32_t rows)
{
    uint32_t blocks = op->k / VTPU_BLOCK;
    size_t tile_bytes = vtpu_tile_bytes(fmt);
    const uint8_t *weight = op->weight + (size_t)tile_row * blocks * tile_bytes;
    __m256 acc[ROW_BLOCK][2];

    for (uint32_t r = 0; r < rows; r++) {
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    }
    for (uint32_t block = 0; block < blocks; block++, weight += tile_bytes) {
        Tile tile;
        uint32_t r = 0;

        load_half_tile(&tile, weight, fmt, 0);
        load_half_tile(&tile, weight, fmt, 1);
        for (; r + 4 <= rows; r += 4) {
            tile_rows(acc + r, &tile, op, fmt, row + r, block, 4);
        }
        for (; r < rows; r++) {
            tile_rows(acc + r, &tile, op, fmt, row + r, block, 1);
        }
    }
    for (uint32_t r = 0; r < rows; r++) {
        float *dst = row_at(op->dst, op->dst_stride, row + r) + (size_t)tile_row * 16;
        for (int half = 0; half < 2; half++) {
            __m256 sum = acc[r][half];
            if (op->accumulate) {
                sum = _mm256_add_ps(_mm256_loadu_ps(dst + 8 * half), sum);
            }
            _mm256_storeu_ps(dst + 8 * half, sum);
        }
    }
}

INLINE void matmul(const VtpuMatmul *op, uint32_t fmt, uint32_t begin, uint32_t end)
{
    for (uint32_t row = 0; row < op->m; row += ROW_BLOCK) {
        uint32_t rows = op->m - row < ROW_BLOCK ? op->m - row : ROW_BLOCK;

        for (uint32_t tile_row = begin; tile_row < end; tile_row++) {
            tile_row_product(op, fmt, tile_row, row, rows);
        }
    }
}

void vtpu_avx2_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    switch (op->fmt) {
    case VTPU_FMT_Q8_0:
        matmul(op, VTPU_FMT_Q8_0, begin, end);
        break;
    case VTPU_FMT_Q4_0:
        matmul(op, VTPU_FMT_Q4_0, begin, end);
        break;
    default:
        matmul(op, VTPU_FMT_Q4_1, begin, end);
        break;
    }
}
