/* SPDX-License-Identifier: MIT */
/* exp and log of vmath.h in sixteen lanes. A path includes its lanes_*.h first. */
#ifndef VTPU_LANES_MATH_H
#define VTPU_LANES_MATH_H

#include "vmath.h"

static inline v16 v_exp(v16 x)
{
    v16 n = v_round(v_mul(x, v_set1(VTPU_LOG2E)));
    v16 r = v_fma(n, v_set1(-VTPU_LN2_HIGH), x);
    r = v_fma(n, v_set1(-VTPU_LN2_LOW), r);
    v16 p = v_set1(VTPU_EXP_P0);
    p = v_fma(p, r, v_set1(VTPU_EXP_P1));
    p = v_fma(p, r, v_set1(VTPU_EXP_P2));
    p = v_fma(p, r, v_set1(VTPU_EXP_P3));
    p = v_fma(p, r, v_set1(VTPU_EXP_P4));
    p = v_fma(p, r, v_set1(VTPU_EXP_P5));
    v16 y = v_add(v_fma(p, v_mul(r, r), r), v_set1(1.0f));
    y = v_scale2(y, n);
    /* Out of range, y is arbitrary; a NaN x is above nothing and stays. */
    y = v_select_above(x, v_set1(VTPU_EXP_MAX), v_set1(INFINITY), y);
    return v_select_above(v_set1(VTPU_EXP_MIN), x, v_zero(), y);
}

/* x positive and normal */
static inline v16 v_log(v16 x)
{
    u16v shifted = u_sub(u_bits(x), u_set1(VTPU_SQRT_HALF_BITS));
    v16 e = v_from_int(u_sar(shifted, 23));
    v16 f = v_bits(u_add(u_and(shifted, u_set1(0x7fffff)), u_set1(VTPU_SQRT_HALF_BITS)));
    f = v_sub(f, v_set1(1.0f));
    v16 z = v_mul(f, f);
    v16 p = v_set1(VTPU_LOG_P0);
    p = v_fma(p, f, v_set1(VTPU_LOG_P1));
    p = v_fma(p, f, v_set1(VTPU_LOG_P2));
    p = v_fma(p, f, v_set1(VTPU_LOG_P3));
    p = v_fma(p, f, v_set1(VTPU_LOG_P4));
    p = v_fma(p, f, v_set1(VTPU_LOG_P5));
    p = v_fma(p, f, v_set1(VTPU_LOG_P6));
    p = v_fma(p, f, v_set1(VTPU_LOG_P7));
    p = v_fma(p, f, v_set1(VTPU_LOG_P8));
    v16 y = v_mul(v_mul(f, z), p);
    y = v_fma(e, v_set1(VTPU_LN2_LOW), y);
    y = v_fma(v_set1(-0.5f), z, y);
    return v_fma(e, v_set1(VTPU_LN2_HIGH), v_add(f, y));
}

#endif
