// SPDX-License-Identifier: GPL-2.0
/* Register access that is not a queue's: identity, self-test, reset, TLB. */

#include <linux/bitops.h>
#include <linux/iopoll.h>
#include <linux/pci.h>
#include <drm/drm_print.h>

#include "vtpu_device.h"

#define RESET_POLL_US		20
#define RESET_TIMEOUT_US	(2 * USEC_PER_SEC)
#define ENGINES_TIMEOUT_US	(1 * USEC_PER_SEC)
/* A virtual function that may have a new owner clears its HBM first. */
#define CLEAR_TIMEOUT_US_PER_GIB (4 * USEC_PER_SEC)
#define TLB_TIMEOUT_US		(1 * USEC_PER_SEC)

static int vtpu_hw_test_scratch(struct vtpu_device *vdev)
{
	static const u32 patterns[] = { 0x55aa33cc, 0xaa55cc33, 0 };

	for (unsigned int i = 0; i < ARRAY_SIZE(patterns); i++) {
		u32 got;

		vtpu_write(vdev, VTPU_REG_TEST_SCRATCH, patterns[i]);
		got = vtpu_read(vdev, VTPU_REG_TEST_SCRATCH);
		if (got != patterns[i]) {
			drm_err(&vdev->drm, "self-test: scratch register holds %#x, not %#x\n",
				got, patterns[i]);
			return -EIO;
		}
	}
	return 0;
}

/* Is this a device that this driver knows, and how large is it? */
int vtpu_hw_identify(struct vtpu_device *vdev)
{
	u32 id = vtpu_read(vdev, VTPU_REG_ID);

	if (id != VTPU_MAGIC) {
		drm_err(&vdev->drm, "device identifies as %#x, not %#x\n", id, VTPU_MAGIC);
		return -ENODEV;
	}

	vdev->hw_version = vtpu_read(vdev, VTPU_REG_VERSION);
	if (vdev->hw_version >> 16 != VTPU_HW_VERSION >> 16 ||
	    vdev->hw_version < VTPU_HW_VERSION) {
		drm_err(&vdev->drm, "hardware is version %u.%u, driver needs %u.x, from %u.%u on\n",
			vdev->hw_version >> 16, vdev->hw_version & 0xffff,
			VTPU_HW_VERSION >> 16, VTPU_HW_VERSION >> 16, VTPU_HW_VERSION & 0xffff);
		return -EPROTO;
	}

	vdev->isa_version = vtpu_read(vdev, VTPU_REG_ISA_VERSION);
	vdev->caps = vtpu_read(vdev, VTPU_REG_CAPS);
	vdev->vmem_size = vtpu_read(vdev, VTPU_REG_VMEM_SIZE);
	vdev->hbm_size = vtpu_read64(vdev, VTPU_REG_HBM_SIZE);
	vdev->num_queues = min(vtpu_read(vdev, VTPU_REG_NUM_QUEUES), VTPU_NUM_QUEUES);
	vdev->num_contexts = min(vtpu_read(vdev, VTPU_REG_NUM_CONTEXTS), VTPU_NUM_CONTEXTS);
	if (!vdev->num_queues || !vdev->num_contexts ||
	    !IS_ALIGNED(vdev->hbm_size, VTPU_HUGE_PAGE_BYTES) || !vdev->hbm_size) {
		drm_err(&vdev->drm, "device reports %u queues, %u contexts, %#llx bytes of HBM\n",
			vdev->num_queues, vdev->num_contexts, vdev->hbm_size);
		return -EIO;
	}
	return vtpu_hw_test_scratch(vdev);
}

/* Does an interrupt arrive? Without one every job would time out. */
int vtpu_hw_test_irq(struct vtpu_device *vdev)
{
	bool seen;

	WRITE_ONCE(vdev->testing_irq, true);
	vtpu_write(vdev, VTPU_REG_TEST_IRQ, 0);
	seen = wait_for_completion_timeout(&vdev->test_irq, 2 * HZ);
	WRITE_ONCE(vdev->testing_irq, false);
	if (!seen) {
		drm_err(&vdev->drm, "self-test: no interrupt arrived\n");
		return -EIO;
	}
	return 0;
}

/*
 * Ends what is in progress; nothing begins until CTRL.ENABLE is written. -EOPNOTSUPP
 * from hardware that cannot.
 */
int vtpu_hw_reset_engines(struct vtpu_device *vdev)
{
	u32 status;
	int ret;

	if (!(vdev->caps & VTPU_CAPS_ENGINE_RESET))
		return -EOPNOTSUPP;
	if (vtpu_inject(vdev, VTPU_INJECT_ENGINES))
		return -ETIMEDOUT;
	vtpu_write(vdev, VTPU_REG_CTRL, VTPU_CTRL_ENGINE_RESET);
	ret = readl_poll_timeout(vdev->regs + VTPU_REG_STATUS, status,
				 !(status & VTPU_STATUS_RESETTING) || status == U32_MAX,
				 RESET_POLL_US, ENGINES_TIMEOUT_US);
	/* All ones come from a device that is no longer there. */
	return status == U32_MAX ? -ENODEV : ret;
}

/* Resets the whole device and enables it: queues disabled, contexts invalid. */
int vtpu_hw_start(struct vtpu_device *vdev)
{
	u64 timeout = RESET_TIMEOUT_US;
	u32 status;
	int ret;

	if (vtpu_inject(vdev, VTPU_INJECT_RESET))
		return -ETIMEDOUT;
	if (to_pci_dev(vdev->drm.dev)->is_virtfn)
		timeout += (vdev->hbm_size * CLEAR_TIMEOUT_US_PER_GIB) >> 30;
	vtpu_write(vdev, VTPU_REG_CTRL, VTPU_CTRL_RESET);
	ret = readl_poll_timeout(vdev->regs + VTPU_REG_STATUS, status,
				 status == U32_MAX || !(status & VTPU_STATUS_RESETTING),
				 RESET_POLL_US, timeout);
	if (ret) {
		drm_err(&vdev->drm, "device reset did not finish, status %#x\n", status);
		return ret;
	}
	/* All ones come from a device that is no longer there. */
	if (status == U32_MAX)
		return -ENODEV;
	vtpu_write(vdev, VTPU_REG_CTRL, VTPU_CTRL_ENABLE);
	status = vtpu_read(vdev, VTPU_REG_STATUS);
	if (!(status & VTPU_STATUS_READY)) {
		drm_err(&vdev->drm, "device is not ready after reset, status %#x\n", status);
		return -EIO;
	}
	return 0;
}

/*
 * Returns once no engine can use a translation of the context that its page
 * tables do not have, so that the memory behind it may be given away.
 */
int vtpu_hw_flush_tlb(struct vtpu_device *vdev, unsigned int context)
{
	u32 pending;

	if (vtpu_inject(vdev, VTPU_INJECT_TLB))
		return -ETIMEDOUT;
	/* The changed entries leave the write-combining buffers first. */
	wmb();
	vtpu_write(vdev, VTPU_REG_TLB_INVALIDATE, context);
	return readl_poll_timeout(vdev->regs + VTPU_REG_TLB_PENDING, pending,
				  !pending, RESET_POLL_US, TLB_TIMEOUT_US);
}
