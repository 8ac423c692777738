/* SPDX-License-Identifier: MIT */
/*
 * Every modelled instruction as a complete event of Chrome's trace format (JSON
 * array; Perfetto reads it too): process = queue, thread = engine. Programs
 * follow one another in model time.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "machine.h"

bool vtpu_timing_trace_open(VtpuCore *core, const char *file, const char **error)
{
    static const char *const engines[] = VTPU_ENGINE_NAMES;
    static _Thread_local char message[256];

    core->timing_trace = fopen(file, "w");
    if (!core->timing_trace) {
        snprintf(message, sizeof(message), "timing-trace %.160s: %s", file, strerror(errno));
        *error = message;
        return false;
    }
    fputs("[\n{}", core->timing_trace);
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        for (unsigned e = 0; e < VTPU_NUM_ENGINES; e++) {
            fprintf(core->timing_trace,
                    ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%u,\"tid\":%u,"
                    "\"args\":{\"name\":\"%s\"}}", q, e, engines[e]);
        }
    }
    return true;
}

void vtpu_timing_trace_close(VtpuCore *core)
{
    if (core->timing_trace) {
        fputs("\n]\n", core->timing_trace);
        fclose(core->timing_trace);
        core->timing_trace = NULL;
    }
}

void vtpu_timing_trace(VtpuExec *x, const struct vtpu_profile_record *r)
{
    uint64_t base = x->timing.trace_base;
    double mhz = x->core->timing.clock_mhz;

    fprintf(x->core->timing_trace,
            ",\n{\"ph\":\"X\",\"name\":\"%s\",\"pid\":%u,\"tid\":%u,\"ts\":%.4f,\"dur\":%.4f,"
            "\"args\":{\"pc\":\"0x%x\",\"cycles\":%" PRIu64 ",\"stall\":%" PRIu64
            ",\"hbm_stall\":%" PRIu64 ",\"hbm_read\":%" PRIu64 ",\"hbm_written\":%" PRIu64
            ",\"vmem_bytes\":%" PRIu64 ",\"ops\":%" PRIu64 "}}",
            vtpu_op_table[r->opcode].name, x->queue, r->engine, (double)(base + r->start) / mhz,
            (double)(r->end - r->start) / mhz, r->pc, r->end - r->start, r->stall, r->hbm_stall,
            r->hbm_read, r->hbm_written, r->vmem_bytes, r->ops);
}
