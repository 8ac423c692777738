/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vTPU, PCIe endpoint: virtual functions. Each is a machine of its own on the
 * chip of the physical function, with a slice of its HBM behind the physical
 * function's. They are made with the physical function and wait, in reset,
 * until software enables them.
 *
 * A slice may change owners with each reset: what was in it is cleared before
 * that reset ends, and until then the BAR shows nothing, so that no order of
 * resets and accesses lets the next owner see it.
 *
 * A chip with functions enabled, or with slices still to be cleared, is not
 * migrated.
 */
#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "hw/pci/pcie.h"
#include "hw/pci/pcie_sriov.h"
#include "migration/blocker.h"

#include "include/vtpu_hw.h"
#include "vtpu.h"

#define VTPU_EXT_ARI   0x150
#define VTPU_EXT_SRIOV 0x160 /* the last: QEMU's reset clears 4 bytes after it */

#define VTPU_VF_OFFSET 1
#define VTPU_VF_STRIDE 1

/* The physical function */

bool vtpu_sriov_init(VtpuState *s, Error **errp)
{
    PCIDevice *pdev = PCI_DEVICE(s);

    if (!s->num_vfs) {
        return true;
    }
    pcie_ari_init(pdev, VTPU_EXT_ARI);
    if (!pcie_sriov_pf_init(pdev, VTPU_EXT_SRIOV, TYPE_VTPU_VF,
                            VTPU_VF_DEVICE_ID, s->num_vfs, s->num_vfs,
                            VTPU_VF_OFFSET, VTPU_VF_STRIDE, errp)) {
        return false;
    }
    pcie_sriov_pf_init_vf_bar(pdev, VTPU_BAR_REGS, VTPU_BAR_REGS_TYPE,
                              VTPU_REGS_SIZE);
    pcie_sriov_pf_init_vf_bar(pdev, VTPU_BAR_HBM, VTPU_BAR_HBM_TYPE,
                              s->vf_hbm_size);
    pcie_sriov_pf_init_vf_bar(pdev, VTPU_BAR_DOORBELL, VTPU_BAR_DOORBELL_TYPE,
                              VTPU_NUM_QUEUES * VTPU_DOORBELL_PAGE);
    return true;
}

void vtpu_sriov_exit(VtpuState *s)
{
    pcie_sriov_pf_exit(PCI_DEVICE(s));
    migrate_del_blocker(&s->migration_blocker);
}

void vtpu_sriov_config_written(VtpuState *s)
{
    PCIDevice *pdev = PCI_DEVICE(s);
    uint32_t control = pdev->exp.sriov_cap + PCI_SRIOV_CTRL;
    Error *error = NULL;

    if (pci_is_vf(pdev) || !pcie_sriov_num_vfs(pdev) || s->migration_blocker) {
        return;
    }
    error_setg(&s->migration_blocker,
               "vtpu: virtual functions are enabled or being cleared");
    if (migrate_add_blocker(&s->migration_blocker, &error) < 0) {
        /* A migration is in progress, or was asked to be always possible. */
        warn_report_err(error);
        pci_default_write_config(pdev, control,
                                 pci_get_word(pdev->config + control) &
                                 ~PCI_SRIOV_CTRL_VFE, 2);
    }
}

/* Virtual functions */

static VtpuState *vtpu_vf_pf(VtpuState *s)
{
    return VTPU(pcie_sriov_get_pf(PCI_DEVICE(s)));
}

static void vtpu_vf_use_slice(VtpuState *s)
{
    if (!s->slice_used) {
        s->slice_used = true;
        vtpu_vf_pf(s)->num_used_slices++;
    }
}

static void vtpu_vf_release_slice(VtpuState *s)
{
    VtpuState *pf = vtpu_vf_pf(s);

    if (s->slice_used) {
        s->slice_used = false;
        if (--pf->num_used_slices == 0) {
            migrate_del_blocker(&pf->migration_blocker);
        }
    }
}

static void vtpu_vf_show_slice(VtpuState *s, void *arg)
{
    if (!s->core || !vtpu_core_hbm_clear(s->core)) {
        return; /* another reset hid it meanwhile, and will come here, too */
    }
    memory_region_set_enabled(&s->hbm_slice, true);
    if (!PCI_DEVICE(s)->enabled) {
        vtpu_vf_release_slice(s);
    }
}

void vtpu_hbm_cleared(void *opaque)
{
    vtpu_call(opaque, vtpu_vf_show_slice, NULL);
}

/* Called, too, as software enables and disables the function. */
static void vtpu_vf_reset_hold(Object *obj, ResetType type)
{
    VtpuState *s = VTPU(obj);

    memory_region_set_enabled(&s->hbm_slice, !s->slice_used);
    vtpu_function_reset(s);
    if (PCI_DEVICE(s)->enabled) {
        vtpu_vf_use_slice(s);
    }
}

/* The monitor finds it beside the physical function. */
static char *vtpu_vf_name(VtpuState *s)
{
    return g_strdup_printf("vf%u", pcie_sriov_vf_number(PCI_DEVICE(s)) + 1);
}

static void vtpu_vf_realize(PCIDevice *pdev, Error **errp)
{
    VtpuState *s = VTPU(pdev), *pf = vtpu_vf_pf(s);
    unsigned number = pcie_sriov_vf_number(pdev);
    g_autofree char *name = vtpu_vf_name(s);

    s->chip = pf->chip;
    s->hbm = pf->hbm;
    s->hbm_size = pf->vf_hbm_size;
    s->hbm_offset = pf->hbm_size + number * pf->vf_hbm_size;
    if (!vtpu_function_realize(s, pf, number + 1, errp)) {
        return;
    }
    pcie_ari_init(pdev, VTPU_EXT_ARI);
    object_property_add_const_link(OBJECT(pf), name, OBJECT(s));
    if (pf->hbm_backend) {
        /* Which may have come with data. */
        vtpu_vf_use_slice(s);
    }
}

static void vtpu_vf_exit(PCIDevice *pdev)
{
    VtpuState *s = VTPU(pdev);
    g_autofree char *name = vtpu_vf_name(s);

    object_property_del(OBJECT(vtpu_vf_pf(s)), name);
    vtpu_function_exit(s);
}

static void vtpu_vf_class_init(ObjectClass *class, void *data)
{
    DeviceClass *dc = DEVICE_CLASS(class);
    PCIDeviceClass *k = PCI_DEVICE_CLASS(class);
    ResettableClass *rc = RESETTABLE_CLASS(class);

    k->realize = vtpu_vf_realize;
    k->exit = vtpu_vf_exit;
    k->device_id = VTPU_VF_DEVICE_ID;
    rc->phases.hold = vtpu_vf_reset_hold;
    dc->desc = "Virtual function of a virtual tensor processing unit";
    dc->user_creatable = false;
}

static const TypeInfo vtpu_vf_types[] = {
    {
        .name = TYPE_VTPU_VF,
        .parent = TYPE_VTPU_FUNCTION,
        .class_init = vtpu_vf_class_init,
    },
};

DEFINE_TYPES(vtpu_vf_types)
