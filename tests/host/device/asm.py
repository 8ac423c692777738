# SPDX-License-Identifier: MIT
"""A small assembler for tests: keyword operands in, bytes out.

An operand is a number, a register (`R(9)`), or both (`R(9) + 64`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from vtpu_compiler import hw


@dataclass(frozen=True)
class R:
    """A scalar register plus an immediate."""

    number: int
    offset: int = 0

    def __add__(self, more: int) -> R:
        return R(self.number, self.offset + more)


def f32_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def ins(
    name: str,
    *,
    wait: tuple[int, int | R] | None = None,
    signal: int = 0,
    fmt: str = "NONE",
    mode: str = "",
    flags: tuple[str, ...] = (),
    aux: int | float = 0,
    **operands: int | R,
) -> bytes:
    """One instruction. What OPS does not name for it is an error here, too."""
    op = hw.OPS[name]
    registers, immediates = [0] * 8, [0] * 8
    for index, (operand, kind) in enumerate(op.operands):
        value = operands.pop(operand)
        if kind == "rd":
            value = value if isinstance(value, R) else R(value)
        value = value if isinstance(value, R) else R(0, value)
        registers[index], immediates[index] = value.number, value.offset
    whole = operands.pop(op.imm64, 0) if op.imm64 else 0
    assert isinstance(whole, int)
    imm64 = whole
    for field, (low, high) in op.imm64_fields.items():
        value = operands.pop(field)
        assert isinstance(value, int) and value < 1 << (high - low + 1)
        imm64 |= value << low
    assert not operands, f"{name} has no {sorted(operands)}"
    counter, target = wait or (0, 0)
    target = target if isinstance(target, R) else R(0, target)
    flag_bits = sum(op.flags[flag] for flag in flags)
    return struct.pack(
        "<8BII8B8IQ",
        op.code,
        flag_bits,
        signal,
        counter,
        target.number,
        hw.FMT[fmt],
        0,
        op.modes[mode] if mode else 0,
        target.offset,
        f32_bits(aux) if isinstance(aux, float) else aux,
        *registers,
        *immediates,
        imm64,
    )


def program(*instructions: bytes) -> bytes:
    """Ends with HALT."""
    return b"".join(instructions) + ins("HALT")


def pc(index: int) -> int:
    """The byte offset of an instruction."""
    return index * hw.INSTR_BYTES


def vmem_program(
    loads: list[tuple[int, int, int]], body: list[bytes], stores: list[tuple[int, int, int]]
) -> bytes:
    """loads: (vmem, hbm, bytes); the body; stores: (hbm, vmem, bytes). One after the other."""

    def one_row(name: str, dst: int, src: int, size: int) -> bytes:
        # Counts end at 2^20 and a row is a multiple of 4 bytes.
        rows = max(1, size >> 18)
        assert size % rows == 0
        return ins(
            name,
            dst=dst,
            src=src,
            rows=rows,
            row_bytes=size // rows,
            dst_stride=size // rows,
            src_stride=size // rows,
        )

    return program(
        *[one_row("DMA_LOAD", *load) for load in loads],
        ins("SYNC"),
        *body,
        ins("SYNC"),
        *[one_row("DMA_STORE", *store) for store in stores],
    )


def remote_store(chip: int, dst: int | R, src: int | R, size: int, counter: int = 0) -> bytes:
    """REMOTE_STORE of one row of global memory, which counts on arrival."""
    return ins(
        "REMOTE_STORE",
        chip=chip,
        dst=dst,
        src=src,
        rows=1,
        row_bytes=size,
        dst_stride=0,
        src_stride=0,
        counter=counter,
        mode="GLOBAL",
    )
