# SPDX-License-Identifier: MIT
"""Runs a graph in numpy, in f32: the reference that every stage must agree with.

Written operation by operation from the definitions, with no regard to speed.
Weights are what they dequantise to; products are plain f32 ones, so that results
differ from the device's by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ir import CompileError, Graph, Op

Array = NDArray[Any]

_SKIP = 0xFFFFFFFF


def interpret(
    graph: Graph,
    params: Callable[[str], Array],
    inputs: Mapping[str, Array],
    states: dict[str, Array],
) -> dict[str, Array]:
    """Returns the outputs by name and updates the states' arrays in place.

    params: f32 arrays by name. inputs: their leading dimensions are the lengths.
    states: f32 arrays [slots, width], whose values are rounded to the state's type.
    """
    values: dict[object, Array] = {}
    outputs: dict[str, Array] = {}
    for op in graph.ops:
        operands = [values[value] for value in op.operands]
        if op.name == "param":
            parts = op.attrs.get("parts", (op.str_attr("name"),))
            assert isinstance(parts, tuple)
            result = np.concatenate([params(name) for name in parts])
        elif op.name == "input":
            result = np.asarray(inputs[op.str_attr("name")])
        elif op.name == "state":
            result = states[op.str_attr("name")]
        elif op.name == "output":
            outputs[op.str_attr("name")] = operands[0]
            continue
        else:
            result = _RULES[op.name](op, *operands)
        values[op.value] = result
    return outputs


def _indices(index: Array) -> Array:
    return np.asarray(index).astype(np.uint32).astype(np.int64)


def _gather_rows(op: Op, table: Array, index: Array) -> Array:
    return np.asarray(table, np.float32)[_indices(index)]


def _rms_norm(op: Op, x: Array, weight: Array) -> Array:
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    scale = np.float32(1) / np.sqrt(mean + np.float32(op.float_attr("epsilon")))
    return x * scale * weight


def _matmul(op: Op, x: Array, weight: Array) -> Array:
    return np.asarray(x @ weight.T, np.float32)


def _matmul_add(op: Op, x: Array, weight: Array, accumulator: Array) -> Array:
    return accumulator + _matmul(op, x, weight)


def _silu(op: Op, x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def _silu_mul(op: Op, gate: Array, up: Array) -> Array:
    return _silu(op, gate) * up


def _slice(op: Op, x: Array) -> Array:
    start = op.int_attr("start")
    return x[:, start : start + op.int_attr("size")]


def _rope(op: Op, x: Array, cos_sin: Array) -> Array:
    head_dim = op.int_attr("head_dim")
    heads = x.reshape(len(x), x.shape[1] // head_dim, head_dim)
    half = head_dim // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    pairs = op.attrs["mode"] == "pairs"
    first = np.s_[..., 0::2] if pairs else np.s_[..., :half]
    second = np.s_[..., 1::2] if pairs else np.s_[..., half:]
    a, b = heads[first], heads[second]
    result = np.empty_like(heads)
    result[first] = a * cos - b * sin
    result[second] = a * sin + b * cos
    return result.reshape(x.shape)


def _scatter_rows(op: Op, state: Array, x: Array, index: Array) -> Array:
    rows = _indices(index)
    kept = rows != _SKIP
    state[rows[kept]] = _ROUND[op.operands[0].dtype](x[kept])
    return state


def _to_f16(x: Array) -> Array:
    """The nearest; what is too large becomes the largest."""
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)


def _to_bf16(x: Array) -> Array:
    """The nearest, ties to even: the upper half of the bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


_ROUND: dict[str, Callable[[Array], Array]] = {
    "f32": lambda x: x,
    "f16": _to_f16,
    "bf16": _to_bf16,
}


def _paged_attention(
    op: Op, q: Array, key: Array, value: Array, row_info: Array, tables: Array
) -> Array:
    heads, kv_heads = op.int_attr("heads"), op.int_attr("kv_heads")
    head_dim, block = op.int_attr("head_dim"), op.int_attr("block_size")
    group = heads // kv_heads
    result = np.zeros_like(q)
    for row, (count, table) in enumerate(_indices(row_info)):
        if count == 0:
            continue
        positions = np.arange(count)
        slots = _indices(tables[table])[positions // block] * block + positions % block
        keys = key[slots].astype(np.float32).reshape(count, kv_heads, head_dim)
        values = value[slots].astype(np.float32).reshape(count, kv_heads, head_dim)
        for head in range(heads):
            columns = slice(head * head_dim, (head + 1) * head_dim)
            scores = keys[:, head // group] @ q[row, columns]
            scores = scores * np.float32(op.float_attr("scale"))
            weights = np.exp(scores - scores.max())
            result[row, columns] = (weights / weights.sum()) @ values[:, head // group]
    return result


def _take_rows(op: Op, x: Array, index: Array) -> Array:
    return x[_indices(index)]


def _sample(op: Op, logits: Array, params: Array) -> Array:
    """Greedy only: the noise of the other kinds is the device's own."""
    result = np.zeros((len(logits), 48), np.uint32)
    floats = result.view(np.float32)
    for row, x in enumerate(logits):
        if params[row, 0]:
            raise CompileError("the interpreter samples with temperature 0 only")
        shifted = x - x.max()
        logprobs = shifted - np.log(np.exp(shifted).sum())
        ranked = np.argsort(-x, kind="stable")
        count = min(int(params[row, 3]), 20, len(x))
        result[row, 0] = ranked[0]
        floats[row, 1] = logprobs[ranked[0]]
        result[row, 2] = count
        result[row, 4 : 4 + count] = ranked[:count]
        floats[row, 24 : 24 + count] = logprobs[ranked[:count]]
    return result


_RULES: dict[str, Callable[..., Array]] = {
    "gather_rows": _gather_rows,
    "rms_norm": _rms_norm,
    "matmul": _matmul,
    "matmul_add": _matmul_add,
    "add": lambda op, a, b: a + b,
    "mul": lambda op, a, b: a * b,
    "silu": _silu,
    "silu_mul": _silu_mul,
    "slice": _slice,
    "rope": _rope,
    "scatter_rows": _scatter_rows,
    "paged_attention": _paged_attention,
    "take_rows": _take_rows,
    "sample": _sample,
}
