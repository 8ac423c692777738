# SPDX-License-Identifier: MIT
"""The operations that models are written in, one for each of the graph IR's.

Shapes: T tokens of the step, R rows sampled, S sequences; all three are lengths
known only at launch. Every function raises CompileError, with the model's source
line, when its operands do not fit.
"""

from __future__ import annotations

from vtpu.tensor import Tensor, TracedState, apply


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows index[i] of a table [N, W] in any format, as f32 [T, W]."""
    return apply("gather_rows", table, index)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, row by row."""
    return apply("rms_norm", x, weight, epsilon=float(epsilon))


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times the transpose of weight [N, K], which has a block format."""
    return apply("matmul", x, weight)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))"""
    return apply("silu", x)


def rope(x: Tensor, cos_sin: Tensor, head_dim: int, *, pairs: bool) -> Tensor:
    """Rotates the heads of x [T, H * head_dim].

    cos_sin: [T, head_dim], a row's cosines and then its sines.
    pairs: elements 2i and 2i + 1 turn together; else i and i + head_dim / 2.
    """
    mode = "pairs" if pairs else "halves"
    return apply("rope", x, cos_sin, head_dim=head_dim, mode=mode)


def scatter_rows(state: TracedState, x: Tensor, index: Tensor) -> TracedState:
    """The state after its rows index[i] became x[i], rounded to its format."""
    after = apply("scatter_rows", state, x, index)
    return TracedState(after.shape, after.dtype, after.device, after.value)


def paged_attention(
    q: Tensor,
    keys: TracedState,
    values: TracedState,
    row_info: Tensor,
    block_tables: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> Tensor:
    """Causal attention of each row of q [T, heads * head_dim] over its own context.

    row_info: [T, 2], a row's keys (its own included) and its row of block_tables.
    block_tables: [S, B], the physical block of every block_size positions.
    """
    return apply(
        "paged_attention",
        q,
        keys,
        values,
        row_info,
        block_tables,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        scale=head_dim**-0.5,
    )


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows index[i] of x [T, W]: [R, W]."""
    return apply("take_rows", x, index)


def sample(logits: Tensor, params: Tensor) -> Tensor:
    """A token a row: logits [R, V], params [R, 8], result [R, 48].

    params and result hold the hardware's sample_params and sample_result.
    """
    return apply("sample", logits, params)
