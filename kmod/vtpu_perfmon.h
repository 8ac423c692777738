/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_PERFMON_H_
#define _VTPU_PERFMON_H_

struct drm_device;
struct drm_file;

int vtpu_perfmon_ioctl(struct drm_device *drm, void *data, struct drm_file *file);

#endif
