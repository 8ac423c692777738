/* SPDX-License-Identifier: MIT */
/*
 * The torus: who is there, which cables work, and the way of a packet. A packet
 * is carried whole, by the thread of its sender, into the memory of its
 * receiver; nothing is stored on the way, so cyclic traffic cannot deadlock
 * (hardware with buffers would need two virtual channels a ring).
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crc32c.h"
#include "fabric_internal.h"

#define TRIES 4 /* transmissions of a packet over a cable until it is given up */
#define SLOW_MOST 1000000000u

typedef struct Path {
    unsigned hops;
    uint8_t chip[VTPU_MAX_CHIPS + 1], direction[VTPU_MAX_CHIPS + 1];
} Path;

static uint64_t state_of(const VtpuFabric *fabric, unsigned chip)
{
    return atomic_load_explicit(&fabric->state[chip], memory_order_acquire);
}

/* --- shape --- */

static bool parse_shape(const char *shape, unsigned *x, unsigned *y)
{
    char *end;

    unsigned long value = strtoul(shape, &end, 10);
    *x = value > VTPU_MAX_CHIPS ? 0 : (unsigned)value;
    *y = 1;
    if (*end == 'x' && end[1] >= '0' && end[1] <= '9') {
        value = strtoul(end + 1, &end, 10);
        *y = value > VTPU_MAX_CHIPS ? 0 : (unsigned)value;
    }
    return shape[0] >= '0' && shape[0] <= '9' && !*end && *x && *y && *x * *y <= VTPU_MAX_CHIPS;
}

VtpuFabric *vtpu_fabric_new(const char *shape, const char **error)
{
    unsigned x, y;

    if (!shape || !parse_shape(shape, &x, &y)) {
        *error = "the shape is X or XxY, of 1 to 16 chips";
        return NULL;
    }
    VtpuFabric *fabric = calloc(1, sizeof(*fabric));
    VtpuWire *wire = vtpu_wire_new();
    if (!fabric || !wire) {
        free(fabric);
        vtpu_wire_free(wire);
        *error = "out of memory";
        return NULL;
    }
    fabric->x = x;
    fabric->y = y;
    fabric->chips = x * y;
    fabric->wire = wire;
    pthread_mutex_init(&fabric->lock, NULL);
    pthread_cond_init(&fabric->released, NULL);
    return fabric;
}

void vtpu_fabric_free(VtpuFabric *fabric)
{
    if (!fabric) {
        return;
    }
    vtpu_wire_free(fabric->wire);
    pthread_cond_destroy(&fabric->released);
    pthread_mutex_destroy(&fabric->lock);
    free(fabric);
}

unsigned vtpu_fabric_chips(const VtpuFabric *fabric)
{
    return fabric->chips;
}

void vtpu_fabric_shape(const VtpuFabric *fabric, unsigned *x, unsigned *y)
{
    *x = fabric->x;
    *y = fabric->y;
}

void vtpu_fabric_set_wake(VtpuFabric *fabric, VtpuFabricWake wake, void *opaque)
{
    fabric->wake = wake;
    fabric->wake_opaque = opaque;
}

void vtpu_fabric_wake(const VtpuFabric *fabric)
{
    if (fabric->wake) {
        fabric->wake(fabric->wake_opaque);
    }
}

/* --- cables --- */

int vtpu_fabric_neighbour(const VtpuFabric *fabric, unsigned chip, unsigned direction)
{
    bool along_y = direction >= VTPU_DIRECTION_YP;
    unsigned size = along_y ? fabric->y : fabric->x;
    unsigned x = chip % fabric->x, y = chip / fabric->x;
    unsigned step = direction == VTPU_DIRECTION_XP || direction == VTPU_DIRECTION_YP ? 1 : size - 1;

    if (chip >= fabric->chips || direction >= VTPU_NUM_DIRECTIONS || size == 1) {
        return -1;
    }
    if (along_y) {
        y = (y + step) % size;
    } else {
        x = (x + step) % size;
    }
    return (int)(y * fabric->x + x);
}

/* The one end by whose faults a cable is down: that in the positive direction. */
static const VtpuCable *positive_end(const VtpuFabric *fabric, unsigned chip, unsigned direction)
{
    if (direction & 1) {
        chip = (unsigned)vtpu_fabric_neighbour(fabric, chip, direction);
        direction--;
    }
    return &fabric->cable[chip][direction];
}

bool vtpu_fabric_cable_up(const VtpuFabric *fabric, unsigned chip, unsigned direction)
{
    int other = vtpu_fabric_neighbour(fabric, chip, direction);

    return other >= 0 && (state_of(fabric, chip) & VTPU_CHIP_PRESENT) &&
           (state_of(fabric, (unsigned)other) & VTPU_CHIP_PRESENT) &&
           !(atomic_load(&fabric->remote_down[chip]) >> direction & 1) &&
           !(atomic_load(&fabric->remote_down[other]) >> (direction ^ 1) & 1) &&
           !atomic_load(&positive_end(fabric, chip, direction)->fault[VTPU_CABLE_DOWN]);
}

uint32_t vtpu_fabric_down(const VtpuFabric *fabric, unsigned chip)
{
    uint32_t down = 0;

    for (unsigned d = 0; d < VTPU_NUM_DIRECTIONS; d++) {
        if (vtpu_fabric_neighbour(fabric, chip, d) >= 0 &&
            atomic_load(&positive_end(fabric, chip, d)->fault[VTPU_CABLE_DOWN])) {
            down |= 1u << d;
        }
    }
    return down;
}

uint64_t vtpu_fabric_inject_most(VtpuCableFault what)
{
    static const uint64_t most[VTPU_NUM_CABLE_FAULTS] = { 1, UINT32_MAX, SLOW_MOST };

    return most[what];
}

bool vtpu_fabric_inject(VtpuFabric *fabric, unsigned chip, unsigned direction,
                        VtpuCableFault what, uint64_t value)
{
    if (vtpu_fabric_neighbour(fabric, chip, direction) < 0 || what >= VTPU_NUM_CABLE_FAULTS ||
        value > vtpu_fabric_inject_most(what)) {
        return false;
    }
    VtpuCable *cable = what == VTPU_CABLE_DOWN
                           ? (VtpuCable *)positive_end(fabric, chip, direction)
                           : &fabric->cable[chip][direction];
    atomic_store(&cable->fault[what], value);
    vtpu_fabric_wake(fabric); /* the other process routes around it, too */
    return true;
}

uint64_t vtpu_fabric_injected(const VtpuFabric *fabric, unsigned chip, unsigned direction,
                              VtpuCableFault what)
{
    if (vtpu_fabric_neighbour(fabric, chip, direction) < 0 || what >= VTPU_NUM_CABLE_FAULTS) {
        return 0;
    }
    const VtpuCable *cable = what == VTPU_CABLE_DOWN ? positive_end(fabric, chip, direction)
                                                     : &fabric->cable[chip][direction];
    return atomic_load(&cable->fault[what]);
}

uint64_t vtpu_fabric_statistic(const VtpuFabric *fabric, uint64_t reg, unsigned chip,
                               unsigned direction)
{
    const VtpuCable *cable = &fabric->cable[chip][direction];

    return atomic_load(reg == VTPU_REG_LINK_TX_PACKETS ? &cable->packets
                       : reg == VTPU_REG_LINK_TX_BYTES ? &cable->bytes : &cable->crc_errors);
}

/* --- chips --- */

const char *vtpu_fabric_check(const VtpuFabric *fabric, unsigned chip)
{
    if (chip >= fabric->chips) {
        return "chip must be less than the fabric has chips";
    }
    return state_of(fabric, chip) & VTPU_CHIP_PRESENT ? "chip: the fabric has that one already" : NULL;
}

bool vtpu_fabric_attach(VtpuFabric *fabric, unsigned chip, VtpuCore *core)
{
    pthread_mutex_lock(&fabric->lock);
    bool ok = !vtpu_fabric_check(fabric, chip);
    if (ok) {
        fabric->core[chip] = core;
        atomic_fetch_or(&fabric->state[chip], VTPU_CHIP_PRESENT);
    }
    pthread_mutex_unlock(&fabric->lock);
    vtpu_fabric_wake(fabric);
    return ok;
}

void vtpu_fabric_detach(VtpuFabric *fabric, unsigned chip)
{
    pthread_mutex_lock(&fabric->lock);
    uint64_t generation = (state_of(fabric, chip) >> VTPU_CHIP_GENERATION_SHIFT) + 1;
    atomic_store(&fabric->state[chip], generation << VTPU_CHIP_GENERATION_SHIFT);
    fabric->core[chip] = NULL;
    while (fabric->users[chip]) {
        pthread_cond_wait(&fabric->released, &fabric->lock);
    }
    pthread_mutex_unlock(&fabric->lock);
    vtpu_fabric_lost(fabric, 1u << chip);
    vtpu_fabric_wake(fabric);
}

VtpuCore *vtpu_fabric_use(VtpuFabric *fabric, unsigned chip)
{
    pthread_mutex_lock(&fabric->lock);
    VtpuCore *core = fabric->core[chip];
    fabric->users[chip] += core != NULL;
    pthread_mutex_unlock(&fabric->lock);
    return core;
}

void vtpu_fabric_release(VtpuFabric *fabric, unsigned chip)
{
    pthread_mutex_lock(&fabric->lock);
    if (--fabric->users[chip] == 0) {
        pthread_cond_broadcast(&fabric->released);
    }
    pthread_mutex_unlock(&fabric->lock);
}

void vtpu_fabric_lost(VtpuFabric *fabric, uint32_t chips)
{
    for (unsigned chip = 0; chips && chip < fabric->chips; chip++) {
        VtpuCore *core = vtpu_fabric_use(fabric, chip);
        if (core) {
            vtpu_link_peers_lost(core, chips);
            vtpu_fabric_release(fabric, chip);
        }
    }
}

void vtpu_fabric_publish(VtpuFabric *fabric, unsigned chip, bool enabled, uint32_t accept)
{
    uint64_t old = state_of(fabric, chip);
    uint64_t now = old & (VTPU_CHIP_PRESENT | VTPU_CHIP_REMOTE);
    uint64_t generation = old >> VTPU_CHIP_GENERATION_SHIFT;

    now |= enabled ? VTPU_CHIP_ENABLED | (uint64_t)accept << VTPU_CHIP_ACCEPT_SHIFT : 0;
    generation += (now ^ old) & VTPU_CHIP_ENABLED ? 1 : 0;
    atomic_store_explicit(&fabric->state[chip], now | generation << VTPU_CHIP_GENERATION_SHIFT,
                          memory_order_release);
    vtpu_fabric_wake(fabric);
}

uint32_t vtpu_fabric_generation(const VtpuFabric *fabric, unsigned chip)
{
    return (uint32_t)(state_of(fabric, chip) >> VTPU_CHIP_GENERATION_SHIFT);
}

bool vtpu_fabric_enabled(const VtpuFabric *fabric, unsigned chip)
{
    return state_of(fabric, chip) & VTPU_CHIP_ENABLED;
}

/* --- routes --- */

/* Appends `count` hops in one direction; false: a cable on the way is down. */
static bool append(const VtpuFabric *fabric, Path *path, unsigned *chip, unsigned direction,
                   unsigned count)
{
    unsigned at = *chip, hops = path->hops;

    for (; count; count--) {
        if (!vtpu_fabric_cable_up(fabric, at, direction)) {
            return false;
        }
        path->chip[hops] = (uint8_t)at;
        path->direction[hops++] = (uint8_t)direction;
        at = (unsigned)vtpu_fabric_neighbour(fabric, at, direction);
    }
    *chip = at;
    path->hops = hops;
    return true;
}

/* One ring of the torus: the shorter way, positive when equal, else the other. */
static bool around(const VtpuFabric *fabric, Path *path, unsigned *chip, unsigned positive,
                   unsigned distance, unsigned size)
{
    if (distance == 0) {
        return true;
    }
    if (distance <= size - distance) {
        return append(fabric, path, chip, positive, distance) ||
               append(fabric, path, chip, positive + 1, size - distance);
    }
    return append(fabric, path, chip, positive + 1, size - distance) ||
           append(fabric, path, chip, positive, distance);
}

/*
 * Dimension order (W. J. Dally, C. L. Seitz, "Deadlock-free message routing in
 * multiprocessor interconnection networks", 1987): all of x, then all of y. A
 * fault is avoided within its own ring only, so a packet's way stays a function
 * of its ends and of the cables that are down.
 */
static uint32_t route(const VtpuFabric *fabric, unsigned from, unsigned to, Path *path)
{
    unsigned x = fabric->x, y = fabric->y, chip = from;

    path->hops = 0;
    if (from >= fabric->chips || to >= fabric->chips) {
        return VTPU_LINK_REASON_NO_CHIP;
    }
    if (!(state_of(fabric, from) & state_of(fabric, to) & VTPU_CHIP_PRESENT)) {
        return VTPU_LINK_REASON_LOST;
    }
    return around(fabric, path, &chip, VTPU_DIRECTION_XP, (to % x + x - from % x) % x, x) &&
           around(fabric, path, &chip, VTPU_DIRECTION_YP, (to / x + y - from / x) % y, y)
               ? VTPU_LINK_REASON_NONE : VTPU_LINK_REASON_NO_ROUTE;
}

static unsigned apart(unsigned a, unsigned b, unsigned size)
{
    unsigned forward = (b + size - a) % size;

    return forward < size - forward ? forward : size - forward;
}

unsigned vtpu_fabric_distance(const VtpuFabric *fabric, unsigned from, unsigned to)
{
    return apart(from % fabric->x, to % fabric->x, fabric->x) +
           apart(from / fabric->x, to / fabric->x, fabric->y);
}

uint32_t vtpu_fabric_route_reason(const VtpuFabric *fabric, unsigned from, unsigned to)
{
    Path path;

    return route(fabric, from, to, &path);
}

uint32_t vtpu_fabric_reachable(const VtpuFabric *fabric, unsigned from, unsigned to)
{
    uint32_t reason = vtpu_fabric_route_reason(fabric, from, to);
    uint64_t state = reason ? 0 : state_of(fabric, to);

    return reason ? reason
         : (state & VTPU_CHIP_ENABLED) && state >> (VTPU_CHIP_ACCEPT_SHIFT + from) & 1
             ? VTPU_LINK_REASON_NONE : VTPU_LINK_REASON_REFUSED;
}

/* --- packets --- */

/* Takes one off a count; false: it was zero. */
static bool take(_Atomic uint64_t *count)
{
    uint64_t value = atomic_load(count);

    while (value && !atomic_compare_exchange_weak(count, &value, value - 1)) {
    }
    return value != 0;
}

static uint32_t checksum(const VtpuPacket *packet, const uint8_t *data)
{
    uint8_t head[3] = { packet->src, packet->dst, packet->counter };
    uint32_t crc = vtpu_crc32c(0, head, sizeof(head));

    crc = vtpu_crc32c(crc, &packet->len, sizeof(packet->len));
    crc = vtpu_crc32c(crc, &packet->va, sizeof(packet->va));
    crc = vtpu_crc32c(crc, &packet->add, sizeof(packet->add));
    return vtpu_crc32c(crc, data, packet->len);
}

/* Whether one transmission over a cable arrives as it was sent. */
static bool transmit(VtpuCable *cable, const VtpuPacket *packet)
{
    uint8_t garbled[VTPU_LINK_PACKET];
    VtpuPacket arrived = *packet;

    /* Memory does not corrupt packets: the checksum is made when a fault is on demand. */
    if (!take(&cable->fault[VTPU_CABLE_CORRUPT])) {
        return true;
    }
    if (packet->len) {
        memcpy(garbled, packet->data, packet->len);
        garbled[packet->len / 2] ^= 1;
    } else {
        arrived.add ^= 1;
    }
    return checksum(packet, packet->data) == checksum(&arrived, garbled);
}

/* Over the cables that leave chips of this process; the other one does its own. */
static uint32_t carry(VtpuFabric *fabric, const VtpuPacket *packet, uint64_t *delay_ns, Path *path)
{
    uint32_t reason = route(fabric, packet->src, packet->dst, path);

    for (unsigned hop = 0; !reason && hop < path->hops; hop++) {
        VtpuCable *cable = &fabric->cable[path->chip[hop]][path->direction[hop]];
        unsigned tries = 0;
        if (state_of(fabric, path->chip[hop]) & VTPU_CHIP_REMOTE) {
            continue;
        }
        while (tries < TRIES && !transmit(cable, packet)) {
            atomic_fetch_add(&cable->crc_errors, 1);
            tries++;
        }
        if (tries == TRIES) {
            return VTPU_LINK_REASON_CRC;
        }
        *delay_ns += atomic_load(&cable->fault[VTPU_CABLE_SLOW]);
    }
    return reason;
}

/* Before it is sent: who sees that it arrived finds it counted. Times -1: it was not sent. */
static void count(VtpuFabric *fabric, const VtpuPacket *packet, const Path *path, int times)
{
    for (unsigned hop = 0; hop < path->hops; hop++) {
        VtpuCable *cable = &fabric->cable[path->chip[hop]][path->direction[hop]];
        if (!(state_of(fabric, path->chip[hop]) & VTPU_CHIP_REMOTE)) {
            atomic_fetch_add(&cable->packets, (uint64_t)times);
            atomic_fetch_add(&cable->bytes, (uint64_t)times * packet->len);
        }
    }
}

static uint32_t into_chip(VtpuFabric *fabric, const VtpuPacket *packet)
{
    VtpuCore *core = vtpu_fabric_use(fabric, packet->dst);

    if (!core) {
        return VTPU_LINK_REASON_LOST;
    }
    uint32_t reason = vtpu_link_receive(core, packet);
    vtpu_fabric_release(fabric, packet->dst);
    return reason;
}

uint32_t vtpu_fabric_send(VtpuFabric *fabric, const VtpuPacket *packet, VtpuSender sender,
                          uint64_t *delay_ns)
{
    Path path;
    uint32_t reason = carry(fabric, packet, delay_ns, &path);

    if (reason) {
        return reason;
    }
    count(fabric, packet, &path, 1);
    reason = state_of(fabric, packet->dst) & VTPU_CHIP_REMOTE
                 ? vtpu_wire_send(fabric, packet, sender) : into_chip(fabric, packet);
    if (reason == VTPU_LINK_BUSY) {
        count(fabric, packet, &path, -1);
    }
    return reason;
}

uint32_t vtpu_fabric_deliver(VtpuFabric *fabric, const VtpuPacket *packet)
{
    Path path;
    uint64_t delay_ns = 0; /* it has no thread to hold up but that of all packets */
    uint32_t reason = carry(fabric, packet, &delay_ns, &path);

    if (reason) {
        return reason;
    }
    count(fabric, packet, &path, 1);
    reason = into_chip(fabric, packet);
    if (reason == VTPU_LINK_BUSY) {
        count(fabric, packet, &path, -1);
    }
    return reason;
}

/* --- words --- */

void vtpu_fabric_describe(const VtpuFabric *fabric, char *text, size_t size)
{
    static const char *const names[] = { "x+", "x-", "y+", "y-" };
    size_t used = 0;

#define PUT(...)                                                                \
    do {                                                                        \
        int n = snprintf(text + used, size - used, __VA_ARGS__);                \
        used += n < 0 ? 0 : (size_t)n < size - used ? (size_t)n : size - used - 1; \
    } while (0)
    PUT("fabric: %u x %u\n", fabric->x, fabric->y);
    for (unsigned chip = 0; chip < fabric->chips; chip++) {
        uint64_t state = state_of(fabric, chip);
        PUT("chip %u: %s%s, accepts 0x%04x\n", chip,
            !(state & VTPU_CHIP_PRESENT) ? "absent"
            : state & VTPU_CHIP_ENABLED  ? "enabled" : "disabled",
            state & VTPU_CHIP_REMOTE ? ", in another process" : "",
            (unsigned)(state >> VTPU_CHIP_ACCEPT_SHIFT & 0xffff));
        for (unsigned d = 0; d < VTPU_NUM_DIRECTIONS; d++) {
            const VtpuCable *cable = &fabric->cable[chip][d];
            int other = vtpu_fabric_neighbour(fabric, chip, d);
            if (other >= 0) {
                PUT("  %s to %d: %s, %" PRIu64 " packets, %" PRIu64 " bytes, %" PRIu64
                    " checksum errors\n", names[d], other,
                    vtpu_fabric_cable_up(fabric, chip, d) ? "up" : "down",
                    atomic_load(&cable->packets), atomic_load(&cable->bytes),
                    atomic_load(&cable->crc_errors));
            }
        }
    }
#undef PUT
}
