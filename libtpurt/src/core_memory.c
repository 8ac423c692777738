/* SPDX-License-Identifier: MIT */
/* HBM, host memory and page tables of the in-process machine. */
#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core.h"

#define ENTRIES 512u
#define CONTEXT 0

struct rt_memory {
    bool hbm, imported;
    uint64_t bytes;
    uint64_t bus; /* HBM offset, or bus address */
    uint8_t *data;
};

/* ---- HBM ---- */

static bool hbm_alloc(struct core_backend *core, uint64_t bytes, uint64_t *offset)
{
    uint64_t align = bytes >= VTPU_HUGE_PAGE_BYTES ? VTPU_HUGE_PAGE_BYTES : VTPU_PAGE_BYTES;
    bool ok;

    pthread_mutex_lock(&core->lock);
    ok = rt_va_alloc(&core->hbm_free, bytes, align, offset);
    pthread_mutex_unlock(&core->lock);
    return ok;
}

static void hbm_free(struct core_backend *core, uint64_t offset, uint64_t bytes)
{
    /* The next owner gets zeros, and the process its memory back. */
    madvise(core->hbm + offset, bytes, MADV_DONTNEED);
    pthread_mutex_lock(&core->lock);
    rt_va_free(&core->hbm_free, offset, bytes);
    pthread_mutex_unlock(&core->lock);
}

/* ---- Host memory ---- */

static bool region_add(struct core_backend *core, const void *data, uint64_t bytes)
{
    struct core_region *region = malloc(sizeof(*region));

    if (!region)
        return false;
    region->start = (uintptr_t)data;
    region->bytes = bytes;
    pthread_rwlock_wrlock(&core->host_lock);
    region->next = core->regions;
    core->regions = region;
    pthread_rwlock_unlock(&core->host_lock);
    return true;
}

/* One of those that are equal: the same memory may be imported twice. */
static void region_remove(struct core_backend *core, const void *data, uint64_t bytes)
{
    struct core_region **link = &core->regions, *region;

    pthread_rwlock_wrlock(&core->host_lock);
    while ((*link)->start != (uintptr_t)data || (*link)->bytes != bytes)
        link = &(*link)->next;
    region = *link;
    *link = region->next;
    pthread_rwlock_unlock(&core->host_lock);
    free(region);
}

void *core_host_alloc(struct core_backend *core, uint64_t bytes)
{
    /* Aligned for large pages where it can have them: the excess is cut off. */
    uint64_t align = bytes >= VTPU_HUGE_PAGE_BYTES ? VTPU_HUGE_PAGE_BYTES : VTPU_PAGE_BYTES;
    uint64_t excess = align - VTPU_PAGE_BYTES, head;
    uint8_t *data = mmap(NULL, bytes + excess, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (data == MAP_FAILED)
        return NULL;
    head = -(uintptr_t)data & (align - 1);
    if (head)
        munmap(data, head);
    if (excess - head)
        munmap(data + head + bytes, excess - head);
    data += head;
    if (!region_add(core, data, bytes)) {
        munmap(data, bytes);
        return NULL;
    }
    return data;
}

void core_host_free(struct core_backend *core, void *data, uint64_t bytes)
{
    region_remove(core, data, bytes);
    munmap(data, bytes);
}

/* Under host_lock, so that nothing is freed under a copy. */
static bool reachable(struct core_backend *core, uint64_t address, size_t bytes)
{
    for (const struct core_region *r = core->regions; r; r = r->next)
        if (address >= r->start && address - r->start <= r->bytes &&
            bytes <= r->bytes - (address - r->start))
            return true;
    return false;
}

/* The fence word is polled by other threads, so words are moved as words. */
static void copy_bytes(void *to, const void *from, size_t bytes)
{
    if (bytes == 8 && !(((uintptr_t)to | (uintptr_t)from) & 7))
        __atomic_store_n((uint64_t *)to, __atomic_load_n((const uint64_t *)from, __ATOMIC_ACQUIRE),
                         __ATOMIC_RELEASE);
    else
        memcpy(to, from, bytes);
}

bool core_dma_read(void *opaque, uint64_t address, void *data, size_t bytes)
{
    struct core_backend *core = opaque;
    bool ok;

    pthread_rwlock_rdlock(&core->host_lock);
    ok = reachable(core, address, bytes);
    if (ok)
        copy_bytes(data, (const void *)(uintptr_t)address, bytes);
    pthread_rwlock_unlock(&core->host_lock);
    return ok;
}

bool core_dma_write(void *opaque, uint64_t address, const void *data, size_t bytes)
{
    struct core_backend *core = opaque;
    bool ok;

    pthread_rwlock_rdlock(&core->host_lock);
    ok = reachable(core, address, bytes);
    if (ok)
        copy_bytes((void *)(uintptr_t)address, data, bytes);
    pthread_rwlock_unlock(&core->host_lock);
    return ok;
}

/* ---- Buffers ---- */

int core_memory_create(struct rt_backend *be, uint64_t bytes, bool hbm, struct rt_memory **memory)
{
    struct core_backend *core = core_of(be);
    struct rt_memory *mem = calloc(1, sizeof(*mem));

    if (!mem)
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a buffer");
    mem->hbm = hbm;
    mem->bytes = bytes;
    if (hbm && hbm_alloc(core, bytes, &mem->bus)) {
        mem->data = core->hbm + mem->bus;
    } else if (!hbm) {
        mem->data = core_host_alloc(core, bytes);
        mem->bus = (uintptr_t)mem->data;
    }
    if (!mem->data) {
        free(mem);
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no room for %" PRIu64 " bytes in %s%s", bytes,
                       hbm ? "HBM" : "host memory", hbm ? "; see tpurt_device_get_memory" : "");
    }
    *memory = mem;
    return TPURT_OK;
}

int core_memory_import(struct rt_backend *be, void *data, uint64_t bytes, bool read_only,
                       struct rt_memory **memory)
{
    struct rt_memory *mem = calloc(1, sizeof(*mem));

    (void)read_only; /* the page tables say so */
    if (!mem || !region_add(core_of(be), data, bytes)) {
        free(mem);
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a buffer");
    }
    *mem = (struct rt_memory){
        .imported = true, .bytes = bytes, .bus = (uintptr_t)data, .data = data
    };
    *memory = mem;
    return TPURT_OK;
}

void core_memory_destroy(struct rt_backend *be, struct rt_memory *memory)
{
    struct core_backend *core = core_of(be);

    if (memory->hbm)
        hbm_free(core, memory->bus, memory->bytes);
    else if (memory->imported)
        region_remove(core, memory->data, memory->bytes);
    else
        core_host_free(core, memory->data, memory->bytes);
    free(memory);
}

int core_memory_map(struct rt_backend *be, struct rt_memory *memory, void **data)
{
    (void)be;
    *data = memory->data;
    return TPURT_OK;
}

/* ---- Page tables. Tables are kept until the end; only leaves come and go. ---- */

static _Atomic uint64_t *entry_at(struct core_backend *core, uint64_t table, uint64_t va,
                                  unsigned level)
{
    uint64_t index = va >> (12 + 9 * level) & (ENTRIES - 1);

    return (_Atomic uint64_t *)(void *)(core->hbm + table + index * 8);
}

/* The leaf entry of va at a level, its tables made as needed; NULL: no HBM. */
static _Atomic uint64_t *leaf(struct core_backend *core, uint64_t va, unsigned level)
{
    uint64_t table = core->root;

    for (unsigned l = VTPU_PTE_LEVELS - 1; l > level; l--) {
        _Atomic uint64_t *entry = entry_at(core, table, va, l);
        uint64_t next;

        if (!*entry) {
            if (!rt_va_alloc(&core->hbm_free, VTPU_PAGE_BYTES, VTPU_PAGE_BYTES, &next))
                return NULL;
            memset(core->hbm + next, 0, VTPU_PAGE_BYTES);
            atomic_store_explicit(entry, next | VTPU_PTE_VALID, memory_order_release);
        }
        table = *entry & VTPU_PTE_ADDR_MASK;
    }
    return entry_at(core, table, va, level);
}

/* Large pages need both addresses aligned, and must not meet a table of small ones. */
static bool large(struct core_backend *core, const struct rt_memory *memory, uint64_t va,
                  uint64_t done)
{
    _Atomic uint64_t *entry;

    if (((va + done) | (memory->bus + done)) & (VTPU_HUGE_PAGE_BYTES - 1) ||
        memory->bytes - done < VTPU_HUGE_PAGE_BYTES)
        return false;
    entry = leaf(core, va + done, 1);
    return entry && (!*entry || *entry & VTPU_PTE_HUGE);
}

/* Walks the memory's leaves in steps of their page; bits 0 clears them. */
static bool set_leaves(struct core_backend *core, const struct rt_memory *memory, uint64_t va,
                       uint64_t bits)
{
    for (uint64_t done = 0; done < memory->bytes;) {
        bool huge = large(core, memory, va, done);
        _Atomic uint64_t *entry = leaf(core, va + done, huge);

        if (!entry)
            return false;
        atomic_store_explicit(entry,
                              bits ? bits | (memory->bus + done) | (huge ? VTPU_PTE_HUGE : 0) : 0,
                              memory_order_release);
        done += huge ? VTPU_HUGE_PAGE_BYTES : VTPU_PAGE_BYTES;
    }
    return true;
}

static void invalidate(struct core_backend *core)
{
    core_write(core, VTPU_REG_TLB_INVALIDATE, CONTEXT, 4);
    while (core_read(core, VTPU_REG_TLB_PENDING, 4))
        sched_yield();
}

int core_bind(struct rt_backend *be, struct rt_memory *memory, uint64_t va, uint32_t rights)
{
    struct core_backend *core = core_of(be);
    uint64_t bits = VTPU_PTE_VALID | (rights & DRM_VTPU_VM_READ ? VTPU_PTE_READ : 0) |
                    (rights & DRM_VTPU_VM_WRITE ? VTPU_PTE_WRITE : 0) |
                    (rights & DRM_VTPU_VM_EXEC ? VTPU_PTE_EXEC : 0) |
                    (memory->hbm ? VTPU_PTE_HBM : 0);
    bool ok;

    pthread_mutex_lock(&core->lock);
    ok = set_leaves(core, memory, va, bits);
    if (!ok)
        set_leaves(core, memory, va, 0);
    pthread_mutex_unlock(&core->lock);
    return ok ? TPURT_OK : rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no HBM left for page tables");
}

void core_unbind(struct rt_backend *be, struct rt_memory *memory, uint64_t va)
{
    struct core_backend *core = core_of(be);

    pthread_mutex_lock(&core->lock);
    set_leaves(core, memory, va, 0);
    pthread_mutex_unlock(&core->lock);
    /* A running program holds old translations until its next instruction. */
    invalidate(core);
}

/* ---- Start and end ---- */

int core_memory_init(struct core_backend *core)
{
    core->hbm = mmap(NULL, core->hbm_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (core->hbm == MAP_FAILED)
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "core: no host memory for %" PRIu64
                       " bytes of HBM", core->hbm_bytes);
    madvise(core->hbm, core->hbm_bytes, MADV_HUGEPAGE);
    if (!rt_va_init(&core->hbm_free, 0, core->hbm_bytes) ||
        !rt_va_alloc(&core->hbm_free, VTPU_PAGE_BYTES, VTPU_PAGE_BYTES, &core->root)) {
        core_memory_fini(core);
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a device");
    }
    return TPURT_OK;
}

void core_memory_fini(struct core_backend *core)
{
    rt_va_fini(&core->hbm_free);
    munmap(core->hbm, core->hbm_bytes);
}
