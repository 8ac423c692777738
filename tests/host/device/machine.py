# SPDX-License-Identifier: MIT
"""The machine through libvtpucore.so, with page tables, queues and system memory.

Waiting is on interrupts and on status registers, with a limit far above what
any machine needs; a test never sleeps for luck.
"""

from __future__ import annotations

import ctypes as c
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from vtpu_compiler import hw

LIMIT_S = 60.0
SYSTEM_BASE = 0x1_0000_0000  # bus address of the system memory
SYSTEM_BYTES = 8 << 20
READ, WRITE, EXEC, HBM, HUGE = 2, 4, 8, 16, 32
VALID = 1


def _defines() -> dict[str, int]:
    header = Path(__file__).parents[3] / "qemu-device" / "include" / "vtpu_hw.h"
    found = re.findall(r"#define VTPU_(\w+)\s+(0x[0-9a-f]+|\d+)u?\b", header.read_text())
    return {name: int(value, 0) for name, value in found}


def _injections() -> list[str]:
    """The names of enum VtpuInjection, in order."""
    header = Path(__file__).parents[3] / "qemu-device" / "core" / "vtpu_core.h"
    return re.findall(r"^    VTPU_INJECT_(\w+),", header.read_text(), re.M)


# Set, every test's machine looks for races, too.
CHECK_RACES = bool(os.environ.get("VTPU_TEST_CHECK_RACES"))
D = _defines()
INJECTIONS = _injections()
HARDWARE_ERRORS = ("CORRECTED", "UNCORRECTED", "POISONED")
EVENTS = ("BEGIN", "END", "FAULT", "DOORBELL", "INSTRUCTION", "INJECTED", "TIMED")
EVENTS += ("PREEMPTED", "RESUMED")
EVENTS += ("RACE",)

_libc = c.CDLL(None)
_libc.free.argtypes = [c.c_void_p]

_DmaRead = c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_uint64, c.c_void_p, c.c_size_t)
_DmaWrite = c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_uint64, c.c_void_p, c.c_size_t)
_Irq = c.CFUNCTYPE(None, c.c_void_p, c.c_uint)
_Error = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p)
_Dirty = c.CFUNCTYPE(None, c.c_void_p, c.c_uint64, c.c_uint64)
_Trace = c.CFUNCTYPE(None, c.c_void_p, c.c_int, c.c_uint, c.c_uint64, c.c_uint64)
_Cleared = c.CFUNCTYPE(None, c.c_void_p)
_WantsTrace = c.CFUNCTYPE(c.c_bool, c.c_void_p)
_HardwareError = c.CFUNCTYPE(None, c.c_void_p, c.c_int)


class _Ops(c.Structure):
    _fields_ = (
        ("dma_read", _DmaRead),
        ("dma_write", _DmaWrite),
        ("raise_irq", _Irq),
        ("guest_error", _Error),
        ("hbm_dirty", _Dirty),
        ("trace", _Trace),
        ("thread_enter", c.c_void_p),
        ("thread_leave", c.c_void_p),
        ("trace_instructions", _WantsTrace),
        ("parked", c.c_void_p),
        ("hbm_cleared", _Cleared),
        ("hardware_error", _HardwareError),
        ("link_write", c.c_void_p),
    )


class _Config(c.Structure):
    _fields_ = (
        ("hbm", c.c_void_p),
        ("hbm_bytes", c.c_uint64),
        ("threads", c.c_uint),
        ("isa_path", c.c_char_p),
        ("schedule_seed", c.c_uint64),
        ("stepped", c.c_bool),
        ("serve_short", c.c_bool),
        ("chip", c.c_void_p),
        ("function", c.c_uint),
        ("timing", c.c_char_p),
        ("timing_file", c.c_char_p),
        ("timing_trace", c.c_char_p),
        ("fabric", c.c_void_p),
        ("fabric_chip", c.c_uint),
        ("check_races", c.c_bool),
    )


def load_library(path: Path) -> c.CDLL:
    lib = c.CDLL(str(path))
    lib.vtpu_core_new.restype = c.c_void_p
    lib.vtpu_core_new.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p]
    lib.vtpu_core_mmio_read.restype = c.c_uint64
    lib.vtpu_core_mmio_read.argtypes = [c.c_void_p, c.c_uint64, c.c_uint]
    lib.vtpu_core_mmio_write.argtypes = [c.c_void_p, c.c_uint64, c.c_uint64, c.c_uint]
    lib.vtpu_core_doorbell.argtypes = [c.c_void_p, c.c_uint, c.c_uint32]
    lib.vtpu_core_isa_path.restype = c.c_char_p
    lib.vtpu_core_inject.restype = c.c_bool
    lib.vtpu_core_inject.argtypes = [c.c_void_p, c.c_int, c.c_uint64]
    lib.vtpu_core_injected.restype = c.c_uint64
    lib.vtpu_core_injected.argtypes = [c.c_void_p, c.c_int]
    lib.vtpu_core_describe.argtypes = [c.c_void_p, c.c_char_p, c.c_size_t]
    lib.vtpu_chip_new.restype = c.c_void_p
    lib.vtpu_chip_new.argtypes = [c.c_uint, c.c_void_p]
    lib.vtpu_chip_free.argtypes = [c.c_void_p]
    lib.vtpu_core_save.restype = c.c_void_p
    lib.vtpu_core_save.argtypes = [c.c_void_p, c.POINTER(c.c_size_t)]
    lib.vtpu_core_load.restype = c.c_bool
    lib.vtpu_core_load.argtypes = [c.c_void_p, c.c_char_p, c.c_size_t, c.POINTER(c.c_char_p)]
    lib.vtpu_core_step.restype = c.c_bool
    lib.vtpu_core_step.argtypes = [c.c_void_p]
    lib.vtpu_core_sleep.argtypes = [c.c_void_p, c.c_bool]
    for name in ("park", "free", "reset", "reset_and_clear", "quiesce", "resume", "isa_path"):
        getattr(lib, f"vtpu_core_{name}").argtypes = [c.c_void_p]
    return lib


class Chip:
    """Engines that machines share. To be closed after them."""

    def __init__(self, lib: c.CDLL, threads: int = 2) -> None:
        self.lib = lib
        error = c.c_char_p()
        self.handle = lib.vtpu_chip_new(threads, c.byref(error))
        if not self.handle:
            raise ValueError((error.value or b"").decode())

    def close(self) -> None:
        self.lib.vtpu_chip_free(self.handle)


OpenFunctions = Callable[[int], "list[Machine]"]


class Machine:
    """One device, or a function of a chip. Context 0 maps HBM at its own offsets by default."""

    def __init__(
        self,
        lib: c.CDLL,
        *,
        hbm_bytes: int = 64 << 20,
        threads: int = 2,
        isa: str | None = None,
        seed: int = 0,
        guard: int = 0,
        chip: Chip | None = None,
        function: int = 0,
        check_races: bool = CHECK_RACES,
        timing: str | None = None,
        timing_file: Path | None = None,
        timing_trace: Path | None = None,
        fabric: int | None = None,
        fabric_chip: int = 0,
        stepped: bool = False,
        serve_short: bool = False,
    ) -> None:
        self.lib = lib
        # Pages appear as they are touched; those on both sides are nobody's.
        self._storage = mmap.mmap(-1, hbm_bytes + 2 * guard)
        base = c.addressof(c.c_char.from_buffer(self._storage)) + guard
        self.hbm = memoryview(self._storage)[guard : guard + hbm_bytes]
        self._guards = [memoryview(self._storage)[at : at + guard] for at in (0, guard + hbm_bytes)]
        for side in self._guards:
            side[:] = b"\xc3" * guard
        self.system = bytearray(SYSTEM_BYTES)
        self.bus_ok = True
        self.dma_log: list[tuple[str, int, int]] = []
        self.errors: list[str] = []
        self.dirty: list[tuple[int, int]] = []
        self.irqs: list[int] = []
        self.cleared = 0
        self.events: list[tuple[str, int, int, int]] = []  # event, queue, a, b
        self.trace_instructions = False
        self.hardware_errors: list[str] = []
        self._irq_seen = threading.Condition()
        self.on_dma: Callable[[str, int, int], None] | None = None
        self._ops = _Ops(
            _DmaRead(self._read),
            _DmaWrite(self._write),
            _Irq(self._irq),
            _Error(self._error),
            _Dirty(self._hbm_dirty),
            _Trace(self._trace),
            None,
            None,
            _WantsTrace(lambda _: self.trace_instructions),
            None,
            _Cleared(self._hbm_cleared),
            _HardwareError(lambda _, what: self.hardware_errors.append(HARDWARE_ERRORS[what])),
            None,
        )
        self._config = _Config(
            hbm=base,
            hbm_bytes=hbm_bytes,
            threads=threads,
            isa_path=isa.encode() if isa else None,
            schedule_seed=seed,
            check_races=check_races,
            timing=timing.encode() if timing else None,
            timing_file=str(timing_file).encode() if timing_file else None,
            timing_trace=str(timing_trace).encode() if timing_trace else None,
            chip=chip.handle if chip else None,
            function=function,
            stepped=stepped,
            serve_short=serve_short,
            fabric=fabric,
            fabric_chip=fabric_chip,
        )
        error = c.c_char_p()
        self._core = lib.vtpu_core_new(
            c.byref(self._config), c.byref(self._ops), None, c.byref(error)
        )
        if not self._core:
            raise ValueError((error.value or b"").decode())
        self._next_table = hbm_bytes - (4 << 20)  # page tables lie at the end of HBM
        self._next_free = 1 << 20
        self.roots: dict[int, int] = {}

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._core:
            self.lib.vtpu_core_free(self._core)
            self._core = None

    # --- callbacks, on the machine's thread ---

    def _in_system(self, addr: int, size: int) -> bool:
        return self.bus_ok and addr >= SYSTEM_BASE and addr + size <= SYSTEM_BASE + SYSTEM_BYTES

    def _read(self, _: Any, addr: int, buffer: int, size: int) -> bool:
        self.dma_log.append(("read", addr, size))
        if self.on_dma:
            self.on_dma("read", addr, size)
        if not self._in_system(addr, size):
            return False
        at = addr - SYSTEM_BASE
        c.memmove(buffer, bytes(self.system[at : at + size]), size)
        return True

    def _write(self, _: Any, addr: int, buffer: int, size: int) -> bool:
        self.dma_log.append(("write", addr, size))
        if self.on_dma:
            self.on_dma("write", addr, size)
        if not self._in_system(addr, size):
            return False
        at = addr - SYSTEM_BASE
        self.system[at : at + size] = c.string_at(buffer, size)
        return True

    def _irq(self, _: Any, vector: int) -> None:
        with self._irq_seen:
            self.irqs.append(vector)
            self._irq_seen.notify_all()

    def _error(self, _: Any, message: bytes) -> None:
        self.errors.append(message.decode())

    def _hbm_dirty(self, _: Any, offset: int, size: int) -> None:
        self.dirty.append((offset, size))

    def _hbm_cleared(self, _: Any) -> None:
        self.cleared += 1

    def _trace(self, _: Any, event: int, queue: int, a: int, b: int) -> None:
        self.events.append((EVENTS[event], queue, a, b))

    # --- registers ---

    def read(self, offset: int, size: int = 4) -> int:
        return int(self.lib.vtpu_core_mmio_read(self._core, offset, size))

    def write(self, offset: int, value: int, size: int = 4) -> None:
        self.lib.vtpu_core_mmio_write(self._core, offset, value, size)

    def reg(self, name: str, size: int = 4) -> int:
        return self.read(D[f"REG_{name}"], size)

    def doorbell(self, queue: int, tail: int) -> None:
        self.lib.vtpu_core_doorbell(self._core, queue, tail)

    def reset(self) -> None:
        self.lib.vtpu_core_reset(self._core)

    def reset_and_clear(self) -> None:
        self.lib.vtpu_core_reset_and_clear(self._core)

    def wait_reset(self) -> None:
        self.wait_for(lambda: not self.reg("STATUS") & D["STATUS_RESETTING"], "reset")

    def quiesce(self) -> None:
        self.lib.vtpu_core_quiesce(self._core)

    def resume(self) -> None:
        self.lib.vtpu_core_resume(self._core)

    def park(self) -> None:
        """Asks for it only: may be called from a callback."""
        self.lib.vtpu_core_park(self._core)

    def save(self) -> bytes:
        """Of a parked machine: its state, without HBM."""
        size = c.c_size_t()
        state = self.lib.vtpu_core_save(self._core, c.byref(size))
        assert state, "cannot be saved"
        copy = c.string_at(state, size.value)
        _libc.free(state)
        return copy

    def load(self, state: bytes) -> str:
        """Into a parked machine; returns the error, or nothing."""
        error = c.c_char_p()
        ok = self.lib.vtpu_core_load(self._core, state, len(state), c.byref(error))
        assert ok == (not error.value)
        return (error.value or b"").decode()

    def step(self) -> bool:
        """Of a stepped machine; false: there is nothing to do."""
        return bool(self.lib.vtpu_core_step(self._core))

    def sleep(self, asleep: bool) -> None:
        self.lib.vtpu_core_sleep(self._core, asleep)

    def inject(self, fault: str, value: int) -> bool:
        """False: the machine refuses the value."""
        return bool(self.lib.vtpu_core_inject(self._core, INJECTIONS.index(fault), value))

    def injected(self, fault: str) -> int:
        return int(self.lib.vtpu_core_injected(self._core, INJECTIONS.index(fault)))

    def describe(self, size: int = 16384) -> str:
        text = c.create_string_buffer(size)
        self.lib.vtpu_core_describe(self._core, text, size)
        return text.value.decode()

    @property
    def isa(self) -> str:
        return bytes(self.lib.vtpu_core_isa_path(self._core)).decode()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"never: {what}"
            time.sleep(0)

    def wait_irqs(self, vector: int, count: int) -> None:
        with self._irq_seen:
            done = self._irq_seen.wait_for(lambda: self.irqs.count(vector) >= count, LIMIT_S)
        assert done, f"vector {vector} was raised {self.irqs.count(vector)} times, not {count}"

    def enable(self) -> None:
        self.write(D["REG_CTRL"], D["CTRL_ENABLE"])

    # --- memory ---

    def alloc(self, size: int, align: int = 4096) -> int:
        """HBM bytes that nothing else uses."""
        at = (self._next_free + align - 1) // align * align
        self._next_free = at + size
        assert self._next_free <= len(self.hbm) - (4 << 20)
        return at

    def release(self) -> None:
        """All that alloc() has given is free again."""
        self._next_free = 1 << 20

    def put(self, offset: int, data: bytes) -> int:
        self.hbm[offset : offset + len(data)] = data
        return offset

    def place(self, data: bytes, align: int = 4096) -> int:
        return self.put(self.alloc(len(data), align), data)

    def get(self, offset: int, size: int) -> bytes:
        return bytes(self.hbm[offset : offset + size])

    def word(self, offset: int) -> int:
        return int(struct.unpack("<Q", self.get(offset, 8))[0])

    def check_guard(self) -> None:
        for side in self._guards:
            assert bytes(side) == b"\xc3" * len(side), "written beside HBM"

    # --- page tables ---

    def _table(self) -> int:
        at = self._next_table
        self._next_table += 4096
        self.put(at, bytes(4096))
        return at

    def context(self, context: int) -> None:
        """Gives a context an empty address space."""
        self.roots[context] = self._table()
        self.write(D["REG_CTX_ROOT"] + 8 * context, self.roots[context] | VALID, 8)

    def pte_at(self, context: int, va: int, level: int = 0) -> int:
        """HBM offset of the entry that maps va, tables made as needed."""
        table = self.roots[context]
        for step in range(3, level, -1):
            entry = table + 8 * (va >> (12 + 9 * step) & 511)
            if not self.word(entry) & VALID:
                self.put(entry, struct.pack("<Q", self._table() | VALID))
            table = self.word(entry) & 0x000F_FFFF_FFFF_F000
        return table + 8 * (va >> (12 + 9 * level) & 511)

    def map(
        self,
        context: int,
        va: int,
        target: int,
        size: int,
        rights: int = READ | WRITE | EXEC,
        *,
        hbm: bool = True,
        huge: bool = False,
    ) -> None:
        page = 2 << 20 if huge else 4096
        for at in range(0, size, page):
            bits = VALID | rights | (HBM if hbm else 0) | (HUGE if huge else 0)
            entry = self.pte_at(context, va + at, 1 if huge else 0)
            self.put(entry, struct.pack("<Q", target + at | bits))

    def identity(self, context: int = 0) -> None:
        """Virtual address = HBM offset, for all of HBM, in huge pages."""
        self.context(context)
        self.map(context, 0, 0, len(self.hbm), huge=True)


class Queue:
    """A ring in system memory, one page a queue from the start of it."""

    def __init__(
        self,
        machine: Machine,
        number: int = 0,
        *,
        context: int = 0,
        priority: int = 1,
        log2: int = 4,
        enable: bool = True,
    ) -> None:
        self.machine, self.number, self.log2, self.tail = machine, number, log2, 0
        self.vector = number + 1
        self.ring = number * 8192
        self.fence_at = number * 8192 + 4096
        self.fences = 0
        self.set("RING_BASE", SYSTEM_BASE + self.ring, 8)
        self.set("FENCE_ADDR", SYSTEM_BASE + self.fence_at, 8)
        self.set("RING_LOG2", log2)
        self.set("CONTEXT", context)
        self.set("VECTOR", self.vector)
        self.set("PRIORITY", priority)
        if enable:
            self.set("CTRL", D["Q_CTRL_ENABLE"])

    def offset(self, name: str) -> int:
        return D[f"REG_Q_{name}"] + self.number * D["QUEUE_STRIDE"]

    def set(self, name: str, value: int, size: int = 4) -> None:
        self.machine.write(self.offset(name), value, size)

    def reg(self, name: str, size: int = 4) -> int:
        return self.machine.read(self.offset(name), size)

    @property
    def state(self) -> str:
        number = self.reg("QSTATUS")
        return next(name for name, value in hw.QUEUE_STATE.items() if value == number)

    @property
    def fence(self) -> int:
        return int(struct.unpack_from("<Q", self.machine.system, self.fence_at)[0])

    def push(
        self, command: str, payload: bytes = b"", *, flags: int = 3, raw: bytes | None = None
    ) -> int:
        """Writes an entry without ringing; returns its fence value."""
        self.fences += 1
        entry = raw or struct.pack(
            "<BBHIQQ40s", D[f"CMD_{command}"], flags, 0, 0, self.fences, 0, payload
        )
        at = self.ring + (self.tail % (1 << self.log2)) * hw.RING_ENTRY
        self.machine.system[at : at + hw.RING_ENTRY] = entry
        self.tail += 1
        return self.fences

    def ring_doorbell(self) -> None:
        self.machine.doorbell(self.number, self.tail)

    def wait(self, fence: int) -> None:
        self.machine.wait_for(lambda: self.fence >= fence or self.state == "FAULTED", "fence")
        assert self.state != "FAULTED", self.fault()
        assert self.fence == fence

    def do(self, command: str, payload: bytes = b"") -> None:
        fence = self.push(command, payload)
        self.ring_doorbell()
        self.wait(fence)

    def run_payload(self, code: bytes, args: tuple[int, ...] = (), entry: int = 0) -> bytes:
        code_va = self.machine.place(code)
        args_va = self.machine.place(struct.pack(f"<{len(args)}Q", *args)) if args else 0
        return struct.pack("<QIIQI", code_va, len(code), entry, args_va, len(args))

    def run(self, code: bytes, args: tuple[int, ...] = ()) -> None:
        """Runs a program in an identity-mapped context to its end."""
        self.do("RUN", self.run_payload(code, args))

    def fault(self) -> dict[str, int | str]:
        cause = self.reg("FAULT_CAUSE")
        return {
            "cause": next(name for name, value in hw.FAULT.items() if value == cause),
            "access": self.reg("FAULT_ACCESS"),
            "addr": self.reg("FAULT_ADDR", 8),
            "pc": self.reg("FAULT_PC"),
            "entry": self.reg("FAULT_ENTRY"),
        }

    def expect_fault(self, command: str, payload: bytes = b"", **raw: Any) -> dict[str, int | str]:
        errors = self.machine.irqs.count(0)
        self.push(command, payload, **raw)
        self.ring_doorbell()
        self.machine.wait_irqs(0, errors + 1)
        assert self.state == "FAULTED"
        assert self.machine.reg("ERR_QUEUES") >> self.number & 1
        return self.fault()

    def run_fault(self, code: bytes, args: tuple[int, ...] = ()) -> dict[str, int | str]:
        return self.expect_fault("RUN", self.run_payload(code, args))

    def restart(self) -> None:
        self.set("CTRL", D["Q_CTRL_RESET"])
        self.machine.wait_for(lambda: self.state == "DISABLED", "queue reset")
        self.machine.write(D["REG_ERR_QUEUES"], 1 << self.number)
        self.tail = 0
        self.set("CTRL", D["Q_CTRL_ENABLE"])
