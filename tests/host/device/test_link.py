# SPDX-License-Identifier: MIT
"""The inter-chip link of one process: who may write where, routes, order, counters."""

from __future__ import annotations

import ctypes
import os
import random
import struct

import pytest
from asm import R, ins, pc, program
from fabric import (
    DOWN,
    SLOW,
    XM,
    XP,
    YM,
    YP,
    Fabric,
    OpenFabric,
    counter,
    enable_link,
    link_fault,
    start,
    wait_begun,
)
from machine import EXEC, HBM, READ, SYSTEM_BASE, WRITE, D, Machine, Queue


def store(chip: int | R, dst: int | R, src: int | R, size: int, **more: object) -> bytes:
    operands: dict[str, object] = {
        "rows": 1,
        "row_bytes": size,
        "dst_stride": 0,
        "src_stride": 0,
        "counter": 0,
        "mode": "GLOBAL",
    }
    return ins("REMOTE_STORE", chip=chip, dst=dst, src=src, **(operands | more))  # type: ignore[arg-type]


# --- shapes and registers ---


@pytest.mark.parametrize(
    "shape", ["", "0", "17", "x4", "4x", "4x5", "4x4x1", "-1", "4 ", "99999999999999999999", "1x0"]
)
def test_bad_shapes_are_refused(library: ctypes.CDLL, shape: str) -> None:
    with pytest.raises(ValueError, match="the shape is X or XxY"):
        Fabric(library, shape)


def test_a_chip_has_one_machine(open_fabric: OpenFabric) -> None:
    fabric = open_fabric("2")
    fabric.add(0)
    with pytest.raises(ValueError, match="that one already"):
        fabric.add(0)
    with pytest.raises(ValueError, match="less than the fabric has chips"):
        fabric.add(2)
    fabric.machines[0].close()
    fabric.add(0)


def test_identity_and_neighbours(open_fabric: OpenFabric) -> None:
    """Chip 6 of 4 x 4 lies at (2, 1)."""
    fabric = open_fabric("4x4")
    machine = fabric.add(6, ready=False)
    assert machine.reg("LINK_ID") == D["LINK_ID_PRESENT"] | 1 << 16 | 2 << 8 | 6
    assert machine.reg("LINK_SHAPE") == 4 << 8 | 4
    assert machine.reg("LINK_NEIGHBOURS") == 2 << 24 | 10 << 16 | 5 << 8 | 7
    assert machine.reg("LINK_STATUS") == 0, "nobody is at the other ends"
    fabric.add(7, ready=False)
    fabric.add(2, ready=False)
    assert machine.reg("LINK_STATUS") == D["LINK_STATUS_XP_UP"] | D["LINK_STATUS_YM_UP"]
    assert machine.reg("LINK_PEERS") == 0
    enable_link(fabric.machines[7], accept=1 << 6)
    enable_link(fabric.machines[2], accept=1 << 7)
    assert machine.reg("LINK_PEERS") == 1 << 7, "enabled, and accepts this chip"


def test_a_machine_without_a_fabric_has_no_link(machine: Machine, queue: Queue) -> None:
    for name in ("ID", "SHAPE", "NEIGHBOURS", "STATUS", "PEERS", "CTRL"):
        assert machine.reg(f"LINK_{name}") == 0
    machine.write(D["REG_LINK_CTRL"], 1)
    assert machine.reg("LINK_CTRL") == 0 and machine.errors
    fault = queue.run_fault(program(ins("REMOTE_SIGNAL", chip=0, counter=1, add=1)))
    assert link_fault(fault) == ("DISABLED", 0, 0)


def test_registers_of_the_receiver(pair: Fabric) -> None:
    machine = pair.machines[0]
    machine.write(D["REG_LINK_CONTEXT"], 3)
    assert machine.reg("LINK_CONTEXT") == 0, "fixed while enabled"
    machine.write(D["REG_LINK_CTRL"], 0)
    machine.write(D["REG_LINK_CONTEXT"], 64)
    assert machine.reg("LINK_CONTEXT") == 0
    machine.write(D["REG_LINK_CONTEXT"], 63)
    assert machine.reg("LINK_CONTEXT") == 63
    machine.write(D["REG_LINK_ACCEPT"], 0xFFFFFFFF)
    assert machine.reg("LINK_ACCEPT") == 3, "bits of chips that the fabric has"
    machine.write(D["REG_LINK_COUNTER"] + 8, 1 << 40 | 5, 8)
    assert counter(machine, 1) == 1 << 40 | 5
    machine.write(D["REG_LINK_COUNTER"], 9, 8)
    assert counter(machine, 0) == 0
    machine.write(D["REG_CTRL"], D["CTRL_RESET"])
    machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_RESETTING"], "reset")
    assert [machine.reg(f"LINK_{n}") for n in ("CONTEXT", "ACCEPT", "CTRL", "ERR")] == [0] * 4
    assert counter(machine, 1) == 0


# --- stores, signals, waits ---


@pytest.mark.parametrize("mode", ["VMEM", "GLOBAL"])
@pytest.mark.parametrize("chip", [0, 1])
def test_rows_are_stored(pair: Fabric, mode: str, chip: int) -> None:
    """Strided rows across pages, to the neighbour or to the chip itself."""
    source, sink = pair.machines[0], pair.machines[chip]
    rows, size, stride, pitch = 5, 5000, 6004, 5120
    data = os.urandom(rows * pitch)
    src = source.place(data)
    dst = sink.alloc(rows * stride + 4096) + 1236
    sink.put(dst - 16, b"\xee" * (rows * stride + 32))
    body = []
    if mode == "VMEM":
        body = [
            ins("DMA_LOAD", dst=0, src=src, rows=1, row_bytes=len(data), dst_stride=0, src_stride=0)
        ]
        body += [ins("SYNC")]
    body += [
        store(
            chip,
            dst,
            0 if mode == "VMEM" else src,
            size,
            rows=rows,
            dst_stride=stride,
            src_stride=pitch,
            counter=3,
            mode=mode,
        )
    ]
    pair.queues[0].run(program(*body))
    assert counter(sink, 3) == 1
    expected = bytearray(b"\xee" * (rows * stride + 32))
    for row in range(rows):
        at = 16 + row * stride
        expected[at : at + size] = data[row * pitch : row * pitch + size]
    assert sink.get(dst - 16, len(expected)) == bytes(expected)
    assert sink.reg("LINK_RX_BYTES", 8) == rows * size
    assert sum(length for _, length in sink.dirty) == rows * size, "for dirty tracking"


def test_nothing_to_store_still_signals(pair: Fabric) -> None:
    pair.queues[0].run(
        program(
            store(1, 0, 0, 0, rows=7, counter=2),
            store(1, 0, 0, 64, rows=0, counter=2),
            store(1, 0, 0, 0, rows=0),
        )
    )
    assert counter(pair.machines[1], 2) == 2
    assert pair.machines[1].reg("LINK_RX_PACKETS", 8) == 2


def test_signals_add_and_ld_reads(pair: Fabric) -> None:
    """Counters are 64 bits, persist across programs, wrap."""
    machine = pair.machines[1]
    pair.queues[0].run(program(ins("REMOTE_SIGNAL", chip=1, counter=63, add=0xFFFFFFFF)))
    pair.queues[0].run(program(ins("REMOTE_SIGNAL", chip=1, counter=63, add=7)))
    assert counter(machine, 63) == 0xFFFFFFFF + 7
    out = machine.alloc(64)
    pair.queues[1].run(
        program(ins("LINK_LD", rd=9, counter=63), ins("ST", addr=out, value=R(9), mode="U64"))
    )
    assert machine.word(out) == 0xFFFFFFFF + 7


def test_system_memory_is_stored_to(pair: Fabric) -> None:
    source, sink = pair.machines.values()
    sink.map(0, 0x8000_0000, SYSTEM_BASE + (1 << 20), 8192, hbm=False)
    data = os.urandom(8000)
    pair.queues[0].run(program(store(1, 0x8000_0000 + 100, source.place(data), 8000)))
    assert bytes(sink.system[(1 << 20) + 100 :][:8000]) == data


def test_a_program_waits_for_another_chip(pair: Fabric) -> None:
    """Ping-pong: each side goes on only when the other one has signalled."""
    rounds, fences = 200, {}
    for chip in (0, 1):
        # s9 counts; chip 0 signals first, chip 1 answers.
        signal = ins("REMOTE_SIGNAL", chip=1 - chip, counter=1, add=1)
        wait = ins("LINK_WAIT", counter=1, value=R(9, 1), chip=1 - chip)
        body = [signal, wait] if chip == 0 else [wait, signal]
        code = program(
            ins("LI", rd=9, value=0),
            *body,
            ins("ADD", rd=9, a=R(9), b=1),
            ins("BLT", a=R(9), b=rounds, target=pc(1)),
        )
        fences[chip] = start(pair.queues[chip], code)
    for chip, fence in fences.items():
        pair.queues[chip].wait(fence)
        assert counter(pair.machines[chip], 1) == rounds


def test_a_wait_blocks_until_the_value(pair: Fabric) -> None:
    fence = start(pair.queues[1], program(ins("LINK_WAIT", counter=5, value=3, chip=0)))
    for _ in range(2):
        pair.queues[0].run(program(ins("REMOTE_SIGNAL", chip=1, counter=5, add=1)))
    wait_begun(pair.queues[1])
    assert pair.queues[1].fence < fence
    pair.queues[0].run(program(ins("REMOTE_SIGNAL", chip=1, counter=5, add=1)))
    pair.queues[1].wait(fence)


def test_a_waiting_program_stops(pair: Fabric) -> None:
    """By a reset of its queue, of the device, and by the end of the machine."""
    queue, machine = pair.queues[1], pair.machines[1]
    code = program(ins("LINK_WAIT", counter=5, value=3, chip=0))
    start(queue, code)
    wait_begun(queue)
    queue.restart()
    queue.run(program())
    start(queue, code)
    wait_begun(queue)
    machine.write(D["REG_CTRL"], D["CTRL_RESET"])
    machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_RESETTING"], "reset")
    machine.identity(0)
    machine.enable()
    enable_link(machine)
    queue = Queue(machine, 1)
    start(queue, code)
    wait_begun(queue)
    machine.close()


def test_a_waiting_program_lets_itself_be_parked(pair: Fabric) -> None:
    fence = start(pair.queues[1], program(ins("LINK_WAIT", counter=5, value=1, chip=0)))
    wait_begun(pair.queues[1])
    pair.machines[1].quiesce()
    # What is sent to a parked chip waits for it, and so does its sender, who may be parked too.
    sender = start(pair.queues[0], program(ins("REMOTE_SIGNAL", chip=1, counter=5, add=1)))
    wait_begun(pair.queues[0])
    pair.machines[0].quiesce()
    assert counter(pair.machines[1], 5) == 0 and pair.queues[0].fence < sender
    pair.machines[0].resume()
    pair.machines[1].resume()
    pair.queues[0].wait(sender)
    pair.queues[1].wait(fence)


def test_packets_for_a_sleeping_chip_wait(pair: Fabric) -> None:
    """D3hot: its memory stays as it is; a sender can still be stopped."""
    sink = pair.machines[1]
    sink.sleep(True)
    sent = start(pair.queues[0], program(store(1, 4 << 20, 0x100000, 64, counter=1)))
    wait_begun(pair.queues[0])
    assert sink.reg("LINK_RX_PACKETS", 8) == 0 and pair.queues[0].fence < sent
    pair.queues[0].restart()
    sent = start(pair.queues[0], program(store(1, 4 << 20, 0x100000, 64, counter=1)))
    sink.sleep(False)
    pair.queues[0].wait(sent)
    assert counter(sink, 1) == 1


def test_an_engine_goes_on_beside_a_slow_store(pair: Fabric) -> None:
    """LINK is asynchronous: an addition is done before a store that came first."""
    machine = pair.machines[0]
    out = machine.alloc(64)
    code = program(
        store(1, 0x100000, 0, 4096),
        ins("ST", addr=out, value=1, mode="U64"),
        ins("LINK_WAIT", counter=1, value=1, chip=0),  # released by the test
    )
    pair.inject(0, XP, SLOW, 1_000_000_000)
    fence = start(pair.queues[0], code)
    machine.wait_for(lambda: machine.word(out) == 1, "the store beside")
    assert pair.machines[1].reg("LINK_RX_PACKETS", 8) <= 1 and pair.queues[0].fence < fence
    machine.write(D["REG_LINK_COUNTER"] + 8, 1, 8)
    pair.queues[0].wait(fence)


def test_without_a_wait_a_store_races_and_seeds_show_it(library: ctypes.CDLL) -> None:
    """VMEM that is overwritten while a store reads it: some legal order shows the new bytes."""
    seen = set()
    for seed in range(1, 9):
        with Fabric(library, "2") as fabric:
            source, sink = fabric.add(0, seed=seed), fabric.add(1)
            old, new = source.place(b"\x11" * 4096), source.place(b"\x22" * 4096)
            dst = sink.alloc(4096)
            dense = {"rows": 1, "row_bytes": 4096, "dst_stride": 0, "src_stride": 0}
            fabric.queues[0].run(
                program(
                    ins("DMA_LOAD", dst=0, src=old, **dense, signal=1),
                    store(1, dst, 0, 4096, mode="VMEM", wait=(1, 1)),
                    ins("DMA_LOAD", dst=0, src=new, **dense),
                )
            )
            seen.add(b"\x22" in sink.get(dst, 4096))
    assert seen == {True, False}


# --- isolation ---


def test_a_disabled_link_refuses(pair: Fabric) -> None:
    pair.machines[1].write(D["REG_LINK_CTRL"], 0)
    dst = pair.machines[1].alloc(4096)
    fault = pair.queues[0].run_fault(program(ins("NOP"), store(1, dst, 0, 64, counter=1)))
    assert link_fault(fault) == ("REFUSED", 1, dst) and fault["pc"] == pc(1)
    machine = pair.machines[1]
    assert machine.reg("LINK_RX_REFUSED", 8) == 1 and machine.reg("LINK_RX_PACKETS", 8) == 0
    assert machine.reg("LINK_ERR") == 0, "not an error of the receiver"
    assert counter(machine, 1) == 0 and machine.get(dst, 64) == bytes(64)


def test_a_chip_accepts_only_the_named(open_fabric: OpenFabric) -> None:
    fabric = open_fabric("4")
    fabric.add_all()
    enable_link(fabric.machines[0], accept=1 << 2)
    fabric.queues[2].run(program(ins("REMOTE_SIGNAL", chip=0, counter=1, add=1)))
    fault = fabric.queues[3].run_fault(program(ins("REMOTE_SIGNAL", chip=0, counter=1, add=1)))
    assert link_fault(fault) == ("REFUSED", 0, 0)
    assert counter(fabric.machines[0], 1) == 1
    assert fabric.machines[0].reg("LINK_RX_REASON") == 3 << 8 | 6


def test_the_link_belongs_to_one_context(pair: Fabric) -> None:
    machine = pair.machines[0]
    machine.identity(5)
    other = Queue(machine, 1, context=5)
    for instruction in (
        ins("REMOTE_SIGNAL", chip=1, counter=1, add=1),
        ins("LINK_LD", rd=9, counter=1),
        ins("LINK_WAIT", counter=1, value=0, chip=1),
        store(1, 0, 0, 4),
    ):
        assert link_fault(other.run_fault(program(instruction)))[0] == "DISABLED"
        other.restart()
    assert counter(pair.machines[1], 1) == 0


def test_only_mapped_and_writable_memory_of_the_context(pair: Fabric) -> None:
    machine = pair.machines[1]
    machine.context(7)
    page = machine.alloc(4 * 4096)
    machine.map(7, 0x10000, page, 4096, WRITE)
    machine.map(7, 0x11000, page + 4096, 4096, READ | EXEC)
    machine.put(machine.pte_at(7, 0x13000), struct.pack("<Q", page | 1 | WRITE | HBM | HBM_FAR))
    machine.map(7, 0x14000, 0x10, 4096, WRITE, hbm=False)
    enable_link(machine, context=7)
    cases = [
        (0x10FF0, "PROTECTION", 0x11000),
        (0x12000, "UNMAPPED", 0x12000),
        (0x13010, "BAD_PAGE_TABLE", 0x13010),
        (1 << 47, "UNMAPPED", 1 << 47),
    ]
    for errors, (va, reason, where) in enumerate(cases, 1):
        code = program(store(1, R(8), 0, 64, counter=1))
        payload = pair.queues[0].run_payload(code, (va,))
        assert link_fault(pair.queues[0].expect_fault("RUN", payload)) == (reason, 1, where)
        pair.queues[0].restart()
        machine.wait_irqs(0, errors)
        assert machine.reg("LINK_ERR") == D["LINK_ERR_RX_FAULT"]
        assert machine.reg("LINK_RX_ADDR", 8) == where
        machine.write(D["REG_LINK_ERR"], D["LINK_ERR_RX_FAULT"])
        assert machine.reg("LINK_ERR") == 0
    assert counter(machine, 1) == 0, "a store that failed does not signal"
    assert machine.reg("LINK_RX_REFUSED", 8) == len(cases)


HBM_FAR = 1 << 40  # an address bit beyond the end of HBM


def test_bus_errors_and_disabled_contexts_are_told(pair: Fabric) -> None:
    machine = pair.machines[1]
    machine.map(0, 0x8000_0000, 0x1000, 4096, hbm=False)  # no memory there
    fault = pair.queues[0].run_fault(program(store(1, 0x8000_0000, 0, 64)))
    assert link_fault(fault) == ("BUS", 1, 0x8000_0000)
    pair.queues[0].restart()
    machine.write(D["REG_CTX_ROOT"], 0, 8)
    fault = pair.queues[0].run_fault(program(store(1, 0x1000, 0, 64)))
    assert link_fault(fault) == ("BAD_CONTEXT", 1, 0x1000)


def test_bad_operands(pair: Fabric) -> None:
    cases = [
        (store(1, 0, 0, 6), "BAD_OPERAND", 6),
        (store(1, 0, 0, 64, counter=64), "BAD_OPERAND", 64),
        (store(1, 0, 0, 64, rows=2, dst_stride=32), "BAD_OPERAND", 0),
        (store(1, 0, 2, 64, mode="VMEM"), "VMEM_RANGE", 2),
        (store(1, 0, 0x2000000 - 32, 64, mode="VMEM"), "VMEM_RANGE", 0x2000000 - 32),
        (ins("REMOTE_SIGNAL", chip=1, counter=0, add=1), "BAD_OPERAND", 0),
        (ins("REMOTE_SIGNAL", chip=1, counter=64, add=1), "BAD_OPERAND", 64),
        (ins("LINK_WAIT", counter=64, value=0, chip=1), "BAD_OPERAND", 64),
        (ins("LINK_LD", rd=9, counter=0), "BAD_OPERAND", 0),
        (store(1, 0, 15 << 20 << 8, 64), "UNMAPPED", 15 << 28),  # the source, here
    ]
    for code, cause, addr in cases:
        fault = pair.queues[0].run_fault(program(code))
        assert (fault["cause"], fault["addr"]) == (cause, addr)
        pair.queues[0].restart()
    for code in (
        store(2, 0, 0, 4),
        ins("REMOTE_SIGNAL", chip=255, counter=1, add=1),
        ins("LINK_WAIT", counter=1, value=1, chip=2),
    ):
        assert link_fault(pair.queues[0].run_fault(program(code)))[0] == "NO_CHIP"
        pair.queues[0].restart()


# --- routes ---


def expected_route(x: int, y: int, src: int, dst: int) -> list[tuple[int, int]]:
    """(chip, direction) of each hop: along x, then along y, the shorter way, + when equal."""
    hops = []
    at = [src % x, src // x]
    for axis, size, plus in ((0, x, XP), (1, y, YP)):
        goal = (dst % x, dst // x)[axis]
        forward = (goal - at[axis]) % size
        step = 1 if forward <= size - forward else -1
        while at[axis] != goal:
            hops.append((at[1] * x + at[0], plus if step == 1 else plus + 1))
            at[axis] = (at[axis] + step) % size
    return hops


def sent(machine: Machine, direction: int) -> int:
    return machine.read(D["REG_LINK_TX_PACKETS"] + 8 * direction, 8)


@pytest.mark.parametrize("shape", ["5", "3x4", "4x4"])
def test_packets_take_the_route_of_the_torus(open_fabric: OpenFabric, shape: str) -> None:
    fabric = open_fabric(shape)
    machines = fabric.add_all()
    x, y = ([int(n) for n in shape.split("x")] + [1])[:2]
    before = {}
    for src in range(fabric.size):
        for dst in range(fabric.size):
            before = {(c, d): sent(machines[c], d) for c in range(fabric.size) for d in range(4)}
            fabric.queues[src].run(program(ins("REMOTE_SIGNAL", chip=dst, counter=1, add=1)))
            used = sorted(at for at, old in before.items() if sent(machines[at[0]], at[1]) > old)
            assert used == sorted(expected_route(x, y, src, dst)), (src, dst)


def test_a_cable_that_is_down_is_avoided_in_its_ring(open_fabric: OpenFabric) -> None:
    fabric = open_fabric("4x2")
    machines = fabric.add_all()
    assert fabric.inject(1, XM, DOWN, 1), "the cable 0-1, named by its other end"
    assert fabric.injected(0, XP, DOWN) == 1
    assert not machines[0].reg("LINK_STATUS") & D["LINK_STATUS_XP_UP"]
    assert not machines[1].reg("LINK_STATUS") & D["LINK_STATUS_XM_UP"]
    fabric.queues[0].run(program(ins("REMOTE_SIGNAL", chip=1, counter=1, add=1)))
    assert [sent(machines[c], XM) for c in (0, 3, 2)] == [1, 1, 1], "the other way round"
    fabric.inject(2, XP, DOWN, 1)
    signal = program(ins("REMOTE_SIGNAL", chip=1, counter=1, add=1))
    assert link_fault(fabric.queues[0].run_fault(signal)) == ("NO_ROUTE", 1, 0)
    assert not machines[0].reg("LINK_PEERS") & 2 and machines[0].reg("LINK_PEERS") & 8
    fabric.queues[4].run(program(ins("REMOTE_SIGNAL", chip=5, counter=1, add=1)))
    fabric.inject(0, XP, DOWN, 0)
    fabric.queues[0].restart()
    fabric.queues[0].run(signal)
    assert counter(machines[1], 1) == 2


def test_routes_lead_around_a_chip_that_is_gone(open_fabric: OpenFabric) -> None:
    fabric = open_fabric("4")
    machines = fabric.add_all()
    machines[1].close()
    fabric.queues[0].run(program(ins("REMOTE_SIGNAL", chip=2, counter=1, add=1)))
    assert [sent(machines[c], XM) for c in (0, 3)] == [1, 1]
    machines[3].close()
    fault = fabric.queues[0].run_fault(program(ins("REMOTE_SIGNAL", chip=2, counter=1, add=1)))
    assert link_fault(fault)[0] == "NO_ROUTE"
    assert YM == 3


# --- traffic ---


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_traffic(open_fabric: OpenFabric, seed: int) -> None:
    """16 chips store to random places of their own on random chips, all at once."""
    rng = random.Random(seed)
    fabric = open_fabric("4x4")
    machines = fabric.add_all(seed=seed)
    area, slot = 4 << 20, 64 << 10  # beyond all that is placed
    expected = [bytearray(16 * slot) for _ in machines]
    signals = [0] * 16
    programs = {}
    for chip, machine in enumerate(machines):
        data = rng.randbytes(256 << 10)
        src = machine.place(data)
        body = []
        for _ in range(24):
            target, size = rng.randrange(16), 4 * rng.randrange(1, 3000)
            at, origin = rng.randrange(slot - size), rng.randrange(len(data) - size)
            rows = rng.choice([1, 1, 2])
            if at + rows * (size + 8) > slot or origin + rows * size > len(data):
                rows = 1
            dst = area + chip * slot + at
            body.append(
                store(
                    target,
                    dst,
                    src + origin,
                    size,
                    rows=rows,
                    dst_stride=size + 8,
                    src_stride=size,
                    counter=1,
                )
            )
            for row in range(rows):
                to = chip * slot + at + row * (size + 8)
                expected[target][to : to + size] = data[origin + row * size :][:size]
            signals[target] += 1
        programs[chip] = (program(*body), ())
    fabric.run_all(programs)
    for chip, machine in enumerate(machines):
        assert counter(machine, 1) == signals[chip]
        assert machine.get(area, 16 * slot) == bytes(expected[chip]), chip
