# SPDX-License-Identifier: MIT
"""Computes only the rows that are taken in the end.

take_rows(f(x)) is f(take_rows(x)) for every f that works row by row, bit for bit.
A prompt's last layer then computes one row after its attention, not all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir import Graph, Op, Type, Value

# Operations that work row by row, with the operands whose rows are the result's.
_ROWWISE = {
    "rms_norm": (0,),
    "matmul": (0,),
    "add": (0, 1),
    "mul": (0, 1),
    "silu_mul": (0, 1),
    "slice": (0,),
    "rope": (0, 1),
}


@dataclass(frozen=True, slots=True)
class Narrow:
    """rows: off, nothing is done."""

    rows: bool = True

    def run(self, graph: Graph) -> Graph:
        wanted = _wanted(graph) if self.rows else {}
        if not wanted:
            return graph
        rewrite = _Rewrite(Graph(graph.name), wanted)
        for op in graph.ops:
            rewrite.op(op)
        return rewrite.graph


def _wanted(graph: Graph) -> dict[Value, Value]:
    """Results of which only some rows are used, with the index of these rows."""
    users = graph.users()
    defined = {value: place for place, value in enumerate(users)}
    wanted: dict[Value, Value] = {}
    for op in reversed(graph.ops):
        if op.name not in _ROWWISE or not users[op.value]:
            continue
        indices = {_index(op.value, user, wanted) for user in users[op.value]}
        index = indices.pop()
        # The index must exist where the operation is.
        if not indices and index is not None and defined[index] < defined[op.value]:
            wanted[op.value] = index
    return wanted


def _index(value: Value, user: Op, wanted: dict[Value, Value]) -> Value | None:
    """Which rows of a value its user uses; None for all."""
    if user.name == "take_rows" and user.operands[0] is value:
        return user.operands[1]
    if user.result is None or user.result not in wanted:
        return None
    rows = [user.operands[at] for at in _ROWWISE[user.name]]
    others = [operand for operand in user.operands if operand not in rows]
    return wanted[user.result] if value in rows and value not in others else None


@dataclass(slots=True, eq=False)
class _Rewrite:
    graph: Graph
    wanted: dict[Value, Value]
    new: dict[Value, Value] = field(default_factory=dict)
    taken: dict[tuple[Value, Value], Value] = field(default_factory=dict)

    def op(self, op: Op) -> None:
        if op.name == "take_rows" and op.operands[0] in self.wanted:
            self.new[op.value] = self.new[op.operands[0]]  # it has these rows only
            return
        operands = [self.new[value] for value in op.operands]
        type_ = op.result.type if op.result else None
        index = self.wanted.get(op.result) if op.result else None
        if index is not None and type_ is not None:
            for at in _ROWWISE[op.name]:
                if op.operands[at] not in self.wanted:
                    operands[at] = self.take(operands[at], self.new[index], op)
            type_ = Type((index.shape[0], *type_.shape[1:]), type_.dtype)
        made = self.graph.append(op.name, operands, dict(op.attrs), type_, op.loc)
        if op.result is not None:
            self.new[op.result] = made.value

    def take(self, value: Value, index: Value, op: Op) -> Value:
        if (value, index) not in self.taken:
            type_ = Type((index.shape[0], value.width()), "f32")
            made = self.graph.append("take_rows", [value, index], {}, type_, op.loc)
            self.taken[value, index] = made.value
        return self.taken[value, index]
