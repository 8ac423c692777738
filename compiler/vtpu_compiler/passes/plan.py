# SPDX-License-Identifier: MIT
"""Places buffers in VMEM: those that never live at once may share addresses."""

from __future__ import annotations

from dataclasses import dataclass

from .. import hw
from ..ir import CompileError
from ..tile import Buffer, Program


@dataclass(frozen=True, slots=True)
class Plan:
    """limit: bytes of VMEM to use."""

    limit: int = hw.VMEM_BYTES

    def run(self, program: Program) -> Program:
        """Sets the offset of every buffer, largest first, each as low as it can be."""
        lifetimes = _lifetimes(program)
        placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
        program.peak = 0
        order = sorted(lifetimes, key=lambda buffer: (-buffer.bytes, lifetimes[buffer]))
        for buffer in order:
            first, last = lifetimes[buffer]
            offset = 0
            for start, end, other_first, other_last in placed:
                if other_first > last or other_last < first:
                    continue
                if start - offset >= buffer.bytes:
                    break
                offset = max(offset, end)
            buffer.offset = offset
            placed.append((offset, offset + buffer.bytes, first, last))
            placed.sort()
            program.peak = max(program.peak, offset + buffer.bytes)
        program.buffers = [buffer for buffer in program.buffers if buffer in lifetimes]
        if program.peak > self.limit:
            raise CompileError(_too_large(program, lifetimes, self.limit))
        return program


def _lifetimes(program: Program) -> dict[Buffer, tuple[int, int]]:
    """First and last operation that touches each buffer."""
    lifetimes: dict[Buffer, tuple[int, int]] = {}
    for index, op in enumerate(program.ops):
        for view, _ in op.accesses():
            first, _ = lifetimes.get(view.buffer, (index, index))
            lifetimes[view.buffer] = (first, index)
    return lifetimes


def _too_large(program: Program, lifetimes: dict[Buffer, tuple[int, int]], limit: int) -> str:
    def alive(index: int) -> list[Buffer]:
        return [buffer for buffer, (a, b) in lifetimes.items() if a <= index <= b]

    worst = max(range(len(program.ops)), key=lambda i: sum(b.bytes for b in alive(i)))
    largest = sorted(alive(worst), key=lambda buffer: -buffer.bytes)[:4]
    names = ", ".join(f"{buffer.name} {buffer.bytes}" for buffer in largest)
    op = program.ops[worst]
    return (
        f"VMEM: the program needs {program.peak} bytes at its maximum lengths, the limit is "
        f"{limit}; most at {op.source} in {op.loc.module or 'the model'} ({names}). "
        "Lower max_tokens or max_rows"
    )
