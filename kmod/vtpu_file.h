/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_FILE_H_
#define _VTPU_FILE_H_

struct drm_device;
struct drm_file;

int vtpu_open(struct drm_device *drm, struct drm_file *file);
void vtpu_postclose(struct drm_device *drm, struct drm_file *file);

int vtpu_file_init(void);
void vtpu_file_fini(void);

#endif
