/* SPDX-License-Identifier: MIT */
/*
 * Decoding: every field that an operation does not name must be zero, every
 * other one in its range. A word that breaks the rules faults when the
 * sequencer reaches it, not before, so data may follow a program's code.
 * Decoded programs are cached by their bytes. Command thread only, but for
 * vtpu_program_put().
 */
#include <stdlib.h>
#include <string.h>

#include "machine.h"

/* Fields that must be zero: ILLEGAL_INSTRUCTION. */
static bool has_stray_bits(const struct vtpu_instr *in, const struct vtpu_op_info *info)
{
    if ((in->flags & ~info->flags_mask) || in->fmt_b || (in->aux && !info->has_aux) ||
        (in->imm64 & ~info->imm64_mask) || (in->fmt_a && !info->fmt_a_mask) ||
        (in->mode && info->num_modes <= 1) ||
        (!in->wait && (in->wait_reg || in->wait_imm))) {
        return true;
    }
    for (unsigned i = info->num_operands; i < 8; i++) {
        if (in->reg[i] || in->imm[i]) {
            return true;
        }
    }
    return false;
}

/* Fields out of their range: BAD_OPERAND. */
static bool has_bad_field(const struct vtpu_instr *in, const struct vtpu_op_info *info)
{
    if (in->signal >= VTPU_NUM_COUNTERS || in->wait >= VTPU_NUM_COUNTERS ||
        in->wait_reg >= VTPU_NUM_SREGS ||
        (info->num_modes > 1 && in->mode >= info->num_modes) ||
        (info->fmt_a_mask && (in->fmt_a >= 32 || !(info->fmt_a_mask >> in->fmt_a & 1)))) {
        return true;
    }
    for (unsigned i = 0; i < info->num_operands; i++) {
        if (in->reg[i] >= VTPU_NUM_SREGS) {
            return true;
        }
        if (info->kind[i] == VTPU_OPERAND_RD && (in->reg[i] == 0 || in->imm[i])) {
            return true;
        }
    }
    return false;
}

static void decode(const uint8_t *bytes, VtpuDecoded *out)
{
    memcpy(&out->in, bytes, sizeof(out->in));
    out->info = &vtpu_op_table[out->in.opcode];
    out->cause = !out->info->name || has_stray_bits(&out->in, out->info)
                     ? VTPU_FAULT_ILLEGAL_INSTRUCTION
                 : has_bad_field(&out->in, out->info) ? VTPU_FAULT_BAD_OPERAND
                                                      : VTPU_FAULT_NONE;
}

void vtpu_program_put(VtpuProgram *program)
{
    if (program && atomic_fetch_sub(&program->references, 1) == 1) {
        free(program->bytes);
        free(program->code);
        free(program);
    }
}

static VtpuProgram *program_new(const uint8_t *bytes, uint32_t size)
{
    uint32_t count = size / VTPU_INSTR_BYTES;
    VtpuProgram *program = calloc(1, sizeof(*program));

    if (!program) {
        return NULL;
    }
    atomic_init(&program->references, 1);
    program->size = size;
    program->bytes = malloc(size);
    program->code = calloc(count, sizeof(*program->code));
    if (!program->bytes || !program->code) {
        vtpu_program_put(program);
        return NULL;
    }
    memcpy(program->bytes, bytes, size);
    for (uint32_t i = 0; i < count; i++) {
        decode(program->bytes + (size_t)i * VTPU_INSTR_BYTES, &program->code[i]);
    }
    return program;
}

VtpuProgram *vtpu_program_get(VtpuCore *core, const uint8_t *bytes, uint32_t size)
{
    VtpuProgram **slot = &core->program[0], *program;

    _Static_assert(sizeof(struct vtpu_instr) == VTPU_INSTR_BYTES, "instruction size");
    for (unsigned i = 0; i < VTPU_PROGRAM_CACHE; i++) {
        program = core->program[i];
        if (program && program->size == size && !memcmp(program->bytes, bytes, size)) {
            slot = &core->program[i];
            break;
        }
        if (!program || (*slot && program->used < (*slot)->used)) {
            slot = &core->program[i];
        }
        program = NULL;
    }
    if (!program) {
        program = program_new(bytes, size);
        if (!program) {
            return NULL;
        }
        vtpu_program_put(*slot);
        *slot = program;
    }
    program->used = ++core->program_clock;
    atomic_fetch_add(&program->references, 1);
    return program;
}

void vtpu_program_free_all(VtpuCore *core)
{
    for (unsigned i = 0; i < VTPU_PROGRAM_CACHE; i++) {
        vtpu_program_put(core->program[i]);
        core->program[i] = NULL;
    }
}
