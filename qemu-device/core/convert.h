/* SPDX-License-Identifier: MIT */
/*
 * f16 and bf16 to and from f32 by integer operations: rounding to nearest
 * even, denormals kept, every NaN written as the quiet NaN of the format, and
 * f16 overflow (infinities too) saturating to the largest finite value.
 */
#ifndef VTPU_CONVERT_H
#define VTPU_CONVERT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VTPU_F16_NAN 0x7e00u
#define VTPU_BF16_NAN 0x7fc0u
#define VTPU_F16_MAX 65504.0f

static inline uint32_t vtpu_f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline float vtpu_f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* Element i of a table in the guest's memory, which may lie at any address. */
static inline uint16_t vtpu_half_at(const uint8_t *table, size_t i)
{
    uint16_t half;
    memcpy(&half, table + 2 * i, sizeof(half));
    return half;
}

static inline float vtpu_bf16_to_f32(uint16_t h)
{
    return vtpu_f32_from_bits((uint32_t)h << 16);
}

static inline uint16_t vtpu_f32_to_bf16(float x)
{
    uint32_t bits = vtpu_f32_bits(x);

    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return VTPU_BF16_NAN;
    }
    /* A carry out of the fraction steps the exponent, up to infinity. */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

static inline float vtpu_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 0x1fu;
    uint32_t fraction = h & 0x3ffu;

    if (exponent == 0x1f) {
        uint32_t quiet = fraction ? 0x400000u : 0;
        return vtpu_f32_from_bits(sign | 0x7f800000u | quiet | (fraction << 13));
    }
    if (exponent == 0) {
        /* fraction * 2^-24, exact */
        float magnitude = (float)fraction * 0x1p-24f;
        return vtpu_f32_from_bits(sign | vtpu_f32_bits(magnitude));
    }
    return vtpu_f32_from_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
}

static inline uint16_t vtpu_f32_to_f16(float x)
{
    uint32_t bits = vtpu_f32_bits(x);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;

    if (magnitude > 0x7f800000u) {
        return VTPU_F16_NAN;
    }
    if (magnitude > 0x477fe000u) {        /* 65504 */
        return (uint16_t)(sign | 0x7bffu);
    }
    if (magnitude >= 0x38800000u) {       /* 2^-14: normal */
        uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
        return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
    }
    if (magnitude <= 0x33000000u) {       /* 2^-25: half the smallest, ties to even zero */
        return (uint16_t)sign;
    }
    uint32_t shift = 126 - (magnitude >> 23);          /* 14..24 */
    uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
    uint32_t half = 1u << (shift - 1);
    uint32_t rounded = (fraction + half - 1 + ((fraction >> shift) & 1)) >> shift;
    return (uint16_t)(sign | rounded);
}

#endif
