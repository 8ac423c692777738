# SPDX-License-Identifier: MIT
"""The graph IR: types, values, operations, graphs.

A graph is a list of operations in execution order; each has at most one
result. What an operation means, and which operands it accepts, is in ops.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

QUANTISED = ("q8_0", "q4_0", "q4_1", "i8")
FLOATS = ("f32", "f16", "bf16")
MATRICES = (*QUANTISED, "bf16")  # of a matmul's weight
DTYPES = (*FLOATS, "i32", *QUANTISED)
ELEMENT_BYTES = {"f32": 4, "i32": 4, "f16": 2, "bf16": 2}

Attr = str | int | float | tuple[str, ...]


class CompileError(ValueError):
    """The graph or the options cannot be compiled; the message says why."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A runtime length: a name, and the greatest value it may take."""

    name: str
    max: int

    def __str__(self) -> str:
        return f"{self.name}<={self.max}"


Size = int | Dim


def max_size(size: Size) -> int:
    """The size itself, or the maximum of a runtime length."""
    return size.max if isinstance(size, Dim) else size


@dataclass(frozen=True, slots=True)
class Type:
    """A tensor's shape and element type."""

    shape: tuple[Size, ...]
    dtype: str

    def __str__(self) -> str:
        return "x".join([*map(str, self.shape), self.dtype])


@dataclass(frozen=True, slots=True)
class Location:
    """Where an operation comes from: model source line and dotted module name."""

    file: str = ""
    line: int = 0
    module: str = ""


UNKNOWN = Location()


@dataclass(slots=True, eq=False)
class Value:
    """The result of an operation. Compared by identity."""

    type: Type
    op: Op

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    def width(self) -> int:
        """The last dimension, which is never a runtime length."""
        size = self.type.shape[-1]
        assert isinstance(size, int)
        return size


@dataclass(slots=True, eq=False)
class Op:
    """One operation. Compared by identity."""

    name: str
    operands: list[Value]
    attrs: dict[str, Attr]
    loc: Location = UNKNOWN
    result: Value | None = None

    @property
    def value(self) -> Value:
        """The result of an operation that is known to have one."""
        assert self.result is not None, self.name
        return self.result

    def str_attr(self, name: str) -> str:
        value = self.attrs[name]
        assert isinstance(value, str)
        return value

    def int_attr(self, name: str) -> int:
        value = self.attrs[name]
        assert isinstance(value, int)
        return value

    def float_attr(self, name: str) -> float:
        value = self.attrs[name]
        assert isinstance(value, (int, float))
        return float(value)

    def describe(self) -> str:
        """For messages: the operation and the module it comes from."""
        return f"{self.name} in {self.loc.module}" if self.loc.module else self.name


@dataclass(slots=True, eq=False)
class Graph:
    """Operations in execution order; operands come before their users."""

    name: str
    ops: list[Op] = field(default_factory=list)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def append(
        self,
        name: str,
        operands: list[Value],
        attrs: dict[str, Attr],
        result: Type | None,
        loc: Location = UNKNOWN,
    ) -> Op:
        """Adds an operation as it is; builder.Graph infers the result's type."""
        op = Op(name, operands, attrs, loc)
        if result is not None:
            op.result = Value(result, op)
        self.ops.append(op)
        return op

    def users(self) -> dict[Value, list[Op]]:
        """Every value with the operations that use it, in order."""
        table: dict[Value, list[Op]] = {op.result: [] for op in self.ops if op.result}
        for op in self.ops:
            for operand in dict.fromkeys(op.operands):
                table[operand].append(op)
        return table
