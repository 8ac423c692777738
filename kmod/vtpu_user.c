// SPDX-License-Identifier: GPL-2.0
/* What one user may hold of the hardware that there is little of. */

#include <linux/capability.h>
#include <linux/cred.h>
#include <linux/slab.h>

#include "vtpu_device.h"
#include "vtpu_user.h"

/* The user that opens a file. What the file is passed on for stays this user's. */
struct vtpu_user *vtpu_user_get(struct vtpu_device *vdev)
{
	struct vtpu_user *user;

	guard(mutex)(&vdev->users_lock);
	list_for_each_entry(user, &vdev->users, link) {
		if (uid_eq(user->uid, current_uid())) {
			refcount_inc(&user->ref);
			return user;
		}
	}
	user = kzalloc(sizeof(*user), GFP_KERNEL_ACCOUNT);
	if (!user)
		return NULL;
	refcount_set(&user->ref, 1);
	user->vdev = vdev;
	user->uid = current_uid();
	list_add(&user->link, &vdev->users);
	return user;
}

void vtpu_user_put(struct vtpu_user *user)
{
	struct vtpu_device *vdev = user->vdev;

	if (!refcount_dec_and_mutex_lock(&user->ref, &vdev->users_lock))
		return;
	list_del(&user->link);
	mutex_unlock(&vdev->users_lock);
	kfree(user);
}

/*
 * Half of the contexts and queues, so that no user keeps the device from all
 * others; and of HBM, which page tables never leave, a sixteenth: enough for 32
 * times as much memory as HBM is, in small pages that lie together.
 */
static unsigned int vtpu_user_max(struct vtpu_device *vdev, enum vtpu_user_limit limit)
{
	switch (limit) {
	case VTPU_USER_CONTEXTS:
		return max(vdev->num_contexts / 2, 1u);
	case VTPU_USER_QUEUES:
		return max(vdev->num_queues / 2, 1u);
	default:
		return vdev->hbm_size / (16 * VTPU_PAGE_BYTES);
	}
}

int vtpu_user_charge(struct vtpu_user *user, enum vtpu_user_limit limit)
{
	guard(mutex)(&user->vdev->users_lock);
	if (user->used[limit] >= vtpu_user_max(user->vdev, limit) && !capable(CAP_SYS_RESOURCE))
		return -ENOSPC;
	user->used[limit]++;
	refcount_inc(&user->ref);
	return 0;
}

void vtpu_user_uncharge(struct vtpu_user *user, enum vtpu_user_limit limit)
{
	mutex_lock(&user->vdev->users_lock);
	user->used[limit]--;
	mutex_unlock(&user->vdev->users_lock);
	vtpu_user_put(user);
}
