# SPDX-License-Identifier: MIT
"""The operation table: operands, attributes, and the type of the result.

An inference function checks its operands and returns the result's type; it
raises CompileError with the reason when the operation is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from . import hw
from .ir import FLOATS, MATRICES, QUANTISED, Attr, CompileError, Dim, Size, Type, Value

Infer = Callable[[Sequence[Value], Mapping[str, Attr]], Type]

ROPE_MODES = ("pairs", "halves")
SAMPLE_PARAM_WORDS = 8
SAMPLE_RESULT_WORDS = 48


@dataclass(frozen=True, slots=True)
class OpSpec:
    """operands: how many. attrs: required ones with their Python type.

    infer: None for the leaves, whose type is given, and for output.
    effect: the operation is kept even when nothing uses its result.
    """

    operands: int
    attrs: dict[str, type]
    infer: Infer | None
    optional: dict[str, type]
    effect: bool = False


def tile_format(dtype: str) -> str:
    """The hardware's format of a matrix that a matmul takes."""
    return "BF16_TILES" if dtype == "bf16" else dtype.upper()


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise CompileError(message)


def _matrix(value: Value, what: str, *dtypes: str) -> tuple[Size, int]:
    shape = value.shape
    if len(shape) != 2 or isinstance(shape[1], Dim) or value.dtype not in dtypes:
        raise CompileError(
            f"{what} must be a matrix of {' or '.join(dtypes)} with a fixed width, not {value.type}"
        )
    return shape[0], shape[1]


def _index(value: Value, what: str) -> Size:
    if len(value.shape) != 1 or value.dtype != "i32":
        raise CompileError(f"{what} must be a list of i32, not {value.type}")
    return value.shape[0]


def _int(attrs: Mapping[str, Attr], name: str) -> int:
    value = attrs[name]
    assert isinstance(value, int)
    _need(value >= 0, f"{name} {value} is negative")
    return value


def _gather_rows(x: Sequence[Value], attrs: Mapping[str, Attr]) -> Type:
    _, width = _matrix(x[0], "the table", *FLOATS, *QUANTISED)
    return Type((_index(x[1], "the index"), width), "f32")


def _rms_norm(x: Sequence[Value], attrs: Mapping[str, Attr]) -> Type:
    _, width = _matrix(x[0], "x", "f32")
    _need(
        x[1].shape == (width,) and x[1].dtype == "f32",
        f"the weight must be {width}xf32, not {x[1].type}",
    )
    _need(width % 16 == 0, f"the width {width} is not a multiple of 16")
    return x[0].type


def _matmul(x: Sequence[Value], attrs: Mapping[str, Attr]) -> Type:
    rows, width = _matrix(x[0], "x", "f32")
    n, k = _matrix(x[1], "the weight", *MATRICES)
    _need(isinstance(n, int), "the weight's rows must be a number")
    assert isinstance(n, int)
    _need(k == width, f"x has {width} columns, the weight {k}")
    columns = hw.TILE_COLS[tile_format(x[1].dtype)]
    _need(n % 16 == 0, f"the weight's rows, {n}, are not a multiple of 16")
    _need(k % columns == 0, f"the weight's columns, {k}, are not a multiple of {columns}")
    most = hw.MATMUL_I8_MAX_K
    _need(x[1].dtype != "i8" or k <= most, f"the weight's columns, {k}, are more than {most}")
    return Type((rows, n), "f32")


def _matmul_add(x: Sequence[Value], attrs: Mapping[str, Attr]) -> Type:
    result = _matmul(x[:2], attrs)
    _need(x[2].type == result, f"{x[2].type} is added to a product of {result}")
    return result


def _same(x: Sequence[Value], attrs: Mapping[str, Attr]) -> Type:
    _matrix(x[0], "the operand", "f32")
    for other in x[1:]:
        _need(other.type == x[0].type, f"operands differ: {x[0].type} and {other.type}")
    return x[0].type


def _slice(x: Sequence[Value], attrs: Mapping[str, Attr]) -> Type:
    rows, width = _matrix(x[0], "x", "f32")
    start, size = _int(attrs, "start"), _int(attrs, "size")
    _need(
        size > 0 and start + size <= width,
        f"columns {start} to {start + size} are not inside {width}",
    )
    return Type((rows, size), "f32")


def _rope(x: Sequence[Value], attrs: Mapping[str, Attr]) -> Type:
    rows, width = _matrix(x[0], "x", "f32")
    head_dim = _int(attrs, "head_dim")
    _need(
        head_dim > 0 and head_dim % 16 == 0,
        f"head_dim {head_dim} is not a multiple of 16",
    )
    _need(width % head_dim == 0, f"the width {width} is not whole heads of {head_dim}")
    _need(
        x[1].type == Type((rows, head_dim), "f32"),
        f"cos_sin must be {Type((rows, head_dim), 'f32')}, not {x[1].type}",
    )
    _need(
        attrs["mode"] in ROPE_MODES,
        f"mode {attrs['mode']!r} is not one of {', '.join(ROPE_MODES)}",
    )
    return x[0].type


def _scatter_rows(x: Sequence[Value], attrs: Mapping[str, Attr]) -> Type:
    _, width = _matrix(x[0], "the state", *FLOATS)
    rows, columns = _matrix(x[1], "x", "f32")
    _need(width == columns, f"the state has {width} columns, x {columns}")
    _need(_index(x[2], "the index") == rows, "the index must have one entry a row of x")
    return x[0].type


def _paged_attention(x: Sequence[Value], attrs: Mapping[str, Attr]) -> Type:
    q, key, value, row_info, tables = x
    rows, width = _matrix(q, "q", "f32")
    heads, kv_heads = _int(attrs, "heads"), _int(attrs, "kv_heads")
    head_dim, block = _int(attrs, "head_dim"), _int(attrs, "block_size")
    _need(
        0 < head_dim <= 256 and head_dim % 16 == 0,
        f"head_dim {head_dim} is not a multiple of 16 up to 256",
    )
    _need(0 < block < 1 << 16, f"block_size {block} is not 1 to 65535")
    _need(
        0 < kv_heads <= heads < 256 and heads % kv_heads == 0,
        f"{heads} heads are not a multiple of {kv_heads} key heads, up to 255",
    )
    _need(
        width == heads * head_dim,
        f"q has {width} columns, not {heads} heads of {head_dim}",
    )
    _, kv_width = _matrix(key, "the key state", *FLOATS)
    _need(
        kv_width == kv_heads * head_dim,
        f"the key state has {kv_width} columns, not {kv_heads} heads of {head_dim}",
    )
    _need(value.type == key.type, f"the states differ: {key.type} and {value.type}")
    _need(
        row_info.type == Type((rows, 2), "i32"),
        f"row_info must be {Type((rows, 2), 'i32')}",
    )
    _, blocks = _matrix(tables, "block_tables", "i32")
    _need(0 < blocks < 1 << 16, f"{blocks} blocks a sequence are not 1 to 65535")
    return q.type


def _take_rows(x: Sequence[Value], attrs: Mapping[str, Attr]) -> Type:
    _, width = _matrix(x[0], "x", "f32")
    return Type((_index(x[1], "the index"), width), "f32")


def _sample(x: Sequence[Value], attrs: Mapping[str, Attr]) -> Type:
    rows, _ = _matrix(x[0], "the logits", "f32")
    expected = Type((rows, SAMPLE_PARAM_WORDS), "i32")
    _need(x[1].type == expected, f"params must be {expected}, not {x[1].type}")
    return Type((rows, SAMPLE_RESULT_WORDS), "i32")


def _spec(operands: int, infer: Infer | None, effect: bool = False, **attrs: type) -> OpSpec:
    return OpSpec(operands, attrs, infer, {}, effect)


OPS: dict[str, OpSpec] = {
    "param": OpSpec(0, {"name": str}, None, {"parts": tuple}),
    "input": _spec(0, None, effect=True, name=str),
    "state": _spec(0, None, name=str),
    "gather_rows": _spec(2, _gather_rows),
    "rms_norm": _spec(2, _rms_norm, epsilon=float),
    "matmul": _spec(2, _matmul),
    "add": _spec(2, _same),
    "mul": _spec(2, _same),
    "silu": _spec(1, _same),
    "slice": _spec(1, _slice, start=int, size=int),
    "rope": _spec(2, _rope, head_dim=int, mode=str),
    "scatter_rows": _spec(3, _scatter_rows, effect=True),
    "paged_attention": _spec(
        5, _paged_attention,
        heads=int, kv_heads=int, head_dim=int, block_size=int, scale=float,
    ),
    "take_rows": _spec(2, _take_rows),
    "sample": _spec(2, _sample),
    # indirect 1: stored where the launch block's pointer says, if it is not null.
    "output": OpSpec(1, {"name": str}, None, {"indirect": int}, True),
    # Made by fusion, not by front ends.
    "silu_mul": _spec(2, _same),
    "matmul_add": _spec(3, _matmul_add),
}  # fmt: skip

LEAVES = ("param", "input", "state")


def infer(name: str, operands: Sequence[Value], attrs: Mapping[str, Attr]) -> Type | None:
    """The result's type, None for output. Leaves' types are given, not inferred."""
    spec = OPS.get(name)
    if spec is None:
        raise CompileError(f"there is no operation {name!r}")
    if len(operands) != spec.operands:
        raise CompileError(f"{name} has {len(operands)} operands, not {spec.operands}")
    for key, kind in spec.attrs.items():
        if key not in attrs:
            raise CompileError(f"{name} lacks the attribute {key}")
        if not isinstance(attrs[key], kind):
            raise CompileError(f"{name}: {key} {attrs[key]!r} is not {kind.__name__}")
    for key in attrs:
        if key not in spec.attrs and key not in spec.optional:
            raise CompileError(f"{name} has no attribute {key}")
    if spec.infer is None:
        return None
    try:
        return spec.infer(operands, attrs)
    except CompileError as error:
        raise CompileError(f"{name}: {error}") from None
