/* SPDX-License-Identifier: MIT */
/*
 * The race checker: finds two instructions that touch the same memory, one of
 * them writing, and that no rule of the instruction set orders. It judges every
 * legal order by the one that was run. docs/isa.md, "Races". Command thread only.
 */
#ifndef VTPU_RACES_H
#define VTPU_RACES_H

#include <stdbool.h>
#include <stdint.h>

#include "footprint.h"
#include "vtpu_isa.h"

/* ---- race_shadow.c: who touched which byte last ---- */

/* Of every byte the last write, and since then the last read of each engine: numbers of
 * steps, from 1; 0: none. */
typedef struct VtpuShadow VtpuShadow;

/* `step` of `engine` touches bytes that `other` has touched, one of them writing; true: go on. */
typedef bool VtpuConflictFn(void *arg, uint32_t other, bool other_writes, uint64_t addr,
                            uint64_t bytes);

VtpuShadow *vtpu_shadow_new(void); /* NULL: out of memory */
void vtpu_shadow_free(VtpuShadow *shadow);
void vtpu_shadow_clear(VtpuShadow *shadow);
/*
 * Steps come in an order in which causes precede effects. Tells fn of every
 * conflict with a step of another engine, then records the access. False: fn
 * said so, or *no_memory.
 */
bool vtpu_shadow_access(VtpuShadow *shadow, const VtpuAccess *access, uint32_t step,
                        unsigned engine, VtpuConflictFn *fn, void *arg, bool *no_memory);

/* ---- races.c: of one program; owned by its command ---- */

typedef struct VtpuRaces VtpuRaces;
struct VtpuExec;
struct VtpuIssued;

/* A program begins. Out of memory, it is not checked, and the log says so. */
void vtpu_races_begin(struct VtpuExec *x);
void vtpu_races_issue(struct VtpuExec *x, const struct VtpuIssued *i);
/* Executed; of the sequencer's own instructions the first that is heard. False: a race is
 * the command's fault now. */
bool vtpu_races_execute(struct VtpuExec *x, const struct VtpuIssued *i);
/* The command's program comes from elsewhere, already begun: unchecked until it is at a SYNC. */
void vtpu_races_resume(struct VtpuExec *x);
/* A program has stopped with a fault: a race is the better explanation. */
void vtpu_races_fault(struct VtpuExec *x);
void vtpu_races_free(VtpuRaces *races);

#endif
