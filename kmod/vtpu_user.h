/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_USER_H_
#define _VTPU_USER_H_

#include <linux/list.h>
#include <linux/refcount.h>
#include <linux/uidgid.h>

struct vtpu_device;

enum vtpu_user_limit {
	VTPU_USER_CONTEXTS,
	VTPU_USER_QUEUES,
	VTPU_USER_TABLES,	/* below the contexts' own */
	VTPU_NUM_USER_LIMITS,
};

/*
 * Whoever opened files of the device: one for a user id, however many files,
 * processes and descriptors it spreads over.
 */
struct vtpu_user {
	refcount_t ref;			/* files, and what is charged */
	struct vtpu_device *vdev;
	struct list_head link;		/* vdev->users; users_lock */
	kuid_t uid;
	unsigned int used[VTPU_NUM_USER_LIMITS];	/* users_lock */
};

struct vtpu_user *vtpu_user_get(struct vtpu_device *vdev);
void vtpu_user_put(struct vtpu_user *user);
int vtpu_user_charge(struct vtpu_user *user, enum vtpu_user_limit limit);
void vtpu_user_uncharge(struct vtpu_user *user, enum vtpu_user_limit limit);

#endif
