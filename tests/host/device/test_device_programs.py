# SPDX-License-Identifier: MIT
"""Decoding and the sequencer: scalar operations, branches, counters, faults."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
from asm import R, ins, pc, program, vmem_program
from machine import Machine, Queue
from vtpu_compiler import hw

MASK = (1 << 64) - 1
SCALAR = {
    "ADD": lambda a, b: a + b,
    "SUB": lambda a, b: a - b,
    "MUL": lambda a, b: a * b,
    "SHL": lambda a, b: a << (b & 63),
    "SHR": lambda a, b: a >> (b & 63),
    "AND": lambda a, b: a & b,
    "MIN": min,
    "MAX": max,
}


def _legal(name: str) -> bytes:
    """The operation with the least that its fields allow."""
    op = hw.OPS[name]
    operands = {operand: (R(1) if kind == "rd" else 0) for operand, kind in op.operands}
    fields = dict.fromkeys(op.imm64_fields, 0)
    return ins(name, fmt=op.fmt_a[0] if op.fmt_a else "NONE", **operands, **fields)


@pytest.mark.parametrize("name", SCALAR)
def test_scalar_operations(machine: Machine, queue: Queue, name: str) -> None:
    chooser = random.Random(name)
    out = machine.alloc(4096)
    pairs = [(0, 0), (MASK, 1), (1, MASK), (1 << 63, 63), (5, 64)]
    pairs += [(chooser.getrandbits(64), chooser.getrandbits(64)) for _ in range(20)]
    code = []
    for index, (a, b) in enumerate(pairs):
        code += [
            ins("LI", rd=1, value=a),
            ins("LI", rd=2, value=b),
            ins(name, rd=3, a=R(1), b=R(2)),
            ins("ST", addr=out + 8 * index, value=R(3), mode="U64"),
        ]
    queue.run(program(*code))
    got = struct.unpack(f"<{len(pairs)}Q", machine.get(out, 8 * len(pairs)))
    assert list(got) == [SCALAR[name](a, b) & MASK for a, b in pairs]


def test_arguments_and_immediates(machine: Machine, queue: Queue) -> None:
    out = machine.alloc(4096)
    args = tuple(random.Random(1).getrandbits(64) for _ in range(hw.MAX_ARGS))
    code = [
        ins("ST", addr=out + 8 * i, value=R(hw.FIRST_ARG + i) + 0xFFFFFFFF, mode="U64")
        for i in range(hw.MAX_ARGS)
    ]
    queue.run(program(*code), args)
    got = struct.unpack("<16Q", machine.get(out, 128))
    assert list(got) == [(arg + 0xFFFFFFFF) & MASK for arg in args]


def test_registers_and_counters_start_at_zero(machine: Machine, queue: Queue) -> None:
    out = machine.alloc(4096)
    dirty = [ins("LI", rd=n, value=MASK) for n in range(1, 64)]
    queue.run(program(*dirty, *[ins("NOP", signal=n) for n in range(1, 32)]))
    code = [ins("ST", addr=out + 8 * n, value=R(n), mode="U64") for n in range(64)]
    machine.put(out, b"\xff" * 512)
    queue.run(program(*code))
    assert machine.get(out, 512) == bytes(512)
    # A counter that kept its value would satisfy this wait.
    assert queue.run_fault(program(ins("NOP", wait=(1, 1))))["cause"] == "DEADLOCK"


@pytest.mark.parametrize(
    ("name", "a", "b", "taken"),
    [
        ("BEQ", 4, 4, True),
        ("BEQ", 4, 5, False),
        ("BNE", 4, 5, True),
        ("BNE", 4, 4, False),
        ("BLT", 4, 5, True),
        ("BLT", 5, 5, False),
        ("BLT", MASK, 0, False),
    ],
)
def test_branches(machine: Machine, queue: Queue, name: str, a: int, b: int, taken: bool) -> None:
    out = machine.alloc(4096)
    queue.run(
        program(
            ins("LI", rd=1, value=a),
            ins("LI", rd=2, value=b),
            ins(name, a=R(1), b=R(2), target=pc(4)),
            ins("ST", addr=out, value=1, mode="U64"),
            ins("ST", addr=out + 8, value=1, mode="U64"),
        )
    )
    assert machine.word(out) == (0 if taken else 1)
    assert machine.word(out + 8) == 1


def test_words_of_both_sizes(machine: Machine, queue: Queue) -> None:
    data = machine.place(struct.pack("<Q", 0x8877665544332211) + bytes(24))
    queue.run(
        program(
            ins("LD", rd=1, addr=data + 4, mode="U32"),
            ins("ST", addr=data + 8, value=R(1), mode="U64"),
            ins("LI", rd=2, value=MASK),
            ins("ST", addr=data + 16, value=R(2), mode="U32"),
            ins("DMA_LOAD", dst=64, src=data, rows=1, row_bytes=8, dst_stride=0, src_stride=0),
            ins("SYNC"),
            ins("LDV", rd=3, addr=68),
            ins("ST", addr=data + 24, value=R(3), mode="U64"),
        )
    )
    words = struct.unpack("<4Q", machine.get(data, 32))
    assert words == (0x8877665544332211, 0x88776655, 0xFFFFFFFF, 0x88776655)


@pytest.mark.parametrize("name", hw.OPS)
def test_every_stray_bit_is_illegal(queue: Queue, name: str) -> None:
    """Each bit that an operation does not name, alone, stops the queue at its pc."""
    op = hw.OPS[name]
    word = _legal(name)
    free: list[int] = []  # bit positions that must be zero
    free += [8 + bit for bit in range(8) if not sum(op.flags.values()) >> bit & 1]
    free += list(range(32, 40))  # wait_reg without a wait
    free += [] if op.fmt_a else list(range(40, 48))
    free += list(range(48, 56))  # fmt_b
    free += [] if len(op.modes) > 1 else list(range(56, 64))
    free += list(range(64, 96))  # wait_imm without a wait
    free += [] if op.has_aux else list(range(96, 128))
    for index in range(len(op.operands), 8):
        free += range(128 + 8 * index, 136 + 8 * index)
        free += range(192 + 32 * index, 224 + 32 * index)
    used = (1 << 64) - 1 if op.imm64 else 0
    for low, high in op.imm64_fields.values():
        used |= ((1 << (high - low + 1)) - 1) << low
    free += [448 + bit for bit in range(64) if not used >> bit & 1]
    chooser = random.Random(name)
    for bit in chooser.sample(free, min(len(free), 12)):
        bad = (int.from_bytes(word, "little") | 1 << bit).to_bytes(64, "little")
        fault = queue.run_fault(ins("NOP") + bad)
        assert (fault["cause"], fault["pc"]) == ("ILLEGAL_INSTRUCTION", 64), f"bit {bit}"
        queue.restart()


def test_unknown_opcodes_are_illegal(queue: Queue) -> None:
    known = {op.code for op in hw.OPS.values()}
    for code in [*sorted(set(range(256)) - known)[::9], 0, 255]:
        fault = queue.run_fault(bytes([code]) + bytes(63))
        assert fault["cause"] == "ILLEGAL_INSTRUCTION"
        queue.restart()


@pytest.mark.parametrize(
    "bad",
    [
        ins("NOP", signal=32),
        ins("NOP", wait=(32, 0)),
        ins("NOP", wait=(1, R(64))),
        ins("LI", rd=R(0), value=1),
        ins("LI", rd=R(64), value=1),
        ins("LI", rd=R(1) + 1, value=1),
        ins("ADD", rd=1, a=R(200), b=0),
        ins("LD", rd=1, addr=0)[:7] + b"\2" + ins("LD", rd=1, addr=0)[8:],
        ins("LD", rd=1, addr=4, mode="U64"),
        ins("LD", rd=1, addr=2, mode="U32"),
        ins("ST", addr=4, value=0, mode="U64"),
        _legal("MATMUL")[:5] + bytes([hw.FMT["F32"]]) + _legal("MATMUL")[6:],
        _legal("MATMUL")[:5] + b"\x40" + _legal("MATMUL")[6:],
        ins(
            "V_ADD",
            dst=0,
            a=0,
            b=0,
            rows=(1 << 20) + 1,
            width=0,
            dst_stride=0,
            a_stride=0,
            b_stride=0,
        ),
        ins("V_ADD", dst=0, a=0, b=0, rows=0, width=0, dst_stride=2, a_stride=0, b_stride=0),
        ins("V_ADD", dst=0, a=0, b=0, rows=0, width=0, dst_stride=1 << 31, a_stride=0, b_stride=0),
    ],
)
def test_fields_out_of_range(queue: Queue, bad: bytes) -> None:
    fault = queue.run_fault(ins("NOP") + bad)
    assert (fault["cause"], fault["pc"]) == ("BAD_OPERAND", 64)


def test_data_after_the_code_is_no_fault(queue: Queue) -> None:
    queue.run(program(ins("JMP", target=pc(2)), b"\xff" * 64))


@pytest.mark.parametrize(
    ("code", "target"),
    [
        (ins("NOP"), 64),
        (ins("JMP", target=128) + ins("HALT"), 128),
        (ins("JMP", target=32), 32),
        (ins("LI", rd=1, value=1 << 40) + ins("JMP", target=R(1)), 1 << 40),
    ],
)
def test_leaving_the_program(queue: Queue, code: bytes, target: int) -> None:
    fault = queue.run_fault(code)
    assert (fault["cause"], fault["addr"], fault["access"]) == ("PC_RANGE", target, 3)


def test_the_entry_point(machine: Machine, queue: Queue) -> None:
    payload = queue.run_payload(ins("TRAP", code=1) + ins("HALT"), entry=64)
    queue.do("RUN", payload)


def _add(out: int, a: int, b: int, **more: object) -> bytes:
    return ins(
        "V_ADD",
        dst=out,
        a=a,
        b=b,
        rows=1,
        width=16,
        dst_stride=64,
        a_stride=64,
        b_stride=64,
        **more,
    )  # type: ignore[arg-type]


def test_counters_order_the_engines(machine: Machine, queue: Queue) -> None:
    """A load that was issued last is what the vector engine waits for."""
    data = machine.place(struct.pack("<16f", *range(16)))
    out = machine.alloc(64)
    row = {"rows": 1, "row_bytes": 64, "dst_stride": 0, "src_stride": 0}
    queue.run(
        program(
            _add(64, 0, 0, wait=(3, 1), signal=4),
            ins("LI", rd=1, value=1),
            ins("DMA_LOAD", dst=0, src=data, signal=3, **row),
            ins("DMA_STORE", dst=out, src=64, wait=(4, R(1)), **row),
        )
    )
    assert struct.unpack("<16f", machine.get(out, 64)) == tuple(2.0 * i for i in range(16))


@pytest.mark.parametrize(
    "code",
    [
        program(ins("NOP", wait=(1, 1))),
        program(_add(64, 0, 0, wait=(1, 2), signal=1)),
        program(_add(64, 0, 0, wait=(1, 1)), ins("SYNC"), ins("NOP", signal=1)),
    ],
)
def test_unsatisfiable_waits_are_deadlocks(queue: Queue, code: bytes) -> None:
    assert queue.run_fault(code) == {
        "cause": "DEADLOCK",
        "access": 0,
        "addr": 0,
        "pc": 0,
        "entry": 0,
    }


def test_more_instructions_than_an_engine_queue_holds(machine: Machine, queue: Queue) -> None:
    """The sequencer waits for room; the wait is satisfied by another engine's later work."""
    row = {"rows": 1, "row_bytes": 64, "dst_stride": 0, "src_stride": 0}
    data = machine.place(bytes(64))
    held = [_add(64, 0, 0, wait=(1, 1)) for _ in range(15)]
    queue.run(program(*held, ins("DMA_LOAD", dst=0, src=data, signal=1, **row)))
    too_many = [_add(64, 0, 0, wait=(1, 1)) for _ in range(17)]
    fault = queue.run_fault(program(*too_many, ins("DMA_LOAD", dst=0, src=data, signal=1, **row)))
    assert fault["cause"] == "DEADLOCK"


def test_faults_of_engines_name_their_instruction(queue: Queue) -> None:
    fault = queue.run_fault(
        program(
            ins("NOP"),
            ins(
                "V_ADD",
                dst=hw.VMEM_BYTES,
                a=0,
                b=0,
                rows=1,
                width=16,
                dst_stride=64,
                a_stride=64,
                b_stride=64,
            ),
            ins("SYNC"),
        )
    )
    assert fault == {
        "cause": "VMEM_RANGE",
        "access": 2,
        "addr": hw.VMEM_BYTES,
        "pc": 64,
        "entry": 0,
    }


def _race(data: int, out: int, *, synchronised: bool) -> bytes:
    row = {"rows": 1, "row_bytes": 64, "dst_stride": 0, "src_stride": 0}
    waits = [{"wait": (1, 1)}, {"wait": (2, 1)}] if synchronised else [{}, {}]
    return program(
        ins("DMA_LOAD", dst=0, src=data, signal=1, **row),
        _add(64, 0, 0, signal=2, **waits[0]),
        ins("DMA_STORE", dst=out, src=64, **row, **waits[1]),
    )


def test_random_orders_keep_synchronised_programs(open_machine: Callable[..., Machine]) -> None:
    results: dict[bool, set[bytes]] = {True: set(), False: set()}
    for seed in range(1, 13):
        machine = open_machine(seed=seed, hbm_bytes=16 << 20, threads=1, check_races=False)
        machine.identity()
        machine.enable()
        queue = Queue(machine)
        data = machine.place(struct.pack("<16f", *range(1, 17)))
        out = machine.alloc(64)
        for synchronised in (True, False):
            machine.put(out, bytes(64))
            queue.run(_race(data, out, synchronised=synchronised))
            results[synchronised].add(machine.get(out, 64))
            # What VMEM held must not hide a missing wait.
            machine.write(0x1000, machine.roots[0] | 1, 8)
            queue.run(vmem_program([(0, machine.place(bytes(128)), 128)], [], []))
    assert results[True] == {struct.pack("<16f", *(2.0 * i for i in range(1, 17)))}
    assert len(results[False]) > 1, "no seed found the missing wait"


def test_the_program_cache_sees_new_bytes(machine: Machine, queue: Queue) -> None:
    out = machine.alloc(64)
    code_va = machine.alloc(4096)
    for value in range(40):
        machine.put(code_va, program(ins("ST", addr=out, value=value, mode="U64")))
        queue.do("RUN", struct.pack("<QIIQI", code_va, 128, 0, 0, 0))
        assert machine.word(out) == value
