# SPDX-License-Identifier: MIT
"""The device-level program: one operation an instruction, on VMEM buffers.

It is what lowering makes, planning places, scheduling synchronises and code
generation encodes. Operands are views of buffers, global places and lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from . import hw
from .ir import UNKNOWN, Dim, Location, Size, Type, max_size

UNPLACED = -1


@dataclass(slots=True, eq=False)
class Buffer:
    """A piece of VMEM, sized for its lengths' maxima; offset is the planner's."""

    name: str
    bytes: int
    offset: int = UNPLACED


@dataclass(frozen=True, slots=True)
class View:
    """Rows inside a buffer: a matrix, a slice of one, a list."""

    buffer: Buffer
    offset: int
    rows: Size
    row_bytes: int
    stride: int

    @property
    def dense(self) -> bool:
        return self.stride == self.row_bytes

    def span(self) -> tuple[int, int]:
        """First and past-last byte in VMEM, at the lengths' maxima."""
        start = self.buffer.offset + self.offset
        return start, start + (max_size(self.rows) - 1) * self.stride + self.row_bytes

    def __str__(self) -> str:
        at = f"+{self.offset}" if self.offset else ""
        return f"%{self.buffer.name}{at}[{self.rows} x {self.row_bytes} / {self.stride}]"


@dataclass(frozen=True, slots=True)
class Global:
    """A place in HBM or host memory: argument + offset + slot_bytes * slots.

    slots is the length that the states' sizes depend on. With pointer, the
    address is the launch block's word of that name instead. state names what
    the place holds when it is written as well as read.
    """

    arg: str
    offset: int = 0
    slot_bytes: int = 0
    pointer: str = ""
    state: str = ""

    def __str__(self) -> str:
        if self.pointer:
            return f"@[{self.pointer}]"
        slots = f"+{self.slot_bytes}*slots" if self.slot_bytes else ""
        return f"@{self.arg}+{self.offset}{slots}"


Operand = View | Global | Dim | int


@dataclass(slots=True, eq=False)
class TileOp:
    """One device operation. unless_null: skipped when that pointer is zero.

    wait: (counter, count) that it waits for; signal: the counter it adds to.
    """

    name: str
    operands: dict[str, Operand]
    fmt: str = "NONE"
    mode: str = ""
    flags: tuple[str, ...] = ()
    aux: float | None = None
    fields: dict[str, int] = field(default_factory=dict)
    loc: Location = UNKNOWN
    source: str = ""  # the graph operation
    unless_null: str = ""
    wait: tuple[int, int] | None = None
    signal: int = 0

    @property
    def engine(self) -> str:
        return hw.OPS[self.name].engine

    def accesses(self) -> Iterator[tuple[View, bool]]:
        """Every view, with whether it is written: only `dst` ever is."""
        for name, operand in self.operands.items():
            if isinstance(operand, View):
                yield operand, name == "dst"

    def states(self) -> Iterator[tuple[str, bool]]:
        """Every state it touches, with whether it writes it."""
        for operand in self.operands.values():
            if isinstance(operand, Global) and operand.state:
                yield operand.state, self.name == "DMA_SCATTER"

    def __str__(self) -> str:
        parts = [f"{key}={value}" for key, value in self.operands.items()]
        parts += [f"{key}={value}" for key, value in self.fields.items()]
        if self.aux is not None:
            parts.append(f"aux={self.aux!r}")
        name = ".".join(filter(None, (self.name, self.fmt.replace("NONE", ""), self.mode)))
        flags = f" {'|'.join(self.flags)}" if self.flags else ""
        condition = f" unless_null={self.unless_null}" if self.unless_null else ""
        wait = f" wait c{self.wait[0]}>={self.wait[1]}" if self.wait else ""
        signal = f" signal c{self.signal}" if self.signal else ""
        place = f"  // {self.loc.module}" if self.loc.module else ""
        return f"{name}{flags} {', '.join(parts)}{condition}{wait}{signal}{place}"


@dataclass(frozen=True, slots=True)
class Field:
    """A place in the launch block. kind: input, output, length or pointer.

    most: the maximum of a length.
    """

    name: str
    kind: str
    offset: int
    type: Type
    bytes: int
    most: int = 0


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A tensor of the weight image, made of params one after the other.

    format: how the hardware calls the way it lies there: in tiles what a matmul
        takes, row by row anything else.
    """

    name: str
    offset: int
    bytes: int
    type: Type
    format: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One cache inside the state argument: offset and size are a slot's bytes."""

    name: str
    offset: int
    bytes: int
    type: Type


@dataclass(slots=True, eq=False)
class Program:
    """The whole device program with what it needs of its surroundings."""

    name: str
    ops: list[TileOp]
    buffers: list[Buffer]
    arguments: tuple[str, ...]
    fields: dict[str, Field]
    launch_bytes: int
    weights: list[WeightEntry]
    weight_bytes: int
    states: list[StateEntry]
    slots: Size = 0
    peak: int = 0

    def __str__(self) -> str:
        lines = [f"program {self.name}({', '.join(self.arguments)})"]
        for buffer in self.buffers:
            at = f" at 0x{buffer.offset:x}" if buffer.offset != UNPLACED else ""
            lines.append(f"  buffer %{buffer.name}: {buffer.bytes} bytes{at}")
        if self.peak:
            lines.append(f"  peak {self.peak} of {hw.VMEM_BYTES} bytes")
        lines += [f"  {op}" for op in self.ops]
        return "\n".join(lines) + "\n"
