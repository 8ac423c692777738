// SPDX-License-Identifier: GPL-2.0
/* Interrupts: completions, and the queues that the device stopped. */

#include <linux/interrupt.h>
#include <linux/jiffies.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/timer.h>
#include <drm/drm_print.h>

#include "vtpu_coredump.h"
#include "vtpu_device.h"
#include "vtpu_job.h"
#include "vtpu_queue.h"
#include "vtpu_trace.h"

/* Above what jobs that a process waits for one by one come to. */
static unsigned int irq_rate = 32000;
module_param(irq_rate, uint, 0644);
MODULE_PARM_DESC(irq_rate, "Interrupts of a vector a second, at most; one a tick at least");

/*
 * The record stays in the device until the queue is reset, so it is copied
 * once, for QUEUE_STATE. The faulting entry is still in the ring: its room is
 * reused only after its job has ended. In a user queue's it may be anything.
 */
static void vtpu_queue_record_fault(struct vtpu_hwq *hwq, struct vtpu_queue *queue)
{
	struct vtpu_device *vdev = hwq->vdev;
	u32 entry = vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_FAULT_ENTRY));

	queue->fault_cause = vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_FAULT_CAUSE));
	queue->fault_access = vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_FAULT_ACCESS));
	queue->fault_addr = vtpu_read64(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_FAULT_ADDR));
	queue->fault_pc = vtpu_read(vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_FAULT_PC));
	queue->fault_cookie = le32_to_cpu(vtpu_hwq_ring(hwq)[entry % VTPU_RING_ENTRIES].cookie);
	trace_vtpu_fault(hwq->index, queue->fault_cause, queue->fault_access,
			 queue->fault_addr, queue->fault_pc, entry, queue->fault_cookie);
}

/*
 * Ends the queue if it has faulted. The bit may be old news: the queue reset and
 * lent to someone else since. Its state tells.
 */
void vtpu_hwq_fault(struct vtpu_hwq *hwq)
{
	unsigned long flags;
	u32 state;

	spin_lock_irqsave(&hwq->lock, flags);
	state = vtpu_read(hwq->vdev, vtpu_hwq_reg(hwq, VTPU_REG_Q_QSTATUS));
	if (state == VTPU_QUEUE_STATE_FAULTED && hwq->enabled && hwq->queue) {
		hwq->enabled = false;
		if (hwq->queue->status == DRM_VTPU_QUEUE_OK)
			vtpu_queue_record_fault(hwq, hwq->queue);
		vtpu_coredump(hwq->vdev, hwq->queue);
		if (hwq->queue->fault_cause == VTPU_FAULT_WATCHDOG)
			vtpu_hwq_fail_locked(hwq, DRM_VTPU_QUEUE_HUNG, -ETIMEDOUT, -ECANCELED);
		else
			vtpu_hwq_fail_locked(hwq, DRM_VTPU_QUEUE_FAULTED, -EFAULT, -ECANCELED);
	}
	spin_unlock_irqrestore(&hwq->lock, flags);
}

static void vtpu_handle_errors(struct vtpu_device *vdev)
{
	u32 low = vtpu_read(vdev, VTPU_REG_ERR_QUEUES);
	u32 high = vdev->num_queues > 32 ? vtpu_read(vdev, VTPU_REG_ERR_QUEUES_HIGH) : 0;
	u64 queues = (u64)high << 32 | low;

	/* A read of all ones comes from no device at all. */
	if (!queues || vtpu_read(vdev, VTPU_REG_ID) != VTPU_MAGIC)
		return;
	vtpu_write(vdev, VTPU_REG_ERR_QUEUES, low);
	if (high)
		vtpu_write(vdev, VTPU_REG_ERR_QUEUES_HIGH, high);
	for (unsigned int i = 0; i < vdev->num_queues; i++)
		if (queues & BIT_ULL(i))
			vtpu_hwq_fault(vdev->hwq[i]);
}

/* ---- Moderation ---- */

static void vtpu_vector_unmask(struct timer_list *timer)
{
	struct vtpu_vector *vector = container_of(timer, struct vtpu_vector, unmask);

	enable_irq(vector->irq);
}

/*
 * What a process writes into its own queue's ring may interrupt with each entry,
 * for as long as it likes, at the expense of whoever runs on this processor. One
 * that does so too often is masked until the next tick; meanwhile the device keeps
 * what it has to tell, and one interrupt then tells it all.
 */
static void vtpu_vector_moderate(struct vtpu_vector *vector)
{
	if (time_after(jiffies, vector->tick)) {
		vector->tick = jiffies;
		vector->interrupts = 0;
	}
	if (++vector->interrupts == max(READ_ONCE(irq_rate) / HZ, 1U)) {
		trace_vtpu_irq_masked(vector->index);
		disable_irq_nosync(vector->irq);
		mod_timer(&vector->unmask, jiffies + 1);
	}
}

/* Before the interrupt is freed: no handler masks it after this, no timer unmasks it. */
static void vtpu_vector_fini(void *data)
{
	struct vtpu_vector *vector = data;

	disable_irq(vector->irq);
	timer_delete_sync(&vector->unmask);
}

/* Errors have a vector of their own, unless there is but one. */
static irqreturn_t vtpu_irq_error(int irq, void *data)
{
	struct vtpu_vector *vector = data;
	struct vtpu_device *vdev = vector->vdev;
	int idx;

	vtpu_vector_moderate(vector);
	if (!drm_dev_enter(&vdev->drm, &idx))
		return IRQ_HANDLED;
	if (READ_ONCE(vdev->testing_irq))
		complete(&vdev->test_irq);
	vtpu_handle_errors(vdev);
	if (vdev->num_vectors == 1)
		for (unsigned int i = 0; i < vdev->num_queues; i++)
			vtpu_hwq_complete(vdev->hwq[i]);
	drm_dev_exit(idx);
	return IRQ_HANDLED;
}

/* No register is read: the fence words in memory say what is finished. */
static irqreturn_t vtpu_irq_completion(int irq, void *data)
{
	struct vtpu_vector *vector = data;
	struct vtpu_device *vdev = vector->vdev;

	vtpu_vector_moderate(vector);
	if (vtpu_inject(vdev, VTPU_INJECT_IRQ))
		return IRQ_HANDLED;
	for (unsigned int i = vector->index - 1; i < vdev->num_queues; i += vdev->num_vectors - 1)
		vtpu_hwq_complete(vdev->hwq[i]);
	return IRQ_HANDLED;
}

/* The queues must exist. */
int vtpu_irq_init(struct vtpu_device *vdev)
{
	struct pci_dev *pdev = to_pci_dev(vdev->drm.dev);

	for (unsigned int i = 0; i < vdev->num_vectors; i++) {
		struct vtpu_vector *vector = &vdev->vectors[i];
		int ret;

		vector->vdev = vdev;
		vector->index = i;
		vector->irq = pci_irq_vector(pdev, i);
		vector->tick = jiffies;
		timer_setup(&vector->unmask, vtpu_vector_unmask, 0);
		ret = devm_request_irq(vdev->drm.dev, vector->irq,
				       i ? vtpu_irq_completion : vtpu_irq_error, 0,
				       "vtpu", vector);
		if (ret)
			return ret;
		ret = devm_add_action_or_reset(vdev->drm.dev, vtpu_vector_fini, vector);
		if (ret)
			return ret;
	}
	return 0;
}
