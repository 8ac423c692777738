// SPDX-License-Identifier: GPL-2.0
/*
 * Buffers shared as dma-bufs.
 *
 * Synchronisation is explicit, by syncobjs: jobs leave no fences in a shared
 * buffer. Nothing moves while it is attached or imported: system memory is
 * pinned, and HBM is for its own device alone, be it in other processes.
 */

#include <linux/dma-buf.h>
#include <linux/dma-fence.h>
#include <linux/module.h>
#include <drm/drm_prime.h>

#include "vtpu_device.h"
#include "vtpu_gem.h"
#include "vtpu_prime.h"

#ifdef VTPU_HAVE_IMPORT_NS_NAME
MODULE_IMPORT_NS(DMA_BUF);
#else
MODULE_IMPORT_NS("DMA_BUF");
#endif

/* ---- Export ---- */

/*
 * Whether another device reaches our BAR only some kernels can say, those with
 * CONFIG_PCI_P2PDMA; and whoever does would have to be told when we go. No copy
 * elsewhere is made instead: it would be another buffer.
 */
static int vtpu_dmabuf_attach(struct dma_buf *dma_buf, struct dma_buf_attachment *attach)
{
	if (vtpu_bo_is_hbm(to_vtpu_bo(dma_buf->priv)))
		return -EOPNOTSUPP;
	return drm_gem_map_attach(dma_buf, attach);
}

/* DMA_BUF_IOCTL_SYNC: to the processor the buffer is there once no job uses it. */
static int vtpu_dmabuf_begin_cpu_access(struct dma_buf *dma_buf, enum dma_data_direction dir)
{
	struct dma_fence *fence = vtpu_bo_fence(to_vtpu_bo(dma_buf->priv));
	int ret;

	if (IS_ERR_OR_NULL(fence))
		return PTR_ERR_OR_ZERO(fence);
	ret = dma_fence_wait(fence, true);
	dma_fence_put(fence);
	return ret;
}

static const struct dma_buf_ops vtpu_dmabuf_ops = {
	.attach = vtpu_dmabuf_attach,
	.detach = drm_gem_map_detach,
	.map_dma_buf = drm_gem_map_dma_buf,
	.unmap_dma_buf = drm_gem_unmap_dma_buf,
	.release = drm_gem_dmabuf_release,
	.mmap = drm_gem_dmabuf_mmap,
	.vmap = drm_gem_dmabuf_vmap,
	.vunmap = drm_gem_dmabuf_vunmap,
	.begin_cpu_access = vtpu_dmabuf_begin_cpu_access,
};

struct dma_buf *vtpu_gem_export(struct drm_gem_object *obj, int flags)
{
	struct dma_buf_export_info info = {
		.exp_name = KBUILD_MODNAME,
		.owner = THIS_MODULE,
		.ops = &vtpu_dmabuf_ops,
		.size = obj->size,
		.flags = flags,
		.priv = obj,
		.resv = obj->resv,
	};

	return drm_gem_dmabuf_export(obj->dev, &info);
}

/* ---- Import ---- */

static void vtpu_import_free(struct drm_gem_object *obj)
{
	struct vtpu_bo *bo = to_vtpu_bo(obj);

	struct dma_buf *dma_buf;

	vtpu_bo_fini(bo);
	dma_buf = bo->detached;
	drm_gem_shmem_free(&bo->shmem);
	/* Only now: its reservations were the buffer's. */
	if (dma_buf)
		dma_buf_put(dma_buf);
}

/* No mmap: its pages are the exporter's to map, by the dma-buf's own descriptor. */
static const struct drm_gem_object_funcs vtpu_import_funcs = {
	.free = vtpu_import_free,
};

struct drm_gem_object *vtpu_gem_prime_import_sg_table(struct drm_device *drm,
						      struct dma_buf_attachment *attach,
						      struct sg_table *sgt)
{
	struct drm_gem_object *obj;
	int ret;

	ret = vtpu_sgt_check(to_vtpu(drm), sgt);
	if (ret)
		return ERR_PTR(ret);
	obj = drm_gem_shmem_prime_import_sg_table(drm, attach, sgt);
	if (!IS_ERR(obj))
		obj->funcs = &vtpu_import_funcs;
	return obj;
}

struct drm_gem_object *vtpu_gem_prime_import(struct drm_device *drm, struct dma_buf *dma_buf)
{
	struct drm_gem_object *obj;
	int idx;

	/* Our own comes back as the buffer that it is. */
	if (dma_buf->ops == &vtpu_dmabuf_ops) {
		obj = dma_buf->priv;
		if (obj->dev == drm) {
			drm_gem_object_get(obj);
			return obj;
		}
	}

	if (!drm_dev_enter(drm, &idx))
		return ERR_PTR(-ENODEV);
	obj = drm_gem_prime_import_dev(drm, dma_buf, drm->dev);
	if (!IS_ERR(obj))
		vtpu_bo_track_dma(to_vtpu_bo(obj));
	drm_dev_exit(idx);
	return obj;
}

/*
 * Exporters may keep the mapping until the attachment goes, as udmabuf does, so
 * it goes. Who exports the buffer again looks for it under object_name_lock,
 * which is held here while handles may be left.
 */
void vtpu_import_unmap_dma(struct vtpu_bo *bo)
{
	struct dma_buf_attachment *attach = bo->shmem.base.import_attach;

	dma_buf_unmap_attachment_unlocked(attach, bo->shmem.sgt, DMA_BIDIRECTIONAL);
	bo->shmem.sgt = NULL;
	bo->detached = attach->dmabuf;
	bo->shmem.base.import_attach = NULL;
	dma_buf_detach(bo->detached, attach);
}
