# SPDX-License-Identifier: MIT
"""Several machines of one process, joined by a fabric; streams between two fabrics.

Every machine has context 0 identity-mapped, its link enabled for all chips, and
one queue.
"""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from machine import D, Machine, Queue

DOWN, CORRUPT, SLOW = range(3)  # enum VtpuCableFault
XP, XM, YP, YM = range(4)
_Wake = c.CFUNCTYPE(None, c.c_void_p)


def declare(lib: c.CDLL) -> None:
    lib.vtpu_fabric_new.restype = c.c_void_p
    lib.vtpu_fabric_new.argtypes = [c.c_char_p, c.c_void_p]
    lib.vtpu_fabric_free.argtypes = [c.c_void_p]
    lib.vtpu_fabric_neighbour.argtypes = [c.c_void_p, c.c_uint, c.c_uint]
    lib.vtpu_fabric_inject.restype = c.c_bool
    lib.vtpu_fabric_inject.argtypes = [c.c_void_p, c.c_uint, c.c_uint, c.c_int, c.c_uint64]
    lib.vtpu_fabric_injected.restype = c.c_uint64
    lib.vtpu_fabric_injected.argtypes = [c.c_void_p, c.c_uint, c.c_uint, c.c_int]
    lib.vtpu_fabric_describe.argtypes = [c.c_void_p, c.c_char_p, c.c_size_t]
    lib.vtpu_fabric_set_wake.argtypes = [c.c_void_p, _Wake, c.c_void_p]
    lib.vtpu_fabric_input.restype = c.c_char_p
    lib.vtpu_fabric_input.argtypes = [c.c_void_p, c.c_char_p, c.c_size_t]
    lib.vtpu_fabric_input_room.restype = c.c_size_t
    lib.vtpu_fabric_output.restype = c.c_size_t
    lib.vtpu_fabric_output.argtypes = [c.c_void_p, c.c_char_p, c.c_size_t]
    for name in ("input_room", "connected", "disconnected", "chips"):
        getattr(lib, f"vtpu_fabric_{name}").argtypes = [c.c_void_p]


class Fabric:
    """A fabric; `add` makes the machines."""

    def __init__(self, lib: c.CDLL, shape: str) -> None:
        declare(lib)
        self.lib = lib
        error = c.c_char_p()
        self.handle = lib.vtpu_fabric_new(shape.encode(), c.byref(error))
        if not self.handle:
            raise ValueError((error.value or b"").decode())
        self.size = int(lib.vtpu_fabric_chips(self.handle))
        self.machines: dict[int, Machine] = {}
        self.queues: dict[int, Queue] = {}
        self.woken = threading.Event()
        self._wake = _Wake(lambda _: self.woken.set())
        lib.vtpu_fabric_set_wake(self.handle, self._wake, None)

    def __enter__(self) -> Fabric:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for machine in self.machines.values():
            machine.close()
        self.lib.vtpu_fabric_free(self.handle)

    def add(self, chip: int, *, ready: bool = True, **config: Any) -> Machine:
        settings: dict[str, Any] = {"threads": 1, "hbm_bytes": 16 << 20}
        machine = Machine(self.lib, fabric=self.handle, fabric_chip=chip, **(settings | config))
        self.machines[chip] = machine
        machine.identity()
        machine.enable()
        self.queues[chip] = Queue(machine)
        if ready:
            enable_link(machine)
        return machine

    def add_all(self, **config: Any) -> list[Machine]:
        return [self.add(chip, **config) for chip in range(self.size)]

    def inject(self, chip: int, direction: int, fault: int, value: int) -> bool:
        return bool(self.lib.vtpu_fabric_inject(self.handle, chip, direction, fault, value))

    def injected(self, chip: int, direction: int, fault: int) -> int:
        return int(self.lib.vtpu_fabric_injected(self.handle, chip, direction, fault))

    def neighbour(self, chip: int, direction: int) -> int:
        return int(self.lib.vtpu_fabric_neighbour(self.handle, chip, direction))

    def describe(self) -> str:
        text = c.create_string_buffer(8192)
        self.lib.vtpu_fabric_describe(self.handle, text, len(text))
        return text.value.decode()

    # --- the stream, by one thread at a time ---

    def connected(self) -> None:
        self.lib.vtpu_fabric_connected(self.handle)

    def disconnected(self) -> None:
        self.lib.vtpu_fabric_disconnected(self.handle)

    def input(self, data: bytes) -> str | None:
        error = self.lib.vtpu_fabric_input(self.handle, data, len(data))
        return error.decode() if error else None

    def room(self) -> int:
        return int(self.lib.vtpu_fabric_input_room(self.handle))

    def output(self, most: int = 1 << 16) -> bytes:
        data = c.create_string_buffer(most)
        size = self.lib.vtpu_fabric_output(self.handle, data, most)
        return data.raw[:size]

    def run_all(self, programs: dict[int, tuple[bytes, tuple[int, ...]]]) -> None:
        """Starts all programs, then waits for all."""
        fences = {chip: start(self.queues[chip], *what) for chip, what in programs.items()}
        for chip, fence in fences.items():
            self.queues[chip].wait(fence)


def start(queue: Queue, code: bytes, args: tuple[int, ...] = ()) -> int:
    fence = queue.push("RUN", queue.run_payload(code, args))
    queue.ring_doorbell()
    return fence


def enable_link(
    machine: Machine, *, context: int = 0, accept: int = 0xFFFF, fail_stop: bool = False
) -> None:
    machine.write(D["REG_LINK_CTRL"], 0)
    machine.wait_for(
        lambda: not machine.reg("LINK_STATUS") & D["LINK_STATUS_ENABLED"], "link disabled"
    )
    machine.write(D["REG_LINK_CONTEXT"], context)
    machine.write(D["REG_LINK_ACCEPT"], accept)
    bits = D["LINK_CTRL_ENABLE"] | (D["LINK_CTRL_FAIL_STOP"] if fail_stop else 0)
    machine.write(D["REG_LINK_CTRL"], bits)


def link_fault(fault: dict[str, int | str]) -> tuple[str, int, int]:
    """(reason, chip, address) of a LINK fault."""
    from vtpu_compiler import hw

    assert fault["cause"] == "LINK", fault
    word = int(fault["addr"])
    reason = next(name for name, value in hw.LINK_REASON.items() if value == word >> 56)
    return reason, word >> 48 & 0xFF, word & ((1 << 48) - 1)


def counter(machine: Machine, index: int) -> int:
    return machine.read(D["REG_LINK_COUNTER"] + 8 * index, 8)


def wait_begun(queue: Queue) -> None:
    """Until its program is in progress; one that waits for a chip is set aside."""
    queue.machine.wait_for(lambda: queue.state in ("RUNNING", "PREEMPTED"), "in progress")


def wait_fault(queue: Queue) -> dict[str, int | str]:
    queue.machine.wait_for(lambda: queue.state == "FAULTED", "fault")
    return queue.fault()


class Stream:
    """Joins two fabrics by a pair of threads, as sockets between processes would."""

    def __init__(self, a: Fabric, b: Fabric, most: int = 1 << 16) -> None:
        self.sides, self.most = (a, b), most
        self.errors: list[str] = []
        self.taps: list[Callable[[int, bytes], bytes]] = []
        self._buffers = (bytearray(), bytearray())  # towards a, towards b
        self._lock, self._end = threading.Lock(), False
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in (0, 1)]
        self._ready = threading.Barrier(2)

    def __enter__(self) -> Stream:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        """Both ends see the connection go."""
        self._end = True
        for side in self.sides:
            side.woken.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _run(self, index: int) -> None:
        me, other = self.sides[index], self.sides[1 - index]
        me.connected()
        self._ready.wait()
        while not self._end:
            me.woken.clear()
            out = me.output(self.most)
            for tap in self.taps:
                out = tap(index, out)
            with self._lock:
                self._buffers[1 - index].extend(out)
                size = min(me.room(), self.most)
                data = bytes(self._buffers[index][:size])
                del self._buffers[index][: len(data)]
            if out:
                other.woken.set()
            error = me.input(data)
            if error:
                self.errors.append(error)
                self._end = True
                other.woken.set()
            elif not out and not data:
                me.woken.wait(0.05)
        me.disconnected()


OpenFabric = Callable[[str], Fabric]  # by shape; the fixture open_fabric
