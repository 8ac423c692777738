/* SPDX-License-Identifier: MIT */
/*
 * Shadow memory by intervals: bytes are kept in pages, a page as a sorted list
 * of pieces that have the same history. What is recorded of a piece is what
 * FastTrack (Flanagan and Freund, PLDI 2009) records of a variable: an epoch of
 * the last write, and one of the last read for each thread, here an engine.
 * Since steps come in causal order and a conflict is reported as it comes, no
 * earlier access can be unordered to a later one if the last is ordered to it.
 */
#include <stdlib.h>
#include <string.h>

#include "races.h"

#define PAGE_BITS 16
#define PAGE_BYTES (1u << PAGE_BITS)
#define FIRST_SLOTS 256u

typedef struct Piece {
    uint32_t start; /* in its page; it ends where the next one starts */
    uint32_t write, read[VTPU_NUM_ENGINES];
} Piece;

typedef struct Page {
    uint64_t key; /* 0: a free slot */
    Piece *piece;
    uint32_t count, room;
} Page;

struct VtpuShadow {
    Page *slot; /* open addressing; a power of two */
    uint32_t slots, used;
};

static uint64_t key_of(bool vmem, uint64_t addr)
{
    return (addr >> PAGE_BITS) << 2 | (vmem ? 1 : 2);
}

static Page *find(Page *slot, uint32_t slots, uint64_t key)
{
    uint32_t at = (uint32_t)(key * 0x9e3779b97f4a7c15ull >> 40) & (slots - 1);

    while (slot[at].key && slot[at].key != key) {
        at = (at + 1) & (slots - 1);
    }
    return &slot[at];
}

static bool grow(VtpuShadow *s)
{
    Page *more = calloc(s->slots * 2, sizeof(*more));

    if (!more) {
        return false;
    }
    for (uint32_t i = 0; i < s->slots; i++) {
        if (s->slot[i].key) {
            *find(more, s->slots * 2, s->slot[i].key) = s->slot[i];
        }
    }
    free(s->slot);
    s->slot = more;
    s->slots *= 2;
    return true;
}

/* The page, made when it is new; NULL: out of memory. */
static Page *page_at(VtpuShadow *s, bool vmem, uint64_t addr)
{
    uint64_t key = key_of(vmem, addr);
    Page *page = find(s->slot, s->slots, key);

    if (page->key) {
        return page;
    }
    if (2 * s->used >= s->slots) {
        if (!grow(s)) {
            return NULL;
        }
        page = find(s->slot, s->slots, key);
    }
    Piece *piece = calloc(2, sizeof(*piece));
    if (!piece) {
        return NULL;
    }
    *page = (Page) { key, piece, 1, 2 };
    s->used++;
    return page;
}

/* Makes a piece start at `at` and returns its index; room for one more is there. */
static uint32_t cut(Page *page, uint32_t at)
{
    uint32_t low = 0, high = page->count;

    while (low < high) { /* the first piece that starts at or after it */
        uint32_t middle = (low + high) / 2;
        if (page->piece[middle].start < at) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (at == PAGE_BYTES || (low < page->count && page->piece[low].start == at)) {
        return low;
    }
    memmove(&page->piece[low + 1], &page->piece[low],
            (page->count - low) * sizeof(*page->piece));
    page->piece[low] = page->piece[low - 1];
    page->piece[low].start = at;
    page->count++;
    return low;
}

static bool reserve(Page *page)
{
    if (page->count + 2 > page->room) {
        uint32_t room = page->room * 2 + 2;
        Piece *more = realloc(page->piece, room * sizeof(*more));
        if (!more) {
            return false;
        }
        page->piece = more;
        page->room = room;
    }
    return true;
}

typedef struct Touch {
    uint32_t step;
    unsigned engine;
    bool write;
    VtpuConflictFn *fn;
    void *arg;
} Touch;

static bool conflicts(const Touch *t, const Piece *p, uint64_t addr, uint64_t bytes)
{
    if (p->write && !t->fn(t->arg, p->write, true, addr, bytes)) {
        return false;
    }
    for (unsigned e = 0; t->write && e < VTPU_NUM_ENGINES; e++) {
        if (p->read[e] && e != t->engine && !t->fn(t->arg, p->read[e], false, addr, bytes)) {
            return false;
        }
    }
    return true;
}

/* Bytes [from, to) of the page whose first byte is at `base`. */
static bool touch(Page *page, uint64_t base, uint32_t from, uint32_t to, const Touch *t)
{
    uint32_t first = cut(page, from), last = cut(page, to);

    for (uint32_t i = first; i < last; i++) {
        Piece *p = &page->piece[i];
        uint32_t end = i + 1 < page->count ? page->piece[i + 1].start : PAGE_BYTES;
        if (!conflicts(t, p, base + p->start, end - p->start)) {
            return false;
        }
        if (!t->write) {
            p->read[t->engine] = t->step;
        }
    }
    if (t->write) { /* one piece from now on */
        page->piece[first] = (Piece) { .start = from, .write = t->step };
        memmove(&page->piece[first + 1], &page->piece[last],
                (page->count - last) * sizeof(*page->piece));
        page->count -= last - first - 1;
    }
    return true;
}

static bool touch_range(VtpuShadow *s, bool vmem, uint64_t addr, uint64_t bytes, const Touch *t,
                        bool *no_memory)
{
    for (uint64_t n; bytes; addr += n, bytes -= n) {
        uint32_t from = (uint32_t)(addr % PAGE_BYTES);
        n = bytes < PAGE_BYTES - from ? bytes : PAGE_BYTES - from;
        Page *page = page_at(s, vmem, addr);
        if (!page || !reserve(page)) {
            *no_memory = true;
            return false;
        }
        if (!touch(page, addr - from, from, from + (uint32_t)n, t)) {
            return false;
        }
    }
    return true;
}

bool vtpu_shadow_access(VtpuShadow *s, const VtpuAccess *access, uint32_t step, unsigned engine,
                        VtpuConflictFn *fn, void *arg, bool *no_memory)
{
    const Touch t = { step, engine, access->write, fn, arg };
    uint64_t rows = access->rows;

    if (rows > 1 && access->stride <= access->row_bytes) { /* they overlap, or meet */
        return touch_range(s, access->vmem, access->addr,
                           (rows - 1) * access->stride + access->row_bytes, &t, no_memory);
    }
    for (uint64_t r = 0; r < rows; r++) {
        if (!touch_range(s, access->vmem, access->addr + r * access->stride, access->row_bytes,
                         &t, no_memory)) {
            return false;
        }
    }
    return true;
}

VtpuShadow *vtpu_shadow_new(void)
{
    VtpuShadow *s = calloc(1, sizeof(*s));

    if (s && !(s->slot = calloc(FIRST_SLOTS, sizeof(*s->slot)))) {
        free(s);
        return NULL;
    }
    if (s) {
        s->slots = FIRST_SLOTS;
    }
    return s;
}

void vtpu_shadow_clear(VtpuShadow *s)
{
    for (uint32_t i = 0; i < s->slots; i++) {
        free(s->slot[i].piece);
        s->slot[i] = (Page) { 0 };
    }
    s->used = 0;
}

void vtpu_shadow_free(VtpuShadow *s)
{
    if (s) {
        vtpu_shadow_clear(s);
        free(s->slot);
        free(s);
    }
}
