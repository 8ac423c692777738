# SPDX-License-Identifier: MIT
"""A program that stops at gates, so that a test holds it in mid-flight for sure.

Every phase computes on scalars, VMEM and all engines, issues instructions that
wait for a counter, says how far it is, and spins until the gate is open: when it
is saved there, registers, counters, engine queues and VMEM all matter.
"""

from __future__ import annotations

import struct

import numerics_reference as ref
import numpy as np
from asm import R, ins, program
from vtpu_compiler import hw

PHASES = 4
ROWS, WIDTH = 8, 64
BYTES = 0x10000  # of HBM, from the address on that the test gives
_B, _WEIGHT, _GATE, _PROGRESS, _OUT = 0x1000, 0x2000, 0x8000, 0x8008, 0x9000
_X_V, _B_V, _Y_V = 0, 0x1000, 0x2000
_OPENED, _ADDED, _MULTIPLIED = 2, 3, 4  # counters


def data(seed: int = 1) -> bytes:
    """What lies at the address before the program starts; the gate is shut."""
    rng = np.random.default_rng(seed)
    x, b = rng.standard_normal((2, ROWS, WIDTH)).astype(np.float32)
    q = rng.integers(-127, 128, (WIDTH, WIDTH)).astype(np.int8)
    d = rng.uniform(0.001, 0.01, (WIDTH, WIDTH // 32)).astype(np.float16)
    tiles = ref.make_tiles(q, d, None, hw.FMT["Q8_0"]).tobytes()
    image = bytearray(BYTES)
    for at, part in ((0, x.tobytes()), (_B, b.tobytes()), (_WEIGHT, tiles)):
        image[at : at + len(part)] = part
    return bytes(image)


def gate(at: int) -> int:
    """Address of the 8-byte word that lets phases below its value pass."""
    return at + _GATE


def progress(at: int) -> int:
    """Address of the 8-byte word that counts the gates reached."""
    return at + _PROGRESS


def results(image: bytes) -> bytes:
    """Of the BYTES after the program's end."""
    return image[_OUT:]


def _rows(name: str, **operands: int) -> bytes:
    size = WIDTH * 4
    return ins(name, rows=ROWS, row_bytes=size, dst_stride=size, src_stride=size, **operands)


def _vector(name: str, dst: int, a: int, b: int, **waits: object) -> bytes:
    size = WIDTH * 4
    strides = {"dst_stride": size, "a_stride": size, "b_stride": size}
    return ins(name, dst=dst, a=a, b=b, rows=ROWS, width=WIDTH, **strides, **waits)  # type: ignore[arg-type]


def _matmul(at: int, **waits: object) -> bytes:
    return ins(
        "MATMUL",
        fmt="Q8_0",
        flags=("ACCUMULATE",),
        dst=_Y_V,
        src=_X_V,
        weight=at + _WEIGHT,
        m=ROWS,
        n=WIDTH,
        k=WIDTH,
        dst_stride=WIDTH * 4,
        src_stride=WIDTH * 4,
        **waits,  # type: ignore[arg-type]
    )


def _phase(at: int, phase: int, first: int) -> list[bytes]:
    """`first`: index of its first instruction in the program."""
    body = [
        _vector("V_ADD", _X_V, _X_V, _B_V),
        ins("SYNC"),
        _matmul(at),
        ins("SYNC"),
        _vector("V_MUL", _X_V, _X_V, _B_V),
        ins("SYNC"),
        ins("MUL", rd=R(9), a=R(9), b=R(20)),
        ins("ADD", rd=R(9), a=R(9), b=phase + 1),
        # They wait in their queues until the gate is passed.
        _vector("V_ADD", _X_V, _X_V, _Y_V, wait=(_OPENED, phase + 1), signal=_ADDED),
        _matmul(at, wait=(_ADDED, phase + 1), signal=_MULTIPLIED),
        ins(
            "DMA_STORE",
            dst=at + _OUT + phase * 0x1000,
            src=_Y_V,
            rows=ROWS,
            row_bytes=WIDTH * 4,
            dst_stride=WIDTH * 4,
            src_stride=WIDTH * 4,
            wait=(_MULTIPLIED, phase + 1),
        ),
        ins("ST", mode="U64", addr=at + _PROGRESS, value=phase + 1),
    ]
    loop = (first + len(body)) * hw.INSTR_BYTES
    return [
        *body,
        ins("LD", mode="U64", rd=R(10), addr=at + _GATE),
        ins("BLT", a=R(10), b=phase + 1, target=loop),
        ins("NOP", signal=_OPENED),
        ins("SYNC"),
    ]


def code(at: int) -> bytes:
    """The program, for a context where its data lies at the address `at`."""
    words = [
        ins("LI", rd=R(20), value=6364136223846793005),
        _rows("DMA_LOAD", dst=_X_V, src=at),
        _rows("DMA_LOAD", dst=_B_V, src=at + _B),
        ins("SYNC"),
    ]
    for phase in range(PHASES):
        words += _phase(at, phase, len(words))
    return program(
        *words,
        _rows("DMA_STORE", dst=at + _OUT + PHASES * 0x1000, src=_X_V),
        _rows("DMA_STORE", dst=at + _OUT + PHASES * 0x1000 + 0x800, src=_Y_V),
        ins("ST", mode="U64", addr=at + _OUT + 0xFF8, value=R(9)),
    )


def open_gate(phases: int) -> bytes:
    return struct.pack("<Q", phases)
