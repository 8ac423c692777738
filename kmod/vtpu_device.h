/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The device and what belongs to it.
 *
 * Locks, outermost first:
 *
 *   vtpu_file.lock       handles of one open file
 *   mmap_lock            of a process that faults
 *   vtpu_device.residency_lock
 *                        who moves buffers between HBM and system memory
 *   vtpu_bo.lock         where a buffer is, and the list of its mappings
 *   vtpu_device.dma_lock which buffers are mapped for DMA; dma_resv of buffers,
 *                        their own or their exporters', are taken under it
 *   dma_resv of a VM     submission: order of jobs, its fences
 *   vtpu_device.bar_sem  taken (vtpu_bar_lock) by who reaches HBM or page tables
 *                        through the BAR, processes' page faults among them. A
 *                        reset by the PCI core takes it for writing: meanwhile
 *                        the BARs decode nothing, what is written to them is lost
 *   vtpu_userq.lock      whether page faults may show a user queue's pages
 *   vtpu_vm.lock         mappings and page tables of one address space
 *   vtpu_device.hbm_lock the HBM allocator
 *   vtpu_device.reset_lock
 *                        which queue and context slots are in use, and every
 *                        start, stop and reset of them. Timeouts take it, so
 *                        nothing may be allocated or faulted in under it.
 *   vtpu_hwq.lock        spinlock, interrupts off: jobs in flight, and it is
 *                        the lock of their fences
 *   vtpu_device.users_lock
 *                        what each user holds; none of the others is taken
 *                        under it
 *
 * Hardware is touched only while it is there and awake: between vtpu_dev_enter()
 * and vtpu_dev_exit(). A job keeps it awake from SUBMIT until it is freed, so what
 * has one needs drm_dev_enter() alone, and so do interrupts. vtpu_dev_enter() may
 * wake the device and is not called under reset_lock.
 */
#ifndef _VTPU_DEVICE_H_
#define _VTPU_DEVICE_H_

#include <linux/completion.h>
#include <linux/io.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/pci.h>
#include <linux/rwsem.h>
#include <linux/timer.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <drm/drm_device.h>
#include <drm/drm_drv.h>
#include <drm/drm_file.h>
#include <drm/drm_mm.h>

#include <vtpu_hw.h>
#include <drm/vtpu_accel.h>

#include "vtpu_inject.h"

struct vtpu_coredump;
struct vtpu_device;
struct vtpu_hwq;
struct vtpu_user;
struct vtpu_vm;

/*
 * What one open file may hold, so that no process exhausts the hardware's
 * queues and contexts alone.
 */
#define VTPU_FILE_MAX_QUEUES	8
#define VTPU_FILE_MAX_VMS	16

/* One MSI-X vector. Vector 0 carries errors, the others completions. */
struct vtpu_vector {
	struct vtpu_device *vdev;
	unsigned int index;
	int irq;
	/* Of completions: */
	unsigned long tick;		/* when it interrupted last; its handler's */
	unsigned int interrupts;	/* in that tick; its handler's */
	struct timer_list unmask;	/* pending while it is masked */
};

struct vtpu_device {
	struct drm_device drm;

	/* Set once in probe. */
	void __iomem *regs;
	void __iomem *doorbells;
	void __iomem *hbm;		/* all of HBM, write-combining */
	resource_size_t hbm_base;	/* its physical address, for mmap */
	resource_size_t doorbell_base;	/* likewise */
	u64 hbm_size;
	u32 hw_version;
	u32 isa_version;
	u32 vmem_size;
	u32 caps;
	unsigned int num_queues;
	unsigned int num_contexts;
	unsigned int num_vectors;
	struct vtpu_vector vectors[VTPU_NUM_MSIX];
	struct vtpu_hwq *hwq[VTPU_NUM_QUEUES];
	struct workqueue_struct *submit_wq;
	struct workqueue_struct *timeout_wq;	/* ordered: one timeout at a time */

	struct rw_semaphore bar_sem;	/* see above */
	bool frozen;			/* amid a link reset; bar_sem, or reset_lock to read */
	wait_queue_head_t thawed;	/* it is over */
	struct delayed_work recovery;	/* if it never is */

	struct mutex residency_lock;	/* see above */
	u64 validation;			/* the last one's number; residency_lock */
	atomic64_t uses;		/* a clock: jobs, and buffers that came back */

	struct mutex hbm_lock;		/* never held while HBM is written */
	struct drm_mm hbm_mm;		/* hbm_lock */
	u64 hbm_for_buffers;		/* set once: tables have the rest to themselves */
	u64 hbm_tables_from;		/* set once: below are none */
	u64 hbm_used;			/* hbm_lock */
	u64 hbm_evicted;		/* bytes that belong there but are not; hbm_lock */
	u64 hbm_evictions;		/* hbm_lock */
	struct list_head hbm_buffers;	/* of struct vtpu_bo, wherever they are; hbm_lock */
	wait_queue_head_t hbm_wait;	/* for hbm_settlings to grow: vtpu_hbm_settled() */
	u64 hbm_settlings;		/* hbm_lock */

	struct mutex reset_lock;	/* see above */
	struct vtpu_vm *contexts[VTPU_NUM_CONTEXTS];	/* reset_lock */
	bool wedged;			/* given up, starts no queue; reset_lock */
	struct work_struct wedged_work;	/* tells that it is, or is reset */
	bool asleep;			/* the machine is: schedulers stay stopped */
	struct notifier_block sleep_notifier;
	struct xarray saved;		/* HBM page -> its copy, while the machine sleeps */
	void *save_reserve;		/* pages for it */
	struct pci_saved_state *pci_state; /* as probe left it; what a link reset is followed by */

	struct mutex dma_lock;		/* see above */
	struct list_head dma_bos;	/* of struct vtpu_bo; dma_lock */

	struct mutex users_lock;	/* see above */
	struct list_head users;		/* of struct vtpu_user; users_lock */

	atomic64_t device_resets;
	atomic64_t engine_resets;
	atomic64_t queue_resets;
	atomic64_t jobs_replayed;
	atomic64_t queues_lost;		/* of innocents, to resets */
	atomic64_t busy_ns;		/* of queues that have lost their owners */
	struct vtpu_injection inject[VTPU_NUM_INJECT];
	atomic_t num_jobs;		/* not yet freed by the scheduler */

	struct vtpu_coredump *coredump;	/* set once in probe */

	struct completion test_irq;	/* self-test interrupt seen */
	bool testing_irq;
};

/* An open file. Handles live and die with it. */
struct vtpu_file {
	struct kref ref;		/* the process's, and its end's */
	struct vtpu_device *vdev;
	struct vtpu_user *user;
	struct work_struct end;		/* frees all it has; holds the device */
	struct completion ended;
	struct mutex lock;		/* pairs a look-up with its consequence */
	struct xarray vms;		/* vm_id -> struct vtpu_vm */
	struct xarray queues;		/* queue_id -> struct vtpu_queue */
	atomic64_t busy_ns;		/* of queues that are gone */
};

static inline struct vtpu_device *to_vtpu(struct drm_device *drm)
{
	return container_of(drm, struct vtpu_device, drm);
}

/* vtpu_hw.c */
int vtpu_hw_identify(struct vtpu_device *vdev);
int vtpu_hw_test_irq(struct vtpu_device *vdev);
int vtpu_hw_start(struct vtpu_device *vdev);
int vtpu_hw_reset_engines(struct vtpu_device *vdev);
int vtpu_hw_flush_tlb(struct vtpu_device *vdev, unsigned int context);

static inline u32 vtpu_read(struct vtpu_device *vdev, unsigned int reg)
{
	return readl(vdev->regs + reg);
}

static inline u64 vtpu_read64(struct vtpu_device *vdev, unsigned int reg)
{
	return readq(vdev->regs + reg);
}

static inline void vtpu_write(struct vtpu_device *vdev, unsigned int reg, u32 value)
{
	writel(value, vdev->regs + reg);
}

static inline void vtpu_write64(struct vtpu_device *vdev, unsigned int reg, u64 value)
{
	writeq(value, vdev->regs + reg);
}

/* vtpu_pm.c */
bool vtpu_dev_enter(struct vtpu_device *vdev, int *idx);
void vtpu_dev_exit(struct vtpu_device *vdev, int idx);

/* vtpu_pci.c */
void vtpu_bar_init(struct vtpu_device *vdev);
void vtpu_bar_lock(struct vtpu_device *vdev);
bool vtpu_bar_trylock(struct vtpu_device *vdev);
void vtpu_bar_unlock(struct vtpu_device *vdev);

/* vtpu_fault.c */
int vtpu_irq_init(struct vtpu_device *vdev);

/* vtpu_hbm.c */
int vtpu_hbm_init(struct vtpu_device *vdev);
int vtpu_hbm_place(struct vtpu_device *vdev, struct drm_mm_node *node, u64 size, u64 from);
int vtpu_hbm_clear(struct vtpu_device *vdev, const struct drm_mm_node *node);
int vtpu_hbm_alloc_table(struct vtpu_device *vdev, struct drm_mm_node *node);
void vtpu_hbm_free(struct vtpu_device *vdev, struct drm_mm_node *node);
void vtpu_hbm_free_locked(struct vtpu_device *vdev, struct drm_mm_node *node);
void vtpu_hbm_settled(struct vtpu_device *vdev);

/* A buffer that can use huge pages can use them wherever it is placed. */
static inline u64 vtpu_hbm_alignment(u64 size)
{
	return size >= VTPU_HUGE_PAGE_BYTES ? VTPU_HUGE_PAGE_BYTES : VTPU_PAGE_BYTES;
}

#endif
