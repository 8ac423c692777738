/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vTPU fabric: the cables that join the vTPUs of one machine and, through a
 * character device, those of another QEMU. The torus itself, its routes and the
 * protocol are in core/; here are properties and the stream.
 *
 * A device without a bus and not an -object: objects need an entry in QEMU's
 * QAPI schema, devices do not.
 *
 * Threads: the stream has an I/O thread of its own. Packets are written into
 * the memory of the devices here on it, without the BQL, whatever the vCPUs and
 * the main loop do. The BQL is held for properties and realize alone.
 */
#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "qemu/module.h"
#include "qapi/error.h"
#include "qapi/visitor.h"
#include "chardev/char.h"
#include "chardev/char-fe.h"
#include "hw/qdev-properties.h"
#include "hw/qdev-properties-system.h"
#include "migration/vmstate.h"
#include "system/iothread.h"
#include "system/runstate.h"

#include "include/vtpu_hw.h"
#include "trace.h"
#include "vtpu.h"

#define VTPU_FABRIC_OUT (64 * 1024)

struct VtpuFabricState {
    DeviceState parent_obj;

    VtpuFabric *fabric; /* NULL before realize */

    /* Of the stream; all but `changes` and `open` is the I/O thread's. */
    IOThread *iothread; /* NULL: no stream */
    QEMUBH *service;
    unsigned changes;   /* how often it opened or closed; atomic */
    bool open;          /* atomic */
    unsigned seen;      /* changes that the fabric has been told */
    uint8_t *out;
    size_t out_at, out_end;
    guint watch;        /* for room in the chardev; 0 none */
    Notifier shutdown;

    /* Properties */
    char *shape;
    CharBackend chr;
};

/* The stream, on the I/O thread */

static gboolean vtpu_fabric_writable(void *do_not_use, GIOCondition condition,
                                     void *opaque)
{
    VtpuFabricState *s = opaque;

    s->watch = 0;
    qemu_bh_schedule(s->service);
    return G_SOURCE_REMOVE;
}

static void vtpu_fabric_write(VtpuFabricState *s)
{
    while (!s->watch) {
        int n;

        if (s->out_at == s->out_end) {
            s->out_at = 0;
            s->out_end = vtpu_fabric_output(s->fabric, s->out,
                                            VTPU_FABRIC_OUT);
            if (s->out_end == 0) {
                return;
            }
        }
        n = qemu_chr_fe_write(&s->chr, s->out + s->out_at,
                              s->out_end - s->out_at);
        if (n > 0) {
            s->out_at += n;
        } else {
            s->watch = qemu_chr_fe_add_watch(&s->chr, G_IO_OUT | G_IO_HUP,
                                             vtpu_fabric_writable, s);
            if (!s->watch) {
                return; /* it closes: an event follows */
            }
        }
    }
}

static void vtpu_fabric_stop_watch(VtpuFabricState *s)
{
    if (s->watch) {
        GMainContext *context = iothread_get_g_main_context(s->iothread);
        GSource *source = g_main_context_find_source_by_id(context, s->watch);

        if (source) {
            g_source_destroy(source);
        }
        s->watch = 0;
    }
}

/* False: it opened or closed, and the fabric does not know yet. */
static bool vtpu_fabric_current(VtpuFabricState *s)
{
    return qatomic_load_acquire(&s->changes) == s->seen;
}

static void vtpu_fabric_take(VtpuFabricState *s, const void *data, size_t size)
{
    const char *error = vtpu_fabric_input(s->fabric, data, size);

    if (error) {
        trace_vtpu_fabric_broken(s, error);
        warn_report_once("vtpu-fabric: %s", error);
        qatomic_set(&s->open, false);
        vtpu_fabric_disconnected(s->fabric);
        qemu_chr_fe_disconnect(&s->chr);
    }
}

/* Whatever there may be to do. */
static void vtpu_fabric_service(void *opaque)
{
    VtpuFabricState *s = opaque;

    if (!vtpu_fabric_current(s)) {
        s->seen = qatomic_load_acquire(&s->changes);
        s->out_at = s->out_end = 0;
        vtpu_fabric_stop_watch(s);
        trace_vtpu_fabric_stream(s, qatomic_read(&s->open));
        if (qatomic_read(&s->open)) {
            vtpu_fabric_connected(s->fabric);
        } else {
            vtpu_fabric_disconnected(s->fabric);
        }
    }
    if (qatomic_read(&s->open)) {
        vtpu_fabric_take(s, NULL, 0);
        vtpu_fabric_write(s);
        qemu_chr_fe_accept_input(&s->chr);
    }
}

static int vtpu_fabric_can_read(void *opaque)
{
    VtpuFabricState *s = opaque;

    return vtpu_fabric_current(s) && qatomic_read(&s->open)
               ? vtpu_fabric_input_room(s->fabric) : 0;
}

static void vtpu_fabric_read(void *opaque, const uint8_t *buf, int size)
{
    VtpuFabricState *s = opaque;

    vtpu_fabric_take(s, buf, size);
    vtpu_fabric_write(s);
}

/* On the I/O thread, or in realize with the BQL when it is open by then. */
static void vtpu_fabric_event(void *opaque, QEMUChrEvent event)
{
    VtpuFabricState *s = opaque;

    if (event == CHR_EVENT_OPENED || event == CHR_EVENT_CLOSED) {
        qatomic_set(&s->open, event == CHR_EVENT_OPENED);
        qatomic_store_release(&s->changes, s->changes + 1);
        qemu_bh_schedule(s->service);
    }
}

/* Any thread, perhaps with locks of machines held. */
static void vtpu_fabric_wakeup(void *opaque)
{
    VtpuFabricState *s = opaque;

    qemu_bh_schedule(s->service);
}

/* The character devices go while devices stay: nothing is to use them then. */
static void vtpu_fabric_shutdown(Notifier *notifier, void *data)
{
    VtpuFabricState *s = container_of(notifier, VtpuFabricState, shutdown);

    iothread_stop(s->iothread);
}

static bool vtpu_fabric_start(VtpuFabricState *s, Error **errp)
{
    Chardev *chr = qemu_chr_fe_get_driver(&s->chr);
    g_autofree char *name = NULL;

    if (!qemu_chr_has_feature(chr, QEMU_CHAR_FEATURE_GCONTEXT)) {
        error_setg(errp, "vtpu-fabric: chardev '%s' cannot be served by a "
                   "thread: use a socket", chr->label);
        return false;
    }
    name = g_strdup_printf("vtpu-fabric-%s", chr->label);
    s->iothread = iothread_create(name, errp);
    if (!s->iothread) {
        return false;
    }
    s->out = g_malloc(VTPU_FABRIC_OUT);
    s->service = aio_bh_new(iothread_get_aio_context(s->iothread),
                            vtpu_fabric_service, s);
    vtpu_fabric_set_wake(s->fabric, vtpu_fabric_wakeup, s);
    s->shutdown.notify = vtpu_fabric_shutdown;
    qemu_register_shutdown_notifier(&s->shutdown);
    qemu_chr_fe_set_handlers(&s->chr, vtpu_fabric_can_read, vtpu_fabric_read,
                             vtpu_fabric_event, NULL, s,
                             iothread_get_g_main_context(s->iothread), true);
    return true;
}

/* Faults of cables, as properties chip<n>-<direction>-<fault> */

typedef struct VtpuCableProperty {
    uint8_t chip, direction;
    VtpuCableFault what;
} VtpuCableProperty;

static void vtpu_fabric_get_fault(Object *obj, Visitor *v, const char *name,
                                  void *opaque, Error **errp)
{
    const VtpuCableProperty *p = opaque;
    uint64_t value = vtpu_fabric_injected(VTPU_FABRIC(obj)->fabric, p->chip,
                                          p->direction, p->what);

    visit_type_uint64(v, name, &value, errp);
}

static void vtpu_fabric_set_fault(Object *obj, Visitor *v, const char *name,
                                  void *opaque, Error **errp)
{
    const VtpuCableProperty *p = opaque;
    uint64_t value;

    if (visit_type_uint64(v, name, &value, errp) &&
        !vtpu_fabric_inject(VTPU_FABRIC(obj)->fabric, p->chip, p->direction,
                            p->what, value)) {
        error_setg(errp, "vtpu-fabric: %s cannot be %" PRIu64 ": it is 0 to %"
                   PRIu64, name, value, vtpu_fabric_inject_most(p->what));
    }
}

static void vtpu_fabric_release_fault(Object *obj, const char *name,
                                      void *opaque)
{
    g_free(opaque);
}

static void vtpu_fabric_add_faults(VtpuFabricState *s)
{
    static const char *const directions[] = { "x+", "x-", "y+", "y-" };
    static const char *const faults[] = { "down", "corrupt", "slow" };

    for (unsigned c = 0; c < vtpu_fabric_chips(s->fabric); c++) {
        for (unsigned d = 0; d < VTPU_NUM_DIRECTIONS; d++) {
            if (vtpu_fabric_neighbour(s->fabric, c, d) < 0) {
                continue;
            }
            for (unsigned f = 0; f < VTPU_NUM_CABLE_FAULTS; f++) {
                VtpuCableProperty *p = g_new(VtpuCableProperty, 1);
                g_autofree char *name = g_strdup_printf("chip%u-%s-%s", c,
                                                        directions[d],
                                                        faults[f]);

                *p = (VtpuCableProperty) { c, d, f };
                object_property_add(OBJECT(s), name, "uint64",
                                    vtpu_fabric_get_fault,
                                    vtpu_fabric_set_fault,
                                    vtpu_fabric_release_fault, p);
            }
        }
    }
}

static char *vtpu_fabric_get_state(Object *obj, Error **errp)
{
    VtpuFabricState *s = VTPU_FABRIC(obj);
    char *text = g_malloc0(VTPU_FABRIC_DESCRIPTION_BYTES);

    if (s->fabric) {
        vtpu_fabric_describe(s->fabric, text, VTPU_FABRIC_DESCRIPTION_BYTES);
    }
    return text;
}

VtpuFabric *vtpu_fabric_of(VtpuFabricState *s)
{
    return s->fabric;
}

static void vtpu_fabric_realize(DeviceState *dev, Error **errp)
{
    VtpuFabricState *s = VTPU_FABRIC(dev);
    const char *error;

    if (!s->shape) {
        error_setg(errp, "vtpu-fabric: shape is required, as in shape=4x4");
        return;
    }
    s->fabric = vtpu_fabric_new(s->shape, &error);
    if (!s->fabric) {
        error_setg(errp, "vtpu-fabric: shape '%s': %s", s->shape, error);
        return;
    }
    if (qemu_chr_fe_backend_connected(&s->chr) && !vtpu_fabric_start(s, errp)) {
        vtpu_fabric_free(s->fabric);
        s->fabric = NULL;
        return;
    }
    vtpu_fabric_add_faults(s);
}

static const Property vtpu_fabric_properties[] = {
    DEFINE_PROP_STRING("shape", VtpuFabricState, shape),
    DEFINE_PROP_CHR("chardev", VtpuFabricState, chr),
};

static const VMStateDescription vtpu_fabric_vmstate = {
    .name = TYPE_VTPU_FABRIC,
    /* What another machine does meanwhile is no state of this one. */
    .unmigratable = 1,
};

static void vtpu_fabric_class_init(ObjectClass *class, void *data)
{
    DeviceClass *dc = DEVICE_CLASS(class);

    dc->realize = vtpu_fabric_realize;
    dc->desc = "Inter-chip links of vTPUs";
    dc->vmsd = &vtpu_fabric_vmstate;
    dc->hotpluggable = false;
    device_class_set_props(dc, vtpu_fabric_properties);
    set_bit(DEVICE_CATEGORY_MISC, dc->categories);
    object_class_property_add_str(class, "state", vtpu_fabric_get_state, NULL);
    object_class_property_set_description(class, "state",
        "chips and cables, a line each");
}

static const TypeInfo vtpu_fabric_info = {
    .name = TYPE_VTPU_FABRIC,
    .parent = TYPE_DEVICE,
    .instance_size = sizeof(VtpuFabricState),
    .class_init = vtpu_fabric_class_init,
};

static void vtpu_fabric_register_types(void)
{
    type_register_static(&vtpu_fabric_info);
}

type_init(vtpu_fabric_register_types)
