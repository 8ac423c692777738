// SPDX-License-Identifier: GPL-2.0
/*
 * Drives QEMU's pvpanic-pci beside the device, and does nothing but to ask for a
 * reset after each error on the bus below its port, as drivers of network cards do.
 */

#include <linux/module.h>
#include <linux/pci.h>

static pci_ers_result_t neighbour_error_detected(struct pci_dev *pdev, pci_channel_state_t state)
{
	return PCI_ERS_RESULT_NEED_RESET;
}

static pci_ers_result_t neighbour_slot_reset(struct pci_dev *pdev)
{
	pci_info(pdev, "neighbour: the slot is reset\n");
	return PCI_ERS_RESULT_RECOVERED;
}

static const struct pci_error_handlers neighbour_err_handlers = {
	.error_detected = neighbour_error_detected,
	.slot_reset = neighbour_slot_reset,
};

static int neighbour_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	return 0;
}

static const struct pci_device_id neighbour_ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_REDHAT, 0x0011) },
	{ }
};

static struct pci_driver neighbour_driver = {
	.name = "neighbour",
	.id_table = neighbour_ids,
	.probe = neighbour_probe,
	.err_handler = &neighbour_err_handlers,
};
module_pci_driver(neighbour_driver);

MODULE_DESCRIPTION("A neighbour that asks for resets, for tests");
MODULE_LICENSE("GPL");
