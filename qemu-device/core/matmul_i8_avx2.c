/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with I8 in AVX2. Its byte product, vpmaddubsw, takes unsigned times signed bytes and
 * adds two products in 16 bits: |w| times an activation with the sign of w. Two of those are
 * at most 2 * 128 * 127, so nothing saturates, and vpmaddwd with ones adds on in 32 bits.
 *
 * A block of rows, which stays in the second-level cache, is multiplied with a tile row a
 * chunk of columns at a time, which stays in the first-level cache; four rows at a time have
 * their sums in registers.
 */
#include "lanes_avx2.h"

#include "kernels_simd.h"
#include "quantise_simd.h"

#define INLINE static inline __attribute__((always_inline))

/* Columns whose weights take half of a first-level cache of 32 KiB. */
#define CHUNK 1024
/* Rows of a block: at most, and as many as leave room in a second-level cache of 512 KiB. */
#define BLOCK_ROWS 128
#define BLOCK_BYTES (192 << 10)

/* A quantised row: k int8, then the scale. */

static size_t row_bytes_of(uint32_t k)
{
    return odd_lines((size_t)k + sizeof(float));
}

size_t vtpu_avx2_i8_bytes(uint32_t k, uint32_t m)
{
    return m * row_bytes_of(k);
}

INLINE __m256i round8_scaled(const float *x, __m256 inverse)
{
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
}

void vtpu_avx2_i8_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                           uint32_t m, uint32_t begin, uint32_t end)
{
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);

    (void)m;
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        uint8_t *q = quantised + row * row_bytes_of(k);
        float scale;
        __m256 inverse = _mm256_set1_ps(i8_inverse(x, k, &scale));

        for (uint32_t i = 0; i < k; i += 32) {
            __m256i low = _mm256_packs_epi32(round8_scaled(x + i, inverse),
                                             round8_scaled(x + i + 8, inverse));
            __m256i high = _mm256_packs_epi32(round8_scaled(x + i + 16, inverse),
                                              round8_scaled(x + i + 24, inverse));
            __m256i bytes = _mm256_packs_epi16(low, high); /* in each half, of all four */
            _mm256_storeu_si256((__m256i *)(q + i), _mm256_permutevar8x32_epi32(bytes, in_order));
        }
        memcpy(q + k, &scale, sizeof(scale));
    }
}

/* 16 outputs of a row */
typedef struct Sums {
    __m256i low, high;
} Sums;

/* Eight outputs, four columns */
INLINE __m256i product(__m256i w, __m256i magnitude, __m256i x)
{
    __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

/* sums += some columns of a tile row times some rows */
INLINE void multiply(Sums *sums, const uint8_t *x, size_t row_bytes, int rows,
                     const uint8_t *tiles, uint32_t columns)
{
    __m256i low[4], high[4];

#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        low[r] = sums[r].low;
        high[r] = sums[r].high;
    }
#pragma GCC unroll 2
    for (uint32_t i = 0; i < columns; i += 4, x += 4, tiles += 64) {
        __m256i w_low = _mm256_loadu_si256((const __m256i *)tiles);
        __m256i w_high = _mm256_loadu_si256((const __m256i *)tiles + 1);
        __m256i magnitude_low = _mm256_abs_epi8(w_low), magnitude_high = _mm256_abs_epi8(w_high);

#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            int32_t word;
            memcpy(&word, x + (size_t)r * row_bytes, sizeof(word));
            __m256i four = _mm256_set1_epi32(word);
            low[r] = _mm256_add_epi32(low[r], product(w_low, magnitude_low, four));
            high[r] = _mm256_add_epi32(high[r], product(w_high, magnitude_high, four));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        sums[r].low = low[r];
        sums[r].high = high[r];
    }
}

INLINE __m256 scaled(__m256i sum, const float *d, float scale)
{
    return _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(d)),
                         _mm256_set1_ps(scale));
}

INLINE void store(const VtpuMatmul *op, float *dst, const Sums *sums, const float *d, float scale)
{
    __m256 low = scaled(sums->low, d, scale), high = scaled(sums->high, d + 8, scale);

    if (op->accumulate) {
        low = _mm256_add_ps(_mm256_loadu_ps(dst), low);
        high = _mm256_add_ps(_mm256_loadu_ps(dst + 8), high);
    }
    _mm256_storeu_ps(dst, low);
    _mm256_storeu_ps(dst + 8, high);
}

/* Outputs of neighbouring rows lie a stride apart, in other pages and often in one set of the
 * first-level cache: their lines are asked for before the product that they wait for. */
INLINE void prefetch_outputs(const VtpuMatmul *op, uint32_t tile_row, uint32_t row)
{
#pragma GCC unroll 4
    for (uint32_t r = row; r < row + 4; r++) {
        __builtin_prefetch(row_at(op->dst, op->dst_stride, r) + (size_t)tile_row * 16, 1);
    }
}

/* 16 outputs of a block of rows */
static void tile_row_product(const VtpuMatmul *op, uint32_t tile_row, uint32_t row, uint32_t rows)
{
    size_t row_bytes = row_bytes_of(op->k);
    const uint8_t *x = op->quantised + row * row_bytes;
    const uint8_t *tiles = op->weight + tile_row * vtpu_tile_row_bytes(VTPU_FMT_I8, op->k);
    const float *d = (const float *)(tiles + (size_t)op->k * 16);
    Sums sums[BLOCK_ROWS];

    memset(sums, 0, rows * sizeof(*sums));
    for (uint32_t done = 0; done < op->k; done += CHUNK) {
        uint32_t columns = op->k - done < CHUNK ? op->k - done : CHUNK, r = 0;
        const uint8_t *chunk = tiles + (size_t)done * 16;

        for (; r + 4 <= rows; r += 4) {
            prefetch_outputs(op, tile_row, row + r);
            multiply(sums + r, x + r * row_bytes + done, row_bytes, 4, chunk, columns);
        }
        for (; r < rows; r++) {
            multiply(sums + r, x + r * row_bytes + done, row_bytes, 1, chunk, columns);
        }
    }
    for (uint32_t r = 0; r < rows; r++) {
        float scale;

        memcpy(&scale, x + r * row_bytes + op->k, sizeof(scale));
        store(op, row_at(op->dst, op->dst_stride, row + r) + (size_t)tile_row * 16, &sums[r], d,
              scale);
    }
}

void vtpu_avx2_i8_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    uint32_t most = (uint32_t)(BLOCK_BYTES / row_bytes_of(op->k)) & ~3u;

    most = most > BLOCK_ROWS ? BLOCK_ROWS : most < 16 ? 16 : most;
    for (uint32_t row = 0; row < op->m; row += most) {
        uint32_t rows = op->m - row < most ? op->m - row : most;

        for (uint32_t tile_row = begin; tile_row < end; tile_row++) {
            tile_row_product(op, tile_row, row, rows);
        }
    }
}
