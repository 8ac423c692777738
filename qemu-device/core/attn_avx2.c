/* SPDX-License-Identifier: MIT */
/* V_ATTN with AVX2. */
#include "lanes_avx2.h"

#define VALUE_DIMS 2

#include "attn_simd.h"
#include "kernels_simd.h"

size_t vtpu_avx2_attn_scratch_bytes(const VtpuAttn *op)
{
    return simd_attn_scratch_bytes(op);
}

void vtpu_avx2_attn(const VtpuAttn *op, uint8_t *scratch, uint32_t begin, uint32_t end)
{
    simd_attn(op, scratch, begin, end);
}
