/* SPDX-License-Identifier: MIT */
/*
 * Translation of virtual addresses by the page tables in HBM, and the copies
 * built on it. Command thread only.
 *
 * The guest can change tables while they are read: every entry is read once,
 * checked, and used from that copy. A TLB entry is a span of any length, grown
 * while neighbouring pages continue it, so that a weight matrix on 4 KiB pages
 * costs one look-up once its span is known.
 */
#include <string.h>

#include "machine.h"

#define LEVEL_SHIFT(level) (12 + 9 * (level))

typedef struct Page {
    uint64_t start, size; /* virtual */
    uint64_t target;
    uint8_t rights;
    bool hbm;
} Page;

void vtpu_tlb_flush(VtpuTlb *tlb)
{
    for (unsigned i = 0; i < VTPU_TLB_SPANS; i++) {
        tlb->span[i].end = 0;
    }
}

static uint64_t read_entry(const VtpuCore *core, uint64_t table, unsigned index)
{
    return __atomic_load_n((const uint64_t *)(core->hbm + table) + index, __ATOMIC_RELAXED);
}

/* VTPU_FAULT_NONE and the page, or the cause. */
static uint32_t walk(const VtpuCore *core, uint64_t root, uint64_t va, Page *page)
{
    const uint64_t rights = VTPU_PTE_READ | VTPU_PTE_WRITE | VTPU_PTE_EXEC;

    if (!(root & VTPU_CTX_VALID)) {
        return VTPU_FAULT_BAD_CONTEXT;
    }
    if (va >> VTPU_VA_BITS) {
        return VTPU_FAULT_UNMAPPED;
    }
    uint64_t table = root & ~VTPU_CTX_VALID;
    for (int level = VTPU_PTE_LEVELS - 1;; level--) {
        if ((table & (VTPU_PAGE_BYTES - 1)) || table >= core->hbm_bytes) {
            return VTPU_FAULT_BAD_PAGE_TABLE;
        }
        uint64_t pte = read_entry(core, table, va >> LEVEL_SHIFT(level) & 511);
        if (!(pte & VTPU_PTE_VALID)) {
            return VTPU_FAULT_UNMAPPED;
        }
        bool leaf = level == 0 || (level == 1 && (pte & VTPU_PTE_HUGE));
        if (!leaf) {
            if (pte & ~(VTPU_PTE_VALID | VTPU_PTE_ADDR_MASK)) {
                return VTPU_FAULT_BAD_PAGE_TABLE;
            }
            table = pte & VTPU_PTE_ADDR_MASK;
            continue;
        }
        uint64_t legal = VTPU_PTE_VALID | rights | VTPU_PTE_HBM | VTPU_PTE_ADDR_MASK |
                         (level ? VTPU_PTE_HUGE : 0);
        page->size = 1ull << LEVEL_SHIFT(level);
        page->start = va & ~(page->size - 1);
        page->target = pte & VTPU_PTE_ADDR_MASK;
        page->rights = pte & rights;
        page->hbm = pte & VTPU_PTE_HBM;
        if ((pte & ~legal) || (page->target & (page->size - 1)) ||
            (page->hbm && (page->target >= core->hbm_bytes ||
                           page->size > core->hbm_bytes - page->target))) {
            return VTPU_FAULT_BAD_PAGE_TABLE;
        }
        return VTPU_FAULT_NONE;
    }
}

static uint8_t right_of(uint32_t access)
{
    return access == VTPU_ACCESS_READ ? VTPU_PTE_READ
         : access == VTPU_ACCESS_WRITE ? VTPU_PTE_WRITE : VTPU_PTE_EXEC;
}

/* The TLB span that holds va, from the cache or by a walk. */
static uint32_t find_span(VtpuCore *core, unsigned context, uint64_t va, VtpuTlbSpan **found)
{
    VtpuTlb *tlb = &core->tlb[context];
    VtpuTlbSpan *span = &tlb->span[tlb->hint];
    Page page;

    if (va >= span->start && va < span->end) {
        *found = span;
        return VTPU_FAULT_NONE;
    }
    for (unsigned i = 0; i < VTPU_TLB_SPANS; i++) {
        span = &tlb->span[i];
        if (va >= span->start && va < span->end) {
            tlb->hint = i;
            *found = span;
            return VTPU_FAULT_NONE;
        }
    }
    uint32_t cause = walk(core, core->root[context], va, &page);
    if (cause) {
        return cause;
    }
    tlb->hint = tlb->next;
    tlb->next = (tlb->next + 1) % VTPU_TLB_SPANS;
    span = &tlb->span[tlb->hint];
    *span = (VtpuTlbSpan) {
        page.start, page.start + page.size, page.target, page.rights, page.hbm,
    };
    *found = span;
    return VTPU_FAULT_NONE;
}

/* Grows a span up to `end` while the following pages continue it. */
static void grow(VtpuCore *core, unsigned context, VtpuTlbSpan *span, uint64_t end)
{
    Page page;

    while (span->end < end && !vtpu_stopped(core) &&
            walk(core, core->root[context], span->end, &page) == VTPU_FAULT_NONE &&
           page.start == span->end && page.rights == span->rights && page.hbm == span->hbm &&
           page.target == span->target + (span->end - span->start)) {
        span->end += page.size;
    }
}

/* Looks up without recording a fault; returns the cause. */
static uint32_t lookup(VtpuExec *x, uint64_t va, uint64_t len, uint32_t access, VtpuSpan *out)
{
    VtpuCore *core = x->core;
    VtpuTlbSpan *span;

    uint32_t cause = find_span(core, x->context, va, &span);
    if (cause) {
        return cause;
    }
    if (!(span->rights & right_of(access))) {
        return VTPU_FAULT_PROTECTION;
    }
    if (span->end - va < len) {
        uint64_t limit = 1ull << VTPU_VA_BITS;
        grow(core, x->context, span, len > limit - va ? limit : va + len);
    }
    uint64_t have = span->end - va;
    uint64_t target = span->target + (va - span->start);
    out->len = have < len ? have : len;
    out->host = span->hbm ? core->hbm + target : NULL;
    out->bus = target;
    return VTPU_FAULT_NONE;
}

uint32_t vtpu_mmu_translate(const VtpuCore *core, uint64_t root, uint64_t va, uint32_t access,
                            VtpuSpan *span)
{
    Page page;
    uint32_t cause = walk(core, root, va, &page);

    if (cause) {
        return cause;
    }
    if (!(page.rights & right_of(access))) {
        return VTPU_FAULT_PROTECTION;
    }
    span->bus = page.target + (va - page.start);
    span->host = page.hbm ? core->hbm + span->bus : NULL;
    span->len = page.start + page.size - va;
    return VTPU_FAULT_NONE;
}

bool vtpu_mmu_span(VtpuExec *x, uint64_t va, uint64_t len, uint32_t access, VtpuSpan *span)
{
    uint32_t cause = lookup(x, va, len, access, span);

    if (!cause && span->host && access != VTPU_ACCESS_WRITE) {
        cause = vtpu_inject_ecc(x->core);
    }
    return cause ? vtpu_fault(x, cause, access, va) : true;
}

uint8_t *vtpu_mmu_direct(VtpuExec *x, uint64_t va, uint64_t len, uint32_t access)
{
    VtpuSpan span;

    /* A read that is to fail takes the other way, which can say why. What is longer than
     * HBM is not in one piece of it, and tables that say so are long to walk. */
    if (len == 0 || len > x->core->hbm_bytes || (access != VTPU_ACCESS_WRITE &&
                     vtpu_injecting(x->core, VTPU_INJECT_ECC_DOUBLE)) ||
        lookup(x, va, len, access, &span) || span.len < len) {
        return NULL;
    }
    if (span.host && access != VTPU_ACCESS_WRITE) {
        vtpu_inject_ecc(x->core);
    }
    return span.host;
}

bool vtpu_bus_read(VtpuExec *x, uint64_t bus, void *buf, uint64_t len)
{
    for (uint64_t done = 0, n; done < len; done += n) {
        n = len - done < VTPU_DMA_CHUNK ? len - done : VTPU_DMA_CHUNK;
        if (vtpu_stopped(x->core)) {
            return false;
        }
        if (vtpu_inject_dma_error(x->core, true) ||
            !x->core->ops.dma_read(x->core->opaque, bus + done, (uint8_t *)buf + done, n)) {
            return vtpu_fault(x, VTPU_FAULT_BUS, VTPU_ACCESS_READ, bus + done);
        }
    }
    return true;
}

bool vtpu_bus_write(VtpuExec *x, uint64_t bus, const void *buf, uint64_t len)
{
    for (uint64_t done = 0, n; done < len; done += n) {
        n = len - done < VTPU_DMA_CHUNK ? len - done : VTPU_DMA_CHUNK;
        if (vtpu_stopped(x->core)) {
            return false;
        }
        if (vtpu_inject_dma_error(x->core, false) ||
            !x->core->ops.dma_write(x->core->opaque, bus + done,
                                    (const uint8_t *)buf + done, n)) {
            return vtpu_fault(x, VTPU_FAULT_BUS, VTPU_ACCESS_WRITE, bus + done);
        }
    }
    return true;
}

bool vtpu_mem_read(VtpuExec *x, uint64_t va, void *buf, uint64_t len, uint32_t access)
{
    uint8_t *to = buf;
    VtpuSpan span;

    for (; len; va += span.len, to += span.len, len -= span.len) {
        if (!vtpu_mmu_span(x, va, len, access, &span)) {
            return false;
        }
        if (!span.host) {
            if (!vtpu_bus_read(x, span.bus, to, span.len)) {
                return false;
            }
        } else if (span.len == 8 && !(va & 7)) {
            /* A word that others poll or write is read whole. */
            uint64_t word = __atomic_load_n((uint64_t *)span.host, __ATOMIC_ACQUIRE);
            memcpy(to, &word, 8);
        } else {
            memcpy(to, span.host, span.len);
        }
    }
    return true;
}

bool vtpu_mem_write(VtpuExec *x, uint64_t va, const void *buf, uint64_t len)
{
    const uint8_t *from = buf;
    VtpuSpan span;

    for (; len; va += span.len, from += span.len, len -= span.len) {
        if (!vtpu_mmu_span(x, va, len, VTPU_ACCESS_WRITE, &span)) {
            return false;
        }
        if (!span.host) {
            if (!vtpu_bus_write(x, span.bus, from, span.len)) {
                return false;
            }
            continue;
        }
        if (span.len == 8 && !(va & 7)) {
            uint64_t word;
            memcpy(&word, from, 8);
            __atomic_store_n((uint64_t *)span.host, word, __ATOMIC_RELEASE);
        } else {
            memcpy(span.host, from, span.len);
        }
        vtpu_dirty(x, span.host, span.len);
    }
    return true;
}

const uint8_t *vtpu_mmu_view(VtpuExec *x, uint64_t va, uint64_t len, unsigned buffer)
{
    const uint8_t *direct = vtpu_mmu_direct(x, va, len, VTPU_ACCESS_READ);
    if (direct) {
        return direct;
    }
    uint8_t *copy = vtpu_buffer(x, buffer, len);
    return copy && vtpu_mem_read(x, va, copy, len, VTPU_ACCESS_READ) ? copy : NULL;
}
