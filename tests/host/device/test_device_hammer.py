# SPDX-License-Identifier: MIT
"""Random programs, commands, page tables and register writes: nothing a guest does
reaches memory that is not its own, and a reset always ends it. Most worth with
the sanitisers of qemu-device/README.md. The seed is fixed; what threads make of
it is not."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable

from asm import ins, program
from machine import EXEC, READ, SYSTEM_BASE, SYSTEM_BYTES, VALID, WRITE, D, Machine, Queue
from vtpu_compiler import hw

SEED = int(os.environ.get("VTPU_HAMMER_SEED", "1"))
ROUNDS = 60
SECONDS = 5  # at most: slow hosts do fewer rounds
RESET_S = 2.0  # as kmod waits before it gives the device up
HBM_BYTES = 32 << 20
GUARD = 64 << 10
COUNTS = [0, 1, 2, 3, 16, 32, 48, 64, 256, 1000, 4096, 1 << 16, 1 << 20, (1 << 20) + 1]
STRIDES = [0, 4, 64, 128, 192, 256, 4096, 1 << 16, 1 << 20, (1 << 31) - 4, 1 << 31]
WORDS = [0, 1, 2, 63, 64, 4096, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 47, (1 << 64) - 1]
REGISTERS = sorted(value for name, value in D.items() if name.startswith("REG_"))


def _aligned(rng: random.Random, size: int, align: int) -> int:
    near = rng.choice([0, 0, size // 2, size - 4096, size - align, size])
    return max(0, near + rng.randrange(-64, 64) * align)


def _tame(rng: random.Random, kind: str) -> int:
    """Likely to be legal."""
    match kind:
        case "g":
            return rng.randrange(0, 1 << 20, 64)
        case "v" | "v4":
            return rng.randrange(0, 24 << 20, 1 << 18)
        case "n":
            return rng.choice([1, 16, 32, 64])
    return 4096


def _operand(rng: random.Random, kind: str, length: int) -> int:
    match kind:
        case "g":
            return _aligned(rng, HBM_BYTES, 4)
        case "v":
            return _aligned(rng, hw.VMEM_BYTES, 64)
        case "v4":
            return _aligned(rng, hw.VMEM_BYTES, 4)
        case "n":
            return rng.choice(COUNTS)
        case "stride":
            return rng.choice(STRIDES)
        case "pc":
            return 64 * rng.randrange(length + 2)
        case "rd":
            return 0
    return rng.choice(WORDS) & 0xFFFFFFFF


def _instruction(rng: random.Random, length: int) -> bytes:
    op = rng.choice(list(hw.OPS.values()))
    registers, immediates = [0] * 8, [0] * 8
    tame = rng.random() < 0.8
    for index, (_, kind) in enumerate(op.operands):
        if tame and kind in ("g", "v", "v4", "n", "stride"):
            immediates[index] = _tame(rng, kind)
        else:
            immediates[index] = _operand(rng, kind, length)
        if kind == "rd" or (not tame and rng.random() < 0.2):
            registers[index] = rng.randrange(1, 64)
    imm64 = 0
    if op.imm64_fields:
        shape = {
            "heads": rng.choice([1, 2, 6, 255]),
            "kv_heads": rng.choice([1, 2, 3]),
            "head_dim": rng.choice([16, 64, 256]),
            "block_size": rng.choice([1, 16, 4096]),
            "max_blocks": rng.choice([1, 16, 256]),
        }
        imm64 = sum(value << op.imm64_fields[field][0] for field, value in shape.items())
    elif op.imm64:
        imm64 = rng.choice(WORDS)
    word = bytearray(
        struct.pack(
            "<8BII8B8IQ",
            op.code,
            rng.randrange(2) if op.flags else 0,
            rng.choice([0, 0, 1, 2]),
            0,
            0,
            hw.FMT[rng.choice(op.fmt_a)] if op.fmt_a else 0,
            0,
            rng.randrange(2) if op.modes else 0,
            0,
            0,
            *registers,
            *immediates,
            imm64,
        )
    )
    if rng.random() < 0.03:
        word[rng.randrange(64)] ^= 1 << rng.randrange(8)
    return bytes(word)


def _program(rng: random.Random) -> bytes:
    length = rng.randrange(1, 12)
    load = ins(
        "DMA_LOAD",
        dst=0,
        src=rng.randrange(0, 1 << 20, 4),
        rows=rng.choice([1, 256]),
        row_bytes=4096,
        dst_stride=4096,
        src_stride=rng.choice([0, 4096]),
    )
    return program(load, *[_instruction(rng, length) for _ in range(length)])


def _tables(rng: random.Random, machine: Machine) -> None:
    """HBM as it lies, system memory after it, another context, and some noise."""
    machine._next_table, machine._next_free = HBM_BYTES - (4 << 20), 2 << 20
    machine.identity(0)
    machine.map(0, 1 << 40, SYSTEM_BASE, 64 << 10, READ | WRITE | EXEC, hbm=False)
    machine.identity(1)
    for _ in range(rng.randrange(4)):
        at = machine.roots[1] + 8 * rng.randrange(4096)
        machine.put(at, struct.pack("<Q", rng.choice([VALID, 0x3F, rng.getrandbits(64)])))


def _push(rng: random.Random, queue: Queue) -> None:
    if rng.random() < 0.8:
        queue.push("RUN", queue.run_payload(_program(rng)))
    elif rng.random() < 0.8:
        payload = struct.pack("<QQQ16x", *[_aligned(rng, HBM_BYTES, 4) for _ in range(3)])
        queue.push(rng.choice(["COPY", "FILL", "WAIT", "SIGNAL", "TIMESTAMP"]), payload)
    else:
        queue.push("NOP", raw=rng.randbytes(hw.RING_ENTRY))


def _disturb(rng: random.Random, machine: Machine, queues: list[Queue]) -> None:
    for _ in range(rng.randrange(30)):
        offset = rng.choice(REGISTERS) + rng.choice([0, 0, 0, 4, D["QUEUE_STRIDE"]])
        size = rng.choice([4, 4, 8])
        if rng.random() < 0.3:
            machine.write(offset, rng.choice([*WORDS, rng.getrandbits(64)]), size)
        else:
            machine.read(offset, size)
        if rng.random() < 0.1:
            machine.doorbell(rng.randrange(40), rng.choice(WORDS) & 0xFFFFFFFF)
        if rng.random() < 0.05:
            machine.inject("HANG", 1)
        if rng.random() < 0.1:
            queue = rng.choice(queues)
            queue.set("CTRL", D["Q_CTRL_RESET"])


def _works(machine: Machine) -> None:
    start = time.monotonic()
    machine.reset()
    machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_RESETTING"], "reset")
    assert time.monotonic() - start < RESET_S
    machine._next_table, machine._next_free = HBM_BYTES - (4 << 20), 2 << 20
    machine.system[:] = bytes(SYSTEM_BYTES)
    machine.identity(0)
    machine.enable()
    machine.irqs.clear()
    queue = Queue(machine)
    out = machine.alloc(8)
    queue.run(program(ins("ST", addr=out, value=77, mode="U64")))
    assert machine.word(out) == 77


def test_random_guests(open_machine: Callable[..., Machine]) -> None:
    rng = random.Random(SEED)
    end = time.monotonic() + SECONDS
    machine = open_machine(hbm_bytes=HBM_BYTES, guard=GUARD)
    for _ in range(ROUNDS):
        if time.monotonic() > end:
            break
        _tables(rng, machine)
        machine.put(0, struct.pack("<I", rng.choice([0, 1, 5, 300])) * (1 << 17))
        machine.put(1 << 19, rng.randbytes(1 << 19))
        machine.enable()
        queues = [
            Queue(machine, number, context=rng.choice([0, 0, 1, 2]), priority=rng.randrange(3))
            for number in range(3)
        ]
        for queue in queues:
            for _ in range(rng.randrange(1, 4)):
                _push(rng, queue)
            queue.ring_doorbell()
        time.sleep(0.005)
        _disturb(rng, machine, queues)
        time.sleep(rng.choice([0, 0.005, 0.02]))
        _works(machine)
        machine.check_guard()
