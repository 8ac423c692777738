/* SPDX-License-Identifier: MIT */
/* What the products of the AVX-512 and AMX paths share: weight tiles into registers, results out. */
#ifndef VTPU_TILE_AVX512_H
#define VTPU_TILE_AVX512_H

#include <immintrin.h>

#include "kernels_simd.h"

#define INLINE static inline __attribute__((always_inline))

/* Rows whose accumulators stay in the first-level cache. */
#define ROW_BLOCK 64
/* Tiles side by side that share the loads of the activations. */
#define PANEL_TILES VTPU_MATMUL_GRAIN

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

INLINE void store_row(const VtpuMatmul *op, __m512 acc, uint32_t tile_row, uint32_t row)
{
    float *dst = row_at(op->dst, op->dst_stride, row) + (size_t)tile_row * 16;
    _mm512_storeu_ps(dst, op->accumulate ? _mm512_add_ps(_mm512_loadu_ps(dst), acc) : acc);
}

#endif
