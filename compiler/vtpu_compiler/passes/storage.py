# SPDX-License-Identifier: MIT
"""Where everything outside VMEM lies: launch block, weight image, states."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ir import ELEMENT_BYTES, CompileError, Dim, Graph, Size, Type, Value, max_size
from ..layout import tensor_bytes
from ..ops import tile_format
from ..tile import Field, StateEntry, WeightEntry

_ALIGN = 64
_COUNT_MAX = 1 << 20  # the greatest count an instruction takes


@dataclass(slots=True, eq=False)
class Storage:
    """small_*: the part of the launch block that holds the small inputs.

    vectors: the part of the weight image that holds one-dimensional params.
    """

    arguments: tuple[str, ...]
    fields: dict[str, Field]
    launch_bytes: int
    small_start: int
    small_end: int
    weights: list[WeightEntry]
    weight_bytes: int
    vectors: tuple[int, int]
    states: list[StateEntry]
    slots: Size
    _entries: dict[str, WeightEntry]

    def entry(self, param: Value) -> WeightEntry:
        return self._entries[param.op.str_attr("name")]


def assign_storage(graph: Graph, small_inputs: int) -> Storage:
    """small_inputs: the bytes up to which an input counts as small."""
    states, slots = _states(graph)
    fields, launch_bytes, small = _launch(graph, small_inputs)
    weights, weight_bytes, vectors = _weights(graph)
    arguments = ("weights", "launch", "state") if states else ("weights", "launch")
    entries = {entry.name: entry for entry in weights}
    return Storage(
        arguments, fields, launch_bytes, *small, weights, weight_bytes, vectors, states, slots,
        entries,
    )  # fmt: skip


def _align(value: int) -> int:
    return -(-value // _ALIGN) * _ALIGN


def _launch(graph: Graph, small_inputs: int) -> tuple[dict[str, Field], int, tuple[int, int]]:
    """Lengths, pointers, small inputs, large inputs, outputs."""
    fields: dict[str, Field] = {}
    at = 0

    def add(name: str, kind: str, type_: Type, size: int, align: int, most: int = 0) -> None:
        nonlocal at
        if name in fields:
            raise CompileError(f"the launch block has two fields {name!r}")
        at = -(-at // align) * align
        fields[name] = Field(name, kind, at, type_, size, most)
        at += size

    dims = {
        size.name: size
        for op in graph.ops
        if op.name in ("input", "state")
        for size in op.value.shape
        if isinstance(size, Dim)
    }
    inputs = sorted(
        ((_dense_bytes(op.value.type), op) for op in graph.ops if op.name == "input"),
        key=lambda item: item[0] > small_inputs,
    )
    outputs = [op for op in graph.ops if op.name == "output"]
    for dim in dims.values():
        add(dim.name, "length", Type((), "i32"), 4, 4, dim.max)
    for op in outputs:
        if op.attrs.get("indirect"):
            add(f"{op.attrs['name']}_va", "pointer", op.operands[0].type, 8, 8)
    small_start = small_end = _align(at)
    for size, op in inputs:
        add(op.str_attr("name"), "input", op.value.type, size, _ALIGN)
        if size <= small_inputs:
            small_end = at
    for op in outputs:
        if not op.attrs.get("indirect"):
            type_ = op.operands[0].type
            add(op.str_attr("name"), "output", type_, _dense_bytes(type_), _ALIGN)
    return fields, _align(at), (small_start, small_end)


def _dense_bytes(type_: Type) -> int:
    return math.prod(map(max_size, type_.shape)) * ELEMENT_BYTES[type_.dtype]


def _weights(graph: Graph) -> tuple[list[WeightEntry], int, tuple[int, int]]:
    """Vectors first, next to each other; then everything in order of use."""
    params = [op for op in graph.ops if op.name == "param"]
    params.sort(key=lambda op: len(op.value.shape) > 1)
    users = graph.users()
    entries: list[WeightEntry] = []
    at = vectors_end = 0
    for op in params:
        type_, name = op.value.type, op.str_attr("name")
        parts = op.attrs.get("parts", (name,))
        assert isinstance(parts, tuple)
        shape = [max_size(size) for size in type_.shape]
        if any(isinstance(size, Dim) for size in type_.shape):
            raise CompileError(f"the shape of param {name} depends on a runtime length")
        size = tensor_bytes(type_.dtype, shape)
        multiplied = any(user.name in ("matmul", "matmul_add") for user in users[op.value])
        format_ = tile_format(type_.dtype) if multiplied else type_.dtype.upper()
        entries.append(WeightEntry(name, at, size, type_, format_, parts))
        at = _align(at + size)
        if len(shape) == 1:
            vectors_end = at
    if at > 1 << 32:
        raise CompileError(f"the weights take {at} bytes, an instruction reaches 4 GiB")
    return entries, at, (0, vectors_end)


def _states(graph: Graph) -> tuple[list[StateEntry], Size]:
    """All states lie in one argument, one after the other."""
    entries: list[StateEntry] = []
    slots: Size = 0
    at = 0
    for op in graph.ops:
        if op.name != "state":
            continue
        type_, name = op.value.type, op.str_attr("name")
        if entries and type_.shape[0] != slots:
            raise CompileError(f"state {name} has {type_.shape[0]} slots, another has {slots}")
        slots = type_.shape[0]
        size = op.value.width() * ELEMENT_BYTES[type_.dtype]
        entries.append(StateEntry(name, at, size, type_))
        at += size
    if max_size(slots) > _COUNT_MAX:
        raise CompileError(f"{slots} slots are more than an instruction counts")
    return entries, slots
