/* SPDX-License-Identifier: MIT */
/*
 * MATMUL with I8 and BF16_TILES in AMX: weight tiles go into the unit as they lie.
 * Both formats have 64 bytes of a row in a step, so that they share everything but
 * the unit's instruction and what is done with the sums.
 *
 * Two tiles of activations times two of weights keep the unit busy with one load a
 * product; two rows of weight tiles stay in the first-level cache while all activations
 * pass by. Sums go through memory, and while the next ones are made, the vector units
 * scale and store them a slice a step.
 */
#include "lanes_avx512.h"

#include "kernels_simd.h"
#include "quantise_simd.h"

#define INLINE static inline __attribute__((always_inline))

#define GROUP 16                  /* rows of a tile of activations */
#define STEP 64                   /* bytes of a row that a product takes */
#define TILE_BYTES 1024

/* Activations that stay in the second-level cache while weights pass by. */
#define PASS_BYTES (1u << 20)

/* Results that would not: reading their lines from memory in order to overwrite them
 * takes longer than the products. */
#define PAST_CACHES_BYTES (2u << 20)

/*
 * --- Activations lie in tiles as weights do: m/16 rows of tiles, the last one with room
 * for rows that do not exist, each k/64 (or k/32) tiles of 16 rows by 64 bytes and, for
 * I8, 16 scales. Fewer rows than 16 in all have tiles of so many.
 */

INLINE uint32_t group_rows(uint32_t m)
{
    return m < GROUP ? m : GROUP;
}

INLINE size_t group_bytes(uint32_t k, uint32_t rows, bool ints)
{
    return (ints ? k + sizeof(float) : (size_t)k * 2) * rows;
}

static size_t rows_bytes(uint32_t k, uint32_t m, bool ints)
{
    return (group_bytes(k, GROUP, ints) * ((m + GROUP - 1) / GROUP) + 63) & ~(size_t)63;
}

size_t vtpu_amx_i8_bytes(uint32_t k, uint32_t m)
{
    return rows_bytes(k, m, true);
}

size_t vtpu_amx_bf16_bytes(uint32_t k, uint32_t m)
{
    return rows_bytes(k, m, false);
}

void vtpu_amx_i8_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                          uint32_t m, uint32_t begin, uint32_t end)
{
    uint32_t rows = group_rows(m);

    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        uint8_t *group = quantised + row / GROUP * group_bytes(k, rows, true);
        uint8_t *to = group + row % GROUP * STEP;
        float *scale = (float *)(group + (size_t)k * rows) + row % GROUP;
        float inverse = i8_inverse(x, k, scale);

        for (uint32_t i = 0; i < k; i += STEP, to += rows * STEP) {
#pragma GCC unroll 4
            for (int j = 0; j < STEP; j += 16) {
                u16v q = u_round(v_mul(v_load(x + i + j), v_set1(inverse)));
                _mm_storeu_si128((__m128i *)(to + j), _mm512_cvtepi32_epi8(q));
            }
        }
    }
}

void vtpu_amx_bf16_quantise(uint8_t *quantised, const float *src, size_t src_stride, uint32_t k,
                            uint32_t m, uint32_t begin, uint32_t end)
{
    uint32_t rows = group_rows(m);

    for (uint32_t row = begin; row < end; row++) {
        const float *x = const_row_at(src, src_stride, row);
        uint8_t *to = quantised + row / GROUP * group_bytes(k, rows, false) + row % GROUP * STEP;

        for (uint32_t i = 0; i < k; i += STEP / 2, to += rows * STEP) {
            v_store_bf16(to, v_load(x + i));
            v_store_bf16(to + STEP / 2, v_load(x + i + 16));
        }
    }
}

/* --- products */

/* What a product has come to: groups below each other times tiles side by side. */
typedef struct Block {
    const uint8_t *x, *w;         /* its activations and its weights */
    float *dst;                   /* its first result */
    uint32_t rows;                /* of results; at most 16 a group */
} Block;

typedef struct Work {
    const VtpuMatmul *op;
    size_t group_bytes, tile_row_bytes;
    uint32_t steps, tile_bytes;   /* tile_bytes: of activations */
    bool past_caches;             /* how results are stored */
    uint8_t sums[2][4][TILE_BYTES] __attribute__((aligned(64))); /* [..][group][tile] */
    Block block[2];
    int turn;                     /* which of the two is to be made next */
    const uint8_t *next;          /* weights of the panel that follows */
    uint32_t next_lines;          /* of them to be fetched in a step */
} Work;

/* Stores rows [begin, end) of a block that has been made. */
INLINE void store_rows(const Work *work, int turn, bool ints, int tiles, uint32_t begin,
                       uint32_t end)
{
    const VtpuMatmul *op = work->op;
    const Block *block = &work->block[turn];
    v16 d[4];

    end = end < block->rows ? end : block->rows;
    if (begin >= end) {
        return;
    }
    for (int t = 0; t < tiles; t++) {
        const uint8_t *tail = block->w + (size_t)(t + 1) * work->tile_row_bytes - VTPU_TILE_TAIL_I8;
        d[t] = ints ? v_load((const float *)tail) : v_zero();
    }
#pragma GCC unroll 1
    for (uint32_t row = begin; row < end; row++) {
        uint32_t g = row / GROUP, r = row % GROUP;
        const uint8_t *sums = work->sums[turn][g * (uint32_t)tiles] + r * 64;
        float *dst = row_at(block->dst, op->dst_stride, row);
        v16 scale = v_zero();

        if (ints) {
            const uint8_t *tail = block->x + g * work->group_bytes + (size_t)work->steps * work->tile_bytes;
            scale = v_set1(((const float *)tail)[r]);
        }
#pragma GCC unroll 4
        for (int t = 0; t < tiles; t++) {
            v16 value = v_load((const float *)(sums + t * TILE_BYTES));

            if (ints) {
                value = v_mul(v_mul(v_from_int(u_bits(value)), d[t]), scale);
            }
            if (work->past_caches) {
                _mm512_stream_ps(dst + 16 * t, value);
            } else {
                v_store(dst + 16 * t, op->accumulate ? v_add(v_load(dst + 16 * t), value) : value);
            }
        }
    }
}

/* The intrinsics do not tell the compiler which memory they use. */
#define MEMORY_BARRIER() __asm__ volatile("" ::: "memory")

#define MULTIPLY(sum, x, w)        \
    if (ints) {                    \
        _tile_dpbssd(sum, x, w);   \
    } else {                       \
        _tile_dpbf16ps(sum, x, w); \
    }
/*
 * Makes a block, and stores the one before meanwhile. Tiles 0 to 3 are sums, 4 and 5
 * activations, 6 and 7 weights; of a single group, 4 is activations and 5 to 7 weights.
 * The intrinsics want plain digits.
 */
INLINE void make_block(Work *work, bool ints, int groups, int tiles)
{
    const Block *block = &work->block[work->turn];
    uint8_t(*sums)[TILE_BYTES] = work->sums[work->turn];
    const uint8_t *x = block->x, *w = block->w;
    size_t group_bytes = work->group_bytes, tile_row_bytes = work->tile_row_bytes;
    uint32_t slice = ((uint32_t)groups * GROUP + work->steps - 1) / work->steps;

    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t step = 0; step < work->steps; step++, x += work->tile_bytes, w += TILE_BYTES) {
        if (groups == 2) {
            _tile_loadd(4, x, STEP);
            _tile_loadd(6, w, STEP);
            MULTIPLY(0, 4, 6)
            if (tiles == 2) {
                _tile_loadd(7, w + tile_row_bytes, STEP);
                MULTIPLY(1, 4, 7)
            }
            _tile_loadd(5, x + group_bytes, STEP);
            MULTIPLY(2, 5, 6)
            if (tiles == 2) {
                MULTIPLY(3, 5, 7)
            }
        } else {
            _tile_loadd(4, x, STEP);
            _tile_loadd(5, w, STEP);
            MULTIPLY(0, 4, 5)
            if (tiles > 1) {
                _tile_loadd(6, w + tile_row_bytes, STEP);
                MULTIPLY(1, 4, 6)
            }
            if (tiles > 2) {
                _tile_loadd(7, w + 2 * tile_row_bytes, STEP);
                MULTIPLY(2, 4, 7)
                _tile_loadd(5, w + 3 * tile_row_bytes, STEP);
                MULTIPLY(3, 4, 5)
            }
        }
        for (uint32_t i = 0; i < work->next_lines; i++, work->next += 64) {
            _mm_prefetch(work->next, _MM_HINT_T1);
        }
        store_rows(work, work->turn ^ 1, ints, tiles, step * slice, step * slice + slice);
    }
    MEMORY_BARRIER();
    _tile_stored(0, sums[0], 64);
    if (groups == 2) {
        _tile_stored(2, sums[tiles], 64);
        if (tiles == 2) {
            _tile_stored(1, sums[1], 64);
            _tile_stored(3, sums[3], 64);
        }
    } else {
        if (tiles > 1) {
            _tile_stored(1, sums[1], 64);
        }
        if (tiles > 2) {
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
        }
    }
    MEMORY_BARRIER();
    work->turn ^= 1;
}

/* All rows from `row`, groups a block, times some tiles. */
INLINE void panel(Work *work, bool ints, uint32_t row, uint32_t end, uint32_t tile_row, int groups,
                  int tiles)
{
    const VtpuMatmul *op = work->op;
    uint32_t blocks = (end - row + (uint32_t)groups * GROUP - 1) / ((uint32_t)groups * GROUP);

    if (blocks == 0) {
        return;
    }
    /* Evenly, so that weights come from memory while the unit works on what it has. Of few
     * rows they come in one stream anyway, which the processor sees by itself. */
    work->next = op->weight + (tile_row + (uint32_t)tiles) * work->tile_row_bytes;
    work->next_lines = blocks < 4 ? 0 : (uint32_t)tiles * (TILE_BYTES / 64) / blocks;
    work->block[work->turn ^ 1].rows = 0;
    for (; row < end; row += (uint32_t)groups * GROUP) {
        work->block[work->turn] = (Block){
            .x = op->quantised + row / GROUP * work->group_bytes,
            .w = op->weight + tile_row * work->tile_row_bytes,
            .dst = row_at(op->dst, op->dst_stride, row) + (size_t)tile_row * 16,
            .rows = end - row < (uint32_t)groups * GROUP ? end - row : (uint32_t)groups * GROUP,
        };
        make_block(work, ints, groups, tiles);
    }
    store_rows(work, work->turn ^ 1, ints, tiles, 0, 2 * GROUP);
}

INLINE void matmul(const VtpuMatmul *op, bool ints, uint32_t begin, uint32_t end)
{
    Work work = {
        .op = op, .group_bytes = group_bytes(op->k, group_rows(op->m), ints),
        .tile_row_bytes = vtpu_tile_row_bytes(op->fmt, op->k),
        .steps = op->k / vtpu_tile_cols(op->fmt),
        .tile_bytes = group_rows(op->m) * STEP,
        .past_caches = !op->accumulate && (uint64_t)op->m * op->n * 4 >= PAST_CACHES_BYTES &&
                       ((uintptr_t)op->dst | op->dst_stride) % 64 == 0,
    };
    uint32_t pass = PASS_BYTES / (uint32_t)work.group_bytes * GROUP / 32 * 32 + 32;

    for (uint32_t row = 0; row < op->m; row += pass) {
        uint32_t rows = op->m - row < pass ? op->m - row : pass, paired = rows / 32 * 32;
        paired = rows - paired > GROUP ? rows : paired;
        uint32_t tile_row;

        for (tile_row = begin; tile_row + 2 <= end; tile_row += 2) {
            panel(&work, ints, row, row + paired, tile_row, 2, 2);
        }
        for (; tile_row < end; tile_row++) {
            panel(&work, ints, row, row + paired, tile_row, 2, 1);
        }
        for (tile_row = begin; tile_row + 4 <= end; tile_row += 4) {
            panel(&work, ints, row + paired, row + rows, tile_row, 1, 4);
        }
        for (; tile_row < end; tile_row++) {
            panel(&work, ints, row + paired, row + rows, tile_row, 1, 1);
        }
    }
    _mm_sfence();
}

/* LDTILECFG's operand: tiles of 16 rows of 64 bytes; with fewer rows of activations
 * than that, sums and activations have only so many. */
typedef struct TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

static void configure(uint32_t m)
{
    TileConfig config = { .palette = 1 };

    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = i < 5 ? (uint8_t)group_rows(m) : GROUP;
    }
    /* The intrinsic tells the compiler of the first eight bytes alone. */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

void vtpu_amx_i8_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    configure(op->m);
    matmul(op, true, begin, end);
    _tile_release();
}

void vtpu_amx_bf16_matmul(const VtpuMatmul *op, uint32_t begin, uint32_t end)
{
    configure(op->m);
    matmul(op, false, begin, end);
    _tile_release();
}
