/* SPDX-License-Identifier: MIT */
/* Makes and mutates instructions that are mostly legal, from the table in vtpu_isa.h. */
#ifndef VTPU_FUZZ_ENCODE_H
#define VTPU_FUZZ_ENCODE_H

#include "vtpu_isa.h"

/* What the operands of a target's programs may name. */
typedef struct EncodeSpace {
    const uint64_t *global; /* addresses of interest, below 2^32 or by register */
    unsigned num_global;
    const uint32_t *vmem;
    unsigned num_vmem, first_result; /* results prefer those from first_result on */
    uint32_t code_bytes; /* for jumps */
} EncodeSpace;

void encode_instruction(struct vtpu_instr *in, const EncodeSpace *space, uint64_t *random);
/* Changes one field. */
void encode_mutate(struct vtpu_instr *in, const EncodeSpace *space, uint64_t *random);

#endif
