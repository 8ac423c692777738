/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_USERQ_H_
#define _VTPU_USERQ_H_

#include <linux/mutex.h>
#include <linux/types.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

struct drm_device;
struct drm_file;
struct file;
struct page;
struct vm_area_struct;
struct vtpu_device;
struct vtpu_file;
struct vtpu_queue;

/* What the device and the process share. */
struct vtpu_userq_pages {
	struct page *ring;
	struct page *fence;
	dma_addr_t ring_dma;
	dma_addr_t fence_dma;
};

/*
 * What a queue has beside the others when its process fills the ring. The
 * process writes the ring as it likes, at any time: the driver never reads it
 * but for a cookie to report.
 */
struct vtpu_userq {
	struct vtpu_device *vdev;
	struct vtpu_queue *queue;
	struct vtpu_file *owner;	/* whose file may map it; compared only */
	wait_queue_head_t wait;		/* for the fence word, or the queue's end */
	struct delayed_work watch;	/* for a command that the hardware does not end */

	/* Zeroes once the device is done with them; set under reset_lock and hwq->lock. */
	struct vtpu_userq_pages pages;

	struct mutex lock;		/* page faults against revoking */
	bool revoked;			/* mappings show nothing more; lock */
	struct page *dummy;		/* where writes go then; lock */
};

int vtpu_userq_init(struct vtpu_device *vdev, struct vtpu_queue *queue, struct vtpu_file *owner);
void vtpu_userq_fini(struct vtpu_queue *queue);
void vtpu_userq_release(struct vtpu_queue *queue);
void vtpu_userq_start(struct vtpu_queue *queue);
void vtpu_userq_revoke(struct vtpu_queue *queue);
void vtpu_userq_drop_pages(struct vtpu_queue *queue);
void vtpu_userq_drop_all_pages(struct vtpu_device *vdev);
void vtpu_userq_progress_locked(struct vtpu_queue *queue);
u32 vtpu_userq_watchdog_us(const struct vtpu_queue *queue);

int vtpu_mmap(struct file *filp, struct vm_area_struct *vma);
int vtpu_queue_map_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int vtpu_queue_wait_ioctl(struct drm_device *drm, void *data, struct drm_file *file);

#endif
