# SPDX-License-Identifier: MIT
"""GGUF model files: metadata and tensor directory, read through mmap.

Only the header is parsed. Tensor data stays in the page cache until someone
reads the memoryview of one, and the strings of a vocabulary stay undecoded
until someone looks at them.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?",
    10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# A corrupt count must not make the parser allocate what the file cannot hold, so
# every count is checked against the bytes left before anything is built from it.
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4
_MAX_ALIGNMENT = 1 << 20

# ggml type id -> (element type as the graph IR names it, values a block, bytes a block)
_TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    8: ("q8_0", 32, 34),
    30: ("bf16", 1, 2),
}
# Named in errors, so that a user learns which file to take instead.
_UNSUPPORTED = {
    6: "q5_0", 7: "q5_1", 9: "q8_1", 10: "q2_k", 11: "q3_k", 12: "q4_k",
    13: "q5_k", 14: "q6_k", 15: "q8_k", 20: "iq4_nl", 23: "iq4_xs",
}  # fmt: skip


class GGUFError(ValueError):
    """The file is not a GGUF file that can be used; the message names it."""


class GGUFTensor(NamedTuple):
    """Where one tensor is.

    dtype: element type as the graph IR names it: f32, f16, bf16, q8_0, q4_0, q4_1.
    shape: outermost dimension first; a weight is [outputs, inputs].
    offset: byte offset in the file.
    nbytes: bytes from there.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _TruncatedError(Exception):
    """Something in the header reaches past the end of the file."""


class _Strings(Sequence[str]):
    """An array of strings, decoded as a whole when first looked at."""

    def __init__(self, path: str, data: mmap.mmap, start: int, count: int) -> None:
        self._path = path
        self._data = data
        self._start = start
        self._count = count
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if self._decoded is None:
            self._decoded = self._decode()
        return self._decoded[index]

    def _decode(self) -> list[str]:
        data, at, unpack = self._data, self._start, _U64.unpack_from
        strings = []
        try:
            for _ in range(self._count):
                begin = at + 8
                at = begin + unpack(data, at)[0]
                strings.append(data[begin:at].decode())
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self._path}: corrupt text in the header") from error
        return strings


class GGUFFile:
    """A mapped GGUF file, version 2 or 3, little endian.

    path: the file's name, as given.
    metadata: key -> Python value (str, int, float, bool or a sequence of these).
    tensors: name -> GGUFTensor, in file order.

    Raises GGUFError, which names the file and the limit, when the file cannot be
    opened, is no GGUF file, is truncated or corrupt, or has a tensor of an element
    type that the device does not hold.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._map = self._open()
        self._size = len(self._map)
        self._at = 0
        try:
            self.metadata, self.tensors = self._read()
        except (_TruncatedError, struct.error, OverflowError):
            raise GGUFError(
                f"{self.path}: truncated: the header goes on past the end of the "
                f"file at {self._size} bytes"
            ) from None
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self.path}: corrupt text in the header") from error

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes, read-only, in the file's own layout (no copy).

        The view keeps the mapping alive. Raises GGUFError when there is no such
        tensor.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise GGUFError(f"{self.path}: no tensor {name}")
        return memoryview(self._map)[entry.offset : entry.offset + entry.nbytes]

    def _open(self) -> mmap.mmap:
        try:
            with open(self.path, "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise GGUFError(f"{self.path}: {error.strerror}") from error
        except ValueError as error:
            raise GGUFError(f"{self.path}: the file is empty") from error

    def _read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._map[:4] != _MAGIC:
            raise GGUFError(
                f"{self.path}: not a GGUF file: it starts with {self._map[:4]!r}, not {_MAGIC!r}"
            )
        self._at = 4
        version = self._u32()
        if version not in _VERSIONS:
            raise GGUFError(f"{self.path}: GGUF version {version}, supported: 2, 3")
        num_tensors, num_keys = self._u64(), self._u64()
        self._need(num_keys * _MIN_KEY_BYTES + num_tensors * _MIN_TENSOR_BYTES)
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._u32(), 0)
        directory = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
            raise GGUFError(
                f"{self.path}: general.alignment is {alignment!r}, allowed: 1 to {_MAX_ALIGNMENT}"
            )
        base = -(-self._at // alignment) * alignment
        tensors = {e[0]: self._tensor(base, *e) for e in directory}
        if len(tensors) != num_tensors:
            raise GGUFError(f"{self.path}: two tensors have the same name")
        return metadata, tensors

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._u32()
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise GGUFError(
                f"{self.path}: tensor {name} has {dimensions} dimensions, allowed: "
                f"1 to {_MAX_DIMENSIONS}"
            )
        shape = tuple(self._u64() for _ in range(dimensions))
        return name, shape[::-1], self._u32(), self._u64()

    def _tensor(
        self, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GGUFTensor:
        if kind not in _TYPES:
            known = ", ".join(entry[0] for entry in _TYPES.values())
            raise GGUFError(
                f"{self.path}: tensor {name} has type "
                f"{_UNSUPPORTED.get(kind, kind)}, supported: {known}"
            )
        dtype, per_block, block_bytes = _TYPES[kind]
        if shape[-1] % per_block:
            raise GGUFError(
                f"{self.path}: tensor {name} has rows of {shape[-1]} values, {dtype} "
                f"needs a multiple of {per_block}"
            )
        start, nbytes = base + offset, math.prod(shape) // per_block * block_bytes
        if start + nbytes > self._size:
            raise GGUFError(
                f"{self.path}: truncated: tensor {name} ends at byte "
                f"{start + nbytes}, the file at {self._size}"
            )
        return GGUFTensor(dtype, shape, start, nbytes)

    def _need(self, nbytes: int) -> None:
        if nbytes > self._size - self._at:
            raise _TruncatedError

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
        self._need(size)
        end = self._at + size
        text = self._map[self._at : end].decode()
        self._at = end
        return text

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._u32(), self._u64(), depth + 1)
        return self._scalars(kind, 1)[0]

    def _array(self, kind: int, count: int, depth: int) -> Sequence[Any]:
        if depth > _MAX_NESTING:
            raise GGUFError(f"{self.path}: metadata arrays nest more than {_MAX_NESTING} deep")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            self._need(count * 12)
            return [self._value(kind, depth) for _ in range(count)]
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        code = _SCALARS.get(kind)
        if code is None:
            raise GGUFError(f"{self.path}: unknown metadata type {kind}")
        self._need(count * struct.calcsize("<" + code))
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self._map, self._at)
        self._at += layout.size
        return list(values)

    def _strings(self, count: int) -> _Strings:
        # The lengths must be walked to find what comes next; with 100,000 strings
        # this loop is most of the time that opening a file takes.
        self._need(count * 8)
        data, unpack = self._map, _U64.unpack_from
        start = at = self._at
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self._at = at
        self._need(0)
        return _Strings(self.path, data, start, count)
