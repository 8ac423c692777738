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

struct VtpuState {
    PCIDevice parent_obj;

    MemoryRegion bar0;
    MemoryRegion regs;
    MemoryRegion doorbells;
    MemoryRegion hbm_ram;
    MemoryRegion *hbm; /* hbm_ram, or the backend's */
    VtpuCore *core;    /* under the BQL; NULL before realize, once unplugged */

    /* Properties */
    uint64_t hbm_size;
    HostMemoryBackend *hbm_backend;
    uint32_t threads;
    char *isa_path;
    uint64_t schedule_seed;
};

/* Adds the properties of a running device: its state, faults on demand. */
void vtpu_monitor_class_init(ObjectClass *class);

#endif
