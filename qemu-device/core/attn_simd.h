/* SPDX-License-Identifier: MIT */
/*
 * V_ATTN in sixteen lanes; attn_scalar.c has the definition. A path includes
 * its lanes_*.h first.
 *
 * The unit of work is a tile: up to TILE_QUERIES queries (neighbouring rows of
 * one sequence, all query heads of one key head). Sixteen keys at a time are
 * converted to f32 once and used by every query of the tile. Scores of the
 * whole context are kept, so that the maximum is known before any exp: the
 * result then does not depend on how keys are cut into blocks.
 */
#ifndef VTPU_ATTN_SIMD_H
#define VTPU_ATTN_SIMD_H

#include "kernels_internal.h"
#include "lanes_math.h"

#define INLINE static inline __attribute__((always_inline))

#define KEYS 16                   /* keys a block, one a lane */
#define TILE_ROWS 16
#define TILE_QUERIES 48
/* Heads and vectors of 16 dimensions whose sums are in registers together. */
#define VALUE_HEADS 3
#ifndef VALUE_DIMS
#define VALUE_DIMS 4
#endif

typedef struct AttnTile {
    const VtpuAttn *op;
    AttnRow context;              /* the longest of its rows */
    uint32_t row, rows, kv_head, group;
    size_t score_stride;          /* elements */
    float *block;                 /* KEYS keys or values as f32 */
    float *most;                  /* KEYS running maxima a query */
    float *scores;                /* a row of scores, then of exp, a query */
} AttnTile;

static uint32_t tile_rows(uint32_t group)
{
    uint32_t rows = TILE_QUERIES / group;
    return rows < 1 ? 1 : rows > TILE_ROWS ? TILE_ROWS : rows;
}

static size_t padded_keys(uint32_t keys)
{
    return ((size_t)keys + KEYS - 1) & ~(size_t)(KEYS - 1);
}

static size_t simd_attn_scratch_bytes(const VtpuAttn *op)
{
    uint32_t group = op->heads / op->kv_heads;
    size_t queries = (size_t)tile_rows(group) * group;
    size_t block = (size_t)KEYS * op->head_dim;
    return (block + queries * (KEYS + padded_keys(attn_max_keys(op)))) * sizeof(float);
}

INLINE v16 load_fmt(const uint8_t *p, uint32_t fmt)
{
    return fmt == VTPU_FMT_F16    ? v_load_f16(p)
           : fmt == VTPU_FMT_BF16 ? v_load_bf16(p)
                                  : v_load((const float *)p);
}

/* A key of the next block: its slot may be anywhere, out of the hardware's guess. */
INLINE void fetch_key(const AttnTile *tile, const uint8_t *cache, uint32_t j, size_t bytes)
{
    if (j < tile->context.keys) {
        size_t at = attn_key_at(tile->op, tile->context, j, tile->kv_head);
        for (size_t line = 0; line < tile->op->head_dim * bytes; line += 64) {
            __builtin_prefetch(cache + at * bytes + line);
        }
    }
}

INLINE void load_block_fmt(const AttnTile *tile, const uint8_t *cache, uint32_t first,
                           uint32_t count, uint32_t fmt)
{
    uint32_t dim = tile->op->head_dim;
    size_t bytes = fmt == VTPU_FMT_F32 ? 4 : 2;

    for (uint32_t j = 0; j < count; j++) {
        size_t at = attn_key_at(tile->op, tile->context, first + j, tile->kv_head);
        const uint8_t *from = cache + at * bytes;
        fetch_key(tile, cache, first + j + KEYS, bytes);
        for (uint32_t i = 0; i < dim; i += 16) {
            v_store(tile->block + j * dim + i, load_fmt(from + i * bytes, fmt));
        }
    }
    for (uint32_t i = count * dim; i < KEYS * dim; i += 16) {
        v_store(tile->block + i, v_zero());
    }
}

static void load_block(const AttnTile *tile, const uint8_t *cache, uint32_t first, uint32_t count)
{
    switch (tile->op->fmt) {
    case VTPU_FMT_F16:
        load_block_fmt(tile, cache, first, count, VTPU_FMT_F16);
        break;
    case VTPU_FMT_BF16:
        load_block_fmt(tile, cache, first, count, VTPU_FMT_BF16);
        break;
    default:
        load_block_fmt(tile, cache, first, count, VTPU_FMT_F32);
        break;
    }
}

static uint32_t row_keys(const AttnTile *tile, uint32_t r)
{
    return tile->op->row_info[2 * (size_t)(tile->row + r)];
}

static size_t query_at(const AttnTile *tile, uint32_t r, uint32_t h)
{
    uint32_t head = tile->kv_head * tile->group + h;
    return ((size_t)(tile->row + r) * tile->op->heads + head) * tile->op->head_dim;
}

/* The scores of one query for the block's keys, one a lane. */
INLINE v16 block_scores(const AttnTile *tile, const float *q)
{
    uint32_t dim = tile->op->head_dim;
    v16 lanes[KEYS];

    for (uint32_t j = 0; j < KEYS; j++) {
        lanes[j] = v_zero();
    }
    for (uint32_t i = 0; i < dim; i += 16) {
        v16 part = v_load(q + i);
#pragma GCC unroll 16
        for (uint32_t j = 0; j < KEYS; j++) {
            lanes[j] = v_fma(part, v_load(tile->block + j * dim + i), lanes[j]);
        }
    }
    return v_mul(v_trees(lanes), v_set1(tile->op->scale));
}

static void score_tile(const AttnTile *tile)
{
    v16 none = v_set1(-INFINITY);

    for (uint32_t q = 0; q < tile->rows * tile->group; q++) {
        v_store(tile->most + q * KEYS, none);
    }
    for (uint32_t first = 0; first < tile->context.keys && !attn_stopped(tile->op);
         first += KEYS) {
        uint32_t left = tile->context.keys - first;

        load_block(tile, tile->op->k_cache, first, left < KEYS ? left : KEYS);
        for (uint32_t r = 0; r < tile->rows; r++) {
            uint32_t keys = row_keys(tile, r);
            if (first >= keys) {
                continue;
            }
            for (uint32_t h = 0; h < tile->group; h++) {
                size_t q = (size_t)r * tile->group + h;
                v16 s = block_scores(tile, tile->op->q + query_at(tile, r, h));
                if (keys - first < KEYS) {
                    s = v_first_n(keys - first, s, none);
                }
                v_store(tile->scores + q * tile->score_stride + first, s);
                float *most = tile->most + q * KEYS;
                v_store(most, v_max(s, v_load(most)));
            }
        }
    }
}

/* Turns the scores of a query into exp(s - M) and returns their sum. Lanes
 * past the end hold -inf and add zero. */
static float softmax(float *scores, uint32_t keys, const float *most)
{
    v16 shift = v_set1(v_reduce_max(v_load(most)));
    v16 sum = v_zero();

    for (uint32_t j = 0; j < keys; j += KEYS) {
        v16 p = v_exp(v_sub(v_load(scores + j), shift));
        sum = v_add(sum, p);
        v_store(scores + j, p);
    }
    return v_tree(sum);
}

/* out[h][d..] += p[h][j] * value[j][d..] over the block, for some heads and
 * vectors of dimensions. */
INLINE void add_values(float *out, const float *p, size_t score_stride, const float *block,
                       uint32_t dim, uint32_t count, int heads, int dims)
{
    v16 acc[VALUE_HEADS][VALUE_DIMS];

    for (int h = 0; h < heads; h++) {
        for (int d = 0; d < dims; d++) {
            acc[h][d] = v_load(out + h * dim + 16 * d);
        }
    }
    for (uint32_t j = 0; j < count; j++) {
        v16 value[VALUE_DIMS];
        for (int d = 0; d < dims; d++) {
            value[d] = v_load(block + j * dim + 16 * d);
        }
        for (int h = 0; h < heads; h++) {
            v16 weight = v_set1(p[h * score_stride + j]);
            for (int d = 0; d < dims; d++) {
                acc[h][d] = v_fma(weight, value[d], acc[h][d]);
            }
        }
    }
    for (int h = 0; h < heads; h++) {
        for (int d = 0; d < dims; d++) {
            v_store(out + h * dim + 16 * d, acc[h][d]);
        }
    }
}

INLINE void add_heads(const AttnTile *tile, float *out, const float *p, uint32_t count, int heads)
{
    uint32_t dim = tile->op->head_dim;
    uint32_t d = 0;

    for (; d + 16 * VALUE_DIMS <= dim; d += 16 * VALUE_DIMS) {
        add_values(out + d, p, tile->score_stride, tile->block + d, dim, count, heads, VALUE_DIMS);
    }
    for (; d < dim; d += 16) {
        add_values(out + d, p, tile->score_stride, tile->block + d, dim, count, heads, 1);
    }
}

static void add_row(const AttnTile *tile, uint32_t r, uint32_t first)
{
    uint32_t left = row_keys(tile, r) - first;
    uint32_t count = left < KEYS ? left : KEYS;
    uint32_t h = 0;

    while (h < tile->group) {
        float *out = tile->op->dst + query_at(tile, r, h);
        const float *p = tile->scores + ((size_t)r * tile->group + h) * tile->score_stride + first;
        if (tile->group - h >= VALUE_HEADS) {
            add_heads(tile, out, p, count, VALUE_HEADS);
            h += VALUE_HEADS;
        } else {
            add_heads(tile, out, p, count, 1);
            h += 1;
        }
    }
}

static void scale_output(float *out, uint32_t dim, float total)
{
    v16 divisor = v_set1(total);

    for (uint32_t i = 0; i < dim; i += 16) {
        v_store(out + i, v_div(v_load(out + i), divisor));
    }
}

static void attend_tile(const AttnTile *tile)
{
    uint32_t dim = tile->op->head_dim;
    float total[256];             /* heads is a byte; TILE_QUERIES is less */

    score_tile(tile);
    for (uint32_t r = 0; r < tile->rows; r++) {
        for (uint32_t h = 0; h < tile->group; h++) {
            size_t q = (size_t)r * tile->group + h;
            total[q] = softmax(tile->scores + q * tile->score_stride, row_keys(tile, r),
                               tile->most + q * KEYS);
            memset(tile->op->dst + query_at(tile, r, h), 0, dim * sizeof(float));
        }
    }
    for (uint32_t first = 0; first < tile->context.keys && !attn_stopped(tile->op);
         first += KEYS) {
        uint32_t left = tile->context.keys - first;

        load_block(tile, tile->op->v_cache, first, left < KEYS ? left : KEYS);
        for (uint32_t r = 0; r < tile->rows; r++) {
            if (first < row_keys(tile, r)) {
                add_row(tile, r, first);
            }
        }
    }
    for (uint32_t r = 0; r < tile->rows; r++) {
        for (uint32_t h = 0; h < tile->group && row_keys(tile, r); h++) {
            scale_output(tile->op->dst + query_at(tile, r, h), dim, total[r * tile->group + h]);
        }
    }
}

static void simd_attn(const VtpuAttn *op, uint8_t *scratch, uint32_t begin, uint32_t end)
{
    uint32_t group = op->heads / op->kv_heads;
    uint32_t most_rows = tile_rows(group);
    AttnTile tile = { .op = op, .group = group };

    tile.score_stride = padded_keys(attn_max_keys(op));
    tile.block = (float *)scratch;
    tile.most = tile.block + (size_t)KEYS * op->head_dim;
    tile.scores = tile.most + (size_t)most_rows * group * KEYS;

    for (uint32_t item = begin; item < end; item += tile.rows) {
        tile.kv_head = item / op->rows;
        tile.row = item % op->rows;
        tile.context = attn_row(op, tile.row);
        tile.rows = 1;
        while (tile.rows < most_rows && item + tile.rows < end &&
               tile.row + tile.rows < op->rows) {
            AttnRow next = attn_row(op, tile.row + tile.rows);
            if (next.blocks != tile.context.blocks) {
                break;
            }
            tile.context.keys = next.keys > tile.context.keys ? next.keys : tile.context.keys;
            tile.rows++;
        }
        attend_tile(&tile);
    }
}

#endif
