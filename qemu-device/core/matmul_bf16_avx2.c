/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with BF16_TILES in AVX2: matmul_bf16_simd.h says how. A block of rows is multiplied
 * with a group of tile rows a chunk of columns at a time: the chunk of one tile row stays in
 * the first-level cache, that of the block in the second. Sums are carried from chunk to chunk
 * in memory; a strip of rows at a time has its chains in registers.
 */
#include "lanes_avx2.h"

#include "matmul_bf16_simd.h"

#define INLINE static inline __attribute__((always_inline))

#define CHUNK 512 /* columns: whole blocks, half of a first-level cache of 32 KiB */
#define ROWS 96   /* of a block: whole strips */
#define GROUP 8   /* tile rows */
#define STRIP 6   /* rows: one chain of each has 12 of the 16 registers */

/* How far ahead of the products weights are fetched. */
#define FETCH_BLOCKS 8

size_t vtpu_avx2_bf16_bytes(uint32_t k, uint32_t m)
{
    return m * simd_bf16_bytes(k);
}

void vtpu_avx2_bf16_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                             uint32_t m, uint32_t begin, uint32_t end)
{
    simd_bf16_quantise(quantised, src, src_stride, k, m, begin, end);
}

/* chain += the even or the odd column of a pair times some rows. Weights are widened again for
 * each strip: kept so, they would take twice the room in the caches, which few rows do not
 * repay and many hardly. */
INLINE void add_column(v16 *chain, bool odd, const float *x, size_t row_bytes, int rows,
                       const uint8_t *pair)
{
    u16v both = u_load((const uint32_t *)pair);
    v16 w = v_bits(odd ? u_and(both, u_set1(0xffff0000)) : u_shl(both, 16));

#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        chain[r] = v_fma(v_set1(const_row_at(x, row_bytes, (uint32_t)r)[odd]), w, chain[r]);
    }
}

/* sums += some columns of a tile row times a strip. Few rows need both chains at once to keep
 * the units busy; of more, registers hold one, and the other is put into memory. */
INLINE void multiply(v16 *sums, const float *x, size_t row_bytes, int rows, const uint8_t *tiles,
                     uint32_t columns, bool fetch)
{
    bool at_once = rows <= 2;

    for (uint32_t block = 0; block < columns; block += VTPU_TILE_COLS_BF16_TILES) {
        v16 chain[2][STRIP], even[STRIP];

        for (int line = 0; fetch && line < VTPU_TILE_BYTES_BF16_TILES; line += 64) {
            __builtin_prefetch(tiles + FETCH_BLOCKS * VTPU_TILE_BYTES_BF16_TILES + line);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            chain[0][r] = chain[1][r] = v_zero();
        }
#pragma GCC unroll 4
        for (int i = 0; i < VTPU_TILE_COLS_BF16_TILES; i += 2) {
            add_column(chain[0], false, x + i, row_bytes, rows, tiles + 32 * i);
            if (at_once) {
                add_column(chain[1], true, x + i, row_bytes, rows, tiles + 32 * i);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            even[r] = chain[0][r];
        }
        if (!at_once) {
            /* The compiler does not keep in registers what it has lost sight of. */
            __asm__("" : "+m"(even));
#pragma GCC unroll 4
            for (int i = 0; i < VTPU_TILE_COLS_BF16_TILES; i += 2) {
                add_column(chain[1], true, x + i, row_bytes, rows, tiles + 32 * i);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            sums[r] = v_add(sums[r], v_add(even[r], chain[1][r]));
        }
        x += VTPU_TILE_COLS_BF16_TILES;
        tiles += VTPU_TILE_BYTES_BF16_TILES;
    }
}

/* The same of all rows of a block */
static void multiply_rows(v16 *sums, const float *x, size_t row_bytes, uint32_t rows,
                          const uint8_t *tiles, uint32_t columns)
{
    bool fetch = true; /* by the first strip, for all */

    while (rows > 0) {
        uint32_t strips = (rows + STRIP - 1) / STRIP, strip = (rows + strips - 1) / strips;

        switch (strip) {
#define ROWS_OF_STRIP(n)                                        \
    case n:                                                     \
        multiply(sums, x, row_bytes, n, tiles, columns, fetch); \
        break;
            ROWS_OF_STRIP(1)
            ROWS_OF_STRIP(2)
            ROWS_OF_STRIP(3)
            ROWS_OF_STRIP(4)
            ROWS_OF_STRIP(5)
            ROWS_OF_STRIP(6)
#undef ROWS_OF_STRIP
        }
        sums += strip;
        x = const_row_at(x, row_bytes, strip);
        rows -= strip;
        fetch = false;
    }
}

/* The sums of a block of rows with a group of tile rows: `rows` of each tile row. A function
 * of its own: the compiler does not know what the mode is to it. */
static __attribute__((noinline)) void sum(v16 *sums, const VtpuMatmul *op, uint32_t row,
                                          uint32_t rows, uint32_t tile_row, uint32_t tile_rows)
{
    size_t row_bytes = simd_bf16_bytes(op->k);
    size_t tile_row_bytes = vtpu_tile_row_bytes(VTPU_FMT_BF16_TILES, op->k);
    const uint8_t *weight = op->weight + tile_row * tile_row_bytes;
    const float *x = (const float *)(op->quantised + row * row_bytes);
    uint32_t chunk = rows <= STRIP ? op->k : CHUNK; /* one strip needs weights once: in a stream */

    memset(sums, 0, (size_t)tile_rows * rows * sizeof(*sums));
    for (uint32_t done = 0; done < op->k; done += chunk) {
        uint32_t columns = op->k - done < chunk ? op->k - done : chunk;

        for (uint32_t t = 0; t < tile_rows; t++) {
            multiply_rows(sums + t * rows, x + done, row_bytes, rows,
                          weight + t * tile_row_bytes + (size_t)done * 32, columns);
        }
    }
}

void vtpu_avx2_bf16_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    unsigned mode = _mm_getcsr();
    v16 sums[GROUP * ROWS];

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
                    v16 value = sums[t * rows + r];

                    v_store(dst, op->accumulate ? v_add(v_load(dst), value) : value);
                }
            }
        }
    }
}
