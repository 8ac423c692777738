/* SPDX-License-Identifier: MIT */
/*
 * What the sequencer's own instructions do. Command thread only.
 */
#include <string.h>

#include "machine.h"

static bool load(VtpuExec *x, const VtpuDecoded *d, uint64_t addr)
{
    unsigned size = d->in.mode == VTPU_LD_MODE_U64 ? 8 : 4;
    uint64_t word = 0;

    if (addr & (size - 1)) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_READ, addr);
    }
    if (!vtpu_mem_read(x, addr, &word, size, VTPU_ACCESS_READ)) {
        return false;
    }
    x->s[d->in.reg[VTPU_LD_RD]] = word;
    return true;
}

static bool store(VtpuExec *x, const VtpuDecoded *d, uint64_t addr, uint64_t value)
{
    unsigned size = d->in.mode == VTPU_ST_MODE_U64 ? 8 : 4;

    if (addr & (size - 1)) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_WRITE, addr);
    }
    bool ok = vtpu_mem_write(x, addr, &value, size);
    vtpu_dirty_flush(x);
    return ok;
}

static bool load_vmem(VtpuExec *x, const VtpuDecoded *d, uint64_t addr)
{
    const uint8_t *host = vtpu_vmem_read(x, addr, 1, 4, 0);
    uint32_t word;

    if (!host) {
        return false;
    }
    memcpy(&word, host, 4);
    x->s[d->in.reg[VTPU_LDV_RD]] = word;
    return true;
}

static bool jump(VtpuExec *x, uint64_t target)
{
    if (target >= x->program->size || target % VTPU_INSTR_BYTES) {
        return vtpu_fault(x, VTPU_FAULT_PC_RANGE, VTPU_ACCESS_EXEC, target);
    }
    x->pc = (uint32_t)target;
    return true;
}

bool vtpu_scalar_execute(VtpuExec *x, const VtpuDecoded *d, const uint64_t v[8], bool *over)
{
    uint64_t *rd = &x->s[d->in.reg[0]]; /* written only by operations that name it */
    uint64_t a = v[1], b = v[2];
    bool ok = true, taken = false;
    uint64_t target = 0;

    *over = true;
    switch (d->in.opcode) {
    case VTPU_OP_TRAP:
        return vtpu_fault(x, VTPU_FAULT_TRAP, VTPU_ACCESS_NONE, v[0]);
    case VTPU_OP_HALT:
    case VTPU_OP_NOP:
    case VTPU_OP_SYNC:
        break;
    case VTPU_OP_LI:
        *rd = d->in.imm64;
        break;
    case VTPU_OP_ADD:
        *rd = a + b;
        break;
    case VTPU_OP_SUB:
        *rd = a - b;
        break;
    case VTPU_OP_MUL:
        *rd = a * b;
        break;
    case VTPU_OP_SHL:
        *rd = a << (b & 63);
        break;
    case VTPU_OP_SHR:
        *rd = a >> (b & 63);
        break;
    case VTPU_OP_AND:
        *rd = a & b;
        break;
    case VTPU_OP_MIN:
        *rd = a < b ? a : b;
        break;
    case VTPU_OP_MAX:
        *rd = a > b ? a : b;
        break;
    case VTPU_OP_LD:
        ok = load(x, d, v[VTPU_LD_ADDR]);
        break;
    case VTPU_OP_ST:
        ok = store(x, d, v[VTPU_ST_ADDR], v[VTPU_ST_VALUE]);
        break;
    case VTPU_OP_LDV:
        ok = load_vmem(x, d, v[VTPU_LDV_ADDR]);
        break;
    case VTPU_OP_LINK_WAIT:
        ok = vtpu_link_wait(x, v, over);
        break;
    case VTPU_OP_LINK_LD:
        ok = vtpu_link_counter(x, v[VTPU_LINK_LD_COUNTER], rd);
        break;
    case VTPU_OP_JMP:
        taken = true;
        target = v[VTPU_JMP_TARGET];
        break;
    case VTPU_OP_BEQ:
        taken = v[VTPU_BEQ_A] == v[VTPU_BEQ_B];
        target = v[VTPU_BEQ_TARGET];
        break;
    case VTPU_OP_BNE:
        taken = v[VTPU_BNE_A] != v[VTPU_BNE_B];
        target = v[VTPU_BNE_TARGET];
        break;
    case VTPU_OP_BLT:
        taken = v[VTPU_BLT_A] < v[VTPU_BLT_B];
        target = v[VTPU_BLT_TARGET];
        break;
    default:
        return vtpu_fault(x, VTPU_FAULT_ILLEGAL_INSTRUCTION, VTPU_ACCESS_EXEC, x->pc);
    }
    if (!ok || (taken && !jump(x, target))) {
        return false;
    }
    if (!taken && *over && d->in.opcode != VTPU_OP_HALT) {
        x->pc += VTPU_INSTR_BYTES;
    }
    return true;
}
