/* SPDX-License-Identifier: MIT */
/*
 * The stream between two processes of one fabric.
 *
 * Frames of a fixed header and up to VTPU_LINK_PACKET bytes, little endian,
 * with a CRC-32C over the whole frame in which the CRC field is zero:
 *
 *    0 u32 magic      8 u32 seq     16 u64 va     32 u32 arg
 *    4 u8 type       12 u32 len     24 u64 add    36 u32 crc
 *    5 u8 src, 6 u8 dst, 7 u8 counter
 *
 * HELLO   the first frame, and only it: arg version, src and dst the shape
 * STATE   of chip src: arg present 1, enabled 2; va generation and accept mask
 *         (<< 32); add the mask of its cables that are down. A chip that was
 *         never mentioned is absent
 * PACKET  seq counts up from 0
 * ANSWER  to packet seq, in their order: arg enum link_reason
 *
 * The other side is not trusted: every field is checked, lengths and the number
 * of packets in flight are bounded, and a frame that breaks a rule ends the
 * connection. A packet of a chip that the other side did not announce is such a
 * frame; whether an announced one may write is the receiving chip's decision.
 *
 * A stream keeps order and loses nothing, so there is no retransmission: an
 * answer that is missing means that the other side is stopped or gone, and the
 * latter ends the connection.
 */
#include <stdlib.h>
#include <string.h>

#include "crc32c.h"
#include "fabric_internal.h"

#define MAGIC 0x4b4c5456u /* "VTLK" */
#define VERSION 1u
#define HEADER 40u
#define FRAME_MOST (HEADER + VTPU_LINK_PACKET)
#define IN_BYTES (64u << 10)
/* A sender's window (engine_link.c) times the chips: never all of it in use. */
#define IN_FLIGHT 1024u
/* Output beyond what the windows can need: the other side does not read. */
#define OUT_MOST ((IN_FLIGHT + 64u) * FRAME_MOST)

enum { FRAME_HELLO = 1, FRAME_STATE, FRAME_PACKET, FRAME_ANSWER };

typedef struct Frame {
    uint8_t type, src, dst, counter;
    uint32_t seq, len, arg;
    uint64_t va, add;
    const uint8_t *data;
} Frame;

typedef struct InFlight {
    uint8_t chip; /* of this process, that sent it */
    VtpuSender sender;
    uint64_t va;
} InFlight;

struct VtpuWire {
    pthread_mutex_t lock;
    /* [lock] */
    bool connected, greeted; /* greeted: the other side's HELLO was good */
    uint8_t *out; /* OUT_MOST bytes, a ring: out_count from out_head on */
    size_t out_head, out_count;
    InFlight in_flight[IN_FLIGHT];
    uint32_t seq_sent, seq_answered;
    uint64_t sent_state[VTPU_MAX_CHIPS]; /* what the other side was told last */
    uint32_t sent_down[VTPU_MAX_CHIPS];

    /* Of the thread that feeds the stream. */
    uint8_t in[IN_BYTES];
    size_t in_count;
    bool stalled; /* the first frame's chip is parked */
    uint32_t seq_expected;
    uint32_t generation[VTPU_MAX_CHIPS]; /* as the other side counts */
};

VtpuWire *vtpu_wire_new(void)
{
    VtpuWire *wire = calloc(1, sizeof(*wire));

    if (wire) {
        pthread_mutex_init(&wire->lock, NULL);
    }
    return wire;
}

void vtpu_wire_free(VtpuWire *wire)
{
    if (wire) {
        free(wire->out);
        pthread_mutex_destroy(&wire->lock);
        free(wire);
    }
}

/* --- frames --- */

static void put32(uint8_t *at, uint32_t value)
{
    memcpy(at, &value, 4); /* little-endian hosts only, see machine.h */
}

static uint32_t get32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

static uint64_t get64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static void out_bytes(VtpuWire *wire, const void *data, size_t size)
{
    size_t at = (wire->out_head + wire->out_count) % OUT_MOST;
    size_t first = size < OUT_MOST - at ? size : OUT_MOST - at;

    memcpy(wire->out + at, data, first);
    memcpy(wire->out, (const uint8_t *)data + first, size - first);
    wire->out_count += size;
}

/* Lock held. */
static bool out_frame(VtpuWire *wire, const Frame *frame)
{
    uint8_t header[HEADER];

    if (!wire->connected || OUT_MOST - wire->out_count < HEADER + frame->len) {
        return false;
    }
    put32(header, MAGIC);
    header[4] = frame->type;
    header[5] = frame->src;
    header[6] = frame->dst;
    header[7] = frame->counter;
    put32(header + 8, frame->seq);
    put32(header + 12, frame->len);
    memcpy(header + 16, &frame->va, 8);
    memcpy(header + 24, &frame->add, 8);
    put32(header + 32, frame->arg);
    put32(header + 36, 0);
    put32(header + 36, vtpu_crc32c(vtpu_crc32c(0, header, HEADER), frame->data, frame->len));
    out_bytes(wire, header, HEADER);
    if (frame->len) {
        out_bytes(wire, frame->data, frame->len);
    }
    return true;
}

/*
 * What is new of the chips of this process goes after all that they sent, and
 * before all that they will: the other side takes packets of chips that it knows.
 * Lock held.
 */
static void out_states(VtpuFabric *fabric)
{
    VtpuWire *wire = fabric->wire;

    for (unsigned chip = 0; wire->greeted && chip < fabric->chips; chip++) {
        uint64_t state = atomic_load(&fabric->state[chip]);
        uint32_t down = vtpu_fabric_down(fabric, chip);
        uint64_t accept = state >> VTPU_CHIP_ACCEPT_SHIFT & 0xffff;
        Frame frame = {
            .type = FRAME_STATE,
            .src = (uint8_t)chip,
            .arg = (uint32_t)state & (VTPU_CHIP_PRESENT | VTPU_CHIP_ENABLED),
            .va = accept << 32 | state >> VTPU_CHIP_GENERATION_SHIFT,
            .add = down,
        };
        if ((state & VTPU_CHIP_REMOTE) ||
            (state == wire->sent_state[chip] && down == wire->sent_down[chip])) {
            continue;
        }
        if (out_frame(wire, &frame)) {
            wire->sent_state[chip] = state;
            wire->sent_down[chip] = down;
        }
    }
}

size_t vtpu_fabric_output(VtpuFabric *fabric, void *data, size_t size)
{
    VtpuWire *wire = fabric->wire;

    pthread_mutex_lock(&wire->lock);
    out_states(fabric);
    size = size < wire->out_count ? size : wire->out_count;
    size_t first = OUT_MOST - wire->out_head;
    first = size < first ? size : first;
    if (size) {
        memcpy(data, wire->out + wire->out_head, first);
        memcpy((uint8_t *)data + first, wire->out, size - first);
    }
    wire->out_head = (wire->out_head + size) % OUT_MOST;
    wire->out_count -= size;
    pthread_mutex_unlock(&wire->lock);
    return size;
}

/* --- sending --- */

uint32_t vtpu_wire_send(VtpuFabric *fabric, const VtpuPacket *packet, VtpuSender sender)
{
    VtpuWire *wire = fabric->wire;
    uint32_t result = VTPU_LINK_SENT;

    pthread_mutex_lock(&wire->lock);
    uint32_t seq = wire->seq_sent;
    out_states(fabric);
    Frame frame = {
        .type = FRAME_PACKET,
        .src = packet->src,
        .dst = packet->dst,
        .counter = packet->counter,
        .seq = seq,
        .len = packet->len,
        .va = packet->va,
        .add = packet->add,
        .data = packet->data,
    };
    if (!wire->greeted) {
        result = VTPU_LINK_REASON_LOST;
    } else if (seq - wire->seq_answered == IN_FLIGHT || !out_frame(wire, &frame)) {
        result = VTPU_LINK_BUSY;
    } else {
        wire->in_flight[seq % IN_FLIGHT] = (InFlight) { packet->src, sender, packet->va };
        wire->seq_sent++;
    }
    pthread_mutex_unlock(&wire->lock);
    vtpu_fabric_wake(fabric);
    return result;
}

static void answered(VtpuFabric *fabric, const InFlight *packet, uint32_t reason)
{
    VtpuCore *core = vtpu_fabric_use(fabric, packet->chip);

    if (core) {
        vtpu_link_answered(core, packet->sender, reason, packet->va);
        vtpu_fabric_release(fabric, packet->chip);
    }
}

/* --- receiving --- */

static const char *hello(VtpuFabric *fabric, const Frame *frame)
{
    VtpuWire *wire = fabric->wire;

    if (frame->arg != VERSION) {
        return "the other side speaks another version of the link's protocol";
    }
    if (frame->src != fabric->x || frame->dst != fabric->y) {
        return "the fabric of the other side has another shape";
    }
    pthread_mutex_lock(&wire->lock);
    wire->greeted = true;
    pthread_mutex_unlock(&wire->lock);
    vtpu_fabric_wake(fabric); /* with the state of the chips here */
    return NULL;
}

/*
 * Generations of a chip there are counted here, so that one never comes again
 * when the connection does.
 */
static uint64_t next_state(VtpuFabric *fabric, unsigned chip, const Frame *frame)
{
    const uint32_t flags = VTPU_CHIP_PRESENT | VTPU_CHIP_ENABLED;
    uint64_t old = atomic_load(&fabric->state[chip]);
    uint64_t generation = old >> VTPU_CHIP_GENERATION_SHIFT;
    uint32_t theirs = (uint32_t)frame->va;

    if (theirs != fabric->wire->generation[chip] || frame->arg != (old & flags)) {
        generation++;
    }
    fabric->wire->generation[chip] = theirs;
    uint64_t now = frame->arg | (frame->arg & VTPU_CHIP_PRESENT ? VTPU_CHIP_REMOTE : 0);
    return now | frame->va >> 32 << VTPU_CHIP_ACCEPT_SHIFT |
           generation << VTPU_CHIP_GENERATION_SHIFT;
}

static const char *chip_state(VtpuFabric *fabric, const Frame *frame)
{
    unsigned chip = frame->src;
    uint64_t accept = frame->va >> 32;

    if (chip >= fabric->chips || frame->arg > (VTPU_CHIP_PRESENT | VTPU_CHIP_ENABLED) ||
        accept > 0xffff || frame->add >> VTPU_NUM_DIRECTIONS) {
        return "a chip's state has a field out of its range";
    }
    pthread_mutex_lock(&fabric->lock);
    uint64_t old = atomic_load(&fabric->state[chip]);
    bool ours = (old & VTPU_CHIP_PRESENT) && !(old & VTPU_CHIP_REMOTE);
    bool gone = (old & VTPU_CHIP_REMOTE) && !(frame->arg & VTPU_CHIP_PRESENT);
    if (!ours) {
        atomic_store(&fabric->remote_down[chip], (uint32_t)frame->add);
        atomic_store(&fabric->state[chip], next_state(fabric, chip, frame));
    }
    pthread_mutex_unlock(&fabric->lock);
    if (ours) {
        /* Absence is no claim: both sides say it of a chip that has just left. */
        return frame->arg & VTPU_CHIP_PRESENT ? "both sides have the same chip" : NULL;
    }
    if (gone) {
        vtpu_fabric_lost(fabric, 1u << chip);
    }
    return NULL;
}

/* *stall: the frame is to come again. */
static const char *packet_in(VtpuFabric *fabric, const Frame *frame, bool *stall)
{
    VtpuWire *wire = fabric->wire;
    VtpuPacket packet = {
        frame->src, frame->dst, frame->counter, frame->len, frame->va, frame->add, frame->data,
    };

    if (frame->seq != wire->seq_expected) {
        return "a packet is out of order";
    }
    if (frame->src >= fabric->chips || frame->dst >= fabric->chips ||
        !(atomic_load(&fabric->state[frame->src]) & VTPU_CHIP_REMOTE) ||
        (atomic_load(&fabric->state[frame->dst]) & VTPU_CHIP_REMOTE)) {
        return "a packet is not from a chip there to a chip here";
    }
    if (frame->counter >= VTPU_NUM_LINK_COUNTERS ||
        frame->va % VTPU_PAGE_BYTES + frame->len > VTPU_PAGE_BYTES) {
        return "a packet has a field out of its range";
    }
    uint32_t reason = vtpu_fabric_deliver(fabric, &packet);
    if (reason == VTPU_LINK_BUSY) {
        *stall = true;
        return NULL;
    }
    wire->seq_expected++;
    Frame answer = { .type = FRAME_ANSWER, .seq = frame->seq, .arg = reason };
    pthread_mutex_lock(&wire->lock);
    bool ok = out_frame(wire, &answer);
    pthread_mutex_unlock(&wire->lock);
    vtpu_fabric_wake(fabric);
    return ok ? NULL : "the other side does not take its answers";
}

static const char *answer_in(VtpuFabric *fabric, const Frame *frame)
{
    VtpuWire *wire = fabric->wire;
    InFlight packet;

    pthread_mutex_lock(&wire->lock);
    bool ok = wire->seq_answered != wire->seq_sent && frame->seq == wire->seq_answered &&
              frame->arg <= VTPU_LINK_REASON_BUS;
    if (ok) {
        packet = wire->in_flight[frame->seq % IN_FLIGHT];
        wire->seq_answered++;
    }
    pthread_mutex_unlock(&wire->lock);
    if (!ok) {
        return "an answer is to no packet, or has no meaning";
    }
    answered(fabric, &packet, frame->arg);
    return NULL;
}

static const char *frame_in(VtpuFabric *fabric, const Frame *frame, bool *stall)
{
    if ((frame->type == FRAME_HELLO) == fabric->wire->greeted) {
        return "the stream does not begin with the link's greeting, or repeats it";
    }
    if (frame->len && frame->type != FRAME_PACKET) {
        return "a frame has a length that it must not have";
    }
    switch (frame->type) {
    case FRAME_HELLO:
        return hello(fabric, frame);
    case FRAME_STATE:
        return chip_state(fabric, frame);
    case FRAME_PACKET:
        return packet_in(fabric, frame, stall);
    case FRAME_ANSWER:
        return answer_in(fabric, frame);
    default:
        return "a frame has no known type";
    }
}

/* The first whole frame of `size` bytes. Zero bytes: not yet there; *error: none. */
static size_t parse(const uint8_t *at, size_t size, Frame *frame, const char **error)
{
    uint8_t header[HEADER];

    *error = NULL;
    if (size < HEADER) {
        return 0;
    }
    memcpy(header, at, HEADER);
    *frame = (Frame) {
        header[4], header[5], header[6], header[7], get32(header + 8), get32(header + 12),
        get32(header + 32), get64(header + 16), get64(header + 24), at + HEADER,
    };
    if (get32(header) != MAGIC || frame->len > VTPU_LINK_PACKET) {
        *error = "what comes is not the link's protocol";
        return 0;
    }
    if (size < HEADER + frame->len) {
        return 0;
    }
    put32(header + 36, 0);
    if (vtpu_crc32c(vtpu_crc32c(0, header, HEADER), frame->data, frame->len) != get32(at + 36)) {
        *error = "a frame has a wrong checksum";
        return 0;
    }
    return HEADER + frame->len;
}

size_t vtpu_fabric_input_room(VtpuFabric *fabric)
{
    const VtpuWire *wire = fabric->wire;

    return wire->stalled ? 0 : IN_BYTES - wire->in_count;
}

const char *vtpu_fabric_input(VtpuFabric *fabric, const void *data, size_t size)
{
    VtpuWire *wire = fabric->wire;
    const char *error = NULL;
    size_t done = 0;

    if (size > IN_BYTES - wire->in_count) {
        return "more input than there is room for";
    }
    if (size) {
        memcpy(wire->in + wire->in_count, data, size);
        wire->in_count += size;
    }
    wire->stalled = false;
    while (!wire->stalled) {
        Frame frame;
        size_t bytes = parse(wire->in + done, wire->in_count - done, &frame, &error);
        if (!bytes) {
            break;
        }
        error = frame_in(fabric, &frame, &wire->stalled);
        if (error) {
            break;
        }
        done += wire->stalled ? 0 : bytes;
    }
    wire->in_count -= done;
    memmove(wire->in, wire->in + done, wire->in_count);
    return error;
}

/* --- the connection --- */

void vtpu_fabric_connected(VtpuFabric *fabric)
{
    VtpuWire *wire = fabric->wire;
    Frame frame = {
        .type = FRAME_HELLO, .src = (uint8_t)fabric->x, .dst = (uint8_t)fabric->y, .arg = VERSION,
    };

    vtpu_fabric_disconnected(fabric);
    pthread_mutex_lock(&wire->lock);
    if (!wire->out) {
        wire->out = malloc(OUT_MOST); /* pages appear as they are used */
    }
    wire->connected = wire->out != NULL;
    wire->out_head = wire->out_count = 0;
    memset(wire->sent_state, 0, sizeof(wire->sent_state));
    memset(wire->sent_down, 0, sizeof(wire->sent_down));
    out_frame(wire, &frame);
    pthread_mutex_unlock(&wire->lock);
    wire->in_count = wire->seq_expected = 0;
    wire->stalled = false;
    vtpu_fabric_wake(fabric);
}

void vtpu_fabric_disconnected(VtpuFabric *fabric)
{
    VtpuWire *wire = fabric->wire;
    uint32_t chips = 0;

    pthread_mutex_lock(&fabric->lock);
    for (unsigned chip = 0; chip < fabric->chips; chip++) {
        uint64_t state = atomic_load(&fabric->state[chip]);
        if (state & VTPU_CHIP_REMOTE) {
            chips |= 1u << chip;
            atomic_store(&fabric->remote_down[chip], 0);
            state = (state >> VTPU_CHIP_GENERATION_SHIFT) + 1;
            atomic_store(&fabric->state[chip], state << VTPU_CHIP_GENERATION_SHIFT);
        }
    }
    pthread_mutex_unlock(&fabric->lock);
    pthread_mutex_lock(&wire->lock);
    wire->connected = wire->greeted = false;
    wire->out_count = 0;
    uint32_t first = wire->seq_answered, end = wire->seq_sent;
    wire->seq_answered = wire->seq_sent = 0;
    pthread_mutex_unlock(&wire->lock);
    /* Nobody sends now, so that the table stays as it is. */
    for (uint32_t seq = first; seq != end; seq++) {
        answered(fabric, &wire->in_flight[seq % IN_FLIGHT], VTPU_LINK_REASON_LOST);
    }
    vtpu_fabric_lost(fabric, chips);
}
