/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vTPU, PCIe endpoint: errors that the function reports itself, by advanced
 * error reporting and its status register, beside the fault of the queue that
 * met them. What is masked after a reset is what the PCI Express specification
 * says, and that is all of them: software has to ask.
 */
#include "qemu/osdep.h"
#include "hw/pci/pci.h"
#include "hw/pci/pcie.h"

#include "vtpu.h"

static void vtpu_set_status(VtpuState *s, uint16_t bits)
{
    pci_word_test_and_set_mask(PCI_DEVICE(s)->config + PCI_STATUS, bits);
}

/* Poisoned data ends one command: the device lives on, an advisory error. */
static const PCIEAERErr vtpu_hardware_errors[] = {
    [VTPU_ERROR_CORRECTED] = {
        .status = PCI_ERR_COR_INTERNAL,
        .flags = PCIE_AER_ERR_IS_CORRECTABLE,
    },
    [VTPU_ERROR_UNCORRECTED] = { .status = PCI_ERR_UNC_INTN },
    [VTPU_ERROR_POISONED] = {
        .status = PCI_ERR_UNC_POISON_TLP,
        .flags = PCIE_AER_ERR_MAYBE_ADVISORY,
    },
};

static void vtpu_call_error(VtpuState *s, void *arg)
{
    PCIDevice *pdev = PCI_DEVICE(s);
    VtpuHardwareError *what = arg;
    PCIEAERErr error = vtpu_hardware_errors[*what];

    if (vtpu_is_stale(s)) {
        return;
    }
    error.source_id = pci_requester_id(pdev);
    if (*what == VTPU_ERROR_POISONED) {
        bool respond = pci_get_word(pdev->config + PCI_COMMAND) &
                       PCI_COMMAND_PARITY;

        vtpu_set_status(s, PCI_STATUS_DETECTED_PARITY |
                           (respond ? PCI_STATUS_PARITY : 0));
    }
    pcie_aer_inject_error(pdev, &error);
}

void vtpu_report_hardware_error(void *opaque, VtpuHardwareError what)
{
    vtpu_call(opaque, vtpu_call_error, &what);
}

void vtpu_report_failed_dma(VtpuState *s, DMADirection dir)
{
    uint16_t command = pci_get_word(PCI_DEVICE(s)->config + PCI_COMMAND);

    /* Only a request that left the function and wants an answer gets one. */
    if (dir == DMA_DIRECTION_TO_DEVICE && (command & PCI_COMMAND_MASTER)) {
        vtpu_set_status(s, PCI_STATUS_REC_MASTER_ABORT);
    }
}
