/* SPDX-License-Identifier: MIT */
/*
 * V_SAMPLE, all but the loops over the whole vocabulary (sample.h).
 *
 * Candidates rank by (logit descending, id ascending). Top-k keeps a prefix of
 * k candidates, top-p the shortest prefix whose share of the weight reaches p:
 * both are the shortest prefix that reaches a target weight, with integer
 * weights, so that sums have no order and nothing is sorted. A token is drawn
 * with the Gumbel-max trick: the argmax of value + Gumbel noise is distributed
 * as the softmax of the values, and the noise of an id depends on the seed,
 * the position and the id alone.
 */
#include <math.h>
#include <string.h>

#include "kernels_internal.h"
#include "sample.h"

#define MAX_LOGPROBS 20
/* Up to here top-k keeps a sorted list; above, it selects by radix. */
#define MAX_LIST 64
/* Up to here the noise is computed id by id. */
#define FEW_KEPT 64

/* A candidate. A smaller key ranks first. */
typedef struct Candidate {
    uint64_t key;
    uint64_t weight;
} Candidate;

typedef struct Row {
    const SampleLoops *loops;
    const float *x;
    uint32_t vocab;
    const struct vtpu_sample_params *params;
    SampleScale scale;
    Candidate *candidates;        /* room for vocab */
    uint32_t *weights;            /* room for vocab */
} Row;

static uint64_t rank_key(float x, uint32_t id)
{
    uint32_t bits = vtpu_f32_bits(x + 0.0f);      /* -0 ranks as 0 */
    uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return ((uint64_t)~ascending << 32) | id;
}

static uint32_t key_id(uint64_t key)
{
    return (uint32_t)key;
}

/* The ids that rank first, in order. */
static void top_list(const Row *row, uint64_t *list, uint32_t count)
{
    uint32_t have = 0;
    uint32_t id = 0;

    while (id < row->vocab) {
        uint64_t key = rank_key(row->x[id], id);
        uint32_t at = have < count ? have++ : count - 1;

        for (; at > 0 && list[at - 1] > key; at--) {
            list[at] = list[at - 1];
        }
        list[at] = key;
        id = have < count ? id + 1
                          : row->loops->next_above(row->x, id + 1, row->vocab,
                                                   row->x[key_id(list[count - 1])]);
    }
}

/*
 * Moves the shortest prefix in rank order whose weight reaches target (1 up to
 * the total weight) to the front and returns its length. Radix selection, a
 * byte of the key at a time: linear whatever the data.
 */
static uint32_t select_prefix(Candidate *candidates, uint32_t count, uint64_t target)
{
    uint32_t low = 0;
    uint32_t high = count;

    for (int shift = 56; shift >= 0 && high - low > 1; shift -= 8) {
        uint64_t weight[256] = { 0 };
        for (uint32_t i = low; i < high; i++) {
            weight[(candidates[i].key >> shift) & 255] += candidates[i].weight;
        }
        uint32_t digit = 0;
        while (weight[digit] < target) {
            target -= weight[digit++];
        }
        uint32_t equal = low;
        uint32_t end = low;
        for (uint32_t i = low; i < high; i++) {
            Candidate candidate = candidates[i];
            uint32_t its = (candidate.key >> shift) & 255;
            if (its > digit) {
                continue;
            }
            candidates[i] = candidates[end];
            candidates[end] = candidate;
            if (its < digit) {
                candidates[end] = candidates[equal];
                candidates[equal++] = candidate;
            }
            end++;
        }
        low = equal;
        high = end;
    }
    return low + 1;
}

static uint32_t keep_top_k(const Row *row, uint32_t k)
{
    if (k <= MAX_LIST) {
        uint64_t list[MAX_LIST];
        top_list(row, list, k);
        for (uint32_t i = 0; i < k; i++) {
            row->candidates[i].key = list[i];
        }
        return k;
    }
    for (uint32_t id = 0; id < row->vocab; id++) {
        row->candidates[id] = (Candidate){ rank_key(row->x[id], id), 1 };
    }
    return select_prefix(row->candidates, row->vocab, k);
}

/* The weight that top-p must reach, of a total. */
static uint64_t top_p_target(const Row *row, uint64_t total)
{
    uint64_t target = (uint64_t)ceil((double)row->params->top_p * (double)total);
    return target < 1 ? 1 : target > total ? total : target;
}

/* Top-p of what top-k kept */
static uint32_t keep_top_p_of(const Row *row, uint32_t count)
{
    uint64_t total = 0;

    for (uint32_t i = 0; i < count; i++) {
        Candidate *candidate = &row->candidates[i];
        candidate->weight = sample_weight(row->x[key_id(candidate->key)], row->scale);
        total += candidate->weight;
    }
    return select_prefix(row->candidates, count, top_p_target(row, total));
}

/*
 * Top-p of all. The ids above any limit are a prefix in rank order: a limit
 * above which there is enough weight leaves few candidates.
 */
static uint32_t keep_top_p(const Row *row)
{
    static const float depths[] = { 1, 2, 4, 6, 8, 12 };
    const SampleLoops *loops = row->loops;
    float limit = -INFINITY;
    uint32_t count = 0;

    loops->weights(row->weights, row->x, row->vocab, row->scale);
    uint64_t target =
        top_p_target(row, loops->mass_above(row->weights, row->x, row->vocab, limit));
    for (size_t i = 0; i < sizeof(depths) / sizeof(depths[0]); i++) {
        float deeper = row->scale.max - depths[i] * row->params->temperature;
        if (loops->mass_above(row->weights, row->x, row->vocab, deeper) >= target) {
            limit = deeper;
            break;
        }
    }
    for (uint32_t id = 0;; id++) {
        id = loops->next_above(row->x, id, row->vocab, limit);
        if (id == row->vocab) {
            return select_prefix(row->candidates, count, target);
        }
        row->candidates[count++] = (Candidate){ rank_key(row->x[id], id), row->weights[id] };
    }
}

static uint32_t draw_among(const Row *row, uint32_t count, SampleNoise noise)
{
    if (count > FEW_KEPT) {
        float *x = (float *)row->weights;
        for (uint32_t id = 0; id < row->vocab; id++) {
            x[id] = -INFINITY;
        }
        for (uint32_t i = 0; i < count; i++) {
            uint32_t id = key_id(row->candidates[i].key);
            x[id] = row->x[id];
        }
        return row->loops->noisy_argmax(x, row->vocab, row->scale, noise);
    }
    float best = -INFINITY;
    uint32_t token = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t id = key_id(row->candidates[i].key);
        float value = sample_value(row->x[id], row->scale) + sample_noise(noise, id);
        if (value > best || (value == best && id < token)) {
            best = value;
            token = id;
        }
    }
    return token;
}

static uint32_t draw(Row *row)
{
    const struct vtpu_sample_params *params = row->params;
    SampleNoise noise = { params->seed, params->position };
    bool top_k = params->top_k > 0 && params->top_k < row->vocab;
    bool top_p = params->top_p < 1.0f;

    row->scale.inverse = 1.0f / params->temperature;
    if (!top_k && !top_p) {
        return row->loops->noisy_argmax(row->x, row->vocab, row->scale, noise);
    }
    uint32_t count = top_k ? keep_top_k(row, params->top_k) : keep_top_p(row);
    if (top_k && top_p) {
        count = keep_top_p_of(row, count);
    }
    return draw_among(row, count, noise);
}

static void sample_row(Row *row, struct vtpu_sample_result *result)
{
    bool has_nan;
    float max = row->loops->max(row->x, row->vocab, &has_nan);
    uint32_t token = row->loops->next_above(row->x, 0, row->vocab, nextafterf(max, -INFINITY));

    memset(result, 0, VTPU_SAMPLE_RESULT_BYTES);
    result->token = token < row->vocab ? token : 0;
    if (has_nan || fabsf(max) == INFINITY) {
        result->logprob = vtpu_nan();
        return;
    }
    float log_sum = vtpu_log(row->loops->sum_exp(row->x, row->vocab, max));
    row->scale.max = max;
    if (row->params->temperature != 0.0f) {
        result->token = draw(row);
    }
    result->logprob = (row->x[result->token] - max) - log_sum;

    uint32_t count = row->params->num_logprobs;
    count = count < MAX_LOGPROBS ? count : MAX_LOGPROBS;
    count = count < row->vocab ? count : row->vocab;
    result->num_logprobs = count;
    if (count) {
        uint64_t list[MAX_LOGPROBS];
        top_list(row, list, count);
        for (uint32_t i = 0; i < count; i++) {
            result->ids[i] = key_id(list[i]);
            result->logprobs[i] = (row->x[key_id(list[i])] - max) - log_sum;
        }
    }
}

static size_t candidate_bytes(uint32_t vocab)
{
    return (vocab * sizeof(Candidate) + 63) & ~(size_t)63;
}

size_t vtpu_sample_scratch_bytes(uint32_t vocab)
{
    return candidate_bytes(vocab) + ((vocab * sizeof(uint32_t) + 63) & ~(size_t)63);
}

void vtpu_sample(const SampleLoops *loops, struct vtpu_sample_result *dst, const float *logits,
                 size_t logits_stride, const struct vtpu_sample_params *params, uint32_t vocab,
                 uint8_t *scratch, uint32_t begin, uint32_t end)
{
    for (uint32_t i = begin; i < end; i++) {
        Row row = {
            .loops = loops,
            .x = const_row_at(logits, logits_stride, i),
            .vocab = vocab,
            .params = (const struct vtpu_sample_params *)
                ((const uint8_t *)params + (size_t)i * VTPU_SAMPLE_PARAMS_BYTES),
            .candidates = (Candidate *)scratch,
            .weights = (uint32_t *)(scratch + candidate_bytes(vocab)),
        };
        sample_row(&row, (struct vtpu_sample_result *)
                             ((uint8_t *)dst + (size_t)i * VTPU_SAMPLE_RESULT_BYTES));
    }
}
