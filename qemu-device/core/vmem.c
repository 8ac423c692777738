/* SPDX-License-Identifier: MIT */
/*
 * Images of VMEM. A program in progress has one for itself; setting it aside
 * is to leave the image to it, and nothing is copied. An image that is free
 * keeps what its last program left for the next one of the same context, and
 * is cleared before a program of another one gets it.
 */
#include <string.h>
#include <sys/mman.h>

#include "machine.h"

#define HUGE_PAGE (2u << 20)
#define FREE_IMAGES 2 /* as many are kept when they are not needed */
#define MAP_BYTES (VTPU_VMEM_BYTES + 2 * HUGE_PAGE)

/* On huge pages where the host gives them, between pages that nobody may touch: a
 * check that is missing shall not become an access to other memory of the host. */
static bool allocate(VtpuVmem *vmem)
{
    void *map = mmap(NULL, MAP_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (map == MAP_FAILED) {
        return false;
    }
    uint8_t *data = (uint8_t *)(((uintptr_t)map + HUGE_PAGE) & ~(uintptr_t)(HUGE_PAGE - 1));
    if (mprotect(data, VTPU_VMEM_BYTES, PROT_READ | PROT_WRITE)) {
        munmap(map, MAP_BYTES);
        return false;
    }
    madvise(data, VTPU_VMEM_BYTES, MADV_HUGEPAGE);
    *vmem = (VtpuVmem) { .data = data, .map = map, .owner = -1 };
    return true;
}

bool vtpu_vmem_clear(VtpuVmem *vmem)
{
    if (!vmem->data && !allocate(vmem)) {
        return false;
    }
    memset(vmem->data, 0, vmem->used);
    vmem->used = 0;
    vmem->owner = -1;
    return true;
}

bool vtpu_vmem_init(VtpuCore *core)
{
    return allocate(&core->vmem[0]);
}

static void release(VtpuVmem *vmem)
{
    if (vmem->data) {
        munmap(vmem->map, MAP_BYTES);
    }
}

void vtpu_vmem_free_all(VtpuCore *core)
{
    for (unsigned i = 0; i < VTPU_NUM_QUEUES; i++) {
        release(&core->vmem[i]);
    }
}

bool vtpu_vmem_spare(VtpuCore *core)
{
    VtpuVmem fresh, *place = NULL;
    bool spare = false;

    pthread_mutex_lock(&core->lock);
    for (unsigned i = 0; i < VTPU_NUM_QUEUES; i++) {
        VtpuVmem *vmem = &core->vmem[i];
        spare |= vmem->data && !vmem->taken;
        place = vmem->data ? place : vmem;
    }
    pthread_mutex_unlock(&core->lock);
    if (spare || !place || !allocate(&fresh)) {
        return spare;
    }
    pthread_mutex_lock(&core->lock);
    *place = fresh;
    pthread_mutex_unlock(&core->lock);
    return true;
}

void vtpu_vmem_trim(VtpuCore *core)
{
    VtpuVmem old[VTPU_NUM_QUEUES];
    unsigned count = 0, keep = FREE_IMAGES;

    pthread_mutex_lock(&core->lock);
    for (unsigned i = 0; i < VTPU_NUM_QUEUES; i++) {
        VtpuVmem *vmem = &core->vmem[i];
        if (vmem->data && !vmem->taken && keep-- == 0) {
            keep = 0;
            old[count++] = *vmem;
            *vmem = (VtpuVmem) { .owner = -1 };
        }
    }
    pthread_mutex_unlock(&core->lock);
    while (count) {
        release(&old[--count]);
    }
}

/* How well a free image suits a program of the context. */
static int rank(const VtpuVmem *vmem, unsigned context)
{
    return !vmem->data || vmem->taken ? 0
           : vmem->owner == (int)context ? 3
           : vmem->owner < 0 ? 2 : 1;
}

VtpuVmem *vtpu_vmem_take(VtpuCore *core, unsigned context)
{
    VtpuVmem *best = &core->vmem[0];

    pthread_mutex_lock(&core->lock);
    for (unsigned i = 1; i < VTPU_NUM_QUEUES; i++) {
        if (rank(&core->vmem[i], context) > rank(best, context)) {
            best = &core->vmem[i];
        }
    }
    if (rank(best, context) == 0) {
        pthread_mutex_unlock(&core->lock);
        return NULL;
    }
    bool clear = best->owner != (int)context;
    best->taken = true;
    best->owner = (int)context;
    pthread_mutex_unlock(&core->lock);
    if (clear) {
        memset(best->data, 0, best->used);
        best->used = 0;
    }
    return best;
}

void vtpu_vmem_give_back(VtpuCore *core, VtpuVmem *vmem)
{
    if (!vmem) {
        return;
    }
    vmem->taken = false;
    /* Of programs of one context that were in progress at once, the last to end counts. */
    for (unsigned i = 0; i < VTPU_NUM_QUEUES; i++) {
        VtpuVmem *other = &core->vmem[i];
        if (other != vmem && !other->taken && other->owner == vmem->owner) {
            other->owner = -1;
        }
    }
}

void vtpu_vmem_disown(VtpuCore *core, unsigned context)
{
    for (unsigned i = 0; i < VTPU_NUM_QUEUES; i++) {
        if (core->vmem[i].owner == (int)context) {
            core->vmem[i].owner = -1;
        }
    }
}

void vtpu_vmem_disown_all(VtpuCore *core)
{
    for (unsigned i = 0; i < VTPU_NUM_QUEUES; i++) {
        core->vmem[i].owner = -1;
    }
}
