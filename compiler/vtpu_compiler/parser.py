# SPDX-License-Identifier: MIT
"""Reads the text that printer.py writes: one operation a line."""

from __future__ import annotations

import re

from .ir import DTYPES, UNKNOWN, Attr, CompileError, Dim, Graph, Location, Size, Type, Value
from .verify import verify

_STRING = r'"((?:[^"\\]|\\.)*)"'
_OP = re.compile(
    r'\s*(?:(%\w+) = )?"vtpu\.(\w+)"\(([^)]*)\)(?: \{(.*?)\})? : \((.*?)\) -> '
    r"(\(\)|tensor<.*?>)(?: loc\((.*)\))?\s*$"
)
_TYPE = re.compile(r'tensor<([^,>]*)(?:, \[("\w+<=\d+"(?:, "\w+<=\d+")*)\])?>$')
_ATTR = re.compile(
    rf"(\w+) = (?:{_STRING}|\[([^\]]*)\]|(-?\d+) : i64|(-?[0-9.]+(?:e[-+]?\d+)?) : f64)(?:, |$)"
)
_NAMED = re.compile(rf"{_STRING}\({_STRING}:(\d+):0\)$")
_PLAIN = re.compile(rf"{_STRING}:(\d+):0$")
_ESCAPE = re.compile(r'\\([0-9A-F]{2})|\\(["\\])')
_END = re.compile(rf"\}}\) \{{sym_name = {_STRING}\}} : \(\) -> \(\)$")


def parse_graph(text: str) -> Graph:
    """Raises CompileError with the line's number when the text is not a graph."""
    lines = text.splitlines()
    if not lines or lines[0] != '"builtin.module"() ({':
        raise CompileError('line 1: expected "builtin.module"() ({')
    graph = Graph("")
    values: dict[str, Value] = {}
    for number, line in enumerate(lines[1:], 2):
        if end := _END.match(line):
            graph.name = _unquote(end[1])
            verify(graph)
            return graph
        try:
            _parse_op(line, graph, values)
        except CompileError as error:
            raise CompileError(f"line {number}: {error}") from None
    raise CompileError(f"line {len(lines)}: the module is not closed")


def _parse_op(line: str, graph: Graph, values: dict[str, Value]) -> None:
    match = _OP.match(line)
    if match is None:
        raise CompileError(f"not an operation: {line.strip()[:80]}")
    result, name, operands, attrs, _, type_text, loc = match.groups()
    type_ = None if type_text == "()" else _parse_type(type_text)
    if (result is None) != (type_ is None):
        raise CompileError("the result and its type do not agree")
    try:
        used = [values[key] for key in operands.split(", ")] if operands else []
    except KeyError as error:
        raise CompileError(f"{error.args[0]} is not defined before its use") from None
    op = graph.append(name, used, _parse_attrs(attrs or ""), type_, _parse_location(loc))
    if result is not None:
        if result in values:
            raise CompileError(f"{result} is defined twice")
        values[result] = op.value


def _parse_type(text: str) -> Type:
    match = _TYPE.match(text)
    if match is None:
        raise CompileError(f"not a tensor type: {text}")
    *sizes, element = match[1].split("x") if "!" not in match[1] else _split(match[1])
    dims = iter(re.findall(r'"(\w+)<=(\d+)"', match[2] or ""))
    shape: list[Size] = []
    try:
        for size in sizes:
            if size == "?":
                name, maximum = next(dims)
                shape.append(Dim(name, int(maximum)))
            else:
                shape.append(int(size))
    except (StopIteration, ValueError):
        raise CompileError(f"bad shape in {text}") from None
    if next(dims, None) is not None:
        raise CompileError(f"bad shape in {text}")
    dtype = element.removeprefix("!vtpu.")
    if dtype not in DTYPES:
        raise CompileError(f"there is no element type {dtype!r}")
    return Type(tuple(shape), dtype)


def _split(text: str) -> list[str]:
    sizes, element = text.split("!", 1)
    return [*sizes.rstrip("x").split("x"), f"!{element}"]


def _parse_attrs(text: str) -> dict[str, Attr]:
    attrs: dict[str, Attr] = {}
    at = 0
    while at < len(text):
        match = _ATTR.match(text, at)
        if match is None:
            raise CompileError(f"not an attribute: {text[at : at + 40]}")
        key, string, names, integer, real = match.groups()
        if string is not None:
            attrs[key] = _unquote(string)
        elif names is not None:
            attrs[key] = tuple(map(_unquote, re.findall(_STRING, names)))
        else:
            attrs[key] = int(integer) if integer is not None else float(real)
        at = match.end()
    return attrs


def _parse_location(text: str | None) -> Location:
    if text is None:
        return UNKNOWN
    if match := _NAMED.match(text):
        return Location(_unquote(match[2]), int(match[3]), _unquote(match[1]))
    if match := _PLAIN.match(text):
        return Location(_unquote(match[1]), int(match[2]))
    raise CompileError(f"not a location: {text}")


def _unquote(text: str) -> str:
    def byte(match: re.Match[str]) -> str:
        return chr(int(match[1], 16)) if match[1] else match[2]

    # Escapes are UTF-8 bytes; everything else is ASCII.
    return _ESCAPE.sub(byte, text).encode("latin-1").decode()
