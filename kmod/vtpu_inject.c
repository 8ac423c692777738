// SPDX-License-Identifier: GPL-2.0
/*
 * Faults on demand: a number in debugfs fails the next so many, exactly; and the
 * kernel's own fault injection, if it is built in, with its probabilities and
 * filters. What the device itself is to do wrong is its host's to say.
 */

#include <linux/debugfs.h>

#include "vtpu_device.h"
#include "vtpu_inject.h"

static const char * const names[] = {
	[VTPU_INJECT_IRQ] = "irq",
	[VTPU_INJECT_RESET] = "reset",
	[VTPU_INJECT_ENGINES] = "engines",
	[VTPU_INJECT_STOP] = "stop",
	[VTPU_INJECT_TLB] = "tlb",
	[VTPU_INJECT_HBM] = "hbm",
	[VTPU_INJECT_MEMORY] = "memory",
};

static_assert(ARRAY_SIZE(names) == VTPU_NUM_INJECT);

static const DECLARE_FAULT_ATTR(never);

bool vtpu_inject(struct vtpu_device *vdev, enum vtpu_inject what)
{
	struct vtpu_injection *injection = &vdev->inject[what];

	if (unlikely(atomic_read(&injection->left) > 0) &&
	    atomic_dec_if_positive(&injection->left) >= 0)
		return true;
	return should_fail(&injection->attr, 1);
}

void vtpu_inject_init(struct vtpu_device *vdev, struct dentry *root)
{
	struct dentry *dir = debugfs_create_dir("inject", root);

	for (unsigned int i = 0; i < VTPU_NUM_INJECT; i++) {
		char fail[32];

		vdev->inject[i].attr = never;
		debugfs_create_atomic_t(names[i], 0600, dir, &vdev->inject[i].left);
		snprintf(fail, sizeof(fail), "fail_%s", names[i]);
		fault_create_debugfs_attr(fail, dir, &vdev->inject[i].attr);
	}
}
