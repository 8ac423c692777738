# SPDX-License-Identifier: MIT
"""Modules: named parts of a model, nested; and the three that have weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vtpu import ops
from vtpu.tensor import Parameter, Tensor, module_scope


class Module:
    """A part of a model. Subclasses define forward(); callers call the module.

    A module assigned to an attribute becomes a child, and its dotted name (with
    "model" for the root) goes into everything that is traced inside of it. A
    module has one parent.
    """

    _parent: Module | None = None
    _key = "model"

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            value._adopt(self, name)
        object.__setattr__(self, name, value)

    def _adopt(self, parent: Module, key: str) -> None:
        object.__setattr__(self, "_parent", parent)
        object.__setattr__(self, "_key", key)

    @property
    def path(self) -> str:
        """Dotted name from the root: model.layers.3.mlp.down_proj."""
        if self._parent is None:
            return self._key
        return f"{self._parent.path}.{self._key}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with module_scope(self.path):
            return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(type(self).__name__)


class ModuleList(Module):
    """Modules in order, named by their index."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self._items = list(modules)
        for index, module in enumerate(self._items):
            module._adopt(self, str(index))

    def __iter__(self) -> Iterator[Module]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Linear(Module):
    """y = x W^T. weight: [outputs, inputs] in a block format."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return ops.matmul(x, self.weight)


class RMSNorm(Module):
    """weight: f32 [width]."""

    def __init__(self, weight: Parameter, epsilon: float) -> None:
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.epsilon)


class Embedding(Module):
    """weight: [rows, width] in any format; the result is f32."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def forward(self, index: Tensor) -> Tensor:
        return ops.gather_rows(self.weight, index)
