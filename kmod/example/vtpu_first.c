// SPDX-License-Identifier: GPL-2.0
/*
 * The least that drives the device: one context, one queue, one job. Read it
 * beside docs/writing-a-driver.md, which says what every step is for and what a
 * driver for several processes needs beyond it (vtpu.ko has all of that).
 */

#include <linux/completion.h>
#include <linux/dma-mapping.h>
#include <linux/interrupt.h>
#include <linux/iopoll.h>
#include <linux/io.h>
#include <linux/module.h>
#include <linux/pci.h>

#include <vtpu_hw.h>

#define RING_LOG2	VTPU_RING_LOG2_MIN
#define RING_ENTRIES	BIT(RING_LOG2)

/* Where things are in the device's memory, and one page as a program sees it. */
#define HBM_TABLES	0x0
#define HBM_DATA	0x10000
#define HBM_END		0x11000
#define DATA_VA		0x40000000ull

#define JOB_FENCE	1
#define JOB_VALUE	0x600d600d600d600dull

struct ring_entry {
	u8 op;
	u8 flags;
	__le16 reserved0;
	__le32 cookie;
	__le64 fence;
	__le64 reserved1;
	__le64 payload[5];
};

static_assert(sizeof(struct ring_entry) == VTPU_RING_ENTRY);

struct first {
	struct device *dev;
	void __iomem *regs;
	void __iomem *doorbells;
	void __iomem *hbm;
	struct ring_entry *ring;	/* system memory that the device reads */
	__le64 *fence;			/* and the word that it writes */
	dma_addr_t ring_dma;
	dma_addr_t fence_dma;
	struct completion done;
};

/* 1. Is this the device, and does it answer? */
static int first_identify(struct first *first)
{
	u32 version;

	if (readl(first->regs + VTPU_REG_ID) != VTPU_MAGIC)
		return dev_err_probe(first->dev, -ENODEV, "not a vTPU\n");
	version = readl(first->regs + VTPU_REG_VERSION);
	if (version >> 16 != VTPU_HW_VERSION >> 16)
		return dev_err_probe(first->dev, -ENODEV, "unknown version %#x\n", version);
	writel(0x5a5aa5a5, first->regs + VTPU_REG_TEST_SCRATCH);
	if (readl(first->regs + VTPU_REG_TEST_SCRATCH) != 0x5a5aa5a5)
		return dev_err_probe(first->dev, -EIO, "registers do not hold values\n");
	return 0;
}

/* 2. A known state, whatever was before: queues disabled, contexts invalid. */
static int first_reset(struct first *first)
{
	u32 status;
	int ret;

	writel(VTPU_CTRL_RESET, first->regs + VTPU_REG_CTRL);
	ret = readl_poll_timeout(first->regs + VTPU_REG_STATUS, status,
				 !(status & VTPU_STATUS_RESETTING), 20, 2 * USEC_PER_SEC);
	return ret ? dev_err_probe(first->dev, ret, "reset did not end\n") : 0;
}

static void first_pte(struct first *first, u64 table, unsigned int index, u64 entry)
{
	writeq(entry, first->hbm + table + index * sizeof(u64));
}

/* 3. Context 0 sees one page of HBM at DATA_VA. The tables are in HBM, too. */
static void first_map(struct first *first)
{
	const unsigned int bits = 9;	/* of an address, for each level */
	u64 table = HBM_TABLES;

	memset_io(first->hbm + HBM_TABLES, 0, VTPU_PTE_LEVELS * VTPU_PAGE_BYTES);
	memset_io(first->hbm + HBM_DATA, 0, VTPU_PAGE_BYTES);
	for (unsigned int level = VTPU_PTE_LEVELS - 1; level; level--) {
		unsigned int index = (DATA_VA >> (PAGE_SHIFT + bits * level)) & (BIT(bits) - 1);

		first_pte(first, table, index, (table + VTPU_PAGE_BYTES) | VTPU_PTE_VALID);
		table += VTPU_PAGE_BYTES;
	}
	first_pte(first, table, (DATA_VA >> PAGE_SHIFT) & (BIT(bits) - 1),
		  HBM_DATA | VTPU_PTE_VALID | VTPU_PTE_READ | VTPU_PTE_WRITE | VTPU_PTE_HBM);
	writeq(HBM_TABLES | VTPU_CTX_VALID, first->regs + VTPU_REG_CTX_ROOT);
}

/* 4. Queue 0 runs in context 0 and raises vector 1; its memory is ours. */
static int first_start_queue(struct first *first)
{
	u32 state;

	writeq(first->ring_dma, first->regs + VTPU_REG_Q_RING_BASE);
	writeq(first->fence_dma, first->regs + VTPU_REG_Q_FENCE_ADDR);
	writel(RING_LOG2, first->regs + VTPU_REG_Q_RING_LOG2);
	writel(0, first->regs + VTPU_REG_Q_CONTEXT);
	writel(1, first->regs + VTPU_REG_Q_VECTOR);
	writel(VTPU_Q_CTRL_ENABLE, first->regs + VTPU_REG_Q_CTRL);
	state = readl(first->regs + VTPU_REG_Q_QSTATUS);
	if (state != VTPU_QUEUE_STATE_READY)
		return dev_err_probe(first->dev, -EIO, "the queue is in state %u\n", state);
	writel(VTPU_CTRL_ENABLE, first->regs + VTPU_REG_CTRL);
	return 0;
}

/* 5. The device says that it finished something; the fence word says what. */
static irqreturn_t first_completion(int irq, void *data)
{
	struct first *first = data;

	if (le64_to_cpu(READ_ONCE(*first->fence)) >= JOB_FENCE)
		complete(&first->done);
	return IRQ_HANDLED;
}

/* Vector 0 is for errors. A real driver reads ERR_QUEUES and each fault here. */
static irqreturn_t first_error(int irq, void *data)
{
	struct first *first = data;

	dev_err(first->dev, "the queue stopped: cause %u at address %#llx\n",
		readl(first->regs + VTPU_REG_Q_FAULT_CAUSE),
		readq(first->regs + VTPU_REG_Q_FAULT_ADDR));
	return IRQ_HANDLED;
}

/* 6. One command: write a word to a virtual address, then fence and interrupt. */
static int first_job(struct first *first)
{
	u64 got;

	first->ring[0] = (struct ring_entry) {
		.op = VTPU_CMD_SIGNAL,
		.flags = VTPU_RING_FLAG_FENCE | VTPU_RING_FLAG_IRQ,
		.fence = cpu_to_le64(JOB_FENCE),
		.payload = { cpu_to_le64(DATA_VA), cpu_to_le64(JOB_VALUE) },
	};
	/* writel() orders the entry before the doorbell that announces it. */
	writel(1, first->doorbells);
	if (!wait_for_completion_timeout(&first->done, 5 * HZ))
		return dev_err_probe(first->dev, -ETIMEDOUT, "the job did not finish\n");

	got = readq(first->hbm + HBM_DATA);
	if (got != JOB_VALUE)
		return dev_err_probe(first->dev, -EIO, "HBM has %#llx\n", got);
	dev_info(first->dev, "the device wrote %#llx to its memory\n", got);
	return 0;
}

static int first_map_bars(struct first *first, struct pci_dev *pdev)
{
	first->regs = pcim_iomap(pdev, VTPU_BAR_REGS, 0);
	first->doorbells = pcim_iomap(pdev, VTPU_BAR_DOORBELL, 0);
	first->hbm = pcim_iomap(pdev, VTPU_BAR_HBM, HBM_END);
	return first->regs && first->doorbells && first->hbm ? 0 : -ENOMEM;
}

static int first_alloc(struct first *first)
{
	first->ring = dmam_alloc_coherent(first->dev, RING_ENTRIES * sizeof(*first->ring),
					  &first->ring_dma, GFP_KERNEL);
	first->fence = dmam_alloc_coherent(first->dev, sizeof(*first->fence),
					   &first->fence_dma, GFP_KERNEL);
	return first->ring && first->fence ? 0 : -ENOMEM;
}

static int first_irqs(struct first *first, struct pci_dev *pdev)
{
	int ret;

	ret = pci_alloc_irq_vectors(pdev, 2, 2, PCI_IRQ_MSIX);
	if (ret < 0)
		return dev_err_probe(first->dev, ret, "no vectors\n");
	ret = devm_request_irq(first->dev, pci_irq_vector(pdev, 0), first_error, 0,
			       "vtpu-error", first);
	if (ret)
		return ret;
	return devm_request_irq(first->dev, pci_irq_vector(pdev, 1), first_completion, 0,
				"vtpu-done", first);
}

/* The device may not touch memory that is freed after this. */
static void first_stop(struct first *first)
{
	first_reset(first);
	pci_clear_master(to_pci_dev(first->dev));
}

static int first_run(struct first *first, struct pci_dev *pdev)
{
	int ret;

	ret = first_reset(first);
	if (ret)
		return ret;
	/* Not before: what somebody left running may not write any more. */
	pci_set_master(pdev);
	first_map(first);
	ret = first_start_queue(first);
	if (ret)
		return ret;
	return first_job(first);
}

static int first_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct first *first;
	int ret;

	first = devm_kzalloc(&pdev->dev, sizeof(*first), GFP_KERNEL);
	if (!first)
		return -ENOMEM;
	first->dev = &pdev->dev;
	init_completion(&first->done);
	pci_set_drvdata(pdev, first);

	ret = pcim_enable_device(pdev);
	if (ret)
		return ret;
	ret = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));
	if (ret)
		return ret;
	ret = first_map_bars(first, pdev);
	if (ret)
		return ret;
	ret = first_identify(first);
	if (ret)
		return ret;
	ret = first_alloc(first);
	if (ret)
		return ret;
	ret = first_irqs(first, pdev);
	if (ret)
		return ret;
	ret = first_run(first, pdev);
	if (ret)
		first_stop(first);
	return ret;
}

static void first_remove(struct pci_dev *pdev)
{
	first_stop(pci_get_drvdata(pdev));
}

static const struct pci_device_id first_ids[] = {
	{ PCI_DEVICE(VTPU_VENDOR_ID, VTPU_DEVICE_ID) },
	{ }
};
MODULE_DEVICE_TABLE(pci, first_ids);

static struct pci_driver first_driver = {
	.name = "vtpu_first",
	.id_table = first_ids,
	.probe = first_probe,
	.remove = first_remove,
};
module_pci_driver(first_driver);

MODULE_DESCRIPTION("The least driver of the virtual TPU");
MODULE_AUTHOR("The vTPU authors");
MODULE_LICENSE("GPL");
