/* SPDX-License-Identifier: MIT */
/*
 * A chip's end of the link: its registers, its counters, and the packets that
 * arrive. They are written by whatever thread brings them, one at a time,
 * without the chip's command thread, so two chips may store to each other at
 * once. Only `receiving` stands for the packet in progress: no lock is held
 * while it is written, and a reset, a change of the context's tables and a
 * quiescent state wait for it to go off.
 */
#include <string.h>

#include "machine.h"

void vtpu_link_init(VtpuCore *core, VtpuFabric *fabric, unsigned chip)
{
    core->link.fabric = fabric;
    core->link.chip = chip;
    atomic_init(&core->link.owner, -1);
    pthread_cond_init(&core->link.received, NULL);
}

void vtpu_link_destroy(VtpuCore *core)
{
    pthread_cond_destroy(&core->link.received);
}

/* --- enabling --- */

/* What programs and other chips see of it. */
static void publish(VtpuCore *core)
{
    VtpuLink *link = &core->link;

    atomic_store(&link->owner, link->enabled ? (int)link->context : -1);
    if (link->fabric) {
        vtpu_fabric_publish(link->fabric, link->chip, link->enabled, link->accept);
    }
}

void vtpu_link_stop(VtpuCore *core)
{
    core->link.enabled = false;
    publish(core);
}

static void raise(VtpuCore *core, uint32_t error)
{
    if (core->link.errors & error) {
        return; /* software has not looked yet: one interrupt is enough */
    }
    core->link.errors |= error;
    core->irqs |= 1;
    atomic_store(&core->attention, 1);
    vtpu_core_kick(core);
}

void vtpu_link_queue_died(VtpuCore *core, uint32_t context)
{
    VtpuLink *link = &core->link;

    if (link->enabled && link->fail_stop && link->context == context) {
        vtpu_link_stop(core);
        raise(core, VTPU_LINK_ERR_STOPPED);
    }
}

void vtpu_link_reset(VtpuCore *core)
{
    VtpuLink *link = &core->link;

    link->enabled = link->fail_stop = false;
    link->context = link->accept = link->errors = link->rx_reason = 0;
    link->rx_addr = link->rx_packets = link->rx_bytes = link->rx_refused = 0;
    for (unsigned i = 0; i < VTPU_NUM_LINK_COUNTERS; i++) {
        atomic_store(&link->counter[i], 0);
    }
    publish(core);
}

bool vtpu_link_uses(const VtpuCore *core, unsigned context)
{
    return core->link.receiving && core->link.context == context;
}

void vtpu_link_peers_lost(VtpuCore *core, uint32_t chips)
{
    pthread_mutex_lock(&core->lock);
    if (core->link.enabled && (core->link.accept & chips)) {
        raise(core, VTPU_LINK_ERR_PEER_LOST);
    }
    pthread_mutex_unlock(&core->lock);
}

/* --- packets --- */

/* Lock held. */
static uint32_t refuses(const VtpuCore *core, unsigned src)
{
    const VtpuLink *link = &core->link;

    return vtpu_injecting(core, VTPU_INJECT_DEAD) ? VTPU_LINK_REASON_LOST
         : core->exiting || core->resetting || !link->enabled || !(link->accept >> src & 1)
             ? VTPU_LINK_REASON_REFUSED : VTPU_LINK_REASON_NONE;
}

/* Lock held: parked or in D3, memory stays as it is. */
static bool rests(const VtpuCore *core)
{
    return core->park || core->asleep;
}

/* Lock not held: into memory, by the tables that `root` names. */
static uint32_t write_packet(VtpuCore *core, const VtpuPacket *packet, uint64_t root)
{
    static const uint8_t reasons[] = {
        [VTPU_FAULT_UNMAPPED] = VTPU_LINK_REASON_UNMAPPED,
        [VTPU_FAULT_PROTECTION] = VTPU_LINK_REASON_PROTECTION,
        [VTPU_FAULT_BAD_PAGE_TABLE] = VTPU_LINK_REASON_BAD_PAGE_TABLE,
        [VTPU_FAULT_BAD_CONTEXT] = VTPU_LINK_REASON_BAD_CONTEXT,
    };
    VtpuSpan span;

    if (packet->len == 0) {
        return VTPU_LINK_REASON_NONE;
    }
    uint32_t cause = vtpu_mmu_translate(core, root, packet->va, VTPU_ACCESS_WRITE, &span);
    if (cause) {
        return reasons[cause];
    }
    if (!span.host) {
        return (core->ops.link_write ? core->ops.link_write : core->ops.dma_write)(
                   core->opaque, span.bus, packet->data, packet->len)
                   ? VTPU_LINK_REASON_NONE : VTPU_LINK_REASON_BUS;
    }
    if (packet->len == 8 && !(packet->va & 7)) { /* a word that others poll */
        uint64_t word;
        memcpy(&word, packet->data, 8);
        __atomic_store_n((uint64_t *)span.host, word, __ATOMIC_RELEASE);
    } else {
        memmove(span.host, packet->data, packet->len);
    }
    if (core->ops.hbm_dirty) {
        core->ops.hbm_dirty(core->opaque, (uint64_t)(span.host - core->hbm), packet->len);
    }
    return VTPU_LINK_REASON_NONE;
}

/* Lock held. */
static void finish(VtpuCore *core, const VtpuPacket *packet, uint32_t reason)
{
    VtpuLink *link = &core->link;

    if (reason) {
        link->rx_refused++;
        link->rx_reason = reason | (uint32_t)packet->src << 8;
        link->rx_addr = packet->va;
        if (reason != VTPU_LINK_REASON_REFUSED && reason != VTPU_LINK_REASON_LOST) {
            raise(core, VTPU_LINK_ERR_RX_FAULT);
        }
        return;
    }
    link->rx_packets++;
    link->rx_bytes += packet->len;
    if (packet->counter) {
        atomic_fetch_add(&link->counter[packet->counter], packet->add);
        vtpu_queue_link_event(core);
    }
}

uint32_t vtpu_link_receive(VtpuCore *core, const VtpuPacket *packet)
{
    VtpuLink *link = &core->link;
    uint32_t reason;

    pthread_mutex_lock(&core->lock);
    while (!(reason = refuses(core, packet->src)) && link->receiving && !rests(core)) {
        pthread_cond_wait(&link->received, &core->lock);
    }
    if (!reason && rests(core)) {
        pthread_mutex_unlock(&core->lock);
        return VTPU_LINK_BUSY;
    }
    if (!reason) {
        link->receiving = true;
        uint64_t root = core->root[link->context];
        pthread_mutex_unlock(&core->lock);
        reason = write_packet(core, packet, root);
        pthread_mutex_lock(&core->lock);
        link->receiving = false;
        uint32_t refused = refuses(core, packet->src);
        reason = refused ? refused : reason;
        vtpu_core_received(core);
        pthread_cond_broadcast(&link->received);
    }
    finish(core, packet, reason);
    pthread_mutex_unlock(&core->lock);
    return reason;
}

void vtpu_link_answered(VtpuCore *core, VtpuSender sender, uint32_t reason, uint64_t va)
{
    VtpuLinkSend *send = &core->exec[sender.queue].send;

    pthread_mutex_lock(&core->lock);
    if (send->id == sender.id) {
        send->answered++;
        if (reason && !send->reason) {
            send->reason = reason;
            send->reason_va = va;
        }
        vtpu_queue_link_event(core);
    }
    pthread_mutex_unlock(&core->lock);
}

/* --- registers --- */

static bool is_counter(uint64_t offset, unsigned *index)
{
    uint64_t at = offset - VTPU_REG_LINK_COUNTER;

    *index = (unsigned)(at / 8);
    return offset >= VTPU_REG_LINK_COUNTER && at < VTPU_NUM_LINK_COUNTERS * 8;
}

static uint64_t statistic_of(uint64_t offset, unsigned *direction)
{
    uint64_t at = offset - VTPU_REG_LINK_TX_PACKETS;

    *direction = (unsigned)(at / 8 % VTPU_NUM_DIRECTIONS);
    return offset >= VTPU_REG_LINK_TX_PACKETS && at < 3 * 8 * VTPU_NUM_DIRECTIONS
               ? VTPU_REG_LINK_TX_PACKETS + at / 32 * 32 : 0;
}

unsigned vtpu_link_reg_size(uint64_t offset)
{
    unsigned index;

    switch (offset) {
    case VTPU_REG_LINK_ID:
    case VTPU_REG_LINK_SHAPE:
    case VTPU_REG_LINK_NEIGHBOURS:
    case VTPU_REG_LINK_STATUS:
    case VTPU_REG_LINK_PEERS:
    case VTPU_REG_LINK_CTRL:
    case VTPU_REG_LINK_CONTEXT:
    case VTPU_REG_LINK_ACCEPT:
    case VTPU_REG_LINK_ERR:
    case VTPU_REG_LINK_RX_REASON:
        return 4;
    case VTPU_REG_LINK_RX_ADDR:
    case VTPU_REG_LINK_RX_PACKETS:
    case VTPU_REG_LINK_RX_BYTES:
    case VTPU_REG_LINK_RX_REFUSED:
        return 8;
    default:
        return !(offset & 7) && (is_counter(offset, &index) || statistic_of(offset, &index))
                   ? 8 : 0;
    }
}

/* Of what only a fabric has. */
static uint64_t read_fabric(const VtpuLink *link, uint64_t offset)
{
    const VtpuFabric *fabric = link->fabric;
    unsigned x, y, index;
    uint64_t value = 0;

    vtpu_fabric_shape(fabric, &x, &y);
    switch (offset) {
    case VTPU_REG_LINK_ID:
        return VTPU_LINK_ID_PRESENT | link->chip | link->chip % x << 8 | link->chip / x << 16;
    case VTPU_REG_LINK_SHAPE:
        return x | y << 8;
    case VTPU_REG_LINK_NEIGHBOURS:
        for (unsigned d = 0; d < VTPU_NUM_DIRECTIONS; d++) {
            value |= (uint64_t)(vtpu_fabric_neighbour(fabric, link->chip, d) & 0xff) << 8 * d;
        }
        return value;
    case VTPU_REG_LINK_STATUS:
        for (unsigned d = 0; d < VTPU_NUM_DIRECTIONS; d++) {
            value |= (uint64_t)vtpu_fabric_cable_up(fabric, link->chip, d) << d;
        }
        return value | (link->enabled || link->receiving ? VTPU_LINK_STATUS_ENABLED : 0);
    case VTPU_REG_LINK_PEERS:
        for (unsigned c = 0; c < vtpu_fabric_chips(fabric); c++) {
            value |= (uint64_t)!vtpu_fabric_reachable(fabric, link->chip, c) << c;
        }
        return value;
    default:
        offset = statistic_of(offset, &index);
        return offset ? vtpu_fabric_statistic(fabric, offset, link->chip, index) : 0;
    }
}

uint64_t vtpu_link_reg_read(VtpuCore *core, uint64_t offset)
{
    const VtpuLink *link = &core->link;
    unsigned index;

    switch (offset) {
    case VTPU_REG_LINK_CTRL:
        return (link->enabled ? VTPU_LINK_CTRL_ENABLE : 0) |
               (link->fail_stop ? VTPU_LINK_CTRL_FAIL_STOP : 0);
    case VTPU_REG_LINK_CONTEXT:
        return link->context;
    case VTPU_REG_LINK_ACCEPT:
        return link->accept;
    case VTPU_REG_LINK_ERR:
        return link->errors;
    case VTPU_REG_LINK_RX_REASON:
        return link->rx_reason;
    case VTPU_REG_LINK_RX_ADDR:
        return link->rx_addr;
    case VTPU_REG_LINK_RX_PACKETS:
        return link->rx_packets;
    case VTPU_REG_LINK_RX_BYTES:
        return link->rx_bytes;
    case VTPU_REG_LINK_RX_REFUSED:
        return link->rx_refused;
    default:
        return is_counter(offset, &index) ? atomic_load(&link->counter[index])
             : link->fabric               ? read_fabric(link, offset) : 0;
    }
}

bool vtpu_link_reg_write(VtpuCore *core, uint64_t offset, uint64_t value)
{
    const uint32_t ctrl = VTPU_LINK_CTRL_ENABLE | VTPU_LINK_CTRL_FAIL_STOP;
    VtpuLink *link = &core->link;
    unsigned index;

    if (!link->fabric) {
        return false;
    }
    switch (offset) {
    case VTPU_REG_LINK_CTRL:
        link->fail_stop = value & VTPU_LINK_CTRL_FAIL_STOP;
        link->enabled = value & VTPU_LINK_CTRL_ENABLE && !core->resetting;
        publish(core);
        vtpu_queue_link_event(core); /* a program that waits has lost it */
        return !(value & ~(uint64_t)ctrl);
    case VTPU_REG_LINK_CONTEXT:
        if (link->enabled || link->receiving || value >= VTPU_NUM_CONTEXTS) {
            return false;
        }
        link->context = (uint32_t)value;
        return true;
    case VTPU_REG_LINK_ACCEPT:
        link->accept = (uint32_t)value & ((1u << vtpu_fabric_chips(link->fabric)) - 1);
        publish(core);
        return true;
    case VTPU_REG_LINK_ERR:
        link->errors &= ~(uint32_t)value;
        return true;
    default:
        if (!is_counter(offset, &index) || index == 0) {
            return false;
        }
        atomic_store(&link->counter[index], value);
        vtpu_queue_link_event(core);
        return true;
    }
}
