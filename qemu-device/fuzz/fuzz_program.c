/* SPDX-License-Identifier: MIT */
/*
 * Programs: mostly legal instructions over memory that is worth it. Each input runs
 * twice, on the scalar path, which defines all results, and on another one that the
 * host has, perhaps with the timing model beside it: registers, faults, VMEM and all memory must come out the same.
 *
 * Input: 16 bytes of choices, then instructions.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "encode.h"
#include "rig.h"

#define HEADER 16
#define MOST_INSTRUCTIONS 96
#define WORK (1u << 20) /* multiply-adds, about */

#define SECTION (8u << 10)
#define DATA_BYTES (16 * SECTION)
#define CODE (8u << 20) /* HBM */
#define TABLES (12u << 20)
#define VA_SYSTEM 0x40000000u
#define VA_REVERSED 0x50000000u
#define VA_READ_ONLY 0x60000000u
#define VA_MIXED 0x70000000u
#define PAGES (DATA_BYTES / VTPU_PAGE_BYTES)

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

static const uint64_t globals[] = {
    0, SECTION, 2 * SECTION, 3 * SECTION, 5 * SECTION, 7 * SECTION, 8 * SECTION, 9 * SECTION,
    10 * SECTION, 12 * SECTION, 14 * SECTION, 1u << 20, 2u << 20, CODE - 4096, CODE - 64,
    VA_SYSTEM, VA_SYSTEM + 3 * SECTION, VA_SYSTEM + 9 * SECTION, VA_SYSTEM + DATA_BYTES - 4096,
    VA_REVERSED, VA_REVERSED + 4 * SECTION, VA_REVERSED + 9 * SECTION,
    VA_REVERSED + DATA_BYTES - 64, VA_READ_ONLY, VA_READ_ONLY + 9 * SECTION, VA_MIXED,
    VA_MIXED + 8 * SECTION, 0x80000000u,
};
static const uint32_t vmem[] = {
    0, SECTION, 2 * SECTION, 3 * SECTION, 4 * SECTION, 5 * SECTION, 7 * SECTION, 8 * SECTION,
    9 * SECTION, 14 * SECTION, 15 * SECTION, DATA_BYTES, DATA_BYTES + (64u << 10),
    DATA_BYTES + (128u << 10), DATA_BYTES + (192u << 10), VTPU_VMEM_BYTES - (64u << 10),
    VTPU_VMEM_BYTES - 4096, VTPU_VMEM_BYTES - 64,
};
#define FIRST_RESULT 10 /* of vmem */
static const uint64_t args[VTPU_MAX_ARGS] = {
    0, 1, 2, 16, 32, 64, SECTION, 1u << 20, UINT32_MAX, 1ull << 32, (1ull << VTPU_VA_BITS) - 64,
    1ull << VTPU_VA_BITS, 1ull << 63, -(uint64_t)(1u << 20), -(uint64_t)4096, -(uint64_t)64,
};

/* What the memory holds: lists, parameters, numbers tame and wild, weights. */
static const uint8_t *pattern(void)
{
    static uint8_t data[DATA_BYTES];
    uint64_t state = 1;

    if (data[DATA_BYTES - SECTION - 1]) {
        return data;
    }
    for (unsigned i = 0; i < DATA_BYTES / 4; i++) {
        unsigned section = i * 4 / SECTION;
        uint32_t random = rig_random(&state), word = random << 1;
        float f = (float)((int)(random % 4096) - 2048) / 1024.0f;
        if (section == 0) {
            word = random % 16;
        } else if (section == 1) {
            word = random % 64 == 0 ? UINT32_MAX : random % 300;
        } else if (section == 2) {
            const float tops[] = { 1.0f, 0.9f, 0.5f, 1e-6f };
            const float temperatures[] = { 0.0f, 0.7f, 1.0f, 5.0f, 0x1p-14f };
            uint32_t field[8] = { 0, random % 50, 0, random % 21, random, random >> 8,
                                  random % 1000, 0 };
            memcpy(&field[0], &temperatures[random % 5], 4);
            memcpy(&field[2], &tops[(random >> 4) % 4], 4);
            word = field[i % 8];
        } else if (section < 7 || section == 15) {
            memcpy(&word, &f, 4);
        } else if (section == 7) {
            f = ldexpf(f, (int)(random >> 12) % 280 - 140);
            memcpy(&word, &f, 4);
        } else if (section == 8) {
            const uint32_t strange[] = { 0x7f800000, 0xff800000, 0x7fc00000, 0x80000000, 1 };
            memcpy(&word, &f, 4);
            word = random % 16 ? word : strange[random % 5];
        } else if (section < 14) {
            word &= 0xbfbfbfbf; /* no f16 of it is a NaN */
        }
        memcpy(data + 4 * i, &word, 4);
    }
    data[DATA_BYTES - SECTION - 1] = 1;
    return data;
}

static void lay_out(Rig *rig)
{
    const uint64_t rw = VTPU_PTE_READ | VTPU_PTE_WRITE;
    Tables tables = { .next = TABLES };

    memcpy(rig->hbm, pattern(), DATA_BYTES);
    memcpy(rig->system, pattern(), DATA_BYTES);
    rig_map(rig, &tables, 0, 0, CODE, VTPU_HUGE_PAGE_BYTES, rw | VTPU_PTE_HBM);
    rig_map(rig, &tables, CODE, CODE, VTPU_HUGE_PAGE_BYTES, VTPU_HUGE_PAGE_BYTES,
            VTPU_PTE_EXEC | VTPU_PTE_READ | VTPU_PTE_HBM);
    rig_map(rig, &tables, VA_SYSTEM, RIG_BUS, DATA_BYTES, VTPU_PAGE_BYTES, rw);
    rig_map(rig, &tables, VA_READ_ONLY, 0, DATA_BYTES, VTPU_PAGE_BYTES,
            VTPU_PTE_READ | VTPU_PTE_HBM);
    for (uint64_t page = 0; page < PAGES; page++) {
        uint64_t at = page * VTPU_PAGE_BYTES, back = (PAGES - 1 - page) * VTPU_PAGE_BYTES;
        rig_map(rig, &tables, VA_REVERSED + at, back, VTPU_PAGE_BYTES, VTPU_PAGE_BYTES,
                rw | VTPU_PTE_HBM);
        rig_map(rig, &tables, VA_MIXED + at, page % 2 ? at : RIG_BUS + at, VTPU_PAGE_BYTES,
                VTPU_PAGE_BYTES, page % 2 ? rw | VTPU_PTE_HBM : rw);
    }
    rig_write(rig, VTPU_REG_CTX_ROOT, tables.root | VTPU_CTX_VALID, 8);
}

static size_t put(uint8_t *code, size_t at, const struct vtpu_instr *in)
{
    memcpy(code + at, in, sizeof(*in));
    return at + sizeof(*in);
}

/* The prologue fills VMEM with what memory holds. Returns the program's bytes. */
static size_t assemble(uint8_t *code, const uint8_t *words, size_t count)
{
    const struct vtpu_instr halt = { .opcode = VTPU_OP_HALT };
    struct vtpu_instr load = { .opcode = VTPU_OP_DMA_LOAD, .imm = { 0, 0, PAGES, 4096, 4096, 4096 } };
    size_t at = put(code, 0, &load);

    memcpy(code + at, words, count * VTPU_INSTR_BYTES);
    return put(code, at + count * VTPU_INSTR_BYTES, &halt);
}

/* The parts of HBM that programs can write, and the ends of VMEM. */
#define HBM_KEPT (2 * DATA_BYTES)
#define VMEM_LOW (4 * DATA_BYTES)
#define VMEM_HIGH (68u << 10)

/* The payload of a NaN is nobody's promise: before integers or memory are made of
 * it, every NaN of VMEM becomes the same one. */
static void same_nans(VtpuVmem *vmem)
{
    uint32_t *word = (uint32_t *)vmem->data, *end = word + (vmem->used + 3) / 4;
    uint32_t *low = word + VMEM_LOW / 4, *high = word + (VTPU_VMEM_BYTES - VMEM_HIGH) / 4;

    for (; word < end; word++) {
        word = word == low ? high : word; /* little lies in between */
        if ((*word & 0x7fffffff) > 0x7f800000) {
            *word = 0x7fc00000;
        }
    }
}

static bool only_floats(uint8_t op)
{
    switch (op) {
    case VTPU_OP_MATMUL:
    case VTPU_OP_V_RMSNORM:
    case VTPU_OP_V_ADD:
    case VTPU_OP_V_MUL:
    case VTPU_OP_V_SILU_MUL:
    case VTPU_OP_V_ROPE:
    case VTPU_OP_DMA_LOAD:
        return true;
    default:
        return op != VTPU_OP_LDV && vtpu_op_table[op].engine == VTPU_ENGINE_SEQ;
    }
}

typedef struct Rows {
    uint64_t at, rows, bytes, stride;
} Rows;

/* What an instruction writes of VMEM, then what it reads of it but for lists. */
static unsigned rows_of(const VtpuIssued *i, Rows rows[3])
{
    const uint64_t *v = i->v;

    switch (i->in->in.opcode) {
    case VTPU_OP_V_RMSNORM:
        rows[0] = (Rows) { v[0], v[3], v[4] * 4, v[5] };
        rows[1] = (Rows) { v[1], v[3], v[4] * 4, v[6] };
        rows[2] = (Rows) { v[2], 1, v[4] * 4, 0 };
        return 3;
    case VTPU_OP_V_ADD:
    case VTPU_OP_V_MUL:
    case VTPU_OP_V_SILU_MUL:
        for (unsigned n = 0; n < 3; n++) {
            rows[n] = (Rows) { v[n], v[3], v[4] * 4, v[5 + n] };
        }
        return 3;
    case VTPU_OP_V_TAKE:
        rows[0] = (Rows) { v[0], v[3], v[4] * 4, v[6] };
        rows[1] = (Rows) { v[1], v[5], v[4] * 4, v[7] };
        return 2;
    case VTPU_OP_V_ROPE:
        rows[0] = (Rows) { v[0], v[3], v[4] * v[5] * 4, v[6] };
        rows[1] = (Rows) { v[1], v[3], v[4] * v[5] * 4, v[7] };
        rows[2] = (Rows) { v[2], v[3], v[5] * 4, v[5] * 4 };
        return 3;
    case VTPU_OP_V_ATTN: {
        uint64_t imm = i->in->in.imm64;
        uint64_t bytes = VTPU_V_ATTN_GET_HEADS(imm) * VTPU_V_ATTN_GET_HEAD_DIM(imm) * 4;
        rows[0] = (Rows) { v[0], v[4], bytes, bytes };
        rows[1] = (Rows) { v[1], v[4], bytes, bytes };
        return 2;
    }
    default: /* MATMUL has read all when it writes */
        return 0;
    }
}

static bool in_place(uint8_t op)
{
    return op != VTPU_OP_V_TAKE && op != VTPU_OP_V_ATTN;
}

/* Results that lie partly in a source are no more than some result. */
static bool is_undefined(const VtpuIssued *i)
{
    Rows rows[3];
    unsigned count = rows_of(i, rows);

    for (unsigned n = 1; n < count; n++) {
        uint64_t end = rows[n].at + rows[n].rows * rows[n].stride + rows[n].bytes;
        uint64_t written = rows[0].at + rows[0].rows * rows[0].stride + rows[0].bytes;
        bool same = rows[n].at == rows[0].at && rows[n].stride == rows[0].stride &&
                    rows[n].rows == rows[0].rows && rows[n].bytes == rows[0].bytes;
        if (rows[0].rows && rows[0].at < end && rows[n].at < written &&
            !(same && in_place(i->in->in.opcode))) {
            return true;
        }
    }
    return false;
}

typedef struct Run {
    bool floats_written; /* since all NaNs were made the same */
    bool undefined;
} Run;

static void before_instruction(Rig *rig, VtpuExec *x, uint8_t op)
{
    const VtpuEngine *e = &x->engine[vtpu_op_table[op].engine];
    Run *run = rig->target;

    if (run->floats_written && !only_floats(op)) {
        same_nans(x->vmem);
        run->floats_written = false;
    }
    if (vtpu_op_table[op].engine != VTPU_ENGINE_SEQ) {
        run->floats_written = true;
        run->undefined |= is_undefined(&e->queue[e->head]);
    }
}

typedef struct Result {
    bool gave_up, undefined;
    uint64_t fault_addr, instructions, s[VTPU_NUM_SREGS];
    uint32_t state, cause, access, pc, counter[VTPU_NUM_COUNTERS];
    uint64_t vmem_used;
    uint8_t vmem[VMEM_LOW + VMEM_HIGH], hbm[HBM_KEPT], system[DATA_BYTES];
} Result;

static void keep(Rig *rig, Result *result)
{
    VtpuVmem *vmem = &rig->core->vmem[0];
    const VtpuExec *x = &rig->core->exec[0];

    same_nans(vmem);
    result->gave_up = rig->gave_up;
    result->fault_addr = rig_read(rig, VTPU_REG_Q_FAULT_ADDR, 8);
    result->instructions = rig_read(rig, VTPU_REG_STAT_INSTRUCTIONS, 8);
    result->state = (uint32_t)rig_read(rig, VTPU_REG_Q_QSTATUS, 4);
    result->cause = (uint32_t)rig_read(rig, VTPU_REG_Q_FAULT_CAUSE, 4);
    result->access = (uint32_t)rig_read(rig, VTPU_REG_Q_FAULT_ACCESS, 4);
    result->pc = (uint32_t)rig_read(rig, VTPU_REG_Q_FAULT_PC, 4);
    result->vmem_used = vmem->used;
    memcpy(result->s, x->s, sizeof(result->s));
    memcpy(result->counter, x->counter, sizeof(result->counter));
    memcpy(result->vmem, vmem->data, VMEM_LOW);
    memcpy(result->vmem + VMEM_LOW, vmem->data + VTPU_VMEM_BYTES - VMEM_HIGH, VMEM_HIGH);
    memcpy(result->hbm, rig->hbm, DATA_BYTES);
    memcpy(result->hbm + DATA_BYTES, rig->hbm + (1u << 20), DATA_BYTES);
    memcpy(result->system, rig->system, DATA_BYTES);
}

static void run_on(const char *isa, const char *timing, Input in, Result *result)
{
    uint8_t header[HEADER], code[(MOST_INSTRUCTIONS + 2) * VTPU_INSTR_BYTES], entry[64] = { 0 };
    Run run = { false, false };
    Rig rig = { .before_instruction = before_instruction, .target = &run, .timing = timing };

    input_bytes(&in, header, sizeof(header));
    size_t count = in.left / VTPU_INSTR_BYTES;
    count = count < MOST_INSTRUCTIONS ? count : MOST_INSTRUCTIONS;
    uint32_t bytes = (uint32_t)assemble(code, in.at, count);

    rig_open(&rig, isa, header[1], WORK);
    lay_out(&rig);
    memcpy(rig.hbm + CODE, code, bytes);
    memcpy(rig.hbm + CODE + VTPU_MAX_CODE_BYTES, args, sizeof(args));
    const uint64_t fields[] = { CODE, bytes, CODE + VTPU_MAX_CODE_BYTES, VTPU_MAX_ARGS };
    entry[VTPU_RING_OP] = VTPU_CMD_RUN;
    memcpy(entry + VTPU_CMD_RUN_CODE_VA, &fields[0], 8);
    memcpy(entry + VTPU_CMD_RUN_CODE_BYTES, &fields[1], 4);
    memcpy(entry + VTPU_CMD_RUN_ARGS_VA, &fields[2], 8);
    memcpy(entry + VTPU_CMD_RUN_NUM_ARGS, &fields[3], 4);
    memcpy(rig.system + DATA_BYTES, entry, sizeof(entry));
    rig_write(&rig, VTPU_REG_Q_RING_BASE, RIG_BUS + DATA_BYTES, 8);
    rig_write(&rig, VTPU_REG_Q_CTRL, VTPU_Q_CTRL_ENABLE, 4);
    rig_write(&rig, VTPU_REG_CTRL, VTPU_CTRL_ENABLE, 4);
    vtpu_core_doorbell(rig.core, 0, 1);
    rig_run(&rig, 8);
    rig_check(&rig);
    keep(&rig, result);
    result->undefined = run.undefined;
    if (result->gave_up || header[2] & 1) {
        rig_check_works(&rig);
    }
    rig_close(&rig);
}

static void compare(const Result *a, const Result *b)
{
    RIG_REQUIRE(a->state == b->state);
    RIG_REQUIRE(a->cause == b->cause);
    RIG_REQUIRE(a->access == b->access && a->fault_addr == b->fault_addr && a->pc == b->pc);
    RIG_REQUIRE(a->instructions == b->instructions);
    RIG_REQUIRE(!memcmp(a->s, b->s, sizeof(a->s)));
    RIG_REQUIRE(!memcmp(a->counter, b->counter, sizeof(a->counter)));
    RIG_REQUIRE(a->undefined == b->undefined && a->vmem_used == b->vmem_used);
    RIG_REQUIRE(!memcmp(a->vmem, b->vmem, VMEM_LOW + VMEM_HIGH));
    RIG_REQUIRE(!memcmp(a->hbm, b->hbm, HBM_KEPT));
    RIG_REQUIRE(!memcmp(a->system, b->system, DATA_BYTES));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const paths[] = { "avx2", "avx512", "amx" };
    static Result scalar, other;
    Input in = { data, size };

    if (size < HEADER + VTPU_INSTR_BYTES) {
        return -1;
    }
    run_on("scalar", NULL, in, &scalar);
    const char *path = paths[data[0] % 3];
    run_on(vtpu_kernels_get(path) ? path : NULL, data[3] & 1 ? "v5e" : NULL, in, &other);
    RIG_REQUIRE(scalar.gave_up == other.gave_up);
    if (!scalar.gave_up && !scalar.undefined) { /* work that was given up is done in part */
        compare(&scalar, &other);
    }
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    uint64_t random = seed;
    size_t most = (max_size - HEADER) / VTPU_INSTR_BYTES;
    size_t count = size < HEADER ? 0 : (size - HEADER) / VTPU_INSTR_BYTES;
    struct vtpu_instr *words, in;

    if (max_size < HEADER + VTPU_INSTR_BYTES) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    if (count == 0) {
        memset(data, 0, HEADER);
    }
    most = most < MOST_INSTRUCTIONS ? most : MOST_INSTRUCTIONS;
    count = count < most ? count : most;
    words = calloc(most + 1, sizeof(*words));
    RIG_REQUIRE(words);
    memcpy(words, data + HEADER, count * sizeof(*words));
    const EncodeSpace space = {
        globals, sizeof(globals) / sizeof(*globals), vmem, sizeof(vmem) / sizeof(*vmem),
        FIRST_RESULT, (uint32_t)(count + 2) * VTPU_INSTR_BYTES,
    };
    size_t at = count ? rig_random(&random) % count : 0;
    switch (count ? rig_random(&random) % 16 : 0) {
    case 0:
    case 1:
    case 2:
    case 3: /* one more */
        if (count < most) {
            memmove(words + at + 1, words + at, (count - at) * sizeof(*words));
            count++;
        }
        encode_instruction(&words[at], &space, &random);
        break;
    case 4: /* one less */
        if (count > 1) {
            memmove(words + at, words + at + 1, (count - at - 1) * sizeof(*words));
            count--;
        }
        break;
    case 5: /* another */
        encode_instruction(&words[at], &space, &random);
        break;
    case 6: /* the same again elsewhere */
        in = words[at];
        words[rig_random(&random) % count] = in;
        break;
    case 7:
        data[rig_random(&random) % 4] = (uint8_t)rig_random(&random);
        break;
    case 8: /* no rules */
        LLVMFuzzerMutate((uint8_t *)&words[at], sizeof(*words), sizeof(*words));
        break;
    default:
        encode_mutate(&words[at], &space, &random);
        break;
    }
    memcpy(data + HEADER, words, count * sizeof(*words));
    free(words);
    return HEADER + count * sizeof(*words);
}
