/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with VNNI. A tile's 512 weights fill sixteen registers as 16-bit
 * pairs; each row of activations then costs sixteen vpdpwssd whose operand is
 * a broadcast from memory, so the unpacking is shared by all rows.
 */
#include <immintrin.h>

#include "kernels_simd.h"

#define INLINE static inline __attribute__((always_inline))

/* Rows whose accumulators stay in the first-level cache. */
#define ROW_BLOCK 64

typedef struct Tile {
    __m512i w[16];                /* pair i of the quantised order, for 16 outputs */
    __m512 d, minimum;
} Tile;

INLINE __m512 load_halves(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

INLINE void load_tile(Tile *tile, const uint8_t *p, uint32_t fmt)
{
    if (fmt == VTPU_FMT_Q8_0) {
        for (int g = 0; g < 8; g++) {
            __m512i bytes = _mm512_loadu_si512(p + 64 * g);
            tile->w[2 * g] = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8);
            tile->w[2 * g + 1] = _mm512_srai_epi16(bytes, 8);
        }
        tile->d = load_halves(p + 512);
        return;
    }
    __m512i nibble = _mm512_set1_epi16(15);
    for (int g = 0; g < 4; g++) {
        __m512i bytes = _mm512_loadu_si512(p + 64 * g);
        tile->w[2 * g] = _mm512_and_si512(bytes, nibble);
        tile->w[2 * g + 1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 8), nibble);
        tile->w[8 + 2 * g] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
        tile->w[9 + 2 * g] = _mm512_srli_epi16(bytes, 12);
    }
    tile->d = load_halves(p + 256);
    if (fmt == VTPU_FMT_Q4_1) {
        tile->minimum = load_halves(p + 288);
    }
}

INLINE __m512i pair(const int16_t *q, int i)
{
    int32_t word;
    memcpy(&word, q + 2 * i, sizeof(word));
    return _mm512_set1_epi32(word);
}

/* acc[r] += the tile's block times rows [row, row + rows) */
INLINE void tile_rows(__m512 *acc, const Tile *tile, const VtpuMatmul *op, uint32_t fmt,
                      uint32_t row, uint32_t block, int rows)
{
    const uint8_t *first = (const uint8_t *)(quant_row(op->quantised, op->k, row).q +
                                             (size_t)block * VTPU_BLOCK);
    const uint8_t *scales = (const uint8_t *)(quant_row(op->quantised, op->k, row).scale + block);
    size_t row_bytes = quant_row_bytes(op->k);
    size_t blocks = op->k / VTPU_BLOCK;
    __m512i dot[8];

    for (int r = 0; r < rows; r++) {
        dot[r] = _mm512_setzero_si512();
        if (fmt == VTPU_FMT_Q4_0) {
            const float *scale = (const float *)(scales + r * row_bytes);
            dot[r] = _mm512_cvtps_epi32(_mm512_set1_ps(-8.0f * scale[blocks]));
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const int16_t *q = (const int16_t *)(first + r * row_bytes);
            dot[r] = _mm512_dpwssd_epi32(dot[r], tile->w[i], pair(q, i));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const float *scale = (const float *)(scales + r * row_bytes);
        __m512 t = _mm512_cvtepi32_ps(dot[r]);
        if (fmt == VTPU_FMT_Q4_1) {
            t = _mm512_fmadd_ps(t, tile->d,
                                _mm512_mul_ps(_mm512_set1_ps(scale[blocks]), tile->minimum));
        } else {
            t = _mm512_mul_ps(t, tile->d);
        }
        acc[r] = _mm512_fmadd_ps(t, _mm512_set1_ps(scale[0]), acc[r]);
    }
}

INLINE void store_rows(const VtpuMatmul *op, const __m512 *acc, uint32_t tile_row, uint32_t row,
                       uint32_t rows)
{
    for (uint32_t r = 0; r < rows; r++) {
        float *dst = row_at(op->dst, op->dst_stride, row + r) + (size_t)tile_row * 16;
        __m512 before = op->accumulate ? _mm512_loadu_ps(dst) : _mm512_setzero_ps();
        _mm512_storeu_ps(dst, op->accumulate ? _mm512_add_ps(before, acc[r]) : acc[r]);
    }
}

/* One tile row for a few rows: accumulators in registers. */
INLINE void few_rows(const VtpuMatmul *op, uint32_t fmt, uint32_t tile_row, uint32_t row, int rows)
{
    uint32_t blocks = op->k / VTPU_BLOCK;
    size_t tile_bytes = vtpu_tile_bytes(fmt);
    const uint8_t *weight = op->weight + (size_t)tile_row * blocks * tile_bytes;
    __m512 acc[8];

    for (int r = 0; r < rows; r++) {
        acc[r] = _mm512_setzero_ps();
    }
    for (uint32_t block = 0; block < blocks; block++, weight += tile_bytes) {
        Tile tile;
        load_tile(&tile, weight, fmt);
        tile_rows(acc, &tile, op, fmt, row, block, rows);
    }
    store_rows(op, acc, tile_row, row, (uint32_t)rows);
}

INLINE void many_rows(const VtpuMatmul *op, uint32_t fmt, uint32_t tile_row, uint32_t row,
                      uint32_t rows)
{
    uint32_t blocks = op->k / VTPU_BLOCK;
    size_t tile_bytes = vtpu_tile_bytes(fmt);
    const uint8_t *weight = op->weight + (size_t)tile_row * blocks * tile_bytes;
    __m512 acc[ROW_BLOCK];

    for (uint32_t r = 0; r < rows; r++) {
        acc[r] = _mm512_setzero_ps();
    }
    for (uint32_t block = 0; block < blocks; block++, weight += tile_bytes) {
        Tile tile;
        uint32_t r = 0;

        load_tile(&tile, weight, fmt);
        for (; r + 8 <= rows; r += 8) {
            tile_rows(acc + r, &tile, op, fmt, row + r, block, 8);
        }
        if (rows - r >= 4) {
            tile_rows(acc + r, &tile, op, fmt, row + r, block, 4);
            r += 4;
        }
        for (; r < rows; r++) {
            tile_rows(acc + r, &tile, op, fmt, row + r, block, 1);
        }
    }
    store_rows(op, acc, tile_row, row, rows);
}

INLINE void matmul(const VtpuMatmul *op, uint32_t fmt, uint32_t begin, uint32_t end)
{
    for (uint32_t row = 0; row < op->m; row += ROW_BLOCK) {
        uint32_t rows = op->m - row < ROW_BLOCK ? op->m - row : ROW_BLOCK;

        for (uint32_t tile_row = begin; tile_row < end; tile_row++) {
            switch (rows) {
            case 1:
                few_rows(op, fmt, tile_row, row, 1);
                break;
            case 2:
                few_rows(op, fmt, tile_row, row, 2);
                break;
            case 4:
                few_rows(op, fmt, tile_row, row, 4);
                break;
            default:
                many_rows(op, fmt, tile_row, row, rows);
                break;
            }
        }
    }
}

void vtpu_avx512_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
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
