# SPDX-License-Identifier: MIT
"""The device: where everything else comes from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

from vtpu.runtime._native import ffi, lib, new_struct
from vtpu.runtime.buffer import Buffer
from vtpu.runtime.errors import check, invalid
from vtpu.runtime.executable import Executable
from vtpu.runtime.queues import Queue

# More than any executable: a wrong path must not fill the memory.
_MAX_EXECUTABLE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """backend: "drm" or "core". name: the device file, or the machine's vector path."""

    backend: str
    name: str
    hw_version: int
    isa_version: int
    num_queues: int
    hbm_bytes: int
    vmem_bytes: int
    page_bytes: int
    va_start: int
    va_end: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes. hbm_used: by everyone. client_*: by this Device's live buffers."""

    hbm_bytes: int
    hbm_used: int
    client_hbm: int
    client_host: int


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """The last four are zero, and has_counters false, where the driver does not tell."""

    device_resets: int
    queue_resets: int
    jobs_submitted: int
    commands_submitted: int
    has_counters: bool
    programs: int
    instructions: int
    busy_ns: int
    hbm_streamed: int


class _Closes(Protocol):
    def close(self) -> None: ...


class Device:
    """A vTPU, with an address space of its own. Any thread may use it.

    close() closes everything that was made from it.
    """

    def __init__(self, handle: Any) -> None:
        self._handle: Any = ffi.gc(handle, lib.tpurt_device_release)
        self._children: WeakSet[Any] = WeakSet()
        info = new_struct("tpurt_device_info")
        check(lib.tpurt_device_get_info(self._handle, info))
        self.info = DeviceInfo(
            backend=ffi.string(info.backend).decode(),
            name=ffi.string(info.name).decode(),
            hw_version=info.hw_version,
            isa_version=info.isa_version,
            num_queues=info.num_queues,
            hbm_bytes=info.hbm_bytes,
            vmem_bytes=info.vmem_bytes,
            page_bytes=info.page_bytes,
            va_start=info.va_start,
            va_end=info.va_end,
        )

    @classmethod
    def open(
        cls,
        name: str | None = None,
        *,
        hbm_bytes: int = 0,
        threads: int = 0,
        isa: str | None = None,
    ) -> Device:
        """Opens "drm:/dev/accel/accelN", or "core", the machine in this process.

        None: the environment's VTPU_DEVICE, else the first vTPU of the system, else
        "core". The other arguments are for "core": HBM, compute threads, vector path
        ("scalar", "avx2", "avx512", "amx").
        """
        desc = new_struct("tpurt_device_desc")
        desc.core_hbm_bytes = hbm_bytes
        desc.core_threads = threads
        kept = ffi.new("char[]", isa.encode()) if isa else ffi.NULL
        desc.core_isa = kept
        handle = ffi.new("tpurt_device **")
        check(lib.tpurt_device_open(name.encode() if name else ffi.NULL, desc, handle))
        return cls(handle[0])

    def __repr__(self) -> str:
        state = ", closed" if self._handle is None else ""
        return f"<Device {self.info.backend} {self.info.name}{state}>"

    @property
    def handle(self) -> Any:
        """The library's handle. Raises TpuInvalidError when the device is closed."""
        if self._handle is None:
            raise invalid(f"device {self.info.name!r} is closed")
        return self._handle

    def track(self, child: _Closes) -> None:
        """Closes the child when the device is closed."""
        self._children.add(child)

    def buffer(
        self,
        nbytes: int,
        *,
        hbm: bool = False,
        name: str = "",
        read_only: bool = False,
        va: int = 0,
    ) -> Buffer:
        """A zeroed buffer in HBM or in host memory.

        read_only: programs may not write it. va: its device address; 0: any.
        """
        if nbytes <= 0:
            raise invalid(f"buffer {name!r}: {nbytes} bytes; it must have at least 1")
        flags = (lib.TPURT_BUFFER_HBM if hbm else 0) | (
            lib.TPURT_BUFFER_READ_ONLY if read_only else 0
        )
        return self._buffer(nbytes, flags, name, va, None)

    def import_buffer(
        self, data: Any, *, name: str = "", read_only: bool = False, va: int = 0
    ) -> Buffer:
        """A buffer of the memory of data, an object with the buffer protocol (an mmap, say).

        Whole pages; they are pinned, and data kept, until the buffer is closed. Memory that
        cannot be written needs read_only.
        """
        pointer = ffi.from_buffer(data, require_writable=not read_only)
        flags = lib.TPURT_BUFFER_READ_ONLY if read_only else 0
        return self._buffer(len(pointer), flags, name, va, pointer)

    def _buffer(self, nbytes: int, flags: int, name: str, va: int, data: Any) -> Buffer:
        desc = new_struct("tpurt_buffer_desc")
        desc.flags = flags
        desc.bytes = nbytes
        desc.va = va
        kept = ffi.new("char[]", name.encode())
        desc.name = kept
        handle = ffi.new("tpurt_buffer **")
        if data is None:
            check(lib.tpurt_buffer_create(self.handle, desc, handle))
        else:
            check(lib.tpurt_buffer_import(self.handle, desc, data, handle))
        buffer = Buffer(self, handle[0], name, nbytes, bool(flags & lib.TPURT_BUFFER_HBM), data)
        self.track(buffer)
        return buffer

    def load(self, elf: bytes | bytearray | memoryview | str | os.PathLike[str]) -> Executable:
        """Puts an executable's code into HBM. elf: its bytes, or a path."""
        if isinstance(elf, (str, os.PathLike)):
            path = Path(elf)
            name = path.name
            size = path.stat().st_size
            if size > _MAX_EXECUTABLE_BYTES:
                raise invalid(f"{path}: {size} bytes, at most {_MAX_EXECUTABLE_BYTES}")
            image: Any = path.read_bytes()
        else:
            name, image = "", elf
        handle = ffi.new("tpurt_executable **")
        data = ffi.from_buffer(image)
        check(lib.tpurt_executable_load(self.handle, data, len(data), name.encode(), handle))
        executable = Executable(self, handle[0], name)
        self.track(executable)
        return executable

    def queue(self, priority: int = 1, timeout_ms: int = 0) -> Queue:
        """priority: 0 low, 1 normal, 2 high. timeout_ms: a job's limit; 0: 10 s."""
        if not 0 <= priority <= 2 or not 0 <= timeout_ms < 1 << 32:
            raise invalid(f"queue: priority {priority} is not 0..2, or timeout {timeout_ms} ms")
        desc = new_struct("tpurt_queue_desc")
        desc.priority = priority
        desc.timeout_ms = timeout_ms
        handle = ffi.new("tpurt_queue **")
        check(lib.tpurt_queue_create(self.handle, desc, handle))
        queue = Queue(self, handle[0])
        self.track(queue)
        return queue

    def memory(self) -> DeviceMemory:
        memory = new_struct("tpurt_device_memory")
        check(lib.tpurt_device_get_memory(self.handle, memory))
        return DeviceMemory(
            memory.hbm_bytes, memory.hbm_used, memory.client_hbm, memory.client_host
        )

    def stats(self) -> DeviceStats:
        stats = new_struct("tpurt_device_stats")
        check(lib.tpurt_device_get_stats(self.handle, stats))
        return DeviceStats(
            device_resets=stats.device_resets,
            queue_resets=stats.queue_resets,
            jobs_submitted=stats.jobs_submitted,
            commands_submitted=stats.commands_submitted,
            has_counters=bool(stats.has_counters),
            programs=stats.programs,
            instructions=stats.instructions,
            busy_ns=stats.busy_ns,
            hbm_streamed=stats.hbm_streamed,
        )

    def close(self) -> None:
        """Closes what was made from the device, then the device. Once or more."""
        for child in list(self._children):
            child.close()
        self._handle = None

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
