# SPDX-License-Identifier: MIT
"""Checks a whole graph: every operation, and that definitions come first."""

from __future__ import annotations

from .ir import QUANTISED, CompileError, Dim, Graph, Value, max_size
from .ops import LEAVES, infer


def verify(graph: Graph) -> None:
    """Raises CompileError that names the operation and its source line."""
    defined: set[Value] = set()
    leaves: dict[tuple[str, object], Value] = {}
    dims: dict[str, Dim] = {}
    for op in graph.ops:
        try:
            for operand in op.operands:
                if operand not in defined:
                    raise CompileError(f"{op.name}: an operand is not defined before its use")
            expected = infer(op.name, op.operands, op.attrs)
            found = op.result.type if op.result else None
            if op.name in LEAVES:
                key = (op.name, op.attrs["name"])
                if found is None:
                    raise CompileError(f"{op.name} has no result")
                if key in leaves:
                    raise CompileError(f"{op.name} {key[1]} appears twice")
                leaves[key] = op.value
                if op.name != "param" and found.dtype in QUANTISED:
                    raise CompileError(f"{op.name} {key[1]} cannot be {found.dtype}: a param can")
                if any(max_size(size) < 1 for size in found.shape):
                    raise CompileError(f"{op.name} {key[1]} is empty: {found}")
            elif found != expected:
                raise CompileError(f"{op.name} gives {expected}, the graph says {found}")
            for size in found.shape if found else ():
                if isinstance(size, Dim) and dims.setdefault(size.name, size) != size:
                    raise CompileError(f"the length {size.name} has two maxima")
        except CompileError as error:
            place = f" (at {op.loc.file}:{op.loc.line}, module {op.loc.module})"
            raise CompileError(f"{error}{place if op.loc.file else ''}") from None
        if op.result is not None:
            defined.add(op.result)
