/* SPDX-License-Identifier: MIT */
/* The AVX2 path. */
#include "lanes_avx2.h"

#include "elements_simd.h"
#include "kernels_simd.h"
#include "quantise_simd.h"
#include "sample_simd.h"

const VtpuKernels vtpu_kernels_avx2 = {
    .name = "avx2",
    .blocks = { quant_bytes, simd_quantise, vtpu_avx2_matmul, 0 },
    .i8 = { vtpu_avx2_i8_bytes, vtpu_avx2_i8_quantise, vtpu_avx2_i8_matmul, 1 << 26 },
    .bf16 = { vtpu_avx2_bf16_bytes, vtpu_avx2_bf16_quantise, vtpu_avx2_bf16_matmul, 1 << 26 },
    .rmsnorm = simd_rmsnorm,
    .add = simd_add,
    .mul = simd_mul,
    .silu_mul = simd_silu_mul,
    .rope = simd_rope,
    .attn_scratch_bytes = vtpu_avx2_attn_scratch_bytes,
    .attn = vtpu_avx2_attn,
    .sample_scratch_bytes = vtpu_sample_scratch_bytes,
    .sample = simd_sample,
    .gather_row = simd_gather_row,
    .scatter_row = simd_scatter_row,
};
