/* SPDX-License-Identifier: MIT */
/*
 * vTPU driver interface: /dev/accel/accelN.
 *
 * Every structure is 64-bit aligned and the same for 32-bit processes. Padding
 * and unknown flags must be zero, or the call fails with EINVAL. Structures
 * grow only by appending, but for the elements of arrays, whose layout a new flag
 * of the call would change. Handles, VMs and queues belong to the open file and
 * die with it.
 */
#ifndef _UAPI_VTPU_ACCEL_H_
#define _UAPI_VTPU_ACCEL_H_

#include "drm.h"

#if defined(__cplusplus)
extern "C" {
#endif

#define DRM_VTPU_DEV_QUERY	0x00
#define DRM_VTPU_BO_CREATE	0x01
#define DRM_VTPU_BO_INFO	0x02
#define DRM_VTPU_BO_WAIT	0x03
#define DRM_VTPU_VM_CREATE	0x04
#define DRM_VTPU_VM_DESTROY	0x05
#define DRM_VTPU_VM_BIND	0x06
#define DRM_VTPU_QUEUE_CREATE	0x07
#define DRM_VTPU_QUEUE_DESTROY	0x08
#define DRM_VTPU_QUEUE_STATE	0x09
#define DRM_VTPU_SUBMIT		0x0a
#define DRM_VTPU_BO_USERPTR	0x0b
#define DRM_VTPU_PERFMON	0x0c
#define DRM_VTPU_QUEUE_MAP	0x0d
#define DRM_VTPU_QUEUE_WAIT	0x0e

/* ---- DEV_QUERY ---- */

enum drm_vtpu_query {
	DRM_VTPU_QUERY_INFO = 0,	/* struct drm_vtpu_info */
	DRM_VTPU_QUERY_MEMORY = 1,	/* struct drm_vtpu_memory */
	DRM_VTPU_QUERY_RESET = 2,	/* struct drm_vtpu_reset */
};

struct drm_vtpu_info {
	__u32 hw_version;	/* major in the upper half */
	__u32 isa_version;
	__u64 hbm_bytes;
	__u32 vmem_bytes;
	__u32 num_queues;	/* hardware queues */
	__u32 num_contexts;	/* hardware address spaces */
	__u32 page_bytes;	/* granule of VM_BIND */
	__u64 va_start;		/* first usable device address */
	__u64 va_end;		/* one past the last */
};

struct drm_vtpu_memory {
	__u64 hbm_bytes;
	__u64 hbm_used;		/* by all clients, with the driver's own */
	__u64 hbm_evicted;	/* HBM buffers, in bytes, now in system memory */
	__u64 evictions;	/* of buffers, since the driver was bound */
};

struct drm_vtpu_reset {
	__u64 device_resets;	/* since the driver was bound, as all of these */
	__u64 queue_resets;
	__u64 engine_resets;	/* of all engines, for a queue that did not stop */
	__u64 jobs_replayed;	/* jobs in flight that a reset did not cost */
	__u64 queues_lost;	/* queues that one did, through no fault of theirs */
	__u64 wedged;		/* 1: the device is given up until a function reset */
};

struct drm_vtpu_dev_query {
	__u32 query;		/* in: enum drm_vtpu_query */
	__u32 size;		/* in: bytes at data; out: bytes the driver knows */
	__u64 data;		/* in: user pointer; 0 asks for the size alone */
};

/* ---- Buffers ---- */

/*
 * In device memory; else system memory. While others need the room it may be
 * out of it, which only time tells: jobs and mappings find it in its place.
 */
#define DRM_VTPU_BO_HBM		(1 << 0)

struct drm_vtpu_bo_create {
	__u64 size;		/* in: bytes; out: rounded up to pages. Contents are zero */
	__u32 flags;		/* in: DRM_VTPU_BO_* */
	__u32 handle;		/* out: GEM handle */
};

struct drm_vtpu_bo_info {
	__u32 handle;		/* in */
	__u32 flags;		/* out: DRM_VTPU_BO_* */
	__u64 size;		/* out */
	__u64 mmap_offset;	/* out: for mmap() of the device file; 0: not to be mapped */
};

struct drm_vtpu_bo_wait {
	__u32 handle;		/* in */
	__u32 pad;
	__s64 timeout_ns;	/* in: absolute CLOCK_MONOTONIC; ETIMEDOUT when it passes */
};

#define DRM_VTPU_USERPTR_READ_ONLY	(1 << 0)	/* the device may not write: EACCES */

/*
 * Makes a buffer of the calling process's own memory. Its pages are pinned until
 * the buffer is freed, or the device is gone, and count against the RLIMIT_MEMLOCK
 * of the user (ENOMEM), but for CAP_IPC_LOCK. The buffer keeps the pages that were
 * there, whatever becomes of the addresses or of the process: with the file in
 * another's hands it outlives its maker, and so does the count. EFAULT when not all of the range is
 * memory that may be pinned, and written unless READ_ONLY; EOPNOTSUPP where only
 * bounce buffers reach it. It can be neither exported nor mapped.
 */
struct drm_vtpu_bo_userptr {
	__u64 addr;		/* in: page aligned */
	__u64 size;		/* in: multiple of pages, not 0 */
	__u32 flags;		/* in: DRM_VTPU_USERPTR_* */
	__u32 handle;		/* out: GEM handle */
};

/* ---- Address spaces ---- */

struct drm_vtpu_vm_create {
	__u32 flags;		/* in: zero */
	__u32 vm_id;		/* out */
};

struct drm_vtpu_vm_destroy {
	__u32 vm_id;		/* in */
	__u32 pad;
};

enum drm_vtpu_vm_bind_op {
	DRM_VTPU_VM_BIND_MAP = 0,
	/* Exactly one earlier MAP's range; at once, also for jobs in flight. */
	DRM_VTPU_VM_BIND_UNMAP = 1,
};

#define DRM_VTPU_VM_READ	(1 << 0)
#define DRM_VTPU_VM_WRITE	(1 << 1)
#define DRM_VTPU_VM_EXEC	(1 << 2)

struct drm_vtpu_vm_bind {
	__u32 vm_id;		/* in */
	__u32 op;		/* in: enum drm_vtpu_vm_bind_op */
	__u32 handle;		/* in: GEM handle; 0 for UNMAP */
	__u32 flags;		/* in: DRM_VTPU_VM_*, at least one; 0 for UNMAP */
	__u64 bo_offset;	/* in: page aligned; 0 for UNMAP */
	__u64 va;		/* in: page aligned, chosen by the caller, free for MAP */
	__u64 size;		/* in: multiple of pages, not 0 */
};

/* ---- Queues ---- */

enum drm_vtpu_priority {
	DRM_VTPU_PRIORITY_LOW = 0,
	DRM_VTPU_PRIORITY_NORMAL = 1,
	DRM_VTPU_PRIORITY_HIGH = 2,	/* needs CAP_SYS_NICE */
};

#define DRM_VTPU_QUEUE_USER	(1 << 0)	/* the process fills its ring: see QUEUE_MAP */

#define DRM_VTPU_MAX_TIMEOUT_MS	600000

/*
 * Two limits end what hangs (DRM_VTPU_QUEUE_HUNG), each of one command and of the
 * time that it executes: waiting for other queues is not counted. timeout_ms is how
 * long it may take, and a WAIT of SUBMIT wait; stall_ms how long it may go without
 * completing an instruction. It may be noticed a quarter later.
 */
struct drm_vtpu_queue_create {
	__u32 vm_id;		/* in: may not be destroyed before the queue is */
	__u32 priority;		/* in: enum drm_vtpu_priority */
	__u32 flags;		/* in: DRM_VTPU_QUEUE_* */
	__u32 timeout_ms;	/* in: at most DRM_VTPU_MAX_TIMEOUT_MS; 0: the driver's default */
	__u32 queue_id;		/* out */
	__u32 stall_ms;		/* in: likewise; 0: as timeout_ms, if that is not 0 */
};

struct drm_vtpu_queue_destroy {
	__u32 queue_id;		/* in */
	__u32 pad;
};

enum drm_vtpu_queue_status {
	DRM_VTPU_QUEUE_OK = 0,
	DRM_VTPU_QUEUE_FAULTED = 1,	/* the device refused an access or an instruction */
	DRM_VTPU_QUEUE_HUNG = 2,	/* a command took too long, or got nowhere */
	DRM_VTPU_QUEUE_LOST = 3,	/* the device was reset or is gone */
};

/*
 * Status of a queue. A queue that is not OK takes no more submissions (EIO);
 * its fences carry the error (-EFAULT, -ETIMEDOUT, -ENODEV, -ECANCELED for
 * jobs behind the guilty one or of a destroyed queue, -ESRCH for those of a
 * destroyed queue that it had not begun). The fault fields are the device's
 * record.
 *
 * A queue that hangs and does not stop costs a reset of the engines, or of the
 * device at last. Other queues go on after it, with what they had in flight,
 * but for one whose job was half done then and is not DRM_VTPU_SUBMIT_RESTARTABLE,
 * and for user queues (of engines: those at work): these are LOST, with -ENODEV.
 */
struct drm_vtpu_queue_state {
	__u32 queue_id;		/* in */
	__u32 status;		/* out: enum drm_vtpu_queue_status */
	__u32 fault_cause;	/* out: the hardware's enum fault; 0 when none */
	__u32 fault_access;	/* out: 1 read, 2 write, 3 execute, 0 none */
	__u64 fault_addr;	/* out */
	__u32 fault_pc;		/* out: byte offset in the program, ~0 when none */
	__u32 fault_cookie;	/* out: cookie of the guilty command */
	__u64 completed;	/* out: jobs completed; the fence word of a user queue */
};

/*
 * A user queue (DRM_VTPU_QUEUE_USER; EOPNOTSUPP where system memory is reached
 * only through bounce buffers) takes no SUBMIT. Instead the process maps three
 * pieces of it at the offsets that QUEUE_MAP tells, each whole and shared:
 *
 *   ring		ring_bytes, read and write: struct drm_vtpu_ring_entry[]
 *   fence page		a page, read only: the fence word is its first eight bytes
 *   doorbell page	a page, write: its first four bytes are the doorbell
 *
 * To submit, write entry n to ring[n % entries], then with release order the
 * number of all entries written so far, modulo 2^32, to the doorbell. When an
 * entry with DRM_VTPU_RING_FENCE has ended its fence value is in the fence word,
 * and all that it wrote is in memory; so have those before it. An entry's place
 * is free again once it has ended. QUEUE_WAIT sleeps until then.
 *
 * The limit timeout_ms is that of one entry's execution, waiting for others not
 * counted; a WAIT entry has none. What an entry does wrong ends its queue, as
 * with jobs: the fence word then stays as it is, so who polls it has to look at
 * QUEUE_STATE or QUEUE_WAIT, too. A reset of the device ends every user queue
 * (DRM_VTPU_QUEUE_LOST). After the queue is destroyed or the device gone, its
 * mappings read zero, until the process writes there; it reaches nobody.
 *
 * All that is mapped in its VM stays in HBM while the queue lives, and the device
 * awake. The driver knows nothing of single entries: BO_WAIT does not wait for them,
 * and a buffer that is unmapped too early is a fault of this queue alone.
 */
#define DRM_VTPU_RING_FENCE	(1 << 0)	/* writes fence when it has ended */
#define DRM_VTPU_RING_IRQ	(1 << 1)	/* and wakes QUEUE_WAIT */

/* The hardware's ring entry, little endian. */
struct drm_vtpu_ring_entry {
	__u8 op;		/* in: enum drm_vtpu_op */
	__u8 flags;		/* in: DRM_VTPU_RING_* */
	__u16 pad0;		/* in: zero */
	__u32 cookie;		/* in: the caller's, shown in traces and faults */
	__u64 fence;		/* in: for the fence word; let them ascend */
	__u64 pad1;		/* in: zero */
	__u64 payload[5];	/* in: as in struct drm_vtpu_cmd */
};

struct drm_vtpu_queue_map {
	__u32 queue_id;		/* in: of a user queue */
	__u32 pad;
	__u64 ring_offset;	/* out: for mmap() of the device file */
	__u64 ring_bytes;	/* out: a power of two */
	__u64 fence_offset;	/* out */
	__u64 doorbell_offset;	/* out */
};

/*
 * Sleeps until the fence word is at least value. An entry with FENCE but not IRQ
 * may be noticed up to a second late. EIO when the queue ended before that.
 */
struct drm_vtpu_queue_wait {
	__u32 queue_id;		/* in: of a user queue */
	__u32 pad;
	__u64 value;		/* in */
	__s64 timeout_ns;	/* in: absolute CLOCK_MONOTONIC; ETIMEDOUT when it passes */
};

/* ---- Submission ---- */

enum drm_vtpu_op {		/* the hardware's ring commands */
	DRM_VTPU_OP_NOP = 1,
	DRM_VTPU_OP_RUN = 2,
	DRM_VTPU_OP_COPY = 3,
	DRM_VTPU_OP_FILL = 4,
	DRM_VTPU_OP_WAIT = 5,
	DRM_VTPU_OP_SIGNAL = 6,
	DRM_VTPU_OP_TIMESTAMP = 7,
};

/*
 * One command; payload is bytes 24..63 of the hardware's ring entry, all
 * addresses in the queue's VM.
 */
struct drm_vtpu_cmd {
	__u32 op;		/* in: enum drm_vtpu_op */
	__u32 cookie;		/* in: the caller's, shown in traces and faults */
	__u64 payload[5];	/* in */
};

#define DRM_VTPU_SYNC_SIGNAL	(1 << 0)	/* signalled by the job; else waited for */
#define DRM_VTPU_SYNC_TIMELINE	(1 << 1)	/* point counts; else a binary syncobj */

struct drm_vtpu_sync {
	__u32 handle;		/* in: syncobj */
	__u32 flags;		/* in: DRM_VTPU_SYNC_* */
	__u64 point;		/* in: zero for a binary syncobj */
};

#define DRM_VTPU_MAX_CMDS	64
#define DRM_VTPU_MAX_SYNCS	64

#define DRM_VTPU_SUBMIT_RESTARTABLE	(1 << 0)	/* may run again when it was half done */

/*
 * Submits one job: its commands run in order, after every waited sync and
 * every earlier job of the queue; then the signalled syncs fire.
 * Buffers mapped in the VM stay alive until the job ends. ENOSPC when those in
 * HBM do not fit there together; EBUSY when 16384 jobs of the queue have not ended.
 */
struct drm_vtpu_submit {
	__u32 queue_id;		/* in */
	__u32 flags;		/* in: DRM_VTPU_SUBMIT_* */
	__u64 cmds;		/* in: user pointer, struct drm_vtpu_cmd[] */
	__u64 syncs;		/* in: user pointer, struct drm_vtpu_sync[] */
	__u32 num_cmds;		/* in: 1..DRM_VTPU_MAX_CMDS */
	__u32 num_syncs;	/* in: 0..DRM_VTPU_MAX_SYNCS */
};

/* ---- Counters ---- */

/* Of a queue, since it was last started: made, or gone on with after a reset. */
enum drm_vtpu_queue_counter {
	DRM_VTPU_COUNTER_QUEUE_BUSY_NS = 1,	/* executing commands */
	DRM_VTPU_COUNTER_QUEUE_COMMAND_NS = 2,	/* of that, for the command in progress or last */
	DRM_VTPU_COUNTER_QUEUE_INSTRUCTIONS = 3,	/* completed */
	DRM_VTPU_COUNTER_QUEUE_PREEMPTIONS = 4,	/* a program set aside for another queue */
};

/*
 * Of the device, for all clients, from its last reset on. MODEL_* are there when
 * the device times programs on a model of a chip, in cycles of that, of programs
 * that ended well; else EOPNOTSUPP.
 */
enum drm_vtpu_device_counter {
	DRM_VTPU_COUNTER_TIME_NS = 1,		/* the clock of TIMESTAMP */
	DRM_VTPU_COUNTER_BUSY_NS = 2,		/* executing commands */
	DRM_VTPU_COUNTER_PROGRAMS = 3,		/* completed */
	DRM_VTPU_COUNTER_INSTRUCTIONS = 4,	/* completed */
	DRM_VTPU_COUNTER_HBM_BYTES = 5,		/* streamed from HBM by the engines */
	DRM_VTPU_COUNTER_ECC_CORRECTED = 6,	/* errors of HBM that did no harm */
	DRM_VTPU_COUNTER_MODEL_MHZ = 16,	/* cycles a microsecond, constant */
	DRM_VTPU_COUNTER_MODEL_CYCLES = 17,	/* programs, from start to end */
	DRM_VTPU_COUNTER_MODEL_HBM_READ = 18,	/* bytes, in whole bursts */
	DRM_VTPU_COUNTER_MODEL_HBM_WRITTEN = 19,	/* the same */
	DRM_VTPU_COUNTER_MODEL_VMEM_BYTES = 20,	/* read and written in VMEM */
	DRM_VTPU_COUNTER_MODEL_OPS = 21,	/* arithmetic; a multiply-add is two */
	DRM_VTPU_COUNTER_MODEL_BUSY_SEQ = 22,	/* the sequencer has an instruction */
	DRM_VTPU_COUNTER_MODEL_BUSY_DMA = 23,	/* as has the DMA engine */
	DRM_VTPU_COUNTER_MODEL_BUSY_MXU = 24,	/* the matrix engine */
	DRM_VTPU_COUNTER_MODEL_BUSY_VPU = 25,	/* the vector engine */
	DRM_VTPU_COUNTER_MODEL_BUSY_LINK = 26,	/* the link engine */
	DRM_VTPU_COUNTER_MODEL_WAIT = 27,	/* engines wait for a counter, summed up */
	DRM_VTPU_COUNTER_MODEL_FULL = 28,	/* the sequencer waits for room in a queue */
	DRM_VTPU_COUNTER_MODEL_SYNC = 29,	/* the sequencer waits for the engines */
	DRM_VTPU_COUNTER_MODEL_HBM_STALL = 30,	/* instructions take longer: bandwidth */
};

struct drm_vtpu_counter {
	__u32 id;		/* in: an enum above; EINVAL when the driver does not know it */
	__u32 pad;
	__u64 value;		/* out */
};

#define DRM_VTPU_MAX_COUNTERS	64

/*
 * Reads counters, one after the other. Those of the device show what others do and
 * need CAP_PERFMON (EACCES).
 */
struct drm_vtpu_perfmon {
	__u32 queue_id;		/* in: a queue's counters; 0: the device's */
	__u32 num_counters;	/* in: 1..DRM_VTPU_MAX_COUNTERS */
	__u64 counters;		/* in: user pointer, struct drm_vtpu_counter[] */
};

#define DRM_IOCTL_VTPU_DEV_QUERY \
	DRM_IOWR(DRM_COMMAND_BASE + DRM_VTPU_DEV_QUERY, struct drm_vtpu_dev_query)
#define DRM_IOCTL_VTPU_BO_CREATE \
	DRM_IOWR(DRM_COMMAND_BASE + DRM_VTPU_BO_CREATE, struct drm_vtpu_bo_create)
#define DRM_IOCTL_VTPU_BO_INFO \
	DRM_IOWR(DRM_COMMAND_BASE + DRM_VTPU_BO_INFO, struct drm_vtpu_bo_info)
#define DRM_IOCTL_VTPU_BO_WAIT \
	DRM_IOW(DRM_COMMAND_BASE + DRM_VTPU_BO_WAIT, struct drm_vtpu_bo_wait)
#define DRM_IOCTL_VTPU_VM_CREATE \
	DRM_IOWR(DRM_COMMAND_BASE + DRM_VTPU_VM_CREATE, struct drm_vtpu_vm_create)
#define DRM_IOCTL_VTPU_VM_DESTROY \
	DRM_IOW(DRM_COMMAND_BASE + DRM_VTPU_VM_DESTROY, struct drm_vtpu_vm_destroy)
#define DRM_IOCTL_VTPU_VM_BIND \
	DRM_IOW(DRM_COMMAND_BASE + DRM_VTPU_VM_BIND, struct drm_vtpu_vm_bind)
#define DRM_IOCTL_VTPU_QUEUE_CREATE \
	DRM_IOWR(DRM_COMMAND_BASE + DRM_VTPU_QUEUE_CREATE, struct drm_vtpu_queue_create)
#define DRM_IOCTL_VTPU_QUEUE_DESTROY \
	DRM_IOW(DRM_COMMAND_BASE + DRM_VTPU_QUEUE_DESTROY, struct drm_vtpu_queue_destroy)
#define DRM_IOCTL_VTPU_QUEUE_STATE \
	DRM_IOWR(DRM_COMMAND_BASE + DRM_VTPU_QUEUE_STATE, struct drm_vtpu_queue_state)
#define DRM_IOCTL_VTPU_SUBMIT \
	DRM_IOW(DRM_COMMAND_BASE + DRM_VTPU_SUBMIT, struct drm_vtpu_submit)
#define DRM_IOCTL_VTPU_BO_USERPTR \
	DRM_IOWR(DRM_COMMAND_BASE + DRM_VTPU_BO_USERPTR, struct drm_vtpu_bo_userptr)
#define DRM_IOCTL_VTPU_PERFMON \
	DRM_IOW(DRM_COMMAND_BASE + DRM_VTPU_PERFMON, struct drm_vtpu_perfmon)
#define DRM_IOCTL_VTPU_QUEUE_MAP \
	DRM_IOWR(DRM_COMMAND_BASE + DRM_VTPU_QUEUE_MAP, struct drm_vtpu_queue_map)
#define DRM_IOCTL_VTPU_QUEUE_WAIT \
	DRM_IOW(DRM_COMMAND_BASE + DRM_VTPU_QUEUE_WAIT, struct drm_vtpu_queue_wait)

#if defined(__cplusplus)
}
#endif

#endif /* _UAPI_VTPU_ACCEL_H_ */
