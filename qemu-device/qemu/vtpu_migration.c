/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vTPU, PCIe endpoint: stop, continue, snapshot, migration.
 *
 * The machine is at rest while the VM does not run, so what is saved then is
 * between two instructions. HBM travels as RAM; the rest of the machine is one
 * buffer that the core writes and checks.
 */
#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "hw/pci/msix.h"
#include "hw/pci/pcie.h"
#include "migration/qemu-file-types.h"
#include "migration/vmstate.h"
#include "system/runstate.h"

#include "vtpu.h"

/* Bytes of a stream that are believed before more of it has come. */
#define VTPU_LOAD_CHUNK (1u << 20)

static void vtpu_vm_state_change(void *opaque, bool running, RunState state)
{
    VtpuState *s = opaque;

    if (running) {
        vtpu_unpark(s);
    } else {
        vtpu_park(s);
    }
}

void vtpu_migration_init(VtpuState *s)
{
    /* A VM that waits to be started, or for what is to be loaded. */
    if (!runstate_is_running()) {
        vtpu_park(s);
    }
    s->vm_state_change = qdev_add_vm_change_state_handler(
        DEVICE(s), vtpu_vm_state_change, s);
}

void vtpu_migration_exit(VtpuState *s)
{
    qemu_del_vm_change_state_handler(s->vm_state_change);
}

static int vtpu_put_machine(QEMUFile *f, void *pv, size_t size,
                            const VMStateField *field, JSONWriter *vmdesc)
{
    VtpuState *s = container_of(pv, VtpuState, core);
    size_t bytes;
    void *state = vtpu_core_save(s->core, &bytes);

    if (!state) {
        error_report("vtpu: no memory for the machine's state");
        return -ENOMEM;
    }
    qemu_put_be64(f, bytes);
    qemu_put_buffer(f, state, bytes);
    free(state);
    return 0;
}

/* The stream is not trusted: memory is taken as data comes. */
static uint8_t *vtpu_read_state(QEMUFile *f, uint64_t bytes)
{
    uint8_t *state = NULL;

    for (uint64_t have = 0, n; have < bytes; have += n) {
        n = MIN(bytes - have, VTPU_LOAD_CHUNK);
        uint8_t *more = g_try_realloc(state, have + n);
        if (more) {
            state = more;
        }
        if (!more || qemu_get_buffer(f, state + have, n) != n) {
            g_free(state);
            return NULL;
        }
    }
    return state;
}

static int vtpu_get_machine(QEMUFile *f, void *pv, size_t size,
                            const VMStateField *field)
{
    VtpuState *s = container_of(pv, VtpuState, core);
    uint64_t bytes = qemu_get_be64(f);
    g_autofree uint8_t *state = NULL;
    const char *error;

    if (bytes > VTPU_STATE_BYTES_MAX) {
        error_report("vtpu: the machine's state cannot be %" PRIu64 " bytes",
                     bytes);
        return -EINVAL;
    }
    state = vtpu_read_state(f, bytes);
    if (!state) {
        error_report("vtpu: the machine's state ends early");
        return -EINVAL;
    }
    if (!vtpu_core_load(s->core, state, bytes, &error)) {
        error_report("vtpu: cannot load the machine's state: %s", error);
        return -EINVAL;
    }
    vtpu_set_dead(s, vtpu_core_injected(s->core, VTPU_INJECT_DEAD));
    return 0;
}

static const VMStateInfo vtpu_vmstate_machine = {
    .name = "vtpu machine",
    .get = vtpu_get_machine,
    .put = vtpu_put_machine,
};

const VMStateDescription vtpu_vmstate = {
    .name = TYPE_VTPU,
    .version_id = 1,
    .minimum_version_id = 1,
    .fields = (const VMStateField[]) {
        VMSTATE_PCI_DEVICE(parent_obj, VtpuState),
        VMSTATE_MSIX(parent_obj, VtpuState),
        VMSTATE_STRUCT(parent_obj.exp.aer_log, VtpuState, 0,
                       vmstate_pcie_aer_log, PCIEAERLog),
        VMSTATE_SINGLE(core, VtpuState, 0, vtpu_vmstate_machine, VtpuCore *),
        VMSTATE_END_OF_LIST()
    },
};
