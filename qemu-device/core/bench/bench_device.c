/* SPDX-License-Identifier: MIT */
/*
 * The machine against what the host can do: each round measures, in turn, a program
 * or a command through ring and doorbell and a plain loop that does only the part
 * that limits it, on as many threads. Prints one JSON object a round; bench/device.py
 * takes the medians.
 *
 *   bench_device ROUNDS THREADS [CHIP]
 *
 * CHIP: the machine's timing model.
 */
#include <immintrin.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "../kernels.h"
#include "../vtpu_core.h"

/* HBM: page tables, program, activations, weights, two buffers to copy between. */
#define MIB (1ull << 20)
#define HBM_BYTES (256 * MIB)
#define ROOT_AT 0ull
#define PROGRAM_AT (1 * MIB)
#define SRC_AT (2 * MIB)
#define WEIGHT_AT (8 * MIB)
#define COPY_BYTES (32 * MIB)
#define COPY_FROM_AT (128 * MIB)
#define COPY_TO_AT (COPY_FROM_AT + COPY_BYTES)

/* The products: the matrix of SmolLM2-135M's gate and up projections, many times over. */
#define N 3072u
#define K 576u
#define MATRICES 60
#define MATRIX_BYTES ((size_t)(N / 16) * (K / 32) * VTPU_TILE_BYTES_Q4_1)
#define PROMPT_MATRICES 4

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

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

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

static atomic_uint faults;

static void raise_irq(void *opaque, unsigned vector)
{
    (void)opaque;
    if (vector == 0) {
        atomic_fetch_add(&faults, 1);
    }
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
    uint32_t state = 1;

    bench->threads = threads;
    bench->hbm = mmap(NULL, HBM_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bench->hbm == MAP_FAILED) {
        fail("no memory");
    }
    madvise(bench->hbm, HBM_BYTES, MADV_HUGEPAGE);
    for (uint64_t i = SRC_AT; i < COPY_TO_AT + COPY_BYTES; i++) {
        state = state * 1664525u + 1013904223u;
        bench->hbm[i] = (uint8_t)(state >> 24) & 0xbf; /* as f16 and f32, finite */
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
    vtpu_core_mmio_write(bench->core, VTPU_REG_Q_VECTOR, 1, 4);
    vtpu_core_mmio_write(bench->core, VTPU_REG_Q_PRIORITY, 1, 4);
    vtpu_core_mmio_write(bench->core, VTPU_REG_Q_CTRL, VTPU_Q_CTRL_ENABLE, 4);
    bench->program = (struct vtpu_instr *)(bench->hbm + PROGRAM_AT);
}

/* Seconds from the doorbell to the fence. The waiter sleeps in between: every
 * processor belongs to the machine. */
static double submit(Bench *bench, uint8_t op, const void *payload, size_t bytes)
{
    uint8_t entry[64] = { [VTPU_RING_OP] = op, [VTPU_RING_FLAGS] = VTPU_RING_FLAG_FENCE };
    uint64_t value = ++bench->tail, seen;
    double t = now();

    memcpy(entry + VTPU_RING_FENCE, &value, sizeof(value));
    memcpy(entry + VTPU_RING_PAYLOAD, payload, bytes);
    memcpy(bus + (value - 1) % 16 * 64, entry, sizeof(entry));
    vtpu_core_doorbell(bench->core, 0, bench->tail);
    do {
        struct timespec pause = { .tv_nsec = 1000 };
        nanosleep(&pause, NULL);
        seen = __atomic_load_n((uint64_t *)(bus + FENCE_AT), __ATOMIC_ACQUIRE);
        if (atomic_load(&faults)) {
            fail("the machine reported a fault");
        }
    } while (seen != value);
    return now() - t;
}

static struct vtpu_instr *emit(Bench *bench, uint8_t opcode)
{
    struct vtpu_instr *in = &bench->program[bench->length++];
    *in = (struct vtpu_instr){ .opcode = opcode };
    return in;
}

static double run(Bench *bench)
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

/* Rows of f32 into VMEM, then their products with several matrices. */
static double run_products(Bench *bench, uint32_t m, uint32_t matrices)
{
    struct vtpu_instr *load = emit(bench, VTPU_OP_DMA_LOAD);
    load->imm[VTPU_DMA_LOAD_SRC] = (uint32_t)SRC_AT;
    load->imm[VTPU_DMA_LOAD_ROWS] = m;
    load->imm[VTPU_DMA_LOAD_ROW_BYTES] = K * 4;
    load->imm[VTPU_DMA_LOAD_DST_STRIDE] = load->imm[VTPU_DMA_LOAD_SRC_STRIDE] = K * 4;
    for (uint32_t i = 0; i < matrices; i++) {
        struct vtpu_instr *in = emit(bench, VTPU_OP_MATMUL);
        in->fmt_a = VTPU_FMT_Q4_1;
        in->imm[VTPU_MATMUL_DST] = (uint32_t)(4 * MIB);
        in->imm[VTPU_MATMUL_WEIGHT] = (uint32_t)(WEIGHT_AT + i * MATRIX_BYTES);
        in->imm[VTPU_MATMUL_M] = m;
        in->imm[VTPU_MATMUL_N] = N;
        in->imm[VTPU_MATMUL_K] = K;
        in->imm[VTPU_MATMUL_DST_STRIDE] = N * 4;
        in->imm[VTPU_MATMUL_SRC_STRIDE] = K * 4;
    }
    return run(bench);
}

/* The smallest instruction of an engine, or of the sequencer alone, many times. */
static double run_dispatches(Bench *bench, uint8_t opcode, uint32_t count)
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

static double run_copy(Bench *bench)
{
    uint64_t payload[3] = { COPY_TO_AT, COPY_FROM_AT, COPY_BYTES };
    return submit(bench, VTPU_CMD_COPY, payload, sizeof(payload));
}

/* --- what the host can do */

typedef struct Part {
    pthread_t thread;
    pthread_barrier_t *start;
    void (*work)(const struct Part *part);
    const Bench *bench;
    unsigned index;
    double begin, end;
} Part;

static void *part_main(void *opaque)
{
    Part *part = opaque;
    pthread_barrier_wait(part->start);
    part->begin = now();
    part->work(part);
    part->end = now();
    return NULL;
}

/* Seconds from the first thread's start to the last one's end. */
static double on_all_threads(const Bench *bench, void (*work)(const Part *part))
{
    static Part parts[MAX_THREADS];
    pthread_barrier_t start;
    double begin = 1e300, end = 0;

    pthread_barrier_init(&start, NULL, bench->threads);
    for (unsigned i = 0; i < bench->threads; i++) {
        parts[i] = (Part){ .start = &start, .work = work, .bench = bench, .index = i };
        pthread_create(&parts[i].thread, NULL, part_main, &parts[i]);
    }
    for (unsigned i = 0; i < bench->threads; i++) {
        pthread_join(parts[i].thread, NULL);
        begin = parts[i].begin < begin ? parts[i].begin : begin;
        end = parts[i].end > end ? parts[i].end : end;
    }
    pthread_barrier_destroy(&start);
    return end - begin;
}

static volatile uint64_t sink;

static void read_weights(const Part *part)
{
    typedef uint64_t words __attribute__((vector_size(64)));
    const words *p = (const words *)(part->bench->hbm + WEIGHT_AT);
    size_t count = MATRICES * MATRIX_BYTES / 64;
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

/* Products of bytes a thread does in a register-only loop, about. */
#define PEAK_PRODUCTS 1e10
#define AMX_PRODUCTS (16 * 16 * 64)
#define VNNI_PRODUCTS 64
#define AVX2_PRODUCTS 16

__attribute__((target("amx-tile,amx-int8"))) static void peak_amx(const Part *part)
{
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {
        .palette = 1,
        .row_bytes = { 64, 64, 64, 64, 64, 64, 64, 64 },
        .rows = { 16, 16, 16, 16, 16, 16, 16, 16 },
    };

    (void)part;
    _tile_loadconfig(&config);
    for (long i = 0; i < (long)(PEAK_PRODUCTS / AMX_PRODUCTS / 4); i++) {
        _tile_dpbssd(4, 0, 2);
        _tile_dpbssd(5, 0, 3);
        _tile_dpbssd(6, 1, 2);
        _tile_dpbssd(7, 1, 3);
    }
    _tile_release();
}

/* Twelve sums: more than the latency times the units. */
#define TWELVE(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11)

__attribute__((target("avx512f,avx512vnni"))) static void peak_vnni(const Part *part)
{
    (void)part;
    for (long i = 0; i < (long)(PEAK_PRODUCTS / VNNI_PRODUCTS / 12); i++) {
#define PRODUCT(r) __asm__ volatile("vpdpbusd %%zmm31, %%zmm30, %%zmm" #r ::: "xmm" #r);
        TWELVE(PRODUCT)
#undef PRODUCT
    }
}

/* Byte products through pairs of int16: AVX2's own saturate. */
__attribute__((target("avx2"))) static void peak_avx2(const Part *part)
{
    (void)part;
    for (long i = 0; i < (long)(PEAK_PRODUCTS / AVX2_PRODUCTS / 6); i++) {
#define PRODUCT(r)                                                 \
    __asm__ volatile("vpmaddwd %%ymm15, %%ymm14, %%ymm13\n\t"      \
                     "vpaddd %%ymm13, %%ymm" #r ", %%ymm" #r ::: "xmm13", "xmm" #r);
        PRODUCT(0) PRODUCT(1) PRODUCT(2) PRODUCT(3) PRODUCT(4) PRODUCT(5)
#undef PRODUCT
    }
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

    if (threads < 1 || threads > MAX_THREADS || WEIGHT_AT + MATRICES * MATRIX_BYTES > COPY_FROM_AT) {
        fail("1 to 256 threads");
    }
    open_machine(&bench, (unsigned)threads, argc > 3 ? argv[3] : NULL);
    const char *path = vtpu_core_isa_path(bench.core);
    void (*peak)(const Part *part) = NULL;
    const char *unit = NULL;
    /* The paths have found out what the host has and may use. */
    if (strcmp(path, "amx") == 0 && __builtin_cpu_supports("amx-int8")) {
        peak = peak_amx, unit = "AMX int8";
    } else if (vtpu_kernels_get("avx512")) {
        peak = peak_vnni, unit = "AVX-512 VNNI";
    } else if (vtpu_kernels_get("avx2")) {
        peak = peak_avx2, unit = "AVX2";
    }
    for (int round = -1; round < rounds; round++) {
        double bytes = (double)MATRICES * MATRIX_BYTES, weights = (double)N * K;
        double stream = run_products(&bench, 1, MATRICES);
        double read = on_all_threads(&bench, read_weights);
        /* Two products of bytes a weight: activations have 16 bits. */
        double few = 2 * 16 * weights * MATRICES / run_products(&bench, 16, MATRICES);
        double many = 2 * 512 * weights * PROMPT_MATRICES / run_products(&bench, 512, PROMPT_MATRICES);
        double best = peak ? PEAK_PRODUCTS * threads / on_all_threads(&bench, peak) : 0;
        double copied = run_copy(&bench), moved = copy(&bench);
        double engine = run_dispatches(&bench, VTPU_OP_V_ADD, DISPATCHES);
        double sequencer = run_dispatches(&bench, VTPU_OP_NOP, DISPATCHES);
        double empty = run_dispatches(&bench, VTPU_OP_NOP, 0);

        if (round < 0) {
            continue; /* warms up */
        }
        printf("{\"path\": \"%s\", \"unit\": \"%s\", \"weight_stream_gb_s\": %.3f, "
               "\"read_loop_gb_s\": %.3f, \"batch16_gops\": %.2f, \"prefill_gops\": %.2f, "
               "\"unit_gops\": %.2f, \"copy_gb_s\": %.3f, \"memcpy_gb_s\": %.3f, "
               "\"dispatch_ns\": %.2f, \"sequencer_ns\": %.2f, \"empty_program_us\": %.2f}\n",
               path, unit ? unit : "", bytes / stream / 1e9, bytes / read / 1e9, few / 1e9,
               many / 1e9, best / 1e9, COPY_BYTES / copied / 1e9, COPY_BYTES / moved / 1e9,
               (engine - empty) / DISPATCHES * 1e9, (sequencer - empty) / DISPATCHES * 1e9,
               empty * 1e6);
        fflush(stdout);
    }
    vtpu_core_free(bench.core);
    return 0;
}
