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

/* Best first. */
static const struct {
    const VtpuKernels *kernels;
    bool (*supported)(void);
} paths[] = {
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
