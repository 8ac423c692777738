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
/* How far ahead of the products weights are fetched. */
#define FETCH_BLOCKS 8

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

/* The quantised rows of a block, and where the sums of the products go. */
typedef struct BlockRows {
    const uint8_t *q, *scale;     /* of the first row; others at row_bytes */
    size_t row_bytes, blocks;
    __m256 (*acc)[2];
} BlockRows;

/* Sums are separate variables: the compiler keeps an array of them in memory. */
#define CLEAR_ROW(r) __m256i low##r = _mm256_setzero_si256(), high##r = low##r;

#define MULTIPLY_ROW(r)                                                       \
    {                                                                         \
        int32_t word;                                                         \
        memcpy(&word, q + r * row_bytes, sizeof(word));                       \
        __m256i x = _mm256_set1_epi32(word);                                  \
        low##r = _mm256_add_epi32(low##r, _mm256_madd_epi16(w_low, x));       \
        high##r = _mm256_add_epi32(high##r, _mm256_madd_epi16(w_high, x));    \
    }

#define SCALE_ROW(r)                                                                       \
    {                                                                                      \
        const float *s = (const float *)(rows->scale + r * row_bytes);                     \
        float scale = s[0], sum = s[rows->blocks];                                         \
        __m256 *acc = rows->acc[r];                                                        \
        acc[0] = scale_block(low##r, tile, 0, fmt, scale, sum, acc[0]);                    \
        acc[1] = scale_block(high##r, tile, 1, fmt, scale, sum, acc[1]);                   \
    }

#define ROWS_1(f) f(0)
#define ROWS_4(f) f(0) f(1) f(2) f(3)

/* acc += the tile's block times n rows; steps on to the rows that follow */
#define DEFINE_TILE_ROWS(n, unrolling)                                                   \
    INLINE void tile_rows_##n(BlockRows *rows, const Tile *tile, uint32_t fmt)           \
    {                                                                                    \
        const uint8_t *q = rows->q;                                                      \
        size_t row_bytes = rows->row_bytes;                                              \
        ROWS_##n(CLEAR_ROW)                                                              \
        _Pragma(unrolling)                                                               \
        for (int i = 0; i < 16; i++, q += 4) {                                           \
            __m256i w_low = tile->w[i][0], w_high = tile->w[i][1];                       \
            ROWS_##n(MULTIPLY_ROW)                                                       \
        }                                                                                \
        ROWS_##n(SCALE_ROW)                                                              \
        rows->q += n * row_bytes;                                                        \
        rows->scale += n * row_bytes;                                                    \
        rows->acc += n;                                                                  \
    }

DEFINE_TILE_ROWS(1, "GCC unroll 16") /* then the tile stays in registers */
DEFINE_TILE_ROWS(4, "GCC unroll 1")

INLINE void tile_row_product(const VtpuMatmul *op, uint32_t fmt, uint32_t tile_row, uint32_t row,
                             uint32_t rows)
{
    size_t blocks = op->k / VTPU_BLOCK, tile_bytes = vtpu_tile_bytes(fmt);
    const uint8_t *weight = op->weight + tile_row * blocks * tile_bytes;
    QuantRow x = quant_row(op->quantised, op->k, row);
    __m256 acc[ROW_BLOCK][2];

    for (uint32_t r = 0; r < rows; r++) {
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    }
    for (size_t block = 0; block < blocks; block++) {
        BlockRows at = {
            .q = (const uint8_t *)(x.q + block * VTPU_BLOCK),
            .scale = (const uint8_t *)(x.scale + block),
            .row_bytes = quant_row_bytes(op->k),
            .blocks = blocks,
            .acc = acc,
        };
        Tile tile;

        for (size_t line = 0; line < tile_bytes; line += 64) {
            __builtin_prefetch(weight + (block + FETCH_BLOCKS) * tile_bytes + line);
        }
        load_half_tile(&tile, weight + block * tile_bytes, fmt, 0);
        load_half_tile(&tile, weight + block * tile_bytes, fmt, 1);
        for (uint32_t left = rows / 4; left > 0; left--) {
            tile_rows_4(&at, &tile, fmt);
        }
        for (uint32_t left = rows % 4; left > 0; left--) {
            tile_rows_1(&at, &tile, fmt);
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
