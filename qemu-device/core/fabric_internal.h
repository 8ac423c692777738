/* SPDX-License-Identifier: MIT */
/* The fabric's inside, shared by fabric.c and fabric_wire.c. */
#ifndef VTPU_FABRIC_INTERNAL_H
#define VTPU_FABRIC_INTERNAL_H

#include "link.h"

/*
 * What all chips may know of one: a single word, so that it is always read
 * whole. The generation changes whenever the link there goes on or off.
 */
#define VTPU_CHIP_PRESENT 1u
#define VTPU_CHIP_ENABLED 2u
#define VTPU_CHIP_REMOTE 4u /* in the process at the other end of the stream */
#define VTPU_CHIP_ACCEPT_SHIFT 16
#define VTPU_CHIP_GENERATION_SHIFT 32

typedef struct VtpuCable { /* from one chip in one direction */
    _Atomic uint64_t fault[VTPU_NUM_CABLE_FAULTS];
    _Atomic uint64_t packets, bytes, crc_errors;
} VtpuCable;

typedef struct VtpuWire VtpuWire;

struct VtpuFabric {
    unsigned x, y, chips;
    _Atomic uint64_t state[VTPU_MAX_CHIPS];
    VtpuCable cable[VTPU_MAX_CHIPS][VTPU_NUM_DIRECTIONS];
    /* What the other process says of its chips: bit d, the cable there is down. */
    _Atomic uint32_t remote_down[VTPU_MAX_CHIPS];

    pthread_mutex_t lock;
    pthread_cond_t released; /* some users[] fell to zero */
    /* [lock] */
    VtpuCore *core[VTPU_MAX_CHIPS]; /* of this process */
    unsigned users[VTPU_MAX_CHIPS]; /* threads inside that core */

    VtpuWire *wire;
    VtpuFabricWake wake;
    void *wake_opaque;
};

/* Keeps a core alive between the two; NULL: none there. */
VtpuCore *vtpu_fabric_use(VtpuFabric *fabric, unsigned chip);
void vtpu_fabric_release(VtpuFabric *fabric, unsigned chip);
/* Tells the cores of this process that chips went away. */
void vtpu_fabric_lost(VtpuFabric *fabric, uint32_t chips);
/* The way of a packet from another process over the cables here, and into its chip. */
uint32_t vtpu_fabric_deliver(VtpuFabric *fabric, const VtpuPacket *packet);
/* Bit d: the cable in direction d is down by an injection of this process. */
uint32_t vtpu_fabric_down(const VtpuFabric *fabric, unsigned chip);

VtpuWire *vtpu_wire_new(void);
void vtpu_wire_free(VtpuWire *wire);
uint32_t vtpu_wire_send(VtpuFabric *fabric, const VtpuPacket *packet, VtpuSender sender);

#endif
