# SPDX-License-Identifier: MIT
"""What goes wrong between chips of one process is reported, counted, and never a hang."""

from __future__ import annotations

import threading

import pytest
from asm import R, ins, pc, program
from asm import remote_store as store
from fabric import (
    CORRUPT,
    DOWN,
    SLOW,
    XM,
    XP,
    YP,
    Fabric,
    OpenFabric,
    counter,
    enable_link,
    link_fault,
    start,
    wait_begun,
    wait_fault,
)
from machine import SYSTEM_BASE, D, Queue

FOREVER = program(ins("LINK_WAIT", counter=1, value=1, chip=1))


def flood(chip: int, dst: int, size: int) -> bytes:
    """Stores for ever."""
    return store(chip, dst, 0x100000, size, counter=2) + ins("JMP", target=0)


def crc_errors(fabric: Fabric, chip: int, direction: int) -> int:
    return fabric.machines[chip].read(D["REG_LINK_CRC_ERRORS"] + 8 * direction, 8)


@pytest.mark.parametrize(
    ("direction", "what", "value"),
    [(YP, DOWN, 1), (XP, DOWN, 2), (XP, SLOW, 1_000_000_001), (XP, 3, 1), (4, DOWN, 1)],
)
def test_bad_injections_are_refused(pair: Fabric, direction: int, what: int, value: int) -> None:
    assert not pair.inject(0, direction, what, value)


def test_corrupted_packets_are_sent_again(pair: Fabric) -> None:
    """Three bad transmissions of a packet are repaired, four are given up."""
    source, sink = pair.machines.values()
    data = bytes(range(256)) * 16
    src, dst = source.place(data), sink.alloc(4096)
    pair.inject(0, XP, CORRUPT, 3)
    pair.queues[0].run(program(store(1, dst, src, 4096, 1)))
    assert sink.get(dst, 4096) == data and counter(sink, 1) == 1
    assert crc_errors(pair, 0, XP) == 3 and pair.injected(0, XP, CORRUPT) == 0
    pair.inject(0, XP, CORRUPT, 4)
    fault = pair.queues[0].run_fault(program(ins("REMOTE_SIGNAL", chip=1, counter=1, add=1)))
    assert link_fault(fault) == ("CRC", 1, 0)
    assert crc_errors(pair, 0, XP) == 7 and counter(sink, 1) == 1
    assert sink.reg("LINK_RX_PACKETS", 8) == 1, "what is corrupt never arrives"


def test_a_bad_cable_harms_its_own_packets_alone(open_fabric: OpenFabric) -> None:
    fabric = open_fabric("3x3")
    fabric.add_all()
    fabric.inject(4, XP, CORRUPT, 1 << 20)
    signal = {chip: program(ins("REMOTE_SIGNAL", chip=chip, counter=1, add=1)) for chip in range(9)}
    for chip in range(9):
        if chip in (2, 5, 8):  # along x first
            assert link_fault(fabric.queues[4].run_fault(signal[chip]))[0] == "CRC"
            fabric.queues[4].restart()
        else:
            fabric.queues[4].run(signal[chip])
    fabric.queues[5].run(signal[4])
    assert crc_errors(fabric, 5, XM) == 0


@pytest.mark.parametrize("how", ["unplug", "disable", "reset", "cable", "restart"])
def test_the_loss_of_a_chip_ends_a_wait_for_it(pair: Fabric, how: str) -> None:
    waiting, lost = pair.machines[0], pair.machines[1]
    start(pair.queues[0], FOREVER)
    wait_begun(pair.queues[0])
    expected = "REFUSED"
    if how == "unplug":
        lost.close()
        expected = "LOST"
    elif how == "disable":
        lost.write(D["REG_LINK_CTRL"], 0)
    elif how == "reset":
        lost.write(D["REG_CTRL"], D["CTRL_RESET"])
    elif how == "cable":
        pair.inject(0, XP, DOWN, 1)
        pair.inject(0, XM, DOWN, 1)
        expected = "NO_ROUTE"
    else:  # off and on again: what was to come never will
        lost.write(D["REG_LINK_CTRL"], 0)
        lost.write(D["REG_LINK_CTRL"], 1)
    assert link_fault(wait_fault(pair.queues[0])) == (expected, 1, 0)
    if how == "unplug":
        waiting.wait_for(lambda: waiting.reg("LINK_ERR") == D["LINK_ERR_PEER_LOST"], "error bit")
        waiting.wait_irqs(0, 1)


def test_what_arrived_before_the_loss_counts(pair: Fabric) -> None:
    pair.queues[1].run(program(ins("REMOTE_SIGNAL", chip=0, counter=1, add=1)))
    pair.machines[1].close()
    pair.queues[0].run(FOREVER)


def test_losing_the_own_link_ends_a_wait(pair: Fabric) -> None:
    start(pair.queues[0], FOREVER)
    wait_begun(pair.queues[0])
    pair.machines[0].write(D["REG_LINK_CTRL"], 0)
    assert link_fault(wait_fault(pair.queues[0]))[0] == "DISABLED"


def test_a_wait_that_only_this_program_could_end_is_a_deadlock(pair: Fabric) -> None:
    """Local counters keep their rule; a wait for a chip is none."""
    code = program(
        ins("REMOTE_SIGNAL", chip=1, counter=1, add=1, wait=(1, 1)),
        ins("LINK_WAIT", counter=1, value=1, chip=1, wait=(2, 1)),
    )
    assert pair.queues[0].run_fault(code)["cause"] == "DEADLOCK"


def test_the_receiver_is_reset_during_traffic(pair: Fabric) -> None:
    """Nothing is written once RESETTING is clear; the sender is told."""
    sink = pair.machines[1]
    dst, size = 4 << 20, 256 << 10
    for _ in range(10):
        start(pair.queues[0], flood(1, dst, size))
        sink.wait_for(lambda: sink.reg("LINK_RX_PACKETS", 8) > 100, "traffic")
        sink.write(D["REG_CTRL"], D["CTRL_RESET"])
        sink.wait_for(lambda: not sink.reg("STATUS") & D["STATUS_RESETTING"], "reset")
        sink.put(dst, bytes(size))
        assert link_fault(wait_fault(pair.queues[0]))[0] in ("REFUSED",)
        assert sink.get(dst, size) == bytes(size)
        pair.queues[0].restart()
        sink.identity(0)
        sink.enable()
        enable_link(sink)


def test_the_receiver_is_unplugged_during_traffic(pair: Fabric) -> None:
    sink = pair.machines[1]
    start(pair.queues[0], flood(1, 4 << 20, 64 << 10))
    sink.wait_for(lambda: sink.reg("LINK_RX_PACKETS", 8) > 100, "traffic")
    sink.close()
    assert link_fault(wait_fault(pair.queues[0]))[0] in ("REFUSED", "LOST")


def test_an_unmapped_page_is_reused_safely_under_traffic(pair: Fabric) -> None:
    """TLB_PENDING covers packets: once it is clear, none is written through the old entry."""
    sink = pair.machines[1]
    va, target = 0x4000_0000, 4 << 20
    for _ in range(30):
        sink.map(0, va, target, 4096)
        start(pair.queues[0], flood(1, va, 4096))
        enough = sink.reg("LINK_RX_PACKETS", 8) + 5
        sink.wait_for(lambda enough=enough: sink.reg("LINK_RX_PACKETS", 8) > enough, "traffic")
        sink.put(sink.pte_at(0, va), bytes(8))
        sink.write(D["REG_TLB_INVALIDATE"], 0)
        sink.wait_for(lambda: not sink.reg("TLB_PENDING"), "invalidated")
        sink.put(target, b"\x77" * 4096)
        assert link_fault(wait_fault(pair.queues[0])) == ("UNMAPPED", 1, va)
        assert sink.get(target, 4096) == b"\x77" * 4096
        pair.queues[0].restart()


class Held:
    """Holds the next packet for a page of the receiver's system memory while it is written."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.sink = fabric, fabric.machines[1]
        self.sink.map(0, 0x8000_0000, SYSTEM_BASE + (1 << 20), 4096, hbm=False)
        self.entered, self._release = threading.Event(), threading.Event()
        self.sink.on_dma = self._on_dma
        start(fabric.queues[0], program(store(1, 0x8000_0000, 0x100000, 64, 1)))
        assert self.entered.wait(60)

    def _on_dma(self, kind: str, addr: int, size: int) -> None:
        if (kind, addr) == ("write", SYSTEM_BASE + (1 << 20)):
            self.entered.set()
            assert self._release.wait(60)

    def release(self) -> None:
        self.sink.on_dma = None
        self._release.set()


def test_a_reset_waits_for_the_packet_in_progress(pair: Fabric) -> None:
    held, sink = Held(pair), pair.machines[1]
    sink.write(D["REG_CTRL"], D["CTRL_RESET"])
    for _ in range(100):
        assert sink.reg("STATUS") & D["STATUS_RESETTING"]
    held.release()
    sink.wait_for(lambda: not sink.reg("STATUS") & D["STATUS_RESETTING"], "reset")
    assert link_fault(wait_fault(pair.queues[0]))[0] == "REFUSED"
    assert counter(sink, 1) == 0


@pytest.mark.parametrize("register", ["TLB_INVALIDATE", "CTX_ROOT"])
def test_an_invalidation_waits_for_the_packet_in_progress(pair: Fabric, register: str) -> None:
    held, sink = Held(pair), pair.machines[1]
    if register == "TLB_INVALIDATE":
        sink.write(D["REG_TLB_INVALIDATE"], 0)
    else:
        sink.write(D["REG_CTX_ROOT"], 0, 8)
    sink.write(D["REG_TLB_INVALIDATE"], 5)  # another context is no matter
    for _ in range(100):
        assert sink.reg("TLB_PENDING")
    held.release()
    sink.wait_for(lambda: not sink.reg("TLB_PENDING"), "invalidated")
    pair.queues[0].wait(1)
    assert counter(sink, 1) == 1
    code = program(store(1, 0x8000_0000, 0x100000, 64))
    if register == "CTX_ROOT":
        assert link_fault(pair.queues[0].run_fault(code))[0] == "BAD_CONTEXT"


def test_disabling_waits_for_the_packet_in_progress(pair: Fabric) -> None:
    held, sink = Held(pair), pair.machines[1]
    sink.write(D["REG_LINK_CTRL"], 0)
    for _ in range(100):
        assert sink.reg("LINK_STATUS") & D["LINK_STATUS_ENABLED"]
    sink.write(D["REG_LINK_CONTEXT"], 7)
    assert sink.reg("LINK_CONTEXT") == 0, "in use"
    held.release()
    sink.wait_for(lambda: not sink.reg("LINK_STATUS") & D["LINK_STATUS_ENABLED"], "disabled")
    sink.write(D["REG_LINK_CONTEXT"], 7)
    assert sink.reg("LINK_CONTEXT") == 7


def test_parking_waits_for_the_packet_in_progress(pair: Fabric) -> None:
    held, sink = Held(pair), pair.machines[1]
    parking = threading.Thread(target=sink.quiesce)
    parking.start()
    parking.join(0.2)
    assert parking.is_alive()
    held.release()
    parking.join(60)
    assert not parking.is_alive() and counter(sink, 1) == 1
    sink.resume()


def test_chips_that_store_to_each_other_at_once_go_on(open_fabric: OpenFabric) -> None:
    """Every chip of a ring floods its neighbour; nobody ever waits for one that waits."""
    fabric = open_fabric("4")
    machines = fabric.add_all()
    code = {
        chip: (
            program(
                ins("LI", rd=9, value=0),
                store((chip + 1) % 4, 4 << 20, 0x100000, 128 << 10, 2),
                ins("ADD", rd=9, a=R(9), b=1),
                ins("BLT", a=R(9), b=30, target=pc(1)),
            ),
            (),
        )
        for chip in range(4)
    }
    fabric.run_all(code)
    assert [counter(machine, 2) for machine in machines] == [30] * 4


@pytest.mark.parametrize("stop", ["fault", "reset"])
def test_fail_stop_ends_a_whole_ring(open_fabric: OpenFabric, stop: str) -> None:
    """Each chip waits for its neighbour; one that stops takes all along, in turn."""
    fabric = open_fabric("4")
    machines = fabric.add_all(ready=False)
    for machine in machines:
        enable_link(machine, fail_stop=True)
    for chip in (1, 2, 3):
        start(
            fabric.queues[chip],
            program(ins("LINK_WAIT", counter=1, value=1, chip=(chip + 1) % 4)),
        )
    if stop == "fault":
        start(fabric.queues[0], program(ins("TRAP", code=1)))
        assert wait_fault(fabric.queues[0])["cause"] == "TRAP"
    else:
        start(fabric.queues[0], program(ins("LINK_WAIT", counter=1, value=1, chip=1)))
        wait_begun(fabric.queues[0])
        fabric.queues[0].restart()
    for chip in (3, 2, 1):
        assert link_fault(wait_fault(fabric.queues[chip]))[0] == "REFUSED"
    for machine in machines:
        assert machine.reg("LINK_CTRL") == D["LINK_CTRL_FAIL_STOP"]
        assert machine.reg("LINK_ERR") & D["LINK_ERR_STOPPED"]


def test_a_fault_of_another_context_leaves_the_link_up(open_fabric: OpenFabric) -> None:
    fabric = open_fabric("2")
    machine = fabric.add(0, ready=False)
    enable_link(machine, fail_stop=True)
    machine.identity(5)
    other = Queue(machine, 1, context=5)
    other.run_fault(program(ins("TRAP", code=1)))
    assert machine.reg("LINK_CTRL") & D["LINK_CTRL_ENABLE"]


def test_a_dead_chip_is_lost(pair: Fabric) -> None:
    pair.machines[1].inject("DEAD", 1)
    fault = pair.queues[0].run_fault(program(store(1, 4 << 20, 0x100000, 64)))
    assert link_fault(fault)[0] in ("LOST", "REFUSED")
    assert pair.machines[1].get(4 << 20, 64) == bytes(64)


def test_the_state_in_words(pair: Fabric) -> None:
    assert "link: chip 1, enabled, context 0, accepts 0x0003" in pair.machines[1].describe()
    pair.inject(0, XP, DOWN, 1)
    words = pair.describe()
    assert "fabric: 2 x 1" in words and "chip 1: enabled" in words
    assert "x+ to 1: down" in words and "x- to 1: up" in words
