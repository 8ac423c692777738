/* SPDX-License-Identifier: MIT */
#ifndef VTPU_CRC32C_H
#define VTPU_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Continues from `crc`; zero to begin. */
uint32_t vtpu_crc32c(uint32_t crc, const void *data, size_t size);

#endif
