/* SPDX-License-Identifier: MIT */
/* Register-only loops: what each of the host's units does at most. */
#ifndef VTPU_BENCH_PEAKS_H
#define VTPU_BENCH_PEAKS_H

#include <immintrin.h>
#include <stddef.h>
#include <string.h>

#include "../kernels.h"

/* Products that a call does, about: a millisecond or less, of which some are undisturbed
 * on a busy host, too. */
#define PEAK_PRODUCTS 1e8

/* Tiles of 16 rows of 64 bytes; the loop's operands are zeros. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} peak_tiles = {
    .palette = 1,
    .row_bytes = { 64, 64, 64, 64, 64, 64, 64, 64 },
    .rows = { 16, 16, 16, 16, 16, 16, 16, 16 },
};

__attribute__((target("amx-tile,amx-int8"))) static void peak_amx_int8(void)
{
    _tile_loadconfig(&peak_tiles);
    for (long i = 0; i < (long)(PEAK_PRODUCTS / (16 * 16 * 64) / 4); i++) {
        _tile_dpbssd(4, 0, 2);
        _tile_dpbssd(5, 0, 3);
        _tile_dpbssd(6, 1, 2);
        _tile_dpbssd(7, 1, 3);
    }
    _tile_release();
}

__attribute__((target("amx-tile,amx-bf16"))) static void peak_amx_bf16(void)
{
    _tile_loadconfig(&peak_tiles);
    for (long i = 0; i < (long)(PEAK_PRODUCTS / (16 * 16 * 32) / 4); i++) {
        _tile_dpbf16ps(4, 0, 2);
        _tile_dpbf16ps(5, 0, 3);
        _tile_dpbf16ps(6, 1, 2);
        _tile_dpbf16ps(7, 1, 3);
    }
    _tile_release();
}

/* Twelve sums: more than the latency times the units. */
#define TWELVE(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11)
#define PEAK_ZMM(name, features, products, instruction)                                      \
    __attribute__((target(features))) static void name(void)                                 \
    {                                                                                        \
        for (long i = 0; i < (long)(PEAK_PRODUCTS / (products) / 12); i++) {                 \
            TWELVE(instruction)                                                              \
        }                                                                                    \
    }
#define VPDPBUSD(r) __asm__ volatile("vpdpbusd %%zmm31, %%zmm30, %%zmm" #r ::: "xmm" #r);
#define VDPBF16PS(r) __asm__ volatile("vdpbf16ps %%zmm31, %%zmm30, %%zmm" #r ::: "xmm" #r);
#define VFMADD(r) __asm__ volatile("vfmadd231ps %%zmm31, %%zmm30, %%zmm" #r ::: "xmm" #r);
PEAK_ZMM(peak_vnni, "avx512f,avx512vnni", 64, VPDPBUSD)
PEAK_ZMM(peak_avx512_bf16, "avx512f,avx512bf16", 32, VDPBF16PS)
PEAK_ZMM(peak_avx512_fma, "avx512f", 16, VFMADD)

/* Byte products into 32-bit sums: AVX2's own add pairs in 16 bits, which vpmaddwd with ones
 * widens. Widening the bytes first and two vpmaddwd for one of these are slower. */
__attribute__((target("avx2"))) static void peak_avx2_int8(void)
{
    for (long i = 0; i < (long)(PEAK_PRODUCTS / 32 / 6); i++) {
#define PRODUCT(r)                                                 \
    __asm__ volatile("vpmaddubsw %%ymm15, %%ymm14, %%ymm13\n\t"    \
                     "vpmaddwd %%ymm12, %%ymm13, %%ymm13\n\t"      \
                     "vpaddd %%ymm13, %%ymm" #r ", %%ymm" #r ::: "xmm13", "xmm" #r);
        PRODUCT(0) PRODUCT(1) PRODUCT(2) PRODUCT(3) PRODUCT(4) PRODUCT(5)
#undef PRODUCT
    }
}

__attribute__((target("avx2,fma"))) static void peak_avx2_fma(void)
{
    for (long i = 0; i < (long)(PEAK_PRODUCTS / 8 / 12); i++) {
#define PRODUCT(r) __asm__ volatile("vfmadd231ps %%ymm15, %%ymm14, %%ymm" #r ::: "xmm" #r);
        TWELVE(PRODUCT)
#undef PRODUCT
    }
}

/* What every x86-64 has, for the scalar path. */
static void peak_sse2_int8(void)
{
    for (long i = 0; i < (long)(PEAK_PRODUCTS / 8 / 6); i++) {
#define PRODUCT(r)                                  \
    __asm__ volatile("movdqa %%xmm14, %%xmm13\n\t"  \
                     "pmaddwd %%xmm15, %%xmm13\n\t" \
                     "paddd %%xmm13, %%xmm" #r ::: "xmm13", "xmm" #r);
        PRODUCT(0) PRODUCT(1) PRODUCT(2) PRODUCT(3) PRODUCT(4) PRODUCT(5)
#undef PRODUCT
    }
}

static void peak_sse2_mul_add(void)
{
    for (long i = 0; i < (long)(PEAK_PRODUCTS / 4 / 12); i++) {
#define PRODUCT(r)                                  \
    __asm__ volatile("movaps %%xmm14, %%xmm13\n\t"  \
                     "mulps %%xmm15, %%xmm13\n\t"   \
                     "addps %%xmm13, %%xmm" #r ::: "xmm13", "xmm" #r);
        TWELVE(PRODUCT)
#undef PRODUCT
    }
}

typedef struct Peak {
    const char *unit;
    void (*run)(void);
} Peak;

/* The best unit that the host has and may use, as the paths have found out: of products of
 * bytes, or of bf16. */
static Peak best_peak(bool bf16)
{
    if (vtpu_kernels_get("amx")) {
        return bf16 ? (Peak){ "AMX bf16", peak_amx_bf16 } : (Peak){ "AMX int8", peak_amx_int8 };
    }
    if (vtpu_kernels_get("avx512")) {
        if (!bf16) {
            return (Peak){ "AVX-512 VNNI", peak_vnni };
        }
        return __builtin_cpu_supports("avx512bf16") ? (Peak){ "AVX-512 BF16", peak_avx512_bf16 }
                                                    : (Peak){ "AVX-512 FMA", peak_avx512_fma };
    }
    if (vtpu_kernels_get("avx2")) {
        return bf16 ? (Peak){ "AVX2 FMA", peak_avx2_fma } : (Peak){ "AVX2", peak_avx2_int8 };
    }
    return bf16 ? (Peak){ "SSE2", peak_sse2_mul_add } : (Peak){ "SSE2", peak_sse2_int8 };
}

#endif
