/* SPDX-License-Identifier: MIT */
/*
 * exp and log as the device defines them, and the constants that the vector
 * paths share. Method and coefficients: S. Moshier's Cephes library, expf and
 * logf (argument reduction with ln 2 split in two, minimax polynomials), here
 * with fma throughout.
 */
#ifndef VTPU_VMATH_H
#define VTPU_VMATH_H

#include <math.h>
#include <stdint.h>

#include "convert.h"

#define VTPU_NAN_BITS 0x7fc00000u

#define VTPU_EXP_MAX 88.72283f
#define VTPU_EXP_MIN (-87.33654f)
#define VTPU_LOG2E 1.44269504f
#define VTPU_LN2_HIGH 0.693359375f
#define VTPU_LN2_LOW (-2.12194440e-4f)

#define VTPU_EXP_P0 1.9875691500e-4f
#define VTPU_EXP_P1 1.3981999507e-3f
#define VTPU_EXP_P2 8.3334519073e-3f
#define VTPU_EXP_P3 4.1665795894e-2f
#define VTPU_EXP_P4 1.6666665459e-1f
#define VTPU_EXP_P5 5.0000001201e-1f

#define VTPU_LOG_P0 7.0376836292e-2f
#define VTPU_LOG_P1 (-1.1514610310e-1f)
#define VTPU_LOG_P2 1.1676998740e-1f
#define VTPU_LOG_P3 (-1.2420140846e-1f)
#define VTPU_LOG_P4 1.4249322787e-1f
#define VTPU_LOG_P5 (-1.6668057665e-1f)
#define VTPU_LOG_P6 2.0000714765e-1f
#define VTPU_LOG_P7 (-2.4999993993e-1f)
#define VTPU_LOG_P8 3.3333331174e-1f

/* Bits of sqrt(1/2) rounded down: the least f of the reduction in log. */
#define VTPU_SQRT_HALF_BITS 0x3f3504f3u

static inline float vtpu_nan(void)
{
    return vtpu_f32_from_bits(VTPU_NAN_BITS);
}

/* Round to the nearest integer, ties to even, for |x| < 2^22. */
static inline float vtpu_round(float x)
{
    return (x + 0x1.8p23f) - 0x1.8p23f;
}

static inline float vtpu_exp(float x)
{
    if (x != x) {
        return vtpu_nan();
    }
    if (x > VTPU_EXP_MAX) {
        return INFINITY;
    }
    if (x < VTPU_EXP_MIN) {
        return 0.0f;
    }
    float n = vtpu_round(x * VTPU_LOG2E);
    float r = fmaf(n, -VTPU_LN2_HIGH, x);
    r = fmaf(n, -VTPU_LN2_LOW, r);
    float p = VTPU_EXP_P0;
    p = fmaf(p, r, VTPU_EXP_P1);
    p = fmaf(p, r, VTPU_EXP_P2);
    p = fmaf(p, r, VTPU_EXP_P3);
    p = fmaf(p, r, VTPU_EXP_P4);
    p = fmaf(p, r, VTPU_EXP_P5);
    float y = fmaf(p, r * r, r) + 1.0f;
    /* The first half scales exactly; the second rounds at most once. */
    int32_t whole = (int32_t)n;
    int32_t half = whole >> 1;
    y *= vtpu_f32_from_bits((uint32_t)(half + 127) << 23);
    return y * vtpu_f32_from_bits((uint32_t)(whole - half + 127) << 23);
}

/* x positive and normal, or NaN. */
static inline float vtpu_log(float x)
{
    if (x != x) {
        return vtpu_nan();
    }
    /* Exponent e and f = x / 2^e in [sqrt(1/2), sqrt(2)). */
    uint32_t shifted = vtpu_f32_bits(x) - VTPU_SQRT_HALF_BITS;
    float e = (float)((int32_t)shifted >> 23);
    float f = vtpu_f32_from_bits((shifted & 0x7fffffu) + VTPU_SQRT_HALF_BITS) - 1.0f;
    float z = f * f;
    float p = VTPU_LOG_P0;
    p = fmaf(p, f, VTPU_LOG_P1);
    p = fmaf(p, f, VTPU_LOG_P2);
    p = fmaf(p, f, VTPU_LOG_P3);
    p = fmaf(p, f, VTPU_LOG_P4);
    p = fmaf(p, f, VTPU_LOG_P5);
    p = fmaf(p, f, VTPU_LOG_P6);
    p = fmaf(p, f, VTPU_LOG_P7);
    p = fmaf(p, f, VTPU_LOG_P8);
    float y = (f * z) * p;
    y = fmaf(e, VTPU_LN2_LOW, y);
    y = fmaf(-0.5f, z, y);
    return fmaf(e, VTPU_LN2_HIGH, f + y);
}

/* The tree of a reduction in 16 lanes: docs/numerics.md. */
static inline float vtpu_tree(const float lane[16])
{
    float part[8];

    for (int l = 0; l < 8; l++) {
        part[l] = lane[l] + lane[l + 8];
    }
    for (int width = 4; width > 0; width /= 2) {
        for (int l = 0; l < width; l++) {
            part[l] += part[l + width];
        }
    }
    return part[0];
}

#endif
