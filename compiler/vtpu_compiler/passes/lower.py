# SPDX-License-Identifier: MIT
"""Graph operations to device operations on VMEM buffers; slices become views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..ir import ELEMENT_BYTES, CompileError, Dim, Graph, Op, Value, max_size
from ..tile import Buffer, Global, Operand, Program, TileOp, View
from .storage import Storage, assign_storage

_ALIGN = 64
_ROW_BYTES_MAX = 1 << 20  # the greatest count an instruction takes


@dataclass(frozen=True, slots=True)
class Lower:
    """small_inputs: inputs of up to so many bytes come in one load."""

    small_inputs: int = 16384

    def run(self, graph: Graph) -> Program:
        storage = assign_storage(graph, self.small_inputs)
        lowering = _Lowering(graph, storage)
        for op in graph.ops:
            try:
                _RULES[op.name](lowering, op)
            except CompileError as error:
                raise CompileError(f"{op.describe()}: {error}") from None
        ops = lowering.ops
        # What may be skipped comes last, so that nothing waits for it.
        ops.sort(key=lambda op: bool(op.unless_null))
        return Program(
            graph.name,
            ops,
            lowering.buffers,
            storage.arguments,
            storage.fields,
            storage.launch_bytes,
            storage.weights,
            storage.weight_bytes,
            storage.states,
            storage.slots,
        )


@dataclass(slots=True, eq=False)
class _Lowering:
    graph: Graph
    storage: Storage
    ops: list[TileOp] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    views: dict[Value, View] = field(default_factory=dict)
    users: dict[Value, list[Op]] = field(init=False)
    launch: Buffer | None = None
    vectors: Buffer | None = None

    def __post_init__(self) -> None:
        self.users = self.graph.users()

    def buffer(self, name: str, size: int) -> Buffer:
        made = Buffer(f"{len(self.buffers)}.{name}", -(-size // _ALIGN) * _ALIGN)
        self.buffers.append(made)
        return made

    def matrix(self, op: Op) -> View:
        """A new dense buffer for the operation's result."""
        rows, width = op.value.shape[0], op.value.width()
        row_bytes = width * ELEMENT_BYTES[op.value.dtype]
        made = self.buffer(op.name, max_size(rows) * row_bytes)
        view = View(made, 0, rows, row_bytes, row_bytes)
        self.views[op.value] = view
        return view

    def emit(
        self,
        op: Op,
        name: str,
        operands: dict[str, Operand],
        *,
        fmt: str = "NONE",
        mode: str = "",
        flags: tuple[str, ...] = (),
        aux: float | None = None,
        fields: dict[str, int] | None = None,
        unless_null: str = "",
    ) -> None:
        self.ops.append(
            TileOp(
                name, operands, fmt, mode, flags, aux, fields or {}, op.loc, op.name, unless_null
            )
        )

    def view(self, value: Value) -> View:
        """The value in VMEM; loads inputs and vectors when first asked for."""
        found = self.views.get(value)
        if found is None:
            if value.op.name == "input":
                found = self._load_input(value)
            elif value.op.name == "param" and len(value.shape) == 1:
                found = self._load_vectors(value)
            else:
                raise CompileError(f"{value.op.name} {value.type} cannot be used here")
        return found

    def _load_input(self, value: Value) -> View:
        place = self.storage.fields[value.op.str_attr("name")]
        rows = value.shape[0]
        row_bytes = place.bytes // max_size(rows)
        if place.offset + place.bytes <= self.storage.small_end:
            if self.launch is None:
                size = self.storage.small_end - self.storage.small_start
                self.launch = self.buffer("launch", size)
                self._load(value.op, self.launch, Global("launch", self.storage.small_start), size)
            offset = place.offset - self.storage.small_start
            view = View(self.launch, offset, rows, row_bytes, row_bytes)
        else:
            made = self.buffer(place.name, place.bytes)
            view = View(made, 0, rows, row_bytes, row_bytes)
            self.emit(value.op, "DMA_LOAD", _rows(view, Global("launch", place.offset)))
        self.views[value] = view
        return view

    def _load_vectors(self, value: Value) -> View:
        """All one-dimensional params lie together and come in one load."""
        start, end = self.storage.vectors
        if self.vectors is None:
            self.vectors = self.buffer("vectors", end - start)
            self._load(value.op, self.vectors, Global("weights", start), end - start)
        entry = self.storage.entry(value)
        view = View(self.vectors, entry.offset - start, 1, entry.bytes, entry.bytes)
        self.views[value] = view
        return view

    def _load(self, op: Op, buffer: Buffer, place: Global, size: int) -> None:
        for at in range(0, size, _ROW_BYTES_MAX):
            piece = min(_ROW_BYTES_MAX, size - at)
            source = Global(place.arg, place.offset + at)
            self.emit(op, "DMA_LOAD", _rows(View(buffer, at, 1, piece, piece), source))

    def weight(self, value: Value) -> Global:
        if value.op.name != "param":
            raise CompileError(f"a weight must be a param, not {value.op.name}")
        return Global("weights", self.storage.entry(value).offset)

    def state(self, op: Op, value: Value) -> Global:
        """Where a state lies, for op to use it as it is at value."""
        for user in self.users[value]:
            if user is op:
                break
            if user.name == "scatter_rows":  # which updates it in place
                raise CompileError("it uses a state that was already updated")
        while value.op.name == "scatter_rows":
            value = value.op.operands[0]
        if value.op.name != "state":
            raise CompileError(f"a state must be a state, not {value.op.name}")
        name = value.op.str_attr("name")
        entry = next(entry for entry in self.storage.states if entry.name == name)
        if isinstance(self.storage.slots, Dim):
            return Global("state", 0, entry.offset, state=name)
        return Global("state", entry.offset * self.storage.slots, state=name)


def _rows(view: View, place: Global) -> dict[str, Operand]:
    """Operands of a DMA_LOAD into a view."""
    return {
        "dst": view,
        "src": place,
        "rows": view.rows,
        "row_bytes": view.row_bytes,
        "dst_stride": view.stride,
        "src_stride": view.row_bytes,
    }


def _leaf(lower: _Lowering, op: Op) -> None:
    """Placed by storage, loaded when used."""


def _gather_rows(lower: _Lowering, op: Op) -> None:
    table, index = op.operands
    indices = lower.view(index)
    dst = lower.matrix(op)
    lower.emit(
        op,
        "DMA_GATHER",
        {
            "dst": dst,
            "table": lower.weight(table),
            "index": indices,
            "count": dst.rows,
            "width": op.value.width(),
            "table_rows": table.shape[0],
            "dst_stride": dst.stride,
        },
        fmt=lower.storage.entry(table).format,
    )


def _rms_norm(lower: _Lowering, op: Op) -> None:
    src, weight = map(lower.view, op.operands)
    dst = lower.matrix(op)
    lower.emit(
        op,
        "V_RMSNORM",
        {
            "dst": dst,
            "src": src,
            "weight": weight,
            "rows": dst.rows,
            "width": op.value.width(),
            "dst_stride": dst.stride,
            "src_stride": src.stride,
        },
        aux=op.float_attr("epsilon"),
    )


def _matmul(lower: _Lowering, op: Op) -> None:
    x, weight = op.operands[:2]
    src = lower.view(x)
    flags: tuple[str, ...] = ()
    if op.name == "matmul_add":
        # Fusion saw to it that nothing reads the old value afterwards.
        dst = lower.view(op.operands[2])
        lower.views[op.value] = dst
        flags = ("ACCUMULATE",)
    else:
        dst = lower.matrix(op)
    lower.emit(
        op,
        "MATMUL",
        {
            "dst": dst,
            "src": src,
            "weight": lower.weight(weight),
            "m": dst.rows,
            "n": op.value.width(),
            "k": x.width(),
            "dst_stride": dst.stride,
            "src_stride": src.stride,
        },
        fmt=lower.storage.entry(weight).format,
        flags=flags,
    )


_ELEMENTWISE = {
    "add": ("V_ADD", "a", "b"),
    "mul": ("V_MUL", "a", "b"),
    "silu_mul": ("V_SILU_MUL", "gate", "up"),
}


def _elementwise(lower: _Lowering, op: Op) -> None:
    name, first, second = _ELEMENTWISE[op.name]
    a, b = map(lower.view, op.operands)
    dst = lower.matrix(op)
    lower.emit(
        op,
        name,
        {
            "dst": dst,
            first: a,
            second: b,
            "rows": dst.rows,
            "width": op.value.width(),
            "dst_stride": dst.stride,
            f"{first}_stride": a.stride,
            f"{second}_stride": b.stride,
        },
    )


def _silu(lower: _Lowering, op: Op) -> None:
    raise CompileError("the device computes silu only as silu(gate) * up")


def _slice(lower: _Lowering, op: Op) -> None:
    source = lower.view(op.operands[0])
    offset = op.int_attr("start") * 4
    if offset % _ALIGN:
        raise CompileError(f"it starts at column {op.attrs['start']}, not a multiple of 16")
    lower.views[op.value] = View(
        source.buffer, source.offset + offset, source.rows, op.value.width() * 4, source.stride
    )


def _rope(lower: _Lowering, op: Op) -> None:
    src, cos_sin = map(lower.view, op.operands)
    if not cos_sin.dense:
        raise CompileError("cos_sin must be dense, not a slice")
    dst = lower.matrix(op)
    head_dim = op.int_attr("head_dim")
    lower.emit(
        op,
        "V_ROPE",
        {
            "dst": dst,
            "src": src,
            "cos_sin": cos_sin,
            "rows": dst.rows,
            "heads": op.value.width() // head_dim,
            "head_dim": head_dim,
            "dst_stride": dst.stride,
            "src_stride": src.stride,
        },
        mode=op.str_attr("mode").upper(),
    )


def _scatter_rows(lower: _Lowering, op: Op) -> None:
    state, x, index = op.operands
    src = lower.view(x)
    lower.emit(
        op,
        "DMA_SCATTER",
        {
            "table": lower.state(op, state),
            "src": src,
            "index": lower.view(index),
            "count": src.rows,
            "width": x.width(),
            "table_rows": lower.storage.slots,
            "src_stride": src.stride,
        },
        fmt=state.dtype.upper(),
    )


def _paged_attention(lower: _Lowering, op: Op) -> None:
    q, key, value, row_info, tables = op.operands
    src = lower.view(q)
    if not src.dense:
        raise CompileError("q must be dense, not a slice")
    info, blocks = lower.view(row_info), lower.view(tables)
    dst = lower.matrix(op)
    lower.emit(
        op,
        "V_ATTN",
        {
            "dst": dst,
            "q": src,
            "k_cache": lower.state(op, key),
            "v_cache": lower.state(op, value),
            "rows": dst.rows,
            "row_info": info,
            "block_tables": blocks,
            "num_slots": lower.storage.slots,
        },
        fmt=key.dtype.upper(),
        aux=op.float_attr("scale"),
        fields={
            "heads": op.int_attr("heads"),
            "kv_heads": op.int_attr("kv_heads"),
            "head_dim": op.int_attr("head_dim"),
            "block_size": op.int_attr("block_size"),
            "max_blocks": tables.width(),
        },
    )


def _take_rows(lower: _Lowering, op: Op) -> None:
    src, index = map(lower.view, op.operands)
    dst = lower.matrix(op)
    lower.emit(
        op,
        "V_TAKE",
        {
            "dst": dst,
            "src": src,
            "index": index,
            "rows": dst.rows,
            "width": op.value.width(),
            "src_rows": src.rows,
            "dst_stride": dst.stride,
            "src_stride": src.stride,
        },
    )


def _sample(lower: _Lowering, op: Op) -> None:
    logits, params = map(lower.view, op.operands)
    dst = lower.matrix(op)
    lower.emit(
        op,
        "V_SAMPLE",
        {
            "dst": dst,
            "logits": logits,
            "params": params,
            "rows": dst.rows,
            "vocab": op.operands[0].width(),
            "logits_stride": logits.stride,
        },
    )


def _output(lower: _Lowering, op: Op) -> None:
    source = op.operands[0]
    src = lower.view(source)
    name = op.str_attr("name")
    if source.op.name in ("input", "param"):
        raise CompileError(f"the output {name} is an {source.op.name}")
    pointer = f"{name}_va" if op.attrs.get("indirect") else ""
    offset = 0 if pointer else lower.storage.fields[name].offset
    lower.emit(
        op,
        "DMA_STORE",
        {
            "dst": Global("launch", offset, pointer=pointer),
            "src": src,
            "rows": src.rows,
            "row_bytes": src.row_bytes,
            "dst_stride": src.row_bytes,
            "src_stride": src.stride,
        },
        unless_null=pointer,
    )


_RULES: dict[str, Callable[[_Lowering, Op], None]] = {
    "param": _leaf,
    "input": _leaf,
    "state": _leaf,
    "gather_rows": _gather_rows,
    "rms_norm": _rms_norm,
    "matmul": _matmul,
    "matmul_add": _matmul,
    "add": _elementwise,
    "mul": _elementwise,
    "silu_mul": _elementwise,
    "silu": _silu,
    "slice": _slice,
    "rope": _rope,
    "scatter_rows": _scatter_rows,
    "paged_attention": _paged_attention,
    "take_rows": _take_rows,
    "sample": _sample,
    "output": _output,
}
