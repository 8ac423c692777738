/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vTPU, PCIe endpoint: what connects the machine in core/ to QEMU. BARs,
 * capabilities, DMA, interrupts, resets, properties.
 *
 * Threads: the machine's command thread makes the callbacks; it holds no lock
 * of its own then, and never takes the BQL (vtpu_call.c). vCPUs and the main loop
 * call the machine with the BQL held; the machine never waits in those calls, and
 * makes callbacks in none of them but that of a doorbell.
 *
 * Errors: what a guest does wrong is logged as a guest error or becomes a
 * fault of its queue; nothing here aborts.
 */
#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "qemu/log.h"
#include "qemu/main-loop.h"
#include "qemu/module.h"
#include "qemu/rcu.h"
#include "qemu/units.h"
#include "qapi/error.h"
#include "hw/pci/msix.h"
#include "hw/pci/pcie.h"
#include "hw/qdev-properties.h"
#include "migration/vmstate.h"

#include "include/vtpu_hw.h"
#include "include/vtpu_isa.h"
#include "trace.h"
#include "vtpu.h"

#define VTPU_CAP_PM     0x40
#define VTPU_CAP_MSIX   0x50
#define VTPU_CAP_PCIE   0x60
#define VTPU_EXT_AER    0x100

/* Callbacks of the machine, on its command thread or from a doorbell */

void vtpu_guest_error(void *opaque, const char *message)
{
    qemu_log_mask(LOG_GUEST_ERROR, "vtpu: %s\n", message);
}

static void vtpu_hbm_dirty(void *opaque, uint64_t offset, uint64_t len)
{
    VtpuState *s = opaque;

    memory_region_set_dirty(s->hbm, s->hbm_offset + offset, len);
}

static void vtpu_thread_enter(void *opaque)
{
    rcu_register_thread();
}

static void vtpu_thread_leave(void *opaque)
{
    rcu_unregister_thread();
}

static const VtpuCoreOps vtpu_core_ops = {
    .dma_read = vtpu_dma_read,
    .dma_write = vtpu_dma_write,
    .raise_irq = vtpu_interrupt,
    .guest_error = vtpu_guest_error,
    .hbm_dirty = vtpu_hbm_dirty,
    .trace = vtpu_trace,
    .thread_enter = vtpu_thread_enter,
    .thread_leave = vtpu_thread_leave,
    .trace_instructions = vtpu_trace_instructions,
    .link_write = vtpu_link_write,
    .parked = vtpu_parked,
    .hardware_error = vtpu_report_hardware_error,
    .hbm_cleared = vtpu_hbm_cleared,
};

/* Configuration space */

static bool vtpu_is_asleep(VtpuState *s)
{
    uint8_t *pm = PCI_DEVICE(s)->config + VTPU_CAP_PM;

    return pci_get_word(pm + PCI_PM_CTRL) & PCI_PM_CTRL_STATE_MASK;
}

static void vtpu_write_config(PCIDevice *pdev, uint32_t addr, uint32_t value,
                              int len)
{
    VtpuState *s = VTPU(pdev);
    bool was_asleep = vtpu_is_asleep(s), asleep;

    pci_default_write_config(pdev, addr, value, len);
    pcie_cap_flr_write_config(pdev, addr, value, len);
    pcie_aer_write_config(pdev, addr, value, len);
    asleep = vtpu_is_asleep(s);
    if (s->core && asleep != was_asleep) {
        vtpu_set_asleep(s, asleep);
    }
    vtpu_sriov_config_written(s);
}

static bool vtpu_init_capabilities(VtpuState *s, Error **errp)
{
    PCIDevice *pdev = PCI_DEVICE(s);
    MemoryRegion *bar0 = &s->bar[VTPU_REGS].all;
    int pos = pci_pm_init(pdev, VTPU_CAP_PM, errp);

    if (pos < 0) {
        return false;
    }
    pci_set_word(pdev->config + pos + PCI_PM_PMC, PCI_PM_CAP_VER_1_1);
    pci_set_word(pdev->config + pos + PCI_PM_CTRL, PCI_PM_CTRL_NO_SOFT_RESET);
    pci_set_word(pdev->wmask + pos + PCI_PM_CTRL, PCI_PM_CTRL_STATE_MASK);

    if (pcie_endpoint_cap_init(pdev, VTPU_CAP_PCIE) < 0) {
        error_setg(errp, "vtpu: cannot add the PCI Express capability");
        return false;
    }
    pcie_cap_fill_link_ep_usp(pdev, QEMU_PCI_EXP_LNK_X16, QEMU_PCI_EXP_LNK_16GT);
    pcie_cap_deverr_init(pdev);
    pcie_cap_flr_init(pdev);
    pci_word_test_and_set_mask(pdev->wmask + PCI_COMMAND, PCI_COMMAND_PARITY);
    if (pcie_aer_init(pdev, PCI_ERR_VER, VTPU_EXT_AER, PCI_ERR_SIZEOF,
                      errp) < 0) {
        pcie_cap_exit(pdev);
        return false;
    }
    if (msix_init(pdev, VTPU_NUM_MSIX, bar0, VTPU_BAR_REGS, VTPU_MSIX_TABLE,
                  bar0, VTPU_BAR_REGS, VTPU_MSIX_PBA, VTPU_CAP_MSIX,
                  errp) < 0) {
        pcie_aer_exit(pdev);
        pcie_cap_exit(pdev);
        return false;
    }
    for (int i = 0; i < VTPU_NUM_MSIX; i++) {
        msix_vector_use(pdev, i);
    }
    return true;
}

static void vtpu_exit_capabilities(VtpuState *s)
{
    PCIDevice *pdev = PCI_DEVICE(s);

    msix_unuse_all_vectors(pdev);
    msix_uninit(pdev, &s->bar[VTPU_REGS].all, &s->bar[VTPU_REGS].all);
    pcie_aer_exit(pdev);
    pcie_cap_exit(pdev);
}

/* Life */

static const char *vtpu_backend_name(VtpuState *s)
{
    return object_get_canonical_path_component(OBJECT(s->hbm_backend));
}

bool vtpu_function_realize(VtpuState *s, const VtpuState *pf, unsigned number,
                           Error **errp)
{
    PCIDevice *pdev = PCI_DEVICE(s);
    const char *error;

    s->stepped = pf->stepped;
    vtpu_init_bars(s);
    if (!vtpu_init_capabilities(s, errp)) {
        return false;
    }

    VtpuCoreConfig config = {
        .hbm = memory_region_get_ram_ptr(&s->hbm_slice),
        .hbm_bytes = s->hbm_size,
        .isa_path = pf->isa_path,
        .schedule_seed = pf->schedule_seed,
        .stepped = pf->stepped,
        .serve_short = true,
        .check_races = pf->check_races,
        .timing = pf->timing,
        .timing_file = pf->timing_file,
        .timing_trace = number ? NULL : pf->timing_trace, /* it is one file */
        .chip = s->chip,
        .function = number,
        /* The link is the physical function's: it has no share for others. */
        .fabric = number == 0 && s->fabric ? vtpu_fabric_of(s->fabric) : NULL,
        .fabric_chip = s->fabric_chip,
    };
    vtpu_calls_init(s);
    s->core = vtpu_core_new(&config, &vtpu_core_ops, s, &error);
    if (!s->core) {
        error_setg(errp, "vtpu: %s", error);
        vtpu_calls_exit(s);
        vtpu_exit_capabilities(s);
        return false;
    }
    vtpu_migration_init(s);
    return true;
}

void vtpu_function_exit(VtpuState *s)
{
    VtpuCore *core = s->core;

    vtpu_migration_exit(s);
    /*
     * A vCPU may be waiting for the BQL in an access to a BAR, and the command
     * thread for a call: neither is to use the machine after this.
     */
    vtpu_start_reset(s);
    vtpu_calls_close(s);
    WITH_QEMU_LOCK_GUARD(&s->calls.lock) {
        s->core = NULL;
    }
    vtpu_core_free(core);
    vtpu_calls_exit(s);
    vtpu_exit_capabilities(s);
}

void vtpu_function_reset(VtpuState *s)
{
    trace_vtpu_reset(s);
    pcie_cap_deverr_reset(PCI_DEVICE(s));
    if (s->core) {
        vtpu_start_reset(s);
    }
}

/* The physical function */

static bool vtpu_check_hbm_size(const char *property, uint64_t size,
                                Error **errp)
{
    if (size < 16 * MiB || size > 64 * GiB || !is_power_of_2(size)) {
        error_setg(errp, "vtpu: %s must be a power of two from 16 MiB to "
                   "64 GiB", property);
        return false;
    }
    return true;
}

static bool vtpu_check_properties(VtpuState *s, Error **errp)
{
    if (s->num_vfs > VTPU_MAX_VFS) {
        error_setg(errp, "vtpu: sriov-vfs must be at most %d", VTPU_MAX_VFS);
        return false;
    }
    if (!vtpu_check_hbm_size("vf-hbm-size", s->vf_hbm_size, errp)) {
        return false;
    }
    if (!s->fabric && s->fabric_chip) {
        error_setg(errp, "vtpu: chip is a number in a fabric: set fabric, too");
        return false;
    }
    if (s->fabric &&
        s->fabric_chip >= vtpu_fabric_chips(vtpu_fabric_of(s->fabric))) {
        error_setg(errp, "vtpu: chip must be below %u, the fabric's chips",
                   vtpu_fabric_chips(vtpu_fabric_of(s->fabric)));
        return false;
    }
    if (s->hbm_backend) {
        uint64_t vfs = s->num_vfs * s->vf_hbm_size, size;

        g_autofree char *name =
            g_strdup_printf("hbm-memdev '%s'%s", vtpu_backend_name(s),
                            vfs ? ", less sriov-vfs times vf-hbm-size," : "");

        size = memory_region_size(
            host_memory_backend_get_memory(s->hbm_backend));
        s->hbm_size = size > vfs ? size - vfs : 0;
        return vtpu_check_hbm_size(name, s->hbm_size, errp);
    }
    return vtpu_check_hbm_size("hbm-size", s->hbm_size, errp);
}

static bool vtpu_init_hbm(VtpuState *s, Error **errp)
{
    ERRP_GUARD();

    if (!s->hbm_backend) {
        uint64_t bytes = s->hbm_size + s->num_vfs * s->vf_hbm_size;

        s->hbm = &s->hbm_ram;
        if (memory_region_init_ram(s->hbm, OBJECT(s), "vtpu-hbm", bytes,
                                   errp)) {
            return true;
        }
        error_prepend(errp, "vtpu: hbm-size and sriov-vfs times vf-hbm-size "
                      "are %" PRIu64 " MiB, which this host does not give: ",
                      bytes / MiB);
        return false;
    }
    if (host_memory_backend_is_mapped(s->hbm_backend)) {
        error_setg(errp, "vtpu: memory backend '%s' is already in use",
                   vtpu_backend_name(s));
        return false;
    }
    s->hbm = host_memory_backend_get_memory(s->hbm_backend);
    host_memory_backend_set_mapped(s->hbm_backend, true);
    /* A backend's memory belongs to nobody's state before this. */
    vmstate_register_ram(s->hbm, DEVICE(s));
    return true;
}

static void vtpu_exit_hbm(VtpuState *s)
{
    if (s->hbm_backend) {
        host_memory_backend_set_mapped(s->hbm_backend, false);
    }
    /*
     * The block lives until the last reader is gone: free its name now, for a
     * device that is plugged in again.
     */
    vmstate_unregister_ram(s->hbm, DEVICE(s));
}

static bool vtpu_init_chip(VtpuState *s, Error **errp)
{
    const char *error;

    s->chip = vtpu_chip_new(s->stepped ? 1 : s->threads, &error);
    if (!s->chip) {
        error_setg(errp, "vtpu: %s", error);
    }
    return s->chip;
}

static void vtpu_realize(PCIDevice *pdev, Error **errp)
{
    VtpuState *s = VTPU(pdev);

    if (!vtpu_check_properties(s, errp) || !vtpu_init_hbm(s, errp)) {
        return;
    }
    if (!vtpu_init_chip(s, errp)) {
        goto no_chip;
    }
    if (!vtpu_function_realize(s, s, 0, errp)) {
        goto no_function;
    }
    if (vtpu_sriov_init(s, errp)) {
        return;
    }
    vtpu_function_exit(s);
no_function:
    vtpu_chip_free(s->chip);
no_chip:
    vtpu_exit_hbm(s);
}

static void vtpu_exit(PCIDevice *pdev)
{
    VtpuState *s = VTPU(pdev);

    vtpu_sriov_exit(s);
    vtpu_function_exit(s);
    vtpu_chip_free(s->chip);
    vtpu_exit_hbm(s);
}

static void vtpu_reset_hold(Object *obj, ResetType type)
{
    vtpu_function_reset(VTPU(obj));
}

static const Property vtpu_properties[] = {
    DEFINE_PROP_SIZE("hbm-size", VtpuState, hbm_size, 1 * GiB),
    DEFINE_PROP_LINK("hbm-memdev", VtpuState, hbm_backend,
                     TYPE_MEMORY_BACKEND, HostMemoryBackend *),
    DEFINE_PROP_UINT32("threads", VtpuState, threads, 0),
    DEFINE_PROP_STRING("isa-path", VtpuState, isa_path),
    DEFINE_PROP_UINT64("schedule-seed", VtpuState, schedule_seed, 0),
    DEFINE_PROP_BOOL("x-stepped", VtpuState, stepped, false),
    DEFINE_PROP_BOOL("check-races", VtpuState, check_races, false),
    DEFINE_PROP_STRING("timing", VtpuState, timing),
    DEFINE_PROP_STRING("timing-file", VtpuState, timing_file),
    DEFINE_PROP_STRING("timing-trace", VtpuState, timing_trace),
    DEFINE_PROP_UINT16("sriov-vfs", VtpuState, num_vfs, 0),
    DEFINE_PROP_SIZE("vf-hbm-size", VtpuState, vf_hbm_size, 256 * MiB),
    DEFINE_PROP_LINK("fabric", VtpuState, fabric, TYPE_VTPU_FABRIC,
                     VtpuFabricState *),
    DEFINE_PROP_UINT32("chip", VtpuState, fabric_chip, 0),
};

static void vtpu_function_class_init(ObjectClass *class, void *data)
{
    DeviceClass *dc = DEVICE_CLASS(class);
    PCIDeviceClass *k = PCI_DEVICE_CLASS(class);

    k->config_write = vtpu_write_config;
    k->vendor_id = VTPU_VENDOR_ID;
    k->revision = VTPU_REVISION;
    k->class_id = VTPU_CLASS >> 8;
    set_bit(DEVICE_CATEGORY_MISC, dc->categories);
    vtpu_monitor_class_init(class);
}

static void vtpu_class_init(ObjectClass *class, void *data)
{
    DeviceClass *dc = DEVICE_CLASS(class);
    PCIDeviceClass *k = PCI_DEVICE_CLASS(class);
    ResettableClass *rc = RESETTABLE_CLASS(class);

    k->realize = vtpu_realize;
    k->exit = vtpu_exit;
    k->device_id = VTPU_DEVICE_ID;
    rc->phases.hold = vtpu_reset_hold;
    dc->desc = "Virtual tensor processing unit";
    dc->vmsd = &vtpu_vmstate;
    device_class_set_props(dc, vtpu_properties);
}

static const TypeInfo vtpu_types[] = {
    {
        .name = TYPE_VTPU_FUNCTION,
        .parent = TYPE_PCI_DEVICE,
        .abstract = true,
        .instance_size = sizeof(VtpuState),
        .class_init = vtpu_function_class_init,
        .interfaces = (InterfaceInfo[]) {
            { INTERFACE_PCIE_DEVICE },
            { }
        },
    },
    {
        .name = TYPE_VTPU,
        .parent = TYPE_VTPU_FUNCTION,
        .class_init = vtpu_class_init,
    },
};

DEFINE_TYPES(vtpu_types)
