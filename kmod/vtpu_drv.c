// SPDX-License-Identifier: GPL-2.0
/* The module: PCI probe and remove, the table of ioctls. */

#include <linux/dma-mapping.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/uaccess.h>
#include <drm/drm_accel.h>
#include <drm/drm_gem.h>
#include <drm/drm_ioctl.h>
#include <drm/drm_managed.h>
#include <drm/drm_print.h>

#include "vtpu_compat.h"
#include "vtpu_coredump.h"
#include "vtpu_debugfs.h"
#include "vtpu_device.h"
#include "vtpu_file.h"
#include "vtpu_gem.h"
#include "vtpu_hwmon.h"
#include "vtpu_job.h"
#include "vtpu_pci.h"
#include "vtpu_perfmon.h"
#include "vtpu_pm.h"
#include "vtpu_prime.h"
#include "vtpu_queue.h"
#include "vtpu_reset.h"
#include "vtpu_usage.h"
#include "vtpu_user.h"
#include "vtpu_userptr.h"
#include "vtpu_userq.h"
#include "vtpu_vm.h"

static unsigned int fail_probe;
module_param(fail_probe, uint, 0600);
MODULE_PARM_DESC(fail_probe, "For tests: the step of probe, from 1 on, that fails with EIO");

/* ---- DEV_QUERY ---- */

static int vtpu_query_copy(struct drm_vtpu_dev_query *args, const void *data, u32 known)
{
	void __user *user = u64_to_user_ptr(args->data);
	u32 size = args->size;

	args->size = known;
	if (!args->data)
		return 0;
	if (copy_to_user(user, data, min(size, known)))
		return -EFAULT;
	/* Fields that a newer caller knows and this driver does not. */
	if (size > known && clear_user(user + known, size - known))
		return -EFAULT;
	return 0;
}

static int vtpu_dev_query_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct vtpu_device *vdev = to_vtpu(drm);
	struct drm_vtpu_dev_query *args = data;

	switch (args->query) {
	case DRM_VTPU_QUERY_INFO: {
		const struct drm_vtpu_info info = {
			.hw_version = vdev->hw_version,
			.isa_version = vdev->isa_version,
			.hbm_bytes = vdev->hbm_size,
			.vmem_bytes = vdev->vmem_size,
			.num_queues = vdev->num_queues,
			.num_contexts = vdev->num_contexts,
			.page_bytes = VTPU_PAGE_BYTES,
			.va_start = VTPU_VA_START,
			.va_end = VTPU_VA_END,
		};

		return vtpu_query_copy(args, &info, sizeof(info));
	}
	case DRM_VTPU_QUERY_MEMORY: {
		struct drm_vtpu_memory memory = { .hbm_bytes = vdev->hbm_size };

		mutex_lock(&vdev->hbm_lock);
		memory.hbm_used = vdev->hbm_used;
		memory.hbm_evicted = vdev->hbm_evicted;
		memory.evictions = vdev->hbm_evictions;
		mutex_unlock(&vdev->hbm_lock);
		return vtpu_query_copy(args, &memory, sizeof(memory));
	}
	case DRM_VTPU_QUERY_RESET: {
		const struct drm_vtpu_reset reset = {
			.device_resets = atomic64_read(&vdev->device_resets),
			.queue_resets = atomic64_read(&vdev->queue_resets),
			.engine_resets = atomic64_read(&vdev->engine_resets),
			.jobs_replayed = atomic64_read(&vdev->jobs_replayed),
			.queues_lost = atomic64_read(&vdev->queues_lost),
			.wedged = READ_ONCE(vdev->wedged),
		};

		return vtpu_query_copy(args, &reset, sizeof(reset));
	}
	default:
		return -EINVAL;
	}
}

/* ---- What processes reach ---- */

static const struct drm_ioctl_desc vtpu_ioctls[] = {
	DRM_IOCTL_DEF_DRV(VTPU_DEV_QUERY, vtpu_dev_query_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_BO_CREATE, vtpu_bo_create_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_BO_INFO, vtpu_bo_info_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_BO_WAIT, vtpu_bo_wait_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_VM_CREATE, vtpu_vm_create_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_VM_DESTROY, vtpu_vm_destroy_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_VM_BIND, vtpu_vm_bind_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_QUEUE_CREATE, vtpu_queue_create_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_QUEUE_DESTROY, vtpu_queue_destroy_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_QUEUE_STATE, vtpu_queue_state_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_SUBMIT, vtpu_submit_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_BO_USERPTR, vtpu_bo_userptr_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_PERFMON, vtpu_perfmon_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_QUEUE_MAP, vtpu_queue_map_ioctl, 0),
	DRM_IOCTL_DEF_DRV(VTPU_QUEUE_WAIT, vtpu_queue_wait_ioctl, 0),
};

/* DRM_ACCEL_FOPS, but for mmap: user queues have offsets, too. */
static const struct file_operations vtpu_fops = {
	.owner = THIS_MODULE,
	.open = accel_open,
	.release = drm_release,
	.unlocked_ioctl = drm_ioctl,
	.compat_ioctl = drm_compat_ioctl,
	.poll = drm_poll,
	.read = drm_read,
	.llseek = noop_llseek,
	.mmap = vtpu_mmap,
	.get_unmapped_area = vtpu_get_unmapped_area,
	.fop_flags = FOP_UNSIGNED_OFFSET,
	.show_fdinfo = drm_show_fdinfo,
};

static const struct drm_driver vtpu_drm_driver = {
	.driver_features = DRIVER_COMPUTE_ACCEL | DRIVER_GEM | DRIVER_SYNCOBJ |
			   DRIVER_SYNCOBJ_TIMELINE,
	.open = vtpu_open,
	.postclose = vtpu_postclose,
	.gem_create_object = vtpu_gem_create_object,
	.gem_prime_import = vtpu_gem_prime_import,
	.gem_prime_import_sg_table = vtpu_gem_prime_import_sg_table,
	.ioctls = vtpu_ioctls,
	.num_ioctls = ARRAY_SIZE(vtpu_ioctls),
	.fops = &vtpu_fops,
	.show_fdinfo = vtpu_show_fdinfo,
	.name = "vtpu",
	.desc = "Virtual TPU",
	.major = 1,
	.minor = 0,
};

/* ---- Probe, step by step. What a step has done is undone when the driver lets go ---- */

static int vtpu_init_locks(struct vtpu_device *vdev)
{
	struct drm_device *drm = &vdev->drm;

	vtpu_bar_init(vdev);
	vtpu_reset_init(vdev);
	init_completion(&vdev->test_irq);
	INIT_LIST_HEAD(&vdev->dma_bos);
	INIT_LIST_HEAD(&vdev->users);
	/* One by one: each is a class of its own to lockdep. */
	return drmm_mutex_init(drm, &vdev->residency_lock) ?:
	       drmm_mutex_init(drm, &vdev->hbm_lock) ?:
	       drmm_mutex_init(drm, &vdev->reset_lock) ?:
	       drmm_mutex_init(drm, &vdev->dma_lock) ?:
	       drmm_mutex_init(drm, &vdev->users_lock);
}

static void vtpu_wq_fini(struct drm_device *drm, void *data)
{
	destroy_workqueue(data);
}

static int vtpu_wq_init(struct vtpu_device *vdev)
{
	int ret;

	/*
	 * Per CPU and urgent: on the way of every job, where waking another
	 * CPU would cost more than the work.
	 */
	vdev->submit_wq = alloc_workqueue("vtpu-submit",
					  WQ_HIGHPRI | WQ_MEM_RECLAIM | WQ_PERCPU, 0);
	if (!vdev->submit_wq)
		return -ENOMEM;
	ret = drmm_add_action_or_reset(&vdev->drm, vtpu_wq_fini, vdev->submit_wq);
	if (ret)
		return ret;
	vdev->timeout_wq = alloc_ordered_workqueue("vtpu-timeout", WQ_MEM_RECLAIM);
	if (!vdev->timeout_wq)
		return -ENOMEM;
	return drmm_add_action_or_reset(&vdev->drm, vtpu_wq_fini, vdev->timeout_wq);
}

static int vtpu_enable(struct vtpu_device *vdev)
{
	struct pci_dev *pdev = to_pci_dev(vdev->drm.dev);

	return pcim_enable_device(pdev) ?: pcim_request_all_regions(pdev, "vtpu");
}

static int vtpu_map_bar(struct pci_dev *pdev, int bar, resource_size_t size,
			const char *what)
{
	if (pci_resource_len(pdev, bar) >= size)
		return 0;
	dev_err(&pdev->dev, "BAR%d (%s) has %pa bytes, needs %pa\n", bar, what,
		&(resource_size_t){ pci_resource_len(pdev, bar) }, &size);
	return -ENODEV;
}

static int vtpu_map(struct vtpu_device *vdev)
{
	struct pci_dev *pdev = to_pci_dev(vdev->drm.dev);
	int ret;

	ret = vtpu_map_bar(pdev, VTPU_BAR_REGS, VTPU_REGS_SIZE, "registers");
	if (ret)
		return ret;
	vdev->regs = pcim_iomap(pdev, VTPU_BAR_REGS, 0);
	if (!vdev->regs)
		return -ENOMEM;
	ret = vtpu_hw_identify(vdev);
	if (ret)
		return ret;

	ret = vtpu_map_bar(pdev, VTPU_BAR_DOORBELL, vdev->num_queues * VTPU_PAGE_BYTES,
			   "doorbells");
	if (ret)
		return ret;
	vdev->doorbell_base = pci_resource_start(pdev, VTPU_BAR_DOORBELL);
	vdev->doorbells = pcim_iomap(pdev, VTPU_BAR_DOORBELL, 0);
	if (!vdev->doorbells)
		return -ENOMEM;

	ret = vtpu_map_bar(pdev, VTPU_BAR_HBM, vdev->hbm_size, "HBM");
	if (ret)
		return ret;
	vdev->hbm_base = pci_resource_start(pdev, VTPU_BAR_HBM);
	vdev->hbm = devm_ioremap_wc(&pdev->dev, vdev->hbm_base, vdev->hbm_size);
	return vdev->hbm ? 0 : -ENOMEM;
}

static int vtpu_init_dma(struct vtpu_device *vdev)
{
	struct device *dev = vdev->drm.dev;

	dma_set_max_seg_size(dev, UINT_MAX);
	return dma_set_mask_and_coherent(dev, VTPU_PTE_ADDR_MASK | (VTPU_PAGE_BYTES - 1));
}

/* What the last user of the device left running may not write any more. */
static int vtpu_start(struct vtpu_device *vdev)
{
	int ret = vtpu_hw_start(vdev);

	if (!ret)
		pci_set_master(to_pci_dev(vdev->drm.dev));
	return ret;
}

static int vtpu_alloc_vectors(struct vtpu_device *vdev)
{
	u32 num = min3(vtpu_read(vdev, VTPU_REG_NUM_MSIX), 1 + vdev->num_queues,
		       (u32)ARRAY_SIZE(vdev->vectors));
	int ret = pci_alloc_irq_vectors(to_pci_dev(vdev->drm.dev), 1, num, PCI_IRQ_MSIX);

	if (ret < 0)
		return dev_err_probe(vdev->drm.dev, ret, "no MSI-X vectors\n");
	vdev->num_vectors = ret;
	return 0;
}

static int vtpu_init_queues(struct vtpu_device *vdev)
{
	int ret = 0;

	for (unsigned int i = 0; i < vdev->num_queues && !ret; i++)
		ret = vtpu_hwq_init(vdev, i);
	return ret;
}

static int vtpu_register(struct vtpu_device *vdev)
{
	vtpu_debugfs_init(vdev);
	return drm_dev_register(&vdev->drm, 0);
}

static int (* const vtpu_probe_steps[])(struct vtpu_device *vdev) = {
	vtpu_init_locks,
	vtpu_wq_init,
	vtpu_enable,
	vtpu_map,
	vtpu_init_dma,
	vtpu_hbm_init,
	vtpu_coredump_init,
	vtpu_pci_init,
	vtpu_start,
	vtpu_alloc_vectors,
	vtpu_init_queues,
	vtpu_irq_init,
	vtpu_hw_test_irq,
	vtpu_pm_init,
	vtpu_hwmon_init,
	vtpu_register,
};

static int vtpu_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct vtpu_device *vdev;

	vdev = devm_drm_dev_alloc(&pdev->dev, &vtpu_drm_driver, struct vtpu_device, drm);
	if (IS_ERR(vdev))
		return PTR_ERR(vdev);
	pci_set_drvdata(pdev, vdev);

	for (unsigned int i = 0; i < ARRAY_SIZE(vtpu_probe_steps); i++) {
		int ret = i + 1 == READ_ONCE(fail_probe) ? -EIO : vtpu_probe_steps[i](vdev);

		if (ret)
			return ret;
	}
	vtpu_pm_start(vdev);
	drm_info(&vdev->drm, "hardware %u.%u, ISA %u, %llu MiB HBM, %u queues, %u contexts\n",
		 vdev->hw_version >> 16, vdev->hw_version & 0xffff, vdev->isa_version,
		 vdev->hbm_size >> 20, vdev->num_queues, vdev->num_contexts);
	return 0;
}

/* ---- Remove and shutdown ---- */

/* Ends all that the device does, for good: it reaches no memory after this. */
static void vtpu_stop(struct vtpu_device *vdev)
{
	struct pci_dev *pdev = to_pci_dev(vdev->drm.dev);
	int idx;

	/* First: who sees that it is given up takes memory back without asking it. */
	pci_clear_master(pdev);
	if (!vtpu_dev_enter(vdev, &idx))
		return;
	mutex_lock(&vdev->reset_lock);
	/* A reset of the function may have come in between. */
	pci_clear_master(pdev);
	WRITE_ONCE(vdev->wedged, true);
	vtpu_device_lose(vdev, -ENODEV);
	if (pci_device_is_present(pdev))
		vtpu_hw_start(vdev);
	mutex_unlock(&vdev->reset_lock);
	vtpu_dev_exit(vdev, idx);
}

/*
 * After the machine's sleep they are there, whoever drives them, once the physical
 * function has been restored; without a link the core does that with all at once.
 */
static int vtpu_link_vfs(struct pci_dev *pdev)
{
	struct pci_dev *vf = NULL;

	while ((vf = pci_get_device(VTPU_VENDOR_ID, VTPU_VF_DEVICE_ID, vf))) {
		if (pci_physfn(vf) == pdev &&
		    !device_link_add(&vf->dev, &pdev->dev, DL_FLAG_STATELESS)) {
			pci_dev_put(vf);
			return -ENOMEM;
		}
	}
	return 0;
}

/* Virtual functions work only while the physical one is awake. */
static int vtpu_sriov_configure(struct pci_dev *pdev, int num_vfs)
{
	struct vtpu_device *vdev = pci_get_drvdata(pdev);
	int ret;

	if (num_vfs) {
		ret = vtpu_pm_get(vdev);
		if (ret)
			return ret;
	}
	ret = pci_sriov_configure_simple(pdev, num_vfs);
	if (ret > 0 && vtpu_link_vfs(pdev)) {
		pci_disable_sriov(pdev);
		ret = -ENOMEM;
	}
	if (!pci_num_vf(pdev))
		vtpu_pm_put(vdev);
	return ret;
}

/*
 * Files may stay open, but after the unplug none of them reaches the device.
 * Before it the device is stopped: buffers freed after the unplug are not
 * unmapped any more.
 */
static void vtpu_remove(struct pci_dev *pdev)
{
	struct vtpu_device *vdev = pci_get_drvdata(pdev);

	vtpu_pm_stop(vdev);
	vtpu_pci_stop(vdev);
	if (pci_num_vf(pdev))
		vtpu_sriov_configure(pdev, 0);
	vtpu_stop(vdev);
	vtpu_unplug(vdev);
	vtpu_pm_gone(vdev);
	vtpu_reset_fini(vdev);
	vtpu_gem_unmap_dma(vdev);
	vtpu_userq_drop_all_pages(vdev);
}

/* Before a kexec, too: the next kernel's memory is not ours. */
static void vtpu_shutdown(struct pci_dev *pdev)
{
	vtpu_stop(pci_get_drvdata(pdev));
}

static const struct pci_device_id vtpu_pci_ids[] = {
	{ PCI_DEVICE(VTPU_VENDOR_ID, VTPU_DEVICE_ID) },
	{ PCI_DEVICE(VTPU_VENDOR_ID, VTPU_VF_DEVICE_ID) },
	{ }
};
MODULE_DEVICE_TABLE(pci, vtpu_pci_ids);

static struct pci_driver vtpu_pci_driver = {
	.name = "vtpu",
	.id_table = vtpu_pci_ids,
	.probe = vtpu_probe,
	.remove = vtpu_remove,
	.shutdown = vtpu_shutdown,
	.sriov_configure = vtpu_sriov_configure,
	.dev_groups = vtpu_sysfs_groups,
	.driver.pm = pm_ptr(&vtpu_pm_ops),
	.err_handler = &vtpu_err_handlers,
};

static int __init vtpu_init(void)
{
	int ret;

	ret = vtpu_file_init();
	if (ret)
		return ret;
	ret = pci_register_driver(&vtpu_pci_driver);
	if (ret)
		vtpu_file_fini();
	return ret;
}
module_init(vtpu_init);

static void __exit vtpu_exit(void)
{
	pci_unregister_driver(&vtpu_pci_driver);
	vtpu_file_fini();
}
module_exit(vtpu_exit);

MODULE_DESCRIPTION("DRM accel driver of the virtual TPU");
MODULE_AUTHOR("The vTPU authors");
MODULE_LICENSE("GPL");
