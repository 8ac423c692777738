/* SPDX-License-Identifier: MIT */
#include "va.h"

#include <assert.h>
#include <stdlib.h>

static struct rt_range *new_range(uint64_t start, uint64_t end, struct rt_range *next)
{
    struct rt_range *range = malloc(sizeof(*range));

    if (range)
        *range = (struct rt_range){ start, end, next };
    return range;
}

bool rt_va_init(struct rt_va *va, uint64_t start, uint64_t end)
{
    assert(start < end);
    va->used = 0;
    va->free = new_range(start, end, NULL);
    return va->free;
}

void rt_va_fini(struct rt_va *va)
{
    while (va->free) {
        struct rt_range *next = va->free->next;

        free(va->free);
        va->free = next;
    }
}

/* Cuts [start, end) out of the free range that *link leads to. */
static bool cut(struct rt_va *va, struct rt_range **link, uint64_t start, uint64_t end)
{
    struct rt_range *range = *link;

    if (start > range->start && end < range->end) {
        struct rt_range *rest = new_range(end, range->end, range->next);

        if (!rest)
            return false;
        range->end = start;
        range->next = rest;
    } else if (start > range->start) {
        range->end = start;
    } else if (end < range->end) {
        range->start = end;
    } else {
        *link = range->next;
        free(range);
    }
    va->used += end - start;
    return true;
}

bool rt_va_alloc(struct rt_va *va, uint64_t bytes, uint64_t align, uint64_t *address)
{
    for (struct rt_range **link = &va->free; *link; link = &(*link)->next) {
        uint64_t start = ((*link)->start + align - 1) & ~(align - 1);

        if (start < (*link)->start || start >= (*link)->end || (*link)->end - start < bytes)
            continue;
        if (!cut(va, link, start, start + bytes))
            return false;
        *address = start;
        return true;
    }
    return false;
}

bool rt_va_take(struct rt_va *va, uint64_t address, uint64_t bytes)
{
    for (struct rt_range **link = &va->free; *link; link = &(*link)->next)
        if (address >= (*link)->start && address < (*link)->end)
            return (*link)->end - address >= bytes && cut(va, link, address, address + bytes);
    return false;
}

void rt_va_free(struct rt_va *va, uint64_t address, uint64_t bytes)
{
    struct rt_range **link = &va->free, *before = NULL, *after;
    uint64_t end = address + bytes;

    while (*link && (*link)->start < address) {
        before = *link;
        link = &before->next;
    }
    after = *link;
    va->used -= bytes;
    if (before && before->end == address) {
        before->end = end;
        if (after && after->start == end) {
            before->end = after->end;
            before->next = after->next;
            free(after);
        }
    } else if (after && after->start == end) {
        after->start = address;
    } else {
        struct rt_range *range = new_range(address, end, after);

        if (range)
            *link = range; /* else the range is lost: a leak, no error */
    }
}
