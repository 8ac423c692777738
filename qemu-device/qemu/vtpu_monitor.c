/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vTPU, PCIe endpoint: what the monitor can see of a running device and do to
 * it, as properties (qom-get and qom-set, in QMP and HMP) and as "info vtpu".
 */
#include "qemu/osdep.h"
#include "monitor/monitor.h"
#include "qapi/error.h"
#include "qapi/type-helpers.h"
#include "qapi/visitor.h"
#include "qemu/module.h"
#include "qemu/units.h"

#include "vtpu.h"

typedef struct VtpuInjectionProperty {
    const char *name;
    VtpuInjection what;
    bool flag; /* a bool, else a uint64 */
    const char *description;
} VtpuInjectionProperty;

static const VtpuInjectionProperty vtpu_injections[] = {
    { "inject-hang", VTPU_INJECT_HANG, true,
      "the next program never ends, until its queue or device is reset" },
    { "inject-hang-pc", VTPU_INJECT_HANG_PC, false,
      "the program that comes to this pc hangs there (0xffffffff: none)" },
    { "inject-irq-loss", VTPU_INJECT_IRQ_LOSS, false,
      "how many interrupts to lose from now on" },
    { "inject-irq-duplicate", VTPU_INJECT_IRQ_DUPLICATE, false,
      "how many interrupts to raise twice from now on" },
    { "inject-irq-spurious", VTPU_INJECT_IRQ_SPURIOUS, false,
      "raises this vector for no reason" },
    { "inject-ecc-single", VTPU_INJECT_ECC_SINGLE, false,
      "how many reads of HBM have an error that is corrected and counted" },
    { "inject-ecc-double", VTPU_INJECT_ECC_DOUBLE, false,
      "how many reads of HBM have an error that faults" },
    { "inject-dma-error", VTPU_INJECT_DMA_ERROR, false,
      "the nth transfer of system memory from now on fails" },
    { "inject-fence-corrupt", VTPU_INJECT_FENCE_CORRUPT, false,
      "bits to invert in the next fence" },
    { "inject-reset-stuck", VTPU_INJECT_RESET_STUCK, true,
      "resets of the device do not end" },
    { "inject-hbm-slow", VTPU_INJECT_HBM_SLOW, false,
      "how many times as long data takes to or from memory" },
    { "inject-dead", VTPU_INJECT_DEAD, true,
      "its BARs read all ones and take no writes" },
    { "inject-stuck", VTPU_INJECT_STUCK, false,
      "1: resets of a queue whose program runs do not end; 2: nor of the engines" },
    { "inject-temperature", VTPU_INJECT_TEMPERATURE, false,
      "what SENSOR_TEMP shows, in millidegrees (0xffffffff: the model's)" },
};

static bool vtpu_is_running(VtpuState *s, const char *name, Error **errp)
{
    if (!s->core) {
        error_setg(errp, "vtpu: %s is a property of a running device", name);
        return false;
    }
    return true;
}

static void vtpu_get_injection(Object *obj, Visitor *v, const char *name,
                               void *opaque, Error **errp)
{
    VtpuState *s = VTPU(obj);
    const VtpuInjectionProperty *p = opaque;
    /* A device that does not run yet has the values that inject nothing. */
    uint64_t value = s->core ? vtpu_core_injected(s->core, p->what) : 0;
    bool flag = value;

    if (p->flag) {
        visit_type_bool(v, name, &flag, errp);
    } else {
        visit_type_uint64(v, name, &value, errp);
    }
}

static void vtpu_set_injection(Object *obj, Visitor *v, const char *name,
                               void *opaque, Error **errp)
{
    VtpuState *s = VTPU(obj);
    const VtpuInjectionProperty *p = opaque;
    uint64_t value;
    bool flag;

    if (p->flag) {
        if (!visit_type_bool(v, name, &flag, errp)) {
            return;
        }
        value = flag;
    } else if (!visit_type_uint64(v, name, &value, errp)) {
        return;
    }
    if (!vtpu_is_running(s, name, errp)) {
        return;
    }
    if (!vtpu_core_inject(s->core, p->what, value)) {
        error_setg(errp, "vtpu: %s cannot be %" PRIu64 ": it is %s", name,
                   value, vtpu_core_injection_values(p->what));
    } else if (p->what == VTPU_INJECT_DEAD) {
        vtpu_set_dead(s, value);
    }
}

static char *vtpu_get_state(Object *obj, Error **errp)
{
    VtpuState *s = VTPU(obj);
    char *text = g_malloc0(VTPU_DESCRIPTION_BYTES);

    if (s->core) {
        vtpu_core_describe(s->core, text, VTPU_DESCRIPTION_BYTES);
    }
    return text;
}

void vtpu_monitor_class_init(ObjectClass *class)
{
    for (size_t i = 0; i < ARRAY_SIZE(vtpu_injections); i++) {
        const VtpuInjectionProperty *p = &vtpu_injections[i];

        object_class_property_add(class, p->name, p->flag ? "bool" : "uint64",
                                  vtpu_get_injection, vtpu_set_injection, NULL,
                                  (void *)p);
        object_class_property_set_description(class, p->name, p->description);
    }
    object_class_property_add_str(class, "state", vtpu_get_state, NULL);
    object_class_property_set_description(class, "state",
        "queues, contexts and engines, a line each");
}

/* info vtpu: the state of each device, below a line that says which it is. */

static int vtpu_info_of(Object *obj, void *opaque)
{
    GString *text = opaque;
    VtpuState *s =
        (VtpuState *)object_dynamic_cast(obj, TYPE_VTPU_FUNCTION);

    if (s) {
        PCIDevice *pdev = PCI_DEVICE(s);
        g_autofree char *state = vtpu_get_state(obj, NULL);
        g_auto(GStrv) lines = g_strsplit(g_strchomp(state), "\n", -1);

        g_string_append_printf(text, "%s: %02x:%02x.%x, HBM %" PRIu64 " MiB\n",
                               DEVICE(s)->id ?: "without id",
                               pci_dev_bus_num(pdev), PCI_SLOT(pdev->devfn),
                               PCI_FUNC(pdev->devfn), s->hbm_size / MiB);
        for (char **line = lines; *line; line++) {
            g_string_append_printf(text, "  %s\n", *line);
        }
    }
    return 0;
}

static HumanReadableText *vtpu_info(Error **errp)
{
    g_autoptr(GString) text = g_string_new("");

    object_child_foreach_recursive(object_get_root(), vtpu_info_of, text);
    if (!text->len) {
        g_string_append(text, "no vTPU\n");
    }
    return human_readable_text_from_str(text);
}

static void vtpu_register_info(void)
{
    monitor_register_hmp_info_hrt("vtpu", vtpu_info);
}

type_init(vtpu_register_info)
