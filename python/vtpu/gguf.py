# SPDX-License-Identifier: MIT
"""GGUF model files: metadata and tensor directory, read through mmap.

Only the header is parsed; tensor data stays in the page cache until something
reads the memoryview of one.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?",
    10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# ggml type id -> (name, values a block, bytes a block)
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}


class GGUFError(ValueError):
    """The file is not a GGUF file that can be read; the message names it."""


@dataclass(slots=True, frozen=True)
class GGUFTensor:
    """One tensor. shape is outermost first; data views the file's own bytes."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: memoryview


class GGUFFile:
    """A mapped GGUF file.

    metadata: key -> Python value (str, int, float, bool or a list of these).
    tensors: name -> GGUFTensor, in file order. Their memoryviews stay valid as
        long as any of them is referenced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise GGUFError(f"{self.path}: {error.strerror}") from error
        except ValueError as error:
            raise GGUFError(f"{self.path}: the file is empty") from error
        self._at = 0
        try:
            self._read()
        except (struct.error, IndexError):
            raise GGUFError(
                f"{self.path}: truncated: the header goes on past the end of the "
                f"file at {len(self._map)} bytes"
            ) from None
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self.path}: corrupt text in the header") from error

    def _read(self) -> None:
        if self._map[:4] != _MAGIC:
            raise GGUFError(
                f"{self.path}: not a GGUF file: it starts with {self._map[:4]!r}"
            )
        self._at = 4
        version = self._u32()
        if version not in (2, 3):
            raise GGUFError(f"{self.path}: GGUF version {version}, supported: 2, 3")
        num_tensors, num_keys = self._u64(), self._u64()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._u32())
        directory = [self._tensor_entry() for _ in range(num_tensors)]
        align = int(self.metadata.get("general.alignment", 32))
        base = -(-self._at // align) * align
        self.tensors = {e[0]: self._tensor(base, *e) for e in directory}

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._u64() for _ in range(self._u32()))
        return name, shape[::-1], self._u32(), self._u64()

    def _tensor(
        self, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GGUFTensor:
        if kind not in _TYPES:
            known = ", ".join(entry[0] for entry in _TYPES.values())
            raise GGUFError(
                f"{self.path}: tensor {name} has type {kind}, supported: {known}"
            )
        type_name, per_block, block_bytes = _TYPES[kind]
        values = 1
        for extent in shape:
            values *= extent
        start, size = base + offset, values // per_block * block_bytes
        if start + size > len(self._map):
            raise GGUFError(
                f"{self.path}: truncated: tensor {name} ends at byte {start + size}, "
                f"the file at {len(self._map)}"
            )
        view = memoryview(self._map)[start : start + size]
        return GGUFTensor(name, type_name, shape, view)

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._map, self._at)
        self._at += 4
        return int(value)

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self._map, self._at)
        self._at += 8
        return int(value)

    def _string(self) -> str:
        size = self._u64()
        end = self._at + size
        if end > len(self._map):
            raise IndexError
        text = self._map[self._at : end].decode()
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._u32(), self._u64())
        return self._scalars(kind, 1)[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in _SCALARS:
            return self._scalars(kind, count)
        if kind == _STRING:
            return self._strings(count)
        return [self._value(kind) for _ in range(count)]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise GGUFError(f"{self.path}: unknown metadata type {kind}")
        layout = f"<{count}{_SCALARS[kind]}"
        if struct.calcsize(layout) > len(self._map) - self._at:
            raise IndexError
        values = struct.unpack_from(layout, self._map, self._at)
        self._at += struct.calcsize(layout)
        return list(values)

    def _strings(self, count: int) -> list[str]:
        # A vocabulary is 100,000 strings: the loop is written for speed.
        data, at, unpack = self._map, self._at, _U64.unpack_from
        limit = len(data)
        strings = []
        for _ in range(count):
            (size,) = unpack(data, at)
            at += 8
            end = at + size
            if end > limit:
                raise IndexError
            strings.append(data[at:end].decode())
            at = end
        self._at = at
        return strings
