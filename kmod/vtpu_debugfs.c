// SPDX-License-Identifier: GPL-2.0
/*
 * debugfs: the driver's state and the device's, for people. Each file copies
 * under a lock and prints without it, and leaves a device alone that sleeps or
 * is gone. docs/driver-telemetry.md lists the files.
 */

#include <linux/debugfs.h>
#include <drm/drm_debugfs.h>
#include <drm/drm_file.h>
#include <drm/drm_print.h>

#include "vtpu_debugfs.h"
#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_inject.h"
#include "vtpu_job.h"
#include "vtpu_queue.h"
#include "vtpu_reset.h"
#include "vtpu_regs.h"
#include "vtpu_usage.h"
#include "vtpu_vm.h"
#include "vtpu_vm_walk.h"

static const char * const state_names[] = VTPU_QUEUE_STATE_NAMES;
static const char * const status_names[] = {
	[DRM_VTPU_QUEUE_OK] = "ok",
	[DRM_VTPU_QUEUE_FAULTED] = "faulted",
	[DRM_VTPU_QUEUE_HUNG] = "hung",
	[DRM_VTPU_QUEUE_LOST] = "lost",
};

static struct vtpu_device *vtpu_of(struct seq_file *m)
{
	struct drm_debugfs_entry *entry = m->private;

	return to_vtpu(entry->dev);
}

static int vtpu_registers_show(struct seq_file *m, void *unused)
{
	struct vtpu_device *vdev = vtpu_of(m);
	struct drm_printer p = drm_seq_file_printer(m);
	struct vtpu_device_regs regs;
	int ret, idx;

	ret = vtpu_peek_begin(vdev, &idx);
	if (ret)
		return ret;
	vtpu_device_regs_read(vdev, &regs);
	vtpu_peek_end(vdev, idx);
	vtpu_device_regs_print(&regs, &p);
	return 0;
}

/* A hardware queue and its owner at one moment. */
struct vtpu_hwq_view {
	pid_t pid;
	char comm[TASK_COMM_LEN];
	enum drm_vtpu_queue_status status;
	u32 priority;
	unsigned int context;
	unsigned int timeout_ms;
	unsigned int stall_ms;
	unsigned int inflight;
	u64 completed;
	u64 seq;
	bool enabled;
};

static bool vtpu_hwq_look(struct vtpu_hwq *hwq, struct vtpu_hwq_view *view)
{
	const struct vtpu_queue *queue;
	unsigned long flags;

	spin_lock_irqsave(&hwq->lock, flags);
	queue = hwq->queue;
	if (queue) {
		*view = (struct vtpu_hwq_view) {
			.pid = queue->pid,
			.status = queue->status,
			.priority = queue->priority,
			.context = queue->vm->context,
			.timeout_ms = jiffies_to_msecs(hwq->progress.limit),
			.stall_ms = jiffies_to_msecs(hwq->progress.stall),
			.inflight = list_count_nodes(&hwq->inflight),
			.completed = queue->completed,
			.seq = hwq->seq,
			.enabled = hwq->enabled,
		};
		strscpy(view->comm, queue->comm);
	}
	spin_unlock_irqrestore(&hwq->lock, flags);
	return queue;
}

static void vtpu_hwq_show(struct vtpu_hwq *hwq, const struct vtpu_hwq_view *view,
			  struct drm_printer *p)
{
	struct vtpu_device *vdev = hwq->vdev;
	struct vtpu_queue_regs regs;
	int idx;

	drm_printf(p, "queue %u: pid %d %s\n", hwq->index, view->pid, view->comm);
	drm_printf(p, "  status %s%s, context %u, priority %u, timeout %u ms, stall %u ms\n",
		   status_names[view->status], view->enabled ? "" : " (stopped)",
		   view->context, view->priority, view->timeout_ms, view->stall_ms);
	drm_printf(p, "  jobs: %llu completed, %u in flight, last %llu\n", view->completed,
		   view->inflight, view->seq);
	if (vtpu_peek_begin(vdev, &idx))
		return;
	vtpu_queue_regs_read(hwq, &regs);
	vtpu_peek_end(vdev, idx);
#define REG(name) vtpu_queue_regs_get(&regs, VTPU_REG_Q_##name)
	drm_printf(p, "  device: %s, head %llu, tail %llu, pc %#llx, %llu preemptions\n",
		   REG(QSTATUS) < ARRAY_SIZE(state_names) ? state_names[REG(QSTATUS)] : "?",
		   REG(HEAD), REG(TAIL), REG(PC), REG(PREEMPTIONS));
	drm_printf(p, "  time: command %llu ns, busy %llu ns, %llu instructions\n",
		   REG(COMMAND_NS), REG(BUSY_NS), REG(INSTRUCTIONS));
	if (REG(FAULT_CAUSE))
		drm_printf(p, "  fault: cause %llu, access %llu, address %#llx, pc %#llx\n",
			   REG(FAULT_CAUSE), REG(FAULT_ACCESS), REG(FAULT_ADDR), REG(FAULT_PC));
#undef REG
}

static int vtpu_queues_show(struct seq_file *m, void *unused)
{
	struct vtpu_device *vdev = vtpu_of(m);
	struct drm_printer p = drm_seq_file_printer(m);

	for (unsigned int i = 0; i < vdev->num_queues; i++) {
		struct vtpu_hwq_view view;

		if (vtpu_hwq_look(vdev->hwq[i], &view))
			vtpu_hwq_show(vdev->hwq[i], &view, &p);
	}
	return 0;
}

/* Entries from HEAD to the tail: the device has not passed them, so they stay. */
static int vtpu_rings_show(struct seq_file *m, void *unused)
{
	struct vtpu_device *vdev = vtpu_of(m);
	struct drm_printer p = drm_seq_file_printer(m);
	struct vtpu_ring_entry *ring;
	int ret, idx;

	ring = kvmalloc_array(VTPU_RING_ENTRIES, sizeof(*ring), GFP_KERNEL);
	if (!ring)
		return -ENOMEM;
	ret = vtpu_peek_begin(vdev, &idx);
	if (ret)
		goto free;
	for (unsigned int i = 0; i < vdev->num_queues; i++) {
		struct vtpu_hwq *hwq = vdev->hwq[i];
		u32 head, tail;

		scoped_guard(spinlock_irqsave, &hwq->lock) {
			tail = hwq->queue ? hwq->tail : 0;
			head = hwq->queue ? vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_HEAD)) : 0;
			memcpy(ring, hwq->ring, VTPU_RING_ENTRIES * sizeof(*ring));
		}
		if (tail - head > VTPU_RING_ENTRIES || tail == head)
			continue;
		drm_printf(&p, "queue %u:\n", i);
		for (; head != tail; head++) {
			drm_puts(&p, "  ");
			vtpu_ring_entry_print(&ring[head % VTPU_RING_ENTRIES], head, &p);
		}
	}
	vtpu_peek_end(vdev, idx);
free:
	kvfree(ring);
	return ret;
}

static struct vtpu_vm *vtpu_context_get(struct vtpu_device *vdev, unsigned int context)
{
	struct vtpu_vm *vm;

	guard(mutex)(&vdev->reset_lock);
	vm = vdev->contexts[context];
	/* The last reference may be on its way to give the slot back. */
	return vm && kref_get_unless_zero(&vm->ref) ? vm : NULL;
}

static int vtpu_contexts_show(struct seq_file *m, void *unused)
{
	struct vtpu_device *vdev = vtpu_of(m);
	struct drm_printer p = drm_seq_file_printer(m);

	for (unsigned int i = 0; i < vdev->num_contexts; i++) {
		struct vtpu_vm *vm = vtpu_context_get(vdev, i);
		struct vtpu_range range = {};
		u64 mapped = 0;

		if (!vm)
			continue;
		drm_printf(&p, "context %u: pid %d %s, root %#llx%s\n", i, vm->pid, vm->comm,
			   vm->root->node.start, vm->lost ? ", lost" : "");
		while (!vtpu_vm_next_range(vm, range.va + range.size, &range)) {
			drm_puts(&p, "  ");
			vtpu_range_print(&range, &p);
			mapped += range.size;
			/* Full: seq_file will call again with more room. */
			if (seq_has_overflowed(m) || fatal_signal_pending(current))
				break;
		}
		drm_printf(&p, "  %llu bytes mapped\n", mapped);
		vtpu_vm_put(vm);
	}
	return 0;
}

static int vtpu_hbm_show(struct seq_file *m, void *unused)
{
	struct vtpu_device *vdev = vtpu_of(m);
	struct drm_printer p = drm_seq_file_printer(m);

	guard(mutex)(&vdev->hbm_lock);
	drm_printf(&p, "%llu of %llu bytes used, %llu evicted\n", vdev->hbm_used, vdev->hbm_size,
		   vdev->hbm_evicted);
	drm_mm_print(&vdev->hbm_mm, &p);
	return 0;
}

static int vtpu_dma_show(struct seq_file *m, void *unused)
{
	struct vtpu_device *vdev = vtpu_of(m);
	unsigned int count = 0;
	struct vtpu_bo *bo;
	u64 bytes = 0;

	mutex_lock(&vdev->dma_lock);
	list_for_each_entry(bo, &vdev->dma_bos, dma_link) {
		bytes += bo->shmem.base.size;
		count++;
	}
	mutex_unlock(&vdev->dma_lock);
	seq_printf(m, "%u buffers, %llu bytes mapped\n", count, bytes);
	return 0;
}

static int vtpu_usage_show(struct seq_file *m, void *unused)
{
	struct vtpu_device *vdev = vtpu_of(m);
	struct drm_printer p = drm_seq_file_printer(m);
	struct drm_file *file;
	int ret;

	ret = mutex_lock_interruptible(&vdev->drm.filelist_mutex);
	if (ret)
		return ret;
	list_for_each_entry_reverse(file, &vdev->drm.filelist, lhead) {
		struct task_struct *task;
		struct pid *pid;

		rcu_read_lock();
		pid = rcu_dereference(file->pid);
		task = pid_task(pid, PIDTYPE_TGID);
		drm_printf(&p, "client %llu: pid %d %s\n", file->client_id, pid_nr(pid),
			   task ? task->comm : "<unknown>");
		rcu_read_unlock();
		vtpu_show_fdinfo(&p, file);
	}
	mutex_unlock(&vdev->drm.filelist_mutex);
	return 0;
}

static const struct drm_debugfs_info vtpu_debugfs_files[] = {
	{ "registers", vtpu_registers_show },
	{ "queues", vtpu_queues_show },
	{ "rings", vtpu_rings_show },
	{ "contexts", vtpu_contexts_show },
	{ "hbm", vtpu_hbm_show },
	{ "dma", vtpu_dma_show },
	{ "usage", vtpu_usage_show },
};

/* ---- Commands, which wake the device ---- */

static int vtpu_reset_queue_set(void *data, u64 index)
{
	struct vtpu_device *vdev = data;
	int ret = 0;
	int idx;

	if (index >= vdev->num_queues)
		return -EINVAL;
	if (!vtpu_dev_enter(vdev, &idx))
		return -ENODEV;
	scoped_guard(mutex, &vdev->reset_lock) {
		if (vdev->hwq[index]->queue)
			vtpu_hwq_hang(vdev->hwq[index]);
		else
			ret = -ENOENT;
	}
	vtpu_dev_exit(vdev, idx);
	return ret;
}
DEFINE_DEBUGFS_ATTRIBUTE(vtpu_reset_queue_fops, NULL, vtpu_reset_queue_set, "%llu\n");

static int vtpu_reset_device_set(void *data, u64 value)
{
	struct vtpu_device *vdev = data;
	int ret = 0;
	int idx;

	if (value != 1)
		return -EINVAL;
	if (!vtpu_dev_enter(vdev, &idx))
		return -ENODEV;
	scoped_guard(mutex, &vdev->reset_lock) {
		/* What was given up stays so: only a function reset brings it back. */
		if (!vtpu_device_is_away(vdev))
			vtpu_device_reset(vdev);
		if (vtpu_device_is_away(vdev))
			ret = -EIO;
	}
	vtpu_dev_exit(vdev, idx);
	return ret;
}
DEFINE_DEBUGFS_ATTRIBUTE(vtpu_reset_device_fops, NULL, vtpu_reset_device_set, "%llu\n");

/* An interrupt that nothing announced: the device's self-test. */
static int vtpu_test_irq_set(void *data, u64 vector)
{
	struct vtpu_device *vdev = data;
	int idx;

	if (vector >= vdev->num_vectors)
		return -EINVAL;
	if (!vtpu_dev_enter(vdev, &idx))
		return -ENODEV;
	vtpu_write(vdev, VTPU_REG_TEST_IRQ, vector);
	vtpu_dev_exit(vdev, idx);
	return 0;
}
DEFINE_DEBUGFS_ATTRIBUTE(vtpu_test_irq_fops, NULL, vtpu_test_irq_set, "%llu\n");

void vtpu_debugfs_init(struct vtpu_device *vdev)
{
	struct dentry *root = vdev->drm.debugfs_root;

	drm_debugfs_add_files(&vdev->drm, vtpu_debugfs_files, ARRAY_SIZE(vtpu_debugfs_files));
	debugfs_create_file_unsafe("reset_queue", 0200, root, vdev, &vtpu_reset_queue_fops);
	debugfs_create_file_unsafe("reset_device", 0200, root, vdev, &vtpu_reset_device_fops);
	debugfs_create_file_unsafe("test_irq", 0200, root, vdev, &vtpu_test_irq_fops);
	vtpu_inject_init(vdev, root);
}
