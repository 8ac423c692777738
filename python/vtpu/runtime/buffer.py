# SPDX-License-Identifier: MIT
"""Memory that the device and the host share."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vtpu.runtime._native import ffi, lib, new_struct
from vtpu.runtime.errors import check, invalid

if TYPE_CHECKING:
    from vtpu.runtime.device import Device

# A call of read_from's progress, and a chance for other threads, every so many bytes.
_READ_STEP = 16 << 20


class Buffer:
    """A range of HBM or host memory at a device address.

    Made by Device.buffer() or import_buffer(). close() takes it out of the device's
    address space once no memoryview of it is left: views stay valid as long as they
    exist. A queue whose work still uses a closed buffer faults.
    """

    __slots__ = (
        "__weakref__",
        "_device",
        "_handle",
        "_release",
        "_va",
        "_view",
        "hbm",
        "name",
        "nbytes",
    )

    def __init__(
        self, device: Device, handle: Any, name: str, nbytes: int, hbm: bool, data: Any = None
    ) -> None:
        def release(reference: Any, _data: Any = data) -> None:
            """Imported memory is kept until the device has no more of it."""
            lib.tpurt_buffer_release(reference)

        info = new_struct("tpurt_buffer_info")
        check(lib.tpurt_buffer_get_info(handle, info))
        self._device = device
        self._release = lib.tpurt_buffer_release if data is None else release
        self._handle: Any = ffi.gc(handle, self._release)
        self._view: memoryview | None = None
        self._va = int(info.va)
        self.name = name
        self.nbytes = nbytes
        self.hbm = hbm

    def __repr__(self) -> str:
        where = "closed" if self._handle is None else f"at {self._va:#x}"
        return f"<Buffer {self.name!r}, {self.nbytes} bytes, {where}>"

    def __len__(self) -> int:
        return self.nbytes

    def _open(self) -> Any:
        if self._handle is None:
            raise invalid(f"buffer {self.name!r} is closed")
        return self._handle

    @property
    def va(self) -> int:
        """Device address of the first byte."""
        self._open()
        return self._va

    def map(self) -> memoryview:
        """The buffer as a writable memoryview of bytes; the same one every time."""
        handle = self._open()
        if self._view is None:
            data = ffi.new("void **")
            check(lib.tpurt_buffer_map(handle, data))
            # The view must keep the memory, also after close(): it holds the
            # pointer, and the pointer a reference of its own to the buffer.
            kept = lib.tpurt_buffer_retain(handle)
            release = self._release
            pointer = ffi.gc(data[0], lambda _, kept=kept: release(kept))
            self._view = memoryview(ffi.buffer(pointer, self.nbytes))
        return self._view

    def write(self, offset: int, data: Any) -> None:
        """Copies a bytes-like object into the buffer."""
        source = memoryview(data).cast("B")
        self._check_range(offset, len(source))
        pointer = ffi.from_buffer(source)
        check(lib.tpurt_buffer_write(self._open(), offset, pointer, len(source)))

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """A copy of part of the buffer."""
        if nbytes is None:
            nbytes = max(self.nbytes - offset, 0)
        self._check_range(offset, nbytes)
        return bytes(self.map()[offset : offset + nbytes])

    def read_from(
        self,
        fd: int,
        nbytes: int,
        offset: int = 0,
        buf_offset: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Reads a file's bytes [offset, offset + nbytes) straight into the buffer.

        progress: called with the bytes read so far, every 16 MiB.
        """
        self._check_range(buf_offset, nbytes)
        done = 0
        while done < nbytes:
            step = min(_READ_STEP, nbytes - done)
            check(
                lib.tpurt_buffer_read_fd(self._open(), buf_offset + done, fd, offset + done, step)
            )
            done += step
            if progress:
                progress(done)

    def _check_range(self, offset: int, nbytes: int) -> None:
        self._open()
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise invalid(
                f"buffer {self.name!r}: {nbytes} bytes at offset {offset} are outside its "
                f"{self.nbytes} bytes"
            )

    def close(self) -> None:
        """Gives the buffer back; a second call does nothing."""
        self._handle = self._view = None

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
