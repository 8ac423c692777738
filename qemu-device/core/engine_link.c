/* SPDX-License-Identifier: MIT */
/*
 * The LINK engine: REMOTE_STORE and REMOTE_SIGNAL, packet by packet, and the
 * sequencer's waits for link counters. Command thread only.
 *
 * A step sends some packets and returns, so that the other engines, stops and
 * parking get their turn; an instruction is complete when the last packet is
 * known to be written. Packets to another process are answered later, so up to
 * WINDOW of them are in flight; the one that adds to the counter is held back
 * until all others were answered well, so that a counter never counts a store
 * that is incomplete. Until then an instruction may be begun again from its
 * start.
 */
#include <string.h>
#include <time.h>

#include "machine.h"

#define WINDOW 64          /* packets to another process in flight */
#define STEP 64            /* packets a step; one with a schedule seed */
#define RETRY_NS 100000    /* a receiver that was parked is asked again after this */
#define LOOK_NS 1000000    /* a pause looks this often whether its chip is still there */

static bool link_fault(VtpuExec *x, uint32_t reason, unsigned chip, uint64_t va)
{
    return vtpu_fault(x, VTPU_FAULT_LINK, VTPU_ACCESS_WRITE,
                      (uint64_t)reason << 56 | (uint64_t)(chip & 0xff) << 48 |
                          (va & ((1ull << VTPU_VA_BITS) - 1)));
}

static bool owns(const VtpuExec *x)
{
    return atomic_load(&x->core->link.owner) == (int)x->context;
}

/* Answers to what was sent before are nobody's any more. */
static void take(VtpuExec *x, VtpuLinkSend send)
{
    pthread_mutex_lock(&x->core->lock);
    send.id = ++x->core->link.sends;
    x->send = send;
    pthread_mutex_unlock(&x->core->lock);
}

void vtpu_link_begin(VtpuExec *x)
{
    const VtpuFabric *fabric = x->core->link.fabric;

    take(x, (VtpuLinkSend) { .begun = false });
    for (unsigned c = 0; fabric && c < vtpu_fabric_chips(fabric); c++) {
        x->generation[c] = vtpu_fabric_generation(fabric, c);
    }
}

/* --- sending --- */

static bool check_ends(VtpuExec *x, uint64_t chip, uint64_t counter)
{
    const VtpuFabric *fabric = x->core->link.fabric;

    if (counter >= VTPU_NUM_LINK_COUNTERS) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, counter);
    }
    if (!fabric || !owns(x)) {
        return link_fault(x, VTPU_LINK_REASON_DISABLED, (unsigned)chip, 0);
    }
    if (chip >= vtpu_fabric_chips(fabric)) {
        return link_fault(x, VTPU_LINK_REASON_NO_CHIP, (unsigned)chip, 0);
    }
    return true;
}

static bool begin_store(VtpuExec *x, const VtpuIssued *i)
{
    const uint64_t *v = i->v;
    VtpuLinkSend send = {
        .chip = (unsigned)v[VTPU_REMOTE_STORE_CHIP],
        .counter = (unsigned)v[VTPU_REMOTE_STORE_COUNTER],
        .add = 1,
        .dst = v[VTPU_REMOTE_STORE_DST],
        .src = v[VTPU_REMOTE_STORE_SRC],
        .rows = v[VTPU_REMOTE_STORE_ROWS],
        .row_bytes = v[VTPU_REMOTE_STORE_ROW_BYTES],
        .dst_stride = v[VTPU_REMOTE_STORE_DST_STRIDE],
        .src_stride = v[VTPU_REMOTE_STORE_SRC_STRIDE],
        .global = i->in->in.mode == VTPU_REMOTE_STORE_MODE_GLOBAL,
    };
    if (send.row_bytes & 3) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, send.row_bytes);
    }
    if (!send.global) {
        if (send.src & 3) {
            return vtpu_fault(x, VTPU_FAULT_VMEM_RANGE, VTPU_ACCESS_NONE, send.src);
        }
        if (!vtpu_vmem_read(x, send.src, send.rows, send.row_bytes, send.src_stride)) {
            return false;
        }
    }
    if (send.rows > 1 && send.dst_stride < send.row_bytes) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_WRITE, send.dst);
    }
    if (send.dst_stride == send.row_bytes && send.src_stride == send.row_bytes) {
        send.row_bytes *= send.rows;
        send.rows = 1;
    }
    if (send.row_bytes == 0) {
        send.rows = 0;
    }
    send.begun = true;
    take(x, send);
    return check_ends(x, v[VTPU_REMOTE_STORE_CHIP], v[VTPU_REMOTE_STORE_COUNTER]);
}

static bool begin_signal(VtpuExec *x, const VtpuIssued *i)
{
    uint64_t counter = i->v[VTPU_REMOTE_SIGNAL_COUNTER];

    take(x, (VtpuLinkSend) {
        .begun = true,
        .chip = (unsigned)i->v[VTPU_REMOTE_SIGNAL_CHIP],
        .counter = (unsigned)counter,
        .add = i->v[VTPU_REMOTE_SIGNAL_ADD],
    });
    if (counter == 0) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, counter);
    }
    return check_ends(x, i->v[VTPU_REMOTE_SIGNAL_CHIP], counter);
}

/* Without rows there is one packet, or none, that signals. */
static bool all_sent(const VtpuLinkSend *send)
{
    return send->row == send->rows && (send->last_sent || !send->counter);
}

/* The packet that starts at row, at; it never leaves a page there. */
static bool make_packet(VtpuExec *x, VtpuPacket *packet)
{
    VtpuLinkSend *send = &x->send;

    *packet = (VtpuPacket) { .src = (uint8_t)x->core->link.chip, .dst = (uint8_t)send->chip };
    if (send->row < send->rows) {
        uint64_t va = send->dst + send->row * send->dst_stride + send->at;
        uint64_t room = VTPU_LINK_PACKET - va % VTPU_LINK_PACKET;
        uint64_t left = send->row_bytes - send->at;
        uint64_t from = send->row * send->src_stride + send->at;
        packet->va = va;
        packet->len = (uint32_t)(left < room ? left : room);
        if (send->global) {
            uint8_t *copy = vtpu_buffer(x, VTPU_BUFFER_DMA, VTPU_LINK_PACKET);
            if (!copy || !vtpu_mem_read(x, send->src + from, copy, packet->len,
                                        VTPU_ACCESS_READ)) {
                return false;
            }
            packet->data = copy;
        } else {
            packet->data = x->vmem->data + send->src + from;
        }
    }
    bool last = send->row == send->rows ||
                (send->row + 1 == send->rows && send->at + packet->len == send->row_bytes);
    if (last && send->counter) {
        packet->counter = (uint8_t)send->counter;
        packet->add = send->add;
    }
    return true;
}

static void advance(VtpuLinkSend *send, const VtpuPacket *packet)
{
    send->last_sent |= packet->counter != 0;
    if (send->row == send->rows) {
        return;
    }
    send->at += packet->len;
    if (send->at == send->row_bytes) {
        send->at = 0;
        send->row++;
    }
}

static bool is_last(const VtpuLinkSend *send)
{
    uint64_t va = send->dst + send->row * send->dst_stride + send->at;

    return send->row == send->rows ||
           (send->row + 1 == send->rows &&
            send->row_bytes - send->at <= VTPU_LINK_PACKET - va % VTPU_LINK_PACKET);
}

/* Whether packets may be sent now, `unanswered` being on their way. */
static bool may_send(const VtpuLinkSend *send, uint32_t unanswered)
{
    return !all_sent(send) && unanswered < WINDOW &&
           (unanswered == 0 || !send->counter || !is_last(send));
}

bool vtpu_link_ready(VtpuExec *x)
{
    const VtpuLinkSend *send = &x->send;

    if (!send->begun) {
        return true;
    }
    if (send->ready_ns && vtpu_now_ns() < send->ready_ns) {
        return false;
    }
    pthread_mutex_lock(&x->core->lock);
    uint32_t unanswered = send->sent - send->answered, reason = send->reason;
    pthread_mutex_unlock(&x->core->lock);
    return reason || may_send(send, unanswered) || (all_sent(send) && unanswered == 0);
}

bool vtpu_link_step(VtpuExec *x, const VtpuIssued *i, bool *done)
{
    VtpuCore *core = x->core;
    VtpuLinkSend *send = &x->send;
    unsigned budget = core->schedule_seed ? 1 : STEP;

    *done = false;
    if (!send->begun) {
        bool store = i->in->in.opcode == VTPU_OP_REMOTE_STORE;
        if (!(store ? begin_store(x, i) : begin_signal(x, i))) {
            return false;
        }
    }
    send->ready_ns = 0;
    for (;;) {
        pthread_mutex_lock(&core->lock);
        uint32_t unanswered = send->sent - send->answered, reason = send->reason;
        VtpuSender sender = { x->queue, send->id };
        uint64_t va = send->reason_va, delay_ns = 0;
        pthread_mutex_unlock(&core->lock);
        if (reason) {
            return link_fault(x, reason, send->chip, va);
        }
        if (!may_send(send, unanswered) || budget-- == 0) {
            *done = all_sent(send) && unanswered == 0;
            send->begun = !*done;
            return true;
        }
        VtpuPacket packet;
        if (!owns(x)) {
            return link_fault(x, VTPU_LINK_REASON_DISABLED, send->chip, 0);
        }
        if (!make_packet(x, &packet)) {
            return false;
        }
        reason = vtpu_fabric_send(core->link.fabric, &packet, sender, &delay_ns);
        if (reason == VTPU_LINK_BUSY) {
            send->ready_ns = vtpu_now_ns() + RETRY_NS;
            return true;
        }
        if (reason && reason != VTPU_LINK_SENT) {
            return link_fault(x, reason, send->chip, packet.va);
        }
        send->sent += reason == VTPU_LINK_SENT;
        advance(send, &packet);
        if (delay_ns) {
            send->ready_ns = vtpu_now_ns() + delay_ns;
            return true;
        }
    }
}

/* --- waiting --- */

bool vtpu_link_counter(VtpuExec *x, uint64_t counter, uint64_t *value)
{
    if (counter == 0 || counter >= VTPU_NUM_LINK_COUNTERS) {
        return vtpu_fault(x, VTPU_FAULT_BAD_OPERAND, VTPU_ACCESS_NONE, counter);
    }
    if (!x->core->link.fabric || !owns(x)) {
        return link_fault(x, VTPU_LINK_REASON_DISABLED, x->core->link.chip, 0);
    }
    *value = atomic_load_explicit(&x->core->link.counter[counter], memory_order_acquire);
    return true;
}

/* Why chip c will not add to a counter here any more, or NONE. */
static uint32_t lost(const VtpuExec *x, uint64_t chip)
{
    const VtpuFabric *fabric = x->core->link.fabric;
    unsigned c = chip > UINT32_MAX ? UINT32_MAX : (unsigned)chip;
    uint32_t reason = vtpu_fabric_route_reason(fabric, c, x->core->link.chip);

    return reason ? reason
         : !vtpu_fabric_enabled(fabric, c) || vtpu_fabric_generation(fabric, c) != x->generation[c]
             ? VTPU_LINK_REASON_REFUSED : VTPU_LINK_REASON_NONE;
}

/* True: LINK_WAIT may be executed, be it to fault. */
bool vtpu_link_wait_over(const VtpuExec *x, const uint64_t v[8])
{
    const VtpuLink *link = &x->core->link;
    uint64_t counter = v[VTPU_LINK_WAIT_COUNTER];

    return counter == 0 || counter >= VTPU_NUM_LINK_COUNTERS || !link->fabric || !owns(x) ||
           atomic_load(&link->counter[counter]) >= v[VTPU_LINK_WAIT_VALUE] ||
           lost(x, v[VTPU_LINK_WAIT_CHIP]);
}

bool vtpu_link_wait(VtpuExec *x, const uint64_t v[8], bool *over)
{
    uint64_t counter = v[VTPU_LINK_WAIT_COUNTER], chip = v[VTPU_LINK_WAIT_CHIP], value = 0;
    uint32_t reason = VTPU_LINK_REASON_NONE;

    if (!vtpu_link_counter(x, counter, &value)) {
        return false;
    }
    if (value < v[VTPU_LINK_WAIT_VALUE]) {
        reason = lost(x, chip);
        /* What it sent before it went counts. */
        value = atomic_load(&x->core->link.counter[counter]);
    }
    *over = value >= v[VTPU_LINK_WAIT_VALUE];
    return *over || !reason || link_fault(x, reason, (unsigned)chip, 0);
}

uint64_t vtpu_link_look_ns(const VtpuExec *x)
{
    return x->send.begun ? x->send.ready_ns : 0;
}

/* Sleeps until something may have changed; the caller looks again. */
bool vtpu_link_pause(VtpuExec *x)
{
    VtpuCore *core = x->core;
    uint64_t until = vtpu_now_ns() + LOOK_NS;

    if (x->send.begun && x->send.ready_ns && x->send.ready_ns < until) {
        until = x->send.ready_ns;
    }
    struct timespec t = { (time_t)(until / 1000000000u), (long)(until % 1000000000u) };
    vtpu_engines_release(core);
    pthread_mutex_lock(&core->lock);
    if (!atomic_load(&core->attention) && x->link_events == core->link.events) {
        pthread_cond_timedwait(&core->wake, &core->lock, &t);
    }
    x->link_events = core->link.events;
    pthread_mutex_unlock(&core->lock);
    return vtpu_engines_take(core);
}
