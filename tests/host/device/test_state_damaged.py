# SPDX-License-Identifier: MIT
"""States that somebody damaged or made up: refused with a reason, or harmless. Most worth
with the sanitisers of qemu-device/README.md. VTPU_HAMMER_SEED makes other ones."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable

import gated
import pytest
from asm import ins, program
from machine import SYSTEM_BASE, D, Machine, Queue
from vtpu_compiler import hw

SEED = int(os.environ.get("VTPU_HAMMER_SEED", "1"))
ROUNDS = int(os.environ.get("VTPU_HAMMER_ROUNDS", "6000"))
GUARD = 64 << 10
HBM_BYTES = 16 << 20
AT, CODE = 0x400000, 0x300000
HEADER = struct.Struct("<4IQ")
PART = struct.Struct("<2IQ")


@pytest.fixture
def state(open_machine: Callable[..., Machine]) -> bytes:
    """A program at a gate with work in its engines, a held WAIT, a COPY half done, a fault."""
    machine = open_machine(hbm_bytes=HBM_BYTES)
    machine.identity()
    machine.context(1)
    machine.map(1, 0, SYSTEM_BASE, 4 << 20, hbm=False)
    machine.map(1, 0x40000000, 0x600000, 4 << 20)
    machine.enable()
    Queue(machine, 1).run_fault(program(ins("TRAP", code=7)))
    held = Queue(machine, 2)
    held.push("WAIT", struct.pack("<QQ", AT, (1 << 64) - 1))
    held.ring_doorbell()
    copying = Queue(machine, 3, context=1)
    copying.push("COPY", struct.pack("<QQQ", 0x40000000, 0, 4 << 20))

    def park(kind: str, addr: int, size: int) -> None:
        if size > 64:
            machine.park()

    machine.on_dma = park
    copying.ring_doorbell()
    machine.quiesce()
    half = machine.save()
    machine.on_dma = None
    # A higher priority goes first: the copy stays where it is.
    other = open_machine(hbm_bytes=HBM_BYTES)
    other.quiesce()
    other.hbm[:] = machine.hbm
    other.system[:] = machine.system
    assert other.load(half) == ""
    gated_queue = Queue(other, 4, priority=2)
    other.put(AT, gated.data())
    code = gated.code(AT)
    other.put(CODE, code)
    gated_queue.push("RUN", struct.pack("<QIIQI", CODE, len(code), 0, 0, 0))
    gated_queue.ring_doorbell()
    other.resume()
    other.wait_for(lambda: other.word(gated.progress(AT)) == 1, "the gate")
    other.quiesce()
    state = other.save()
    assert other.load(state) == "" and other.save() == state
    return state


def _parts(state: bytes) -> list[tuple[int, int, int]]:
    """Where each part's header, contents and end are."""
    at, parts = HEADER.size, []
    while at < len(state):
        begin = at + PART.size
        end = begin + PART.unpack_from(state, at)[2]
        parts.append((at, begin, end))
        at = end
    assert at == len(state)
    return parts


class _Victim:
    """A machine that lives on whatever it is given."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.quiesce()

    def feed(self, state: bytes) -> str:
        """Loads it, lets what was accepted run a while, and resets. Returns the error."""
        machine = self.machine
        error = machine.load(state)
        if error:
            states = {machine.read(_queue_register(q, "QSTATUS")) for q in range(hw.NUM_QUEUES)}
            assert states == {hw.QUEUE_STATE["DISABLED"]}, "refused, and not reset"
        else:
            machine.enable()
            machine.resume()
            for _ in range(20):  # a while
                machine.describe()
            machine.quiesce()
            assert machine.save(), "accepted, but cannot be saved again"
        machine.resume()
        machine.inject("RESET_STUCK", 0)
        machine.inject("DEAD", 0)
        machine.reset()
        machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_RESETTING"], "reset")
        machine.quiesce()
        machine.check_guard()
        return error


def _queue_register(queue: int, name: str) -> int:
    return D[f"REG_Q_{name}"] + queue * D["QUEUE_STRIDE"]


@pytest.fixture
def victim(open_machine: Callable[..., Machine]) -> _Victim:
    return _Victim(open_machine(hbm_bytes=HBM_BYTES, guard=GUARD))


def test_the_whole_is_accepted_and_any_less_or_more_is_not(state: bytes, victim: _Victim) -> None:
    assert victim.feed(state) == ""
    rng = random.Random(SEED)
    cuts = {0, 1, HEADER.size, len(state) - 1} | {rng.randrange(len(state)) for _ in range(100)}
    for cut in sorted(cuts):
        assert victim.feed(state[:cut]) != "", cut
    assert victim.feed(state + b"\0") != ""
    assert victim.feed(state) == ""


def test_the_header_and_each_part_are_known_and_in_place(state: bytes, victim: _Victim) -> None:
    for field in range(0, HEADER.size, 4):
        damaged = bytearray(state)
        damaged[field] ^= 1
        assert victim.feed(bytes(damaged)) != "", field
    parts = _parts(state)
    assert len(parts) >= 6
    for at, begin, end in parts:
        without = state[:at] + state[end:]
        twice = state[:end] + state[at:]
        assert victim.feed(without) != "" and victim.feed(twice) != ""
        newer = bytearray(state)
        struct.pack_into("<I", newer, at + 4, 1000)
        assert "newer" in victim.feed(bytes(newer))
        struct.pack_into("<I", newer, at + 4, 0)
        assert victim.feed(bytes(newer)) != ""
        for length in (0, end - begin - 1, end - begin + 1, 1 << 40, (1 << 64) - 1):
            resized = bytearray(state)
            struct.pack_into("<Q", resized, at + 8, length)
            assert victim.feed(bytes(resized)) != "", (at, length)


def test_another_hbm_size(state: bytes, open_machine: Callable[..., Machine]) -> None:
    other = open_machine(hbm_bytes=2 * HBM_BYTES)
    other.quiesce()
    assert "hbm-size" in other.load(state)


def test_random_damage(state: bytes, victim: _Victim) -> None:
    """Mostly between the long stretches of code and VMEM, which have no wrong values."""
    rng = random.Random(SEED)
    refused = accepted = 0
    dull = state.find(gated.code(AT)), state.find(gated.code(AT)) + len(gated.code(AT))
    assert dull[0] > 0
    interesting = [0, 1, 3, 63, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 64) - 1]
    for _ in range(ROUNDS):
        damaged = bytearray(state)
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            at = rng.randrange(len(state))
            while dull[0] <= at < dull[1] and rng.random() < 0.9:
                at = rng.randrange(len(state))
            match rng.randrange(3):
                case 0:
                    damaged[at] ^= 1 << rng.randrange(8)
                case 1:
                    damaged[at] = rng.randrange(256)
                case _:
                    size = rng.choice([4, 8])
                    at = min(at, len(state) - size)
                    value = rng.choice(interesting) & (1 << 8 * size) - 1
                    damaged[at : at + size] = value.to_bytes(size, "little")
        if victim.feed(bytes(damaged)):
            refused += 1
        else:
            accepted += 1
    # Much of a state is registers and data, of which any value is one.
    assert refused > ROUNDS // 20 and accepted > ROUNDS // 20
    assert victim.feed(state) == ""


def _engine_fields(state: bytes) -> tuple[int, int]:
    """Where the vector engine's first waiting instruction begins, and the program's pc."""
    begin = next(begin for at, begin, _ in _parts(state) if state[at : at + 4] == b"COMM")
    code = state.find(gated.code(AT), begin)
    registers = code + len(gated.code(AT)) + 4
    pc = registers + 8 * hw.NUM_SREGS + 4 * hw.NUM_COUNTERS
    return pc, pc + 4 + 4 + 8 + 8 + 1


def test_issued_instructions_are_checked_again(state: bytes, victim: _Victim) -> None:
    """The engines rely on what the sequencer checks as it issues."""
    pc, engines = _engine_fields(state)
    issued = struct.Struct("<8QQ2I")
    (count,) = struct.unpack_from("<I", state, engines)
    assert count == 1  # DMA_STORE
    first = engines + 4
    v = list(issued.unpack_from(state, first))
    assert v[2:6] == [gated.ROWS, gated.WIDTH * 4, gated.WIDTH * 4, gated.WIDTH * 4]
    assert v[9] % 64 == 0 and v[9] < len(gated.code(AT))

    def put(index: int, value: int) -> str:
        words = list(v)
        words[index] = value
        return victim.feed(state[:first] + issued.pack(*words) + state[first + issued.size :])

    assert put(2, gated.ROWS) == ""
    cases = [
        (1, 2),  # VMEM address not aligned
        (2, (1 << 20) + 1),  # rows
        (3, 1 << 21),  # row_bytes
        (4, 1 << 31),  # stride
        (8, (1 << 64) - 1),  # order: later than any
        (9, v[9] + 4),  # pc between instructions
        (9, 0),  # another engine's instruction
        (9, len(gated.code(AT))),  # none
        (9, (1 << 32) - 64),
    ]
    for index, value in cases:
        assert "issued" in put(index, value), (index, value)
    damaged = bytearray(state)
    struct.pack_into("<I", damaged, pc, 4)
    assert "issued" in victim.feed(bytes(damaged))
    for count in (17, 1 << 31):
        struct.pack_into("<I", damaged, engines, count)
        assert victim.feed(bytes(damaged)) != ""
