/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_INJECT_H_
#define _VTPU_INJECT_H_

#include <linux/atomic.h>
#include <linux/fault-inject.h>

struct dentry;
struct vtpu_device;

/* Where the driver can be made to believe that something failed. */
enum vtpu_inject {
	VTPU_INJECT_IRQ,	/* a completion interrupt that did not come */
	VTPU_INJECT_RESET,	/* a device reset that does not end */
	VTPU_INJECT_ENGINES,	/* a reset of the engines that does not end */
	VTPU_INJECT_STOP,	/* a queue that does not stop */
	VTPU_INJECT_TLB,	/* a TLB flush that does not end */
	VTPU_INJECT_HBM,	/* no HBM left */
	VTPU_INJECT_MEMORY,	/* no memory for a job */
	VTPU_NUM_INJECT
};

struct vtpu_injection {
	atomic_t left;		/* times that are still to fail */
	struct fault_attr attr;	/* the kernel's way, where it is built in */
};

void vtpu_inject_init(struct vtpu_device *vdev, struct dentry *root);
bool vtpu_inject(struct vtpu_device *vdev, enum vtpu_inject what);

#endif
