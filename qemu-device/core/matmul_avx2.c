/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with AVX2. Weights become 16-bit pairs, which vpmaddwd multiplies with broadcast
 * pairs of activations: for four rows at a time from a tile that is unpacked once, in the
 * first-level cache; for single rows as they are unpacked.
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
} Tile;

typedef struct Scales {
    __m256 d[2], minimum[2];
} Scales;

INLINE __m256 load_halves(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

INLINE Scales load_scales(const uint8_t *p, uint32_t fmt)
{
    Scales scales = { 0 };

    p += fmt == VTPU_FMT_Q8_0 ? 512 : 256;
    for (int half = 0; half < 2; half++) {
        scales.d[half] = load_halves(p + 16 * half);
        if (fmt == VTPU_FMT_Q4_1) {
            scales.minimum[half] = load_halves(p + 32 + 16 * half);
        }
    }
    return scales;
}

/* Groups are of 64 bytes: four columns of 16 outputs, or of nibbles two times four. */
INLINE int groups_of(uint32_t fmt)
{
    return fmt == VTPU_FMT_Q8_0 ? 8 : 4;
}

INLINE int pairs_of(uint32_t fmt)
{
    return fmt == VTPU_FMT_Q8_0 ? 2 : 4;
}

/* The number of pair j of a group. */
INLINE int pair_at(int group, int j)
{
    return 8 * (j / 2) + 2 * group + j % 2;
}

/* The pairs of half a group. */
INLINE void unpack(__m256i pair[4], const uint8_t *group, int half, uint32_t fmt)
{
    __m256i bytes = _mm256_loadu_si256((const __m256i *)group + half);
    __m256i nibble = _mm256_set1_epi16(15);

    if (fmt == VTPU_FMT_Q8_0) {
        pair[0] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
        pair[1] = _mm256_srai_epi16(bytes, 8);
    } else {
        pair[0] = _mm256_and_si256(bytes, nibble);
        pair[1] = _mm256_and_si256(_mm256_srli_epi16(bytes, 8), nibble);
        pair[2] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
        pair[3] = _mm256_srli_epi16(bytes, 12);
    }
}

INLINE void unpack_all(Tile *tile, const uint8_t *p, uint32_t fmt)
{
    __m256i pair[4];

#pragma GCC unroll 8
    for (int g = 0; g < groups_of(fmt); g++) {
        for (int half = 0; half < 2; half++) {
            unpack(pair, p + 64 * g, half, fmt);
            for (int j = 0; j < pairs_of(fmt); j++) {
                tile->w[pair_at(g, j)][half] = pair[j];
            }
        }
    }
}

/* Functions of their own: inlined, the tile would become variables, too many for registers. */
static __attribute__((noinline)) void unpack_bytes(Tile *tile, const uint8_t *p)
{
    unpack_all(tile, p, VTPU_FMT_Q8_0);
}

static __attribute__((noinline)) void unpack_nibbles(Tile *tile, const uint8_t *p)
{
    unpack_all(tile, p, VTPU_FMT_Q4_0);
}

INLINE __m256 scale_block(__m256i dot, const Scales *scales, int half, uint32_t fmt, float scale,
                          float sum, __m256 acc)
{
    if (fmt == VTPU_FMT_Q4_0) {
        dot = _mm256_add_epi32(dot, _mm256_cvtps_epi32(_mm256_set1_ps(-8.0f * sum)));
    }
    __m256 t = _mm256_cvtepi32_ps(dot);
    if (fmt == VTPU_FMT_Q4_1) {
        t = _mm256_fmadd_ps(t, scales->d[half],
                            _mm256_mul_ps(_mm256_set1_ps(sum), scales->minimum[half]));
    } else {
        t = _mm256_mul_ps(t, scales->d[half]);
    }
    return _mm256_fmadd_ps(t, _mm256_set1_ps(scale), acc);
}

/* The same as vtpu_tile_bytes(), known to the compiler. */
INLINE size_t tile_bytes_of(uint32_t fmt)
{
    return fmt == VTPU_FMT_Q8_0   ? VTPU_TILE_BYTES_Q8_0
           : fmt == VTPU_FMT_Q4_0 ? VTPU_TILE_BYTES_Q4_0
                                  : VTPU_TILE_BYTES_Q4_1;
}

INLINE __m256i pair_of_row(const void *q, int i)
{
    int32_t word;
    memcpy(&word, (const uint8_t *)q + 4 * i, sizeof(word));
    return _mm256_set1_epi32(word);
}

INLINE void fetch(const uint8_t *tile, size_t tile_bytes)
{
#pragma GCC unroll 9
    for (size_t line = 0; line < tile_bytes; line += 64) {
        __builtin_prefetch(tile + FETCH_BLOCKS * tile_bytes + line);
    }
}

INLINE void store(const VtpuMatmul *op, uint32_t tile_row, uint32_t row, const __m256 acc[2])
{
    float *dst = row_at(op->dst, op->dst_stride, row) + (size_t)tile_row * 16;

    for (int half = 0; half < 2; half++) {
        __m256 sum = acc[half];
        if (op->accumulate) {
            sum = _mm256_add_ps(_mm256_loadu_ps(dst + 8 * half), sum);
        }
        _mm256_storeu_ps(dst + 8 * half, sum);
    }
}

/* A tile row times one row */
INLINE void one_row(const VtpuMatmul *op, uint32_t fmt, uint32_t tile_row, uint32_t row)
{
    size_t blocks = op->k / VTPU_BLOCK, tile_bytes = tile_bytes_of(fmt);
    const uint8_t *tile = op->weight + tile_row * blocks * tile_bytes;
    QuantRow x = quant_row(op->quantised, op->k, row);
    __m256 acc[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };

    for (size_t block = 0; block < blocks; block++, tile += tile_bytes) {
        const int16_t *q = x.q + block * VTPU_BLOCK;
        __m256i low = _mm256_setzero_si256(), high = low, pair_low[4], pair_high[4];
        Scales scales = load_scales(tile, fmt);

        fetch(tile, tile_bytes);
#pragma GCC unroll 8
        for (int g = 0; g < groups_of(fmt); g++) {
            unpack(pair_low, tile + 64 * g, 0, fmt);
            unpack(pair_high, tile + 64 * g, 1, fmt);
#pragma GCC unroll 4
            for (int j = 0; j < pairs_of(fmt); j++) {
                __m256i pair = pair_of_row(q, pair_at(g, j));
                low = _mm256_add_epi32(low, _mm256_madd_epi16(pair_low[j], pair));
                high = _mm256_add_epi32(high, _mm256_madd_epi16(pair_high[j], pair));
            }
        }
        acc[0] = scale_block(low, &scales, 0, fmt, x.scale[block], x.sum[block], acc[0]);
        acc[1] = scale_block(high, &scales, 1, fmt, x.scale[block], x.sum[block], acc[1]);
    }
    store(op, tile_row, row, acc);
}

/* The quantised rows of a block, and where the sums of the products go. */
typedef struct BlockRows {
    const uint8_t *q, *scale;     /* of the first row; others at row_bytes */
    size_t row_bytes, blocks;
    __m256 (*acc)[2];
} BlockRows;

/* acc += the tile's block times four rows; steps on to the rows that follow */
INLINE void four_rows(BlockRows *rows, const Tile *tile, const Scales *scales, uint32_t fmt)
{
    size_t row_bytes = rows->row_bytes;
    __m256i low[4], high[4];

#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        low[r] = high[r] = _mm256_setzero_si256();
    }
#pragma GCC unroll 2
    for (int i = 0; i < 16; i++) {
        __m256i w_low = tile->w[i][0], w_high = tile->w[i][1];

#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            __m256i pair = pair_of_row(rows->q + (size_t)r * row_bytes, i);
            low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(w_low, pair));
            high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(w_high, pair));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        const float *s = (const float *)(rows->scale + (size_t)r * row_bytes);
        float scale = s[0], sum = s[rows->blocks];
        __m256 *acc = rows->acc[r];
        acc[0] = scale_block(low[r], scales, 0, fmt, scale, sum, acc[0]);
        acc[1] = scale_block(high[r], scales, 1, fmt, scale, sum, acc[1]);
    }
    rows->q += 4 * row_bytes;
    rows->scale += 4 * row_bytes;
    rows->acc += 4;
}

/* A tile row times a multiple of four rows */
INLINE void many_rows(const VtpuMatmul *op, uint32_t fmt, uint32_t tile_row, uint32_t row,
                      uint32_t rows)
{
    size_t blocks = op->k / VTPU_BLOCK, tile_bytes = tile_bytes_of(fmt);
    const uint8_t *weight = op->weight + tile_row * blocks * tile_bytes;
    QuantRow x = quant_row(op->quantised, op->k, row);
    __m256 acc[ROW_BLOCK][2];
    Tile tile;

    for (uint32_t r = 0; r < rows; r++) {
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    }
    for (size_t block = 0; block < blocks; block++, weight += tile_bytes) {
        BlockRows at = {
            .q = (const uint8_t *)(x.q + block * VTPU_BLOCK),
            .scale = (const uint8_t *)(x.scale + block),
            .row_bytes = quant_row_bytes(op->k),
            .blocks = blocks,
            .acc = acc,
        };
        Scales scales = load_scales(weight, fmt);

        fetch(weight, tile_bytes);
        (fmt == VTPU_FMT_Q8_0 ? unpack_bytes : unpack_nibbles)(&tile, weight);
        for (uint32_t left = rows / 4; left > 0; left--) {
            four_rows(&at, &tile, &scales, fmt);
        }
    }
    for (uint32_t r = 0; r < rows; r++) {
        store(op, tile_row, row + r, acc[r]);
    }
}

INLINE void matmul(const VtpuMatmul *op, uint32_t fmt, uint32_t begin, uint32_t end)
{
    for (uint32_t row = 0; row < op->m; row += ROW_BLOCK) {
        uint32_t rows = op->m - row < ROW_BLOCK ? op->m - row : ROW_BLOCK, fours = rows / 4 * 4;

        for (uint32_t tile_row = begin; tile_row < end; tile_row++) {
            if (fours) {
                many_rows(op, fmt, tile_row, row, fours);
            }
            for (uint32_t r = fours; r < rows; r++) {
                one_row(op, fmt, tile_row, row + r);
            }
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
