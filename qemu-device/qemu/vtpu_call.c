/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vTPU, PCIe endpoint: what the machine's command thread does outside of the
 * machine, DMA and interrupts, and how others stop it from doing so.
 *
 * The command thread never takes the BQL: the thread that holds it may be
 * waiting for the command thread. RAM it reads and writes without, as virtio's
 * I/O threads do with their rings. What needs the BQL (interrupts; memory behind
 * an IOMMU, of which a fault may raise one) is a call: it leaves the call, rings
 * the main loop and waits for the answer. The main loop makes the call in a
 * bottom half; a thread that holds the BQL and waits for the command thread to
 * park makes it itself. So the BQL is never dropped while QEMU stops the VM, and
 * nothing else changes in between.
 *
 * A processor that rings a doorbell may find itself in the command thread's place
 * (VtpuCoreConfig.serve_short). It holds the BQL and makes the calls itself, as
 * any device does that works within an access.
 *
 * Nothing of before a bus reset reaches the guest after it: a reset starts with
 * the BQL and calls.lock held, a call is made with the former, RAM is written
 * with the latter, and both look for a reset first.
 */
#include "qemu/osdep.h"
#include "qemu/main-loop.h"
#include "exec/memory.h"
#include "hw/pci/msix.h"

#include "trace.h"
#include "vtpu.h"

typedef struct VtpuDma {
    uint64_t addr;
    void *buf;
    size_t len;
    DMADirection dir;
    bool ok, again; /* again: the function fell asleep, nothing was done */
} VtpuDma;

typedef struct VtpuIrq {
    unsigned vector;
    bool again;
} VtpuIrq;

/* BQL held, calls.lock held; drops the latter for the call. */
static void vtpu_call_serve(VtpuState *s)
{
    VtpuCalls *calls = &s->calls;
    VtpuCallFn *fn = calls->fn;

    if (!fn) {
        return;
    }
    qemu_mutex_unlock(&calls->lock);
    fn(s, calls->arg);
    qemu_mutex_lock(&calls->lock);
    calls->fn = NULL;
    qemu_cond_broadcast(&calls->changed);
}

static void vtpu_call_bh(void *opaque)
{
    VtpuState *s = opaque;

    qemu_mutex_lock(&s->calls.lock);
    vtpu_call_serve(s);
    qemu_mutex_unlock(&s->calls.lock);
}

/*
 * A stepped machine does one thing at a time, between two others of the main
 * loop. What fuzzes QEMU has nobody else to give it time, and wants the same
 * accesses to lead to the same every time.
 */
static void vtpu_step_bh(void *opaque)
{
    VtpuState *s = opaque;

    if (s->core && vtpu_core_step(s->core)) {
        qemu_bh_schedule(s->calls.step_bh);
    }
}

void vtpu_accessed(VtpuState *s)
{
    if (s->stepped) {
        qemu_bh_schedule(s->calls.step_bh);
    }
}

bool vtpu_call(VtpuState *s, VtpuCallFn *fn, void *arg)
{
    VtpuCalls *calls = &s->calls;
    bool done;

    /* A stepped machine's main loop, or a processor that rang a doorbell. */
    if (bql_locked()) {
        fn(s, arg);
        return true;
    }
    qemu_mutex_lock(&calls->lock);
    if (!calls->closed) {
        calls->arg = arg;
        calls->fn = fn;
        qemu_bh_schedule(calls->bh);
        qemu_cond_broadcast(&calls->changed);
        while (calls->fn && !calls->closed) {
            qemu_cond_wait(&calls->changed, &calls->lock);
        }
    }
    done = !calls->closed;
    qemu_mutex_unlock(&calls->lock);
    return done;
}

bool vtpu_is_stale(VtpuState *s)
{
    return !s->core || vtpu_core_resetting(s->core);
}

/* With the BQL or calls.lock held: in D3hot it may not use the bus. */
static bool vtpu_must_wait(VtpuState *s)
{
    return s->core && vtpu_core_asleep(s->core);
}

static void vtpu_wait_awake(VtpuState *s)
{
    VtpuCore *core;

    /* Its end waits for this thread. */
    WITH_QEMU_LOCK_GUARD(&s->calls.lock) {
        core = s->core;
    }
    if (core) {
        vtpu_core_wait_awake(core);
    }
}

static void vtpu_call_dma(VtpuState *s, void *arg)
{
    /* Memory only: the guest must not make us write our own registers. */
    const MemTxAttrs attrs = { .memory = true };
    VtpuDma *dma = arg;

    dma->again = vtpu_must_wait(s);
    if (dma->again || vtpu_is_stale(s)) {
        return;
    }
    dma->ok = pci_dma_rw(PCI_DEVICE(s), dma->addr, dma->buf, dma->len,
                         dma->dir, attrs) == MEMTX_OK;
    if (!dma->ok) {
        vtpu_report_failed_dma(s, dma->dir);
    }
}

/* False: nothing was done, since not all of it is RAM and in one piece. */
static bool vtpu_dma_ram(VtpuState *s, VtpuDma *dma)
{
    bool write = dma->dir == DMA_DIRECTION_FROM_DEVICE;
    MemoryRegionCache cache;
    bool direct;

    RCU_READ_LOCK_GUARD();
    direct = address_space_cache_init(&cache,
                                      pci_get_address_space(PCI_DEVICE(s)),
                                      dma->addr, dma->len, write) ==
                 (int64_t)dma->len && cache.ptr;
    if (direct && write) {
        WITH_QEMU_LOCK_GUARD(&s->calls.lock) {
            dma->again = vtpu_must_wait(s);
            dma->ok = !dma->again && !vtpu_is_stale(s);
            if (dma->ok) {
                memcpy(cache.ptr, dma->buf, dma->len);
                address_space_cache_invalidate(&cache, 0, dma->len);
            }
        }
    } else if (direct) {
        /* Not memcpy(): fuzzers have a hook here. */
        dma->ok = address_space_read_cached(&cache, 0, dma->buf, dma->len) ==
                  MEMTX_OK;
    }
    address_space_cache_destroy(&cache);
    return direct;
}

static bool vtpu_dma(VtpuState *s, uint64_t addr, void *buf, size_t len,
                     DMADirection dir)
{
    VtpuDma dma = { addr, buf, len, dir, false, false };

    do {
        vtpu_wait_awake(s);
        dma.again = false;
        if (!vtpu_dma_ram(s, &dma) && !vtpu_call(s, vtpu_call_dma, &dma)) {
            dma.ok = false;
        }
    } while (dma.again);
    trace_vtpu_dma(s, dir == DMA_DIRECTION_FROM_DEVICE, addr, len, dma.ok);
    return dma.ok;
}

bool vtpu_dma_read(void *opaque, uint64_t addr, void *buf, size_t len)
{
    return vtpu_dma(opaque, addr, buf, len, DMA_DIRECTION_TO_DEVICE);
}

bool vtpu_dma_write(void *opaque, uint64_t addr, const void *buf, size_t len)
{
    return vtpu_dma(opaque, addr, (void *)buf, len, DMA_DIRECTION_FROM_DEVICE);
}

/*
 * The sender's thread, which may belong to another device: it must not wait for
 * the main loop, which may be waiting for that device. RAM alone can be reached
 * so, not memory behind an IOMMU.
 */
bool vtpu_link_write(void *opaque, uint64_t addr, const void *buf, size_t len)
{
    VtpuDma dma = {
        addr, (void *)buf, len, DMA_DIRECTION_FROM_DEVICE, false
    };
    bool ok = vtpu_dma_ram(opaque, &dma) && dma.ok;

    trace_vtpu_dma(opaque, true, addr, len, ok);
    return ok;
}

static void vtpu_call_irq(VtpuState *s, void *arg)
{
    VtpuIrq *irq = arg;

    irq->again = vtpu_must_wait(s);
    if (!irq->again && !vtpu_is_stale(s)) {
        trace_vtpu_irq(s, irq->vector);
        msix_notify(PCI_DEVICE(s), irq->vector);
    }
}

void vtpu_interrupt(void *opaque, unsigned vector)
{
    VtpuIrq irq = { vector, false };

    do {
        vtpu_wait_awake(opaque);
    } while (vtpu_call(opaque, vtpu_call_irq, &irq) && irq.again);
}

void vtpu_start_reset(VtpuState *s)
{
    WITH_QEMU_LOCK_GUARD(&s->calls.lock) {
        if (s->slice_used) {
            vtpu_core_reset_and_clear(s->core);
        } else {
            vtpu_core_reset(s->core);
        }
    }
    vtpu_accessed(s);
}

void vtpu_set_asleep(VtpuState *s, bool asleep)
{
    WITH_QEMU_LOCK_GUARD(&s->calls.lock) {
        vtpu_core_sleep(s->core, asleep);
    }
}

void vtpu_parked(void *opaque)
{
    VtpuState *s = opaque;

    qemu_mutex_lock(&s->calls.lock);
    s->calls.parked = true;
    qemu_cond_broadcast(&s->calls.changed);
    qemu_mutex_unlock(&s->calls.lock);
}

void vtpu_park(VtpuState *s)
{
    VtpuCalls *calls = &s->calls;

    vtpu_core_park(s->core);
    qemu_mutex_lock(&calls->lock);
    while (!calls->parked && !s->stepped) {
        if (calls->fn) {
            vtpu_call_serve(s);
        } else {
            qemu_cond_wait(&calls->changed, &calls->lock);
        }
    }
    qemu_mutex_unlock(&calls->lock);
}

void vtpu_unpark(VtpuState *s)
{
    qemu_mutex_lock(&s->calls.lock);
    s->calls.parked = false;
    qemu_mutex_unlock(&s->calls.lock);
    vtpu_core_resume(s->core);
}

void vtpu_calls_init(VtpuState *s)
{
    VtpuCalls *calls = &s->calls;

    qemu_mutex_init(&calls->lock);
    qemu_cond_init(&calls->changed);
    calls->bh = qemu_bh_new_guarded(vtpu_call_bh, s,
                                    &DEVICE(s)->mem_reentrancy_guard);
    calls->step_bh = qemu_bh_new_guarded(vtpu_step_bh, s,
                                         &DEVICE(s)->mem_reentrancy_guard);
    calls->fn = NULL;
    calls->parked = calls->closed = false;
}

void vtpu_calls_close(VtpuState *s)
{
    qemu_mutex_lock(&s->calls.lock);
    s->calls.closed = true;
    qemu_cond_broadcast(&s->calls.changed);
    qemu_mutex_unlock(&s->calls.lock);
}

void vtpu_calls_exit(VtpuState *s)
{
    qemu_bh_delete(s->calls.bh);
    qemu_bh_delete(s->calls.step_bh);
    qemu_cond_destroy(&s->calls.changed);
    qemu_mutex_destroy(&s->calls.lock);
}
