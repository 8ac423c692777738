/* SPDX-License-Identifier: MIT */
/*
 * The state of the machine as bytes: saved while it is parked, loaded into a
 * parked machine of any number of threads, vector path and schedule seed.
 *
 * A header, then parts in the order of the table below, each with its own
 * version and length. To add a field: visit it in its part's function behind a
 * test of the version, and raise the version in the table. To add a part: a
 * function and a row. tests/host/device/test_state.py holds the fields of
 * machine.h against what is written here.
 *
 * HBM is not in it: the caller has that. Nor is the link: what is under way
 * between chips is nobody's alone, and a linked machine is not saved. Translations are not in it either: the
 * tables they come from are in HBM.
 *
 * What is loaded comes from anywhere: each part checks its values as their
 * users would have on the way in. After an error the machine is as after a
 * reset.
 */
#include <stdlib.h>
#include <string.h>

#include "machine.h"
#include "state.h"

#define MAGIC 0x54535456u /* "VTST" */
#define FORMAT 1
#define BLOCK 4096 /* VMEM is saved in blocks that are not all zero */

/* Version 1 of the device, of its queues and of VMEM is of a device with 32 queues. */
static unsigned queues_of(uint32_t version)
{
    return version < 2 ? 32 : VTPU_NUM_QUEUES;
}

/* ---- the device ---- */

static void visit_device(VtpuCore *core, VtpuStream *s, uint32_t version)
{
    uint64_t time = vtpu_core_time(core);
    uint32_t turn = core->turn;
    int32_t next = core->sched.next;
    uint32_t errors = (uint32_t)core->err_queues, more_errors = (uint32_t)(core->err_queues >> 32);

    vtpu_stream_bool(s, &core->enabled);
    vtpu_stream_bool(s, &core->resetting);
    vtpu_stream_bool(s, &core->clear);
    vtpu_stream_bool(s, &core->asleep);
    VTPU_STREAM(s, core->reset_count);
    VTPU_STREAM(s, core->scratch);
    VTPU_STREAM(s, errors);
    if (version >= 2) {
        VTPU_STREAM(s, more_errors);
    }
    VTPU_STREAM(s, core->irqs);
    VTPU_STREAM(s, core->latch_offset);
    VTPU_STREAM(s, core->latch_high);
    VTPU_STREAM(s, turn);
    VTPU_STREAM(s, next);
    VTPU_STREAM(s, core->sched.slice_us);
    VTPU_STREAM(s, time);
    VTPU_STREAM(s, core->ctx_root);
    if (version >= 3) {
        vtpu_stream_bool(s, &core->engine_resetting);
    }
    if (!s->loading) {
        return;
    }
    if (vtpu_stream_check(s, turn < VTPU_NUM_QUEUES && next >= -1 && next < VTPU_NUM_QUEUES,
                          "no such queue") &&
        vtpu_stream_check(s, !(core->irqs >> VTPU_NUM_MSIX), "there is no such interrupt")) {
        core->turn = turn;
        core->err_queues = errors | (uint64_t)more_errors << 32;
        core->sched.next = next;
        vtpu_core_set_time(core, time);
        memcpy(core->root, core->ctx_root, sizeof(core->root));
    }
}

static void visit_sensors(VtpuCore *core, VtpuStream *s)
{
    VtpuSensors *sensors = &core->sensors;

    if (!s->loading) {
        vtpu_sensors_update(core);
    }
    VTPU_STREAM(s, sensors->energy_nj);
    VTPU_STREAM(s, sensors->power_uw);
    VTPU_STREAM(s, sensors->temperature_uc);
    if (s->loading) {
        vtpu_stream_check(s, vtpu_sensors_resume(core), "impossible values of the sensors");
    }
}

static void visit_counters(VtpuCore *core, VtpuStream *s, uint32_t version)
{
    _Atomic uint64_t *const counters[] = {
        &core->stat_programs, &core->stat_busy_ns, &core->stat_hbm_bytes,
        &core->stat_ecc_corrected,
    };

    for (unsigned i = 0; i < sizeof(counters) / sizeof(*counters) + VTPU_NUM_ENGINES; i++) {
        _Atomic uint64_t *counter = i < VTPU_NUM_ENGINES ? &core->stat_engine[i]
                                                         : counters[i - VTPU_NUM_ENGINES];
        uint64_t value = atomic_load(counter);
        VTPU_STREAM(s, value);
        atomic_store(counter, value);
    }
    if (version >= 2) {
        visit_sensors(core, s);
    }
}

static void visit_injections(VtpuCore *core, VtpuStream *s, uint32_t version)
{
    unsigned known = version < 2   ? VTPU_INJECT_STUCK
                     : version < 3 ? VTPU_INJECT_TEMPERATURE
                                   : VTPU_NUM_INJECTIONS;

    for (unsigned i = 0; i < known; i++) {
        uint64_t value = core->inject[i];
        VTPU_STREAM(s, value);
        if (s->loading && !s->error) {
            vtpu_stream_check(s, vtpu_inject_restore(core, i, value), "not a value of that fault");
        }
    }
}

/* ---- queues ---- */

static void visit_fault(VtpuStream *s, VtpuFault *fault)
{
    VTPU_STREAM(s, fault->cause);
    VTPU_STREAM(s, fault->access);
    VTPU_STREAM(s, fault->addr);
    VTPU_STREAM(s, fault->pc);
    VTPU_STREAM(s, fault->other_pc);
}

/* What is booked to a queue. */
static void visit_account(VtpuStream *s, VtpuExec *x)
{
    uint64_t instructions = atomic_load(&x->instructions);

    VTPU_STREAM(s, x->ran_ns);
    VTPU_STREAM(s, x->busy_ns);
    VTPU_STREAM(s, x->preemptions);
    VTPU_STREAM(s, instructions);
    atomic_store(&x->instructions, instructions);
}

static void visit_queue(VtpuStream *s, VtpuQueue *queue)
{
    VTPU_STREAM(s, queue->ring_base);
    VTPU_STREAM(s, queue->fence_addr);
    VTPU_STREAM(s, queue->ring_log2);
    VTPU_STREAM(s, queue->context);
    VTPU_STREAM(s, queue->vector);
    VTPU_STREAM(s, queue->priority);
    VTPU_STREAM(s, queue->state);
    VTPU_STREAM(s, queue->head);
    VTPU_STREAM(s, queue->tail);
    vtpu_stream_bool(s, &queue->bad_doorbell);
    visit_fault(s, &queue->fault);
    VTPU_STREAM(s, queue->fault_entry);
    vtpu_stream_bool(s, &queue->holding);
    VTPU_STREAM(s, queue->poll_interval);
    VTPU_STREAM(s, queue->watchdog_us);
    VTPU_STREAM(s, queue->vtime);
}

static void visit_queues(VtpuCore *core, VtpuStream *s, uint32_t version)
{
    for (unsigned q = 0; q < queues_of(version); q++) {
        VtpuQueue *queue = &core->queue[q];
        visit_queue(s, queue);
        visit_account(s, &core->exec[q]);
        if (!vtpu_stream_check(s, vtpu_queue_is_legal(queue), "a queue in an impossible state")) {
            return;
        }
    }
}

/* ---- VMEM ---- */

static bool is_zero(const uint8_t *bytes, size_t size)
{
    return bytes[0] == 0 && !memcmp(bytes, bytes + 1, size - 1);
}

static uint64_t block_at(const VtpuVmem *vmem, uint64_t at)
{
    return vmem->used - at < BLOCK ? vmem->used - at : BLOCK;
}

/* Runs of blocks that are not zero, each after its place and length; length 0 is the end. */
static void visit_contents(VtpuStream *s, VtpuVmem *vmem)
{
    uint64_t at = 0, n;

    do {
        n = 0;
        if (!s->loading) {
            while (at < vmem->used && is_zero(vmem->data + at, block_at(vmem, at))) {
                at += block_at(vmem, at);
            }
            while (at + n < vmem->used &&
                   !is_zero(vmem->data + at + n, block_at(vmem, at + n))) {
                n += block_at(vmem, at + n);
            }
        }
        VTPU_STREAM(s, at);
        VTPU_STREAM(s, n);
        if (!vtpu_stream_check(s, at <= vmem->used && n <= vmem->used - at,
                               "data outside of VMEM")) {
            return;
        }
        vtpu_stream_bytes(s, vmem->data + at, n);
        at += n;
    } while (n && !s->error);
}

static void visit_vmem(VtpuCore *core, VtpuStream *s, uint32_t version)
{
    for (unsigned i = 0; i < queues_of(version); i++) {
        VtpuVmem *vmem = &core->vmem[i];
        /* What nobody owns is cleared before anybody gets it. */
        bool saved = vmem->data && (vmem->taken || vmem->owner >= 0);
        int32_t owner = saved ? vmem->owner : -1;

        vtpu_stream_bool(s, &saved);
        if (!saved) {
            continue;
        }
        uint64_t used = vmem->used;
        VTPU_STREAM(s, owner);
        VTPU_STREAM(s, used);
        if (!vtpu_stream_check(s, owner >= -1 && owner < VTPU_NUM_CONTEXTS &&
                                  used <= VTPU_VMEM_BYTES, "an impossible VMEM image") ||
            !vtpu_stream_check(s, !s->loading || vtpu_vmem_clear(vmem), "out of memory")) {
            return;
        }
        vmem->owner = owner;
        vmem->used = used;
        visit_contents(s, vmem);
    }
}

/* ---- commands in progress ---- */

static void visit_engine(VtpuStream *s, VtpuEngine *e)
{
    uint32_t count = e->count;

    VTPU_STREAM(s, count);
    if (!vtpu_stream_check(s, count <= VTPU_ENGINE_DEPTH, "more instructions than an engine holds")) {
        return;
    }
    e->count = count;
    e->head = s->loading ? 0 : e->head;
    for (unsigned n = 0; n < count; n++) {
        VtpuIssued *i = &e->queue[(e->head + n) % VTPU_ENGINE_DEPTH];
        VTPU_STREAM(s, i->v);
        VTPU_STREAM(s, i->order);
        VTPU_STREAM(s, i->pc);
        VTPU_STREAM(s, i->wait_value);
    }
}

static void visit_code(VtpuCore *core, VtpuStream *s, VtpuExec *x)
{
    uint32_t size = x->program ? x->program->size : 0;

    VTPU_STREAM(s, size);
    if (!s->loading) {
        vtpu_stream_bytes(s, x->program->bytes, size);
        return;
    }
    /* Decoded anew: a program is no more trusted than when it was fetched. */
    if (vtpu_stream_check(s, size && size <= VTPU_MAX_CODE_BYTES && size % VTPU_INSTR_BYTES == 0 &&
                             size <= s->end - s->at, "a program of an impossible size")) {
        x->program = vtpu_program_get(core, s->bytes + s->at, size);
        s->at += size;
        vtpu_stream_check(s, x->program != NULL, "out of memory");
    }
}

static void visit_program(VtpuCore *core, VtpuStream *s, VtpuExec *x)
{
    uint32_t image = x->vmem ? (uint32_t)(x->vmem - core->vmem) : 0;
    uint32_t last_pc = atomic_load(&x->last_pc);

    visit_code(core, s, x);
    VTPU_STREAM(s, image);
    VTPU_STREAM(s, x->s);
    VTPU_STREAM(s, x->counter);
    VTPU_STREAM(s, x->pc);
    VTPU_STREAM(s, last_pc);
    VTPU_STREAM(s, x->order);
    VTPU_STREAM(s, x->random);
    vtpu_stream_bool(s, &x->hung);
    for (unsigned e = VTPU_ENGINE_DMA; e < VTPU_NUM_ENGINES; e++) {
        visit_engine(s, &x->engine[e]);
    }
    if (!s->loading || s->error) {
        return;
    }
    if (vtpu_stream_check(s, image < VTPU_NUM_QUEUES && core->vmem[image].data &&
                             !core->vmem[image].taken, "a program without VMEM of its own") &&
        vtpu_stream_check(s, vtpu_seq_restore(x), "an instruction that cannot have been issued")) {
        x->vmem = &core->vmem[image];
        x->vmem->taken = true;
        atomic_store(&x->last_pc, last_pc);
    }
}

static void visit_commands(VtpuCore *core, VtpuStream *s, uint32_t version)
{
    (void)version;
    for (unsigned q = 0; q < VTPU_NUM_QUEUES; q++) {
        VtpuExec *x = &core->exec[q];
        const VtpuQueue *queue = &core->queue[q];
        bool program = x->program != NULL;

        if (!vtpu_queue_in_progress(queue)) {
            continue;
        }
        x->context = queue->context;
        vtpu_stream_bytes(s, x->entry, sizeof(x->entry));
        VTPU_STREAM(s, x->done);
        vtpu_stream_bool(s, &program);
        if (!vtpu_stream_check(s, !program || x->entry[VTPU_RING_OP] == VTPU_CMD_RUN,
                               "a program of another command")) {
            return;
        }
        if (program) {
            visit_program(core, s, x);
            if (s->loading) {
                vtpu_races_resume(x);
            }
        }
    }
}

/* ---- the whole ---- */

static const struct {
    uint32_t id, version;
    VtpuStatePart *visit;
} parts[] = {
    { 0x49564544, 3, visit_device },     /* DEVI */
    { 0x53544154, 2, visit_counters },   /* TATS */
    { 0x53544c46, 3, visit_injections }, /* FLTS */
    { 0x55455551, 2, visit_queues },     /* QUEU */
    { 0x4d454d56, 2, visit_vmem },       /* VMEM */
    { 0x4d4d4f43, 1, visit_commands },   /* COMM */
    { 0x494d4954, 1, vtpu_state_visit_timing }, /* TIMI: after the commands */
};
#define NUM_PARTS (sizeof(parts) / sizeof(*parts))

static void visit_header(VtpuCore *core, VtpuStream *s)
{
    uint32_t magic = MAGIC, format = FORMAT, hardware = VTPU_HW_VERSION, isa = VTPU_ISA_VERSION;
    uint64_t hbm_bytes = core->hbm_bytes;

    VTPU_STREAM(s, magic);
    VTPU_STREAM(s, format);
    VTPU_STREAM(s, hardware);
    VTPU_STREAM(s, isa);
    VTPU_STREAM(s, hbm_bytes);
    vtpu_stream_check(s, magic == MAGIC, "not the state of a vTPU");
    vtpu_stream_check(s, format == FORMAT, "of a format that this device does not know");
    vtpu_stream_check(s, hardware == VTPU_HW_VERSION && isa == VTPU_ISA_VERSION,
                      "of another version of the hardware");
    vtpu_stream_check(s, hbm_bytes == core->hbm_bytes, "hbm-size differs");
}

static void visit_part(VtpuCore *core, VtpuStream *s, unsigned p)
{
    uint32_t id = parts[p].id, version = parts[p].version;
    size_t length_at, all = s->end;
    uint64_t length = 0;

    VTPU_STREAM(s, id);
    VTPU_STREAM(s, version);
    length_at = s->at;
    VTPU_STREAM(s, length);
    if (!vtpu_stream_check(s, id == parts[p].id, "a part is missing or unknown") ||
        !vtpu_stream_check(s, version >= 1 && version <= parts[p].version,
                           "a part is newer than this device") ||
        !vtpu_stream_check(s, length <= s->end - s->at, "it ends early")) {
        return;
    }
    size_t begin = s->at;
    if (s->loading) {
        s->end = begin + length;
    }
    parts[p].visit(core, s, version);
    if (s->loading) {
        vtpu_stream_check(s, s->at == s->end, "a part is longer than what it holds");
        s->end = all;
    } else if (!s->error) {
        length = s->at - begin;
        memcpy(s->bytes + length_at, &length, sizeof(length));
    }
}

static void visit_all(VtpuCore *core, VtpuStream *s)
{
    visit_header(core, s);
    for (unsigned p = 0; p < NUM_PARTS && !s->error; p++) {
        visit_part(core, s, p);
    }
    vtpu_stream_check(s, s->at == s->end, "something follows its end");
}

uint8_t *vtpu_core_save(VtpuCore *core, size_t *size)
{
    VtpuStream s = { 0 };

    pthread_mutex_lock(&core->lock);
    if (!vtpu_core_is_parked(core) || core->link.fabric) {
        s.error = "not parked, or linked to others";
    } else {
        visit_all(core, &s);
    }
    pthread_mutex_unlock(&core->lock);
    if (s.error) {
        free(s.bytes);
        return NULL;
    }
    *size = s.at;
    return s.bytes;
}

bool vtpu_core_load(VtpuCore *core, const uint8_t *bytes, size_t size, const char **error)
{
    /* Not written to: a stream that is loaded only reads its bytes. */
    VtpuStream s = { .loading = true, .bytes = (uint8_t *)bytes, .end = size };
    uint64_t inject[VTPU_NUM_INJECTIONS];

    pthread_mutex_lock(&core->lock);
    if (vtpu_core_is_parked(core) && !core->link.fabric) {
        vtpu_core_finish_reset(core);
        memcpy(inject, core->inject, sizeof(inject));
        visit_all(core, &s);
        if (s.error) {
            vtpu_core_finish_reset(core);
            for (unsigned i = 0; i < VTPU_NUM_INJECTIONS; i++) { /* which a reset leaves */
                vtpu_inject_restore(core, i, inject[i]);
            }
        }
        atomic_store(&core->attention, 1);
    } else {
        s.error = "not parked, or linked to others";
    }
    pthread_mutex_unlock(&core->lock);
    *error = s.error;
    return s.error == NULL;
}
