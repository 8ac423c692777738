/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with BF16_TILES in AVX2: matmul_bf16_simd.h says how. The weights of a chunk of
 * columns are widened to f32 once for a block of rows, whose part of the chunk stays in the
 * second-level cache for a group of tile rows; sums are carried from chunk to chunk in
 * memory, and three rows at a time have their two chains in registers.
 */
#include "lanes_avx2.h"

#include "matmul_bf16_simd.h"

#define INLINE static inline __attribute__((always_inline))

#define CHUNK 256 /* columns: whole blocks, half of a first-level cache of 32 KiB */
#define ROWS 96   /* of a block */
#define GROUP 8   /* tile rows */

size_t vtpu_avx2_bf16_bytes(uint32_t k, uint32_t m)
{
    return m * simd_bf16_bytes(k);
}

void vtpu_avx2_bf16_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                             uint32_t m, uint32_t begin, uint32_t end)
{
    simd_bf16_quantise(quantised, src, src_stride, k, m, begin, end);
}

/* To 16 outputs a column */
static void widen(v16 *wide, const uint8_t *tiles, uint32_t columns)
{
    for (uint32_t i = 0; i < columns; i += 2, tiles += 64, wide += 2) {
        u16v pair = u_load((const uint32_t *)tiles);
        wide[0] = v_bits(u_shl(pair, 16));
        wide[1] = v_bits(u_and(pair, u_set1(0xffff0000)));
    }
}

/* sums += some columns of a tile row times some rows */
INLINE void multiply(v16 *sums, const float *x, size_t row_bytes, int rows, const v16 *wide,
                     uint32_t columns)
{
    for (uint32_t block = 0; block < columns; block += VTPU_TILE_COLS_BF16_TILES) {
        v16 chain[3][2];

#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) {
            chain[r][0] = chain[r][1] = v_zero();
        }
        for (int i = 0; i < VTPU_TILE_COLS_BF16_TILES; i += 2, x += 2, wide += 2) {
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
#pragma GCC unroll 3
                for (int r = 0; r < rows; r++) {
                    v16 value = v_set1(const_row_at(x, row_bytes, (uint32_t)r)[odd]);
                    chain[r][odd] = v_fma(value, wide[odd], chain[r][odd]);
                }
            }
        }
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) {
            sums[r] = v_add(sums[r], v_add(chain[r][0], chain[r][1]));
        }
    }
}

/* The sums of a block of rows with a group of tile rows. A function of its own: the compiler
 * does not know what the mode is to it. */
static __attribute__((noinline)) void sum(v16 sums[GROUP][ROWS], const VtpuMatmul *op, uint32_t row,
                                          uint32_t rows, uint32_t tile_row, uint32_t tile_rows)
{
    size_t row_bytes = simd_bf16_bytes(op->k);
    size_t tile_row_bytes = vtpu_tile_row_bytes(VTPU_FMT_BF16_TILES, op->k);
    const uint8_t *weight = op->weight + tile_row * tile_row_bytes;
    const float *x = (const float *)(op->quantised + row * row_bytes);
    v16 wide[CHUNK];

    memset(sums, 0, tile_rows * sizeof(*sums));
    for (uint32_t done = 0; done < op->k; done += CHUNK) {
        uint32_t columns = op->k - done < CHUNK ? op->k - done : CHUNK;

        for (uint32_t t = 0; t < tile_rows; t++) {
            uint32_t r = 0;

            widen(wide, weight + t * tile_row_bytes + (size_t)done * 32, columns);
            for (; r + 3 <= rows; r += 3) {
                multiply(&sums[t][r], const_row_at(x + done, row_bytes, r), row_bytes, 3, wide,
                         columns);
            }
            if (r + 2 == rows) {
                multiply(&sums[t][r], const_row_at(x + done, row_bytes, r), row_bytes, 2, wide,
                         columns);
            } else if (r < rows) {
                multiply(&sums[t][r], const_row_at(x + done, row_bytes, r), row_bytes, 1, wide,
                         columns);
            }
        }
    }
}

void vtpu_avx2_bf16_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    unsigned mode = _mm_getcsr();
    v16 sums[GROUP][ROWS];

    for (uint32_t row = 0; row < op->m; row += ROWS) {
        uint32_t rows = op->m - row < ROWS ? op->m - row : ROWS;

        for (uint32_t tile_row = begin; tile_row < end; tile_row += GROUP) {
            uint32_t tile_rows = end - tile_row < GROUP ? end - tile_row : GROUP;

            _mm_setcsr(mode | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
            sum(sums, op, row, rows, tile_row, tile_rows);
            _mm_setcsr(mode);
            for (uint32_t r = 0; r < rows; r++) {
                float *dst = row_at(op->dst, op->dst_stride, row + r) + (size_t)tile_row * 16;

                for (uint32_t t = 0; t < tile_rows; t++, dst += 16) {
                    v_store(dst, op->accumulate ? v_add(v_load(dst), sums[t][r]) : sums[t][r]);
                }
            }
        }
    }
}
