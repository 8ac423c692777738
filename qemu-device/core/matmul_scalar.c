/* SPDX-License-Identifier: MIT */
/* The definition of MATMUL: docs/numerics.md. */
#include <math.h>

#include "convert.h"
#include "kernels_internal.h"
#include "vmath.h"

/* Position of column i of a block in the quantised order. */
static uint32_t quant_index(uint32_t i)
{
    static const uint8_t order[4] = { 0, 2, 1, 3 };
    return (i & ~3u) | order[i & 3];
}

static void quantise_block(int16_t *q, float *scale, float *sum, const float *x)
{
    float amax = 0.0f;
    bool finite = true;

    for (int i = 0; i < VTPU_BLOCK; i++) {
        float magnitude = fabsf(x[i]);
        finite = finite && magnitude < INFINITY;
        amax = magnitude > amax ? magnitude : amax;
    }
    *sum = 0.0f;
    if (!finite || amax < VTPU_QUANT_TINY) {
        memset(q, 0, VTPU_BLOCK * sizeof(*q));
        *scale = finite ? 0.0f : vtpu_nan();
        return;
    }
    float inverse = VTPU_QUANT_MAX / amax;
    int32_t total = 0;
    for (uint32_t i = 0; i < VTPU_BLOCK; i++) {
        int16_t value = (int16_t)vtpu_round(x[i] * inverse);
        q[quant_index(i)] = value;
        total += value;
    }
    *scale = amax / VTPU_QUANT_MAX;
    *sum = (float)total;
}

void vtpu_scalar_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                          uint32_t m, uint32_t begin, uint32_t end)
{
    (void)m;
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        QuantRow to = quant_row(quantised, k, row);

        for (uint32_t block = 0; block < k / VTPU_BLOCK; block++) {
            quantise_block((int16_t *)to.q + block * VTPU_BLOCK, (float *)to.scale + block,
                           (float *)to.sum + block, x + block * VTPU_BLOCK);
        }
    }
}

/* The stored integer of a tile, without Q4_0's offset. */
static int32_t tile_weight(const uint8_t *tile, uint32_t fmt, uint32_t r, uint32_t col)
{
    if (fmt == VTPU_FMT_Q8_0) {
        return (int8_t)tile[tile_byte(r, col)];
    }
    uint8_t byte = tile[tile_byte(r, col % 16)];
    return col < 16 ? byte & 15 : byte >> 4;
}

static float tile_half(const uint8_t *tile, size_t offset, uint32_t r)
{
    uint16_t bits;
    memcpy(&bits, tile + offset + 2 * r, sizeof(bits));
    return vtpu_f16_to_f32(bits);
}

static float block_product(const uint8_t *tile, uint32_t fmt, uint32_t r, const int16_t *q, float sum)
{
    int32_t dot = 0;

    for (uint32_t i = 0; i < VTPU_BLOCK; i++) {
        dot += q[quant_index(i)] * tile_weight(tile, fmt, r, i);
    }
    switch (fmt) {
    case VTPU_FMT_Q8_0:
        return (float)dot * tile_half(tile, 512, r);
    case VTPU_FMT_Q4_0:
        return (float)(dot - 8 * (int32_t)sum) * tile_half(tile, 256, r);
    default:
        return fmaf((float)dot, tile_half(tile, 256, r), sum * tile_half(tile, 288, r));
    }
}

void vtpu_scalar_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    size_t tile_bytes = vtpu_tile_bytes(op->fmt);
    uint32_t blocks = op->k / VTPU_BLOCK;

    for (uint32_t tile_row = begin; tile_row < end; tile_row++) {
        const uint8_t *tiles = op->weight + (size_t)tile_row * blocks * tile_bytes;

        for (uint32_t row = 0; row < op->m; row++) {
            QuantRow x = quant_row(op->quantised, op->k, row);
            float *dst = row_at(op->dst, op->dst_stride, row) + (size_t)tile_row * VTPU_TILE_ROWS;

            for (uint32_t r = 0; r < VTPU_TILE_ROWS; r++) {
                float acc = 0.0f;

                for (uint32_t block = 0; block < blocks; block++) {
                    float t = block_product(tiles + block * tile_bytes, op->fmt, r,
                                            x.q + block * VTPU_BLOCK, x.sum[block]);
                    acc = fmaf(t, x.scale[block], acc);
                }
                dst[r] = op->accumulate ? dst[r] + acc : acc;
            }
        }
    }
}
