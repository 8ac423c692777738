/* SPDX-License-Identifier: MIT */
/*
 * The link from both sides: a stream from another process that is not to be trusted,
 * and a guest that sets its registers and sends while it comes. A packet that was
 * answered well must lie where it was to go.
 */
#include <string.h>

#include "crc32c.h"
#include "rig.h"
#include "vtpu_fabric.h"

#define HEADER 40
#define FRAME_PACKET 3
#define FRAME_ANSWER 4
#define MAPPED (4u << 20) /* virtual addresses that are HBM as it lies */
#define CODE (8u << 20)
#define TABLES (12u << 20)

typedef struct Link {
    Input in;
    VtpuFabric *fabric;
    uint8_t frame[HEADER + VTPU_LINK_PACKET];
    bool connected;
    uint32_t seq;      /* of the next packet to the machine */
    uint32_t tail;
    bool check;        /* the last frame was a packet, and nothing ran since */
    uint64_t va;
    uint32_t len;
} Link;

static void put(uint8_t *at, uint64_t value, unsigned bytes)
{
    memcpy(at, &value, bytes);
}

static void disconnect(Link *link)
{
    vtpu_fabric_disconnected(link->fabric);
    link->connected = false;
}

static void feed(Link *link, const uint8_t *data, size_t size)
{
    if (link->connected && size <= vtpu_fabric_input_room(link->fabric) &&
        vtpu_fabric_input(link->fabric, data, size)) {
        disconnect(link);
    }
}

/* A frame with a good checksum, its fields likely to be legal. */
static void frame_in(Rig *rig, Link *link)
{
    static const uint64_t places[] = { 0, 4096, MAPPED - 4096, MAPPED, 0x40000000, 0x50000000,
                                       1ull << VTPU_VA_BITS, -4096ull };
    Input *in = &link->in;
    uint8_t *f = link->frame, kind = input_byte(in), where = input_byte(in);
    uint32_t len = (kind & 7) == FRAME_PACKET ? input_uint(in, 2) % (VTPU_LINK_PACKET + 1) : 0;
    uint64_t va = places[where & 7] + (where >> 3) * 129u;

    if (va % VTPU_PAGE_BYTES + len > VTPU_PAGE_BYTES && !(kind & 0x40)) {
        len = VTPU_PAGE_BYTES - va % VTPU_PAGE_BYTES;
    }
    put(f, 0x4b4c5456, 4);
    f[4] = kind & 7;
    f[5] = f[4] == 1 ? 2 : input_byte(in) & (kind & 0x40 ? 0xff : 3);
    f[6] = f[4] == 1 ? 2 : input_byte(in) & (kind & 0x40 ? 0xff : 1);
    f[7] = input_byte(in);
    put(f + 8, f[4] == FRAME_PACKET ? link->seq : input_byte(in) & 7, 4);
    put(f + 12, len, 4);
    put(f + 16, f[4] == 2 ? (uint64_t)input_uint(in, 2) << 32 | (where >> 4) : va, 8);
    put(f + 24, f[4] == 2 ? input_byte(in) & 15 : input_byte(in), 8);
    put(f + 32, f[4] == 1 ? 1 : input_byte(in) & 15, 4);
    put(f + 36, 0, 4);
    input_bytes(in, f + HEADER, len);
    if (kind & 0x80) {
        uint8_t bit = input_byte(in);
        f[bit % HEADER] ^= (uint8_t)(1u << (bit >> 5));
    }
    put(f + 36, 0, 4);
    put(f + 36, vtpu_crc32c(vtpu_crc32c(0, f, HEADER), f + HEADER, len), 4);
    feed(link, f, HEADER + len);
    link->check = f[4] == FRAME_PACKET && !(kind & 0x80);
    link->va = va;
    link->len = len;
    (void)rig;
}

/* What the machine says; of the last packet, whether it is there. */
static void output(Rig *rig, Link *link)
{
    static uint8_t out[64u << 10];
    size_t size = vtpu_fabric_output(link->fabric, out, sizeof(out));

    for (size_t at = 0; at + HEADER <= size;) {
        uint32_t len, seq, reason;
        memcpy(&len, out + at + 12, 4);
        memcpy(&seq, out + at + 8, 4);
        memcpy(&reason, out + at + 32, 4);
        RIG_REQUIRE(len <= VTPU_LINK_PACKET && out[at + 4] >= 1 && out[at + 4] <= 4);
        if (out[at + 4] == FRAME_ANSWER) {
            RIG_REQUIRE(seq == link->seq);
            link->seq++;
            if (link->check && reason == VTPU_LINK_REASON_NONE && link->va < MAPPED) {
                RIG_REQUIRE(!memcmp(rig->hbm + link->va, link->frame + HEADER, link->len));
            }
        }
        at += HEADER + len;
    }
}

static void registers(Rig *rig, Link *link)
{
    static const uint16_t at[] = {
        VTPU_REG_LINK_CTRL, VTPU_REG_LINK_CONTEXT, VTPU_REG_LINK_ACCEPT, VTPU_REG_LINK_ERR,
        VTPU_REG_LINK_STATUS, VTPU_REG_LINK_PEERS, VTPU_REG_LINK_RX_REASON, VTPU_REG_LINK_RX_ADDR,
        VTPU_REG_LINK_TX_PACKETS, VTPU_REG_LINK_CRC_ERRORS, VTPU_REG_LINK_COUNTER,
        VTPU_REG_LINK_COUNTER + 8 * 63, VTPU_REG_LINK_COUNTER + 8 * 64, VTPU_REG_LINK_ID,
        VTPU_REG_CTX_ROOT, VTPU_REG_TLB_INVALIDATE,
    };
    uint8_t kind = input_byte(&link->in);
    uint64_t reg = at[kind & 15];

    rig_read(rig, reg, kind & 16 ? 8 : 4);
    if (kind & 32) {
        rig_write(rig, reg, input_uint(&link->in, kind & 64 ? 2 : 1), kind & 16 ? 8 : 4);
    }
}

static void run(Rig *rig, Link *link)
{
    Input *in = &link->in;
    struct vtpu_instr code[4] = { 0 };
    uint8_t entry[VTPU_RING_ENTRY] = { 0 };

    for (unsigned i = 0; i < 3; i++) {
        uint8_t kind = input_byte(in), field[8];
        const struct vtpu_op_info *info;
        code[i].opcode = kind % 3 == 0 ? VTPU_OP_REMOTE_STORE
                         : kind % 3 == 1 ? VTPU_OP_REMOTE_SIGNAL : VTPU_OP_LINK_WAIT;
        info = &vtpu_op_table[code[i].opcode];
        code[i].mode = info->num_modes ? kind / 3 % info->num_modes : 0;
        input_bytes(in, field, sizeof(field));
        for (unsigned n = 0; n < info->num_operands; n++) {
            code[i].imm[n] = info->kind[n] == VTPU_OPERAND_VAL ? field[n] & 3u : field[n] * 64u;
        }
    }
    code[3].opcode = VTPU_OP_HALT;
    memcpy(rig->hbm + CODE, code, sizeof(code));
    entry[VTPU_RING_OP] = VTPU_CMD_RUN;
    put(entry + VTPU_CMD_RUN_CODE_VA, CODE, 8);
    put(entry + VTPU_CMD_RUN_CODE_BYTES, sizeof(code), 4);
    memcpy(rig->system + (link->tail & 15) * VTPU_RING_ENTRY, entry, sizeof(entry));
    vtpu_core_doorbell(rig->core, 0, ++link->tail);
}

static void restart(Rig *rig, Link *link)
{
    rig_write(rig, VTPU_REG_Q_CTRL, VTPU_Q_CTRL_RESET, 4);
    rig_run(rig, 8);
    rig_write(rig, VTPU_REG_Q_RING_BASE, RIG_BUS, 8);
    rig_write(rig, VTPU_REG_Q_RING_LOG2, 4, 4);
    rig_write(rig, VTPU_REG_Q_CTRL, VTPU_Q_CTRL_ENABLE, 4);
    link->tail = 0;
}

static void do_one(Rig *rig, Link *link)
{
    uint8_t kind = input_byte(&link->in), raw[64];

    link->check = false;
    switch (kind % 12) {
    case 0:
        registers(rig, link);
        break;
    case 1:
        run(rig, link);
        break;
    case 2:
        restart(rig, link);
        break;
    case 3:
        input_bytes(&link->in, raw, sizeof(raw));
        feed(link, raw, kind >> 2);
        break;
    case 4:
        if (kind & 0x80) {
            disconnect(link);
        } else if (!link->connected) {
            vtpu_fabric_connected(link->fabric);
            link->connected = true;
            link->seq = 0;
        }
        break;
    case 5:
        if (kind & 0x80) {
            vtpu_core_quiesce(rig->core);
        } else {
            vtpu_core_resume(rig->core);
            feed(link, raw, 0); /* what was stalled goes on */
        }
        break;
    case 6:
        vtpu_fabric_inject(link->fabric, 0, kind >> 6, VTPU_CABLE_DOWN, kind >> 5 & 1);
        vtpu_fabric_inject(link->fabric, 0, kind >> 6, VTPU_CABLE_CORRUPT, kind >> 4 & 1);
        break;
    case 7:
    case 8:
        rig_run(rig, 1 + (kind >> 4));
        rig_check(rig);
        break;
    default:
        frame_in(rig, link);
        break;
    }
    output(rig, link);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint64_t rights = VTPU_PTE_READ | VTPU_PTE_WRITE | VTPU_PTE_EXEC;
    static Link link;
    const char *error;
    Tables tables = { .next = TABLES };
    Rig rig = { .target = &link };

    memset(&link, 0, sizeof(link));
    link.in = (Input) { data, size };
    link.fabric = rig.fabric = vtpu_fabric_new("2x2", &error);
    RIG_REQUIRE(link.fabric);
    rig_open(&rig, "scalar", 0, 1u << 18);
    rig_map(&rig, &tables, 0, 0, MAPPED, VTPU_HUGE_PAGE_BYTES, rights | VTPU_PTE_HBM);
    rig_map(&rig, &tables, CODE, CODE, VTPU_HUGE_PAGE_BYTES, VTPU_HUGE_PAGE_BYTES,
            rights | VTPU_PTE_HBM);
    rig_map(&rig, &tables, 0x40000000, RIG_BUS + (64u << 10), 64u << 10, VTPU_PAGE_BYTES, rights);
    rig_map(&rig, &tables, 0x50000000, 0x700000000ull, 64u << 10, VTPU_PAGE_BYTES, rights);
    rig_write(&rig, VTPU_REG_CTX_ROOT, tables.root | VTPU_CTX_VALID, 8);
    rig_write(&rig, VTPU_REG_LINK_ACCEPT, 0xe, 4);
    rig_write(&rig, VTPU_REG_LINK_CTRL, VTPU_LINK_CTRL_ENABLE, 4);
    rig_write(&rig, VTPU_REG_CTRL, VTPU_CTRL_ENABLE, 4);
    restart(&rig, &link);
    vtpu_fabric_connected(link.fabric);
    link.connected = true;
    while (link.in.left) {
        do_one(&rig, &link);
    }
    rig_check_works(&rig);
    rig_close(&rig);
    vtpu_fabric_free(link.fabric);
    return 0;
}
