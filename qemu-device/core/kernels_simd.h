/* SPDX-License-Identifier: MIT */
/* Functions of the vector paths that are in files of their own. */
#ifndef VTPU_KERNELS_SIMD_H
#define VTPU_KERNELS_SIMD_H

#include <string.h>

#include "kernels_internal.h"

void vtpu_avx2_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end);
void vtpu_avx512_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end);

PRODUCT_FUNCTIONS(avx2_i8)
PRODUCT_FUNCTIONS(avx2_bf16)
PRODUCT_FUNCTIONS(avx512_i8)
PRODUCT_FUNCTIONS(avx512_bf16)
PRODUCT_FUNCTIONS(amx_i8)
PRODUCT_FUNCTIONS(amx_bf16)

/* Below this many rows the AMX path's product is that of AVX-512: measured on a Xeon
 * with AMX, it draws level at 32, but computes rows in groups of 16. */
#define VTPU_AMX_MIN_ROWS 48
size_t vtpu_amx_quantise_bytes(uint32_t k, uint32_t m);
void vtpu_amx_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                       uint32_t m, uint32_t begin, uint32_t end);
void vtpu_amx_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end);

size_t vtpu_avx2_attn_scratch_bytes(const VtpuAttn *op);
void vtpu_avx2_attn(const VtpuAttn *op, uint8_t *scratch, uint32_t begin, uint32_t end);
size_t vtpu_avx512_attn_scratch_bytes(const VtpuAttn *op);
void vtpu_avx512_attn(const VtpuAttn *op, uint8_t *scratch, uint32_t begin, uint32_t end);

#endif
