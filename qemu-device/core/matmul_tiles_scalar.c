/* SPDX-License-Identifier: MIT */
/* The definition of MATMUL with I8 and BF16_TILES: docs/numerics.md. */
#include <math.h>

#include "kernels_internal.h"
#include "vmath.h"

static void store(const VtpuMatmul *op, float value, uint32_t row, uint32_t output)
{
    float *dst = row_at(op->dst, op->dst_stride, row) + output;
    *dst = op->accumulate ? *dst + value : value;
}

/* --- I8. A quantised row: k int8, then its scale. */

static size_t i8_row_bytes(uint32_t k)
{
    return odd_lines((size_t)k + sizeof(float));
}

size_t vtpu_scalar_i8_bytes(uint32_t k, uint32_t m)
{
    return m * i8_row_bytes(k);
}

void vtpu_scalar_i8_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                             uint32_t m, uint32_t begin, uint32_t end)
{
    (void)m;
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        int8_t *q = (int8_t *)quantised + row * i8_row_bytes(k);
        float amax = 0.0f, scale = 0.0f;
        bool finite = true;

        for (uint32_t i = 0; i < k; i++) {
            float magnitude = fabsf(x[i]);
            finite = finite && magnitude < INFINITY;
            amax = magnitude > amax ? magnitude : amax;
        }
        if (!finite || amax < VTPU_QUANT_TINY) {
            memset(q, 0, k);
            scale = finite ? 0.0f : vtpu_nan();
        } else {
            float inverse = VTPU_I8_MAX / amax;
            for (uint32_t i = 0; i < k; i++) {
                q[i] = (int8_t)vtpu_round(x[i] * inverse);
            }
            scale = amax / VTPU_I8_MAX;
        }
        memcpy(q + k, &scale, sizeof(scale));
    }
}

void vtpu_scalar_i8_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    size_t row_bytes = i8_row_bytes(op->k);
    size_t tile_row_bytes = vtpu_tile_row_bytes(VTPU_FMT_I8, op->k);

    for (uint32_t output = begin * VTPU_TILE_ROWS; output < end * VTPU_TILE_ROWS; output++) {
        const uint8_t *tiles = op->weight + output / VTPU_TILE_ROWS * tile_row_bytes;
        uint32_t r = output % VTPU_TILE_ROWS;
        float d;

        memcpy(&d, tiles + tile_row_bytes - VTPU_TILE_TAIL_I8 + r * sizeof(d), sizeof(d));
        for (uint32_t row = 0; row < op->m; row++) {
            const int8_t *q = (const int8_t *)op->quantised + row * row_bytes;
            float scale;
            int32_t dot = 0;

            memcpy(&scale, q + op->k, sizeof(scale));
            /* Tiles without gaps: one long row of groups. */
            for (uint32_t i = 0; i < op->k; i++) {
                dot += q[i] * (int8_t)tiles[tile_byte(r, i)];
            }
            store(op, ((float)dot * d) * scale, row, output);
        }
    }
}

/* --- BF16_TILES. A quantised row: k f32 that are bf16. */

static size_t bf16_row_bytes(uint32_t k)
{
    return odd_lines((size_t)k * sizeof(float));
}

size_t vtpu_scalar_bf16_bytes(uint32_t k, uint32_t m)
{
    return m * bf16_row_bytes(k);
}

void vtpu_scalar_bf16_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                               uint32_t m, uint32_t begin, uint32_t end)
{
    (void)m;
    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        float *to = (float *)(quantised + row * bf16_row_bytes(k));

        for (uint32_t i = 0; i < k; i++) {
            to[i] = vtpu_bf16_to_f32(vtpu_f32_to_bf16(x[i]));
        }
    }
}

/* Arithmetic as matrix units have it: a denormal counts as a zero of its sign. */
static float flush(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}

/* A result is flushed when it is below 2^-126 as rounded to 24 bits with no bound on
 * the exponent; fmaf's own rounding, to the denormals' fewer bits, may get there. In
 * double, the exact sum is on the same side of the bound. */
static float flush_fma(float a, float b, float c)
{
    float sum = fmaf(a, b, c);
    bool tiny = fabs((double)a * b + c) < 0x1p-126 - 0x1p-151;

    return tiny ? copysignf(0.0f, sum) : sum;
}

static float bf16_block(const float *x, const uint8_t *tile, uint32_t r, float acc)
{
    float chain[2] = { 0 };

    for (uint32_t i = 0; i < VTPU_TILE_COLS_BF16_TILES; i++) {
        chain[i % 2] = flush_fma(flush(x[i]), flush(tile_bf16(tile, r, i)), chain[i % 2]);
    }
    return flush(acc + flush(chain[0] + chain[1]));
}

void vtpu_scalar_bf16_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    size_t tile_row_bytes = vtpu_tile_row_bytes(VTPU_FMT_BF16_TILES, op->k);

    for (uint32_t output = begin * VTPU_TILE_ROWS; output < end * VTPU_TILE_ROWS; output++) {
        const uint8_t *tiles = op->weight + output / VTPU_TILE_ROWS * tile_row_bytes;
        uint32_t r = output % VTPU_TILE_ROWS;

        for (uint32_t row = 0; row < op->m; row++) {
            const float *x = (const float *)(op->quantised + row * bf16_row_bytes(op->k));
            float acc = 0.0f;

            for (uint32_t i = 0; i < op->k; i += VTPU_TILE_COLS_BF16_TILES) {
                acc = bf16_block(x + i, tiles + i / VTPU_TILE_COLS_BF16_TILES *
                                                    VTPU_TILE_BYTES_BF16_TILES, r, acc);
            }
            store(op, acc, row, output);
        }
    }
}
