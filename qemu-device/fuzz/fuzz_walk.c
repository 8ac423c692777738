/* SPDX-License-Identifier: MIT */
/*
 * Page tables as a guest may leave them, and accesses through them. A plain walker,
 * written after docs/hardware-programming.md, says what each must do: reach the same
 * bytes, or fault with the same cause at the same address.
 */
#include <string.h>

#include "rig.h"

#define POOL 0x100000u /* tables: pages of HBM that entries like to name */
#define POOL_PAGES 16
#define DATA 0x200000u
#define FAR_BUS 0x200000000ull /* leaves of system memory: reads give a pattern */
#define MOST_BYTES (5 * VTPU_PAGE_BYTES)
#define CONTEXTS 2

typedef struct Walk {
    Input in;
    uint64_t root[CONTEXTS];
    bool stale[CONTEXTS]; /* memory was written since the context's TLB was empty */
    uint32_t done[CONTEXTS]; /* entries of the context's queue */
} Walk;

typedef struct Place {
    uint32_t cause;
    bool hbm;
    uint64_t at;
} Place;

static uint64_t word_at(const Rig *rig, uint64_t offset)
{
    uint64_t word;
    memcpy(&word, rig->hbm + offset, sizeof(word));
    return word;
}

/* The documented walk, and nothing cached. */
static Place walk(const Rig *rig, uint64_t root, uint64_t va, uint64_t right)
{
    const uint64_t rights = VTPU_PTE_READ | VTPU_PTE_WRITE | VTPU_PTE_EXEC;

    if (!(root & VTPU_CTX_VALID)) {
        return (Place) { .cause = VTPU_FAULT_BAD_CONTEXT };
    }
    if (va >= 1ull << 48) {
        return (Place) { .cause = VTPU_FAULT_UNMAPPED };
    }
    uint64_t table = root - VTPU_CTX_VALID;
    for (int level = 3; level >= 0; level--) {
        if (table % 4096 || table > RIG_HBM_BYTES - 4096) {
            return (Place) { .cause = VTPU_FAULT_BAD_PAGE_TABLE };
        }
        uint64_t entry = word_at(rig, table + 8 * (va >> (12 + 9 * level) & 511));
        uint64_t address = entry & VTPU_PTE_ADDR_MASK, rest = entry & ~VTPU_PTE_ADDR_MASK;
        if (!(rest & VTPU_PTE_VALID)) {
            return (Place) { .cause = VTPU_FAULT_UNMAPPED };
        }
        bool huge = level == 1 && rest & VTPU_PTE_HUGE;
        if (level > 0 && !huge) {
            if (rest != VTPU_PTE_VALID) {
                return (Place) { .cause = VTPU_FAULT_BAD_PAGE_TABLE };
            }
            table = address;
            continue;
        }
        uint64_t size = huge ? 2u << 20 : 4096;
        uint64_t known = VTPU_PTE_VALID | rights | VTPU_PTE_HBM | (huge ? VTPU_PTE_HUGE : 0);
        bool hbm = rest & VTPU_PTE_HBM;
        if (rest & ~known || address % size || (hbm && address + size > RIG_HBM_BYTES)) {
            return (Place) { .cause = VTPU_FAULT_BAD_PAGE_TABLE };
        }
        if (!(rest & right)) {
            return (Place) { .cause = VTPU_FAULT_PROTECTION };
        }
        return (Place) { .hbm = hbm, .at = address + va % size };
    }
    __builtin_unreachable();
}

static uint8_t bus_byte(uint64_t addr)
{
    return (uint8_t)(addr * 37 + (addr >> 12));
}

/* System memory that is a pattern to read, and forgets what is written. */
static bool bus(Rig *rig, bool write, uint64_t addr, void *buf, size_t len)
{
    (void)rig;
    for (size_t i = 0; !write && i < len; i++) {
        ((uint8_t *)buf)[i] = bus_byte(addr + i);
    }
    return true;
}

static uint8_t byte_of(const Rig *rig, Place place)
{
    if (place.hbm) {
        return rig->hbm[place.at];
    }
    return bus_byte(place.at);
}

/* Where the rings lie: an access changes what it is to find. */
static bool is_ring(Place place)
{
    return !place.cause && !place.hbm && place.at - RIG_BUS < RIG_BUS_BYTES;
}

static void note_write(Walk *w)
{
    for (unsigned c = 0; c < CONTEXTS; c++) {
        w->stale[c] = true;
    }
}

static uint64_t pick_va(Input *in)
{
    static const uint16_t indices[] = { 0, 1, 2, 255, 256, 510, 511, 3 };
    uint64_t va = 0;
    uint8_t shape = input_byte(in);

    for (int level = 0; level < 4; level++) {
        va |= (uint64_t)indices[input_byte(in) % 8] << (12 + 9 * level);
    }
    switch (shape % 4) {
    case 0: /* at the end of its page */
        va += 4096 - 8 * (shape >> 2);
        break;
    case 1:
        va += 8 * (uint64_t)input_uint(in, 2) % 4096;
        break;
    case 2:
        va += input_uint(in, 3);
        break;
    default:
        break;
    }
    return shape == 255 ? input_uint(in, 8) : va;
}

static void poke_entry(Rig *rig, Walk *w)
{
    static const uint16_t indices[] = { 0, 1, 2, 255, 256, 510, 511, 3 };
    Input *in = &w->in;
    uint8_t kind = input_byte(in), where = input_byte(in), what = input_byte(in);
    uint64_t at = POOL + where % POOL_PAGES * 4096u + 8u * indices[input_byte(in) % 8];
    uint64_t bits = input_byte(in) & 0x3f, entry;

    switch (kind % 8) {
    case 0:
    case 1:
    case 2:
        entry = (POOL + what % POOL_PAGES * 4096u) | VTPU_PTE_VALID;
        break;
    case 3:
        entry = (DATA + what * 4096u) | (bits & ~VTPU_PTE_HUGE) | VTPU_PTE_VALID | VTPU_PTE_HBM;
        break;
    case 4:
        entry = (FAR_BUS + what * 4096u) | (bits & ~(VTPU_PTE_HUGE | VTPU_PTE_HBM)) |
                VTPU_PTE_VALID;
        break;
    case 5:
        entry = (uint64_t)(what % 9) << 21 | bits | VTPU_PTE_HUGE | VTPU_PTE_VALID;
        break;
    case 6:
        entry = 0;
        break;
    default:
        entry = input_uint(in, 8);
        break;
    }
    memcpy(rig->hbm + at, &entry, sizeof(entry));
    note_write(w);
}

static void set_root(Rig *rig, Walk *w)
{
    uint8_t kind = input_byte(&w->in), c = kind % CONTEXTS;
    uint64_t root = kind & 0x80 ? input_uint(&w->in, 8)
                                : (POOL + (kind >> 1 & 15) * 4096u) | VTPU_CTX_VALID;

    w->root[c] = root;
    rig_write(rig, VTPU_REG_CTX_ROOT + 8 * c, root, 8);
    w->stale[c] = false;
}

/* The context's queue serves one entry, whose fault must be what is expected:
 * none, or expected.cause at `at`. */
static void serve(Rig *rig, Walk *w, unsigned c, const uint8_t *entry, uint32_t cause,
                  uint64_t at)
{
    uint64_t ring = RIG_BUS + c * 4096u;
    uint32_t slot = w->done[c] & 63;

    memcpy(rig->system + c * 4096u + slot * VTPU_RING_ENTRY, entry, VTPU_RING_ENTRY);
    if (rig_read(rig, rig_queue_reg(c, VTPU_REG_Q_QSTATUS), 4) == VTPU_QUEUE_STATE_DISABLED) {
        rig_write(rig, rig_queue_reg(c, VTPU_REG_Q_RING_BASE), ring, 8);
        rig_write(rig, rig_queue_reg(c, VTPU_REG_Q_RING_LOG2), 6, 4);
        rig_write(rig, rig_queue_reg(c, VTPU_REG_Q_CONTEXT), c, 4);
        rig_write(rig, rig_queue_reg(c, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_ENABLE, 4);
        memcpy(rig->system + c * 4096u, entry, VTPU_RING_ENTRY);
        w->done[c] = 0;
    }
    vtpu_core_doorbell(rig->core, c, ++w->done[c]);
    rig_run(rig, 16);
    uint64_t got = rig_read(rig, rig_queue_reg(c, VTPU_REG_Q_FAULT_CAUSE), 4);
    uint64_t got_at = rig_read(rig, rig_queue_reg(c, VTPU_REG_Q_FAULT_ADDR), 8);
    uint64_t pc = rig_read(rig, rig_queue_reg(c, VTPU_REG_Q_FAULT_PC), 4);
    if (entry[VTPU_RING_OP] == VTPU_CMD_RUN && !cause) {
        RIG_REQUIRE(got && pc != VTPU_PC_NONE); /* it ran into words that are no code */
    } else {
        RIG_REQUIRE(got == cause);
        RIG_REQUIRE(!cause || (got_at == at && pc == VTPU_PC_NONE));
    }
    if (got) {
        rig_write(rig, rig_queue_reg(c, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_RESET, 4);
    }
    rig_check(rig);
}

static void make(uint8_t *entry, uint8_t op, uint64_t a, uint64_t b, uint64_t c)
{
    memset(entry, 0, VTPU_RING_ENTRY);
    entry[VTPU_RING_OP] = op;
    memcpy(entry + VTPU_RING_PAYLOAD, &a, 8);
    memcpy(entry + VTPU_RING_PAYLOAD + 8, &b, 8);
    memcpy(entry + VTPU_RING_PAYLOAD + 16, &c, 8);
}

static void signal_at(Rig *rig, Walk *w, unsigned c, uint64_t va)
{
    uint8_t entry[VTPU_RING_ENTRY];
    uint64_t value = 0x5a5a000000000000 | va;

    va &= ~7ull;
    Place place = walk(rig, w->root[c], va, VTPU_PTE_WRITE);
    make(entry, VTPU_CMD_SIGNAL, va, value, 0);
    serve(rig, w, c, entry, place.cause, va);
    if (!place.cause && place.hbm) {
        RIG_REQUIRE(word_at(rig, place.at) == value);
        note_write(w);
    }
}

/* Satisfied by the word's value and no greater one. */
static void wait_at(Rig *rig, Walk *w, unsigned c, uint64_t va)
{
    uint8_t entry[VTPU_RING_ENTRY];
    uint64_t word = 0;

    va &= ~7ull;
    Place place = walk(rig, w->root[c], va, VTPU_PTE_READ);
    if (is_ring(place)) {
        return;
    }
    for (unsigned i = 0; i < 8 && !place.cause; i++) {
        Place byte = { .hbm = place.hbm, .at = place.at + i };
        word |= (uint64_t)byte_of(rig, byte) << (8 * i);
    }
    make(entry, VTPU_CMD_WAIT, va, word, 0);
    serve(rig, w, c, entry, place.cause, va);
    if (!place.cause) {
        RIG_REQUIRE(rig_read(rig, rig_queue_reg(c, VTPU_REG_Q_HEAD), 4) == w->done[c]);
    }
    if (!place.cause && word != UINT64_MAX) {
        make(entry, VTPU_CMD_WAIT, va, word + 1, 0);
        serve(rig, w, c, entry, 0, va);
        RIG_REQUIRE(rig_read(rig, rig_queue_reg(c, VTPU_REG_Q_HEAD), 4) == w->done[c] - 1);
        rig_write(rig, rig_queue_reg(c, VTPU_REG_Q_CTRL), VTPU_Q_CTRL_RESET, 4);
    }
}

/* The first byte that cannot be reached, or va + len. */
static uint64_t reach(const Rig *rig, uint64_t root, uint64_t va, uint64_t len, uint64_t right,
                      uint32_t *cause)
{
    uint64_t end = va + len;

    for (uint64_t at = va; at != end;) {
        *cause = walk(rig, root, at, right).cause;
        if (*cause) {
            return at;
        }
        uint64_t next = (at | 4095) + 1;
        at = end - at < next - at ? end : next;
    }
    *cause = 0;
    return end;
}

static void fill_at(Rig *rig, Walk *w, unsigned c, uint64_t va, uint64_t len)
{
    const uint32_t pattern = 0xa5c3e187;
    uint8_t entry[VTPU_RING_ENTRY];
    Place page[MOST_BYTES / 4096 + 2];
    uint32_t cause;

    len &= ~3ull;
    uint64_t bad = reach(rig, w->root[c], va, len, VTPU_PTE_WRITE, &cause);
    /* What the walk was before memory changed: tables may lie in what is filled. */
    bool tables = false;
    for (uint64_t at = va, n = 0; at < bad; at = (at | 4095) + 1, n++) {
        page[n] = walk(rig, w->root[c], at, VTPU_PTE_WRITE);
        tables |= page[n].hbm && page[n].at >= POOL && page[n].at < POOL + POOL_PAGES * 4096u;
    }
    if (tables) {
        return;
    }
    make(entry, VTPU_CMD_FILL, va, len, pattern);
    serve(rig, w, c, entry, cause, bad);
    note_write(w);
    for (uint64_t at = va, n = 0; !cause && at < bad; at++) {
        if (page[n].hbm) {
            uint8_t want = (uint8_t)(pattern >> (8 * ((at - va) % 4)));
            /* Pages that are mapped twice hold what came last: 4-byte steps agree. */
            if (va % 4 == 0) {
                RIG_REQUIRE(rig->hbm[page[n].at] == want);
            }
        }
        page[n].at++;
        n += (at & 4095) == 4095;
    }
}

/* Code is fetched whole before it runs: the copy must be the bytes that lie there. */
static void run_at(Rig *rig, Walk *w, unsigned c, uint64_t va, uint64_t len)
{
    uint8_t entry[VTPU_RING_ENTRY], want[MOST_BYTES];
    uint32_t cause;
    const VtpuProgram *newest = NULL;

    va &= ~63ull;
    len = (len & ~63ull) + 64;
    uint64_t bad = reach(rig, w->root[c], va, len, VTPU_PTE_EXEC, &cause);
    for (uint64_t i = 0; !cause && i < len; i++) {
        Place place = walk(rig, w->root[c], va + i, VTPU_PTE_EXEC);
        if (is_ring(place)) {
            return;
        }
        want[i] = byte_of(rig, place);
    }
    if (!cause && vtpu_op_table[want[0]].name) {
        return; /* a program: others run those */
    }
    make(entry, VTPU_CMD_RUN, va, len, 0);
    serve(rig, w, c, entry, cause, bad);
    for (unsigned i = 0; !cause && i < VTPU_PROGRAM_CACHE; i++) {
        const VtpuProgram *program = rig->core->program[i];
        newest = program && (!newest || program->used > newest->used) ? program : newest;
    }
    RIG_REQUIRE(cause || (newest->size == len && !memcmp(newest->bytes, want, len)));
}

static void access_memory(Rig *rig, Walk *w)
{
    uint8_t kind = input_byte(&w->in);
    unsigned c = kind >> 7;
    uint64_t va = pick_va(&w->in), len = input_uint(&w->in, 2) % (4 * VTPU_PAGE_BYTES);

    if (va > UINT64_MAX - MOST_BYTES) {
        va -= MOST_BYTES;
    }
    if (w->stale[c]) {
        rig_write(rig, VTPU_REG_TLB_INVALIDATE, c, 4);
        RIG_REQUIRE(rig_read(rig, VTPU_REG_TLB_PENDING, 4) == 0);
        w->stale[c] = false;
    }
    switch (kind % 4) {
    case 0:
        signal_at(rig, w, c, va);
        break;
    case 1:
        wait_at(rig, w, c, va);
        break;
    case 2:
        fill_at(rig, w, c, va, len);
        break;
    default:
        run_at(rig, w, c, va, len);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    Walk w = { .in = { data, size } };
    Rig rig = { .target = &w, .bus = bus };

    rig_open(&rig, "scalar", 0, UINT32_MAX);
    rig_write(&rig, VTPU_REG_CTRL, VTPU_CTRL_ENABLE, 4);
    while (w.in.left) {
        switch (input_byte(&w.in) % 8) {
        case 0:
            set_root(&rig, &w);
            break;
        case 1:
        case 2:
        case 3:
            poke_entry(&rig, &w);
            break;
        default:
            access_memory(&rig, &w);
            break;
        }
    }
    rig_check_works(&rig);
    rig_close(&rig);
    return 0;
}
