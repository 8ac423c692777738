# SPDX-License-Identifier: MIT
"""Compiled programs."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vtpu.runtime._native import ffi, lib, new_struct
from vtpu.runtime.errors import TpuBadExecutableError, check, invalid

if TYPE_CHECKING:
    from vtpu.runtime.device import Device

_FORMAT_VERSION = 1
_MAP_VERSION = 1
_MAP_HEADER = struct.Struct("<II")  # version, records
_MAP_RECORD = struct.Struct("<III")  # pc in .text, then string offsets: operation, module


@dataclass(frozen=True, slots=True)
class Kernel:
    """An entry of an executable. text_offset: of its first instruction in .text."""

    index: int
    name: str
    va: int
    text_offset: int
    code_bytes: int
    num_args: int


class Executable:
    """A program in HBM. Made by Device.load().

    metadata: the parsed metadata of the file. args: names of the argument words, in
    order. kernels: by name.
    """

    __slots__ = ("__weakref__", "_device", "_handle", "args", "kernels", "metadata", "name")

    def __init__(self, device: Device, handle: Any, name: str) -> None:
        self._device = device
        self._handle: Any = ffi.gc(handle, lib.tpurt_executable_release)
        self.name = name
        try:
            self.kernels = {kernel.name: kernel for kernel in self._kernels()}
            self.metadata = self._metadata()
            self.args = tuple(str(arg) for arg in self.metadata["arguments"])
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Executable {self.name!r}, kernels {', '.join(self.kernels)}>"

    @property
    def handle(self) -> Any:
        """The library's handle. Raises TpuInvalidError when the executable is closed."""
        if self._handle is None:
            raise invalid(f"executable {self.name!r} is closed")
        return self._handle

    def _kernels(self) -> list[Kernel]:
        kernels = []
        info = new_struct("tpurt_kernel_info")
        for index in range(lib.tpurt_executable_num_kernels(self._handle)):
            check(lib.tpurt_executable_get_kernel(self._handle, index, info))
            name = ffi.string(info.name).decode("utf-8", "replace")
            kernels.append(
                Kernel(index, name, info.va, info.text_offset, info.code_bytes, info.num_args)
            )
        return kernels

    def _bad(self, message: str) -> TpuBadExecutableError:
        return TpuBadExecutableError(
            lib.TPURT_ERROR_BAD_EXECUTABLE, f'executable "{self.name}": {message}'
        )

    def _metadata(self) -> dict[str, Any]:
        try:
            metadata = json.loads(self.note(lib.TPURT_NOTE_METADATA))
        except ValueError as error:
            raise self._bad(f"its metadata is no JSON: {error}") from error
        if not isinstance(metadata, dict):
            raise self._bad("its metadata is no JSON object")
        isa = self._device.info.isa_version
        for key, known in (("version", _FORMAT_VERSION), ("isa_version", isa)):
            if metadata.get(key) != known:
                raise self._bad(f"metadata {key} {metadata.get(key)!r}, this device takes {known}")
        names = metadata.get("arguments")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._bad("metadata arguments are no list of names")
        for kernel in self.kernels.values():
            if kernel.num_args != len(names):
                raise self._bad(
                    f"kernel {kernel.name!r} takes {kernel.num_args} arguments, "
                    f"the metadata names {len(names)}"
                )
        return metadata

    def note(self, kind: int) -> bytes:
        """A note of the file: 0x21 metadata, 0x22 cache key."""
        return self._blob(lib.tpurt_executable_get_note, kind)

    def section(self, name: str) -> bytes:
        """A section's bytes. Raises TpuInvalidError when the file has none of that name."""
        return self._blob(lib.tpurt_executable_get_section, name.encode())

    def _blob(self, getter: Any, key: int | bytes) -> bytes:
        data, nbytes = ffi.new("const void **"), ffi.new("uint64_t *")
        check(getter(self.handle, key, data, nbytes))
        return bytes(ffi.buffer(data[0], nbytes[0]))

    def kernel(self, name: str = "") -> Kernel:
        """The kernel of that name; without a name, the only one."""
        if not name and len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        if name not in self.kernels:
            raise invalid(
                f"executable {self.name!r}: no kernel {name!r}, it has {', '.join(self.kernels)}"
            )
        return self.kernels[name]

    def operation_at(self, pc: int, kernel: str = "") -> tuple[str, str]:
        """(operation, model module) that the instruction at a kernel's pc belongs to.

        Empty strings when the file does not say. Reads the map anew: it is for errors.
        """
        try:
            entry = self.kernel(kernel)
            if not 0 <= pc < entry.code_bytes:
                return "", ""
            return _look_up(self.section(".tpu.map"), entry.text_offset + pc)
        except (TpuBadExecutableError, ValueError, struct.error):
            return "", ""

    def close(self) -> None:
        """Gives the program back, once no recorded launch uses it any more."""
        self._handle = None

    def __enter__(self) -> Executable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _look_up(data: bytes, at: int) -> tuple[str, str]:
    """Finds the last record at or before an offset in .text."""
    version, count = _MAP_HEADER.unpack_from(data)
    strings = _MAP_HEADER.size + count * _MAP_RECORD.size
    if version != _MAP_VERSION or strings > len(data):
        return "", ""
    found = (0, 0)
    for pc, operation, module in _MAP_RECORD.iter_unpack(data[_MAP_HEADER.size : strings]):
        if pc > at:
            break
        found = (operation, module)
    return _string(data, strings + found[0]), _string(data, strings + found[1])


def _string(data: bytes, offset: int) -> str:
    end = data.find(b"\0", offset)
    return data[offset : max(end, offset)].decode("utf-8", "replace")
