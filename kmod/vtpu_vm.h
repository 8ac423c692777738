/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_VM_H_
#define _VTPU_VM_H_

#include <linux/dma-resv.h>
#include <linux/kref.h>
#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/sizes.h>
#include <drm/drm_mm.h>

struct drm_device;
struct drm_file;
struct vtpu_bo;
struct vtpu_device;
struct vtpu_file;
struct vtpu_user;

/* Addresses that mappings may use: the first 2 MiB catch null pointers. */
#define VTPU_PT_ENTRIES	(VTPU_PAGE_BYTES / sizeof(u64))
#define VTPU_VA_START	((u64)SZ_2M)
#define VTPU_VA_END	BIT_ULL(VTPU_VA_BITS)

/* A table of 512 entries in HBM, with what the driver must know to free it. */
struct vtpu_pt {
	struct drm_mm_node node;
	struct vtpu_user *user;		/* charged for it; NULL of a context's own */
	unsigned int level;		/* 0: entries are 4 KiB leaves */
	unsigned int used;		/* valid entries */
	struct list_head dead;		/* empty, waiting for the TLB flush */
	struct vtpu_pt *child[];	/* above level 0: tables below; NULL for a huge leaf */
};

/* A range of a buffer seen at a range of addresses. Holds the buffer. */
struct vtpu_mapping {
	struct drm_mm_node node;	/* in vm->mm; vm->lock */
	struct vtpu_vm *vm;
	struct vtpu_bo *bo;
	u64 bo_offset;			/* where in the buffer it begins */
	u64 rights;			/* bits of its leaves */
	struct list_head bo_link;	/* bo->lock */
	struct list_head evicted_link;	/* vm->evicted; vm->lock */
};

/*
 * An address space. Its queues hold it while they can run jobs, so nothing
 * uses its tables when the last reference goes.
 */
struct vtpu_vm {
	struct kref ref;
	struct vtpu_device *vdev;
	struct vtpu_user *user;		/* charged for the context */
	unsigned int context;		/* hardware slot */
	unsigned int num_queues;	/* vtpu_file.lock */
	pid_t pid;			/* who created it */
	char comm[TASK_COMM_LEN];
	bool lost;			/* its tables are gone; reset_lock */

	/*
	 * Every job of the VM's queues is pushed under this lock and leaves its
	 * fence here.
	 */
	struct dma_resv resv;
	u64 last_use;			/* by vdev->uses; written under resv */
	unsigned int pins;		/* its buffers stay in HBM; residency_lock */

	struct mutex lock;		/* MAP and UNMAP, one at a time */
	struct drm_mm mm;		/* of vtpu_mapping; lock */
	struct list_head evicted;	/* mappings of evicted buffers; lock, added to under resv */
	struct vtpu_pt *root;		/* tables below it; lock */
};

/* vtpu_pt.c */
struct vtpu_pt *vtpu_pt_alloc_root(struct vtpu_device *vdev);
void vtpu_pt_free(struct vtpu_device *vdev, struct vtpu_pt *pt);
int vtpu_pt_map(struct vtpu_vm *vm, u64 *va, u64 addr, u64 size, u64 bits, bool again);
void vtpu_pt_unmap(struct vtpu_vm *vm, struct vtpu_pt *pt, u64 va, u64 end,
		   struct list_head *dead);
void vtpu_pt_prune(struct vtpu_vm *vm, struct vtpu_pt *pt, u64 va, struct list_head *dead);

/* vtpu_vm.c */
struct vtpu_vm *vtpu_vm_get(struct vtpu_file *vfile, u32 id);
void vtpu_vm_put(struct vtpu_vm *vm);
int vtpu_mapping_detach(struct vtpu_mapping *mapping);
void vtpu_vm_flush_detached(struct vtpu_vm *vm);
void vtpu_mapping_attach(struct vtpu_mapping *mapping);
void vtpu_vm_restore(struct vtpu_device *vdev);
void vtpu_vm_lose_all(struct vtpu_device *vdev);

int vtpu_vm_create_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int vtpu_vm_destroy_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int vtpu_vm_bind_ioctl(struct drm_device *drm, void *data, struct drm_file *file);

#endif
