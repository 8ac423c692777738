/* SPDX-License-Identifier: MIT */
/* The address allocator against a map of which page belongs to whom. */
#include <stdio.h>
#include <stdlib.h>

#include "va.h"

#define PAGES 512
#define PAGE 4096ull
#define START (16 * PAGE)
#define LIVE 64

static uint64_t seed = 7;

static uint64_t next(uint64_t limit)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (seed >> 33) % limit;
}

static int owner[PAGES]; /* 0: free */

static int set(uint64_t address, uint64_t bytes, int from, int to)
{
    for (uint64_t p = (address - START) / PAGE; p < (address - START + bytes) / PAGE; p++) {
        if (p >= PAGES || owner[p] != from)
            return 0;
        owner[p] = to;
    }
    return 1;
}

static int fits(uint64_t bytes, uint64_t align)
{
    for (uint64_t p = 0; p < PAGES; p++) {
        uint64_t n = 0;

        if ((START + p * PAGE) % align)
            continue;
        while (p + n < PAGES && !owner[p + n] && n * PAGE < bytes)
            n++;
        if (n * PAGE == bytes)
            return 1;
    }
    return 0;
}

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "round %d: %s\n", round, #condition); \
            return 1; \
        } \
    } while (0)

int main(void)
{
    struct { uint64_t address, bytes; } live[LIVE] = { { 0, 0 } };
    uint64_t used = 0;
    struct rt_va va;
    int round = 0;

    CHECK(rt_va_init(&va, START, START + PAGES * PAGE));
    for (round = 0; round < 50000; round++) {
        int i = (int)next(LIVE);

        if (live[i].bytes) {
            CHECK(set(live[i].address, live[i].bytes, i + 1, 0));
            rt_va_free(&va, live[i].address, live[i].bytes);
            used -= live[i].bytes;
            live[i].bytes = 0;
        } else {
            uint64_t bytes = (1 + next(next(4) ? 8 : 100)) * PAGE;
            uint64_t align = PAGE << next(6), address = START + next(PAGES) * PAGE;
            int wanted = next(4) == 0, could = fits(bytes, align), ok;

            ok = wanted ? rt_va_take(&va, address, bytes)
                        : rt_va_alloc(&va, bytes, align, &address);
            if (!wanted)
                CHECK(ok == could);
            if (ok) {
                CHECK(wanted || address % align == 0);
                CHECK(set(address, bytes, 0, i + 1));
                live[i].address = address;
                live[i].bytes = bytes;
                used += bytes;
            }
        }
        CHECK(va.used == used);
    }
    for (int i = 0; i < LIVE; i++)
        if (live[i].bytes)
            rt_va_free(&va, live[i].address, live[i].bytes);
    CHECK(va.used == 0 && va.free && !va.free->next);
    CHECK(va.free->start == START && va.free->end == START + PAGES * PAGE);
    rt_va_fini(&va);
    return 0;
}
