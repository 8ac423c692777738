/* SPDX-License-Identifier: MIT */
/*
 * The arithmetic of the engines on host pointers, in one set of functions for
 * each vector path. docs/numerics.md defines every result; all paths give the
 * same bits. Callers have checked every bound, stride and index beforehand;
 * these functions trust their arguments and touch nothing else.
 *
 * A function computes the part [begin, end) of its parallel dimension, named
 * in its comment, and is called from several threads on disjoint parts.
 * Strides are in bytes. Pointers to f32 are 4-byte aligned.
 */
#ifndef VTPU_KERNELS_H
#define VTPU_KERNELS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vtpu_hw.h"
#include "vtpu_isa.h"

/*
 * A call is fastest with a multiple of this: tile rows of a product; items of
 * attention (fewer, if not every thread would get some).
 * Results are the same for any cut.
 */
#define VTPU_MATMUL_GRAIN 3
#define VTPU_TILES_GRAIN 4 /* of I8 and BF16_TILES */
#define VTPU_ATTN_GRAIN 16

typedef struct VtpuMatmul {
    float *dst;
    size_t dst_stride;
    const uint8_t *quantised;     /* m rows, from quantise() */
    const uint8_t *weight;        /* the whole matrix: tile row i starts at
                                     weight + i * vtpu_tile_row_bytes(fmt, k) */
    uint32_t m, n, k;
    uint32_t fmt;                 /* one that vtpu_tile_cols() knows */
    bool accumulate;
} VtpuMatmul;

/*
 * MATMUL with weights of some formats. Activations are quantised first, each row
 * once. The layout is private to a path and may depend on m, the rows of the whole
 * product; quantise_bytes() says how much they take (a multiple of 64).
 */
typedef struct VtpuProduct {
    size_t (*quantise_bytes)(uint32_t k, uint32_t m);
    /* rows [begin, end) of the m of src into quantised */
    void (*quantise)(uint8_t *quantised, const float *src, size_t src_stride,
                     uint32_t k, uint32_t m, uint32_t begin, uint32_t end);
    /* weight tile rows (16 outputs each) [begin, end) */
    void (*matmul)(const VtpuMatmul *op, uint32_t begin, uint32_t end);
    /* Multiplications that a call should do at most, a millisecond; more make better use
     * of caches. 0: a call is best small. */
    uint64_t call;
} VtpuProduct;

typedef struct VtpuAttn {
    float *dst;                   /* [rows][heads][head_dim] */
    const float *q;
    const uint8_t *k_cache;       /* [num_slots][kv_heads][head_dim] of fmt; contiguous */
    const uint8_t *v_cache;
    const uint32_t *row_info;     /* [rows][2]: keys, table row */
    const uint32_t *block_tables; /* [..][max_blocks]; entries already checked */
    uint32_t rows, heads, kv_heads, head_dim, block_size, max_blocks, fmt;
    float scale;
    const atomic_uint *stop;      /* when non-zero, the result does not matter; may be NULL */
} VtpuAttn;

typedef struct VtpuKernels {
    const char *name; /* "scalar", "avx2", "avx512", "amx" */

    VtpuProduct blocks;           /* Q8_0, Q4_0, Q4_1 */
    VtpuProduct i8, bf16;         /* I8, BF16_TILES */

    /* rows [begin, end) in all that follow */
    void (*rmsnorm)(float *dst, size_t dst_stride, const float *src, size_t src_stride,
                    const float *weight, uint32_t width, float epsilon,
                    uint32_t begin, uint32_t end);
    void (*add)(float *dst, size_t dst_stride, const float *a, size_t a_stride,
                const float *b, size_t b_stride, uint32_t width, uint32_t begin, uint32_t end);
    void (*mul)(float *dst, size_t dst_stride, const float *a, size_t a_stride,
                const float *b, size_t b_stride, uint32_t width, uint32_t begin, uint32_t end);
    void (*silu_mul)(float *dst, size_t dst_stride, const float *gate, size_t gate_stride,
                     const float *up, size_t up_stride, uint32_t width,
                     uint32_t begin, uint32_t end);
    void (*rope)(float *dst, size_t dst_stride, const float *src, size_t src_stride,
                 const float *cos_sin, uint32_t heads, uint32_t head_dim, bool halves,
                 uint32_t begin, uint32_t end);
    /*
     * Attention items [begin, end) of rows * kv_heads: item i is key head
     * i / rows of row i % rows, with all its query heads. Neighbouring rows of
     * one sequence are worked on together, so hand out VTPU_ATTN_GRAIN
     * items at a time, in turn: later rows of a prompt cost more. Scratch:
     * attn_scratch_bytes() bytes a call, 64-byte aligned.
     */
    size_t (*attn_scratch_bytes)(const VtpuAttn *op);
    void (*attn)(const VtpuAttn *op, uint8_t *scratch, uint32_t begin, uint32_t end);
    /* result rows of 192 bytes; scratch: sample_scratch_bytes(vocab) a call */
    size_t (*sample_scratch_bytes)(uint32_t vocab);
    void (*sample)(struct vtpu_sample_result *dst, const float *logits, size_t logits_stride,
                   const struct vtpu_sample_params *params, uint32_t vocab,
                   uint8_t *scratch, uint32_t begin, uint32_t end);

    /* dst[0..width) = the elements of one row of a table as f32. Where the
     * format is of tiles, the table is a weight matrix and `row` its row; for F32,
     * BF16, F16 table points at the row itself and row is 0. */
    void (*gather_row)(float *dst, const uint8_t *table, uint32_t row, uint32_t width, uint32_t fmt);
    /* dst[0..width) of fmt F32, BF16, F16 = src */
    void (*scatter_row)(uint8_t *dst, const float *src, uint32_t width, uint32_t fmt);
} VtpuKernels;

/* A format's weight tiles: columns (0: the format has none), bytes, and bytes of a
 * row of tiles with its tail. */
uint32_t vtpu_tile_cols(uint32_t fmt);
size_t vtpu_tile_bytes(uint32_t fmt);
size_t vtpu_tile_row_bytes(uint32_t fmt, uint32_t k);

static inline const VtpuProduct *vtpu_product(const VtpuKernels *kernels, uint32_t fmt)
{
    return fmt == VTPU_FMT_I8           ? &kernels->i8
           : fmt == VTPU_FMT_BF16_TILES ? &kernels->bf16
                                        : &kernels->blocks;
}

/* The path by name, or the best the host has for NULL; NULL when the host lacks it. */
const VtpuKernels *vtpu_kernels_get(const char *name);

#endif
