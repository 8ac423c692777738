/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with AMX, for many rows: the products of three weight tiles and
 * sixteen rows at a time in the matrix unit, their scaling in AVX-512 meanwhile.
 *
 * The unit's bf16 product serves better than its byte product. Each takes two
 * instructions a block, one for each byte of the activations, q = 256 h + l, and
 * they cost the same, since scales end the block at 32 columns. But bf16 holds
 * 256 h as well as l, so that both go into one sum, which comes out as the f32
 * that scaling starts from: half the stores and half the vector work.
 *
 * It is exact: for Q4 every partial sum is an integer of at most
 * 32 * 15 * (32768 + 255) < 2^24 (less with the 8 of Q4_0 taken off the weights
 * beforehand). With the weights of Q8_0 this does not hold; high and low then
 * keep sums of their own, each exact, and adding the two rounds once, as the
 * conversion of the exact integer does.
 */
#include "lanes_avx512.h"

#include "quantise_simd.h"
#include "tile_avx512.h"

/* Rows of the unit's tiles; a product has at least as many. */
#define GROUP 16

/*
 * A quantised row: for each block 32 high parts, then 32 low parts, bf16 in the
 * quantised order; then scales and sums as in every path.
 */
#define BLOCK_BYTES (2 * VTPU_BLOCK * 2)

static size_t quantised_row_bytes(uint32_t k)
{
    size_t blocks = k / VTPU_BLOCK;
    return (blocks * (BLOCK_BYTES + 8) + 63) & ~(size_t)63;
}

size_t vtpu_amx_quantise_bytes(uint32_t k, uint32_t m)
{
    return m * quantised_row_bytes(k);
}

/* Small integers as bf16, for which the upper half of their f32 is enough. */
INLINE void store_parts(uint8_t *p, __m512i integers)
{
    u_store_quant((int16_t *)p, _mm512_srli_epi32(u_bits(_mm512_cvtepi32_ps(integers)), 16));
}

void vtpu_amx_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                       uint32_t m, uint32_t begin, uint32_t end)
{
    if (m < VTPU_AMX_MIN_ROWS) {
        vtpu_kernels_avx512.blocks.quantise(quantised, src, src_stride, k, m, begin, end);
        return;
    }
    size_t blocks = k / VTPU_BLOCK;
    __m512i low_byte = _mm512_set1_epi32(255);

    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        uint8_t *to = quantised + row * quantised_row_bytes(k);
        float *scale = (float *)(to + blocks * BLOCK_BYTES);

        for (size_t block = 0; block < blocks; block++, to += BLOCK_BYTES) {
            __m512i first, second;

            quantise_block(&first, &second, scale + block, scale + blocks + block,
                           x + block * VTPU_BLOCK);
            store_parts(to, _mm512_andnot_si512(low_byte, first));
            store_parts(to + 32, _mm512_andnot_si512(low_byte, second));
            store_parts(to + 64, _mm512_and_si512(low_byte, first));
            store_parts(to + 96, _mm512_and_si512(low_byte, second));
        }
    }
}

/* A block of a panel as the unit takes it, and its scales. */
typedef struct Panel {
    __m512i w[PANEL_TILES][16];   /* pairs of bf16, for 16 outputs */
    __m512 d[PANEL_TILES], minimum[PANEL_TILES];
} Panel;

/* Pairs of int16 of at most eight significant bits as pairs of bf16 */
INLINE __m512i bf16_pairs(__m512i w)
{
    __m512i even = u_bits(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w, 16), 16)));
    __m512i odd = u_bits(_mm512_cvtepi32_ps(_mm512_srai_epi32(w, 16)));
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
}

/* All the integers that a nibble may stand for, as bf16 */
INLINE __m512i nibble_table(uint32_t fmt)
{
    __m512i ramp = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i values = _mm512_sub_epi32(ramp, _mm512_set1_epi32(fmt == VTPU_FMT_Q4_0 ? 8 : 0));
    __m256i table = _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(u_bits(_mm512_cvtepi32_ps(values)), 16));
    return _mm512_castsi256_si512(table);
}

INLINE void load_panel(Panel *panel, const uint8_t *weight, size_t tile_row_bytes, uint32_t fmt,
                       int tiles, __m512i table)
{
#pragma GCC unroll 3
    for (int t = 0; t < tiles; t++) {
        Tile tile;
        load_tile(&tile, weight + (size_t)t * tile_row_bytes, fmt);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            panel->w[t][i] = fmt == VTPU_FMT_Q8_0 ? bf16_pairs(tile.w[i])
                                                  : _mm512_permutexvar_epi16(tile.w[i], table);
        }
        panel->d[t] = tile.d;
        if (fmt == VTPU_FMT_Q4_1) {
            panel->minimum[t] = tile.minimum;
        }
    }
}

/* Use of the unit's eight tiles: activations, then weights and sums of a panel.
 * The intrinsics want plain digits. */
#define HIGH 0
#define LOW 1
#define EACH_TILE(f)    \
    f(0, 2, 5)          \
    if (tiles > 1) {    \
        f(1, 3, 6)      \
        f(2, 4, 7)      \
    }

/* The intrinsics do not tell the compiler which memory they use. */
#define MEMORY_BARRIER() __asm__ volatile("" ::: "memory")

/* A group's sums of the low part's products, and the high part's, which for Q4
 * are in the former; and what they are scaled by and added to. */
typedef struct Sums {
    __m512 low[PANEL_TILES][GROUP], high[PANEL_TILES][GROUP];
    __m512 (*acc)[PANEL_TILES];
    const Panel *panel;
    const uint8_t *scales;        /* of the first row; others at row_bytes */
} Sums;

/* acc += what the sums of rows [begin, end) stand for, by the format's rule */
INLINE void scale_rows(const Sums *sums, size_t row_bytes, size_t blocks, uint32_t fmt, int tiles,
                       int begin, int end)
{
    const uint8_t *scales = sums->scales + begin * row_bytes;
    __m512 d[PANEL_TILES], minimum[PANEL_TILES];

    for (int t = 0; t < tiles; t++) {
        d[t] = sums->panel->d[t];
        minimum[t] = sums->panel->minimum[t];
    }
#pragma GCC unroll 1
    for (int r = begin; r < end; r++, scales += row_bytes) {
        __m512 scale = _mm512_set1_ps(((const float *)scales)[0]);
        __m512 sum = _mm512_set1_ps(((const float *)scales)[blocks]);

#pragma GCC unroll 3
        for (int t = 0; t < tiles; t++) {
            __m512 dot = sums->low[t][r];

            if (fmt == VTPU_FMT_Q8_0) {
                dot = _mm512_add_ps(dot, sums->high[t][r]);
            }
            dot = fmt == VTPU_FMT_Q4_1 ? _mm512_fmadd_ps(dot, d[t], _mm512_mul_ps(sum, minimum[t]))
                                       : _mm512_mul_ps(dot, d[t]);
            sums->acc[r][t] = _mm512_fmadd_ps(dot, scale, sums->acc[r][t]);
        }
    }
}

/*
 * A group's products in the unit, and meanwhile in the vector units, between the
 * products of one tile and another, a third of the scaling of the group before.
 */
#define MULTIPLY(t, weight, sum)                                                    \
    _tile_zero(sum);                                                                \
    _tile_dpbf16ps(sum, HIGH, weight);                                              \
    if (fmt == VTPU_FMT_Q8_0) {                                                     \
        _tile_stored(sum, sums->high[t], 64);                                       \
        _tile_zero(sum);                                                            \
    }                                                                               \
    _tile_dpbf16ps(sum, LOW, weight);                                               \
    if (before->acc) {                                                              \
        scale_rows(before, row_bytes, blocks, fmt, tiles, GROUP * t / tiles,        \
                   GROUP * (t + 1) / tiles);                                        \
    }
#define LOAD_WEIGHT(t, weight, sum) _tile_loadd(weight, panel->w[t], 64);
#define STORE(t, weight, sum) _tile_stored(sum, sums->low[t], 64);

INLINE void multiply_group(Sums *sums, const Sums *before, const uint8_t *rows, size_t row_bytes,
                           size_t blocks, uint32_t fmt, int tiles)
{
    _tile_loadd(HIGH, rows, row_bytes);
    _tile_loadd(LOW, rows + BLOCK_BYTES / 2, row_bytes);
    EACH_TILE(MULTIPLY)
    EACH_TILE(STORE)
    MEMORY_BARRIER();
}

/* Where group g of the rows from `row` begins: the last one ends with the last
 * row and so may compute, but not store, some rows again. */
INLINE uint32_t first_row(const VtpuMatmul *op, uint32_t row, uint32_t g)
{
    uint32_t first = row + g * GROUP;
    return first < op->m - GROUP ? first : op->m - GROUP;
}

INLINE void panel_product(const VtpuMatmul *op, uint32_t fmt, int tiles, uint32_t tile_row,
                          uint32_t row, uint32_t count)
{
    size_t blocks = op->k / VTPU_BLOCK, tile_bytes = vtpu_tile_bytes(fmt);
    size_t row_bytes = quantised_row_bytes(op->k);
    const uint8_t *weight = op->weight + tile_row * blocks * tile_bytes;
    __m512i table = nibble_table(fmt);
    __m512 acc[ROW_BLOCK / GROUP][GROUP][PANEL_TILES];
    uint32_t groups = (count + GROUP - 1) / GROUP;
    Panel panels[2];
    Sums sums[2];
    int turn = 0;

    sums[1].acc = NULL;           /* nothing to scale yet */
    for (uint32_t g = 0; g < groups; g++) {
        for (int r = 0; r < GROUP; r++) {
            acc[g][r][0] = acc[g][r][1] = acc[g][r][2] = _mm512_setzero_ps();
        }
    }
    for (size_t block = 0; block < blocks; block++) {
        Panel *panel = &panels[block % 2];

        load_panel(panel, weight + block * tile_bytes, blocks * tile_bytes, fmt, tiles, table);
        MEMORY_BARRIER();
        EACH_TILE(LOAD_WEIGHT)
        for (uint32_t g = 0; g < groups; g++, turn ^= 1) {
            const uint8_t *rows = op->quantised + first_row(op, row, g) * row_bytes;

            sums[turn].acc = acc[g];
            sums[turn].panel = panel;
            sums[turn].scales = rows + blocks * BLOCK_BYTES + block * sizeof(float);
            multiply_group(&sums[turn], &sums[turn ^ 1], rows + block * BLOCK_BYTES, row_bytes,
                           blocks, fmt, tiles);
        }
    }
    scale_rows(&sums[turn ^ 1], row_bytes, blocks, fmt, tiles, 0, GROUP);
    for (uint32_t g = 0; g < groups; g++) {
        uint32_t first = first_row(op, row, g);

        for (uint32_t r = row + g * GROUP - first; r < GROUP; r++) {
            for (int t = 0; t < tiles; t++) {
                store_row(op, acc[g][r][t], tile_row + (uint32_t)t, first + r);
            }
        }
    }
}

INLINE void matmul(const VtpuMatmul *op, uint32_t fmt, uint32_t begin, uint32_t end)
{
    for (uint32_t row = 0; row < op->m; row += ROW_BLOCK) {
        uint32_t count = op->m - row < ROW_BLOCK ? op->m - row : ROW_BLOCK;
        uint32_t tile_row = begin;

        for (; tile_row + PANEL_TILES <= end; tile_row += PANEL_TILES) {
            panel_product(op, fmt, PANEL_TILES, tile_row, row, count);
        }
        for (; tile_row < end; tile_row++) {
            panel_product(op, fmt, 1, tile_row, row, count);
        }
    }
}

/* LDTILECFG's operand: all eight tiles of 16 rows of 64 bytes. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config = {
    .palette = 1,
    .row_bytes = { 64, 64, 64, 64, 64, 64, 64, 64 },
    .rows = { 16, 16, 16, 16, 16, 16, 16, 16 },
};

void vtpu_amx_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    if (op->m < VTPU_AMX_MIN_ROWS) {
        vtpu_kernels_avx512.blocks.matmul(op, begin, end);
        return;
    }
    _tile_loadconfig(&tile_config);
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
    /* Without live tiles the thread's state is small to save. */
    _tile_release();
}
