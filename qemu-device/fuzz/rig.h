/* SPDX-License-Identifier: MIT */
/*
 * What the fuzz targets share: a stepped machine, the memory around it, a clock
 * that counts looks at it, and a reader of inputs. One machine at a time and one
 * thread, so that an input does the same whenever it is replayed.
 *
 * What other processors would do while the machine works, a target does in the
 * machine's callbacks: they are the points at which it can be interrupted.
 */
#ifndef VTPU_FUZZ_RIG_H
#define VTPU_FUZZ_RIG_H

#include "machine.h"

#define RIG_HBM_BYTES (16u << 20)
#define RIG_BUS 0x100000000ull /* system memory's bus address */
#define RIG_BUS_BYTES (1u << 20)

/* An input, read from its start; zeros follow its end. */
typedef struct Input {
    const uint8_t *at;
    size_t left;
} Input;

uint64_t input_uint(Input *in, unsigned bytes);
static inline uint8_t input_byte(Input *in)
{
    return (uint8_t)input_uint(in, 1);
}
void input_bytes(Input *in, void *to, size_t len);

typedef struct Rig Rig;
struct Rig {
    VtpuCore *core;
    const char *timing; /* a model's name, or NULL; set before rig_open() */
    bool check_races;   /* likewise */
    VtpuFabric *fabric; /* likewise: the machine is its chip 0 */
    uint8_t *hbm;    /* RIG_HBM_BYTES between pages that nobody may touch */
    uint8_t *system; /* RIG_BUS_BYTES likewise */
    void *target;    /* the target's own */
    /* Bus accesses outside of system memory; NULL: they fail. */
    bool (*bus)(Rig *rig, bool write, uint64_t addr, void *buf, size_t len);
    /* At the end of every access to memory and of every interrupt. May be NULL. */
    void (*interlude)(Rig *rig);
    void (*dirty)(Rig *rig, uint64_t offset, uint64_t len); /* may be NULL */
    /* With the command as it is before the instruction. May be NULL. */
    void (*before_instruction)(Rig *rig, VtpuExec *x, uint8_t opcode);
    bool (*fails)(Rig *rig); /* whether an access to system memory fails; may be NULL */

    /* A program may run for ever: after so much work the device is reset. */
    uint64_t work_left;
    bool gave_up; /* since rig_open() */
    uint64_t irqs[VTPU_NUM_MSIX];
};

/* Memory is zero, the work left is `work`; isa NULL: the best. The machine is new. */
void rig_open(Rig *rig, const char *isa, uint64_t schedule_seed, uint64_t work);
/* Another machine, after rig_close(), in memory as it is. */
void rig_open_core(Rig *rig, const char *isa, uint64_t schedule_seed);
void rig_close(Rig *rig);
/* From now on time passes only as the machine waits, or as before. */
void rig_stop_clock(bool stop);
/* Steps until there is nothing to do, waiting WAITs included, or `most` steps. */
void rig_run(Rig *rig, unsigned most);
/* Aborts when the state of the machine contradicts itself. Not from callbacks. */
void rig_check(Rig *rig);
/* Aborts when a reset machine does not serve a queue: whatever went before. */
void rig_check_works(Rig *rig);
/* Fails the run: the finding's place is the caller's. */
#define RIG_REQUIRE(condition) \
    ((condition) ? (void)0 : rig_fail(#condition, __FILE__, __LINE__))
_Noreturn void rig_fail(const char *what, const char *file, int line);

static inline void rig_write(Rig *rig, uint64_t reg, uint64_t value, unsigned size)
{
    vtpu_core_mmio_write(rig->core, reg, value, size);
}
static inline uint64_t rig_queue_reg(unsigned q, uint64_t reg)
{
    return reg + (uint64_t)q * VTPU_QUEUE_STRIDE;
}
static inline uint64_t rig_read(Rig *rig, uint64_t reg, unsigned size)
{
    return vtpu_core_mmio_read(rig->core, reg, size);
}

/* Page tables, taken upwards from `next`; every one is zero when taken. */
typedef struct Tables {
    uint64_t next, root;
} Tables;

/* Maps [va, va + bytes) to consecutive pages from target; size VTPU_PAGE_BYTES or
 * VTPU_HUGE_PAGE_BYTES; bits: VTPU_PTE_READ and so on. */
void rig_map(Rig *rig, Tables *tables, uint64_t va, uint64_t target, uint64_t bytes,
             uint64_t size, uint64_t bits);

/* A small generator of numbers for mutators and patterns. */
static inline uint32_t rig_random(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33);
}

#endif
