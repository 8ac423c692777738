# SPDX-License-Identifier: MIT
"""Dead code, whole and nested slices, silu(a) * b, equal operations."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import Graph, Op, Value
from ..ops import OPS


@dataclass(frozen=True, slots=True)
class Canonicalise:
    """dead: removes what no output needs. common: merges equal operations."""

    dead: bool = True
    common: bool = True

    def run(self, graph: Graph) -> Graph:
        replaced: dict[Value, Value] = {}
        seen: dict[object, Value] = {}
        result = Graph(graph.name)
        for old in graph.ops:
            op = _copy(old, [replaced.get(value, value) for value in old.operands])
            same = _simplify(op)
            if same is None and self.common and not OPS[op.name].effect:
                key = (op.name, tuple(op.operands), tuple(sorted(op.attrs.items())))
                same = seen.get(key)
                if op.result is not None:
                    seen.setdefault(key, op.result)
            if same is None:
                result.ops.append(op)
                same = op.result
            if old.result is not None and same is not None:
                replaced[old.result] = same
        if self.dead:
            result.ops = _live(result.ops)
        return result


def _copy(op: Op, operands: list[Value]) -> Op:
    copy = Op(op.name, operands, dict(op.attrs), op.loc)
    if op.result is not None:
        copy.result = Value(op.result.type, copy)
    return copy


def _simplify(op: Op) -> Value | None:
    """The value that op is equal to, or None; may rewrite op in place."""
    if op.name == "mul":
        _silu_mul(op)
    if op.name != "slice":
        return None
    source = op.operands[0]
    if source.op.name == "slice":
        inner = source.op
        op.attrs["start"] = op.int_attr("start") + inner.int_attr("start")
        op.operands[0] = source = inner.operands[0]
    if op.value.type == source.type:
        return source
    return None


def _silu_mul(op: Op) -> None:
    """What the device has one operation for, and no other way to compute silu."""
    for gate, up in (op.operands, op.operands[::-1]):
        if gate.op.name == "silu":
            op.name = "silu_mul"
            op.operands = [gate.op.operands[0], up]
            return


def _live(ops: list[Op]) -> list[Op]:
    needed: set[Value] = set()
    kept: list[Op] = []
    for op in reversed(ops):
        if OPS[op.name].effect or op.result in needed:
            needed.update(op.operands)
            kept.append(op)
    return kept[::-1]
