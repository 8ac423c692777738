/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with VNNI. A tile's 512 weights fill sixteen registers as 16-bit
 * pairs; each row of activations then costs sixteen vpdpwssd whose operand is
 * a broadcast from memory, so the unpacking is shared by all rows.
 */
#include "tile_avx512.h"

INLINE __m512i pair(const int16_t *q, int i)
{
    int32_t word;
    memcpy(&word, q + 2 * i, sizeof(word));
    return _mm512_set1_epi32(word);
}

/* acc + scale * (the block's product), by the format's rule */
INLINE __m512 scale_block(__m512i dot, __m512 d, __m512 minimum, uint32_t fmt, float scale,
                          float sum, __m512 acc)
{
    if (fmt == VTPU_FMT_Q4_0) {
        dot = _mm512_add_epi32(dot, _mm512_cvtps_epi32(_mm512_set1_ps(-8.0f * sum)));
    }
    __m512 t = _mm512_cvtepi32_ps(dot);
    if (fmt == VTPU_FMT_Q4_1) {
        t = _mm512_fmadd_ps(t, d, _mm512_mul_ps(_mm512_set1_ps(sum), minimum));
    } else {
        t = _mm512_mul_ps(t, d);
    }
    return _mm512_fmadd_ps(t, _mm512_set1_ps(scale), acc);
}

/* One tile row for a few rows, where no panel is left: the tile and all sums in
 * registers. */
INLINE void few_rows(const VtpuMatmul *op, uint32_t fmt, uint32_t tile_row, uint32_t row, int rows)
{
    uint32_t blocks = op->k / VTPU_BLOCK;
    size_t tile_bytes = vtpu_tile_bytes(fmt);
    const uint8_t *weight = op->weight + (size_t)tile_row * blocks * tile_bytes;
    QuantRow x[4];
    __m512 acc[4];

    for (int r = 0; r < rows; r++) {
        x[r] = quant_row(op->quantised, op->k, row + (uint32_t)r);
        acc[r] = _mm512_setzero_ps();
    }
    for (uint32_t block = 0; block < blocks; block++, weight += tile_bytes) {
        __m512i dot[4] = { _mm512_setzero_si512(), _mm512_setzero_si512(),
                           _mm512_setzero_si512(), _mm512_setzero_si512() };
        Tile tile;

        load_tile(&tile, weight, fmt);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                dot[r] = _mm512_dpwssd_epi32(dot[r], tile.w[i], pair(x[r].q + block * VTPU_BLOCK, i));
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            acc[r] = scale_block(dot[r], tile.d, tile.minimum, fmt, x[r].scale[block],
                                 x[r].sum[block], acc[r]);
        }
    }
    for (int r = 0; r < rows; r++) {
        store_row(op, acc[r], tile_row, row + (uint32_t)r);
    }
}

/*
 * Three tiles side by side, unpacked in the first-level cache, by up to eight
 * rows. A loaded pair of weights serves all rows and a broadcast pair of
 * activations all tiles, so that the multipliers and not the loads are the
 * limit. The 24 sums are in registers for the length of a block; they are
 * separate variables because the compiler keeps an array of them in memory.
 */
/* How far ahead of the products weights are fetched. */
#define FETCH_BLOCKS 4

typedef struct Panel {
    __m512i w[16][PANEL_TILES];
    __m512 d[PANEL_TILES], minimum[PANEL_TILES];
} Panel;

/* The quantised rows of a block, and where the sums of the products go. */
typedef struct PanelRows {
    const uint8_t *q, *scale;     /* of the first row; others at row_bytes */
    size_t row_bytes, blocks;
    __m512 (*acc)[PANEL_TILES];
} PanelRows;

INLINE void load_panel(Panel *panel, const uint8_t *weight, size_t tile_row_bytes, uint32_t fmt)
{
#pragma GCC unroll 3
    for (int t = 0; t < PANEL_TILES; t++) {
        Tile tile;
        load_tile(&tile, weight + (size_t)t * tile_row_bytes, fmt);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            panel->w[i][t] = tile.w[i];
        }
        panel->d[t] = tile.d;
        if (fmt == VTPU_FMT_Q4_1) {
            panel->minimum[t] = tile.minimum;
        }
    }
}

/* As the intrinsic, around which the compiler (GCC 12) copies and spills sums. */
INLINE void add_products(__m512i *sum, __m512i w, __m512i x)
{
    __asm__("vpdpwssd %2, %1, %0" : "+v"(*sum) : "v"(w), "v"(x));
}

#define CLEAR_ROW(r) \
    __m512i dot##r##0 = _mm512_setzero_si512(), dot##r##1 = dot##r##0, dot##r##2 = dot##r##0;

#define MULTIPLY_ROW(r)                                               \
    {                                                                 \
        __m512i x = pair((const int16_t *)(q + r * row_bytes), 0);    \
        add_products(&dot##r##0, w0, x);                            \
        add_products(&dot##r##1, w1, x);                            \
        add_products(&dot##r##2, w2, x);                            \
    }

#define SCALE_ROW(r)                                                                       \
    {                                                                                      \
        const float *s = (const float *)(rows->scale + r * row_bytes);                     \
        float scale = s[0], sum = s[rows->blocks];                                         \
        __m512 *acc = rows->acc[r];                                                        \
        acc[0] = scale_block(dot##r##0, panel->d[0], panel->minimum[0], fmt, scale, sum, acc[0]); \
        acc[1] = scale_block(dot##r##1, panel->d[1], panel->minimum[1], fmt, scale, sum, acc[1]); \
        acc[2] = scale_block(dot##r##2, panel->d[2], panel->minimum[2], fmt, scale, sum, acc[2]); \
    }

#define ROWS_1(f) f(0)
#define ROWS_2(f) ROWS_1(f) f(1)
#define ROWS_4(f) ROWS_2(f) f(2) f(3)
#define ROWS_8(f) ROWS_4(f) f(4) f(5) f(6) f(7)

/* acc += the panel's block times n rows; steps on to the rows that follow */
#define DEFINE_PANEL_ROWS(n)                                                             \
    INLINE void panel_rows_##n(PanelRows *rows, const Panel *panel, uint32_t fmt)        \
    {                                                                                    \
        const uint8_t *q = rows->q;                                                      \
        size_t row_bytes = rows->row_bytes;                                              \
        ROWS_##n(CLEAR_ROW)                                                              \
        for (int i = 0; i < 16; i++, q += 4) {                                           \
            __m512i w0 = panel->w[i][0], w1 = panel->w[i][1], w2 = panel->w[i][2];       \
            ROWS_##n(MULTIPLY_ROW)                                                       \
        }                                                                                \
        ROWS_##n(SCALE_ROW)                                                              \
        rows->q += n * row_bytes;                                                        \
        rows->scale += n * row_bytes;                                                    \
        rows->acc += n;                                                                  \
    }

DEFINE_PANEL_ROWS(1)
DEFINE_PANEL_ROWS(2)
DEFINE_PANEL_ROWS(4)
DEFINE_PANEL_ROWS(8)

/*
 * Fetches what load_panel() will want FETCH_BLOCKS later, of the next panel at
 * the end of this one: the streams of three tile rows are too short for the
 * hardware to follow them well.
 */
INLINE void fetch_panel(const uint8_t *weight, size_t block, size_t blocks, size_t tile_bytes)
{
    size_t ahead = block + FETCH_BLOCKS, tile_row_bytes = blocks * tile_bytes;
    const uint8_t *p = weight + ahead * tile_bytes +
                       (ahead < blocks ? 0 : (PANEL_TILES - 1) * tile_row_bytes);

    for (size_t t = 0; t < PANEL_TILES; t++) {
        for (size_t line = 0; line < tile_bytes; line += 64) {
            __builtin_prefetch(p + t * tile_row_bytes + line);
        }
    }
}

INLINE void panel_product(const VtpuMatmul *op, uint32_t fmt, uint32_t tile_row, uint32_t row,
                      uint32_t count)
{
    size_t blocks = op->k / VTPU_BLOCK, tile_bytes = vtpu_tile_bytes(fmt);
    const uint8_t *weight = op->weight + tile_row * blocks * tile_bytes;
    QuantRow x = quant_row(op->quantised, op->k, row);
    __m512 acc[ROW_BLOCK][PANEL_TILES];

    for (uint32_t r = 0; r < count; r++) {
        acc[r][0] = acc[r][1] = acc[r][2] = _mm512_setzero_ps();
    }
    for (size_t block = 0; block < blocks; block++) {
        Panel panel;
        PanelRows rows = {
            .q = (const uint8_t *)(x.q + block * VTPU_BLOCK),
            .scale = (const uint8_t *)(x.scale + block),
            .row_bytes = quant_row_bytes(op->k),
            .blocks = blocks,
            .acc = acc,
        };
        fetch_panel(weight, block, blocks, tile_bytes);
        load_panel(&panel, weight + block * tile_bytes, blocks * tile_bytes, fmt);
        for (uint32_t left = count / 8; left > 0; left--) {
            panel_rows_8(&rows, &panel, fmt);
        }
        if (count & 4) {
            panel_rows_4(&rows, &panel, fmt);
        }
        if (count & 2) {
            panel_rows_2(&rows, &panel, fmt);
        }
        if (count & 1) {
            panel_rows_1(&rows, &panel, fmt);
        }
    }
    for (uint32_t r = 0; r < count; r++) {
        for (uint32_t t = 0; t < PANEL_TILES; t++) {
            store_row(op, acc[r][t], tile_row + t, row + r);
        }
    }
}

INLINE void matmul(const VtpuMatmul *op, uint32_t fmt, uint32_t begin, uint32_t end)
{
    for (uint32_t row = 0; row < op->m; row += ROW_BLOCK) {
        uint32_t rows = op->m - row < ROW_BLOCK ? op->m - row : ROW_BLOCK;
        uint32_t tile_row = begin;

        for (; tile_row + PANEL_TILES <= end; tile_row += PANEL_TILES) {
            panel_product(op, fmt, tile_row, row, rows);
        }
        for (; tile_row < end; tile_row++) {
            uint32_t r = row;
            for (; r + 4 <= row + rows; r += 4) {
                few_rows(op, fmt, tile_row, r, 4);
            }
            switch (row + rows - r) {
            case 1:
                few_rows(op, fmt, tile_row, r, 1);
                break;
            case 2:
                few_rows(op, fmt, tile_row, r, 2);
                break;
            case 3:
                few_rows(op, fmt, tile_row, r, 3);
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
