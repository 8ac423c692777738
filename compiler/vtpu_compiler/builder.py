# SPDX-License-Identifier: MIT
"""Building graphs: what a front end calls while it traces a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from . import ir
from .ir import DTYPES, UNKNOWN, Attr, CompileError, Location, Size, Type, Value
from .ops import infer


@dataclass(slots=True, eq=False)
class Graph(ir.Graph):
    """A graph with one method an operation.

    Leaves are unique by name: asking again for a param with the same type gives
    the same value, so that tied weights stay one.
    """

    _leaves: dict[tuple[str, str], Value] = field(default_factory=dict)
    _loc: Location = UNKNOWN

    @contextmanager
    def location(self, file: str, line: int, module: str) -> Iterator[None]:
        """Operations added inside come from this source line and module."""
        saved, self._loc = self._loc, Location(file, line, module)
        try:
            yield
        finally:
            self._loc = saved

    def add_op(self, op: str, operands: Sequence[Value], /, **attrs: Attr) -> ir.Op:
        """Adds any operation of the table, its result's type inferred."""
        try:
            result = infer(op, operands, attrs)
        except CompileError as error:
            raise CompileError(f"{error}{_where(self._loc)}") from None
        return self.append(op, list(operands), attrs, result, self._loc)

    def _leaf(self, kind: str, name: str, shape: Sequence[Size], dtype: str) -> Value:
        type_ = Type(tuple(shape), dtype)
        if dtype not in DTYPES:
            raise CompileError(f"{kind} {name}: there is no element type {dtype!r}")
        known = self._leaves.get((kind, name))
        if known is None:
            known = self.append(kind, [], {"name": name}, type_, self._loc).value
            self._leaves[kind, name] = known
        elif known.type != type_:
            raise CompileError(f"{kind} {name} is {known.type} and also {type_}")
        return known

    # Leaves -----------------------------------------------------------------
    def param(self, name: str, shape: Sequence[int], dtype: str) -> Value:
        """An immutable weight in HBM."""
        return self._leaf("param", name, shape, dtype)

    def input(self, name: str, shape: Sequence[Size], dtype: str) -> Value:
        """A tensor of the launch block."""
        return self._leaf("input", name, shape, dtype)

    def state(self, name: str, shape: Sequence[Size], dtype: str) -> Value:
        """A cache [num_slots, width] in HBM, kept between launches."""
        return self._leaf("state", name, shape, dtype)

    # Operations --------------------------------------------------------------
    def gather_rows(self, table: Value, index: Value) -> Value:
        """Rows of a table, as f32."""
        return self.add_op("gather_rows", (table, index)).value

    def rms_norm(self, x: Value, weight: Value, epsilon: float) -> Value:
        return self.add_op("rms_norm", (x, weight), epsilon=float(epsilon)).value

    def matmul(self, x: Value, weight: Value) -> Value:
        """x [T,K] times weight [N,K], transposed."""
        return self.add_op("matmul", (x, weight)).value

    def add(self, a: Value, b: Value) -> Value:
        return self.add_op("add", (a, b)).value

    def mul(self, a: Value, b: Value) -> Value:
        return self.add_op("mul", (a, b)).value

    def silu(self, x: Value) -> Value:
        return self.add_op("silu", (x,)).value

    def slice(self, x: Value, start: int, size: int) -> Value:
        """Columns start to start + size."""
        return self.add_op("slice", (x,), start=start, size=size).value

    def rope(self, x: Value, cos_sin: Value, head_dim: int, mode: str) -> Value:
        """Rotary embedding of every head; mode is "pairs" or "halves"."""
        return self.add_op("rope", (x, cos_sin), head_dim=head_dim, mode=mode).value

    def scatter_rows(self, state: Value, x: Value, index: Value) -> Value:
        """The state after row index[i] became x[i]; index -1 skips a row."""
        return self.add_op("scatter_rows", (state, x, index)).value

    def paged_attention(
        self,
        q: Value,
        key: Value,
        value: Value,
        row_info: Value,
        block_tables: Value,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        scale: float,
    ) -> Value:
        """Causal attention of each row over row_info's (keys, table row)."""
        return self.add_op(
            "paged_attention",
            (q, key, value, row_info, block_tables),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            scale=float(scale),
        ).value

    def take_rows(self, x: Value, index: Value) -> Value:
        return self.add_op("take_rows", (x, index)).value

    def sample(self, logits: Value, params: Value) -> Value:
        """One struct sample_result a row, from one struct sample_params a row."""
        return self.add_op("sample", (logits, params)).value

    def output(self, name: str, x: Value, *, indirect: bool = False) -> None:
        """A result in the launch block.

        indirect: the launch block holds a u64 pointer `<name>_va` instead; the
        result is stored there, dense, unless the pointer is zero.
        """
        if indirect:
            self.add_op("output", (x,), name=name, indirect=1)
        else:
            self.add_op("output", (x,), name=name)


def _where(loc: Location) -> str:
    if loc == UNKNOWN:
        return ""
    return f" (at {loc.file}:{loc.line}, module {loc.module})"
