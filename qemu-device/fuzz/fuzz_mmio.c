/* SPDX-License-Identifier: MIT */
/*
 * Registers, doorbells and what the host asks for, in any order, while the machine
 * works too: what it reads from system memory is the input itself.
 */
#include "rig.h"

#define DEPTH 2 /* accesses inside of an access: as many as other processors */

typedef struct Mmio {
    Input in;
    unsigned depth;
} Mmio;

/* Every register, and the first after each array. */
static const uint16_t registers[] = {
    VTPU_REG_ID, VTPU_REG_VERSION, VTPU_REG_CAPS, VTPU_REG_HBM_SIZE, VTPU_REG_CTRL,
    VTPU_REG_STATUS, VTPU_REG_RESET_COUNT, VTPU_REG_TIME, VTPU_REG_ERR_QUEUES,
    VTPU_REG_TEST_SCRATCH, VTPU_REG_TEST_IRQ, VTPU_REG_TLB_INVALIDATE, VTPU_REG_TLB_PENDING,
    VTPU_REG_STAT_PROGRAMS, VTPU_REG_STAT_INSTRUCTIONS, VTPU_REG_STAT_BUSY_NS,
    VTPU_REG_STAT_HBM_BYTES, VTPU_REG_STAT_ECC_CORRECTED, VTPU_REG_CTX_ROOT,
    VTPU_REG_CTX_ROOT + 8, VTPU_REG_CTX_ROOT + 8 * VTPU_NUM_CONTEXTS,
    VTPU_REG_Q_RING_BASE, VTPU_REG_Q_FENCE_ADDR, VTPU_REG_Q_RING_LOG2, VTPU_REG_Q_CONTEXT,
    VTPU_REG_Q_VECTOR, VTPU_REG_Q_PRIORITY, VTPU_REG_Q_CTRL, VTPU_REG_Q_QSTATUS,
    VTPU_REG_Q_HEAD, VTPU_REG_Q_TAIL, VTPU_REG_Q_FAULT_CAUSE, VTPU_REG_Q_FAULT_ACCESS,
    VTPU_REG_Q_FAULT_ADDR, VTPU_REG_Q_FAULT_PC, VTPU_REG_Q_FAULT_ENTRY, VTPU_REG_Q_DOORBELL,
    VTPU_QUEUE_OFFSET + VTPU_QUEUE_STRIDE * VTPU_NUM_QUEUES,
};

/* Two queues, or the halves of an 8-byte register. */
static uint64_t pick_register(Input *in)
{
    uint8_t choice = input_byte(in), more = input_byte(in);
    uint64_t offset = registers[choice % (sizeof(registers) / sizeof(*registers))];

    if (more & 1 && offset >= VTPU_QUEUE_OFFSET) {
        offset += VTPU_QUEUE_STRIDE;
    }
    return offset + (more & 2 ? 4 : 0);
}

/* What blocks its thread is left out: hangs, and memory that is slow. */
static void inject(Rig *rig, Input *in)
{
    static const VtpuInjection kinds[] = {
        VTPU_INJECT_IRQ_LOSS, VTPU_INJECT_IRQ_DUPLICATE, VTPU_INJECT_IRQ_SPURIOUS,
        VTPU_INJECT_ECC_SINGLE, VTPU_INJECT_ECC_DOUBLE, VTPU_INJECT_DMA_ERROR,
        VTPU_INJECT_FENCE_CORRUPT, VTPU_INJECT_RESET_STUCK, VTPU_INJECT_DEAD,
    };

    VtpuInjection kind = kinds[input_byte(in) % (sizeof(kinds) / sizeof(*kinds))];
    vtpu_core_inject(rig->core, kind, input_byte(in) & 3);
    RIG_REQUIRE(vtpu_core_injected(rig->core, kind) <= 3);
}

static void one_access(Rig *rig, Input *in, bool outermost)
{
    char text[VTPU_DESCRIPTION_BYTES];
    uint8_t kind = input_byte(in);

    switch (kind % 12) {
    case 0:
        rig_read(rig, pick_register(in), kind & 16 ? 8 : 4);
        break;
    case 1:
    case 2:
        rig_write(rig, pick_register(in), input_uint(in, kind & 16 ? 8 : 4), kind & 16 ? 8 : 4);
        break;
    case 3:
        rig_write(rig, pick_register(in), input_byte(in), 4);
        break;
    case 4: {
        uint64_t offset = input_uint(in, 2), size = input_byte(in) % 9;
        rig_write(rig, offset, input_uint(in, 8), (unsigned)size);
        rig_read(rig, offset, (unsigned)size);
        break;
    }
    case 5:
        vtpu_core_doorbell(rig->core, input_byte(in) % 34, (uint32_t)input_uint(in, 4));
        break;
    case 6:
        vtpu_core_doorbell(rig->core, kind >> 7, input_byte(in) & 7);
        break;
    case 7: {
        uint64_t at = input_uint(in, 3) % (RIG_HBM_BYTES / 8), word = input_uint(in, 8);
        ((uint64_t *)rig->hbm)[at] = word;
        break;
    }
    case 8:
        inject(rig, in);
        break;
    case 9:
        vtpu_core_describe(rig->core, text, kind & 16 ? sizeof(text) : 1 + input_byte(in));
        break;
    case 10:
        if (kind & 16) {
            vtpu_core_reset(rig->core);
        } else if (outermost) {
            vtpu_core_quiesce(rig->core);
            RIG_REQUIRE(!vtpu_core_step(rig->core));
            vtpu_core_resume(rig->core);
        }
        break;
    default:
        if (outermost) {
            rig_run(rig, 1 + (kind >> 4));
            rig_check(rig);
        }
        break;
    }
}

static void interlude(Rig *rig)
{
    Mmio *mmio = rig->target;

    if (mmio->depth < DEPTH && input_byte(&mmio->in) & 1) {
        mmio->depth++;
        one_access(rig, &mmio->in, false);
        mmio->depth--;
    }
}

static bool bus(Rig *rig, bool write, uint64_t addr, void *buf, size_t len)
{
    Mmio *mmio = rig->target;

    (void)addr;
    if (input_byte(&mmio->in) % 8 == 7) {
        return false;
    }
    if (!write) {
        input_bytes(&mmio->in, buf, len < 256 ? len : 256);
    }
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    Mmio mmio = { { data, size }, 0 };
    Rig rig = { .target = &mmio, .bus = bus, .interlude = interlude };

    rig_open(&rig, "scalar", 0, 1u << 16);
    while (mmio.in.left) {
        one_access(&rig, &mmio.in, true);
    }
    rig_run(&rig, 100);
    rig_check(&rig);
    rig_check_works(&rig);
    rig_close(&rig);
    return 0;
}
