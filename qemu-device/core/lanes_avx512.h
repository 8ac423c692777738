/* SPDX-License-Identifier: MIT */
/* Sixteen f32 lanes in one AVX-512 register; lanes_avx2.h has the same names. */
#ifndef VTPU_LANES_H
#define VTPU_LANES_H

#include <immintrin.h>

#include "convert.h"
#include "vmath.h"

typedef __m512 v16;
typedef __m512i u16v;             /* sixteen 32-bit integers */

static inline __mmask16 lanes_below(uint32_t n)
{
    return (__mmask16)((1u << n) - 1);
}

static inline v16 v_set1(float x) { return _mm512_set1_ps(x); }
static inline v16 v_zero(void) { return _mm512_setzero_ps(); }
static inline v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
static inline v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
static inline v16 v_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
static inline v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
static inline v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
static inline v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
/* a > b ? a : b, so b where either is NaN */
static inline v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
static inline v16 v_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }

static inline v16 v_abs(v16 a) { return _mm512_abs_ps(a); }
static inline float v_reduce_max(v16 a) { return _mm512_reduce_max_ps(a); }

/* The first n lanes (n < 16) from memory, the others as given. */
static inline v16 v_load_n(const float *p, uint32_t n, v16 others)
{
    return _mm512_mask_loadu_ps(others, lanes_below(n), p);
}

static inline void v_store_n(float *p, uint32_t n, v16 x)
{
    _mm512_mask_storeu_ps(p, lanes_below(n), x);
}

/* The first n lanes (n <= 16) of x, the others of y. */
static inline v16 v_first_n(uint32_t n, v16 x, v16 y)
{
    return _mm512_mask_mov_ps(y, lanes_below(n), x);
}

static inline uint32_t v_mask_above(v16 a, v16 b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}

static inline uint32_t v_mask_nan(v16 a)
{
    return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
}

static inline v16 v_load_f16(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static inline v16 v_load_bf16(const uint8_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void v_store_f16(uint8_t *p, v16 x)
{
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    v16 bounded = _mm512_min_ps(_mm512_max_ps(x, v_set1(-VTPU_F16_MAX)), v_set1(VTPU_F16_MAX));
    __m256i half = _mm512_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(VTPU_F16_NAN));
    _mm256_storeu_si256((__m256i *)p, half);
}

static inline void v_store_bf16(uint8_t *p, v16 x)
{
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
    half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(VTPU_BF16_NAN));
    _mm256_storeu_si256((__m256i *)p, half);
}

/* (a[0], b[0], a[1], b[1], ..) of eight each */
static inline v16 v_interleave8(const float *a, const float *b)
{
    __m512i index = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(_mm512_castps256_ps512(_mm256_loadu_ps(a)), index,
                                  _mm512_castps256_ps512(_mm256_loadu_ps(b)));
}

static inline v16 v_swap_pairs(v16 x) { return _mm512_permute_ps(x, 0xb1); }
static inline v16 v_even_twice(v16 x) { return _mm512_moveldup_ps(x); }
static inline v16 v_odd_twice(v16 x) { return _mm512_movehdup_ps(x); }
/* a * b - c in even lanes, a * b + c in odd ones */
static inline v16 v_fma_sub_add(v16 a, v16 b, v16 c) { return _mm512_fmaddsub_ps(a, b, c); }

static inline v16 v_round(v16 x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* y * 2^n, rounded once */
static inline v16 v_scale2(v16 y, v16 n) { return _mm512_scalef_ps(y, n); }

static inline v16 v_select_above(v16 x, v16 limit, v16 then, v16 otherwise)
{
    return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ), then);
}

/* The tree of docs/numerics.md over the lanes of one vector. */
static inline float v_tree(v16 x)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Lane j = the tree over a[j]: at each level two vectors share an addition. */
static inline v16 v_trees(const v16 a[16])
{
    v16 group[4];

    for (int t = 0; t < 4; t++) {
        v16 ab = v_add(_mm512_shuffle_f32x4(a[t], a[4 + t], 0x44),
                       _mm512_shuffle_f32x4(a[t], a[4 + t], 0xee));
        v16 cd = v_add(_mm512_shuffle_f32x4(a[8 + t], a[12 + t], 0x44),
                       _mm512_shuffle_f32x4(a[8 + t], a[12 + t], 0xee));
        group[t] = v_add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    }
    __m512d g0 = _mm512_castps_pd(group[0]), g1 = _mm512_castps_pd(group[1]);
    __m512d g2 = _mm512_castps_pd(group[2]), g3 = _mm512_castps_pd(group[3]);
    v16 low = v_add(_mm512_castpd_ps(_mm512_unpacklo_pd(g0, g1)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(g0, g1)));
    v16 high = v_add(_mm512_castpd_ps(_mm512_unpacklo_pd(g2, g3)),
                     _mm512_castpd_ps(_mm512_unpackhi_pd(g2, g3)));
    return v_add(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd));
}

/* Integers */
static inline u16v u_set1(uint32_t x) { return _mm512_set1_epi32((int)x); }
static inline u16v u_load(const uint32_t *p) { return _mm512_loadu_si512(p); }
static inline void u_store(uint32_t *p, u16v x) { _mm512_storeu_si512(p, x); }
static inline u16v u_add(u16v a, u16v b) { return _mm512_add_epi32(a, b); }
static inline u16v u_sub(u16v a, u16v b) { return _mm512_sub_epi32(a, b); }
static inline u16v u_xor(u16v a, u16v b) { return _mm512_xor_si512(a, b); }
static inline u16v u_and(u16v a, u16v b) { return _mm512_and_si512(a, b); }
static inline u16v u_max(u16v a, u16v b) { return _mm512_max_epu32(a, b); }
static inline uint32_t u_reduce_max(u16v a) { return _mm512_reduce_max_epu32(a); }
static inline u16v u_shl(u16v a, int bits) { return _mm512_slli_epi32(a, (unsigned)bits); }
static inline u16v u_shr(u16v a, int bits) { return _mm512_srli_epi32(a, (unsigned)bits); }
static inline u16v u_sar(u16v a, int bits) { return _mm512_srai_epi32(a, (unsigned)bits); }
static inline v16 v_from_int(u16v a) { return _mm512_cvtepi32_ps(a); }
static inline u16v u_truncate(v16 a) { return _mm512_cvttps_epi32(a); }
/* To the nearest, ties to even */
static inline u16v u_round(v16 a) { return _mm512_cvtps_epi32(a); }
static inline int32_t u_reduce_add(u16v a) { return _mm512_reduce_add_epi32(a); }

/* As int16, each four in the order 0, 2, 1, 3 */
static inline void u_store_quant(int16_t *p, u16v a)
{
    __m256i words = _mm512_cvtepi32_epi16(a);
    words = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i *)p, words);
}

static inline u16v u_bits(v16 a) { return _mm512_castps_si512(a); }
static inline v16 v_bits(u16v a) { return _mm512_castsi512_ps(a); }

/* Both halves of a 32 x 32 bit product */
static inline void u_mul_wide(u16v a, u16v b, u16v *high, u16v *low)
{
    u16v even = _mm512_mul_epu32(a, b);
    u16v odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
    *low = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
}

/* Transposes 4 x 4 within each 128 bits. */
static inline void u_transpose4(u16v w[4])
{
    u16v a = _mm512_unpacklo_epi32(w[0], w[1]), b = _mm512_unpackhi_epi32(w[0], w[1]);
    u16v c = _mm512_unpacklo_epi32(w[2], w[3]), d = _mm512_unpackhi_epi32(w[2], w[3]);
    w[0] = _mm512_unpacklo_epi64(a, c);
    w[1] = _mm512_unpackhi_epi64(a, c);
    w[2] = _mm512_unpacklo_epi64(b, d);
    w[3] = _mm512_unpackhi_epi64(b, d);
}

#endif
