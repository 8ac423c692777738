/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_DEBUGFS_H_
#define _VTPU_DEBUGFS_H_

struct vtpu_device;

void vtpu_debugfs_init(struct vtpu_device *vdev);

#endif
