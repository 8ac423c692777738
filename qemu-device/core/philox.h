/* SPDX-License-Identifier: MIT */
/*
 * Philox4x32-10, the counter-based generator of J. K. Salmon, M. A. Moraes,
 * R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3"
 * (SC 2011): a keyed bijection of a 128-bit counter, so that any element of
 * the stream is had on its own.
 */
#ifndef VTPU_PHILOX_H
#define VTPU_PHILOX_H

#include <stdint.h>

#define PHILOX_ROUNDS 10
#define PHILOX_M0 0xd2511f53u
#define PHILOX_M1 0xcd9e8d57u
#define PHILOX_W0 0x9e3779b9u
#define PHILOX_W1 0xbb67ae85u

static inline void philox4x32(uint32_t counter[4], uint64_t key)
{
    uint32_t k0 = (uint32_t)key;
    uint32_t k1 = (uint32_t)(key >> 32);

    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t a = (uint64_t)PHILOX_M0 * counter[0];
        uint64_t b = (uint64_t)PHILOX_M1 * counter[2];
        counter[0] = (uint32_t)(b >> 32) ^ counter[1] ^ k0;
        counter[1] = (uint32_t)b;
        counter[2] = (uint32_t)(a >> 32) ^ counter[3] ^ k1;
        counter[3] = (uint32_t)a;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
}

#endif
