# SPDX-License-Identifier: MIT
"""The driver's ioctls with nothing in between. Runs in the guest, standard library only."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

DEVICES = "/dev/accel/accel*"
# How many times longer than the default kernel this one may take for anything.
PATIENCE = int(os.environ.get("VTPU_PATIENCE", "1"))
PAGE, HUGE = 4096, 2 << 20
HBM = 1
READ, WRITE, EXEC = 1, 2, 4
OK, FAULTED, HUNG, LOST = range(4)
NOP, RUN, COPY, FILL, WAIT, SIGNAL, TIMESTAMP = range(1, 8)
SYNC_SIGNAL, SYNC_TIMELINE = 1, 2
MAP, UNMAP = 0, 1
USERPTR_READ_ONLY = 1
QUEUE_USER = 1
RING_FENCE, RING_IRQ = 1, 2
RING_ENTRY = 64
FAULT_UNMAPPED, FAULT_PROTECTION, FAULT_BUS, FAULT_TRAP, FAULT_ECC = 3, 4, 5, 8, 15

# One instruction each: the opcode, everything else zero.
HALT = bytes([0x01]).ljust(64, b"\0")
LOOP = bytes([0x14]).ljust(64, b"\0")  # jumps to itself


def instruction(
    op: int, regs: list[int] = (), imms: list[int] = (), fmt: int = 0, imm64: int = 0
) -> bytes:
    """Operands in order, a register and an immediate each."""
    regs, imms = [*regs, *[0] * (8 - len(regs))], [*imms, *[0] * (8 - len(imms))]
    return struct.pack("<B4xB10x8B8IQ", op, fmt, *regs, *imms, imm64)


def trap(code: int) -> bytes:
    return struct.pack("<B23xI36x", 0x02, code)


def _code(direction: int, kind: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | kind << 8 | number


_RW, _W = 3, 1
# name: (direction, number, format, fields in order)
IOCTLS = {
    "dev_query": (_RW, 0x40, "IIQ", "query size data"),
    "bo_create": (_RW, 0x41, "QII", "size flags handle"),
    "bo_info": (_RW, 0x42, "IIQQ", "handle flags size mmap_offset"),
    "bo_wait": (_W, 0x43, "IIq", "handle pad timeout_ns"),
    "vm_create": (_RW, 0x44, "II", "flags vm_id"),
    "vm_destroy": (_W, 0x45, "II", "vm_id pad"),
    "vm_bind": (_W, 0x46, "IIIIQQQ", "vm_id op handle flags bo_offset va size"),
    "queue_create": (_RW, 0x47, "IIIIII", "vm_id priority flags timeout_ms queue_id stall_ms"),
    "queue_destroy": (_W, 0x48, "II", "queue_id pad"),
    "queue_state": (
        _RW,
        0x49,
        "IIIIQIIQ",
        "queue_id status fault_cause fault_access fault_addr fault_pc fault_cookie completed",
    ),
    "submit": (_W, 0x4A, "IIQQII", "queue_id flags cmds syncs num_cmds num_syncs"),
    "bo_userptr": (_RW, 0x4B, "QQII", "addr size flags handle"),
    "perfmon": (_W, 0x4C, "IIQ", "queue_id num_counters counters"),
    "queue_map": (
        _RW,
        0x4D,
        "IIQQQQ",
        "queue_id pad ring_offset ring_bytes fence_offset doorbell_offset",
    ),
    "queue_wait": (_W, 0x4E, "IIQq", "queue_id pad value timeout_ns"),
    # DRM's own
    "gem_close": (_W, 0x09, "II", "handle pad"),
    "prime_handle_to_fd": (_RW, 0x2D, "IIi", "handle flags fd"),
    "prime_fd_to_handle": (_RW, 0x2E, "IIi", "handle flags fd"),
    "syncobj_create": (_RW, 0xBF, "II", "handle flags"),
    "syncobj_destroy": (_RW, 0xC0, "II", "handle pad"),
    "syncobj_reset": (_RW, 0xC4, "QII", "handles count pad"),
    "syncobj_signal": (_RW, 0xC5, "QII", "handles count pad"),
    "syncobj_transfer": (
        _RW,
        0xCC,
        "IIQQII",
        "src_handle dst_handle src_point dst_point flags pad",
    ),
    "syncobj_handle_to_fd": (_RW, 0xC1, "IIiI", "handle flags fd pad"),
    "syncobj_fd_to_handle": (_RW, 0xC2, "IIiI", "handle flags fd pad"),
    "syncobj_wait": (
        _RW,
        0xC3,
        "QqIIIIQ",
        "handles timeout_ns count flags first pad deadline",
    ),
    "syncobj_timeline_wait": (
        _RW,
        0xCA,
        "QQqIIIIQ",
        "handles points timeout_ns count flags first pad deadline",
    ),
    "syncobj_query": (_RW, 0xCB, "QQII", "handles points count flags"),
    "syncobj_timeline_signal": (_RW, 0xCD, "QQII", "handles points count flags"),
}


def node() -> str:
    """The device's node. Its number is another while an old file is still open.

    VTPU_NODE names one of several.
    """
    found = sorted(glob.glob(os.environ.get("VTPU_NODE", DEVICES)))
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no device node", DEVICES)
    return found[0]


class Result(dict):
    __getattr__ = dict.__getitem__


def ioctl_code(name: str) -> int:
    direction, number, layout, _ = IOCTLS[name]
    return _code(direction, ord("d"), number, struct.calcsize("<" + layout))


def _sync_file_info(fd: int) -> tuple:
    data = bytearray(struct.pack("<32siIIIQ", b"", 0, 0, 0, 0, 0))
    fcntl.ioctl(fd, _code(3, ord(">"), 4, len(data)), data)
    return struct.unpack("<32siIIIQ", data)


def sync_file_state(fd: int) -> int:
    """1 signalled, 0 pending, or -errno."""
    return _sync_file_info(fd)[1]


def sync_file_name(fd: int) -> str:
    """As the driver of its fence has it; "detached-..." where newer kernels ask it no more."""
    return _sync_file_info(fd)[0].partition(b"\0")[0].decode()


@contextmanager
def raises(*expected: int):
    names = "/".join(errno.errorcode[e] for e in expected)
    try:
        yield
    except OSError as error:
        got = errno.errorcode.get(error.errno or 0, str(error.errno))
        assert error.errno in expected, f"{got} instead of {names}"
    else:
        raise AssertionError(f"no error instead of {names}")


def buffer_address(data: Any) -> int:
    return ctypes.addressof(data) if data is not None else 0


def words(format_: str, *values: int) -> Any:
    packed = struct.pack("<" + format_, *values)
    return ctypes.create_string_buffer(packed, len(packed))


def absolute(seconds: float) -> int:
    """The time when so many seconds of the default kernel have passed."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(seconds * PATIENCE * 1e9)


# (op, cookie, five words of payload) of each command
def nop(cookie: int = 0) -> tuple:
    return (NOP, cookie, 0, 0, 0, 0, 0)


def run(code: int, size: int, entry: int = 0, args: int = 0, num: int = 0, cookie: int = 0):
    return (RUN, cookie, code, size | entry << 32, args, num, 0)


def copy(dst: int, src: int, size: int, cookie: int = 0) -> tuple:
    return (COPY, cookie, dst, src, size, 0, 0)


def fill(dst: int, size: int, pattern: int, cookie: int = 0) -> tuple:
    return (FILL, cookie, dst, size, pattern, 0, 0)


def wait(addr: int, value: int, cookie: int = 0) -> tuple:
    return (WAIT, cookie, addr, value, 0, 0, 0)


def signal(addr: int, value: int) -> tuple:
    return (SIGNAL, 0, addr, value, 0, 0, 0)


def timestamp(addr: int) -> tuple:
    return (TIMESTAMP, 0, addr, 0, 0, 0, 0)


class Device:
    """An open file of the device."""

    def __init__(self) -> None:
        self.fd = os.open(node(), os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, name: str, **values: int) -> Result:
        _, _, layout, fields = IOCTLS[name]
        names = fields.split()
        unknown = set(values) - set(names)
        assert not unknown, unknown
        data = bytearray(struct.pack("<" + layout, *(values.get(field, 0) for field in names)))
        fcntl.ioctl(self.fd, ioctl_code(name), data)
        return Result(zip(names, struct.unpack("<" + layout, data), strict=True))

    # Queries

    def query(self, number: int, layout: str, fields: str) -> Result:
        data = ctypes.create_string_buffer(struct.calcsize("<" + layout))
        self.call("dev_query", query=number, size=len(data), data=buffer_address(data))
        return Result(zip(fields.split(), struct.unpack("<" + layout, data.raw), strict=True))

    def info(self) -> Result:
        return self.query(
            0,
            "IIQIIIIQQ",
            "hw_version isa_version hbm_bytes vmem_bytes num_queues num_contexts page_bytes "
            "va_start va_end",
        )

    def memory(self) -> Result:
        return self.query(1, "QQQQ", "hbm_bytes hbm_used hbm_evicted evictions")

    def resets(self) -> Result:
        fields = "device_resets queue_resets engine_resets jobs_replayed queues_lost wedged"
        return self.query(2, "QQQQQQ", fields)

    # Buffers

    def bo(self, size: int, flags: int = 0) -> int:
        return self.call("bo_create", size=size, flags=flags).handle

    def userptr(self, addr: int, size: int, flags: int = 0) -> int:
        return self.call("bo_userptr", addr=addr, size=size, flags=flags).handle

    def map(self, handle: int) -> mmap.mmap:
        info = self.call("bo_info", handle=handle)
        return mmap.mmap(self.fd, info.size, offset=info.mmap_offset)

    def close_bo(self, handle: int) -> None:
        self.call("gem_close", handle=handle)

    # Address spaces and queues

    def vm(self) -> int:
        return self.call("vm_create").vm_id

    def bind(
        self, vm: int, handle: int, va: int, size: int, flags: int = READ | WRITE, offset: int = 0
    ) -> None:
        self.call(
            "vm_bind", vm_id=vm, handle=handle, flags=flags, bo_offset=offset, va=va, size=size
        )

    def unbind(self, vm: int, va: int, size: int) -> None:
        self.call("vm_bind", vm_id=vm, op=UNMAP, va=va, size=size)

    def queue(
        self, vm: int, timeout_ms: int = 0, priority: int = 1, flags: int = 0, stall_ms: int = 0
    ) -> int:
        return self.call(
            "queue_create",
            vm_id=vm,
            priority=priority,
            timeout_ms=timeout_ms,
            flags=flags,
            stall_ms=stall_ms,
        ).queue_id

    def state(self, queue: int) -> Result:
        return self.call("queue_state", queue_id=queue)

    def counters(self, queue: int, ids: list[int]) -> list[int]:
        data = words("IIQ" * len(ids), *(word for number in ids for word in (number, 0, 0)))
        self.call("perfmon", queue_id=queue, num_counters=len(ids), counters=buffer_address(data))
        return [value for _, _, value in struct.iter_unpack("<IIQ", data.raw)]

    # Jobs

    def submit(self, queue: int, commands: list, syncs: list = (), flags: int = 0) -> None:
        """syncs: (handle, flags, point)"""
        cmds = words("IIQQQQQ" * len(commands), *(word for command in commands for word in command))
        sync = words("IIQ" * len(syncs), *(word for item in syncs for word in item))
        self.call(
            "submit",
            queue_id=queue,
            flags=flags,
            cmds=buffer_address(cmds),
            syncs=buffer_address(sync),
            num_cmds=len(commands),
            num_syncs=len(syncs),
        )

    def resubmitter(self, queue: int, commands: list) -> Callable[[], None]:
        """Submits the same job at each call, which costs little but the ioctl."""
        cmds = words("IIQQQQQ" * len(commands), *(word for command in commands for word in command))
        layout = "<" + IOCTLS["submit"][2]
        job = struct.pack(layout, queue, 0, buffer_address(cmds), 0, len(commands), 0)
        code = ioctl_code("submit")
        return lambda keep=cmds: fcntl.ioctl(self.fd, code, job)

    def syncobj(self, signaled: bool = False) -> int:
        return self.call("syncobj_create", flags=int(signaled)).handle

    def wait(self, syncobj: int, seconds: float = 10) -> None:
        handles = words("I", syncobj)
        self.call(
            "syncobj_wait",
            handles=buffer_address(handles),
            timeout_ns=absolute(seconds),
            count=1,
        )

    def wait_point(self, syncobj: int, point: int, seconds: float = 10) -> None:
        handles, points = words("I", syncobj), words("Q", point)
        self.call(
            "syncobj_timeline_wait",
            handles=buffer_address(handles),
            points=buffer_address(points),
            timeout_ns=absolute(seconds),
            count=1,
            flags=2,  # the point may not have a fence yet
        )

    def signal_point(self, syncobj: int, point: int) -> None:
        handles, points = words("I", syncobj), words("Q", point)
        self.call(
            "syncobj_timeline_signal",
            handles=buffer_address(handles),
            points=buffer_address(points),
            count=1,
        )

    def fence_error(self, syncobj: int) -> int:
        """The state of its fence, through a sync_file."""
        fd = self.call("syncobj_handle_to_fd", handle=syncobj, flags=1).fd
        try:
            return sync_file_state(fd)
        finally:
            os.close(fd)

    def finish(self, queue: int, commands: list, seconds: float = 10) -> int:
        """Submits, waits, and tells the fence's state."""
        sync = self.syncobj()
        try:
            self.submit(queue, commands, [(sync, SYNC_SIGNAL, 0)])
            self.wait(sync, seconds)
            return self.fence_error(sync)
        finally:
            self.call("syncobj_destroy", handle=sync)


class UserQueue:
    """A queue whose ring this process fills and whose doorbell it rings."""

    def __init__(
        self, device: Device, vm: int, timeout_ms: int = 0, priority: int = 1, stall_ms: int = 0
    ) -> None:
        self.device = device
        self.id = device.queue(vm, timeout_ms, priority, QUEUE_USER, stall_ms)
        self.where = device.call("queue_map", queue_id=self.id)
        self.num_entries = self.where.ring_bytes // RING_ENTRY
        self.ring = mmap.mmap(device.fd, self.where.ring_bytes, offset=self.where.ring_offset)
        self.fence = mmap.mmap(device.fd, PAGE, prot=mmap.PROT_READ, offset=self.where.fence_offset)
        self.doorbell = mmap.mmap(device.fd, PAGE, offset=self.where.doorbell_offset)
        # Single accesses of eight and four bytes, which struct's are not.
        self._word = memoryview(self.fence).cast("Q")
        self._bell = memoryview(self.doorbell).cast("I")
        self.tail = 0

    def unmap(self) -> None:
        self._word.release()
        self._bell.release()
        for view in (self.ring, self.fence, self.doorbell):
            view.close()

    def destroy(self) -> None:
        self.device.call("queue_destroy", queue_id=self.id)

    @property
    def word(self) -> int:
        return self._word[0]

    @property
    def state(self) -> Result:
        return self.device.state(self.id)

    def put(self, command: tuple, flags: int = RING_FENCE | RING_IRQ, fence: int = 0) -> int:
        """Writes an entry; its fence value is its number unless another is given."""
        op, cookie, *payload = command
        at = self.tail % self.num_entries * RING_ENTRY
        self.tail += 1
        fence = fence or self.tail
        struct.pack_into("<BBHIQQ5Q", self.ring, at, op, flags, 0, cookie, fence, 0, *payload)
        return fence

    def ring_doorbell(self, tail: int | None = None) -> None:
        self._bell[0] = (self.tail if tail is None else tail) & 0xFFFFFFFF

    def wait(self, value: int, seconds: float = 20) -> None:
        self.device.call("queue_wait", queue_id=self.id, value=value, timeout_ns=absolute(seconds))

    def finish(self, *commands: tuple) -> None:
        """All of them, done."""
        for command in commands:
            fence = self.put(command)
        self.ring_doorbell()
        self.wait(fence)
