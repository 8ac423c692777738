# SPDX-License-Identifier: MIT
"""Two fabrics joined by a byte stream, as two processes are, and streams that lie."""

from __future__ import annotations

import ctypes
import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from asm import ins, program
from asm import remote_store as store
from fabric import (
    CORRUPT,
    DOWN,
    XM,
    XP,
    Fabric,
    Stream,
    counter,
    link_fault,
    start,
    wait_begun,
    wait_fault,
)
from machine import D, Machine
from test_link_collectives import exchange

OpenFabric = Callable[[str], Fabric]
MAGIC, HELLO, STATE, PACKET, ANSWER = 0x4B4C5456, 1, 2, 3, 4


@pytest.fixture
def open_fabric(library: ctypes.CDLL) -> Iterator[OpenFabric]:
    with ExitStack() as stack:
        yield lambda shape: stack.enter_context(Fabric(library, shape))


def wait_peers(machine: Machine, mask: int) -> None:
    machine.wait_for(lambda: machine.reg("LINK_PEERS") == mask, f"peers {mask:#x}")


def crc32c(data: bytes) -> int:
    """Bit by bit, from the definition: reflected polynomial 0x1edc6f41."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def frame(kind: int, *, data: bytes = b"", crc: int | None = None, **fields: int) -> bytes:
    names = ("magic", "src", "dst", "counter", "seq", "len", "va", "add", "arg")
    defaults = dict.fromkeys(names, 0) | {"magic": MAGIC, "len": len(data)}
    f = defaults | fields
    head = struct.pack(
        "<I4BIIQQI",
        *(f["magic"], kind, f["src"], f["dst"], f["counter"]),
        *(f["seq"], f["len"], f["va"], f["add"], f["arg"]),
    )
    check = crc32c(head + bytes(4) + data) if crc is None else crc
    return head + struct.pack("<I", check) + data


@pytest.mark.parametrize("most", [1 << 16, 57])
def test_stores_and_signals_cross(open_fabric: OpenFabric, most: int) -> None:
    """Whole, in order, also when the stream comes in small pieces."""
    a, b = open_fabric("2"), open_fabric("2")
    source, sink = a.add(0), b.add(1)
    size = 300_000 if most > 1000 else 20_000
    data = os.urandom(size)
    src, dst = source.place(data), 4 << 20
    with Stream(a, b, most) as stream:
        wait_peers(source, 3)
        a.queues[0].run(program(store(1, dst + 100, src, size, 3)))
        # The instruction is complete when the other side has said that all is written.
        assert sink.get(dst + 100, size) == data and counter(sink, 3) == 1
        fault = a.queues[0].run_fault(program(store(1, 1 << 30, src, 64)))
        assert link_fault(fault) == ("UNMAPPED", 1, 1 << 30)
        assert sink.reg("LINK_RX_REASON") == 0 << 8 | 7
        assert not stream.errors


def test_a_counter_never_counts_a_store_that_failed(open_fabric: OpenFabric) -> None:
    a, b = open_fabric("2"), open_fabric("2")
    source, sink = a.add(0), b.add(1)
    sink.put(sink.pte_at(0, 4 << 20, 1), bytes(8))  # the first 2 MiB of what is stored
    sink.write(D["REG_TLB_INVALIDATE"], 0)
    with Stream(a, b):
        wait_peers(source, 3)
        at = (6 << 20) - 4096
        fault = a.queues[0].run_fault(program(store(1, at, 0x100000, 16384, 1)))
        assert link_fault(fault) == ("UNMAPPED", 1, at)
    assert counter(sink, 1) == 0


def test_a_torus_over_two_processes(open_fabric: OpenFabric) -> None:
    """Eight chips each; an all-gather around all sixteen crosses the stream twice a lap."""
    a, b = open_fabric("4x4"), open_fabric("4x4")
    block, out = 12 << 10, 4 << 20
    for chip in range(16):
        (a if chip < 8 else b).add(chip, seed=chip)
    machines = a.machines | b.machines
    blocks = [os.urandom(block) for _ in range(16)]
    for chip, machine in machines.items():
        machine.put(out + chip * block, blocks[chip])
    with Stream(a, b) as stream:
        for machine in machines.values():
            wait_peers(machine, 0xFFFF)
        fences = {}
        for chip in range(16):
            queue = (a if chip < 8 else b).queues[chip]
            fences[chip] = queue, start(queue, exchange(chip, 16, out, block))
        for queue, fence in fences.values():
            queue.wait(fence)
        assert not stream.errors
    for machine in machines.values():
        assert machine.get(out, 16 * block) == b"".join(blocks)


def test_cables_of_the_other_process(open_fabric: OpenFabric) -> None:
    """What is down there is avoided here; what is corrupted there is repaired there."""
    a, b = open_fabric("4"), open_fabric("4")
    for chip in range(4):
        (a if chip < 2 else b).add(chip)
    signal = program(ins("REMOTE_SIGNAL", chip=3, counter=1, add=1))
    with Stream(a, b):
        wait_peers(a.machines[1], 15)
        b.inject(2, XP, CORRUPT, 2)  # from 1 the way to 3 is 1, 2, 3
        a.queues[1].run(signal)
        assert b.machines[2].read(D["REG_LINK_CRC_ERRORS"] + 8 * XP, 8) == 2
        assert b.machines[2].read(D["REG_LINK_TX_PACKETS"] + 8 * XP, 8) == 1
        b.inject(3, XM, DOWN, 1)
        a.machines[0].wait_for(lambda: "chip 3" in a.describe(), "words")
        a.machines[0].wait_for(lambda: "x- to 2: down" in a.describe(), "told")
        a.queues[1].run(signal)
        assert a.machines[0].read(D["REG_LINK_TX_PACKETS"] + 8 * XM, 8) == 1, "by 0"
        assert counter(b.machines[3], 1) == 2


def test_the_loss_of_the_connection_ends_waits_and_stores(open_fabric: OpenFabric) -> None:
    """And a new connection brings the link up again, for programs that begin then."""
    a, b = open_fabric("2"), open_fabric("2")
    source = a.add(0)
    b.add(1)
    waits = program(ins("LINK_WAIT", counter=1, value=1, chip=1))
    stores = store(1, 4 << 20, 0x100000, 64 << 10) + ins("JMP", target=0)
    for code in (waits, stores):
        with Stream(a, b) as stream:
            wait_peers(source, 3)
            start(a.queues[0], code)
            wait_begun(a.queues[0])
            stream.cut()
            assert link_fault(wait_fault(a.queues[0]))[:2] == ("LOST", 1)
            source.wait_for(lambda: source.reg("LINK_ERR") == D["LINK_ERR_PEER_LOST"], "error")
            source.write(D["REG_LINK_ERR"], D["LINK_ERR_PEER_LOST"])
            assert source.reg("LINK_PEERS") == 1
            a.queues[0].restart()
    with Stream(a, b):
        wait_peers(source, 3)
        a.queues[0].run(program(ins("REMOTE_SIGNAL", chip=1, counter=1, add=1)))
    assert counter(b.machines[1], 1) == 1


def test_a_stop_does_not_wait_for_answers(open_fabric: OpenFabric) -> None:
    """The other side is there and does not read: resets end what is sent to it."""
    a = open_fabric("2")
    source = a.add(0)
    a.connected()
    assert a.input(frame(HELLO, src=2, dst=1, arg=1)) is None
    assert a.input(frame(STATE, src=1, arg=3, va=0xFFFF << 32)) is None
    wait_peers(source, 3)
    start(a.queues[0], program(store(1, 0, 0x100000, 1 << 19, 1)))
    source.wait_for(lambda: len(a.output(64)) == 64, "packets")
    wait_begun(a.queues[0])
    a.queues[0].restart()
    a.queues[0].run(program())
    assert len(a.output(1 << 20)) <= 64 * (4096 + 40) + 200, "at most a window"
    a.disconnected()


def test_a_parked_chip_stalls_the_stream(open_fabric: OpenFabric) -> None:
    a, b = open_fabric("2"), open_fabric("2")
    source, sink = a.add(0), b.add(1)
    with Stream(a, b) as stream:
        wait_peers(source, 3)
        sink.quiesce()
        fence = start(a.queues[0], program(store(1, 4 << 20, 0x100000, 1 << 18, 1)))
        source.wait_for(lambda: b.room() == 0, "stalled")
        assert a.queues[0].fence < fence and sink.reg("LINK_RX_PACKETS", 8) == 0
        sink.resume()
        a.queues[0].wait(fence)
        assert counter(sink, 1) == 1 and not stream.errors


# --- streams that lie ---


@pytest.fixture
def attacked(open_fabric: OpenFabric) -> Fabric:
    """Chip 0 is here; the test is the other side."""
    fabric = open_fabric("2")
    fabric.add(0)
    fabric.connected()
    return fabric


HELLO_OK = frame(HELLO, src=2, dst=1, arg=1)
CHIP_1 = frame(STATE, src=1, arg=3, va=0xFFFF << 32)
GOOD = HELLO_OK + CHIP_1


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(40), "not the link's protocol"),
        (frame(HELLO, src=2, dst=1, arg=2), "another version"),
        (frame(HELLO, src=4, dst=1, arg=1), "another shape"),
        (frame(HELLO, src=2, dst=1, arg=1, crc=1), "wrong checksum"),
        (frame(HELLO, src=2, dst=1, arg=1, len=4097), "not the link's protocol"),
        (CHIP_1, "does not begin with the link's greeting"),
        (HELLO_OK + HELLO_OK, "or repeats it"),
        (HELLO_OK + frame(9), "no known type"),
        (HELLO_OK + frame(0), "no known type"),
        (HELLO_OK + frame(STATE, src=2, arg=1), "out of its range"),
        (HELLO_OK + frame(STATE, src=1, arg=4), "out of its range"),
        (HELLO_OK + frame(STATE, src=1, arg=1, va=1 << 48), "out of its range"),
        (HELLO_OK + frame(STATE, src=1, arg=1, add=16), "out of its range"),
        (HELLO_OK + frame(STATE, src=1, arg=1, data=b"1234"), "length"),
        (HELLO_OK + frame(STATE, src=0, arg=1), "the same chip"),
        (HELLO_OK + frame(PACKET, src=1, dst=0), "not from a chip there"),
        (GOOD + frame(PACKET, src=0, dst=0), "not from a chip there"),
        (GOOD + frame(PACKET, src=1, dst=1), "not from a chip there"),
        (GOOD + frame(PACKET, src=1, dst=2), "not from a chip there"),
        (GOOD + frame(PACKET, src=1, dst=0, seq=1), "out of order"),
        (GOOD + frame(PACKET, src=1, dst=0, counter=64), "out of its range"),
        (GOOD + frame(PACKET, src=1, dst=0, va=4095, data=b"12"), "out of its range"),
        (GOOD + frame(ANSWER), "an answer is to no packet"),
    ],
)
def test_rules_that_are_broken_end_the_connection(
    attacked: Fabric, data: bytes, error: str
) -> None:
    got = attacked.input(data)
    assert got is not None and error in got
    attacked.disconnected()
    attacked.connected()
    assert attacked.input(GOOD) is None, "the next one is as good as new"


@pytest.mark.parametrize(
    ("answer", "error"),
    [({"seq": 1}, "an answer is to no packet"), ({"arg": 12}, "has no meaning")],
)
def test_answers_are_checked(attacked: Fabric, answer: dict[str, int], error: str) -> None:
    attacked.input(GOOD)
    start(attacked.queues[0], program(ins("REMOTE_SIGNAL", chip=1, counter=1, add=1)))
    machine = attacked.machines[0]
    sent = bytearray()

    def arrived() -> bool:
        sent.extend(attacked.output())
        return bytes([PACKET, 0, 1, 1]) in sent

    machine.wait_for(arrived, "sent")
    assert error in str(attacked.input(frame(ANSWER, **answer)))
    attacked.disconnected()
    assert link_fault(wait_fault(attacked.queues[0]))[0] == "LOST"


def test_a_chip_is_announced_before_its_packets(attacked: Fabric) -> None:
    """However late the output is taken."""
    attacked.input(GOOD)
    start(attacked.queues[0], program(ins("REMOTE_SIGNAL", chip=1, counter=1, add=1)))
    wait_begun(attacked.queues[0])
    machine = attacked.machines[0]
    machine.wait_for(lambda: attacked.queues[0].state == "PREEMPTED", "it waits for the answer")
    out = attacked.output()
    kinds = [(out[at + 4], out[at + 5]) for at in range(0, len(out), 40)]
    assert kinds == [(HELLO, 2), (STATE, 0), (PACKET, 0)]
    assert attacked.input(frame(ANSWER)) is None
    attacked.queues[0].wait(1)


def test_only_the_chip_itself_lets_packets_in(attacked: Fabric) -> None:
    """A well-formed packet is refused by a link that is not enabled, and answered so."""
    machine = attacked.machines[0]
    machine.write(D["REG_LINK_CTRL"], 0)
    attacked.output()
    assert attacked.input(GOOD + frame(PACKET, src=1, dst=0, va=4 << 20, data=b"\xff" * 64)) is None
    assert machine.get(4 << 20, 64) == bytes(64)
    assert frame(ANSWER, arg=6) in attacked.output()


@pytest.mark.parametrize("seed", range(4))
def test_noise_is_survived(attacked: Fabric, seed: int) -> None:
    """Random bytes, random changes of good streams, in random pieces; no packet gets in."""
    rng = random.Random(seed)
    machine = attacked.machines[0]
    machine.write(D["REG_LINK_ACCEPT"], 0)
    packet = frame(PACKET, src=1, dst=0, va=4 << 20, data=b"\xff" * 256)
    for _ in range(300):
        stream = bytearray(GOOD + packet + frame(ANSWER))
        for _ in range(rng.randrange(4)):
            stream[rng.randrange(len(stream))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            stream = bytearray(rng.randbytes(200))
        while stream:
            size = min(rng.randrange(1, 400), attacked.room())
            piece = bytes(stream[:size])
            del stream[:size]
            if attacked.input(piece) is not None:
                break
        attacked.output()
        attacked.disconnected()
        attacked.connected()
    assert machine.get(4 << 20, 256) == bytes(256)
    machine.write(D["REG_LINK_ACCEPT"], 3)
    assert attacked.input(GOOD) is None
    wait_peers(machine, 3)
