/* SPDX-License-Identifier: MIT */
/*
 * The vocabulary loops of V_SAMPLE in sixteen lanes. A path includes its
 * lanes_*.h first; kernels_scalar.c has the definitions.
 */
#ifndef VTPU_SAMPLE_SIMD_H
#define VTPU_SAMPLE_SIMD_H

#include "lanes_math.h"
#include "sample.h"

/* x[i..i+16), with -inf past the end */
static inline v16 load_logits(const float *x, uint32_t i, uint32_t n)
{
    v16 none = v_set1(-INFINITY);
    if (i + 16 <= n) {
        return v_load(x + i);
    }
    return i < n ? v_load_n(x + i, n - i, none) : none;
}

static float simd_max(const float *x, uint32_t n, bool *has_nan)
{
    v16 most = v_set1(-INFINITY);
    uint32_t nan = 0;

    for (uint32_t i = 0; i < n; i += 16) {
        v16 part = load_logits(x, i, n);
        nan |= v_mask_nan(part);
        most = v_max(part, most);
    }
    *has_nan = nan != 0;
    return v_reduce_max(most);
}

static float simd_sum_exp(const float *x, uint32_t n, float max)
{
    v16 sum = v_zero();

    for (uint32_t i = 0; i < n; i += 16) {
        sum = v_add(sum, v_exp(v_sub(load_logits(x, i, n), v_set1(max))));
    }
    return v_tree(sum);
}

static uint32_t simd_next_above(const float *x, uint32_t from, uint32_t n, float threshold)
{
    v16 limit = v_set1(threshold);

    for (uint32_t i = from; i < n; i += 16) {
        uint32_t mask = v_mask_above(load_logits(x, i, n), limit);
        if (mask) {
            return i + (uint32_t)__builtin_ctz(mask);
        }
    }
    return n;
}

static inline v16 scaled(v16 x, SampleScale scale)
{
    return v_mul(v_sub(x, v_set1(scale.max)), v_set1(scale.inverse));
}

static void simd_weights(uint32_t *w, const float *x, uint32_t n, SampleScale scale)
{
    uint32_t i = 0;

    for (; i + 16 <= n; i += 16) {
        v16 p = v_exp(scaled(v_load(x + i), scale));
        u_store(w + i, u_truncate(v_mul(p, v_set1(SAMPLE_WEIGHT_ONE))));
    }
    for (; i < n; i++) {
        w[i] = sample_weight(x[i], scale);
    }
}

static uint64_t simd_mass_above(const uint32_t *w, const float *x, uint32_t n, float threshold)
{
    v16 limit = v_set1(threshold);
    u16v low = u_set1(0), high = low;
    uint32_t parts[2][16], i = 0;
    uint64_t mass = 0;

    /* Weights have 31 bits: in two halves of 15 and 16, 2^16 of them fit a lane. */
    for (; i + 16 <= n; i += 16) {
        u16v part = u_bits(v_select_above(v_load(x + i), limit, v_bits(u_load(w + i)), v_zero()));
        low = u_add(low, u_and(part, u_set1(0x7fff)));
        high = u_add(high, u_shr(part, 15));
    }
    u_store(parts[0], low);
    u_store(parts[1], high);
    for (uint32_t lane = 0; lane < 16; lane++) {
        mass += parts[0][lane] + ((uint64_t)parts[1][lane] << 15);
    }
    for (; i < n; i++) {
        mass += x[i] > threshold ? w[i] : 0;
    }
    return mass;
}

/*
 * The noise of ids [first, first + 64). Lane 4 l + e works on the counter
 * block of ids first + 4 (4 e + l): after the transposition within 128 bits
 * the ids are in order.
 */
static inline void noise64(v16 noise[4], uint32_t first, SampleNoise source)
{
    static const uint32_t lane[16] = { 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15 };
    uint32_t k0 = (uint32_t)source.seed, k1 = (uint32_t)(source.seed >> 32);
    u16v c[4] = { u_add(u_load(lane), u_set1(first >> 2)), u_set1(source.position), u_set1(0),
                  u_set1(0) };

    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        u16v high0, low0, high1, low1;
        u_mul_wide(c[0], u_set1(PHILOX_M0), &high0, &low0);
        u_mul_wide(c[2], u_set1(PHILOX_M1), &high1, &low1);
        c[0] = u_xor(u_xor(high1, c[1]), u_set1(k0));
        c[1] = low1;
        c[2] = u_xor(u_xor(high0, c[3]), u_set1(k1));
        c[3] = low0;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    u_transpose4(c);
    v16 minus = v_set1(-0.0f);
    for (int i = 0; i < 4; i++) {
        v16 u = v_mul(v_add(v_from_int(u_shr(c[i], 9)), v_set1(0.5f)), v_set1(0x1p-23f));
        noise[i] = v_sub(minus, v_log(v_sub(minus, v_log(u))));
    }
}

static uint32_t simd_noisy_argmax(const float *x, uint32_t n, SampleScale scale, SampleNoise source)
{
    /* Start from the likeliest id: most others then cannot win with any noise. */
    uint32_t token = simd_next_above(x, 0, n, nextafterf(scale.max, -INFINITY));
    float best = sample_value(x[token], scale) + sample_noise(source, token);

    for (uint32_t first = 0; first < n; first += 64) {
        v16 value[4], noise[4];
        v16 most = v_set1(-INFINITY);

        for (uint32_t i = 0; i < 4; i++) {
            value[i] = scaled(load_logits(x, first + 16 * i, n), scale);
            most = v_max(value[i], most);
        }
        if (!v_mask_above(v_add(most, v_set1(SAMPLE_NOISE_MAX)), v_set1(best))) {
            continue;
        }
        noise64(noise, first, source);
        for (uint32_t i = 0; i < 4; i++) {
            float total[16];
            v16 sum = v_add(value[i], noise[i]);
            /* Equals count too: the least id wins. */
            uint32_t mask = v_mask_above(sum, v_set1(nextafterf(best, -INFINITY)));

            v_store(total, sum);
            for (; mask; mask &= mask - 1) {
                uint32_t lane = (uint32_t)__builtin_ctz(mask);
                uint32_t id = first + 16 * i + lane;
                if (total[lane] > best || (total[lane] == best && id < token)) {
                    best = total[lane];
                    token = id;
                }
            }
        }
    }
    return token;
}

static void simd_sample(struct vtpu_sample_result *dst, const float *logits, size_t logits_stride,
                        const struct vtpu_sample_params *params, uint32_t vocab,
                        uint8_t *scratch, uint32_t begin, uint32_t end)
{
    static const SampleLoops loops = {
        .max = simd_max,
        .sum_exp = simd_sum_exp,
        .next_above = simd_next_above,
        .weights = simd_weights,
        .mass_above = simd_mass_above,
        .noisy_argmax = simd_noisy_argmax,
    };
    vtpu_sample(&loops, dst, logits, logits_stride, params, vocab, scratch, begin, end);
}

#endif
