/* SPDX-License-Identifier: MIT */
/* CRC-32C (Castagnoli, as in iSCSI, RFC 3720 appendix B.4), by one table. */
#include <pthread.h>

#include "crc32c.h"

#define POLYNOMIAL 0x82f63b78u /* reflected */

static uint32_t table[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        }
        table[i] = crc;
    }
}

#if defined(__x86_64__)
__attribute__((target("sse4.2")))
static uint32_t update_sse42(uint32_t crc, const uint8_t *data, size_t size)
{
    uint64_t wide = crc, word;

    for (; size >= 8; data += 8, size -= 8) {
        __builtin_memcpy(&word, data, 8);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = (uint32_t)wide;
    for (; size; data++, size--) {
        crc = __builtin_ia32_crc32qi(crc, *data);
    }
    return crc;
}
#endif

uint32_t vtpu_crc32c(uint32_t crc, const void *data, size_t size)
{
    const uint8_t *bytes = data;

    crc = ~crc;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) {
        return ~update_sse42(crc, bytes, size);
    }
#endif
    pthread_once(&once, make_table);
    while (size--) {
        crc = crc >> 8 ^ table[(crc ^ *bytes++) & 255];
    }
    return ~crc;
}
