/* SPDX-License-Identifier: MIT */
/*
 * The executable format (docs/executable-format.md), read without a device.
 * Everything that a struct rt_elf leads to lies in the image.
 */
#ifndef RT_ELF_H
#define RT_ELF_H

#include <stdint.h>

#define RT_ELF_MACHINE 0x5450
#define RT_ELF_MAX_KERNELS 64
#define RT_ELF_MAX_SECTIONS 256
#define RT_ELF_MAX_SYMBOLS 65536
#define RT_ELF_MAX_TEXT (64u << 20)
#define RT_ELF_DESCRIPTOR_MAGIC 0x444b5054u /* "TPKD" */
#define RT_ELF_DESCRIPTOR_VERSION 1
#define RT_ELF_DESCRIPTOR_BYTES 32

struct rt_elf_kernel {
    const char *name;
    uint32_t entry; /* offset in text */
    uint32_t code_bytes, num_args;
};

struct rt_elf {
    const uint8_t *image;
    uint64_t bytes;
    const char *name; /* for messages */
    const uint8_t *text;
    uint32_t text_bytes, num_kernels;
    struct rt_elf_kernel kernels[RT_ELF_MAX_KERNELS];
};

/* Checks the whole image; TPURT_ERROR_BAD_EXECUTABLE with a message when it is wrong. */
int rt_elf_parse(const void *image, uint64_t bytes, const char *name, struct rt_elf *elf);
/* In a checked image. */
int rt_elf_section(const struct rt_elf *elf, const char *name, const void **data, uint64_t *bytes);
int rt_elf_note(const struct rt_elf *elf, uint32_t type, const void **data, uint64_t *bytes);

#endif
