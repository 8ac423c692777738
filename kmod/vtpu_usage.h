/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_USAGE_H_
#define _VTPU_USAGE_H_

#include <linux/types.h>

struct attribute_group;
struct drm_file;
struct drm_printer;
struct vtpu_device;
struct vtpu_file;
struct vtpu_hwq;

void vtpu_note_busy(struct vtpu_device *vdev);
void vtpu_hwq_note_busy(struct vtpu_hwq *hwq);
void vtpu_hwq_restart_busy(struct vtpu_hwq *hwq);
void vtpu_hwq_retire_busy(struct vtpu_hwq *hwq);
u64 vtpu_busy_ns(struct vtpu_device *vdev, const struct vtpu_file *vfile);

void vtpu_show_fdinfo(struct drm_printer *p, struct drm_file *file);

/* vtpu_sysfs.c */
extern const struct attribute_group *vtpu_sysfs_groups[];

#endif
