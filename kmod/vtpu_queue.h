/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_QUEUE_H_
#define _VTPU_QUEUE_H_

#include <linux/kref.h>
#include <linux/list.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <drm/gpu_scheduler.h>

#include "vtpu_device.h"

struct drm_printer;
struct vtpu_fence;
struct vtpu_userq;
struct vtpu_vm;

/* A ring entry as the device reads it. */
struct vtpu_ring_entry {
	u8 op;
	u8 flags;
	__le16 reserved0;
	__le32 cookie;
	__le64 fence;
	__le64 reserved1;
	__le64 payload[5];
};

/* More than any job's commands, so that jobs queue up in the device. */
#define VTPU_RING_LOG2		9
#define VTPU_RING_ENTRIES	BIT(VTPU_RING_LOG2)

/* What the first job in flight was last seen to have done, and what it may take. */
struct vtpu_progress {
	unsigned long limit;		/* jiffies, of one command's execution */
	unsigned long stall;		/* jiffies without progress */
	unsigned long looked;		/* jiffies when it was looked at; read by all */
	unsigned long since;		/* jiffies when it was seen to get on */
	u64 job;			/* its seqno */
	u32 head;			/* where the device was then */
	u64 instructions;
	u64 command_ns;
};

/*
 * A hardware queue: as old as the device, lent to one vtpu_queue at a time. Its
 * scheduler and lock are named by fences that may outlive the device, hence
 * the count.
 */
struct vtpu_hwq {
	struct kref ref;		/* the device, and each fence */
	struct rcu_head rcu;
	struct vtpu_device *vdev;
	unsigned int index;
	unsigned int vector;
	char name[16];
	u64 fence_context;
	struct drm_gpu_scheduler sched;

	/* Coherent; the device reads the ring and writes the fence word. */
	struct vtpu_ring_entry *ring;
	__le64 *fence_word;
	dma_addr_t ring_dma;
	dma_addr_t fence_dma;

	spinlock_t lock;		/* taken by interrupts; innermost */
	struct vtpu_queue *queue;	/* owner or NULL; set under reset_lock and lock */
	struct list_head inflight;	/* of vtpu_fence in ring order; lock */
	unsigned long head_since;	/* jiffies when its first job became that; lock */
	u64 begun;			/* seqno of the job that a reset may interrupt; lock */
	u64 seq;			/* of the last job pushed; lock */
	u32 tail;			/* entries produced since ENABLE; lock */
	bool enabled;			/* jobs enter the ring at once; lock */

	struct vtpu_progress progress;	/* reset_lock */
};

/* So that a process cannot make the kernel keep jobs without end. */
#define VTPU_QUEUE_MAX_JOBS	16384

/* A queue as a process sees it. */
struct vtpu_queue {
	struct kref ref;		/* the file, and each job */
	struct vtpu_hwq *hwq;
	struct vtpu_vm *vm;		/* held until vtpu_queue_kill() */
	struct vtpu_file *file;		/* outlives its hold of the hwq */
	struct vtpu_user *user;		/* charged for the hardware queue */
	struct drm_sched_entity entity;
	struct vtpu_userq *userq;	/* NULL unless its process fills the ring */
	u32 priority;
	u32 timeout_ms;			/* as its process said */
	u32 stall_ms;
	pid_t pid;			/* who created it */
	char comm[TASK_COMM_LEN];
	bool dead;			/* takes no jobs; dma_resv of the VM */
	atomic_t num_jobs;		/* not yet freed; at most VTPU_QUEUE_MAX_JOBS */

	/* hwq->lock, and constant once the queue is not OK. */
	enum drm_vtpu_queue_status status;
	u32 fault_cause;
	u32 fault_access;
	u64 fault_addr;
	u32 fault_pc;
	u32 fault_cookie;
	u64 completed;

	/* The device's time, now: since it was enabled; hwq->lock */
	u64 busy_before;
	u64 busy_now;
};

/* Is the hardware lent to a queue whose process fills the ring? hwq->lock or reset_lock. */
static inline bool vtpu_hwq_is_user(const struct vtpu_hwq *hwq)
{
	return hwq->queue && hwq->queue->userq;
}

static inline unsigned int vtpu_hwq_reg(const struct vtpu_hwq *hwq, unsigned int reg)
{
	return reg + hwq->index * VTPU_QUEUE_STRIDE;
}

/* vtpu_queue.c */
int vtpu_hwq_init(struct vtpu_device *vdev, unsigned int index);
void vtpu_hwq_get(struct vtpu_hwq *hwq);
void vtpu_hwq_put(struct vtpu_hwq *hwq);
int vtpu_hwq_start(struct vtpu_hwq *hwq);
int vtpu_hwq_stop(struct vtpu_hwq *hwq, enum drm_vtpu_queue_status status);

struct vtpu_queue *vtpu_queue_get(struct vtpu_file *vfile, u32 id);
void vtpu_queue_put(struct vtpu_queue *queue);
void vtpu_queue_kill(struct vtpu_queue *queue);

int vtpu_queue_create_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int vtpu_queue_destroy_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int vtpu_queue_state_ioctl(struct drm_device *drm, void *data, struct drm_file *file);

/* vtpu_fault.c */
void vtpu_hwq_fault(struct vtpu_hwq *hwq);

/* vtpu_userq.c */
const struct vtpu_ring_entry *vtpu_hwq_ring(const struct vtpu_hwq *hwq);
const __le64 *vtpu_hwq_fence_word(const struct vtpu_hwq *hwq);

/* vtpu_ring.c */
u64 vtpu_ring_entry_get(const struct vtpu_ring_entry *entry, unsigned int offset,
			unsigned int size);
void vtpu_ring_entry_print(const struct vtpu_ring_entry *entry, u32 n, struct drm_printer *p);

/* vtpu_sched.c */
int vtpu_sched_init(struct vtpu_hwq *hwq);

#endif
