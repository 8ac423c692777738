// SPDX-License-Identifier: GPL-2.0
/* Open files, and their end. */

#include <linux/completion.h>
#include <linux/workqueue.h>
#include <drm/drm_device.h>
#include <drm/drm_file.h>

#include "vtpu_coredump.h"
#include "vtpu_device.h"
#include "vtpu_file.h"
#include "vtpu_queue.h"
#include "vtpu_user.h"
#include "vtpu_vm.h"

/* A device that is well takes less; who closes a file waits no longer. */
#define CLOSE_TIMEOUT_MS	200

static struct workqueue_struct *vtpu_close_wq;

static void vtpu_file_release(struct kref *ref)
{
	kfree(container_of(ref, struct vtpu_file, ref));
}

/* Queues before the address spaces that they run in. */
static void vtpu_file_end(struct work_struct *work)
{
	struct vtpu_file *vfile = container_of(work, struct vtpu_file, end);
	struct vtpu_device *vdev = vfile->vdev;
	struct vtpu_queue *queue;
	struct vtpu_vm *vm;
	unsigned long id;

	xa_for_each(&vfile->queues, id, queue)
		vtpu_queue_kill(queue);
	xa_destroy(&vfile->queues);
	vtpu_coredump_flush(vdev);
	xa_for_each(&vfile->vms, id, vm)
		vtpu_vm_put(vm);
	xa_destroy(&vfile->vms);
	mutex_destroy(&vfile->lock);
	vtpu_user_put(vfile->user);
	complete(&vfile->ended);
	kref_put(&vfile->ref, vtpu_file_release);
	drm_dev_put(&vdev->drm);
}

int vtpu_open(struct drm_device *drm, struct drm_file *file)
{
	struct vtpu_file *vfile = kzalloc(sizeof(*vfile), GFP_KERNEL);

	if (!vfile)
		return -ENOMEM;
	vfile->vdev = to_vtpu(drm);
	vfile->user = vtpu_user_get(vfile->vdev);
	if (!vfile->user) {
		kfree(vfile);
		return -ENOMEM;
	}
	kref_init(&vfile->ref);
	mutex_init(&vfile->lock);
	xa_init_flags(&vfile->vms, XA_FLAGS_ALLOC1);
	xa_init_flags(&vfile->queues, XA_FLAGS_ALLOC1);
	INIT_WORK(&vfile->end, vtpu_file_end);
	init_completion(&vfile->ended);
	file->driver_priv = vfile;
	return 0;
}

/*
 * A device that hangs is not waited for: what the file had is then ended behind the
 * process's back. Otherwise it is gone when close() returns, for who makes the same
 * again at once.
 */
void vtpu_postclose(struct drm_device *drm, struct drm_file *file)
{
	struct vtpu_file *vfile = file->driver_priv;

	drm_dev_get(drm);
	kref_get(&vfile->ref);
	queue_work(vtpu_close_wq, &vfile->end);
	wait_for_completion_timeout(&vfile->ended, msecs_to_jiffies(CLOSE_TIMEOUT_MS));
	kref_put(&vfile->ref, vtpu_file_release);
}

/* Not while the machine sleeps: nobody may touch the device then. */
int vtpu_file_init(void)
{
	vtpu_close_wq = alloc_workqueue("vtpu-close", WQ_UNBOUND | WQ_FREEZABLE, 0);
	return vtpu_close_wq ? 0 : -ENOMEM;
}

/* Before the module goes, whose files are all closed. */
void vtpu_file_fini(void)
{
	destroy_workqueue(vtpu_close_wq);
}
