/* SPDX-License-Identifier: MIT */
/* Which vector paths the host has, and their choice by name. */
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels_simd.h"

#define TILES(fmt) [VTPU_FMT_##fmt] = { VTPU_TILE_COLS_##fmt, VTPU_TILE_BYTES_##fmt, VTPU_TILE_TAIL_##fmt }

static const struct {
    uint16_t cols, bytes, tail;
} tiles[32] = { TILES(Q8_0), TILES(Q4_0), TILES(Q4_1), TILES(I8), TILES(BF16_TILES) };

uint32_t vtpu_tile_cols(uint32_t fmt)
{
    return tiles[fmt].cols;
}

size_t vtpu_tile_bytes(uint32_t fmt)
{
    return tiles[fmt].bytes;
}

size_t vtpu_tile_row_bytes(uint32_t fmt, uint32_t k)
{
    return (size_t)(k / tiles[fmt].cols) * tiles[fmt].bytes + tiles[fmt].tail;
}

static bool always(void)
{
    return true;
}

#if defined(__x86_64__)
/* The compiler's detection covers the operating system's part (XCR0) too. */
static bool has_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

/* The AVX-512 path with another product, made when the host is found to have it. */
static VtpuKernels amx = { .name = "amx" };
static bool amx_usable;

#define CPUID_AMX_BF16 (1u << 22)    /* leaf 7, edx */
#define CPUID_AMX_TILE (1u << 24)
#define CPUID_AMX_INT8 (1u << 25)
#define CPUID_OSXSAVE (1u << 27)     /* leaf 1, ecx */
#define XCR0_TILES (3u << 17)        /* TILECFG and TILEDATA */
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_TILEDATA 18

/* The processor has it, the operating system saves its state, the tiles are as
 * large as the code takes them to be, and this process may use them. */
static bool host_has_amx(void)
{
    unsigned a, b, c, d, low, high;

    if (!has_avx512() || !__get_cpuid(1, &a, &b, &c, &d) || !(c & CPUID_OSXSAVE)) {
        return false;
    }
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & XCR0_TILES) != XCR0_TILES || !__get_cpuid_count(7, 0, &a, &b, &c, &d) ||
        !(d & CPUID_AMX_TILE) || !(d & CPUID_AMX_INT8) || !(d & CPUID_AMX_BF16)) {
        return false;
    }
    /* Palette 1: bytes a tile | bytes a row, number of tiles, rows. */
    if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d) || a >> 16 != 1024 || (b & 0xffff) != 64 ||
        b >> 16 < 8 || (c & 0xffff) < 16) {
        return false;
    }
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_TILEDATA) == 0;
}

/*
 * Processors, hypervisors and emulators differ in what they make of AMX: a small
 * product, with every rule of the code in it, is compared with the definition before
 * a first result depends on it. A millisecond, once. Every other row has one number that
 * is not zero, so that tiny products, which are flushed, are not lost in sums.
 */
#define CHECK_ROWS (VTPU_AMX_MIN_ROWS + 1)
#define CHECK_TILE_ROWS 5 /* a panel and a remainder of each product */
#define CHECK_N (16 * CHECK_TILE_ROWS)
#define CHECK_K 128

static bool same_as_scalar(const VtpuKernels *kernels, uint32_t fmt)
{
    static float src[CHECK_ROWS * CHECK_K], dst[2][CHECK_ROWS * CHECK_N];
    static uint8_t weight[CHECK_TILE_ROWS * 4 * VTPU_TILE_BYTES_BF16_TILES];
    static uint8_t quantised[CHECK_ROWS * CHECK_K * 8] __attribute__((aligned(64)));
    const VtpuKernels *each[2] = { &vtpu_kernels_scalar, kernels };
    uint32_t state = fmt;

    for (size_t i = 0; i < sizeof(weight); i++) {
        state = state * 1664525u + 1013904223u;
        weight[i] = (uint8_t)(state >> 24) & 0xbf; /* as f16, bf16 and f32, finite */
    }
    for (uint32_t i = 0; i < CHECK_ROWS * CHECK_K; i++) {
        state = state * 1664525u + 1013904223u;
        src[i] = i / CHECK_K % 2 && i % CHECK_K != i / CHECK_K ? 0.0f
                                                               : (float)(int32_t)state * 0x1p-80f;
    }
    for (int i = 0; i < 2; i++) {
        const VtpuProduct *product = vtpu_product(each[i], fmt);
        VtpuMatmul op = {
            .dst = dst[i], .dst_stride = CHECK_N * sizeof(float), .quantised = quantised,
            .weight = weight, .m = CHECK_ROWS, .n = CHECK_N, .k = CHECK_K, .fmt = fmt,
        };
        product->quantise(quantised, src, CHECK_K * sizeof(float), CHECK_K, CHECK_ROWS, 0,
                          CHECK_ROWS);
        product->matmul(&op, 0, CHECK_TILE_ROWS);
    }
    return memcmp(dst[0], dst[1], sizeof(dst[0])) == 0;
}

static void prepare_amx(void)
{
    if (!host_has_amx()) {
        return;
    }
    amx = vtpu_kernels_avx512;
    amx.name = "amx";
    amx.blocks = (VtpuProduct){ vtpu_amx_quantise_bytes, vtpu_amx_quantise, vtpu_amx_matmul, 0 };
    amx.i8 = (VtpuProduct){ vtpu_amx_i8_bytes, vtpu_amx_i8_quantise, vtpu_amx_i8_matmul,
                             1 << 28 };
    amx.bf16 = (VtpuProduct){ vtpu_amx_bf16_bytes, vtpu_amx_bf16_quantise, vtpu_amx_bf16_matmul,
                               1 << 28 };
    amx_usable = true;
    for (uint32_t fmt = 0; fmt < 32; fmt++) {
        amx_usable = amx_usable && (!vtpu_tile_cols(fmt) || same_as_scalar(&amx, fmt));
    }
}

static bool has_amx(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare_amx);
    return amx_usable;
}
#endif

/* Best first. */
static const struct {
    const VtpuKernels *kernels;
    bool (*supported)(void);
} paths[] = {
#if defined(__x86_64__)
    { &amx, has_amx },
    { &vtpu_kernels_avx512, has_avx512 },
    { &vtpu_kernels_avx2, has_avx2 },
#endif
    { &vtpu_kernels_scalar, always },
};

const VtpuKernels *vtpu_kernels_get(const char *name)
{
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        if ((!name || strcmp(name, paths[i].kernels->name) == 0) && paths[i].supported()) {
            return paths[i].kernels;
        }
    }
    return NULL;
}
