/* SPDX-License-Identifier: MIT */
/* V_SAMPLE: the loops over the vocabulary that a path supplies. */
#ifndef VTPU_SAMPLE_H
#define VTPU_SAMPLE_H

#include "kernels.h"
#include "philox.h"
#include "vmath.h"

/* Temperature scaling of one row: value = (logit - max) * inverse. */
typedef struct SampleScale {
    float max;
    float inverse;                /* 1 / temperature */
} SampleScale;

typedef struct SampleNoise {
    uint64_t seed;
    uint32_t position;
} SampleNoise;

typedef struct SampleLoops {
    /* The greatest of x that are not NaN, -inf if there is none. */
    float (*max)(const float *x, uint32_t n, bool *has_nan);
    /* sum of exp(x - max) in 16 lanes, tree */
    float (*sum_exp)(const float *x, uint32_t n, float max);
    /* The least i in [from, n) with x[i] > threshold, or n. */
    uint32_t (*next_above)(const float *x, uint32_t from, uint32_t n, float threshold);
    /* w[i] = sample_weight(x[i]) */
    void (*weights)(uint32_t *w, const float *x, uint32_t n, SampleScale scale);
    /* The sum of w[i] where x[i] > threshold; n is at most 2^20 */
    uint64_t (*mass_above)(const uint32_t *w, const float *x, uint32_t n, float threshold);
    /* The least i with the greatest sample_value(x[i]) + sample_noise(i). */
    uint32_t (*noisy_argmax)(const float *x, uint32_t n, SampleScale scale, SampleNoise noise);
} SampleLoops;

/* Probability relative to the greatest one, in units of 2^-30. */
#define SAMPLE_WEIGHT_ONE 0x1p30f
/* -log(-log(u)) stays below this for every u that sample_uniform gives. */
#define SAMPLE_NOISE_MAX 16.7f

static inline float sample_value(float x, SampleScale scale)
{
    return (x - scale.max) * scale.inverse;
}

static inline uint32_t sample_weight(float x, SampleScale scale)
{
    return (uint32_t)(int32_t)(vtpu_exp(sample_value(x, scale)) * SAMPLE_WEIGHT_ONE);
}

/* In (0, 1), exact: an odd multiple of 2^-24. */
static inline float sample_uniform(uint32_t word)
{
    return ((float)(word >> 9) + 0.5f) * 0x1p-23f;
}

static inline float sample_noise(SampleNoise noise, uint32_t id)
{
    uint32_t counter[4] = { id >> 2, noise.position, 0, 0 };

    philox4x32(counter, noise.seed);
    return -vtpu_log(-vtpu_log(sample_uniform(counter[id & 3])));
}

size_t vtpu_sample_scratch_bytes(uint32_t vocab);
void vtpu_sample(const SampleLoops *loops, struct vtpu_sample_result *dst, const float *logits,
                 size_t logits_stride, const struct vtpu_sample_params *params, uint32_t vocab,
                 uint8_t *scratch, uint32_t begin, uint32_t end);

#endif
