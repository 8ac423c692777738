/* SPDX-License-Identifier: MIT */
/*
 * Saved states that somebody has changed: refused with a reason, or harmless. One that
 * nobody has changed comes out as it went in.
 *
 * Input: how far two programs get before the state is saved, then changes of its bytes.
 */
#include <stdlib.h>
#include <string.h>

#include "rig.h"

#define CODE (8u << 20)
#define TABLES (12u << 20)
#define WORK (1u << 16)

static void put(uint8_t *at, uint64_t value, unsigned bytes)
{
    memcpy(at, &value, bytes);
}

/* A loop with work on two engines, counters and registers. */
static void write_program(Rig *rig)
{
    const struct vtpu_instr code[] = {
        { .opcode = VTPU_OP_DMA_LOAD, .signal = 1, .imm = { 0, 0, 2, 256, 256, 256 } },
        { .opcode = VTPU_OP_ADD, .reg = { 1, 1 }, .imm = { 0, 0, 1 } },
        { .opcode = VTPU_OP_V_ADD, .signal = 2, .wait = 1, .wait_imm = 1,
          .imm = { 4096, 0, 256, 2, 16, 256, 256, 256 } },
        { .opcode = VTPU_OP_DMA_STORE, .wait = 2, .wait_imm = 1,
          .imm = { 1u << 20, 4096, 2, 64, 256, 256 } },
        { .opcode = VTPU_OP_BLT, .reg = { 1 }, .imm = { 0, 20, 0 } },
        { .opcode = VTPU_OP_HALT },
    };

    memcpy(rig->hbm + CODE, code, sizeof(code));
    for (unsigned i = 0; i < 4096; i++) {
        rig->hbm[i] = (uint8_t)(i * 7);
    }
}

static void start(Rig *rig, unsigned q)
{
    uint8_t *entry = rig->system + q * 4096u;

    memset(entry, 0, VTPU_RING_ENTRY);
    entry[VTPU_RING_OP] = VTPU_CMD_RUN;
    put(entry + VTPU_CMD_RUN_CODE_VA, CODE, 8);
    put(entry + VTPU_CMD_RUN_CODE_BYTES, 6 * VTPU_INSTR_BYTES, 4);
    rig_write(rig, rig_queue_reg(q, VTPU_REG_Q_RING_BASE), RIG_BUS + q * 4096u, 8);
    rig_write(rig, rig_queue_reg(q, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_ENABLE, 4);
    vtpu_core_doorbell(rig->core, q, 1);
}

static uint8_t *save(Rig *rig, size_t *size)
{
    vtpu_core_quiesce(rig->core);
    uint8_t *state = vtpu_core_save(rig->core, size);
    RIG_REQUIRE(state);
    return state;
}

static bool may_block(const VtpuCore *core)
{
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        if (core->exec[q].hung) {
            return true;
        }
    }
    return core->inject[VTPU_INJECT_HANG] || core->inject[VTPU_INJECT_HBM_SLOW] != 1 ||
           core->inject[VTPU_INJECT_HANG_PC] != VTPU_PC_NONE;
}

/* Into a machine as new, with the memory of the old one. */
static void load(Rig *rig, const uint8_t *state, size_t size, bool changed)
{
    const char *error = NULL;
    size_t again;

    rig_close(rig);
    rig_open_core(rig, "scalar", 3);
    vtpu_core_quiesce(rig->core);
    bool ok = vtpu_core_load(rig->core, state, size, &error);
    RIG_REQUIRE(ok == (error == NULL) && (ok || changed));
    if (!changed) {
        uint8_t *same = save(rig, &again);
        RIG_REQUIRE(again == size && !memcmp(same, state, size));
        free(same);
    }
    rig_stop_clock(false);
    rig_check(rig);
    for (unsigned q = 0; !ok && q < VTPU_NUM_QUEUES; q++) {
        RIG_REQUIRE(rig_read(rig, rig_queue_reg(q, VTPU_REG_Q_QSTATUS), 4) ==
                    VTPU_QUEUE_STATE_DISABLED);
    }
    vtpu_core_resume(rig->core);
    if (!may_block(rig->core)) {
        rig_run(rig, 200);
        rig_check(rig);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint64_t rights = VTPU_PTE_READ | VTPU_PTE_WRITE | VTPU_PTE_EXEC;
    Tables tables = { .next = TABLES };
    Input in = { data, size };
    Rig rig = { .timing = size % 2 ? "v5e" : NULL };
    size_t state_size;

    rig_open(&rig, "scalar", 3, WORK);
    write_program(&rig);
    rig_map(&rig, &tables, 0, 0, CODE + VTPU_HUGE_PAGE_BYTES, VTPU_HUGE_PAGE_BYTES,
            rights | VTPU_PTE_HBM);
    rig_write(&rig, VTPU_REG_CTX_ROOT, tables.root | VTPU_CTX_VALID, 8);
    rig_write(&rig, VTPU_REG_CTRL, VTPU_CTRL_ENABLE, 4);
    start(&rig, 0);
    start(&rig, 1);
    for (unsigned steps = input_byte(&in) % 32; steps; steps--) {
        vtpu_core_step(rig.core);
    }
    rig_stop_clock(true); /* it is part of the state */
    uint8_t *state = save(&rig, &state_size);
    bool changed = in.left > 0;
    while (in.left) {
        uint64_t at = input_uint(&in, 3) % state_size;
        uint8_t kind = input_byte(&in), value = input_byte(&in);
        if (kind == 0xff) {
            state_size = at + 1; /* cut off */
        } else if (kind & 1) {
            state[at] = value;
        } else {
            state[at] += value % 16;
        }
    }
    load(&rig, state, state_size, changed);
    free(state);
    vtpu_core_inject(rig.core, VTPU_INJECT_HANG, 0);
    vtpu_core_inject(rig.core, VTPU_INJECT_HANG_PC, VTPU_PC_NONE);
    vtpu_core_inject(rig.core, VTPU_INJECT_HBM_SLOW, 1);
    rig_check_works(&rig);
    rig_close(&rig);
    return 0;
}
