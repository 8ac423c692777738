/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vTPU, PCIe endpoint: its BARs. Accesses come on vCPU threads with the BQL; one
 * that waited for it during an unplug finds no machine.
 */
#include "qemu/osdep.h"

#include "include/vtpu_hw.h"
#include "trace.h"
#include "vtpu.h"

static uint64_t vtpu_regs_read(void *opaque, hwaddr offset, unsigned size)
{
    VtpuState *s = opaque;
    uint64_t value = s->core ? vtpu_core_mmio_read(s->core, offset, size)
                             : UINT64_MAX;

    trace_vtpu_mmio_read(s, offset, size, value);
    return value;
}

static void vtpu_regs_write(void *opaque, hwaddr offset, uint64_t value,
                            unsigned size)
{
    VtpuState *s = opaque;

    trace_vtpu_mmio_write(s, offset, size, value);
    if (s->core) {
        vtpu_core_mmio_write(s->core, offset, value, size);
        vtpu_accessed(s);
    }
}

static const MemoryRegionOps vtpu_regs_ops = {
    .read = vtpu_regs_read,
    .write = vtpu_regs_write,
    .endianness = DEVICE_LITTLE_ENDIAN,
    .valid = { .min_access_size = 4, .max_access_size = 8 },
    .impl = { .min_access_size = 4, .max_access_size = 8 },
};

static uint64_t vtpu_doorbell_read(void *opaque, hwaddr offset, unsigned size)
{
    return 0;
}

static void vtpu_doorbell_write(void *opaque, hwaddr offset, uint64_t value,
                                unsigned size)
{
    VtpuState *s = opaque;
    unsigned queue = offset / VTPU_DOORBELL_PAGE;

    if (offset % VTPU_DOORBELL_PAGE) {
        vtpu_guest_error(s, "write in a doorbell page beside its doorbell");
        return;
    }
    if (s->core) {
        vtpu_core_doorbell(s->core, queue, value);
        vtpu_accessed(s);
    }
}

static const MemoryRegionOps vtpu_doorbell_ops = {
    .read = vtpu_doorbell_read,
    .write = vtpu_doorbell_write,
    .endianness = DEVICE_LITTLE_ENDIAN,
    .valid = { .min_access_size = 4, .max_access_size = 4 },
    .impl = { .min_access_size = 4, .max_access_size = 4 },
};

/* A dead device: covers its BARs with what nobody answers. */

static uint64_t vtpu_dead_read(void *opaque, hwaddr offset, unsigned size)
{
    return UINT64_MAX;
}

static void vtpu_dead_write(void *opaque, hwaddr offset, uint64_t value,
                            unsigned size)
{
}

static const MemoryRegionOps vtpu_dead_ops = {
    .read = vtpu_dead_read,
    .write = vtpu_dead_write,
    .endianness = DEVICE_LITTLE_ENDIAN,
    .valid = { .min_access_size = 1, .max_access_size = 8, .unaligned = true },
    .impl = { .min_access_size = 1, .max_access_size = 8, .unaligned = true },
};

void vtpu_set_dead(VtpuState *s, bool dead)
{
    memory_region_transaction_begin();
    for (int i = 0; i < VTPU_NUM_BARS; i++) {
        memory_region_set_enabled(&s->bar[i].dead, dead);
    }
    memory_region_transaction_commit();
}

/* A container for what answers in a BAR, and for the cover. */
static void vtpu_init_bar(VtpuState *s, int i, int number, uint8_t type,
                          const char *name, uint64_t size)
{
    VtpuBar *bar = &s->bar[i];

    memory_region_init(&bar->all, OBJECT(s), name, size);
    memory_region_init_io(&bar->dead, OBJECT(s), &vtpu_dead_ops, s,
                          "vtpu-dead", size);
    memory_region_set_enabled(&bar->dead, false);
    memory_region_add_subregion_overlap(&bar->all, 0, &bar->dead, 1);
    pci_register_bar(PCI_DEVICE(s), number, type, &bar->all);
}

void vtpu_init_bars(VtpuState *s)
{
    vtpu_init_bar(s, VTPU_REGS, VTPU_BAR_REGS, VTPU_BAR_REGS_TYPE, "vtpu-bar0",
                  VTPU_REGS_SIZE);
    vtpu_init_bar(s, VTPU_HBM, VTPU_BAR_HBM, VTPU_BAR_HBM_TYPE, "vtpu-bar2",
                  s->hbm_size);
    vtpu_init_bar(s, VTPU_DOORBELLS, VTPU_BAR_DOORBELL, VTPU_BAR_DOORBELL_TYPE,
                  "vtpu-bar4", VTPU_NUM_QUEUES * VTPU_DOORBELL_PAGE);
    memory_region_init_io(&s->regs, OBJECT(s), &vtpu_regs_ops, s, "vtpu-regs",
                          VTPU_MSIX_TABLE);
    memory_region_init_alias(&s->hbm_slice, OBJECT(s), "vtpu-hbm-slice", s->hbm,
                             s->hbm_offset, s->hbm_size);
    memory_region_init_io(&s->doorbells, OBJECT(s), &vtpu_doorbell_ops, s,
                          "vtpu-doorbells",
                          VTPU_NUM_QUEUES * VTPU_DOORBELL_PAGE);
    memory_region_add_subregion(&s->bar[VTPU_REGS].all, 0, &s->regs);
    memory_region_add_subregion(&s->bar[VTPU_HBM].all, 0, &s->hbm_slice);
    memory_region_add_subregion(&s->bar[VTPU_DOORBELLS].all, 0, &s->doorbells);
}
