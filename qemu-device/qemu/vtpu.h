/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vTPU, PCIe endpoint: what its files share.
 */
#ifndef HW_MISC_VTPU_H
#define HW_MISC_VTPU_H

#include "hw/pci/pci_device.h"
#include "qom/object.h"
#include "system/hostmem.h"

#include "core/vtpu_core.h"

#define TYPE_VTPU_FUNCTION "vtpu-function" /* abstract */
#define TYPE_VTPU "vtpu"                   /* the physical function */
#define TYPE_VTPU_VF "vtpu-vf"
typedef struct VtpuState VtpuState;
DECLARE_INSTANCE_CHECKER(VtpuState, VTPU, TYPE_VTPU_FUNCTION)

#define VTPU_DOORBELL_PAGE 4096

/* Of physical and virtual functions alike */
#define VTPU_BAR_REGS_TYPE     PCI_BASE_ADDRESS_SPACE_MEMORY
#define VTPU_BAR_HBM_TYPE \
    (PCI_BASE_ADDRESS_MEM_TYPE_64 | PCI_BASE_ADDRESS_MEM_PREFETCH)
#define VTPU_BAR_DOORBELL_TYPE PCI_BASE_ADDRESS_SPACE_MEMORY

#define TYPE_VTPU_FABRIC "vtpu-fabric"
OBJECT_DECLARE_SIMPLE_TYPE(VtpuFabricState, VTPU_FABRIC)

/* BQL held. */
typedef void VtpuCallFn(VtpuState *s, void *arg);

/* vtpu_call.c: the one call that the command thread waits for. */
typedef struct VtpuCalls {
    QemuMutex lock;
    QemuCond changed;
    QEMUBH *bh;
    QEMUBH *step_bh; /* where a stepped machine works */
    VtpuCallFn *fn; /* NULL: none */
    void *arg;
    bool parked, closed;
} VtpuCalls;

enum { VTPU_REGS, VTPU_HBM, VTPU_DOORBELLS, VTPU_NUM_BARS };

typedef struct VtpuBar {
    MemoryRegion all;
    MemoryRegion dead; /* covers the rest while the device is dead */
} VtpuBar;

struct VtpuState {
    PCIDevice parent_obj;

    VtpuBar bar[VTPU_NUM_BARS];
    MemoryRegion regs;
    MemoryRegion doorbells;
    MemoryRegion *hbm;      /* of the chip */
    MemoryRegion hbm_slice; /* this function's part of it */
    uint64_t hbm_offset;    /* where that begins */
    VtpuChip *chip;
    VtpuCore *core;    /* under the BQL; NULL before realize, once unplugged */
    VtpuCalls calls;
    VMChangeStateEntry *vm_state_change;

    /* Of the physical function alone */
    MemoryRegion hbm_ram;    /* hbm, without a backend */
    Error *migration_blocker;
    unsigned num_used_slices; /* of virtual functions */

    /* Of a virtual function alone */
    bool slice_used; /* it may hold data: enabled, or not cleared since */

    /* Properties; a virtual function has hbm_size alone */
    uint64_t hbm_size;
    HostMemoryBackend *hbm_backend;
    uint32_t threads;
    char *isa_path;
    uint64_t schedule_seed;
    bool stepped; /* no threads: the machine works in the main loop */
    bool check_races;
    char *timing, *timing_file, *timing_trace;
    VtpuFabricState *fabric;
    uint32_t fabric_chip;
    uint16_t num_vfs;
    uint64_t vf_hbm_size;
};

void vtpu_guest_error(void *opaque, const char *message); /* VtpuCoreOps */
/*
 * vtpu.c: what every function does. Realize wants hbm, hbm_offset, hbm_size and
 * chip; errors leave nothing behind.
 */
bool vtpu_function_realize(VtpuState *s, const VtpuState *pf, unsigned number,
                           Error **errp);
void vtpu_function_exit(VtpuState *s);
void vtpu_function_reset(VtpuState *s);

/* vtpu_sriov.c: what the physical function does for virtual ones, if it has any. */
bool vtpu_sriov_init(VtpuState *s, Error **errp);
void vtpu_sriov_exit(VtpuState *s);
void vtpu_sriov_config_written(VtpuState *s);
void vtpu_hbm_cleared(void *opaque); /* VtpuCoreOps */

/* vtpu_fabric.c */
VtpuFabric *vtpu_fabric_of(VtpuFabricState *s); /* NULL before it is realized */

/* vtpu_call.c: VtpuCoreOps. */
bool vtpu_dma_read(void *opaque, uint64_t addr, void *buf, size_t len);
bool vtpu_dma_write(void *opaque, uint64_t addr, const void *buf, size_t len);
bool vtpu_link_write(void *opaque, uint64_t addr, const void *buf, size_t len);
void vtpu_interrupt(void *opaque, unsigned vector);
void vtpu_parked(void *opaque);
/* BQL held. A reset of the bus: nothing of before it gets through. */
void vtpu_start_reset(VtpuState *s);
/* BQL held. In D3hot: transfers and interrupts of the machine wait. */
void vtpu_set_asleep(VtpuState *s, bool asleep);
/* Not for the BQL: fn(s, arg) is called with it. False: maybe it was not. */
bool vtpu_call(VtpuState *s, VtpuCallFn *fn, void *arg);
/* With the BQL or calls.lock held: what is done now is of before a reset. */
bool vtpu_is_stale(VtpuState *s);
/* BQL held. After an access to a register: a stepped machine looks at it. */
void vtpu_accessed(VtpuState *s);
/* BQL held. Around the life of the machine; close() before it is freed. */
void vtpu_calls_init(VtpuState *s);
void vtpu_calls_close(VtpuState *s);
void vtpu_calls_exit(VtpuState *s);
/* BQL held and kept: returns when the machine is at rest; until unpark. */
void vtpu_park(VtpuState *s);
void vtpu_unpark(VtpuState *s);

/* vtpu_migration.c; around the life of the realized device. */
void vtpu_migration_init(VtpuState *s);
void vtpu_migration_exit(VtpuState *s);
extern const VMStateDescription vtpu_vmstate;

/* vtpu_bars.c, BQL held. Wants hbm, hbm_offset and hbm_size. */
void vtpu_init_bars(VtpuState *s);
/* Whether the BARs read all ones and take no writes. */
void vtpu_set_dead(VtpuState *s, bool dead);

/* vtpu_trace.c: VtpuCoreOps. */
bool vtpu_trace_instructions(void *opaque);
void vtpu_trace(void *opaque, VtpuCoreEvent event, unsigned queue,
                uint64_t a, uint64_t b);

/* vtpu_errors.c: what the function reports of errors; the second needs the BQL */
void vtpu_report_hardware_error(void *opaque, VtpuHardwareError what);
void vtpu_report_failed_dma(VtpuState *s, DMADirection dir);

/* Adds the properties of a running device: its state, faults on demand. */
void vtpu_monitor_class_init(ObjectClass *class);

#endif
