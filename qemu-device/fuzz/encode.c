/* SPDX-License-Identifier: MIT */
#include "encode.h"

#include <string.h>

#include "rig.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define CHANCE(n) (rig_random(random) % (n) == 0)

static uint32_t pick(const uint32_t *values, size_t count, uint64_t *random)
{
    return values[rig_random(random) % count];
}

static const uint32_t edges[] = {
    0, 1, 63, 64, 65, 4095, 4096, 65535, 65536, (1u << 20) - 16, 1u << 20, (1u << 20) + 1,
    (1u << 21) - 1, 1u << 24, (1u << 25) - 64, 1u << 25, (1u << 25) + 64, (1u << 31) - 4,
    1u << 31, UINT32_MAX - 63, UINT32_MAX,
};

static uint32_t count(uint64_t *random)
{
    static const uint32_t small[] = { 0, 1, 1, 2, 3, 4, 5, 7, 8, 15, 16, 16, 17, 20, 31, 32, 32,
                                      33, 48, 64, 64, 65, 80, 96, 128, 192, 256, 512 };
    return CHANCE(24) ? pick(edges, COUNT(edges), random) : pick(small, COUNT(small), random);
}

static uint32_t stride(uint64_t *random)
{
    static const uint32_t small[] = { 0, 4, 60, 64, 68, 128, 192, 256, 512, 768, 1024, 2048,
                                      4096, 4100, 8192 };
    return CHANCE(24) ? pick(edges, COUNT(edges), random) : pick(small, COUNT(small), random);
}

static uint32_t vmem_base(const EncodeSpace *space, bool result, uint64_t *random)
{
    unsigned first = result && !CHANCE(4) ? space->first_result : 0;

    return pick(space->vmem + first, space->num_vmem - first, random);
}

static uint32_t operand(unsigned kind, bool result, const EncodeSpace *space, uint64_t *random)
{
    uint32_t value;

    switch (kind) {
    case VTPU_OPERAND_G:
        value = (uint32_t)space->global[rig_random(random) % space->num_global];
        return CHANCE(4) ? value + rig_random(random) % 4096 : value + rig_random(random) % 8 * 64;
    case VTPU_OPERAND_V:
        if (CHANCE(8)) { /* so that common rows end at the end, or a little beyond */
            return VTPU_VMEM_BYTES - (64u << rig_random(random) % 6) + (CHANCE(3) ? 64 : 0);
        }
        value = vmem_base(space, result, random) + rig_random(random) % 16 * 64;
        return CHANCE(32) ? value + rig_random(random) % 64 : value;
    case VTPU_OPERAND_V4:
        value = vmem_base(space, result, random) + rig_random(random) % 64 * 4;
        return CHANCE(32) ? value + rig_random(random) % 4 : value;
    case VTPU_OPERAND_N:
        return count(random);
    case VTPU_OPERAND_STRIDE:
        return stride(random);
    case VTPU_OPERAND_PC:
        return rig_random(random) % (space->code_bytes / VTPU_INSTR_BYTES + 2) * VTPU_INSTR_BYTES;
    case VTPU_OPERAND_RD:
        return 0;
    default:
        return CHANCE(3) ? pick(edges, COUNT(edges), random) : rig_random(random) % 64;
    }
}

static void set_operand(struct vtpu_instr *in, unsigned i, const EncodeSpace *space,
                        uint64_t *random)
{
    unsigned kind = vtpu_op_table[in->opcode].kind[i];

    in->imm[i] = operand(kind, i == 0, space, random);
    in->reg[i] = 0;
    if (kind == VTPU_OPERAND_RD) {
        in->reg[i] = 1 + rig_random(random) % (CHANCE(8) ? VTPU_NUM_SREGS - 1 : 7);
    } else if (CHANCE(kind == VTPU_OPERAND_VAL ? 2 : 12)) {
        /* A register instead, or as an index: sums that wrap, results of scalar work. */
        in->reg[i] = rig_random(random) % (CHANCE(8) ? VTPU_NUM_SREGS : 24);
        in->imm[i] = CHANCE(2) ? 0 : in->imm[i];
    }
}

/* A legal format, or none. */
static uint8_t format(uint32_t mask, uint64_t *random)
{
    unsigned nth = mask ? rig_random(random) % (unsigned)__builtin_popcount(mask) : 0;

    for (; nth; nth--) {
        mask &= mask - 1;
    }
    return mask ? (uint8_t)__builtin_ctz(mask) : 0;
}

/* Its fields are not in the table: bytes that suit shapes, or any. */
static uint64_t immediate(uint64_t mask, uint64_t *random)
{
    static const uint8_t small[] = { 0, 0, 1, 1, 2, 3, 4, 8, 16, 32, 48, 64, 128, 255 };
    uint64_t value = 0;

    for (unsigned i = 0; i < 8; i++) {
        value |= (uint64_t)small[rig_random(random) % COUNT(small)] << (8 * i);
    }
    /* Attention's shape: halves above bytes. */
    return (CHANCE(2) ? value & 0x00ff00ff00ffffff : value) & mask;
}

static uint32_t f32_bits(uint64_t *random)
{
    static const float values[] = { 1.0f, 0.125f, 0.0883883f, 1e-5f, 0.0f, -0.0f, -1.0f, 3e38f,
                                    1e-40f, 1e30f };
    static const uint32_t strange[] = { 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345, 0x7f800001 };
    uint32_t bits;

    if (CHANCE(16)) {
        return pick(strange, COUNT(strange), random);
    }
    memcpy(&bits, &values[rig_random(random) % COUNT(values)], sizeof(bits));
    return bits;
}

static void set_order(struct vtpu_instr *in, uint64_t *random)
{
    in->signal = CHANCE(4) ? 1 + rig_random(random) % 3 : 0;
    in->wait = CHANCE(10) ? 1 + rig_random(random) % 3 : 0;
    in->wait_reg = in->wait && CHANCE(8) ? rig_random(random) % VTPU_NUM_SREGS : 0;
    in->wait_imm = in->wait ? rig_random(random) % 3 : 0;
}

static uint8_t opcode(uint64_t *random)
{
    for (;;) {
        uint8_t op = (uint8_t)rig_random(random);
        /* Work on the engines matters most. */
        if (vtpu_op_table[op].name && op != VTPU_OP_HALT && op != VTPU_OP_TRAP &&
            (vtpu_op_table[op].engine != VTPU_ENGINE_SEQ || CHANCE(4))) {
            return op;
        }
    }
}

void encode_instruction(struct vtpu_instr *in, const EncodeSpace *space, uint64_t *random)
{
    memset(in, 0, sizeof(*in));
    in->opcode = opcode(random);
    const struct vtpu_op_info *info = &vtpu_op_table[in->opcode];
    for (unsigned i = 0; i < info->num_operands; i++) {
        set_operand(in, i, space, random);
    }
    in->flags = (uint8_t)(rig_random(random) & info->flags_mask);
    in->mode = info->num_modes ? (uint8_t)(rig_random(random) % info->num_modes) : 0;
    in->fmt_a = format(info->fmt_a_mask, random);
    in->aux = info->has_aux ? f32_bits(random) : 0;
    in->imm64 = immediate(info->imm64_mask, random);
    set_order(in, random);
}

void encode_mutate(struct vtpu_instr *in, const EncodeSpace *space, uint64_t *random)
{
    const struct vtpu_op_info *info = &vtpu_op_table[in->opcode];
    uint8_t bytes[sizeof(*in)];

    if (!info->name) {
        encode_instruction(in, space, random);
        return;
    }
    switch (rig_random(random) % 10) {
    case 0:
        set_order(in, random);
        break;
    case 1:
        in->flags = (uint8_t)(rig_random(random) & info->flags_mask);
        in->mode = info->num_modes ? (uint8_t)(rig_random(random) % info->num_modes) : 0;
        break;
    case 2:
        in->fmt_a = format(info->fmt_a_mask, random);
        break;
    case 3:
        in->aux = info->has_aux ? f32_bits(random) : 0;
        in->imm64 = immediate(info->imm64_mask, random);
        break;
    case 4:
        if (CHANCE(8)) { /* something illegal */
            memcpy(bytes, in, sizeof(bytes));
            bytes[rig_random(random) % sizeof(bytes)] ^= (uint8_t)(1u << rig_random(random) % 8);
            memcpy(in, bytes, sizeof(bytes));
        }
        break;
    default:
        if (info->num_operands) {
            set_operand(in, rig_random(random) % info->num_operands, space, random);
        }
        break;
    }
}
