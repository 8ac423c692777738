/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_PRIME_H_
#define _VTPU_PRIME_H_

struct dma_buf;
struct dma_buf_attachment;
struct drm_device;
struct drm_gem_object;
struct sg_table;
struct vtpu_bo;

struct dma_buf *vtpu_gem_export(struct drm_gem_object *obj, int flags);
struct drm_gem_object *vtpu_gem_prime_import(struct drm_device *drm, struct dma_buf *dma_buf);
struct drm_gem_object *vtpu_gem_prime_import_sg_table(struct drm_device *drm,
						      struct dma_buf_attachment *attach,
						      struct sg_table *sgt);
void vtpu_import_unmap_dma(struct vtpu_bo *bo);

#endif
