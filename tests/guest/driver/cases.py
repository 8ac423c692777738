# SPDX-License-Identifier: MIT
"""What the driver promises, case by case. Runs in the guest as root:

    python3 cases.py [NAME ...]

Prints one JSON object a case. Importable anywhere, to list the names.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import glob
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import vtpu_raw as raw
from vtpu_raw import EXEC, HBM, HUGE, PAGE, READ, SYNC_SIGNAL, SYNC_TIMELINE, WRITE, Device, raises
from watch import HANG, HELD_UP, Expected, Watch, expects

CASES: dict[str, Callable[[], None]] = {}
# Not with the others: while the machine sleeps nobody may talk to its agent.
ALONE = {"suspend_and_resume"}
FOLDER = "/tmp/driver-tests"  # where these files are in the guest
VA = 1 << 32
CASE_SECONDS = 120 * raw.PATIENCE
DRIVER = "/sys/bus/pci/drivers/vtpu"
MODULE = "/opt/vtpu/modules/vtpu.ko"


def collector(table: dict[str, Callable[[], None]]) -> Callable:
    def collect(function: Callable[[], None]) -> Callable[[], None]:
        table[function.__name__] = function
        return function

    return collect


case = collector(CASES)


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    seconds *= raw.PATIENCE
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def is_gone(device: Device) -> bool:
    """Its function was unplugged or disabled."""
    try:
        device.info()
    except OSError as error:
        assert error.errno == errno.ENODEV, error
        return True
    return False


class Setup(Device):
    """A file with an address space, a queue, and a mapped buffer of each kind."""

    def __init__(self, timeout_ms: int = 5000 * raw.PATIENCE, size: int = 4 * PAGE) -> None:
        super().__init__()
        self.size = size
        self.host_va, self.hbm_va, self.code_va = VA, VA + (1 << 30), VA + (2 << 30)
        self.maps: list[mmap.mmap] = []
        try:
            self.vm_id = self.vm()
            self.queue_id = self.queue(self.vm_id, timeout_ms)
            self.host = self.bo(size)
            self.hbm = self.bo(size, HBM)
            self.bind(self.vm_id, self.host, self.host_va, size)
            self.bind(self.vm_id, self.hbm, self.hbm_va, size)
            self.host_map = self.map(self.host)
            self.hbm_map = self.map(self.hbm)
        except BaseException:
            self.close()
            raise

    def map(self, handle: int) -> mmap.mmap:
        self.maps.append(super().map(handle))
        return self.maps[-1]

    def close(self) -> None:
        # A mapping holds the file open.
        for view in self.maps:
            view.close()
        super().close()

    def program(self, code: bytes) -> None:
        handle = self.bo(PAGE)
        view = self.map(handle)
        view[: len(code)] = code
        view.close()
        self.bind(self.vm_id, handle, self.code_va, PAGE, READ | EXEC)

    def run(self, code: bytes, cookie: int = 0) -> tuple:
        self.program(code)
        return raw.run(self.code_va, len(code), cookie=cookie)

    def finish_ok(self, commands: list) -> None:
        got = self.finish(self.queue_id, commands)
        assert got == 1, f"fence {got}, state {self.state(self.queue_id)}"


def counting(count: int, at: int = 0) -> bytes:
    """A program, as the instruction of that number on, that counts and halts."""
    return (
        raw.instruction(0x06, [30, 30], [0, 0, 1])  # ADD s30 = s30 + 1
        + raw.instruction(0x17, [30], [0, count, 64 * at])  # BLT s30 < count
        + raw.HALT
    )


def long_matmul(weights: int) -> bytes:
    """One instruction that works for seconds, on 3 MiB of weights."""
    dst, src, rows, columns, depth, q4_0 = 16 << 20, 0, 1 << 18, 16, 1 << 18, 9
    return (
        raw.instruction(0x05, [40], imm64=weights)
        + raw.instruction(0x30, [0, 0, 40], [dst, src, 0, rows, columns, depth, 64, 0], fmt=q4_0)
        + raw.HALT
    )


# ---- Queries and buffers ----


@case
def query_info() -> None:
    with Device() as dev:
        info = dev.info()
        assert info.hw_version >> 16 == 1 and info.isa_version == 1, info
        assert info.hbm_bytes >= 16 << 20 and info.num_queues and info.num_contexts, info
        assert info.page_bytes == PAGE and 0 < info.va_start < info.va_end == 1 << 48, info
        memory = dev.memory()
        assert memory.hbm_bytes == info.hbm_bytes and memory.hbm_used < memory.hbm_bytes
        assert dev.resets().device_resets >= 0


@case
def query_sizes() -> None:
    with Device() as dev:
        known = dev.call("dev_query", query=0, size=0, data=0).size
        assert known == 48, known
        short = ctypes.create_string_buffer(b"\xff" * 8, 8)
        assert dev.call("dev_query", query=0, size=4, data=ctypes.addressof(short)).size == known
        assert short.raw[4:] == b"\xff" * 4 and short.raw[:4] != b"\xff" * 4
        long = ctypes.create_string_buffer(b"\xff" * 64, 64)
        dev.call("dev_query", query=0, size=64, data=ctypes.addressof(long))
        assert long.raw[known:] == bytes(64 - known)


@case
def bo_host_and_hbm_map() -> None:
    with Device() as dev:
        for flags in (0, HBM):
            handle = dev.bo(PAGE + 1, flags)
            info = dev.call("bo_info", handle=handle)
            assert info.size == 2 * PAGE and info.flags == flags
            with dev.map(handle) as view:
                assert view[:] == bytes(2 * PAGE)
                view[10:14], view[PAGE : PAGE + 4] = b"abcd", b"wxyz"
            with dev.map(handle) as view:
                assert view[10:14] == b"abcd" and view[PAGE : PAGE + 4] == b"wxyz"
            dev.close_bo(handle)
            with raises(errno.ENOENT):
                dev.call("bo_info", handle=handle)


@case
def bo_large_hbm_map() -> None:
    size = 3 * HUGE + PAGE
    with Device() as dev:
        used = dev.memory().hbm_used
        handle = dev.bo(size, HBM)
        assert dev.memory().hbm_used == used + size
        with dev.map(handle) as view:
            marks = [0, PAGE, HUGE - 1, HUGE, 2 * HUGE + 5 * PAGE, size - 1]
            for place in marks:
                assert view[place] == 0
                view[place] = place % 251 + 1
            assert [view[place] for place in marks] == [place % 251 + 1 for place in marks]
        dev.close_bo(handle)
        assert dev.memory().hbm_used == used


@case
def hbm_is_mapped_in_huge_pages() -> None:
    """A large buffer costs a process no page tables, but for a last piece; and what takes such a
    page apart leaves the rest."""

    def tables() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmPTE:")[2].split()[0])

    if "[always]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        return
    size = 48 * HUGE
    with Device() as dev:
        info = dev.call("bo_info", handle=dev.bo(size, HBM))
        for length in (size, size - PAGE):
            before = tables()
            with mmap.mmap(dev.fd, length, offset=info.mmap_offset) as view:
                marks = range(0, length, HUGE)
                for at in marks:
                    assert view[at] == 0  # read first, then written
                    view[at] = view[at + HUGE - 2 * PAGE] = at // HUGE + 1
                assert tables() - before < len(marks) * 4 // 2, "kB of tables"
                for at in marks:
                    assert view[at] == view[at + HUGE - 2 * PAGE] == at // HUGE + 1
                    view[at] = view[at + HUGE - 2 * PAGE] = 0
        with dev.map(info.handle) as view:
            view[HUGE] = view[HUGE + PAGE] = view[2 * HUGE - 1] = 7
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            libc = ctypes.CDLL(None, use_errno=True)
            hole, page = ctypes.c_void_p(address + HUGE), ctypes.c_size_t(PAGE)
            assert libc.mprotect(hole, page, mmap.PROT_READ) == 0
            assert view[HUGE] == view[HUGE + PAGE] == view[2 * HUGE - 1] == 7
            view[HUGE + PAGE] = 8
            assert libc.mprotect(hole, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
            view[HUGE] = 9
            assert (view[HUGE], view[HUGE + PAGE], view[2 * HUGE - 1]) == (9, 8, 7)


@case
def hbm_is_zero_for_the_next_owner() -> None:
    size = 2 * HUGE
    with Device() as dev:
        handle = dev.bo(size, HBM)
        with dev.map(handle) as view:
            view[:] = b"\xa5" * size
        dev.close_bo(handle)
    with Device() as dev:
        for handle in [dev.bo(size, HBM), *(dev.bo(PAGE, HBM) for _ in range(16))]:
            with dev.map(handle) as view:
                assert not any(view[:])


@case
def hbm_exhaustion_is_an_error() -> None:
    with Setup() as dev:
        total, used = dev.memory().hbm_bytes, dev.memory().hbm_used
        with raises(errno.ENOSPC):
            dev.bo(total + PAGE, HBM)
        with raises(errno.ENOSPC):
            dev.bo(total, HBM)
        assert dev.memory().hbm_used == used


@case
def private_mapping_of_hbm_is_refused() -> None:
    with Device() as dev:
        info = dev.call("bo_info", handle=dev.bo(PAGE, HBM))
        with raises(errno.EINVAL):
            mmap.mmap(dev.fd, PAGE, flags=mmap.MAP_PRIVATE, offset=info.mmap_offset)


# ---- Address spaces ----


@case
def vm_bind_errors() -> None:
    with Device() as dev:
        vm = dev.vm()
        bo = dev.bo(4 * PAGE, HBM)
        good = {"vm_id": vm, "handle": bo, "flags": READ, "va": VA, "size": PAGE}
        wrong = [
            ({"vm_id": vm + 1}, errno.ENOENT),
            ({"handle": 999}, errno.ENOENT),
            ({"op": 2}, errno.EINVAL),
            ({"flags": 0}, errno.EINVAL),
            ({"flags": 8}, errno.EINVAL),
            ({"size": 0}, errno.EINVAL),
            ({"size": 100}, errno.EINVAL),
            ({"size": 5 * PAGE}, errno.EINVAL),
            ({"va": VA + 8}, errno.EINVAL),
            ({"va": 0}, errno.EINVAL),
            ({"va": 1 << 48}, errno.EINVAL),
            ({"va": (1 << 48) - PAGE, "size": 2 * PAGE}, errno.EINVAL),
            ({"va": (1 << 64) - PAGE, "size": 2 * PAGE}, errno.EINVAL),
            ({"size": (1 << 64) - PAGE}, errno.EINVAL),
            ({"bo_offset": 8}, errno.EINVAL),
            ({"bo_offset": 4 * PAGE}, errno.EINVAL),
            ({"bo_offset": (1 << 64) - PAGE, "size": 2 * PAGE}, errno.EINVAL),
            ({"op": raw.UNMAP}, errno.EINVAL),
        ]
        for change, error in wrong:
            with raises(error):
                dev.call("vm_bind", **{**good, **change})
        dev.bind(vm, bo, VA, 2 * PAGE)
        for va, size in ((VA, PAGE), (VA + PAGE, PAGE), (VA - PAGE, 2 * PAGE), (VA, 4 * PAGE)):
            with raises(errno.EEXIST):
                dev.bind(vm, bo, va, size)
        for va, size in ((VA, PAGE), (VA + PAGE, PAGE), (VA, 3 * PAGE), (VA - PAGE, 3 * PAGE)):
            with raises(errno.ENOENT):
                dev.unbind(vm, va, size)
        dev.unbind(vm, VA, 2 * PAGE)
        with raises(errno.ENOENT):
            dev.unbind(vm, VA, 2 * PAGE)
        dev.bind(vm, bo, VA, 4 * PAGE)


@case
def vm_limit_and_destroy() -> None:
    with Device() as dev:
        vms = []
        with raises(errno.ENOSPC):
            for _ in range(100):
                vms.append(dev.vm())
        assert 4 <= len(vms) < 64, len(vms)
        queue = dev.queue(vms[0])
        with raises(errno.EBUSY):
            dev.call("vm_destroy", vm_id=vms[0])
        dev.call("queue_destroy", queue_id=queue)
        for vm in vms:
            dev.call("vm_destroy", vm_id=vm)
        with raises(errno.ENOENT):
            dev.call("vm_destroy", vm_id=vms[0])
        dev.vm()


@case
def unmapped_buffer_memory_returns() -> None:
    with Device() as dev:
        used = dev.memory().hbm_used
        vm = dev.vm()
        bo = dev.bo(2 * HUGE, HBM)
        dev.bind(vm, bo, VA, 2 * HUGE)
        dev.bind(vm, bo, VA + (1 << 40), PAGE)
        dev.close_bo(bo)
        assert dev.memory().hbm_used >= used + 2 * HUGE
        dev.unbind(vm, VA, 2 * HUGE)
        assert dev.memory().hbm_used >= used + 2 * HUGE
        dev.unbind(vm, VA + (1 << 40), PAGE)
        assert dev.memory().hbm_used < used + HUGE
        dev.call("vm_destroy", vm_id=vm)
        assert dev.memory().hbm_used == used


@case
def map_unmap_at_random() -> None:
    """Small and huge leaves side by side, checked by the device's own copies."""
    rng = random.Random(1)
    with Setup() as dev:
        used = dev.memory().hbm_used
        bo = dev.bo(4 * HUGE, HBM)
        base, mapped = VA + (1 << 34), {}
        with dev.map(bo) as view:
            for page in range(0, 4 * HUGE, PAGE):
                view[page : page + 4] = page.to_bytes(4, "little")
        for _ in range(150):
            if mapped and rng.random() < 0.45:
                va = rng.choice(list(mapped))
                dev.unbind(dev.vm_id, va, mapped.pop(va)[1])
                continue
            unit = rng.choice((PAGE, HUGE))
            va = base + rng.randrange(0, 8 * HUGE, unit)
            offset = rng.randrange(0, 4 * HUGE, unit)
            size = min(unit * rng.randint(1, 3), 4 * HUGE - offset)
            clash = any(va < v + s and v < va + size for v, (_, s) in mapped.items())
            try:
                dev.bind(dev.vm_id, bo, va, size, READ, offset)
                assert not clash
                mapped[va] = (offset, size)
            except OSError as error:
                assert clash and error.errno == errno.EEXIST, error
        assert mapped
        for va, (offset, size) in mapped.items():
            last = size - PAGE
            dev.finish_ok([raw.copy(dev.host_va, va, 4), raw.copy(dev.host_va + 4, va + last, 4)])
            got = [int.from_bytes(dev.host_map[i : i + 4], "little") for i in (0, 4)]
            assert got == [offset, offset + last], (va, offset, size, got)
        for va, (_, size) in mapped.items():
            dev.unbind(dev.vm_id, va, size)
        dev.close_bo(bo)
        assert dev.memory().hbm_used == used


# ---- Queues ----


@case
def queue_limits() -> None:
    with Device() as dev:
        total = dev.info().num_queues
        vm = dev.vm()
        queues = []
        with raises(errno.ENOSPC):
            for _ in range(total + 1):
                queues.append(dev.queue(vm))
        assert 4 <= len(queues) < total, len(queues)
        others = []
        try:
            with raises(errno.ENOSPC):
                for _ in range(total):
                    others.append(Device())
                    other_vm = others[-1].vm()
                    for _ in range(len(queues)):
                        others[-1].queue(other_vm)
        finally:
            for other in others:
                other.close()
        dev.call("queue_destroy", queue_id=queues.pop())
        queue = dev.queue(vm)
        assert dev.finish(queue, [raw.nop()]) == 1


@case
def queue_arguments() -> None:
    with Device() as dev:
        vm = dev.vm()
        with raises(errno.ENOENT):
            dev.queue(vm + 7)
        for change in ({"priority": 3}, {"flags": 2}, {"stall_ms": 600001}, {"timeout_ms": 600001}):
            with raises(errno.EINVAL):
                dev.call("queue_create", **{"vm_id": vm, **change})
        with raises(errno.ENOENT):
            dev.state(5)
        with raises(errno.ENOENT):
            dev.call("queue_destroy", queue_id=5)
        with raises(errno.EINVAL):
            dev.call("queue_destroy", queue_id=dev.queue(vm), pad=1)
        queue = dev.queue(vm, priority=2)
        assert dev.finish(queue, [raw.nop()]) == 1
    child = os.fork()
    if not child:
        os.setgroups([])
        # The node is root's here; what counts is the capability.
        dev = Device()
        os.setuid(65534)
        try:
            dev.queue(dev.vm(), priority=2)
        except OSError as error:
            os._exit(0 if error.errno == errno.EPERM else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "a high priority needs the capability"


# ---- Jobs ----


@case
def submit_nop() -> None:
    with Setup() as dev:
        for _ in range(10):
            dev.finish_ok([raw.nop()])
        state = dev.state(dev.queue_id)
        assert state.completed == 10 and state.status == raw.OK and state.fault_cause == 0


@case
def submit_copy_fill() -> None:
    with Setup() as dev:
        dev.host_map[:] = random.Random(2).randbytes(dev.size)
        dev.finish_ok([raw.copy(dev.hbm_va, dev.host_va, dev.size)])
        assert dev.hbm_map[:] == dev.host_map[:]
        dev.finish_ok(
            [
                raw.fill(dev.hbm_va + 64, 128, 0x01020304),
                raw.copy(dev.host_va, dev.hbm_va, dev.size),
                raw.timestamp(dev.host_va + PAGE),
                raw.signal(dev.host_va + PAGE + 8, 77),
                raw.wait(dev.host_va + PAGE + 8, 70),
            ]
        )
        assert dev.host_map[64:192] == b"\x04\x03\x02\x01" * 32
        assert int.from_bytes(dev.host_map[PAGE : PAGE + 8], "little") > 0
        assert int.from_bytes(dev.host_map[PAGE + 8 : PAGE + 16], "little") == 77


@case
def submit_run_halt() -> None:
    with Setup() as dev:
        dev.finish_ok([dev.run(raw.HALT)])


@case
def submit_many_in_order() -> None:
    """More jobs than the ring has entries; each leaves its number."""
    count, per_job = 300, 8
    with Setup() as dev:
        sync = dev.syncobj()
        for i in range(count):
            commands = [raw.nop()] * (per_job - 1) + [raw.fill(dev.host_va, 4, i)]
            last = [(sync, SYNC_SIGNAL, 0)] if i == count - 1 else []
            dev.submit(dev.queue_id, commands, last)
        dev.wait(sync, 30)
        assert int.from_bytes(dev.host_map[:4], "little") == count - 1
        assert dev.state(dev.queue_id).completed == count


@case
def submit_binary_dependency_between_queues() -> None:
    with Setup() as dev:
        other = dev.queue(dev.vm_id)
        first, second = dev.syncobj(), dev.syncobj()
        go = dev.hbm_va + PAGE
        dev.submit(
            dev.queue_id,
            [raw.wait(go, 1), raw.fill(dev.host_va, 4, 5)],
            [(first, SYNC_SIGNAL, 0)],
        )
        dev.submit(
            other,
            [raw.copy(dev.host_va + 8, dev.host_va, 4)],
            [(first, 0, 0), (second, SYNC_SIGNAL, 0)],
        )
        with raises(errno.ETIME):
            dev.wait(second, 0.05)
        dev.hbm_map[PAGE] = 1
        dev.wait(second)
        assert dev.host_map[8:12] == b"\5\0\0\0"


@case
def submit_timeline() -> None:
    with Setup() as dev:
        line = dev.syncobj()
        for point in (1, 2, 3):
            syncs = [(line, SYNC_SIGNAL | SYNC_TIMELINE, point)]
            if point > 1:
                syncs.append((line, SYNC_TIMELINE, point - 1))
            dev.submit(dev.queue_id, [raw.fill(dev.host_va, 4, point)], syncs)
        dev.wait_point(line, 3)
        assert dev.host_map[0] == 3
        with raises(errno.ETIME):
            dev.wait_point(line, 4, 0.02)
        dev.signal_point(line, 4)
        dev.wait_point(line, 4)
        dev.submit(dev.queue_id, [raw.nop()], [(line, SYNC_TIMELINE, 4)])


@case
def submit_arguments() -> None:
    with Setup() as dev:
        one = raw.words("IIQQQQQ", *raw.nop())
        good = {"queue_id": dev.queue_id, "cmds": raw.buffer_address(one), "num_cmds": 1}
        wrong = [
            ({"queue_id": 99}, errno.ENOENT),
            ({"flags": 2}, errno.EINVAL),
            ({"num_cmds": 0}, errno.EINVAL),
            ({"num_cmds": 65}, errno.EINVAL),
            ({"num_syncs": 65}, errno.EINVAL),
            ({"cmds": 0}, errno.EFAULT),
            ({"cmds": 1 << 63}, errno.EFAULT),
            ({"num_syncs": 1}, errno.EFAULT),
            ({"num_syncs": 1, "syncs": 1 << 62}, errno.EFAULT),
        ]
        for change, error in wrong:
            with raises(error):
                dev.call("submit", **{**good, **change})
        commands = [
            (0, 0, 0, 0, 0, 0, 0),
            (8, 0, 0, 0, 0, 0, 0),
            (0x101, 0, 0, 0, 0, 0, 0),
            (raw.NOP, 0, 1, 0, 0, 0, 0),
            (raw.NOP, 0, 0, 0, 0, 0, 1),
            (raw.RUN, 0, 0, 0, 0, 1 << 32, 0),
            (raw.RUN, 0, 0, 0, 0, 0, 1),
            (raw.COPY, 0, 0, 0, 0, 1, 0),
            (raw.FILL, 0, 0, 0, 1 << 32, 0, 0),
            (raw.FILL, 0, 0, 0, 0, 1, 0),
            (raw.WAIT, 0, 0, 0, 1, 0, 0),
            (raw.SIGNAL, 0, 0, 0, 1, 0, 0),
            (raw.TIMESTAMP, 0, 0, 1, 0, 0, 0),
        ]
        for command in commands:
            with raises(errno.EINVAL):
                dev.submit(dev.queue_id, [raw.nop(), command])
        sync = dev.syncobj()
        for item, error in [
            ((99, 0, 0), errno.ENOENT),
            ((99, SYNC_SIGNAL, 0), errno.ENOENT),
            ((99, SYNC_SIGNAL | SYNC_TIMELINE, 1), errno.ENOENT),
            ((sync, 4, 0), errno.EINVAL),
            ((sync, SYNC_SIGNAL, 1), errno.EINVAL),
            ((sync, 0, 1), errno.EINVAL),
            ((sync, SYNC_SIGNAL | SYNC_TIMELINE, 0), errno.EINVAL),
            ((sync, 0, 0), errno.EINVAL),  # has no fence yet
        ]:
            with raises(error):
                dev.submit(dev.queue_id, [raw.nop()], [(sync, SYNC_SIGNAL, 0), item])
        assert dev.state(dev.queue_id).completed == 0
        dev.finish_ok([raw.nop()])


@case
def bo_wait() -> None:
    with Setup() as dev:
        idle = dev.bo(PAGE)
        go = dev.hbm_va + PAGE
        dev.submit(dev.queue_id, [raw.wait(go, 1)])
        for handle in (dev.host, dev.hbm):
            with raises(errno.ETIMEDOUT):
                dev.call("bo_wait", handle=handle, timeout_ns=0)
            with raises(errno.ETIMEDOUT):
                dev.call("bo_wait", handle=handle, timeout_ns=raw.absolute(0.05))
        dev.call("bo_wait", handle=idle, timeout_ns=0)
        dev.hbm_map[PAGE] = 1
        dev.call("bo_wait", handle=dev.hbm, timeout_ns=raw.absolute(5))
        dev.call("bo_wait", handle=dev.hbm, timeout_ns=0)
        with raises(errno.EINVAL):
            dev.call("bo_wait", handle=dev.hbm, pad=1)
        with raises(errno.ENOENT):
            dev.call("bo_wait", handle=999)


# ---- Faults and hangs ----


@case
def page_fault() -> None:
    with Setup() as dev:
        lost = VA + (5 << 30)
        behind = dev.syncobj()
        sync = dev.syncobj()
        hold = dev.hbm_va + PAGE
        commands = [
            raw.nop(cookie=1),
            raw.wait(hold, 1, cookie=2),
            raw.copy(dev.hbm_va, lost, 64, cookie=0xABC),
        ]
        dev.submit(dev.queue_id, commands, [(sync, SYNC_SIGNAL, 0)])
        dev.submit(dev.queue_id, [raw.nop()], [(behind, SYNC_SIGNAL, 0)])
        dev.hbm_map[PAGE] = 1
        dev.wait(sync)
        assert dev.fence_error(sync) == -errno.EFAULT, dev.fence_error(sync)
        dev.wait(behind)
        assert dev.fence_error(behind) == -errno.ECANCELED, dev.fence_error(behind)
        state = dev.state(dev.queue_id)
        assert state.status == raw.FAULTED and state.fault_cause == raw.FAULT_UNMAPPED, state
        assert state.fault_addr == lost and state.fault_access == 1, state
        assert state.fault_cookie == 0xABC and state.fault_pc == 0xFFFFFFFF, state
        with raises(errno.EIO):
            dev.submit(dev.queue_id, [raw.nop()])
        other = dev.queue(dev.vm_id)
        assert dev.finish(other, [raw.nop()]) == 1
        dev.call("queue_destroy", queue_id=dev.queue_id)
        for _ in range(3):
            queue = dev.queue(dev.vm_id)
            assert dev.finish(queue, [raw.fill(dev.hbm_va, 4, 1)]) == 1
            dev.call("queue_destroy", queue_id=queue)


@case
def rights_are_enforced() -> None:
    with Setup() as dev:
        bo = dev.bo(PAGE, HBM)
        read_only, write_only = VA + (6 << 30), VA + (7 << 30)
        dev.bind(dev.vm_id, bo, read_only, PAGE, READ)
        dev.bind(dev.vm_id, bo, write_only, PAGE, WRITE)
        for command, access in [
            (raw.fill(read_only, 4, 1), 2),
            (raw.copy(dev.hbm_va, write_only, 4), 1),
            (raw.run(read_only, 64), 3),
        ]:
            queue = dev.queue(dev.vm_id)
            assert dev.finish(queue, [command]) == -errno.EFAULT
            state = dev.state(queue)
            assert state.fault_cause == raw.FAULT_PROTECTION and state.fault_access == access, state
            dev.call("queue_destroy", queue_id=queue)
        dev.finish_ok([raw.fill(write_only, 4, 9), raw.copy(dev.host_va, read_only, 4)])
        assert dev.host_map[0] == 9


@case
def trap_is_reported() -> None:
    with Setup() as dev:
        got = dev.finish(dev.queue_id, [dev.run(raw.trap(0x1234), cookie=7)])
        state = dev.state(dev.queue_id)
        assert got == -errno.EFAULT and state.fault_cause == raw.FAULT_TRAP, state
        assert state.fault_addr == 0x1234 and state.fault_pc == 0 and state.fault_cookie == 7, state


@case
def use_after_unmap_faults() -> None:
    with Setup() as dev:
        dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, 8)])
        dev.unbind(dev.vm_id, dev.hbm_va, dev.size)
        got = dev.finish(dev.queue_id, [raw.copy(dev.host_va, dev.hbm_va, 8)])
        assert got == -errno.EFAULT, got
        assert dev.state(dev.queue_id).fault_cause == raw.FAULT_UNMAPPED


@case
@expects(HANG)
def hang_is_ended_by_the_timeout() -> None:
    with Setup(timeout_ms=300) as dev:
        before = dev.resets()
        innocent = dev.queue(dev.vm_id, 300)
        hung, behind, other = dev.syncobj(), dev.syncobj(), dev.syncobj()
        start = time.monotonic()
        dev.submit(dev.queue_id, [dev.run(raw.LOOP, cookie=3)], [(hung, SYNC_SIGNAL, 0)])
        dev.submit(dev.queue_id, [raw.nop()], [(behind, SYNC_SIGNAL, 0)])
        time.sleep(0.05)
        dev.submit(innocent, [raw.fill(dev.host_va, 4, 6)], [(other, SYNC_SIGNAL, 0)])
        dev.wait(hung)
        took = time.monotonic() - start
        assert took > 0.25, took
        assert dev.fence_error(hung) == -errno.ETIMEDOUT, dev.fence_error(hung)
        dev.wait(behind)
        assert dev.fence_error(behind) == -errno.ECANCELED
        dev.wait(other)
        assert dev.fence_error(other) == 1 and dev.host_map[0] == 6
        assert dev.state(dev.queue_id).status == raw.HUNG
        with raises(errno.EIO):
            dev.submit(dev.queue_id, [raw.nop()])
        assert dev.finish(innocent, [raw.nop()]) == 1
        after = dev.resets()
        assert after.queue_resets == before.queue_resets + 1, (before, after)
        assert after.device_resets == before.device_resets


@case
@expects(HANG)
def wait_without_end_is_a_hang() -> None:
    with Setup(timeout_ms=300) as dev:
        assert dev.finish(dev.queue_id, [raw.wait(dev.hbm_va, 1)]) == -errno.ETIMEDOUT
        assert dev.state(dev.queue_id).status == raw.HUNG


@case
@expects(HANG)
def long_job_of_another_queue_is_no_hang() -> None:
    """A job with a short limit, behind a program of a queue with a long one."""
    with Setup(timeout_ms=200) as dev:
        long_queue = dev.queue(dev.vm_id, 1500)
        hung, late = dev.syncobj(), dev.syncobj()
        dev.submit(long_queue, [dev.run(raw.LOOP)], [(hung, SYNC_SIGNAL, 0)])
        time.sleep(0.05)
        dev.submit(dev.queue_id, [raw.nop()], [(late, SYNC_SIGNAL, 0)])
        dev.wait(late)
        assert dev.fence_error(late) == 1
        assert dev.state(dev.queue_id).status == raw.OK
        dev.wait(hung)
        assert dev.state(long_queue).status == raw.HUNG


@case
@expects(HANG)
def a_turn_that_comes_late_is_no_hang() -> None:
    """A job gets its own time though another queue used up its limit."""
    with Setup(timeout_ms=5000) as dev:
        start = time.monotonic()
        count = 20000
        dev.finish_ok([dev.run(counting(count))])
        count = min(int(count * 0.25 / (time.monotonic() - start)), 1 << 31)
        dev.unbind(dev.vm_id, dev.code_va, PAGE)
        late_queue, hung, late = dev.queue(dev.vm_id, 400), dev.syncobj(), dev.syncobj()
        first = dev.queue(dev.vm_id, 300)
        code = raw.LOOP + counting(count, at=1)
        dev.program(code)
        dev.submit(first, [raw.run(dev.code_va, len(code))], [(hung, SYNC_SIGNAL, 0)])
        time.sleep(0.02)
        job = raw.run(dev.code_va, len(code), entry=64)
        dev.submit(late_queue, [job], [(late, SYNC_SIGNAL, 0)])
        dev.wait(late)
        assert dev.fence_error(late) == 1, dev.state(late_queue)
        dev.wait(hung)


@case
@expects(HANG, HELD_UP)
def a_long_instruction_holds_up_no_other_process() -> None:
    """Nor does it cost them their jobs, when its own process gives memory back."""
    with Setup(timeout_ms=30000, size=2 * HUGE) as dev, Setup() as other:
        before = dev.resets().device_resets
        sync = dev.syncobj()
        dev.submit(dev.queue_id, [dev.run(long_matmul(dev.hbm_va))], [(sync, SYNC_SIGNAL, 0)])
        time.sleep(0.2)
        other.unbind(other.vm_id, other.hbm_va, other.size)
        with raises(errno.ETIME):
            dev.wait(sync, 0)
        dev.unbind(dev.vm_id, dev.host_va, dev.size)
        dev.wait(sync)
        assert dev.fence_error(sync) == -errno.ETIMEDOUT
        assert dev.state(dev.queue_id).status == raw.HUNG
        other.finish_ok([raw.nop()])
        assert dev.resets().device_resets == before


# ---- Isolation and life ----


@case
def address_spaces_are_separate() -> None:
    with Setup() as one, Setup() as two:
        one.host_map[:8], two.host_map[:8] = b"first 1.", b"second 2"
        one.finish_ok([raw.copy(one.hbm_va, one.host_va, 8)])
        two.finish_ok([raw.copy(two.hbm_va, two.host_va, 8)])
        assert one.hbm_map[:8] == b"first 1." and two.hbm_map[:8] == b"second 2"
        only_one = VA + (9 << 30)
        one.bind(one.vm_id, one.hbm, only_one, PAGE)
        one.finish_ok([raw.copy(one.host_va + 16, only_one, 8)])
        got = two.finish(two.queue_id, [raw.copy(two.host_va, only_one, 8)])
        assert got == -errno.EFAULT and two.state(two.queue_id).fault_addr == only_one
        with raises(errno.ENOENT):
            two.call("bo_info", handle=77)


@case
def mmap_of_another_files_buffer_is_refused() -> None:
    with Device() as one, Device() as two:
        offset = one.call("bo_info", handle=one.bo(PAGE, HBM)).mmap_offset
        with raises(errno.EACCES, errno.EINVAL):
            mmap.mmap(two.fd, PAGE, offset=offset)


def child_of(work: Callable[[], None]) -> tuple[int, int]:
    """A process that does some work, says so, and waits to be killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
            os.write(writer, b"k")
            time.sleep(60)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writer)
    return child, reader


@case
def kill_in_a_job_leaks_nothing() -> None:
    with Device() as dev:
        used = dev.memory().hbm_used
        resets = dev.resets()
        queues = dev.info().num_queues

        def work() -> None:
            mine = Setup(timeout_ms=30000, size=2 * HUGE)
            mine.submit(mine.queue_id, [mine.run(raw.LOOP)])
            for _ in range(20):
                mine.submit(mine.queue_id, [raw.nop()])
            other = mine.queue(mine.vm_id)
            mine.submit(other, [raw.wait(mine.hbm_va, 1)])
            sync = mine.syncobj()
            line = mine.syncobj()
            mine.submit(mine.queue_id, [raw.nop()], [(sync, SYNC_SIGNAL, 0)])
            mine.submit(other, [raw.nop()], [(sync, 0, 0), (line, SYNC_SIGNAL | SYNC_TIMELINE, 3)])

        for _ in range(queues // 4):
            child, pipe = child_of(work)
            assert os.read(pipe, 1) == b"k"
            os.close(pipe)
            start = time.monotonic()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert time.monotonic() - start < 3
        until(lambda: dev.memory().hbm_used == used, 5, "HBM is back")
        assert dev.resets().device_resets == resets.device_resets
        with Setup() as after:
            after.finish_ok([raw.fill(after.hbm_va, 64, 1)])
    until(module_is_idle, 5, "nothing holds the module")


@case
def close_with_jobs_that_wait_for_another_process() -> None:
    """They are cancelled; their memory is back at once."""
    with Setup() as dev:
        gate = dev.syncobj()
        fd = dev.call("syncobj_handle_to_fd", handle=gate).fd
        used = dev.memory().hbm_used
        hold = dev.hbm_va + PAGE
        dev.submit(dev.queue_id, [raw.wait(hold, 1)], [(gate, SYNC_SIGNAL, 0)])
        other = Setup()
        imported = other.call("syncobj_fd_to_handle", fd=fd).handle
        other.submit(other.queue_id, [raw.nop()], [(imported, 0, 0)])
        other.close()
        with raises(errno.ETIME):
            dev.wait(gate, 0)
        until(lambda: dev.memory().hbm_used == used, 2, "HBM is back")
        dev.hbm_map[PAGE] = 1
        dev.wait(gate)
        os.close(fd)


@case
def queue_destroy_cancels() -> None:
    with Setup(timeout_ms=30000) as dev:
        first, second = dev.syncobj(), dev.syncobj()
        dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(first, SYNC_SIGNAL, 0)])
        dev.submit(dev.queue_id, [raw.nop()], [(second, SYNC_SIGNAL, 0)])
        dev.call("queue_destroy", queue_id=dev.queue_id)
        dev.wait(first)
        dev.wait(second)
        assert dev.fence_error(first) == -errno.ECANCELED
        # The scheduler's own error when the job had not reached the ring yet.
        assert dev.fence_error(second) in (-errno.ECANCELED, -errno.ESRCH)
        queue = dev.queue(dev.vm_id)
        assert dev.finish(queue, [raw.nop()]) == 1


@case
def storm() -> None:
    """Threads that submit, destroy, create and wait at once."""
    stop = time.monotonic() + 3
    problems: list[str] = []
    with Setup() as dev:

        def submitter() -> None:
            queue = dev.queue(dev.vm_id)
            while time.monotonic() < stop:
                if dev.finish(queue, [raw.nop(), raw.fill(dev.host_va, 4, 1)]) != 1:
                    problems.append("a job failed")

        def churner() -> None:
            while time.monotonic() < stop:
                vm = dev.vm()
                queue = dev.queue(vm)
                bo = dev.bo(PAGE, HBM)
                dev.bind(vm, bo, VA, PAGE)
                for _ in range(5):
                    dev.submit(queue, [raw.fill(VA, 8, 2), raw.nop()])
                dev.call("queue_destroy", queue_id=queue)
                dev.close_bo(bo)
                dev.call("vm_destroy", vm_id=vm)

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException:
                problems.append(traceback.format_exc())

        threads = [
            threading.Thread(target=guarded, args=(w,))
            for w in (submitter, submitter, churner, churner)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, problems[0]


# ---- Arguments of every ioctl ----


@case
def padding_must_be_zero() -> None:
    with Setup() as dev:
        wrong = [
            ("bo_create", {"size": PAGE, "flags": 2}),
            ("bo_create", {"size": 0}),
            ("bo_create", {"size": 1 << 63}),
            ("bo_create", {"size": (1 << 64) - 1}),
            ("bo_wait", {"handle": dev.host, "pad": 1}),
            ("vm_create", {"flags": 1}),
            ("vm_destroy", {"vm_id": dev.vm_id, "pad": 1}),
            ("dev_query", {"query": 99}),
        ]
        for name, values in wrong:
            with raises(errno.EINVAL):
                dev.call(name, **values)
        for name, values in [
            ("bo_info", {}),
            ("bo_wait", {}),
            ("vm_destroy", {}),
            ("queue_destroy", {}),
            ("queue_state", {}),
            ("queue_create", {}),
        ]:
            with raises(errno.ENOENT):
                dev.call(name, **values)
        with raises(errno.ENOMEM):
            dev.bo(1 << 46)
        with raises(errno.EFAULT):
            dev.call("dev_query", query=0, size=48, data=1 << 62)


@case
def arguments_across_an_unmapped_page() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    area = mmap.mmap(-1, 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert libc.mprotect(start + PAGE, PAGE, 0) == 0
    with Device() as dev:
        for name in raw.IOCTLS:
            for place in (start + PAGE, start + PAGE - 4, 0, 8):
                got = libc.ioctl(dev.fd, raw.ioctl_code(name), place)
                assert got == -1 and ctypes.get_errno() == errno.EFAULT, (name, place - start)
        for number in (0x4F, 0x5F, 0x9F):
            got = libc.ioctl(dev.fd, raw._code(3, ord("d"), number, 16), start)
            assert got == -1 and ctypes.get_errno() == errno.EINVAL, number
        # A caller whose structures are shorter or longer than the driver's.
        for size in (4, 8, 64):
            got = libc.ioctl(dev.fd, raw._code(3, ord("d"), 0x44, size), start)
            assert got in (0, -1)


# ---- The device comes and goes ----


def pci_device() -> str:
    """The one that the other cases use."""
    node = os.path.basename(raw.node())
    return os.path.basename(os.path.realpath(f"/sys/class/accel/{node}/device"))


def module_is_idle() -> bool:
    return Path("/sys/module/vtpu/refcnt").read_text().strip() == "0"


@case
def unload_and_reload() -> None:
    dev = Device()
    assert subprocess.run(["rmmod", "vtpu"], capture_output=True, check=False).returncode != 0
    dev.close()
    until(module_is_idle, 5, "nothing holds the module")
    for _ in range(2):
        subprocess.run(["rmmod", "vtpu"], check=True)
        assert not glob.glob(raw.DEVICES)
        subprocess.run(["insmod", MODULE], check=True)
        until(lambda: bool(glob.glob(raw.DEVICES)), 5, "the node is back")
        with Setup() as dev:
            dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])


@case
def unbind_under_load() -> None:
    name = pci_device()
    dev = Setup(timeout_ms=30000)
    sync, behind = dev.syncobj(), dev.syncobj()
    dev.hbm_map[0] = 5
    dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, SYNC_SIGNAL, 0)])
    dev.submit(dev.queue_id, [raw.nop()], [(behind, SYNC_SIGNAL, 0)])
    fd = dev.call("syncobj_handle_to_fd", handle=sync, flags=1).fd
    Path(DRIVER, "unbind").write_text(name)
    try:
        # The fence is signalled, the mapping does not kill, the file says ENODEV.
        assert raw.sync_file_state(fd) == -errno.ENODEV
        assert dev.hbm_map[0] in (0, 5)
        dev.hbm_map[1] = 7
        with raises(errno.ENODEV):
            dev.vm()
        dev.close()
        os.close(fd)
    finally:
        Path(DRIVER, "bind").write_text(name)
    with Setup() as dev:
        dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])


GONE = {errno.ENODEV, errno.ENOENT, errno.EIO, errno.ENXIO}


def disturbed(
    uses: Sequence[Callable[[], None]],
    disturb: Callable[[], None],
    excuses: Collection[int] = GONE,
) -> None:
    """Threads use the device again and again, each in its way, until disturb() is done.

    A use that ends with one of these errors, as when the device is not there, begins anew.
    """
    stop = threading.Event()
    problems: list[str] = []

    def user(use: Callable[[], None]) -> None:
        while not stop.is_set():
            try:
                use()
            except OSError as error:
                if error.errno not in excuses:
                    problems.append(traceback.format_exc())
                # Who tries again and again takes the processor from what disturbs.
                stop.wait(0.01)
            except BaseException:
                problems.append(traceback.format_exc())

    users = [threading.Thread(target=user, args=(use,)) for use in uses]
    for thread in users:
        thread.start()
    try:
        disturb()
    finally:
        stop.set()
        for thread in users:
            thread.join()
    assert not problems, problems[0]


def rebinding_amid(use: Callable[[], None], threads: int, times: int) -> None:
    """Threads use the device again and again, while it goes and comes so many times.

    Fewer times on a slow kernel, where each is more work for all.
    """
    name = pci_device()

    def rebind() -> None:
        for _ in range(max(2, times // raw.PATIENCE)):
            time.sleep(0.15)
            Path(DRIVER, "unbind").write_text(name)
            time.sleep(0.05)
            Path(DRIVER, "bind").write_text(name)

    try:
        disturbed([use] * threads, rebind)
    finally:
        # Once more with every file closed, so that the node has its first number.
        try:
            until(module_is_idle, 5, "nothing holds the module")
        finally:
            if Path(DRIVER, name).exists():
                Path(DRIVER, "unbind").write_text(name)
            Path(DRIVER, "bind").write_text(name)


@case
def unbind_and_bind_amid_a_storm() -> None:
    """Files open and close, map and submit, while the device goes and comes."""

    def use() -> None:
        with Setup() as dev:
            dev.hbm_map[0] = 1
            for _ in range(5):
                dev.finish(dev.queue_id, [raw.fill(dev.hbm_va, 8, 1)])

    rebinding_amid(use, threads=4, times=8)
    with Setup() as dev:
        dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])


@case
@expects(resets=True)
def function_reset_under_load() -> None:
    path = Path(f"/sys/bus/pci/devices/{pci_device()}/reset")
    assert path.exists(), "the device offers no reset"
    with Setup(timeout_ms=30000) as dev:
        idle = dev.queue(dev.vm_id)
        assert dev.finish(idle, [raw.nop()]) == 1
        dev.hbm_map[:8] = b"survives"
        before = dev.resets()
        sync = dev.syncobj()
        dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, SYNC_SIGNAL, 0)])
        time.sleep(0.05)
        path.write_text("1")
        dev.wait(sync)
        assert dev.fence_error(sync) == -errno.ENODEV, dev.fence_error(sync)
        assert dev.state(dev.queue_id).status == raw.LOST
        with raises(errno.EIO):
            dev.submit(dev.queue_id, [raw.nop()])
        # What had nothing in flight goes on, in the same address space.
        assert dev.state(idle).status == raw.OK
        assert dev.finish(idle, [raw.copy(dev.host_va, dev.hbm_va, 8)]) == 1
        assert dev.host_map[:8] == b"survives"
        assert dev.resets().device_resets == before.device_resets + 1


@case
@expects(resets=True)
def function_reset_amid_allocations() -> None:
    """While the BARs are away nothing is lost that goes through them."""
    path = Path(f"/sys/bus/pci/devices/{pci_device()}/reset")
    size, pattern = 16 * PAGE, b"\xa5" * 16 * PAGE
    stop = threading.Event()
    problems: list[str] = []

    def user(dev: Device) -> None:
        """What it gets is zero, what it writes stays, what it unmaps is unmapped."""
        try:
            vm = dev.vm()
            while not stop.is_set():
                handle = dev.bo(size, HBM)
                dev.bind(vm, handle, VA, size)
                with dev.map(handle) as view:
                    assert view[:] == bytes(size), "not zero"
                    view[:] = pattern
                    assert view[:] == pattern, "not kept"
                dev.unbind(vm, VA, size)
                dev.close_bo(handle)
        except BaseException:
            problems.append(traceback.format_exc())

    with Device() as one, Device() as two, Setup() as dev:
        threads = [threading.Thread(target=user, args=(d,)) for d in (one, two)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            path.write_text("1")
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join()
        assert not problems, problems[0]
        dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])


@case
def suspend_and_resume() -> None:
    """Down to the devices and back; what was idle goes on."""
    Path("/sys/power/pm_test").write_text("devices")
    Path("/sys/module/suspend/parameters/pm_test_delay").write_text("1")
    with Setup() as dev:
        dev.finish_ok([raw.nop()])
        dev.hbm_map[:8] = b"survives"
        Path("/sys/power/state").write_text("freeze")
        dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, 8)])
        assert dev.host_map[:8] == b"survives"


# ---- Runner ----


def run_case(name: str, work: Callable[[], None], watch: Watch | None) -> dict[str, object]:
    error = ""
    start = time.monotonic()

    def out_of_time(_number: int, _frame: object) -> None:
        raise AssertionError(f"not finished in {CASE_SECONDS} s")

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(CASE_SECONDS)
    try:
        work()
    except BaseException:
        error = traceback.format_exc()
    signal.alarm(0)
    if watch:
        error += "\n".join(watch.problems(getattr(work, "expected", Expected())))
    return {"case": name, "ok": not error, "error": error, "seconds": time.monotonic() - start}


def main(names: list[str], table: dict[str, Callable[[], None]] = CASES) -> int:
    faulthandler.enable()
    # Who runs several of these at once watches over all of them.
    watch = None if "VTPU_NODE" in os.environ else Watch()
    failed = 0
    for name in names or [name for name in table if name not in ALONE]:
        print(json.dumps({"case": name, "started": True}), flush=True)
        result = run_case(name, table[name], watch)
        failed += not result["ok"]
        print(json.dumps(result), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
