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

#define TYPE_VTPU "vtpu"
OBJECT_DECLARE_SIMPLE_TYPE(VtpuState, VTPU)

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
    MemoryRegion hbm_ram;
    MemoryRegion *hbm; /* hbm_ram, or the backend's */
    QemuCond awake;    /* with the BQL: maybe no longer in D3hot */
    VtpuCore *core;    /* under the BQL; NULL before realize, once unplugged */

    /* Properties */
    uint64_t hbm_size;
    HostMemoryBackend *hbm_backend;
    uint32_t threads;
    char *isa_path;
    uint64_t schedule_seed;
};

/* vtpu.c; all need the BQL */
bool vtpu_is_asleep(VtpuState *s);
/*
 * On the machine's thread, before it uses the bus: waits out D3hot. False: what
 * it does is of before a reset or an unplug.
 */
bool vtpu_wait_for_bus(VtpuState *s);
/* Whether its BARs read all ones and take no writes. */
void vtpu_set_dead(VtpuState *s, bool dead);

/* vtpu_errors.c: what the function reports of errors; the second needs the BQL */
void vtpu_report_hardware_error(void *opaque, VtpuHardwareError what);
void vtpu_report_failed_dma(VtpuState *s, DMADirection dir);

/* Adds the properties of a running device: its state, faults on demand. */
void vtpu_monitor_class_init(ObjectClass *class);

#endif
