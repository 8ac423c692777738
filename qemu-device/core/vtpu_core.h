/* SPDX-License-Identifier: MIT */
/*
 * The vTPU machine, without QEMU: registers, rings, page tables, sequencer,
 * engines. QEMU's PCIe glue, the in-process runtime back end and the fuzzers
 * all drive it through this interface.
 *
 * Threads: the machine owns a command-processor thread and compute workers.
 * Every function here may be called from any thread unless it says otherwise,
 * and returns without waiting for a running program except vtpu_core_free()
 * and vtpu_core_quiesce(). Callbacks run on the machine's command thread, never
 * with one of its locks held, and must not call back into functions that wait.
 * guest_error and trace may also run on the thread that made the call, and with
 * VtpuCoreConfig.serve_short all of them on that of vtpu_core_doorbell();
 * link_write and hbm_dirty also on that of a sender of the same fabric.
 */
#ifndef VTPU_CORE_H
#define VTPU_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vtpu_fabric.h"

typedef struct VtpuCore VtpuCore;
typedef struct VtpuChip VtpuChip;

/* What is traced, and what a and b are. */
typedef enum VtpuCoreEvent {
    VTPU_EVENT_BEGIN, /* a ring command: its op, its ring index */
    VTPU_EVENT_END,
    VTPU_EVENT_FAULT, /* cause, address */
    VTPU_EVENT_DOORBELL, /* the tail, 0 */
    VTPU_EVENT_INSTRUCTION, /* about to be executed: its opcode, its pc */
    VTPU_EVENT_INJECTED, /* a fault on demand took place: VtpuInjection, its value before */
    VTPU_EVENT_TIMED, /* a program has ended on the timing model: cycles, instructions */
    VTPU_EVENT_PREEMPTED, /* a program is set aside: its pc, its ring index */
    VTPU_EVENT_RESUMED, /* it goes on: likewise */
    VTPU_EVENT_RACE, /* two instructions race: their pcs, in program order the later first */
} VtpuCoreEvent;

/* Faults on demand, and what their value is. A device reset ends the hangs and STUCK alone. */
typedef enum VtpuInjection {
    VTPU_INJECT_HANG,          /* 1: the next program never ends, but by a reset */
    VTPU_INJECT_HANG_PC,       /* the program that comes to this pc hangs there; UINT32_MAX none */
    VTPU_INJECT_IRQ_LOSS,      /* how many interrupts to lose */
    VTPU_INJECT_IRQ_DUPLICATE, /* how many interrupts to raise twice */
    VTPU_INJECT_IRQ_SPURIOUS,  /* raises this vector now; then only remembered */
    VTPU_INJECT_ECC_SINGLE,    /* how many reads of HBM have an error that is corrected */
    VTPU_INJECT_ECC_DOUBLE,    /* how many reads of HBM have one that is not */
    VTPU_INJECT_DMA_ERROR,     /* n: the nth bus transfer from now fails */
    VTPU_INJECT_FENCE_CORRUPT, /* the next fence is written with these bits inverted */
    VTPU_INJECT_RESET_STUCK,   /* 1: no reset of the device ends */
    VTPU_INJECT_HBM_SLOW,      /* what moves data to or from memory takes so many times as long */
    VTPU_INJECT_DEAD,          /* 1: registers read all ones, nothing happens; 0: as after a reset */
    VTPU_INJECT_STUCK,         /* 1: a program keeps its queue RESETTING; 2: and the engines, too */
    VTPU_INJECT_TEMPERATURE,   /* the physical function's SENSOR_TEMP; UINT32_MAX: the model's */
    VTPU_NUM_INJECTIONS
} VtpuInjection;

/* Errors of the hardware that its surroundings may report, beside the fault they cause. */
typedef enum VtpuHardwareError {
    VTPU_ERROR_CORRECTED,   /* of HBM, corrected: no fault */
    VTPU_ERROR_UNCORRECTED, /* of HBM: ECC fault */
    VTPU_ERROR_POISONED,    /* data read from system memory came with an error: BUS fault */
} VtpuHardwareError;

/* What the machine asks of its surroundings. Each returns true on success. */
typedef struct VtpuCoreOps {
    /* System memory by bus address; fails without side effect on a bad one. */
    bool (*dma_read)(void *opaque, uint64_t addr, void *buf, size_t len);
    bool (*dma_write)(void *opaque, uint64_t addr, const void *buf, size_t len);
    /* Raise an MSI-X vector. A call made before a reset may arrive after it. */
    void (*raise_irq)(void *opaque, unsigned vector);
    /* The guest did something illegal; for a log. May be NULL. */
    void (*guest_error)(void *opaque, const char *message);
    /* The engines wrote HBM bytes [offset, offset + len), for dirty tracking. May be NULL. */
    void (*hbm_dirty)(void *opaque, uint64_t offset, uint64_t len);
    /* One executed step, for traces. May be NULL. */
    void (*trace)(void *opaque, VtpuCoreEvent event, unsigned queue, uint64_t a, uint64_t b);
    /* First and last thing on the thread that makes callbacks. May be NULL. */
    void (*thread_enter)(void *opaque);
    void (*thread_leave)(void *opaque);
    /* Whether instructions are traced; asked as a program starts. NULL: no. */
    bool (*trace_instructions)(void *opaque);
    /* After vtpu_core_park(): at rest now. May be NULL. */
    void (*parked)(void *opaque);
    /* HBM is zero and the reset about to end; see vtpu_core_hbm_clear(). May be NULL. */
    void (*hbm_cleared)(void *opaque);
    /* Came just now, before its fault is recorded. May be NULL. */
    void (*hardware_error)(void *opaque, VtpuHardwareError what);
    /* dma_write on the thread of a sender of the same fabric, several at once. NULL: dma_write */
    bool (*link_write)(void *opaque, uint64_t addr, const void *buf, size_t len);
} VtpuCoreOps;

typedef struct VtpuCoreConfig {
    uint8_t *hbm;         /* HBM bytes, owned by the caller, outlives the machine */
    uint64_t hbm_bytes;   /* power of two, at least 16 MiB */
    unsigned threads;     /* compute threads; 0: the host's processors */
    const char *isa_path; /* "scalar", "avx2", "avx512", "amx"; NULL: the best the host has */
    /* 0: instructions run in program order. Else the seed of a random order among
     * those that the counters allow, to find missing waits. */
    uint64_t schedule_seed;
    /* No threads: nothing happens but in vtpu_core_step(). The same calls then
     * lead to the same accesses in the same order, for fuzzers and debuggers. */
    bool stepped;
    /*
     * While the machine is idle, who rings a doorbell executes the commands there
     * that take no time (NOP, SIGNAL, TIMESTAMP) and makes their callbacks, which
     * saves waking a thread and its being waited for.
     */
    bool serve_short;
    VtpuChip *chip;    /* of several machines; NULL: one of its own, with `threads` */
    unsigned function; /* register FUNCTION */
    /* The timing model: a chip of spec/timing.toml, a file of lines `parameter =
     * number` that changes it (or the first one), or both. NULL, NULL: none. */
    const char *timing, *timing_file;
    const char *timing_trace; /* a file to be written; NULL: none. Needs a model */
    VtpuFabric *fabric;   /* outlives the machine; NULL: no inter-chip link */
    unsigned fabric_chip; /* its number there, which no other machine has */
    bool check_races; /* programs whose instructions race end with a fault */
} VtpuCoreConfig;

/*
 * A chip: compute threads and engines for up to a machine a function, which take
 * turns with equal shares of the time. threads 0: the host's processors. NULL
 * with *error (static string). It is freed after the last of its machines.
 */
VtpuChip *vtpu_chip_new(unsigned threads, const char **error);
void vtpu_chip_free(VtpuChip *chip);

/*
 * Returns NULL with *error when the configuration is wrong: a string that lasts
 * until the thread's next call. The configuration's strings are copied.
 */
VtpuCore *vtpu_core_new(const VtpuCoreConfig *config, const VtpuCoreOps *ops,
                        void *opaque, const char **error);
void vtpu_core_free(VtpuCore *core);

/* BAR0 accesses; size is 4 or 8, anything else reads as zero and is logged. */
uint64_t vtpu_core_mmio_read(VtpuCore *core, uint64_t offset, unsigned size);
void vtpu_core_mmio_write(VtpuCore *core, uint64_t offset, uint64_t value, unsigned size);
/* A write to offset 0 of queue q's doorbell page. */
void vtpu_core_doorbell(VtpuCore *core, unsigned queue, uint32_t tail);

/*
 * Full device reset, as register CTRL.RESET or a PCI reset. Starts it and
 * returns; work in flight stops at the next instruction boundary and does no
 * DMA and raises no interrupt after that.
 */
void vtpu_core_reset(VtpuCore *core);
/* The same, and HBM is zero and `hbm_cleared` called before RESETTING ends. */
void vtpu_core_reset_and_clear(VtpuCore *core);
/* For `hbm_cleared`. False: meanwhile another clearing was asked for, and follows. */
bool vtpu_core_hbm_clear(VtpuCore *core);
/*
 * True from the start of a reset until the old work is gone: a callback that
 * asks under the lock under which resets are started knows that it is stale.
 */
bool vtpu_core_resetting(VtpuCore *core);
/*
 * Asleep: no command begins and a program stands still, from its next
 * instruction boundary on; what software can read is kept. An instruction or
 * COPY in progress goes on, and its callbacks call vtpu_core_wait_awake() when
 * they find the machine asleep. A reset ends the sleep.
 */
void vtpu_core_sleep(VtpuCore *core, bool asleep);
/* False also while the machine is to be parked: what is in progress then ends. */
bool vtpu_core_asleep(VtpuCore *core);
/* From a callback alone: waits until it is not asleep, or is stopped. */
void vtpu_core_wait_awake(VtpuCore *core);
/* False: not a value of that fault. */
bool vtpu_core_inject(VtpuCore *core, VtpuInjection what, uint64_t value);
/* The values it may have, as words: "1 to 5". A static string. */
const char *vtpu_core_injection_values(VtpuInjection what);
/* The value as it is now, used up or not. */
uint64_t vtpu_core_injected(VtpuCore *core, VtpuInjection what);
/* Queues, contexts and engines as lines of text, cut to size - 1 characters. */
#define VTPU_DESCRIPTION_BYTES 16384 /* always enough */
void vtpu_core_describe(VtpuCore *core, char *text, size_t size);
/*
 * Of a stepped machine: serves one ring command, or with a schedule seed one until
 * its program is set aside, or what callers asked for, on
 * the calling thread, which makes the callbacks. False: there is nothing to do,
 * or not yet (a WAIT that is held). Never from a callback, one caller at a time.
 */
bool vtpu_core_step(VtpuCore *core);
/*
 * Asks the machine to come to rest between two instructions and to stay there,
 * and returns; `parked` says when. It makes no callback after that one. A stepped
 * machine is at rest whenever nobody steps it.
 */
void vtpu_core_park(VtpuCore *core);
/* The same, and waits for it. */
void vtpu_core_quiesce(VtpuCore *core);
void vtpu_core_resume(VtpuCore *core);

/*
 * The state of a machine that is parked, HBM excepted, as bytes; NULL when it is
 * not parked, has a fabric, or out of memory. The caller frees them. Registers can be read and
 * written before and after, not meanwhile changed by the machine.
 */
uint8_t *vtpu_core_save(VtpuCore *core, size_t *size);
/* No state is larger: a VMEM and a program for each queue, and the rest. */
#define VTPU_STATE_BYTES_MAX (64ull * (33u << 20) + (4u << 20))
/*
 * Puts a parked machine into a saved state; it goes on there when resumed, with
 * the same results bit by bit. HBM must be what it was; threads, vector path and
 * schedule seed need not be. False with *error (static string): the state is
 * damaged, or of another HBM size or version; the machine is as after a reset.
 */
bool vtpu_core_load(VtpuCore *core, const uint8_t *bytes, size_t size, const char **error);

/* The name of the vector path in use: "scalar", "avx2", "avx512" or "amx". */
const char *vtpu_core_isa_path(const VtpuCore *core);

#endif
