/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vTPU, PCIe endpoint: the machine's events as QEMU's trace events.
 */
#include "qemu/osdep.h"

#include "include/vtpu_isa.h"
#include "trace.h"
#include "vtpu.h"

static void vtpu_trace_instruction(VtpuState *s, unsigned queue,
                                   uint64_t opcode, uint64_t pc)
{
    const struct vtpu_op_info *op = &vtpu_op_table[opcode];

    switch (op->engine) {
    case VTPU_ENGINE_SEQ:
        trace_vtpu_instruction_seq(s, queue, pc, op->name);
        break;
    case VTPU_ENGINE_DMA:
        trace_vtpu_instruction_dma(s, queue, pc, op->name);
        break;
    case VTPU_ENGINE_MXU:
        trace_vtpu_instruction_mxu(s, queue, pc, op->name);
        break;
    case VTPU_ENGINE_LINK:
        trace_vtpu_instruction_link(s, queue, pc, op->name);
        break;
    default:
        trace_vtpu_instruction_vpu(s, queue, pc, op->name);
        break;
    }
}

bool vtpu_trace_instructions(void *opaque)
{
    return trace_event_get_state(TRACE_VTPU_INSTRUCTION_SEQ) ||
           trace_event_get_state(TRACE_VTPU_INSTRUCTION_DMA) ||
           trace_event_get_state(TRACE_VTPU_INSTRUCTION_MXU) ||
           trace_event_get_state(TRACE_VTPU_INSTRUCTION_LINK) ||
           trace_event_get_state(TRACE_VTPU_INSTRUCTION_VPU);
}

void vtpu_trace(void *opaque, VtpuCoreEvent event, unsigned queue,
                uint64_t a, uint64_t b)
{
    switch (event) {
    case VTPU_EVENT_BEGIN:
        trace_vtpu_command_begin(opaque, queue, a, b);
        break;
    case VTPU_EVENT_END:
        trace_vtpu_command_end(opaque, queue, a, b);
        break;
    case VTPU_EVENT_FAULT:
        trace_vtpu_fault(opaque, queue, a, b);
        break;
    case VTPU_EVENT_DOORBELL:
        trace_vtpu_doorbell(opaque, queue, a);
        break;
    case VTPU_EVENT_INSTRUCTION:
        vtpu_trace_instruction(opaque, queue, a, b);
        break;
    case VTPU_EVENT_PREEMPTED:
        trace_vtpu_command_preempted(opaque, queue, a, b);
        break;
    case VTPU_EVENT_RESUMED:
        trace_vtpu_command_resumed(opaque, queue, a, b);
        break;
    case VTPU_EVENT_INJECTED:
        trace_vtpu_injected(opaque, queue, a, b);
        break;
    case VTPU_EVENT_TIMED:
        trace_vtpu_timed(opaque, queue, a, b);
        break;
    case VTPU_EVENT_RACE:
        trace_vtpu_race(opaque, queue, a, b);
        break;
    }
}
