/* SPDX-License-Identifier: MIT */
/*
 * The machine against what the host can do: each round measures, in turn, a program
 * or a command through ring and doorbell and a plain loop that does only the part
 * that limits it, on as many threads. Prints one JSON object a round; bench/device.py
 * takes the medians. Figures are of the time on the wall; `_cpu_` ones of processor
 * time by the number of threads, in which others of a busy host have no share.
 *
 *   bench_device ROUNDS THREADS [CHIP]
 *
 * CHIP: the machine's timing model.
 */
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "../kernels.h"
#include "../vtpu_core.h"
#include "peaks.h"

/* HBM: page tables, program, activations, weights, two buffers to copy between. */
#define MIB (1ull << 20)
#define HBM_BYTES (512 * MIB)
#define ROOT_AT 0ull
#define PROGRAM_AT (1 * MIB)
#define SRC_AT (2 * MIB)
#define WEIGHT_AT (8 * MIB)
#define COPY_BYTES (32 * MIB)
#define COPY_TO_AT (HBM_BYTES - COPY_BYTES)
#define COPY_FROM_AT (COPY_TO_AT - COPY_BYTES)
#define DST_AT (8 * MIB) /* in VMEM */

/*
 * Products: `count` instructions on as many matrices, or again and again on the first
 * `matrices`. N by K are SmolLM2-135M's gate and up projections: 60 of them come from
 * memory, while a matrix of 1 MiB stays in second-level caches. Each format's weights
 * have a place of their own.
 */
#define N 3072u
#define K 576u

typedef struct Product {
    const char *name;
    uint32_t fmt, m, n, k, matrices, count;
    uint32_t per_weight; /* products of bytes (or of bf16) */
} Product;

static const Product products[] = {
    { "batch1_q4", VTPU_FMT_Q4_1, 1, N, K, 60, 60, 2 },
    { "batch16_q4", VTPU_FMT_Q4_1, 16, N, K, 60, 60, 2 },
    { "prefill_q4", VTPU_FMT_Q4_1, 512, N, K, 4, 4, 2 },
    { "batch1_int8", VTPU_FMT_I8, 1, N, K, 60, 60, 1 },
    { "batch16_int8_memory", VTPU_FMT_I8, 16, N, K, 60, 60, 1 },
    { "batch16_int8", VTPU_FMT_I8, 16, 1024, 1024, 1, 200, 1 },
    { "prefill_int8", VTPU_FMT_I8, 512, N, K, 8, 8, 1 },
    { "prefill_int8_k2048", VTPU_FMT_I8, 512, 2048, 2048, 4, 4, 1 },
    { "batch16_bf16_memory", VTPU_FMT_BF16_TILES, 16, N, K, 30, 30, 1 },
    { "batch16_bf16", VTPU_FMT_BF16_TILES, 16, 1024, 512, 1, 200, 1 },
    { "prefill_bf16", VTPU_FMT_BF16_TILES, 512, N, K, 4, 4, 1 },
    { "prefill_bf16_k2048", VTPU_FMT_BF16_TILES, 512, 2048, 2048, 2, 2, 1 },
};

static uint64_t weights_at(uint32_t fmt)
{
    return WEIGHT_AT + (fmt == VTPU_FMT_I8 ? 80 : fmt == VTPU_FMT_BF16_TILES ? 192 : 0) * MIB;
}

static uint64_t matrix_bytes(const Product *p)
{
    return p->n / 16 * vtpu_tile_row_bytes(p->fmt, p->k);
}

#define DISPATCHES 8000u
#define MAX_THREADS 256

static _Alignas(4096) uint8_t bus[8192]; /* the ring, then the fence */
#define FENCE_AT 4096

typedef struct Bench {
    VtpuCore *core;
    uint8_t *hbm;
    struct vtpu_instr *program;
    uint32_t length, tail;
    unsigned threads;
} Bench;

static double seconds_of(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double now(void)
{
    return seconds_of(CLOCK_MONOTONIC);
}

/* Seconds; cpu: of all threads, by their number. */
typedef struct Took {
    double wall, cpu;
} Took;

static void fail(const char *why)
{
    fprintf(stderr, "bench_device: %s\n", why);
    exit(1);
}

/* --- the machine's surroundings */

static bool bus_read(void *opaque, uint64_t addr, void *to, size_t len)
{
    (void)opaque;
    memcpy(to, bus + addr, len);
    return true;
}

static bool bus_write(void *opaque, uint64_t addr, const void *from, size_t len)
{
    (void)opaque;
    atomic_thread_fence(memory_order_release);
    memcpy(bus + addr, from, len);
    return true;
}

#define FENCE_VECTOR 1 /* 0 is of errors */
static atomic_uint faults;
static sem_t interrupted;

static void raise_irq(void *opaque, unsigned vector)
{
    (void)opaque;
    if (vector != FENCE_VECTOR) {
        atomic_fetch_add(&faults, 1);
    }
    sem_post(&interrupted);
}

static void put(Bench *bench, uint64_t at, uint64_t value)
{
    memcpy(bench->hbm + at, &value, sizeof(value));
}

static void open_machine(Bench *bench, unsigned threads, const char *chip)
{
    static const VtpuCoreOps ops = {
        .dma_read = bus_read, .dma_write = bus_write, .raise_irq = raise_irq,
    };
    const char *error;
    uint64_t state = 1;

    bench->threads = threads;
    bench->hbm = mmap(NULL, HBM_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bench->hbm == MAP_FAILED) {
        fail("no memory");
    }
    madvise(bench->hbm, HBM_BYTES, MADV_HUGEPAGE);
    for (uint64_t i = SRC_AT; i < HBM_BYTES; i += 8) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        put(bench, i, (state ^ state >> 32) & 0xbfbfbfbfbfbfbfbfull); /* finite in any format */
    }
    /* Addresses are HBM offsets, in 2 MiB pages. */
    uint64_t table = VTPU_PTE_VALID;
    put(bench, ROOT_AT, (ROOT_AT + 4096) | table);
    put(bench, ROOT_AT + 4096, (ROOT_AT + 8192) | table);
    for (uint64_t at = 0; at < HBM_BYTES; at += 2 * MIB) {
        put(bench, ROOT_AT + 8192 + at / (2 * MIB) * 8,
            at | VTPU_PTE_VALID | VTPU_PTE_READ | VTPU_PTE_WRITE | VTPU_PTE_EXEC | VTPU_PTE_HBM |
                VTPU_PTE_HUGE);
    }
    VtpuCoreConfig config = {
        .hbm = bench->hbm, .hbm_bytes = HBM_BYTES, .threads = threads, .timing = chip,
    };
    bench->core = vtpu_core_new(&config, &ops, NULL, &error);
    if (!bench->core) {
        fail(error);
    }
    vtpu_core_mmio_write(bench->core, VTPU_REG_CTX_ROOT, ROOT_AT | VTPU_CTX_VALID, 8);
    vtpu_core_mmio_write(bench->core, VTPU_REG_CTRL, VTPU_CTRL_ENABLE, 4);
    vtpu_core_mmio_write(bench->core, VTPU_REG_Q_RING_BASE, 0, 8);
    vtpu_core_mmio_write(bench->core, VTPU_REG_Q_FENCE_ADDR, FENCE_AT, 8);
    vtpu_core_mmio_write(bench->core, VTPU_REG_Q_RING_LOG2, 4, 4);
    vtpu_core_mmio_write(bench->core, VTPU_REG_Q_VECTOR, FENCE_VECTOR, 4);
    vtpu_core_mmio_write(bench->core, VTPU_REG_Q_PRIORITY, 1, 4);
    vtpu_core_mmio_write(bench->core, VTPU_REG_Q_CTRL, VTPU_Q_CTRL_ENABLE, 4);
    bench->program = (struct vtpu_instr *)(bench->hbm + PROGRAM_AT);
}

/* From the doorbell to the fence's interrupt. The waiter sleeps in between: every
 * processor belongs to the machine. */
static Took submit(Bench *bench, uint8_t op, const void *payload, size_t bytes)
{
    uint8_t entry[64] = {
        [VTPU_RING_OP] = op, [VTPU_RING_FLAGS] = VTPU_RING_FLAG_FENCE | VTPU_RING_FLAG_IRQ,
    };
    uint64_t value = ++bench->tail, seen;
    Took begin = { now(), seconds_of(CLOCK_PROCESS_CPUTIME_ID) };

    memcpy(entry + VTPU_RING_FENCE, &value, sizeof(value));
    memcpy(entry + VTPU_RING_PAYLOAD, payload, bytes);
    memcpy(bus + (value - 1) % 16 * 64, entry, sizeof(entry));
    vtpu_core_doorbell(bench->core, 0, bench->tail);
    do {
        sem_wait(&interrupted);
        seen = __atomic_load_n((uint64_t *)(bus + FENCE_AT), __ATOMIC_ACQUIRE);
        if (atomic_load(&faults)) {
            fail("the machine reported a fault");
        }
    } while (seen != value);
    return (Took){ now() - begin.wall,
                   (seconds_of(CLOCK_PROCESS_CPUTIME_ID) - begin.cpu) / bench->threads };
}

static struct vtpu_instr *emit(Bench *bench, uint8_t opcode)
{
    struct vtpu_instr *in = &bench->program[bench->length++];
    *in = (struct vtpu_instr){ .opcode = opcode };
    return in;
}

static Took run(Bench *bench)
{
    emit(bench, VTPU_OP_HALT);
    struct {
        uint64_t code;
        uint32_t bytes, entry;
        uint64_t args;
        uint32_t num_args;
    } payload = { PROGRAM_AT, bench->length * (uint32_t)sizeof(struct vtpu_instr), 0, 0, 0 };
    bench->length = 0;
    submit(bench, VTPU_CMD_RUN, &payload, 28); /* decodes the program; the next finds it cached */
    return submit(bench, VTPU_CMD_RUN, &payload, 28);
}

/* --- what the machine does */

/* Scales that make no denormals, which vector units are slow at. */
static void set_scales(Bench *bench, const Product *p)
{
    size_t tile_row_bytes = vtpu_tile_row_bytes(p->fmt, p->k);
    uint8_t *end = bench->hbm + weights_at(p->fmt) + tile_row_bytes;

    for (uint32_t i = 0; i < p->matrices * p->n / 16; i++, end += tile_row_bytes) {
        for (int r = 0; r < 16; r++) {
            ((float *)end)[r - 16] = 0.01f;
        }
    }
}

/* Rows of f32 into VMEM, then their products */
static Took run_products(Bench *bench, const Product *p)
{
    if (p->fmt == VTPU_FMT_I8) {
        set_scales(bench, p);
    }
    struct vtpu_instr *load = emit(bench, VTPU_OP_DMA_LOAD);
    load->imm[VTPU_DMA_LOAD_SRC] = (uint32_t)SRC_AT;
    load->imm[VTPU_DMA_LOAD_ROWS] = p->m;
    load->imm[VTPU_DMA_LOAD_ROW_BYTES] = p->k * 4;
    load->imm[VTPU_DMA_LOAD_DST_STRIDE] = load->imm[VTPU_DMA_LOAD_SRC_STRIDE] = p->k * 4;
    for (uint32_t i = 0; i < p->count; i++) {
        struct vtpu_instr *in = emit(bench, VTPU_OP_MATMUL);
        in->fmt_a = (uint8_t)p->fmt;
        in->imm[VTPU_MATMUL_DST] = (uint32_t)DST_AT;
        in->imm[VTPU_MATMUL_WEIGHT] =
            (uint32_t)(weights_at(p->fmt) + i % p->matrices * matrix_bytes(p));
        in->imm[VTPU_MATMUL_M] = p->m;
        in->imm[VTPU_MATMUL_N] = p->n;
        in->imm[VTPU_MATMUL_K] = p->k;
        in->imm[VTPU_MATMUL_DST_STRIDE] = p->n * 4;
        in->imm[VTPU_MATMUL_SRC_STRIDE] = p->k * 4;
    }
    return run(bench);
}

/* The smallest instruction of an engine, or of the sequencer alone, many times. */
static Took run_dispatches(Bench *bench, uint8_t opcode, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        struct vtpu_instr *in = emit(bench, opcode);
        if (opcode == VTPU_OP_V_ADD) {
            in->imm[VTPU_V_ADD_ROWS] = 1;
            in->imm[VTPU_V_ADD_WIDTH] = 16;
            in->imm[VTPU_V_ADD_DST_STRIDE] = 64;
            in->imm[VTPU_V_ADD_A_STRIDE] = in->imm[VTPU_V_ADD_B_STRIDE] = 64;
        }
    }
    return run(bench);
}

static Took run_copy(Bench *bench)
{
    uint64_t payload[3] = { COPY_TO_AT, COPY_FROM_AT, COPY_BYTES };
    return submit(bench, VTPU_CMD_COPY, payload, sizeof(payload));
}

/* --- what the host can do */

#define PEAK_CALLS 50

typedef struct Part {
    pthread_t thread;
    pthread_barrier_t *start;
    void (*work)(struct Part *part);
    const Bench *bench;
    unsigned index;
    double begin, end, cpu;
    double took[PEAK_CALLS]; /* seconds of each call of the peak */
} Part;

static Part parts[MAX_THREADS];

static void *part_main(void *opaque)
{
    Part *part = opaque;
    pthread_barrier_wait(part->start);
    part->begin = now();
    part->work(part);
    part->end = now();
    part->cpu = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    return NULL;
}

/* From the first thread's start to the last one's end. */
static Took on_all_threads(const Bench *bench, void (*work)(Part *part))
{
    pthread_barrier_t start;
    double begin = 1e300, end = 0, cpu = 0;

    pthread_barrier_init(&start, NULL, bench->threads);
    for (unsigned i = 0; i < bench->threads; i++) {
        parts[i] = (Part){ .start = &start, .work = work, .bench = bench, .index = i };
        pthread_create(&parts[i].thread, NULL, part_main, &parts[i]);
    }
    for (unsigned i = 0; i < bench->threads; i++) {
        pthread_join(parts[i].thread, NULL);
        begin = parts[i].begin < begin ? parts[i].begin : begin;
        end = parts[i].end > end ? parts[i].end : end;
        cpu += parts[i].cpu;
    }
    pthread_barrier_destroy(&start);
    return (Took){ end - begin, cpu / bench->threads };
}

static volatile uint64_t sink;

static void read_weights(Part *part)
{
    typedef uint64_t words __attribute__((vector_size(64)));
    const words *p = (const words *)(part->bench->hbm + WEIGHT_AT);
    size_t count = products[0].matrices * matrix_bytes(&products[0]) / 64;
    size_t begin = count * part->index / part->bench->threads;
    size_t end = count * (part->index + 1) / part->bench->threads;
    words sum[4] = { { 0 } };

    for (size_t i = begin; i + 4 <= end; i += 4) {
        for (int j = 0; j < 4; j++) {
            sum[j] += p[i + j];
        }
    }
    words all = sum[0] + sum[1] + sum[2] + sum[3];
    sink = all[0] ^ all[3] ^ all[7];
}

static void (*peak)(void);

static atomic_uint arrived;

/* All threads begin a call at the same time. */
static void run_peak(Part *part)
{
    for (unsigned i = 0; i < PEAK_CALLS; i++) {
        atomic_fetch_add(&arrived, 1);
        while (atomic_load(&arrived) < (i + 1) * part->bench->threads) {
            sched_yield();
        }
        double t = now();
        peak();
        part->took[i] = now() - t;
    }
}

/* 1e9 products a second. `most`: each thread's shortest call counts, so that a busy host does
 * not make the unit seem slower than it is. `together`: of the best call of all at the same
 * time, which is less where threads share a core and thus the unit. */
typedef struct PeakGops {
    double most, together;
} PeakGops;

static PeakGops peak_gops(const Bench *bench, Peak best)
{
    PeakGops gops = { 0, 0 };

    peak = best.run;
    atomic_store(&arrived, 0);
    on_all_threads(bench, run_peak);
    for (unsigned t = 0; t < bench->threads; t++) {
        double least = parts[t].took[0];
        for (unsigned i = 1; i < PEAK_CALLS; i++) {
            least = parts[t].took[i] < least ? parts[t].took[i] : least;
        }
        gops.most += PEAK_PRODUCTS / least / 1e9;
    }
    for (unsigned i = 0; i < PEAK_CALLS; i++) {
        double all = 0;
        for (unsigned t = 0; t < bench->threads; t++) {
            all += PEAK_PRODUCTS / parts[t].took[i] / 1e9;
        }
        gops.together = all > gops.together ? all : gops.together;
    }
    return gops;
}

static double copy(const Bench *bench)
{
    double t = now();
    memcpy(bench->hbm + COPY_TO_AT, bench->hbm + COPY_FROM_AT, COPY_BYTES);
    return now() - t;
}

int main(int argc, char **argv)
{
    static Bench bench;
    int rounds = argc > 1 ? atoi(argv[1]) : 5;
    int threads = argc > 2 ? atoi(argv[2]) : 1;

    if (threads < 1 || threads > MAX_THREADS) {
        fail("1 to 256 threads");
    }
    sem_init(&interrupted, 0, 0);
    open_machine(&bench, (unsigned)threads, argc > 3 ? argv[3] : NULL);
    Peak int8 = best_peak(false), bf16 = best_peak(true);
    double stream_bytes = (double)products[0].matrices * (double)matrix_bytes(&products[0]);

    for (int round = -1; round < rounds; round++) {
        char line[4096];
        int at = 0;

#define FIGURE(name, value) \
    at += snprintf(line + at, sizeof(line) - (size_t)at, ", \"%s\": %.3f", name, value)
        for (size_t i = 0; i < sizeof(products) / sizeof(products[0]); i++) {
            const Product *p = &products[i];
            Took took = run_products(&bench, p);
            double weights = (double)p->n * p->k * p->count;
            char name[64];

            snprintf(name, sizeof(name), "%s_gops", p->name);
            FIGURE(name, p->per_weight * weights * p->m / took.wall / 1e9);
            snprintf(name, sizeof(name), "%s_cpu_gops", p->name);
            FIGURE(name, p->per_weight * weights * p->m / took.cpu / 1e9);
            if (p->matrices == p->count) { /* none of it stays in a cache */
                double bytes = (double)p->matrices * (double)matrix_bytes(p) +
                               4.0 * p->m * (p->k + (double)p->n) * p->count;
                snprintf(name, sizeof(name), "%s_per_byte", p->name);
                FIGURE(name, p->per_weight * weights * p->m / bytes);
            }
            if (i == 0) {
                Took read = on_all_threads(&bench, read_weights);
                FIGURE("weight_stream_gb_s", stream_bytes / took.wall / 1e9);
                FIGURE("weight_stream_cpu_gb_s", stream_bytes / took.cpu / 1e9);
                FIGURE("read_loop_gb_s", stream_bytes / read.wall / 1e9);
                FIGURE("read_loop_cpu_gb_s", stream_bytes / read.cpu / 1e9);
            }
            /* Each unit amid what is compared with it: a shared machine's speed varies. */
            if (strcmp(p->name, "prefill_int8") == 0) {
                PeakGops gops = peak_gops(&bench, int8);
                FIGURE("int8_unit_gops", gops.most);
                FIGURE("int8_unit_together_gops", gops.together);
            } else if (strcmp(p->name, "prefill_bf16") == 0) {
                PeakGops gops = peak_gops(&bench, bf16);
                FIGURE("bf16_unit_gops", gops.most);
                FIGURE("bf16_unit_together_gops", gops.together);
            }
        }
        FIGURE("copy_gb_s", COPY_BYTES / run_copy(&bench).wall / 1e9);
        FIGURE("memcpy_gb_s", COPY_BYTES / copy(&bench) / 1e9);
        Took engine = run_dispatches(&bench, VTPU_OP_V_ADD, DISPATCHES);
        Took sequencer = run_dispatches(&bench, VTPU_OP_NOP, DISPATCHES);
        Took empty = run_dispatches(&bench, VTPU_OP_NOP, 0);
        FIGURE("dispatch_ns", (engine.wall - empty.wall) / DISPATCHES * 1e9);
        FIGURE("dispatch_cpu_ns", (engine.cpu - empty.cpu) * threads / DISPATCHES * 1e9);
        FIGURE("sequencer_ns", (sequencer.wall - empty.wall) / DISPATCHES * 1e9);
        FIGURE("empty_program_us", empty.wall * 1e6);
        if (round >= 0) { /* the first warms up */
            printf("{\"path\": \"%s\", \"int8_unit\": \"%s\", \"bf16_unit\": \"%s\"%s}\n",
                   vtpu_core_isa_path(bench.core), int8.unit, bf16.unit, line);
            fflush(stdout);
        }
    }
    vtpu_core_free(bench.core);
    return 0;
}
