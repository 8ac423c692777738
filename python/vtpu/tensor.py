# SPDX-License-Identifier: MIT
"""Tensors, and the trace that records what is done to them.

A model is ordinary Python over `Tensor`s. Inside `Trace` the operations compute
nothing: each adds one operation to the compiler's graph, with the line of the
model's source and the module that it came from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from vtpu_compiler import Dim, Graph, Value
from vtpu_compiler.ir import Attr

Size = int | Dim

# Frames of these are the framework's, not the model's, so a source location is
# looked for above them.
_PACKAGE = Path(__file__).resolve().parent
_FRAMEWORK = (
    str(_PACKAGE / "tensor.py"),
    str(_PACKAGE / "ops.py"),
    str(_PACKAGE / "nn") + "/",
)


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An array on a device.

    shape: sizes, outermost first; a `Dim` is a length known only at launch.
    dtype: f32, f16, bf16, i32, or a format of weights: q8_0, q4_0, q4_1, i8.
    device: "trace" for a value of a traced graph, "weights" for a parameter.
    """

    shape: tuple[Size, ...]
    dtype: str
    device: str

    def __add__(self, other: Tensor) -> Tensor:
        return apply("add", self, other)

    def __mul__(self, other: Tensor) -> Tensor:
        return apply("mul", self, other)


@dataclass(frozen=True, slots=True, eq=False)
class Parameter(Tensor):
    """A weight, known by its name in the model file; holds no data itself."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class TracedTensor(Tensor):
    """A value of the graph being traced."""

    value: Value


@dataclass(frozen=True, slots=True, eq=False)
class TracedState(TracedTensor):
    """A KV cache. Writing rows gives the state after it; see ops.scatter_rows."""


class Trace:
    """A graph being recorded: leaves are made here, operations by `vtpu.ops`.

    Use `with trace:` around the model's code. Not reentrant, one a thread.
    """

    def __init__(self, name: str) -> None:
        self.graph = Graph(name)

    @contextmanager
    def active(self) -> Iterator[Trace]:
        """Operations inside the block are recorded here."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def input(self, name: str, *shape: Size, dtype: str = "i32") -> TracedTensor:
        """A tensor of the launch block."""
        return _traced(self.graph.input(name, shape, dtype))

    def state(self, name: str, slots: Size, width: int, dtype: str) -> TracedState:
        """A cache [slots, width] that the device keeps between launches."""
        value = self.graph.state(name, (slots, width), dtype)
        return TracedState(value.shape, value.dtype, "trace", value)

    def output(self, name: str, tensor: Tensor, *, indirect: bool = False) -> None:
        """A result; indirect ones go where the launch block's pointer says, if any."""
        with self._here():
            self.graph.output(name, self.lower(tensor), indirect=indirect)

    def lower(self, tensor: Tensor) -> Value:
        """The graph's value of a tensor; a parameter becomes one when first used."""
        if isinstance(tensor, TracedTensor):
            return tensor.value
        if isinstance(tensor, Parameter):
            shape = [size for size in tensor.shape if isinstance(size, int)]
            return self.graph.param(tensor.name, shape, tensor.dtype)
        raise TypeError(f"a tensor on {tensor.device} cannot be traced")

    def record(self, op: str, operands: Sequence[Tensor], attrs: dict[str, Attr]) -> TracedTensor:
        with self._here():
            values = [self.lower(operand) for operand in operands]
            return _traced(self.graph.add_op(op, values, **attrs).value)

    @contextmanager
    def _here(self) -> Iterator[None]:
        file, line = _model_line()
        with self.graph.location(file, line, current_module()):
            yield


_current: ContextVar[Trace | None] = ContextVar("trace", default=None)
_modules: ContextVar[str] = ContextVar("module", default="")


def apply(op: str, *operands: Tensor, **attrs: Attr) -> TracedTensor:
    """Does an operation of the graph IR, by its name there.

    Raises CompileError, with the model's source line, when the operands do not fit,
    RuntimeError outside of a trace.
    """
    trace = _current.get()
    if trace is None:
        raise RuntimeError(f"{op}: no trace is active")
    return trace.record(op, operands, attrs)


def current_module() -> str:
    """Dotted name of the module being called: "model.layers.3.mlp", or ""."""
    return _modules.get()


@contextmanager
def module_scope(name: str) -> Iterator[None]:
    """Operations inside the block come from the module of this name."""
    token = _modules.set(name)
    try:
        yield
    finally:
        _modules.reset(token)


def _traced(value: Value) -> TracedTensor:
    return TracedTensor(value.shape, value.dtype, "trace", value)


def _model_line() -> tuple[str, int]:
    """The innermost source line that is not the framework's own."""
    frame = sys._getframe(1)
    while True:
        path = frame.f_code.co_filename
        # contextlib is between here and the caller of every `with`.
        if not path.startswith(_FRAMEWORK) and not path.endswith("contextlib.py"):
            return _relative(path), frame.f_lineno
        if frame.f_back is None:
            return "", 0
        frame = frame.f_back


def _relative(path: str) -> str:
    """Paths from the package on, so that executables do not depend on the machine."""
    try:
        return str(Path(path).resolve().relative_to(_PACKAGE.parent))
    except ValueError:
        return Path(path).name
