/* SPDX-License-Identifier: MIT */
/*
 * The inter-chip link inside the machine: what link.c (a chip's end), fabric.c
 * (cables and routes), fabric_wire.c (the stream to another process) and
 * engine_link.c (the instructions) share.
 *
 * Locks: VtpuCore.lock may be held when the atomics of a fabric are read or
 * written, and when its wake callback is called. VtpuFabric.lock and
 * VtpuWire.lock are held for a few instructions and never together with a
 * machine's, nor over a callback that reaches a machine.
 */
#ifndef VTPU_LINK_H
#define VTPU_LINK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "vtpu_core.h"
#include "vtpu_fabric.h"
#include "vtpu_hw.h"

/* Beside enum link_reason: no final answer. */
enum {
    VTPU_LINK_BUSY = 0x100, /* the receiver is parked or the window full: try again later */
    VTPU_LINK_SENT,         /* on its way to another process: vtpu_link_answered() follows */
};

typedef struct VtpuPacket {
    uint8_t src, dst;    /* chips */
    uint8_t counter;     /* link counter of dst that goes up once it is written; 0 none */
    uint32_t len;        /* up to VTPU_LINK_PACKET, inside one page */
    uint64_t va, add;
    const uint8_t *data;
} VtpuPacket;

/* A machine's end of the link. */
typedef struct VtpuLink {
    VtpuFabric *fabric; /* NULL: none */
    unsigned chip;
    pthread_cond_t received; /* `receiving` went off, or nothing is to be received any more */

    /* [lock] */
    bool enabled, fail_stop;
    bool receiving; /* a packet is being written, with the lock dropped */
    uint32_t context, accept, errors;
    uint32_t rx_reason;
    uint64_t rx_addr, rx_packets, rx_bytes, rx_refused;
    uint32_t sends; /* instructions begun so far */

    /* Written with the lock. */
    atomic_uint events; /* goes up when a counter or an instruction's `answered` does */
    atomic_int owner; /* context that may use the link, -1 none */
    _Atomic uint64_t counter[VTPU_NUM_LINK_COUNTERS];
} VtpuLink;

/* Whom an answer is for. */
typedef struct VtpuSender {
    uint32_t queue, id;
} VtpuSender;

/* The REMOTE_ instruction in progress of a program. [command] */
typedef struct VtpuLinkSend {
    bool begun;
    unsigned chip, counter;
    uint64_t add, dst, src, rows, row_bytes, dst_stride, src_stride;
    bool global;
    uint64_t row, at;  /* the next packet starts here */
    bool last_sent;
    uint32_t sent;     /* packets to another process */
    uint64_t ready_ns; /* nothing to do before */

    /* [lock]: which instruction it is, and how many of `sent` were answered */
    uint32_t id, answered, reason;
    uint64_t reason_va;
} VtpuLinkSend;

/* --- link.c; lock held unless stated otherwise --- */
struct VtpuExec;
void vtpu_link_init(VtpuCore *core, VtpuFabric *fabric, unsigned chip);
void vtpu_link_destroy(VtpuCore *core); /* lock not held; after vtpu_fabric_detach() */
/* A device reset begins, a queue died: nothing is accepted from now on. */
void vtpu_link_stop(VtpuCore *core);
void vtpu_link_queue_died(VtpuCore *core, uint32_t context);
void vtpu_link_reset(VtpuCore *core);
/* A packet is being written through the context's tables. */
bool vtpu_link_uses(const VtpuCore *core, unsigned context);
/* The size of the register that starts at an offset of the link's block, or 0. */
unsigned vtpu_link_reg_size(uint64_t offset);
uint64_t vtpu_link_reg_read(VtpuCore *core, uint64_t offset);
bool vtpu_link_reg_write(VtpuCore *core, uint64_t offset, uint64_t value); /* false: not allowed */
/* Lock not held. */
uint32_t vtpu_link_receive(VtpuCore *core, const VtpuPacket *packet);
void vtpu_link_answered(VtpuCore *core, VtpuSender sender, uint32_t reason, uint64_t va);
void vtpu_link_peers_lost(VtpuCore *core, uint32_t chips);

/* --- fabric.c --- */
const char *vtpu_fabric_check(const VtpuFabric *fabric, unsigned chip); /* error or NULL */
bool vtpu_fabric_attach(VtpuFabric *fabric, unsigned chip, VtpuCore *core);
/* Returns when nobody uses the core any more. */
void vtpu_fabric_detach(VtpuFabric *fabric, unsigned chip);
/* A chip's own state as the others see it. Any lock may be held. */
void vtpu_fabric_publish(VtpuFabric *fabric, unsigned chip, bool enabled, uint32_t accept);
/* What changes whenever a chip's link goes on or off. */
uint32_t vtpu_fabric_generation(const VtpuFabric *fabric, unsigned chip);
/* Cables from one chip to another when none is down. */
unsigned vtpu_fabric_distance(const VtpuFabric *fabric, unsigned from, unsigned to);
bool vtpu_fabric_enabled(const VtpuFabric *fabric, unsigned chip);
/* NO_CHIP, LOST, NO_ROUTE or NONE. */
uint32_t vtpu_fabric_route_reason(const VtpuFabric *fabric, unsigned from, unsigned to);
/* Also REFUSED: why `to` would not take a packet of `from`, or NONE. */
uint32_t vtpu_fabric_reachable(const VtpuFabric *fabric, unsigned from, unsigned to);
/* Enum link_reason, BUSY or SENT; *delay_ns: how long slow cables took. Locks not held. */
uint32_t vtpu_fabric_send(VtpuFabric *fabric, const VtpuPacket *packet, VtpuSender sender,
                          uint64_t *delay_ns);
bool vtpu_fabric_cable_up(const VtpuFabric *fabric, unsigned chip, unsigned direction);
uint64_t vtpu_fabric_statistic(const VtpuFabric *fabric, uint64_t reg, unsigned chip,
                               unsigned direction);
void vtpu_fabric_shape(const VtpuFabric *fabric, unsigned *x, unsigned *y);
void vtpu_fabric_wake(const VtpuFabric *fabric);

/* --- engine_link.c; command thread; the instructions are declared in machine.h --- */
void vtpu_link_begin(struct VtpuExec *x); /* a program */

#endif
