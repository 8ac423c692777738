/* SPDX-License-Identifier: MIT */
/*
 * Times the kernels on the shapes of SmolLM2-135M and prints one JSON line a
 * figure. Threads split tile rows, rows or items evenly; weights are a whole
 * model's worth, so that they come from memory (or from a last-level cache
 * that holds them, as they would in use) and not from the private caches. The
 * read loop sums the same bytes with the same threads. On a busy machine look
 * at least_cpu_us: the processor time of the first thread in its best run.
 *
 *   bench_kernels [path [seconds a figure]]
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../kernels.h"

#define MAX_THREADS 2
#define LAYERS 30
#define HIDDEN 576
#define FFN 1536
#define HEADS 9
#define KV_HEADS 3
#define HEAD_DIM 64
#define VOCAB 49152
#define MAX_ROWS 512
#define CONTEXT 8192

static const struct {
    uint32_t n, k;
} layer_shapes[] = { { 960, HIDDEN }, { HIDDEN, HIDDEN }, { 2 * FFN, HIDDEN }, { HIDDEN, FFN } };
#define SHAPES 4

static const VtpuKernels *kernels;
static double budget = 0.5;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double cpu_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Memory of pseudo-random bytes that make finite f16 scales everywhere. */
static uint8_t *filled(size_t bytes)
{
    uint8_t *memory = aligned_alloc(2 << 20, (bytes + (2 << 20) - 1) & ~(((size_t)2 << 20) - 1));
    uint32_t state = 1;

    if (!memory) {
        perror("bench_kernels");
        exit(1);
    }
    for (size_t i = 0; i < bytes; i++) {
        state = state * 1664525u + 1013904223u;
        memory[i] = (uint8_t)(state >> 24) & 0xbf;
    }
    return memory;
}

static float *floats(size_t count)
{
    float *x = (float *)filled(count * sizeof(*x));

    for (size_t i = 0; i < count; i++) {
        x[i] = (float)((int)(i * 2654435761u >> 16 & 0xffff) - 32768) / 8192.0f;
    }
    return x;
}

typedef void (*Part)(void *arg, uint32_t thread, uint32_t threads);

typedef struct Worker {
    Part part;
    void *arg;
    uint32_t thread, threads;
} Worker;

static pthread_barrier_t start_line, finish_line;

static void *helper(void *opaque)
{
    Worker *worker = opaque;

    for (;;) {
        pthread_barrier_wait(&start_line);
        if (!worker->part) {
            return NULL;
        }
        worker->part(worker->arg, worker->thread, worker->threads);
        pthread_barrier_wait(&finish_line);
    }
}

static double least_cpu;         /* of the first thread, in the last timed() */

/* Median seconds of one run of part on all threads. */
static double timed(Part part, void *arg, uint32_t threads)
{
    static double runs[10000];
    Worker worker = { part, arg, 1, threads };
    pthread_t other;
    int count = 0;
    double begin = now();

    least_cpu = 1e9;
    if (threads > 1) {
        pthread_barrier_init(&start_line, NULL, threads);
        pthread_barrier_init(&finish_line, NULL, threads);
        pthread_create(&other, NULL, helper, &worker);
    }
    do {
        double t = now(), cpu = cpu_now();
        if (threads > 1) {
            pthread_barrier_wait(&start_line);
        }
        part(arg, 0, threads);
        cpu = cpu_now() - cpu;
        least_cpu = cpu < least_cpu ? cpu : least_cpu;
        if (threads > 1) {
            pthread_barrier_wait(&finish_line);
        }
        runs[count++] = now() - t;
    } while ((now() - begin < budget || count < 3) && count < 10000);
    if (threads > 1) {
        worker.part = NULL;
        pthread_barrier_wait(&start_line);
        pthread_join(other, NULL);
    }
    for (int i = 1; i < count; i++) {
        double value = runs[i];
        int j = i;
        for (; j > 0 && runs[j - 1] > value; j--) {
            runs[j] = runs[j - 1];
        }
        runs[j] = value;
    }
    return runs[count / 2];
}

static void report(const char *what, uint32_t threads, double seconds, const char *unit, double figure)
{
    printf("{\"what\": \"%s\", \"path\": \"%s\", \"threads\": %u, \"us\": %.2f, \"%s\": %.2f, "
           "\"least_cpu_us\": %.2f}\n",
           what, kernels->name, threads, seconds * 1e6, unit, figure, least_cpu * 1e6);
    fflush(stdout);
}

/* --- weights: every matrix of the model's layers, then the embedding */

typedef struct Model {
    uint8_t *layers, *embedding;
    size_t layers_bytes, embedding_bytes;
    uint8_t *quantised[2];        /* of HIDDEN and of FFN columns */
    float *x, *dst;
    uint32_t m;
    bool with_embedding, with_layers;
} Model;

static size_t matrix_bytes(uint32_t n, uint32_t k, uint32_t fmt)
{
    return (size_t)(n / 16) * (k / 32) * vtpu_tile_bytes(fmt);
}

static void multiply(const Model *model, const uint8_t *weight, uint32_t n, uint32_t k, uint32_t fmt,
                     uint32_t thread, uint32_t threads)
{
    VtpuMatmul op = {
        .dst = model->dst, .dst_stride = n * 4ul,
        .quantised = model->quantised[k == FFN], .weight = weight, .m = model->m,
        .n = n, .k = k, .fmt = fmt,
    };
    kernels->blocks.matmul(&op, n / 16 * thread / threads, n / 16 * (thread + 1) / threads);
}

static void multiply_model(void *arg, uint32_t thread, uint32_t threads)
{
    const Model *model = arg;
    const uint8_t *weight = model->layers;

    for (int layer = 0; layer < LAYERS && model->with_layers; layer++) {
        for (int i = 0; i < SHAPES; i++) {
            uint32_t n = layer_shapes[i].n, k = layer_shapes[i].k;
            multiply(model, weight, n, k, VTPU_FMT_Q4_1, thread, threads);
            weight += matrix_bytes(n, k, VTPU_FMT_Q4_1);
        }
    }
    if (model->with_embedding) {
        multiply(model, model->embedding, VOCAB, HIDDEN, VTPU_FMT_Q8_0, thread, threads);
    }
}

static volatile uint64_t sink;

static void read_bytes(const uint8_t *from, size_t bytes, uint32_t thread, uint32_t threads)
{
    typedef uint64_t words __attribute__((vector_size(64)));
    const words *p = (const words *)from;
    size_t count = bytes / 64, begin = count * thread / threads, end = count * (thread + 1) / threads;
    words sum[4] = { { 0 } };

    for (size_t i = begin; i + 4 <= end; i += 4) {
        for (int j = 0; j < 4; j++) {
            sum[j] += p[i + j];
        }
    }
    words all = sum[0] + sum[1] + sum[2] + sum[3];
    sink = all[0] ^ all[3] ^ all[7];
}

static void read_model(void *arg, uint32_t thread, uint32_t threads)
{
    const Model *model = arg;

    if (model->with_layers) {
        read_bytes(model->layers, model->layers_bytes, thread, threads);
    }
    if (model->with_embedding) {
        read_bytes(model->embedding, model->embedding_bytes, thread, threads);
    }
}

/* The layout of quantised rows may depend on their number. */
static void set_rows(Model *model, uint32_t m)
{
    model->m = m;
    for (int i = 0; i < 2; i++) {
        uint32_t k = i ? FFN : HIDDEN;
        kernels->blocks.quantise(model->quantised[i], model->x, k * 4, k, m, 0, m);
    }
}

static void bench_weights(Model *model)
{
    static const uint32_t rows[] = { 1, 2, 4, 8, 16, 32, 64, 512 };
    double macs = 0;

    for (int i = 0; i < SHAPES; i++) {
        macs += (double)layer_shapes[i].n * layer_shapes[i].k * LAYERS;
    }
    for (uint32_t threads = 1; threads <= MAX_THREADS; threads++) {
        char name[64];
        size_t bytes;

        double t;
        for (int i = 0; i < 3; i++) {
            model->with_layers = i != 1;
            model->with_embedding = i != 0;
            bytes = (i != 1 ? model->layers_bytes : 0) + (i != 0 ? model->embedding_bytes : 0);
            t = timed(read_model, model, threads);
            report(i == 0 ? "read loop, layers" : i == 1 ? "read loop, embedding"
                                                         : "read loop, all weights",
                   threads, t, "GB_per_s", (double)bytes / t / 1e9);
        }
        for (int i = 0; i < 8; i++) {
            bool few = rows[i] <= 16;
            set_rows(model, rows[i]);
            model->with_layers = true;
            model->with_embedding = false;
            t = timed(multiply_model, model, threads);
            snprintf(name, sizeof(name), "Q4_1 layers, m=%u", rows[i]);
            report(name, threads, t, few ? "GB_per_s" : "GMAC_per_s",
                   (few ? (double)model->layers_bytes : macs * rows[i]) / t / 1e9);
            if (!few) {
                continue;
            }
            model->with_layers = false;
            model->with_embedding = true;
            t = timed(multiply_model, model, threads);
            snprintf(name, sizeof(name), "Q8_0 embedding, m=%u", rows[i]);
            report(name, threads, t, "GB_per_s", (double)model->embedding_bytes / t / 1e9);
        }
    }
}

static void quantise_part(void *arg, uint32_t thread, uint32_t threads)
{
    const Model *model = arg;
    kernels->blocks.quantise(model->quantised[1], model->x, FFN * 4, FFN, model->m, model->m * thread / threads,
                      model->m * (thread + 1) / threads);
}

/* --- attention */

typedef struct Attention {
    VtpuAttn op;
    uint8_t *scratch[MAX_THREADS];
    uint32_t next;
} Attention;

static void attend_part(void *arg, uint32_t thread, uint32_t threads)
{
    Attention *attention = arg;
    uint32_t items = attention->op.rows * KV_HEADS;
    uint32_t step = items / (threads * 8) < 16 ? 16 : 16 * (items / (threads * 8) / 16);

    /* In turn, as the machine does; a few rows are cut one a thread. */
    for (;;) {
        step = items < 16 * threads ? (items + threads - 1) / threads : step;
        uint32_t begin = __atomic_fetch_add(&attention->next, step, __ATOMIC_RELAXED);
        if (begin >= items) {
            break;
        }
        kernels->attn(&attention->op, attention->scratch[thread], begin,
                      begin + step < items ? begin + step : items);
    }
}

static void attend_all(void *arg, uint32_t thread, uint32_t threads)
{
    Attention *attention = arg;

    attend_part(arg, thread, threads);
    if (threads == 1) {
        attention->next = 0;
    }
}

static void bench_attention(const float *q, float *dst, uint8_t *cache, size_t cache_bytes)
{
    static const struct {
        uint32_t rows, keys;
        bool prompt;
    } cases[] = { { 1, 128, false }, { 1, 512, false }, { 1, 8192, false }, { 8, 512, false },
                  { 512, 512, true } };
    static uint32_t info[MAX_ROWS][2], tables[8][CONTEXT / 16];

    for (uint32_t s = 0; s < 8; s++) {
        for (uint32_t b = 0; b < CONTEXT / 16; b++) {
            tables[s][b] = (s * (CONTEXT / 16) + b) % (CONTEXT / 16);
        }
    }
    for (int c = 0; c < 5; c++) {
        Attention attention = { .op = {
            .dst = dst, .q = q, .k_cache = cache, .v_cache = cache + cache_bytes / 2,
            .row_info = info[0], .block_tables = tables[0], .rows = cases[c].rows,
            .heads = HEADS, .kv_heads = KV_HEADS, .head_dim = HEAD_DIM, .block_size = 16,
            .max_blocks = CONTEXT / 16, .fmt = VTPU_FMT_F16, .scale = 0.125f,
        } };
        for (uint32_t r = 0; r < cases[c].rows; r++) {
            info[r][0] = cases[c].prompt ? r + 1 : cases[c].keys;
            info[r][1] = cases[c].prompt ? 0 : r;
        }
        char name[64];
        size_t bytes = (kernels->attn_scratch_bytes(&attention.op) + 63) & ~(size_t)63;
        attention.scratch[0] = aligned_alloc(64, bytes);
        double t = timed(attend_all, &attention, 1);
        snprintf(name, sizeof(name), "attention, %u rows, %u keys%s", cases[c].rows, cases[c].keys,
                 cases[c].prompt ? ", causal" : "");
        report(name, 1, t, "us_30_layers", t * 30e6);
        free(attention.scratch[0]);
    }
}

/* --- sampling and the rest */

typedef struct Sampling {
    const float *logits;
    struct vtpu_sample_params params;
    struct vtpu_sample_result result[2];
    uint8_t *scratch;
} Sampling;

static void sample_part(void *arg, uint32_t thread, uint32_t threads)
{
    Sampling *s = arg;
    (void)thread, (void)threads;
    kernels->sample(s->result, s->logits, VOCAB * 4, &s->params, VOCAB, s->scratch, 0, 1);
}

static void bench_sampling(float *logits)
{
    static const struct {
        const char *name;
        struct vtpu_sample_params params;
    } cases[] = {
        { "sample greedy", { .top_p = 1 } },
        { "sample greedy, 5 logprobs", { .top_p = 1, .num_logprobs = 5 } },
        { "sample T=1", { .temperature = 1, .top_p = 1, .seed = 1 } },
        { "sample T=1 top_k=50", { .temperature = 1, .top_p = 1, .top_k = 50, .seed = 1 } },
        { "sample T=1 top_p=0.9", { .temperature = 1, .top_p = 0.9f, .seed = 1 } },
        { "sample T=1 top_k=1000 top_p=0.9",
          { .temperature = 1, .top_k = 1000, .top_p = 0.9f, .seed = 1 } },
    };
    Sampling sampling = { .logits = logits, .scratch = filled(kernels->sample_scratch_bytes(VOCAB)) };
    uint32_t state = 7;

    /* About normal, standard deviation 3, as logits of a language model are. */
    for (uint32_t i = 0; i < VOCAB; i++) {
        float sum = 0;
        for (int j = 0; j < 12; j++) {
            state = state * 1664525u + 1013904223u;
            sum += (float)(state >> 8) * 0x1p-24f;
        }
        logits[i] = (sum - 6) * 3;
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        sampling.params = cases[i].params;
        double t = timed(sample_part, &sampling, 1);
        report(cases[i].name, 1, t, "Mlogits_per_s", VOCAB / t / 1e6);
    }
    free(sampling.scratch);
}

static void silu_part(void *arg, uint32_t thread, uint32_t threads)
{
    const Model *model = arg;
    (void)thread, (void)threads;
    kernels->silu_mul(model->dst, FFN * 4, model->x, FFN * 8, model->x + FFN, FFN * 8, FFN, 0,
                      model->m);
}

static void rmsnorm_part(void *arg, uint32_t thread, uint32_t threads)
{
    const Model *model = arg;
    (void)thread, (void)threads;
    kernels->rmsnorm(model->dst, HIDDEN * 4, model->x, HIDDEN * 4, model->x, HIDDEN, 1e-5f, 0,
                     model->m);
}

int main(int argc, char **argv)
{
    kernels = vtpu_kernels_get(argc > 1 ? argv[1] : NULL);
    budget = argc > 2 ? atof(argv[2]) : budget;
    if (!kernels) {
        fprintf(stderr, "bench_kernels: this host lacks path %s\n", argv[1]);
        return 1;
    }
    Model model = { .m = 1 };
    for (int i = 0; i < SHAPES; i++) {
        model.layers_bytes += LAYERS * matrix_bytes(layer_shapes[i].n, layer_shapes[i].k, VTPU_FMT_Q4_1);
    }
    model.embedding_bytes = matrix_bytes(VOCAB, HIDDEN, VTPU_FMT_Q8_0);
    model.layers = filled(model.layers_bytes);
    model.embedding = filled(model.embedding_bytes);
    model.x = floats((size_t)2 * FFN * MAX_ROWS);
    model.dst = floats((size_t)2 * FFN * MAX_ROWS);
    for (int i = 0; i < 2; i++) {
        model.quantised[i] = filled(kernels->blocks.quantise_bytes(i ? FFN : HIDDEN, MAX_ROWS));
    }
    bench_weights(&model);
    for (model.m = 1; model.m <= MAX_ROWS; model.m *= MAX_ROWS) {
        char name[64];
        double t = timed(quantise_part, &model, 1);
        snprintf(name, sizeof(name), "quantise, m=%u k=1536", model.m);
        report(name, 1, t, "Melements_per_s", model.m * FFN / t / 1e6);
        t = timed(silu_part, &model, 1);
        snprintf(name, sizeof(name), "silu_mul, m=%u width=1536", model.m);
        report(name, 1, t, "Melements_per_s", model.m * FFN / t / 1e6);
        t = timed(rmsnorm_part, &model, 1);
        snprintf(name, sizeof(name), "rmsnorm, m=%u width=576", model.m);
        report(name, 1, t, "Melements_per_s", model.m * HIDDEN / t / 1e6);
    }
    size_t cache_bytes = (size_t)CONTEXT * KV_HEADS * HEAD_DIM * 2 * 2;
    bench_attention(model.x, model.dst, filled(cache_bytes), cache_bytes);
    bench_sampling(floats(VOCAB));
    return 0;
}
