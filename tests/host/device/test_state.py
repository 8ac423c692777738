# SPDX-License-Identifier: MIT
"""Save and load of the machine: what goes on elsewhere ends as if it had stayed."""

from __future__ import annotations

import random
import re
import struct
import tomllib
from collections.abc import Callable
from pathlib import Path

import gated
import numerics_reference as ref
import numpy as np
import pytest
from asm import ins, program, vmem_program
from machine import SYSTEM_BASE, D, Machine, Queue
from vtpu_compiler import hw

CORE = Path(__file__).parents[3] / "qemu-device" / "core"
AT = 0x400000
CODE = 0x300000


def _copy_memory(source: Machine, target: Machine) -> None:
    target.hbm[:] = source.hbm
    target.system[:] = source.system


def _move(source: Machine, target: Machine, resume: bool = True) -> None:
    """The machine goes on in `target`; `source` stays where it was."""
    source.quiesce()
    target.quiesce()
    state = source.save()
    _copy_memory(source, target)
    assert target.load(state) == ""
    assert target.save() == state, "what was loaded is not what was saved"
    if resume:
        target.resume()


def _at(machine: Machine, queue: Queue) -> Queue:
    """The queue's handle on another machine."""
    copy = Queue.__new__(Queue)
    copy.__dict__.update(queue.__dict__)
    copy.machine = machine
    return copy


def _start_gated(machine: Machine, queue: Queue, seed: int = 1) -> int:
    """Returns the fence of its end."""
    machine.put(AT, gated.data(seed))
    code = gated.code(AT)
    machine.put(CODE, code)
    fence = queue.push("RUN", struct.pack("<QIIQI", CODE, len(code), 0, 0, 0))
    queue.ring_doorbell()
    return fence


def _wait_gate(machine: Machine, phase: int) -> None:
    machine.wait_for(lambda: machine.word(gated.progress(AT)) == phase, f"gate {phase}")


def _open(machine: Machine, phases: int) -> None:
    machine.put(gated.gate(AT), gated.open_gate(phases))


def _results(machine: Machine) -> bytes:
    return gated.results(machine.get(AT, gated.BYTES))


def _reference(open_machine: Callable[..., Machine], **config: object) -> bytes:
    machine = open_machine(**config)
    machine.identity()
    machine.enable()
    queue = Queue(machine)
    machine.put(AT, gated.data())
    _open(machine, gated.PHASES)
    code = gated.code(AT)
    machine.put(CODE, code)
    queue.do("RUN", struct.pack("<QIIQI", CODE, len(code), 0, 0, 0))
    return _results(machine)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"isa": "avx512", "threads": 2}, {"isa": "scalar", "threads": 1}),
        ({"isa": "scalar", "seed": 7}, {"isa": "avx2", "seed": 0}),
        ({"seed": 0, "threads": 1}, {"seed": 9, "threads": 4}),
    ],
    ids=["same", "avx512 to scalar", "seed to none", "none to seed"],
)
def test_a_program_moves_at_every_gate(
    open_machine: Callable[..., Machine], first: dict[str, object], second: dict[str, object]
) -> None:
    """Ping-pong between machines that may differ in path, threads and seed."""
    try:
        machines = [open_machine(**first), open_machine(**second)]
    except ValueError as error:
        pytest.skip(str(error))
    machine = machines[0]
    machine.identity()
    machine.enable()
    queue = Queue(machine)
    fence = _start_gated(machine, queue)
    for phase in range(gated.PHASES):
        _wait_gate(machine, phase + 1)
        _move(machine, machines[(phase + 1) % 2])
        machine = machines[(phase + 1) % 2]
        assert machine.word(gated.progress(AT)) == phase + 1
        _open(machine, phase + 1)
    _at(machine, queue).wait(fence)
    assert _results(machine) == _reference(open_machine)


def test_going_on_after_a_save_changes_nothing(
    machine: Machine, queue: Queue, open_machine: Callable[..., Machine]
) -> None:
    """A migration that fails: the source goes on."""
    fence = _start_gated(machine, queue)
    for phase in range(gated.PHASES):
        _wait_gate(machine, phase + 1)
        machine.quiesce()
        assert machine.save() == machine.save()
        machine.resume()
        _open(machine, phase + 1)
    queue.wait(fence)
    assert _results(machine) == _reference(open_machine)


def _timed(machine: Machine, gate_reads: list[Machine]) -> tuple[bytes, list[int]]:
    """Runs it with the gates open, and parks at every one: `gate_reads` are the machines to
    go on with. Results and what the timing model has counted."""
    for each in [machine, *gate_reads]:
        each.on_dma = None
    machine.context(1)
    machine.map(1, AT, AT, gated.BYTES)
    machine.map(1, CODE, CODE, 64 << 10)
    page = gated.gate(AT) & ~4095
    machine.map(1, page, SYSTEM_BASE + 0x100000, 4096, hbm=False)
    machine.system[0x100000 : 0x100000 + 8] = gated.open_gate(gated.PHASES)
    machine.enable()
    queue = Queue(machine, context=1)
    machine.put(AT, gated.data())
    code = gated.code(AT)
    machine.put(CODE, code)

    def park_here(each: Machine) -> None:
        def on_dma(kind: str, addr: int, size: int) -> None:
            if kind == "read" and addr == SYSTEM_BASE + 0x100000:
                each.on_dma = None
                each.park()

        each.on_dma = on_dma

    if gate_reads:
        park_here(machine)
    fence = queue.push("RUN", struct.pack("<QIIQI", CODE, len(code), 0, 0, 0))
    queue.ring_doorbell()
    for number, target in enumerate(gate_reads):
        machine.wait_for(lambda here=machine: here.on_dma is None, "the gate is read")
        _move(machine, target, last := number + 1 == len(gate_reads))
        if not last:
            park_here(target)
            target.resume()
        machine = target
    _at(machine, queue).wait(fence)
    counted = [machine.read(at, 8) for n, at, _, _ in _table() if n.startswith("STAT_MODEL")]
    return _results(machine), counted


def test_the_timing_model_moves_along(open_machine: Callable[..., Machine]) -> None:
    """Parked at each of four gates by the transfer that reads it: the cycles are the same."""
    chip = {"timing": "edge"}
    results, counted = _timed(open_machine(**chip), [])
    pair = [open_machine(**chip), open_machine(**chip)]
    moves = [pair[(n + 1) % 2] for n in range(gated.PHASES)]
    assert _timed(pair[0], moves) == (results, counted)
    assert counted[0] > 1000
    other = open_machine(timing="v5e")
    other.quiesce()
    pair[0].quiesce()
    assert "timing" in other.load(pair[0].save())


@pytest.mark.parametrize("direction", ["in", "out", "inside", "fill"])
def test_a_copy_is_parked_half_way(
    machine: Machine, open_machine: Callable[..., Machine], direction: str
) -> None:
    """Between two pieces; the rest is done by the other machine."""
    size = 6 << 20
    data = random.Random(3).randbytes(size)
    machine.context(1)
    machine.map(1, 0, 0x800000, size)
    machine.map(1, 0x40000000, SYSTEM_BASE + 0x100000, size, hbm=False)
    machine.map(1, 0x80000000, 0x1000000, size)
    queue = Queue(machine, context=1)
    source, target = {
        "in": (0x40000000, 0),
        "out": (0, 0x40000000),
        "inside": (0, 0x80000000),
        "fill": (0, 0x40000000),
    }[direction]
    if source:
        machine.system[0x100000 : 0x100000 + size] = data
    else:
        machine.put(0x800000, data)
    transfers = 0

    def park_at_the_third(kind: str, addr: int, length: int) -> None:
        nonlocal transfers
        transfers += length > 64
        if transfers == 3:
            machine.park()

    machine.on_dma = park_at_the_third
    if direction == "fill":
        fence = queue.push("FILL", struct.pack("<QQI", target, size, 0x01020304))
    else:
        fence = queue.push("COPY", struct.pack("<QQQ", target, source, size))
    if direction == "inside":
        machine.quiesce()  # no transfer to park at: before its first piece, or after its last
        machine.resume()
        queue.ring_doorbell()
    else:
        queue.ring_doorbell()
        machine.wait_for(lambda: transfers >= 3, "half of it")
    other = open_machine()
    _move(machine, other)
    if direction != "inside":
        assert transfers < 6
    _at(other, queue).wait(fence)
    got = {
        "in": other.get(0x800000, size),
        "out": bytes(other.system[0x100000 : 0x100000 + size]),
        "inside": other.get(0x1000000, size),
        "fill": bytes(other.system[0x100000 : 0x100000 + size]),
    }[direction]
    assert got == (b"\4\3\2\1" * (size // 4) if direction == "fill" else data)
    if direction != "inside":
        moved = sum(n for kind, _, n in other.dma_log if n > 64)
        assert 0 < moved < size, "the second machine did all of it, or nothing"


def test_a_long_instruction_does_not_keep_it(open_machine: Callable[..., Machine]) -> None:
    """A product that takes the scalar path very long, onto what is already there: abandoned
    in the middle, undone, and done by a faster machine, as if it had been there at once."""
    rows, n, k = 2048, 1024, 8192
    rng = np.random.default_rng(2)
    q = rng.integers(-127, 128, (n, k)).astype(np.int8)
    d = rng.uniform(0.001, 0.01, (n, k // 32)).astype(np.float16)
    tiles = ref.make_tiles(q, d, None, hw.FMT["Q8_0"]).tobytes()
    x = rng.standard_normal(k).astype(np.float32).tobytes()
    before = rng.standard_normal((rows, n)).astype(np.float32).tobytes()
    code = vmem_program(
        [(0, 0x900000, len(x)), (0x10000, 0x1800000, len(before))],
        [
            ins("SYNC"),
            ins(
                "MATMUL",
                fmt="Q8_0",
                flags=("ACCUMULATE",),
                dst=0x10000,
                src=0,
                weight=0xA00000,
                m=rows,
                n=n,
                k=k,
                dst_stride=n * 4,
                src_stride=0,
            ),
            ins("SYNC"),
        ],
        [(0x2000000, 0x10000, len(before))],
    )

    def run(machine: Machine) -> tuple[Queue, int]:
        machine.identity()
        machine.enable()
        for at, data in ((0x900000, x), (0xA00000, tiles), (0x1800000, before), (CODE, code)):
            machine.put(at, data)
        queue = Queue(machine)
        fence = queue.push("RUN", struct.pack("<QIIQI", CODE, len(code), 0, 0, 0))
        queue.ring_doorbell()
        return queue, fence

    fast = open_machine()
    if fast.isa == "scalar":
        pytest.skip("this host has no faster path")
    queue, fence = run(fast)
    queue.wait(fence)
    expected = fast.get(0x2000000, len(before))
    slow = open_machine(isa="scalar", threads=1)
    queue, fence = run(slow)
    multiply = code.index(bytes([hw.OPS["MATMUL"].code]) + b"\1")
    assert multiply % hw.INSTR_BYTES == 0
    slow.wait_for(lambda: queue.reg("PC") == multiply, "the product has begun")
    # Well behind its preparations, which are a thousandth of it.
    slow.wait_for(lambda: queue.reg("COMMAND_NS", 8) > 1_500_000_000, "a good part of it")
    instructions = slow.reg("STAT_INSTRUCTIONS", 8)
    _move(slow, fast)
    assert slow.reg("STAT_INSTRUCTIONS", 8) == instructions, "it was over before"
    moved = _at(fast, queue)
    moved.wait(fence)
    assert fast.get(0x2000000, len(before)) == expected


def test_a_held_wait_is_satisfied_elsewhere(
    machine: Machine, queue: Queue, open_machine: Callable[..., Machine]
) -> None:
    word = machine.alloc(4096)
    fence = queue.push("WAIT", struct.pack("<QQ", word, 5))
    queue.ring_doorbell()
    machine.wait_for(lambda: "waits for a word" in machine.describe(), "held")
    other = open_machine()
    _move(machine, other)
    moved = _at(other, queue)
    # The entry was copied: what the ring holds by now is not looked at again.
    other.system[queue.ring : queue.ring + 64] = bytes(64)
    assert moved.fence == 0 and moved.reg("HEAD") == 0
    other.put(word, struct.pack("<Q", 5))
    moved.wait(fence)


def test_a_hung_program_stays_hung_until_its_reset(
    machine: Machine, queue: Queue, open_machine: Callable[..., Machine]
) -> None:
    machine.inject("HANG", 1)
    queue.push("RUN", queue.run_payload(program()))
    queue.ring_doorbell()
    machine.wait_for(lambda: machine.injected("HANG") == 0, "hangs")
    other = open_machine()
    _move(machine, other)
    moved = _at(other, queue)
    other.wait_for(lambda: moved.state == "RUNNING", "goes on")
    Queue(other, 5)
    assert moved.fence == 0
    moved.restart()
    moved.do("NOP")


def test_a_faulted_queue_and_the_device_around_it(
    machine: Machine, queue: Queue, open_machine: Callable[..., Machine]
) -> None:
    queue.do("NOP")
    trapped = Queue(machine, 3)
    fault = trapped.run_fault(program(ins("NOP"), ins("TRAP", code=77)))
    machine.inject("FENCE_CORRUPT", 1 << 40)
    other = open_machine()
    _move(machine, other)
    moved = _at(other, trapped)
    assert moved.fault() == fault and fault["cause"] == "TRAP" and fault["addr"] == 77
    assert moved.state == "FAULTED" and other.reg("ERR_QUEUES") == 1 << 3
    assert other.irqs == [], "an interrupt of the past"
    moved.push("NOP")
    moved.ring_doorbell()
    assert moved.reg("TAIL") == 1, "a faulted queue took a doorbell"
    good = _at(other, queue)
    good.push("NOP")
    good.ring_doorbell()
    other.wait_for(lambda: good.fence == 2 ^ 1 << 40, "the corrupted fence")
    moved.restart()
    moved.do("NOP")


def test_an_interrupt_that_is_asked_for_while_parked(
    machine: Machine, open_machine: Callable[..., Machine]
) -> None:
    machine.quiesce()
    machine.write(D["REG_TEST_IRQ"], 9)
    other = open_machine()
    _move(machine, other)
    other.wait_irqs(9, 1)
    assert machine.irqs == []


def _table() -> list[tuple[str, int, int, str]]:
    """Every register: name, offset, size, access."""
    spec = tomllib.loads((CORE.parent / "spec" / "vtpu.toml").read_text())
    device = spec["device"]
    table = [(r["name"], r["offset"], r.get("size", 4), r["access"]) for r in spec["reg"]]
    for r in spec["reg_array"]:
        count = device[r["count"]] if isinstance(r["count"], str) else r["count"]
        table += [
            (r["name"], r["offset"] + i * r["stride"], r.get("size", 4), r["access"])
            for i in range(count)
        ]
    for q in range(device["num_queues"]):
        base = spec["queue"]["offset"] + q * spec["queue"]["stride"]
        table += [
            (f"Q_{r['name']}", base + r["offset"], r.get("size", 4), r["access"])
            for r in spec["queue"]["reg"]
        ]
    return table


# What a write to them means is not that they read the same afterwards.
ACTIONS = {"CTRL", "Q_CTRL", "Q_DOORBELL"}
# Without a fabric they take no value, and with one nothing is saved.
OF_THE_LINK = {"LINK_CTRL", "LINK_CONTEXT", "LINK_ACCEPT", "LINK_COUNTER"}


def test_every_register_reads_the_same_afterwards(
    machine: Machine, open_machine: Callable[..., Machine]
) -> None:
    """By the table: a register that somebody adds is in this test. TIME stands still while
    parked, and so is in it, too."""
    rng = random.Random(5)
    written = set()
    for name, offset, size, access in _table():
        if access == "rw" and name not in ACTIONS:
            for value in (rng.getrandbits(8 * size), rng.randrange(1, 256), rng.randrange(1, 3)):
                machine.write(offset, value, size)
            if machine.read(offset, size):
                written.add(name)
    assert written == {n for n, _, _, access in _table() if access == "rw"} - ACTIONS - OF_THE_LINK
    machine.quiesce()
    before = {(name, at): machine.read(at, size) for name, at, size, _ in _table()}
    assert before["TIME", D["REG_TIME"]] > 0
    other = open_machine()
    other.quiesce()
    assert other.load(machine.save()) == ""
    after = {(name, at): other.read(at, size) for name, at, size, _ in _table()}
    assert after == before
    other.resume()
    other.wait_for(lambda: other.reg("TIME", 8) > before["TIME", D["REG_TIME"]], "TIME goes on")


def test_time_stands_still_while_parked(machine: Machine) -> None:
    machine.quiesce()
    time = machine.reg("TIME", 8)
    other = Queue(machine, 1)  # takes a while, and a lock
    assert machine.reg("TIME", 8) == time and other.state == "READY"
    machine.resume()
    machine.wait_for(lambda: machine.reg("TIME", 8) > time, "goes on")


def _all(fields: str, why: str) -> dict[str, str]:
    return dict.fromkeys(fields.split(), why)


# Fields that are no state, by the struct of machine.h, and why.
NOT_STATE = {
    "VtpuVmem": {
        "map": "where this process has it",
        "taken": "follows from the programs",
    },
    "VtpuProgram": {
        "code": "decoded anew",
        "used": "of the cache, which starts empty",
        "references": "of the cache, which starts empty",
    },
    "VtpuIssued": {"in": "follows from pc", "small": "unknown is as good as false"},
    "VtpuExec": {
        "core": "the machine",
        "queue": "its index",
        "fault": "recorded in the queue before the command ends",
        "pending": "follows from the engines",
        "watched": "looked up as it goes on",
        "observed": "follows from the properties",
        "races": "of this process: a program that is resumed elsewhere goes on unchecked",
        "send": "of the link, and a linked machine is not saved",
        "generation": "of the link, too",
        "link_events": "of the link, too",
        "waits_from": "of the link, too",
        "traced": "looked up as it goes on",
        "last_pc": "for descriptions",
    },
    "VtpuQueue": {"poll_ns": "of this host's clock; a held WAIT is polled at once"},
    "VtpuCost": _all("lead work tail hbm_read hbm_written vmem ops", "saved as a whole"),
    "VtpuSched": _all(
        "begin paused rests_from slice_end slice_left watchdog expired alarm asleep_until steps",
        "of the stretch of the command that runs; a machine at rest has none",
    ),
    "VtpuSensors": _all("seen_ns held_ns", "of this host's clock and of this chip"),
    "VtpuCore": _all(
        "ops opaque hbm kernels threads schedule_seed stepped lock wake changed thread pool "
        "chip own_chip share function timer timer_thread timing_trace timing_trace_end "
        "attention stop busy lent serve_short exiting park parked running context_changed "
        "time_base parked_ns still_ns inject_armed tlb program program_clock buffer "
        "dirty_start dirty_end undo restartable link check_races stuck",
        "of the process, a property, follows from others, or empty while parked",
    ),
}


def _fields(struct_name: str) -> set[str]:
    header = (CORE / "machine.h").read_text() + (CORE / "timing.h").read_text()
    found = re.search(rf"^(?:typedef )?struct {struct_name} {{\n(.*?)^}}", header, re.M | re.S)
    assert found, struct_name
    body = re.sub(r"/\*.*?\*/", "", found[1], flags=re.S)
    fields: set[str] = set()
    for declaration in body.split(";"):
        names = re.sub(r"\[[^]]*\]", "", declaration).split(",")
        fields |= {word[-1] for part in names if (word := re.findall(r"\w+", part))}
    return fields


@pytest.mark.parametrize(
    "name",
    ["VtpuVmem", "VtpuProgram", "VtpuIssued", "VtpuEngine", "VtpuFault", "VtpuExec", "VtpuQueue",
     "VtpuSched", "VtpuSensors", "VtpuTiming", "VtpuActor", "VtpuTimed", "VtpuCost", "VtpuCore"],
)  # fmt: skip
def test_every_field_is_state_or_said_not_to_be(name: str) -> None:
    """Whoever adds a field decides: state.c visits it, or it is named above."""
    text = "".join(path.read_text() for path in sorted(CORE.glob("state*.c")))
    fields, excused = _fields(name), set(NOT_STATE.get(name, {}))
    visited = {field for field in fields if re.search(rf"(->|\.){field}\b", text)}
    assert fields - visited - excused == set(), "neither saved nor excused"
    assert excused - fields == set(), "excused, but no longer there"


def _as_of_version_1(state: bytes) -> bytes:
    """The same state of a device with 32 queues, whose parts were version 1."""
    header, at = 24, 24
    out = state[:header]
    while at < len(state):
        name = state[at : at + 4]
        version, length = struct.unpack_from("<IQ", state, at + 4)
        versions = {b"DEVI": 3, b"TATS": 2, b"FLTS": 3, b"QUEU": 2, b"VMEM": 2}
        assert version == versions.get(name, 1)
        body = state[at + 16 : at + 16 + length]
        at += 16 + length
        if name == b"DEVI":
            # Without the upper half of the queues in error, and engine resets.
            body = body[:16] + body[20:-1]
        elif name == b"FLTS":
            body = body[:-16]  # the last two faults are newer
        elif name == b"QUEU":
            body = body[: len(body) // 2]
        elif name == b"VMEM":
            assert not any(body[-32:])  # no image but in the first places
            body = body[:-32]
        elif name == b"TATS":
            body = body[:-24]  # without the sensors
        out += name + struct.pack("<IQ", 1, len(body)) + body
    return out


def test_a_state_of_a_device_with_32_queues(open_machine: Callable[..., Machine]) -> None:
    source = open_machine()
    source.identity()
    source.enable()
    queue = Queue(source, 31)
    queue.do("NOP")
    source.quiesce()
    old = _as_of_version_1(source.save())
    target = open_machine()
    target.quiesce()
    assert target.load(old) == ""
    target.resume()
    assert target.read(queue.offset("HEAD")) == 1
    assert target.read(D["REG_Q_QSTATUS"] + 63 * D["QUEUE_STRIDE"]) == hw.QUEUE_STATE["DISABLED"]
    target.quiesce()
    assert target.load(old + b"\0") != ""


def test_the_sensors_go_on(open_machine: Callable[..., Machine]) -> None:
    source, target = open_machine(), open_machine()
    source.identity()
    source.enable()
    queue = Queue(source)

    def is_warmer() -> bool:
        queue.do("FILL", struct.pack("<QQI", AT, 32 << 20, 7))
        return source.reg("SENSOR_TEMP") > target.reg("SENSOR_TEMP")

    source.wait_for(is_warmer, "warmer")
    source.inject("TEMPERATURE", 88_000)
    source.quiesce()
    energy, power = source.reg("SENSOR_ENERGY", 8), source.reg("SENSOR_POWER")
    target.quiesce()
    assert target.load(source.save()) == ""
    assert target.reg("SENSOR_ENERGY", 8) == energy and target.reg("SENSOR_POWER") == power
    assert target.reg("SENSOR_TEMP") == 88_000
    target.inject("TEMPERATURE", 0xFFFFFFFF)
    source.inject("TEMPERATURE", 0xFFFFFFFF)
    assert target.reg("SENSOR_TEMP") == source.reg("SENSOR_TEMP")
