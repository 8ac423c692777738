/* SPDX-License-Identifier: MIT */
/*
 * The fabric: the torus of cables that joins the machines of one process, and
 * through a byte stream those of another one. A machine takes part by
 * VtpuCoreConfig.fabric and .chip; everything else here is for whoever builds
 * the fabric: QEMU's glue, tests.
 *
 * Chip c of a torus of X by Y lies at (c % X, c / X) and has a cable in each of
 * four directions; a ring is a torus with Y = 1. A packet goes along x first,
 * then along y, the shorter way round unless a cable of it is down and the
 * other way is up (see route() in fabric.c).
 *
 * Threads: every function may be called from any thread, with the exceptions
 * that are named, and returns without waiting for a program.
 */
#ifndef VTPU_FABRIC_H
#define VTPU_FABRIC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct VtpuFabric VtpuFabric;

enum { VTPU_DIRECTION_XP, VTPU_DIRECTION_XM, VTPU_DIRECTION_YP, VTPU_DIRECTION_YM,
       VTPU_NUM_DIRECTIONS };

/* Faults of a cable on demand, by the chip and the direction at one end. */
typedef enum VtpuCableFault {
    VTPU_CABLE_DOWN,    /* 1: carries nothing, in neither direction */
    VTPU_CABLE_CORRUPT, /* how many transmissions from this end to corrupt */
    VTPU_CABLE_SLOW,    /* nanoseconds a packet from this end takes more, up to 10^9 */
    VTPU_NUM_CABLE_FAULTS
} VtpuCableFault;

/* shape: "X" or "XxY", 1 to 16 chips. NULL with *error (static string). */
VtpuFabric *vtpu_fabric_new(const char *shape, const char **error);
/* No machine is attached any more, and no other call is in progress. */
void vtpu_fabric_free(VtpuFabric *fabric);
unsigned vtpu_fabric_chips(const VtpuFabric *fabric);
/* The chip at the other end of a cable, or -1: a dimension of 1 has none. */
int vtpu_fabric_neighbour(const VtpuFabric *fabric, unsigned chip, unsigned direction);
/* False: no such cable, or a value above the most of that fault. */
uint64_t vtpu_fabric_inject_most(VtpuCableFault what);
bool vtpu_fabric_inject(VtpuFabric *fabric, unsigned chip, unsigned direction,
                        VtpuCableFault what, uint64_t value);
uint64_t vtpu_fabric_injected(const VtpuFabric *fabric, unsigned chip, unsigned direction,
                              VtpuCableFault what);
/* Chips and cables as lines of text, cut to size - 1 characters. */
#define VTPU_FABRIC_DESCRIPTION_BYTES 8192 /* always enough */
void vtpu_fabric_describe(const VtpuFabric *fabric, char *text, size_t size);

/*
 * Chips in another process. The surroundings own a byte stream to a fabric of
 * the same shape there; what goes over it is defined in fabric_wire.c. Either
 * side announces its chips, so that nothing is configured but the stream.
 */

/*
 * There may be output to take, or stalled input may go on: soon, on another
 * thread, call the functions below. Called from any thread, perhaps with locks
 * of machines held: it does no more than schedule that.
 */
typedef void (*VtpuFabricWake)(void *opaque);

/* Before any machine is attached. */
void vtpu_fabric_set_wake(VtpuFabric *fabric, VtpuFabricWake wake, void *opaque);
/* The following four from one thread, which may hold no lock that a callback of a machine takes. */
void vtpu_fabric_connected(VtpuFabric *fabric);
/* What was in flight ends as LOST, and so does every wait for a chip there. */
void vtpu_fabric_disconnected(VtpuFabric *fabric);
/* Bytes that vtpu_fabric_input() takes at present. */
size_t vtpu_fabric_input_room(VtpuFabric *fabric);
/*
 * Bytes of the stream, at most as many as there is room for; zero of them
 * makes stalled input go on. NULL, or what is wrong with the stream (static
 * string): nothing of it can be used any more, disconnect.
 */
const char *vtpu_fabric_input(VtpuFabric *fabric, const void *data, size_t size);
/* Takes up to `size` bytes that are to be sent; returns how many. */
size_t vtpu_fabric_output(VtpuFabric *fabric, void *data, size_t size);

#endif
