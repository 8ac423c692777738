/* SPDX-License-Identifier: MIT */
#ifndef RT_EXECUTABLE_H
#define RT_EXECUTABLE_H

#include <vtpu_hw.h>

#include "elf_image.h"
#include "internal.h"

struct tpurt_executable {
    atomic_uint refs;
    uint8_t *image;
    struct rt_elf elf; /* points into image */
    tpurt_buffer *code;
    uint64_t text_va;
    char name[64];
};

#endif
