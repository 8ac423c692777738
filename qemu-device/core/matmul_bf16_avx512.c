/* SPDX-License-Identifier: MIT */
/* MATMUL with BF16_TILES: the AVX-512 path. */
#include "lanes_avx512.h"

#define BF16_ROWS 8
#include "matmul_bf16_simd.h"

size_t vtpu_avx512_bf16_bytes(uint32_t k, uint32_t m)
{
    return m * simd_bf16_bytes(k);
}

void vtpu_avx512_bf16_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                             uint32_t m, uint32_t begin, uint32_t end)
{
    simd_bf16_quantise(quantised, src, src_stride, k, m, begin, end);
}

static inline __attribute__((always_inline)) void
bf16_rows(float *sums, const float *x, size_t row_bytes, const uint8_t *tiles, uint32_t k, int rows)
{
    v16 acc[BF16_ROWS];

#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        acc[r] = v_zero();
    }
    for (uint32_t block = 0; block < k; block += VTPU_TILE_COLS_BF16_TILES, x += VTPU_TILE_COLS_BF16_TILES) {
        v16 even[BF16_ROWS], odd[BF16_ROWS];

#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            even[r] = odd[r] = v_zero();
        }
        for (int i = 0; i < VTPU_TILE_COLS_BF16_TILES; i += 2, tiles += 64) {
            u16v pair = u_load((const uint32_t *)tiles);
            v16 first = v_bits(u_shl(pair, 16)), second = v_bits(u_and(pair, u_set1(0xffff0000)));

#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const float *at = const_row_at(x + i, row_bytes, (uint32_t)r);
                even[r] = v_fma(v_set1(at[0]), first, even[r]);
                odd[r] = v_fma(v_set1(at[1]), second, odd[r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            acc[r] = v_add(acc[r], v_add(even[r], odd[r]));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        v_store(sums + 16 * r, acc[r]);
    }
}

/* Functions of their own: the compiler does not know what the mode is to them. */
static __attribute__((noinline)) void bf16_some_rows(float *sums, const float *x, size_t row_bytes,
                                                     const uint8_t *tiles, uint32_t k, uint32_t rows)
{
    if (rows == BF16_ROWS) {
        bf16_rows(sums, x, row_bytes, tiles, k, BF16_ROWS);
        return;
    }
    for (; rows > 0; rows--, sums += 16, x = const_row_at(x, row_bytes, 1)) {
        bf16_rows(sums, x, row_bytes, tiles, k, 1);
    }
}

void vtpu_avx512_bf16_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    size_t row_bytes = simd_bf16_bytes(op->k);
    size_t tile_row_bytes = vtpu_tile_row_bytes(VTPU_FMT_BF16_TILES, op->k);
    unsigned mode = _mm_getcsr();
    float sums[BF16_ROWS * 16];

    for (uint32_t tile_row = begin; tile_row < end; tile_row++) {
        const uint8_t *tiles = op->weight + tile_row * tile_row_bytes;

        for (uint32_t row = 0; row < op->m; row += BF16_ROWS) {
            uint32_t rows = op->m - row < BF16_ROWS ? op->m - row : BF16_ROWS;

            _mm_setcsr(mode | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
            bf16_some_rows(sums, (const float *)(op->quantised + row * row_bytes), row_bytes, tiles,
                           op->k, rows);
            _mm_setcsr(mode);
            for (uint32_t r = 0; r < rows; r++) {
                float *dst = row_at(op->dst, op->dst_stride, row + r) + (size_t)tile_row * 16;
                v16 sum = v_load(sums + 16 * r);
                v_store(dst, op->accumulate ? v_add(v_load(dst), sum) : sum);
            }
        }
    }
}
