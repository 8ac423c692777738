/* SPDX-License-Identifier: MIT */
/* Sixteen f32 lanes in two AVX2 registers; lanes_avx512.h has the same names. */
#ifndef VTPU_LANES_H
#define VTPU_LANES_H

#include <immintrin.h>

#include "convert.h"
#include "vmath.h"

typedef struct v16 {
    __m256 lo, hi;
} v16;

typedef struct u16v {             /* sixteen 32-bit integers */
    __m256i lo, hi;
} u16v;

#define V1(f, a) ((v16){ f((a).lo), f((a).hi) })
#define V2(f, a, b) ((v16){ f((a).lo, (b).lo), f((a).hi, (b).hi) })
#define V3(f, a, b, c) ((v16){ f((a).lo, (b).lo, (c).lo), f((a).hi, (b).hi, (c).hi) })
#define U2(f, a, b) ((u16v){ f((a).lo, (b).lo), f((a).hi, (b).hi) })

static inline v16 v_set1(float x) { return (v16){ _mm256_set1_ps(x), _mm256_set1_ps(x) }; }
static inline v16 v_zero(void) { return v_set1(0.0f); }
static inline v16 v_load(const float *p) { return (v16){ _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) }; }
static inline v16 v_add(v16 a, v16 b) { return V2(_mm256_add_ps, a, b); }
static inline v16 v_sub(v16 a, v16 b) { return V2(_mm256_sub_ps, a, b); }
static inline v16 v_mul(v16 a, v16 b) { return V2(_mm256_mul_ps, a, b); }
static inline v16 v_div(v16 a, v16 b) { return V2(_mm256_div_ps, a, b); }
static inline v16 v_fma(v16 a, v16 b, v16 c) { return V3(_mm256_fmadd_ps, a, b, c); }
/* a > b ? a : b, so b where either is NaN */
static inline v16 v_max(v16 a, v16 b) { return V2(_mm256_max_ps, a, b); }
static inline v16 v_min(v16 a, v16 b) { return V2(_mm256_min_ps, a, b); }

static inline __m256 abs8(__m256 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline v16 v_abs(v16 a) { return V1(abs8, a); }

static inline float v_reduce_max(v16 a)
{
    __m256 eight = _mm256_max_ps(a.lo, a.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static inline void v_store(float *p, v16 x)
{
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}

/* All ones in the lanes below n. */
static inline u16v lanes_below(uint32_t n)
{
    __m256i count = _mm256_set1_epi32((int)n);
    __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (u16v){ _mm256_cmpgt_epi32(count, index),
                   _mm256_cmpgt_epi32(count, _mm256_add_epi32(index, _mm256_set1_epi32(8))) };
}

/* The first n lanes (n <= 16) of x, the others of y. */
static inline v16 v_first_n(uint32_t n, v16 x, v16 y)
{
    u16v mask = lanes_below(n);
    return (v16){ _mm256_blendv_ps(y.lo, x.lo, _mm256_castsi256_ps(mask.lo)),
                  _mm256_blendv_ps(y.hi, x.hi, _mm256_castsi256_ps(mask.hi)) };
}

/* The first n lanes (n < 16) from memory, the others as given. */
static inline v16 v_load_n(const float *p, uint32_t n, v16 others)
{
    u16v mask = lanes_below(n);
    v16 x = { _mm256_maskload_ps(p, mask.lo), _mm256_maskload_ps(p + 8, mask.hi) };
    return v_first_n(n, x, others);
}

static inline void v_store_n(float *p, uint32_t n, v16 x)
{
    u16v mask = lanes_below(n);
    _mm256_maskstore_ps(p, mask.lo, x.lo);
    _mm256_maskstore_ps(p + 8, mask.hi, x.hi);
}

static inline uint32_t mask_bits(__m256 lo, __m256 hi)
{
    return (uint32_t)_mm256_movemask_ps(lo) | (uint32_t)_mm256_movemask_ps(hi) << 8;
}

static inline uint32_t v_mask_above(v16 a, v16 b)
{
    return mask_bits(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
}

static inline uint32_t v_mask_nan(v16 a)
{
    return mask_bits(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q),
                     _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q));
}

static inline v16 v_load_f16(const uint8_t *p)
{
    return (v16){ _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                  _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1)) };
}

static inline __m256 load8_bf16(const uint8_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline v16 v_load_bf16(const uint8_t *p)
{
    return (v16){ load8_bf16(p), load8_bf16(p + 16) };
}

/* The low halves of eight 32-bit lanes, those where x is NaN replaced. */
static inline void store8_half(uint8_t *p, __m256i half, __m256 x, uint32_t nan)
{
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    half = _mm256_blendv_epi8(half, _mm256_set1_epi32((int)nan), is_nan);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(half),
                                                    _mm256_extracti128_si256(half, 1)));
}

static inline void store8_f16(uint8_t *p, __m256 x)
{
    __m256 bounded = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-VTPU_F16_MAX)),
                                   _mm256_set1_ps(VTPU_F16_MAX));
    __m128i half = _mm256_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    store8_half(p, _mm256_cvtepu16_epi32(half), x, VTPU_F16_NAN);
}

static inline void store8_bf16(uint8_t *p, __m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    store8_half(p, _mm256_srli_epi32(sum, 16), x, VTPU_BF16_NAN);
}

static inline void v_store_f16(uint8_t *p, v16 x)
{
    store8_f16(p, x.lo);
    store8_f16(p + 16, x.hi);
}

static inline void v_store_bf16(uint8_t *p, v16 x)
{
    store8_bf16(p, x.lo);
    store8_bf16(p + 16, x.hi);
}

/* (a[0], b[0], a[1], b[1], ..) of eight each */
static inline v16 v_interleave8(const float *a, const float *b)
{
    __m256 x = _mm256_loadu_ps(a), y = _mm256_loadu_ps(b);
    __m256 low = _mm256_unpacklo_ps(x, y), high = _mm256_unpackhi_ps(x, y);
    return (v16){ _mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31) };
}

static inline v16 v_swap_pairs(v16 x)
{
    return (v16){ _mm256_permute_ps(x.lo, 0xb1), _mm256_permute_ps(x.hi, 0xb1) };
}

static inline v16 v_even_twice(v16 x) { return V1(_mm256_moveldup_ps, x); }
static inline v16 v_odd_twice(v16 x) { return V1(_mm256_movehdup_ps, x); }
/* a * b - c in even lanes, a * b + c in odd ones */
static inline v16 v_fma_sub_add(v16 a, v16 b, v16 c) { return V3(_mm256_fmaddsub_ps, a, b, c); }

static inline __m256 round8(__m256 x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline v16 v_round(v16 x) { return V1(round8, x); }

/* The first factor scales exactly, so that the second rounds at most once. */
static inline __m256 scale8(__m256 y, __m256 n)
{
    __m256i whole = _mm256_cvtps_epi32(n);
    __m256i half = _mm256_srai_epi32(whole, 1);
    __m256i rest = _mm256_sub_epi32(whole, half);
    __m256i bias = _mm256_set1_epi32(127);
    y = _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}

/* y * 2^n, rounded once */
static inline v16 v_scale2(v16 y, v16 n) { return V2(scale8, y, n); }

static inline __m256 select8_above(__m256 x, __m256 limit, __m256 then, __m256 otherwise)
{
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(x, limit, _CMP_GT_OQ));
}

static inline v16 v_select_above(v16 x, v16 limit, v16 then, v16 otherwise)
{
    return (v16){ select8_above(x.lo, limit.lo, then.lo, otherwise.lo),
                  select8_above(x.hi, limit.hi, then.hi, otherwise.hi) };
}

/* The tree of docs/numerics.md over the lanes of one vector. */
static inline float v_tree(v16 x)
{
    __m256 eight = _mm256_add_ps(x.lo, x.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline __m256 trees8(const v16 a[8])
{
    __m256 group[4];

    for (int t = 0; t < 4; t++) {
        __m256 x = _mm256_add_ps(a[t].lo, a[t].hi);
        __m256 y = _mm256_add_ps(a[4 + t].lo, a[4 + t].hi);
        group[t] = _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20),
                                 _mm256_permute2f128_ps(x, y, 0x31));
    }
    __m256d g0 = _mm256_castps_pd(group[0]), g1 = _mm256_castps_pd(group[1]);
    __m256d g2 = _mm256_castps_pd(group[2]), g3 = _mm256_castps_pd(group[3]);
    __m256 low = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(g0, g1)),
                               _mm256_castpd_ps(_mm256_unpackhi_pd(g0, g1)));
    __m256 high = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(g2, g3)),
                                _mm256_castpd_ps(_mm256_unpackhi_pd(g2, g3)));
    return _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd));
}

/* Lane j = the tree over a[j]: at each level two vectors share an addition. */
static inline v16 v_trees(const v16 a[16])
{
    return (v16){ trees8(a), trees8(a + 8) };
}

/* Integers */
static inline u16v u_set1(uint32_t x)
{
    return (u16v){ _mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x) };
}

static inline u16v u_load(const uint32_t *p)
{
    return (u16v){ _mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8)) };
}

static inline void u_store(uint32_t *p, u16v x)
{
    _mm256_storeu_si256((__m256i *)p, x.lo);
    _mm256_storeu_si256((__m256i *)(p + 8), x.hi);
}

static inline u16v u_add(u16v a, u16v b) { return U2(_mm256_add_epi32, a, b); }
static inline u16v u_sub(u16v a, u16v b) { return U2(_mm256_sub_epi32, a, b); }
static inline u16v u_xor(u16v a, u16v b) { return U2(_mm256_xor_si256, a, b); }
static inline u16v u_and(u16v a, u16v b) { return U2(_mm256_and_si256, a, b); }

static inline u16v u_max(u16v a, u16v b) { return U2(_mm256_max_epu32, a, b); }

static inline uint32_t u_reduce_max(u16v a)
{
    __m256i eight = _mm256_max_epu32(a.lo, a.hi);
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1)));
}

static inline u16v u_shl(u16v a, int bits)
{
    return (u16v){ _mm256_slli_epi32(a.lo, bits), _mm256_slli_epi32(a.hi, bits) };
}

static inline u16v u_shr(u16v a, int bits)
{
    return (u16v){ _mm256_srli_epi32(a.lo, bits), _mm256_srli_epi32(a.hi, bits) };
}

static inline u16v u_sar(u16v a, int bits)
{
    return (u16v){ _mm256_srai_epi32(a.lo, bits), _mm256_srai_epi32(a.hi, bits) };
}

static inline v16 v_from_int(u16v a) { return V1(_mm256_cvtepi32_ps, a); }
static inline v16 v_bits(u16v a) { return V1(_mm256_castsi256_ps, a); }

static inline u16v u_truncate(v16 a)
{
    return (u16v){ _mm256_cvttps_epi32(a.lo), _mm256_cvttps_epi32(a.hi) };
}

/* To the nearest, ties to even */
static inline u16v u_round(v16 a)
{
    return (u16v){ _mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi) };
}

static inline int32_t u_reduce_add(u16v a)
{
    __m256i eight = _mm256_add_epi32(a.lo, a.hi);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

/* As int16, each four in the order 0, 2, 1, 3 */
static inline void u_store_quant(int16_t *p, u16v a)
{
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
    words = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i *)p, words);
}

static inline u16v u_bits(v16 a)
{
    return (u16v){ _mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi) };
}

static inline void mul8_wide(__m256i a, __m256i b, __m256i *high, __m256i *low)
{
    __m256i even = _mm256_mul_epu32(a, b);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}

/* Both halves of a 32 x 32 bit product */
static inline void u_mul_wide(u16v a, u16v b, u16v *high, u16v *low)
{
    mul8_wide(a.lo, b.lo, &high->lo, &low->lo);
    mul8_wide(a.hi, b.hi, &high->hi, &low->hi);
}

/* Transposes 4 x 4 within each 128 bits. */
static inline void u_transpose4(u16v w[4])
{
    u16v a = U2(_mm256_unpacklo_epi32, w[0], w[1]), b = U2(_mm256_unpackhi_epi32, w[0], w[1]);
    u16v c = U2(_mm256_unpacklo_epi32, w[2], w[3]), d = U2(_mm256_unpackhi_epi32, w[2], w[3]);
    w[0] = U2(_mm256_unpacklo_epi64, a, c);
    w[1] = U2(_mm256_unpackhi_epi64, a, c);
    w[2] = U2(_mm256_unpacklo_epi64, b, d);
    w[3] = U2(_mm256_unpackhi_epi64, b, d);
}

#endif
