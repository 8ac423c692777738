/* SPDX-License-Identifier: MIT */
/* What the files of the kernels share among themselves. */
#ifndef VTPU_KERNELS_INTERNAL_H
#define VTPU_KERNELS_INTERNAL_H

#include <string.h>

#include "convert.h"
#include "kernels.h"

extern const VtpuKernels vtpu_kernels_scalar;
extern const VtpuKernels vtpu_kernels_avx2;
extern const VtpuKernels vtpu_kernels_avx512;

/*
 * A quantised row: k/32 blocks of 32 int16, then k/32 scales, then k/32 sums
 * of the block's integers (f32, exact), padded to 64 bytes. Within four
 * columns the order is 0, 2, 1, 3: the tiles keep four columns of a row in
 * one 32-bit word, whose even and odd bytes widen to 16-bit pairs without a
 * shuffle. A pair product (vpmaddwd, vpdpwssd) does as many multiplications
 * an instruction as two byte products, one for each half of the activation.
 */
#define VTPU_BLOCK 32

typedef struct QuantRow {
    const int16_t *q;
    const float *scale;
    const float *sum;
} QuantRow;

static inline size_t quant_row_bytes(uint32_t k)
{
    size_t blocks = k / VTPU_BLOCK;
    return (blocks * (VTPU_BLOCK * 2 + 8) + 63) & ~(size_t)63;
}

static inline size_t quant_bytes(uint32_t k, uint32_t m)
{
    return m * quant_row_bytes(k);
}

static inline QuantRow quant_row(const uint8_t *quantised, uint32_t k, uint32_t row)
{
    const uint8_t *base = quantised + row * quant_row_bytes(k);
    size_t blocks = k / VTPU_BLOCK;
    return (QuantRow){
        .q = (const int16_t *)base,
        .scale = (const float *)(base + (size_t)k * 2),
        .sum = (const float *)(base + (size_t)k * 2) + blocks,
    };
}

/* Below this a block of activations counts as zero: 1 / amax stays finite. */
#define VTPU_QUANT_TINY 0x1p-100f
#define VTPU_QUANT_MAX 32767.0f

#define VTPU_I8_MAX 127.0f

/* Rows of an odd number of cache lines: one column of sixteen rows then lies in as
 * many sets of a cache. */
static inline size_t odd_lines(size_t bytes)
{
    return ((bytes + 63) / 64 | 1) * 64;
}

static inline float *row_at(float *base, size_t stride, uint32_t row)
{
    return (float *)((uint8_t *)base + row * stride);
}

static inline const float *const_row_at(const float *base, size_t stride, uint32_t row)
{
    return (const float *)((const uint8_t *)base + row * stride);
}

/* Item i of attention: key head i / rows, row i % rows. */
typedef struct AttnRow {
    uint32_t keys;
    const uint32_t *blocks;       /* its row of the block tables */
} AttnRow;

static inline bool attn_stopped(const VtpuAttn *op)
{
    return op->stop && atomic_load_explicit(op->stop, memory_order_relaxed);
}

static inline AttnRow attn_row(const VtpuAttn *op, uint32_t row)
{
    const uint32_t *info = op->row_info + 2 * (size_t)row;
    return (AttnRow){ info[0], op->block_tables + (size_t)info[1] * op->max_blocks };
}

/* Element index of key j's vector for one key head. */
static inline size_t attn_key_at(const VtpuAttn *op, AttnRow row, uint32_t j, uint32_t kv_head)
{
    size_t slot = (size_t)row.blocks[j / op->block_size] * op->block_size + j % op->block_size;
    return (slot * op->kv_heads + kv_head) * op->head_dim;
}

static inline uint32_t attn_max_keys(const VtpuAttn *op)
{
    uint32_t most = 0;
    for (uint32_t row = 0; row < op->rows; row++) {
        uint32_t keys = op->row_info[2 * (size_t)row];
        most = keys > most ? keys : most;
    }
    return most;
}

/* The scalar table row functions, good enough for every path. */
void vtpu_scalar_gather_row(float *dst, const uint8_t *table, uint32_t row, uint32_t width,
                            uint32_t fmt);
void vtpu_scalar_scatter_row(uint8_t *dst, const float *src, uint32_t width, uint32_t fmt);

void vtpu_scalar_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                          uint32_t m, uint32_t begin, uint32_t end);
void vtpu_scalar_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end);
size_t vtpu_scalar_attn_scratch_bytes(const VtpuAttn *op);
void vtpu_scalar_attn(const VtpuAttn *op, uint8_t *scratch, uint32_t begin, uint32_t end);

/* The functions of a VtpuProduct. */
#define PRODUCT_FUNCTIONS(name)                                                             \
    size_t vtpu_##name##_bytes(uint32_t k, uint32_t m);                                     \
    void vtpu_##name##_quantise(uint8_t *quantised, const float *src, size_t src_stride,    \
                                uint32_t k, uint32_t m, uint32_t begin, uint32_t end);      \
    void vtpu_##name##_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end);

PRODUCT_FUNCTIONS(scalar_i8)
PRODUCT_FUNCTIONS(scalar_bf16)

/* Where byte planes of a tile keep column `col` of row `r`. */
static inline uint32_t tile_byte(uint32_t r, uint32_t col)
{
    return (col / 4) * 64 + 4 * r + col % 4;
}

static inline float tile_bf16(const uint8_t *tile, uint32_t r, uint32_t col)
{
    uint16_t half;
    memcpy(&half, tile + (col / 2) * 64 + 4 * r + 2 * (col % 2), sizeof(half));
    return vtpu_bf16_to_f32(half);
}

#endif
