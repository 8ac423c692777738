// SPDX-License-Identifier: GPL-2.0
/*
 * Device core dumps, of a fault or a hang. What the device says is copied at
 * once, without sleeping; what lies in memory is read and put into words by a
 * work item, which holds the address space until then. docs/driver-telemetry.md
 * has the format; `python3 -m vtpu_compiler coredump` reads it.
 */

#include <linux/ascii85.h>
#include <linux/devcoredump.h>
#include <linux/pm_runtime.h>
#include <linux/utsname.h>
#include <linux/vmalloc.h>
#include <drm/drm_managed.h>
#include <drm/drm_print.h>

#include "vtpu_compat.h"
#include "vtpu_coredump.h"
#include "vtpu_pm.h"
#include "vtpu_queue.h"
#include "vtpu_regs.h"
#include "vtpu_vm.h"
#include "vtpu_vm_walk.h"

#define MAX_RANGES	512
/* A dump is not worth the kernel's report of an allocation that fails. */
#define DUMP_GFP	(GFP_KERNEL | __GFP_NOWARN)
#define ARG_BYTES	SZ_64K		/* of what each argument of the program points to */
#define LINE_WORDS	20
/* Words, and what memory becomes at its worst: 5 characters of 4 bytes, and newlines. */
#define TEXT_BYTES	(SZ_256K)
#define ASCII_BYTES(n)	((n) / 16 * 21 + SZ_1K)
#define DUMP_BYTES	(TEXT_BYTES + ASCII_BYTES(VTPU_MAX_CODE_BYTES) + \
			 VTPU_MAX_ARGS * ASCII_BYTES(ARG_BYTES))

struct vtpu_coredump {
	struct vtpu_device *vdev;
	struct work_struct work;
	unsigned long busy;		/* bit 0: what follows belongs to the work */
	struct vtpu_queue *queue;	/* held */
	struct vtpu_vm *vm;		/* held */
	ktime_t time;
	struct vtpu_device_regs device_regs;
	struct vtpu_queue_regs queue_regs;
	u64 context_root;
	u64 fence;			/* what the device wrote last */
	u64 seq;			/* of the last job pushed */
	struct vtpu_ring_entry ring[VTPU_RING_ENTRIES];
};

static u64 vtpu_dump_reg(const struct vtpu_coredump *dump, unsigned int reg)
{
	return vtpu_queue_regs_get(&dump->queue_regs, reg);
}

static bool vtpu_dump_is_fault(const struct vtpu_coredump *dump)
{
	return vtpu_dump_reg(dump, VTPU_REG_Q_QSTATUS) == VTPU_QUEUE_STATE_FAULTED;
}

/* The entry that faulted or that the device is at, as HEAD counts. */
static u32 vtpu_dump_guilty(const struct vtpu_coredump *dump)
{
	return vtpu_dump_reg(dump, vtpu_dump_is_fault(dump) ? VTPU_REG_Q_FAULT_ENTRY :
							      VTPU_REG_Q_HEAD);
}

static void vtpu_dump_bytes(const void *data, size_t size, struct drm_printer *p)
{
	char word[ASCII85_BUFSZ];
	u32 value;

	for (size_t at = 0; at < size; at += sizeof(value)) {
		memcpy(&value, data + at, sizeof(value));
		drm_puts(p, ascii85_encode(value, word));
		if (at / sizeof(value) % LINE_WORDS == LINE_WORDS - 1)
			drm_puts(p, "\n");
	}
	drm_puts(p, "\n");
}

/* Sizes are multiples of 4; bytes that could not be read are left out. */
static void vtpu_dump_memory(struct vtpu_coredump *dump, const char *name, u64 va, size_t size,
			     void *buffer, struct drm_printer *p)
{
	size_t got = ALIGN_DOWN(vtpu_vm_read(dump->vm, va, buffer, size), sizeof(u32));

	drm_printf(p, "[memory %s va=%#llx bytes=%zu]\n", name, va, got);
	vtpu_dump_bytes(buffer, got, p);
}

/* The program that was at work, its arguments, and what they point to. */
static void vtpu_dump_program(struct vtpu_coredump *dump, struct drm_printer *p)
{
	const struct vtpu_ring_entry *entry = &dump->ring[vtpu_dump_guilty(dump) %
							  VTPU_RING_ENTRIES];
	u32 code_bytes, num_args;
	u64 args[VTPU_MAX_ARGS];
	void *buffer;

	if (entry->op != VTPU_CMD_RUN)
		return;
	code_bytes = vtpu_ring_entry_get(entry, VTPU_CMD_RUN_CODE_BYTES, 4);
	num_args = vtpu_ring_entry_get(entry, VTPU_CMD_RUN_NUM_ARGS, 4);
	/* The device checks these too; it may be why it stopped. */
	if (code_bytes > VTPU_MAX_CODE_BYTES || num_args > VTPU_MAX_ARGS)
		return;
	buffer = __vmalloc(max_t(size_t, code_bytes, ARG_BYTES), DUMP_GFP);
	if (!buffer)
		return;

	vtpu_dump_memory(dump, "code", vtpu_ring_entry_get(entry, VTPU_CMD_RUN_CODE_VA, 8),
			 code_bytes, buffer, p);
	num_args = vtpu_vm_read(dump->vm, vtpu_ring_entry_get(entry, VTPU_CMD_RUN_ARGS_VA, 8),
				args, num_args * sizeof(*args)) / sizeof(*args);
	drm_puts(p, "[arguments]\n");
	for (unsigned int i = 0; i < num_args; i++)
		drm_printf(p, "%u: %#llx\n", i, le64_to_cpu((__force __le64)args[i]));
	for (unsigned int i = 0; i < num_args; i++) {
		char name[16];

		snprintf(name, sizeof(name), "argument%u", i);
		vtpu_dump_memory(dump, name, le64_to_cpu((__force __le64)args[i]), ARG_BYTES,
				 buffer, p);
	}
	vfree(buffer);
}

static void vtpu_dump_ranges(struct vtpu_coredump *dump, struct drm_printer *p)
{
	struct vtpu_range range = {};
	unsigned int n = 0;

	drm_puts(p, "[mappings]\n");
	while (n++ < MAX_RANGES && !vtpu_vm_next_range(dump->vm, range.va + range.size, &range))
		vtpu_range_print(&range, p);
}

static void vtpu_dump_ring(struct vtpu_coredump *dump, struct drm_printer *p)
{
	u32 guilty = vtpu_dump_guilty(dump);
	u32 tail = vtpu_dump_reg(dump, VTPU_REG_Q_TAIL);

	drm_puts(p, "[ring]\n");
	/* A bad doorbell may have made a tail of anything. */
	for (u32 n = guilty, left = min_t(u32, tail - guilty, VTPU_RING_ENTRIES); left; n++, left--)
		vtpu_ring_entry_print(&dump->ring[n % VTPU_RING_ENTRIES], n, p);
}

static void vtpu_dump_print(struct vtpu_coredump *dump, struct drm_printer *p)
{
	const struct vtpu_queue *queue = dump->queue;
	struct timespec64 time = ktime_to_timespec64(dump->time);

	drm_puts(p, "vtpu coredump, version 1\n");
	drm_printf(p, "reason: %s\n", vtpu_dump_is_fault(dump) ? "fault" : "hang");
	drm_printf(p, "time: %lld.%09ld\n", (s64)time.tv_sec, time.tv_nsec);
	drm_printf(p, "kernel: %s\n", init_utsname()->release);
	drm_printf(p, "device: %s\n", dev_name(dump->vdev->drm.dev));
	drm_printf(p, "process: %d %s\n", queue->pid, queue->comm);
	drm_printf(p, "queue: %u\n", queue->hwq->index);
	drm_printf(p, "priority: %u\n", queue->priority);
	drm_printf(p, "completed: %llu\n", queue->completed);
	drm_printf(p, "fence: %llu of %llu\n", dump->fence, dump->seq);
	drm_printf(p, "entry: %u\n", vtpu_dump_guilty(dump));
	drm_puts(p, "[device]\n");
	vtpu_device_regs_print(&dump->device_regs, p);
	drm_printf(p, "[queue]\nCTX_ROOT: %#llx\n", dump->context_root);
	vtpu_queue_regs_print(&dump->queue_regs, p);
	vtpu_dump_ring(dump, p);
	drm_puts(p, "[walk]\n");
	if (vtpu_dump_reg(dump, VTPU_REG_Q_FAULT_ACCESS))
		vtpu_vm_print_walk(dump->vm, vtpu_dump_reg(dump, VTPU_REG_Q_FAULT_ADDR), p);
	vtpu_dump_ranges(dump, p);
	vtpu_dump_program(dump, p);
	drm_puts(p, "[end]\n");
}

static void vtpu_coredump_work(struct work_struct *work)
{
	struct vtpu_coredump *dump = container_of(work, struct vtpu_coredump, work);
	struct vtpu_device *vdev = dump->vdev;
	struct drm_print_iterator iterator = { .remain = DUMP_BYTES };
	int idx;

	iterator.data = __vmalloc(DUMP_BYTES, DUMP_GFP);
	if (iterator.data) {
		struct drm_printer p = drm_coredump_printer(&iterator);
		size_t size;
		void *data;

		vtpu_dump_print(dump, &p);
		size = DUMP_BYTES - iterator.remain;
		data = __vmalloc(size, DUMP_GFP);
		if (data)
			memcpy(data, iterator.data, size);
		vfree(iterator.data);
		/* Thrown away if there is one that nobody has fetched yet. */
		if (data && drm_dev_enter(&vdev->drm, &idx)) {
			dev_coredumpv(vdev->drm.dev, data, size, GFP_KERNEL);
			drm_dev_exit(idx);
		} else {
			vfree(data);
		}
	}
	vtpu_vm_put(dump->vm);
	vtpu_queue_put(dump->queue);
	vtpu_pm_put(vdev);
	clear_bit_unlock(0, &dump->busy);
}

/*
 * For a queue that has stopped or is about to be stopped, with whatever makes it
 * stay its hardware queue's owner: hwq->lock or reset_lock. From any context.
 * While one dump is being written others are not taken.
 */
void vtpu_coredump(struct vtpu_device *vdev, struct vtpu_queue *queue)
{
	struct vtpu_coredump *dump = vdev->coredump;
	struct vtpu_hwq *hwq;

	if (!queue || test_and_set_bit_lock(0, &dump->busy))
		return;
	hwq = queue->hwq;
	/* Awake, and to stay so until its memory has been read. */
	pm_runtime_get_noresume(vdev->drm.dev);
	kref_get(&queue->ref);
	kref_get(&queue->vm->ref);
	dump->queue = queue;
	dump->vm = queue->vm;
	dump->time = ktime_get_boottime();
	vtpu_device_regs_read(vdev, &dump->device_regs);
	vtpu_queue_regs_read(hwq, &dump->queue_regs);
	dump->context_root = vtpu_read64(vdev, VTPU_REG_CTX_ROOT +
					 queue->vm->context * sizeof(u64));
	dump->fence = le64_to_cpu(READ_ONCE(*vtpu_hwq_fence_word(hwq)));
	dump->seq = hwq->seq;
	memcpy(dump->ring, vtpu_hwq_ring(hwq), sizeof(dump->ring));
	queue_work(system_dfl_wq, &dump->work);
}

/*
 * Returns once no work holds anything of the caller's. Without locks: the work
 * takes those of address spaces.
 */
void vtpu_coredump_flush(struct vtpu_device *vdev)
{
	flush_work(&vdev->coredump->work);
}

/* Before a mapping goes: whoever sees a job fail unmaps its program at once. */
void vtpu_coredump_wait(struct vtpu_vm *vm)
{
	struct vtpu_coredump *dump = vm->vdev->coredump;

	if (test_bit_acquire(0, &dump->busy) && READ_ONCE(dump->vm) == vm)
		flush_work(&dump->work);
}

static void vtpu_coredump_fini(struct drm_device *drm, void *data)
{
	struct vtpu_coredump *dump = data;

	/* Each work belonged to a file, and each file has flushed it. */
	WARN_ON(dump->busy);
	kvfree(dump);
}

int vtpu_coredump_init(struct vtpu_device *vdev)
{
	struct vtpu_coredump *dump = kvzalloc(sizeof(*dump), GFP_KERNEL);

	if (!dump)
		return -ENOMEM;
	dump->vdev = vdev;
	INIT_WORK(&dump->work, vtpu_coredump_work);
	vdev->coredump = dump;
	return drmm_add_action_or_reset(&vdev->drm, vtpu_coredump_fini, dump);
}
