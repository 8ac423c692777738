# SPDX-License-Identifier: MIT
"""Graphs as text: MLIR's generic form, which parser.py reads back.

Stock MLIR tools read it too, when they allow unregistered dialects. A runtime
length prints as `?`; the tensor's encoding names each with its maximum.
"""

from __future__ import annotations

from .ir import QUANTISED, UNKNOWN, Attr, Dim, Graph, Location, Op, Type, Value


def format_type(type_: Type) -> str:
    sizes = ["?" if isinstance(size, Dim) else str(size) for size in type_.shape]
    element = f"!vtpu.{type_.dtype}" if type_.dtype in QUANTISED else type_.dtype
    dims = ", ".join(f'"{size}"' for size in type_.shape if isinstance(size, Dim))
    return f"tensor<{'x'.join([*sizes, element])}{f', [{dims}]' if dims else ''}>"


def format_string(text: str) -> str:
    """A quoted string; what is not printable ASCII as UTF-8 bytes in hexadecimal."""
    quoted = []
    for char in text:
        if char in '"\\':
            quoted.append("\\" + char)
        elif " " <= char <= "~":
            quoted.append(char)
        else:
            quoted.extend(f"\\{byte:02X}" for byte in char.encode())
    return f'"{"".join(quoted)}"'


def format_attr(value: Attr) -> str:
    if isinstance(value, str):
        return format_string(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(format_string, value))}]"
    if isinstance(value, int):
        return f"{value} : i64"
    text = repr(value)
    if "." not in text:  # MLIR wants the point in 1.0e-05
        mantissa, exponent = text.split("e")
        text = f"{mantissa}.0e{exponent}"
    return f"{text} : f64"


def format_location(loc: Location) -> str:
    if loc == UNKNOWN:
        return ""
    place = f"{format_string(loc.file)}:{loc.line}:0"
    if loc.module:
        place = f"{format_string(loc.module)}({place})"
    return f" loc({place})"


def format_op(op: Op, names: dict[Value, str]) -> str:
    operands = ", ".join(names[value] for value in op.operands)
    types = ", ".join(format_type(value.type) for value in op.operands)
    result = f"{names[op.result]} = " if op.result else ""
    result_type = format_type(op.result.type) if op.result else "()"
    attrs = ", ".join(f"{key} = {format_attr(value)}" for key, value in op.attrs.items())
    return (
        f'{result}"vtpu.{op.name}"({operands}){f" {{{attrs}}}" if attrs else ""} : '
        f"({types}) -> {result_type}{format_location(op.loc)}"
    )


def format_graph(graph: Graph) -> str:
    names: dict[Value, str] = {}
    lines = ['"builtin.module"() ({']
    for op in graph.ops:
        if op.result is not None:
            names[op.result] = f"%{len(names)}"
        lines.append("  " + format_op(op, names))
    lines.append(f"}}) {{sym_name = {format_string(graph.name)}}} : () -> ()")
    return "\n".join(lines) + "\n"
