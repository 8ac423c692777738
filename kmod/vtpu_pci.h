/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_PCI_H_
#define _VTPU_PCI_H_

#include <linux/pci.h>

#include "vtpu_device.h"

extern const struct pci_error_handlers vtpu_err_handlers;

int vtpu_pci_init(struct vtpu_device *vdev);
void vtpu_pci_stop(struct vtpu_device *vdev);
void vtpu_unplug(struct vtpu_device *vdev);

#endif
