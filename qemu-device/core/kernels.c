/* SPDX-License-Identifier: MIT */
/* Which vector paths the host has, and their choice by name. */
#include <string.h>

#include "kernels_internal.h"

size_t vtpu_tile_bytes(uint32_t fmt)
{
    switch (fmt) {
    case VTPU_FMT_Q8_0:
        return VTPU_TILE_BYTES_Q8_0;
    case VTPU_FMT_Q4_0:
        return VTPU_TILE_BYTES_Q4_0;
    case VTPU_FMT_Q4_1:
        return VTPU_TILE_BYTES_Q4_1;
    default:
        return 0;
    }
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
#endif

/* Best first. */
static const struct {
    const VtpuKernels *kernels;
    bool (*supported)(void);
} paths[] = {
#if defined(__x86_64__)
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
