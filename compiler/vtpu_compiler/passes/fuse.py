# SPDX-License-Identifier: MIT
"""Fewer, larger operations: what the device does in one instruction.

- matmuls of one x: one matmul over the rows of all weights, and slices
- x + matmul(...), x unused afterwards: matmul_add, in place on x
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import Graph, Op, Type, Value
from ..ops import LEAVES


@dataclass(frozen=True, slots=True)
class Fuse:
    """siblings: matmuls of one x. epilogue: matmul_add."""

    siblings: bool = True
    epilogue: bool = True

    def run(self, graph: Graph) -> Graph:
        if self.siblings:
            graph = _siblings(graph)
        if self.epilogue:
            graph = _epilogue(graph)
        return graph


def _replace(ops: list[Op], replaced: dict[Value, Value]) -> None:
    for op in ops:
        op.operands = [replaced.get(value, value) for value in op.operands]


def _group_key(op: Op, users: dict[Value, list[Op]]) -> object | None:
    """Matmuls with equal keys may become one."""
    if op.name != "matmul":
        return None
    x, weight = op.operands
    if weight.op.name != "param" or len(users[weight]) != 1:
        return None  # a tied weight stays where its other user finds it
    # Attention wants q dense, which a slice is not.
    if any(user.name == "paged_attention" for user in users[op.value]):
        return None
    return (x, weight.dtype)


def _siblings(graph: Graph) -> Graph:
    users = graph.users()
    groups: dict[object, list[Op]] = {}
    for op in graph.ops:
        key = _group_key(op, users)
        if key is not None:
            groups.setdefault(key, []).append(op)
    first = {group[0]: group for group in groups.values() if len(group) > 1}
    members = {op for group in first.values() for op in group}

    result = Graph(graph.name)
    replaced: dict[Value, Value] = {}
    for op in graph.ops:
        if op not in members:
            result.ops.append(op)
        elif op in first:
            _merge(result, first[op], replaced)
    _replace(result.ops, replaced)
    result.ops = [op for op in result.ops if op.name != "param" or _used(op, members)]
    return result


def _used(param: Op, merged: set[Op]) -> bool:
    return not any(op.operands[1].op is param for op in merged)


def _merge(result: Graph, group: list[Op], replaced: dict[Value, Value]) -> None:
    x = group[0].operands[0]
    weights = [op.operands[1] for op in group]
    rows = [op.value.width() for op in group]
    names = tuple(weight.op.str_attr("name") for weight in weights)
    loc = group[0].loc
    param = result.append(
        "param",
        [],
        {"name": "+".join(names), "parts": names},
        Type((sum(rows), x.width()), weights[0].dtype),
        loc,
    ).value
    product = result.append(
        "matmul", [x, param], {}, Type((x.shape[0], sum(rows)), "f32"), loc
    ).value
    start = 0
    for op, size in zip(group, rows, strict=True):
        piece = result.append(
            "slice", [product], {"start": start, "size": size}, op.value.type, op.loc
        )
        replaced[op.value] = piece.value
        start += size


def _epilogue(graph: Graph) -> Graph:
    users = graph.users()
    place = {op: index for index, op in enumerate(graph.ops)}
    dropped: set[Op] = set()
    for op in graph.ops:
        if op.name != "add":
            continue
        for x, product in (op.operands, op.operands[::-1]):
            if _accumulates(op, x, product, users, place):
                dropped.add(product.op)
                op.name = "matmul_add"
                op.operands = [*product.op.operands, x]
                op.loc = product.op.loc
                break
    result = Graph(graph.name)
    result.ops = [op for op in graph.ops if op not in dropped]
    return result


def _accumulates(
    add: Op, x: Value, product: Value, users: dict[Value, list[Op]], place: dict[Op, int]
) -> bool:
    """Whether the product may be added onto x where x lies."""
    if product.op.name != "matmul" or users[product] != [add] or x is product:
        return False
    # A slice is a view of something else, a leaf is not ours to overwrite.
    if x.op.name in ("slice", *LEAVES) or _whole(product.op.operands[0]) is x:
        return False
    # An output may be stored at the very end.
    return all(user is add or _done(user, place[add], users, place) for user in users[x])


def _whole(value: Value) -> Value:
    """What a slice is a view of."""
    while value.op.name == "slice":
        value = value.op.operands[0]
    return value


def _done(op: Op, at: int, users: dict[Value, list[Op]], place: dict[Op, int]) -> bool:
    """Whether the operation has read its operands before position at."""
    if op.name == "slice":
        return all(_done(user, at, users, place) for user in users[op.value])
    return op.name != "output" and place[op] < at
