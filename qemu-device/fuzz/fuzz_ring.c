/* SPDX-License-Identifier: MIT */
/*
 * Rings and commands, with entries, code and arguments that change as soon as the
 * machine has read them, accesses that fail, and other processors at work in the
 * middle of a command. An entry must be read once and used as it was read.
 */
#include <string.h>

#include "rig.h"

#define QUEUES 4
#define RINGS 0x200000000ull /* on the bus, reachable by no page table */
#define RING_BYTES (VTPU_RING_ENTRY << 4)
#define FENCES 0x300000000ull /* likewise; 8 bytes a queue */
#define TABLES (14u << 20)
#define VA_SYSTEM 0x40000000u
#define VA_CODE 0x50000000u /* system memory, reached through the bus hook */
#define CODE 0x400000000ull
#define WINDOW (64u << 10)
#define MOST_DEPTH 2

typedef struct Ring {
    Input in;
    uint8_t entry[QUEUES][RING_BYTES];
    uint8_t code[WINDOW];
    uint32_t tail[QUEUES];
    /* What the machine read last, and whether it has yet to be used. */
    uint8_t seen[QUEUES][VTPU_RING_ENTRY];
    bool read[QUEUES];
    uint32_t at_head[QUEUES];
    unsigned depth, fail_in;
} Ring;

static void do_one(Rig *rig, bool outermost);

static uint32_t head_of(Rig *rig, unsigned q)
{
    return rig->core->queue[q].head;
}

static bool ring_read(Rig *rig, Ring *ring, uint64_t at, void *buf, size_t len)
{
    unsigned q = (unsigned)(at / RING_BYTES), slot = at % RING_BYTES / VTPU_RING_ENTRY;
    const VtpuQueue *queue = &rig->core->queue[q];

    RIG_REQUIRE(q < QUEUES && len == VTPU_RING_ENTRY && at % VTPU_RING_ENTRY == 0);
    RIG_REQUIRE(rig->core->running == (int)q && queue->head != queue->tail);
    RIG_REQUIRE(slot == (queue->head & ((1u << queue->ring_log2) - 1)));
    RIG_REQUIRE(!ring->read[q] || ring->at_head[q] != queue->head); /* once */
    memcpy(buf, ring->entry[q] + at % RING_BYTES, len);
    memcpy(ring->seen[q], buf, len);
    ring->read[q] = true;
    ring->at_head[q] = queue->head;
    /* The guest changes its mind. */
    for (unsigned i = 0; i < VTPU_RING_ENTRY; i++) {
        ring->entry[q][at % RING_BYTES + i] ^= 0x5a;
    }
    return true;
}

static bool fence_write(Rig *rig, Ring *ring, uint64_t at, const void *buf, size_t len)
{
    unsigned q = (unsigned)(at / 8);

    RIG_REQUIRE(q < QUEUES && at % 8 == 0 && len == 8 && rig->core->running == (int)q);
    RIG_REQUIRE(ring->read[q] && ring->seen[q][VTPU_RING_FLAGS] & VTPU_RING_FLAG_FENCE);
    RIG_REQUIRE(!memcmp(buf, ring->seen[q] + VTPU_RING_FENCE, 8));
    RIG_REQUIRE(head_of(rig, q) == ring->at_head[q] + 1); /* advanced before */
    return true;
}

static bool bus(Rig *rig, bool write, uint64_t addr, void *buf, size_t len)
{
    Ring *ring = rig->target;

    if (ring->fail_in && --ring->fail_in == 0) {
        return false;
    }
    if (addr - RINGS < sizeof(ring->entry)) {
        RIG_REQUIRE(!write);
        return ring_read(rig, ring, addr - RINGS, buf, len);
    }
    if (addr - FENCES < 8 * QUEUES) {
        RIG_REQUIRE(write);
        return fence_write(rig, ring, addr - FENCES, buf, len);
    }
    if (addr - CODE < WINDOW && len <= WINDOW - (addr - CODE)) {
        uint8_t *at = ring->code + (addr - CODE);
        if (write) {
            memcpy(at, buf, len);
            return true;
        }
        memcpy(buf, at, len);
        for (size_t i = 0; i < len; i++) {
            at[i] ^= 0xff;
        }
        return true;
    }
    return false;
}

static bool fails(Rig *rig)
{
    Ring *ring = rig->target;

    return ring->fail_in && --ring->fail_in == 0;
}

static void interlude(Rig *rig)
{
    Ring *ring = rig->target;

    if (ring->depth < MOST_DEPTH && input_byte(&ring->in) % 4 == 3) {
        ring->depth++;
        do_one(rig, false);
        ring->depth--;
    }
}

static uint64_t pick_address(Input *in)
{
    static const uint64_t places[] = {
        0, 4096, 1u << 20, (2u << 20) - 64, (4u << 20) - 64, VA_SYSTEM, VA_SYSTEM + WINDOW - 64,
        VA_CODE, VA_CODE + WINDOW - 64, VA_CODE - 64, 1ull << VTPU_VA_BITS,
        (1ull << VTPU_VA_BITS) - 64, -64ull, 8u << 20, 0x60000000, VA_SYSTEM + 4096,
    };
    uint8_t kind = input_byte(in);
    uint64_t base = places[kind % (sizeof(places) / sizeof(*places))];

    return kind & 0x80 ? base + input_byte(in) : base + (kind >> 4) * 64;
}

static uint64_t pick_bytes(Input *in)
{
    static const uint64_t sizes[] = {
        0, 4, 8, 64, 4096, 65536, (1u << 20) + 4, (4u << 20) + 8, 1ull << 32, 1ull << 48, -4ull,
        -1ull, 60, 4092, 4100, 2u << 20,
    };
    uint8_t kind = input_byte(in);

    return sizes[kind % (sizeof(sizes) / sizeof(*sizes))] + (kind & 0x80 ? kind >> 4 & 7 : 0);
}

static void put(uint8_t *entry, unsigned at, uint64_t value, unsigned bytes)
{
    memcpy(entry + at, &value, bytes);
}

static void write_entry(Ring *ring, unsigned q)
{
    Input *in = &ring->in;
    uint8_t *entry = ring->entry[q] + (ring->tail[q] % 16) * VTPU_RING_ENTRY;
    uint8_t kind = input_byte(in);

    memset(entry, 0, VTPU_RING_ENTRY);
    entry[VTPU_RING_OP] = kind % 8;
    entry[VTPU_RING_FLAGS] = kind >> 3 & 3;
    put(entry, VTPU_RING_FENCE, ring->tail[q] * 0x0101010101ull, 8);
    switch (kind % 8) {
    case 0: /* anything */
        input_bytes(in, entry, VTPU_RING_ENTRY);
        break;
    case VTPU_CMD_RUN:
        put(entry, VTPU_CMD_RUN_CODE_VA, pick_address(in), 8);
        put(entry, VTPU_CMD_RUN_CODE_BYTES, 64ull * (1 + input_byte(in) % 20), 4);
        put(entry, VTPU_CMD_RUN_ENTRY, 64ull * (input_byte(in) % 4), 4);
        put(entry, VTPU_CMD_RUN_ARGS_VA, pick_address(in) & ~7ull, 8);
        put(entry, VTPU_CMD_RUN_NUM_ARGS, input_byte(in) % 18, 4);
        if (kind & 0x40) {
            put(entry, VTPU_CMD_RUN_PROFILE_VA, pick_address(in) & ~7ull, 8);
            put(entry, VTPU_CMD_RUN_PROFILE_BYTES, input_uint(in, 2), 4);
        }
        break;
    case VTPU_CMD_COPY:
        put(entry, VTPU_CMD_COPY_DST, pick_address(in), 8);
        put(entry, VTPU_CMD_COPY_SRC, pick_address(in), 8);
        put(entry, VTPU_CMD_COPY_BYTES, pick_bytes(in), 8);
        break;
    case VTPU_CMD_FILL:
        put(entry, VTPU_CMD_FILL_DST, pick_address(in), 8);
        put(entry, VTPU_CMD_FILL_BYTES, pick_bytes(in), 8);
        put(entry, VTPU_CMD_FILL_PATTERN, input_byte(in), 4);
        break;
    case VTPU_CMD_WAIT:
        put(entry, VTPU_CMD_WAIT_ADDR, pick_address(in) & ~7ull, 8);
        put(entry, VTPU_CMD_WAIT_VALUE, input_byte(in) & 3, 8);
        break;
    case VTPU_CMD_SIGNAL:
        put(entry, VTPU_CMD_SIGNAL_VALUE, input_byte(in), 8); /* and an address, as next */
        /* fall through */
    case VTPU_CMD_TIMESTAMP:
        put(entry, VTPU_CMD_TIMESTAMP_ADDR, pick_address(in) & ~7ull, 8);
        break;
    default:
        break;
    }
    if (kind & 0x80) { /* a bit that may be reserved */
        uint8_t bit = input_byte(in);
        entry[bit >> 2] ^= (uint8_t)(1u << (bit & 3) * 2);
    }
}

/* Scalar work, memory, jumps: programs that go on for some steps. */
static void write_code(Rig *rig, Ring *ring)
{
    static const uint8_t ops[] = {
        VTPU_OP_HALT, VTPU_OP_NOP, VTPU_OP_LI, VTPU_OP_ADD, VTPU_OP_LD, VTPU_OP_ST, VTPU_OP_JMP,
        VTPU_OP_BNE, VTPU_OP_DMA_LOAD, VTPU_OP_DMA_STORE, VTPU_OP_SYNC, VTPU_OP_TRAP,
        VTPU_OP_DMA_LOAD, VTPU_OP_DMA_STORE, VTPU_OP_V_ADD, VTPU_OP_LDV,
    };
    Input *in = &ring->in;
    uint8_t where = input_byte(in), what = input_byte(in);
    struct vtpu_instr word = { .opcode = ops[what % 16] };
    const struct vtpu_op_info *info = &vtpu_op_table[word.opcode];

    for (unsigned i = 0; i < info->num_operands; i++) {
        switch (info->kind[i]) {
        case VTPU_OPERAND_RD:
            word.reg[i] = 1 + input_byte(in) % 4;
            break;
        case VTPU_OPERAND_G:
            word.imm[i] = (uint32_t)pick_address(in);
            break;
        case VTPU_OPERAND_V:
        case VTPU_OPERAND_V4:
            word.imm[i] = 64u * input_byte(in);
            break;
        case VTPU_OPERAND_PC:
            word.imm[i] = 64u * (input_byte(in) % 20);
            break;
        default:
            word.imm[i] = 4u * (input_byte(in) % 65);
            break;
        }
    }
    memcpy((where & 0x80 ? ring->code : rig->hbm) + (where & 15) * 64, &word, sizeof(word));
}

static void configure(Rig *rig, Ring *ring, unsigned q, bool wild)
{
    Input *in = &ring->in;
    uint8_t choice = input_byte(in);

    rig_write(rig, rig_queue_reg(q, VTPU_REG_Q_RING_BASE), RINGS + q * RING_BYTES, 8);
    rig_write(rig, rig_queue_reg(q, VTPU_REG_Q_FENCE_ADDR), FENCES + q * 8, 8);
    rig_write(rig, rig_queue_reg(q, VTPU_REG_Q_RING_LOG2), 2 + choice % 3, 4);
    rig_write(rig, rig_queue_reg(q, VTPU_REG_Q_CONTEXT), choice >> 2 & 3, 4);
    rig_write(rig, rig_queue_reg(q, VTPU_REG_Q_PRIORITY), choice >> 4 & 3, 4);
    rig_write(rig, rig_queue_reg(q, VTPU_REG_Q_VECTOR), wild ? input_byte(in) : q, 4);
    rig_write(rig, rig_queue_reg(q, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_ENABLE, 4);
}

/* Entries that were read belong to a life of the queue that is over. */
static void forget(Ring *ring, unsigned q)
{
    ring->read[q] = false;
    ring->tail[q] = 0;
}

static void reset_queue(Rig *rig, Ring *ring, unsigned q)
{
    rig_write(rig, rig_queue_reg(q, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_RESET, 4);
    if (rig->core->queue[q].state == VTPU_QUEUE_STATE_DISABLED) {
        forget(ring, q);
    }
}

static void do_one(Rig *rig, bool outermost)
{
    Ring *ring = rig->target;
    uint8_t kind = input_byte(&ring->in);
    unsigned q = kind >> 4 & 3;

    switch (kind & 15) {
    case 0:
    case 1:
    case 2:
        write_entry(ring, q);
        ring->tail[q]++;
        if (kind & 0x80) {
            vtpu_core_doorbell(rig->core, q, ring->tail[q]);
        }
        break;
    case 3:
        vtpu_core_doorbell(rig->core, q, ring->tail[q] + (kind & 0x80 ? input_byte(&ring->in) : 0));
        break;
    case 4:
    case 5:
        write_code(rig, ring);
        break;
    case 6:
        ring->fail_in = input_byte(&ring->in) & 15;
        break;
    case 7:
        reset_queue(rig, ring, q);
        break;
    case 8:
        if (rig->core->queue[q].state == VTPU_QUEUE_STATE_DISABLED) {
            forget(ring, q);
            configure(rig, ring, q, kind & 0x80);
        }
        break;
    case 9:
        rig_write(rig, VTPU_REG_TLB_INVALIDATE, input_byte(&ring->in) & 3, 4);
        break;
    case 10:
        rig_write(rig, VTPU_REG_TEST_IRQ, input_byte(&ring->in) & 63, 4);
        break;
    case 11:
        rig_write(rig, VTPU_REG_CTRL, kind & 0x80 ? 0 : VTPU_CTRL_ENABLE, 4);
        break;
    case 12: {
        uint64_t word = input_byte(&ring->in);
        memcpy((kind & 0x80 ? rig->hbm : rig->system) + 8 * (input_byte(&ring->in) & 7), &word, 8);
        break;
    }
    default:
        if (outermost) {
            rig_run(rig, 1 + (kind >> 4));
            rig_check(rig);
        }
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint64_t all = VTPU_PTE_READ | VTPU_PTE_WRITE | VTPU_PTE_EXEC;
    static Ring ring;
    Rig rig = { .target = &ring, .bus = bus, .fails = fails, .interlude = interlude };
    Tables full = { .next = TABLES }, read_only = { .next = TABLES + (1u << 20) };

    memset(&ring, 0, sizeof(ring));
    ring.in = (Input) { data, size };
    rig.timing = size % 8 < 4 ? "v5e" : NULL;
    rig_open(&rig, "scalar", size % 4, 1u << 20);
    rig_map(&rig, &full, 0, 0, 4u << 20, VTPU_HUGE_PAGE_BYTES, all | VTPU_PTE_HBM);
    rig_map(&rig, &full, VA_SYSTEM, RIG_BUS, WINDOW, VTPU_PAGE_BYTES, all);
    rig_map(&rig, &full, VA_CODE, CODE, WINDOW, VTPU_PAGE_BYTES, all);
    rig_map(&rig, &full, 0x60000000, 0x700000000ull, WINDOW, VTPU_PAGE_BYTES, all);
    rig_map(&rig, &read_only, 0, 0, 4u << 20, VTPU_HUGE_PAGE_BYTES, VTPU_PTE_READ | VTPU_PTE_HBM);
    rig_map(&rig, &read_only, VA_CODE, CODE, WINDOW, VTPU_PAGE_BYTES, VTPU_PTE_EXEC);
    rig_write(&rig, VTPU_REG_CTX_ROOT, full.root | VTPU_CTX_VALID, 8);
    rig_write(&rig, VTPU_REG_CTX_ROOT + 8, read_only.root | VTPU_CTX_VALID, 8);
    rig_write(&rig, VTPU_REG_CTX_ROOT + 16, full.root | VTPU_CTX_VALID, 8);
    for (unsigned q = 0; q < QUEUES; q++) {
        configure(&rig, &ring, q, false);
    }
    rig_write(&rig, VTPU_REG_CTRL, VTPU_CTRL_ENABLE, 4);
    while (ring.in.left && !rig.gave_up) {
        do_one(&rig, true);
    }
    rig_run(&rig, 100);
    rig_check(&rig);
    rig_check_works(&rig);
    rig_close(&rig);
    return 0;
}
