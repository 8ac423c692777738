# SPDX-License-Identifier: MIT
"""Files: apart from each other, at once, with bad arguments. Runs in the guest as root."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import vtpu_raw as raw
from cases import VA, Setup, child_of, collector, main, module_is_idle, pci_device, until
from vtpu_raw import HBM, HUGE, PAGE, SYNC_SIGNAL, SYNC_TIMELINE, Device, raises

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)


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


class AtTheEnd:
    """Memory that ends where nothing is mapped."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
        self.libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._area = mmap.mmap(-1, 2 * PAGE)
        self.end = ctypes.addressof(ctypes.c_char.from_buffer(self._area)) + PAGE
        assert self.libc.mprotect(self.end, PAGE, 0) == 0

    def put(self, data: bytes) -> int:
        """Where it is, so that it ends there."""
        ctypes.memmove(self.end - len(data), data, len(data))
        return self.end - len(data)

    def ioctl(self, dev: Device, code: int, at: int) -> int:
        """0 or the error."""
        return ctypes.get_errno() if self.libc.ioctl(dev.fd, code, at) else 0


@case
def arguments_across_an_unmapped_page() -> None:
    memory = AtTheEnd()
    with Device() as dev:
        for name in raw.IOCTLS:
            for place in (memory.end, memory.end - 4, 0, 8):
                assert memory.ioctl(dev, raw.ioctl_code(name), place) == errno.EFAULT, (name, place)
        used = {number for _, number, *_ in raw.IOCTLS.values()}
        zeros = memory.put(bytes(64))
        for number in {*range(0x40, 0xA0)} - used:
            got = memory.ioctl(dev, raw._code(3, ord("d"), number, 16), zeros)
            assert got == errno.EINVAL, number


@case
def structures_of_another_size() -> None:
    """A caller that was compiled against an older header, or a newer one."""
    memory = AtTheEnd()
    with Device() as dev:

        def call(name: str, size: int, data: bytes) -> bytes:
            at = memory.put(data)
            assert memory.ioctl(dev, raw._code(3, ord("d"), raw.IOCTLS[name][1], size), at) == 0
            return ctypes.string_at(at, len(data))

        # Nothing is written behind what the caller has.
        assert call("vm_create", 4, bytes(4) + b"\xff" * 4)[4:] == b"\xff" * 4
        vm = int.from_bytes(call("vm_create", 64, bytes(64))[4:8], "little")
        # Before there was stall_ms, the time limit was all.
        call("queue_create", 20, struct.pack("<5I", vm, 1, 0, 700, 0))
        queues = Path("/sys/kernel/debug/accel", pci_device(), "queues").read_text()
        assert "timeout 700 ms, stall 700 ms" in queues, queues


@case
def arrays_that_end_at_an_unmapped_page() -> None:
    """What is there is enough; one element more is EFAULT, and nothing was done."""
    memory = AtTheEnd()
    with Setup() as dev:
        command, sync = "IIQQQQQ", "IIQ"
        one = raw.words(command, *raw.nop())
        done = dev.syncobj()
        ends = struct.pack("<" + sync, done, SYNC_SIGNAL, 0)
        job = {"queue_id": dev.queue_id, "cmds": raw.buffer_address(one), "num_cmds": 1}
        read = {"queue_id": dev.queue_id}
        arrays = [
            ("submit", job, "cmds", "num_cmds", bytes(one)),
            ("submit", job, "syncs", "num_syncs", ends),
            ("perfmon", read, "counters", "num_counters", struct.pack("<IIQ", 1, 0, 0)),
        ]
        for name, values, array, count, element in arrays:
            at = memory.put(element)
            dev.call(name, **{**values, array: at, count: 1})
            with raises(errno.EFAULT):
                dev.call(name, **{**values, array: at, count: 2})
            with raises(errno.EFAULT):
                dev.call(name, **{**values, array: memory.end, count: 1})
            with raises(errno.EFAULT):
                dev.call(name, **{**values, array: 1 << 62, count: 1})
        dev.wait(done)
        dev.finish_ok([raw.nop()])
        assert dev.state(dev.queue_id).completed == 3
        # An answer that has no room, and one that has just enough.
        info = struct.calcsize("<IIQIIIIQQ")
        dev.call("dev_query", query=0, size=info, data=memory.put(bytes(info)))
        with raises(errno.EFAULT):
            dev.call("dev_query", query=0, size=info, data=memory.end - info + 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
