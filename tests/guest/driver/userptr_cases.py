# SPDX-License-Identifier: MIT
"""A process's own memory as a buffer. Runs in the guest as root."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import vtpu_raw as raw
from cases import (
    DRIVER,
    VA,
    Setup,
    child_of,
    collector,
    main,
    pci_device,
)
from vtpu_raw import HUGE, PAGE, READ, USERPTR_READ_ONLY, WRITE, Device, raises

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
USER = 4711
AREA = VA + (16 << 30)  # where these buffers are bound
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Memory:
    """Anonymous memory of a process, whose address is known."""

    def __init__(self, size: int, shared: bool = False) -> None:
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        self.view = mmap.mmap(-1, size, kind | mmap.MAP_ANONYMOUS)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.size = size

    def protect(self, rights: int, offset: int = 0, size: int = 0) -> None:
        assert libc.mprotect(self.addr + offset, size or self.size, rights) == 0


def pinned() -> int:
    """Bytes of this process that are pinned."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmPin:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmPin")


def as_user(
    work: Callable[[], None], uid: int | None = USER, lock_pages: int | None = None
) -> None:
    """In a process of that user, without capabilities; None: root's."""
    os.chmod(raw.node(), 0o666)
    child = os.fork()
    if not child:
        code = 1
        try:
            if lock_pages is not None:
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (lock_pages * PAGE,) * 2)
            if uid is not None:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            work()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "the child says why"


@case
def device_and_process_see_the_same_bytes() -> None:
    with Setup(size=2 * HUGE) as dev:
        for memory in (Memory(2 * HUGE), Memory(2 * HUGE, shared=True)):
            before = pinned()
            memory.view[:] = random.Random(3).randbytes(memory.size)
            bo = dev.userptr(memory.addr, memory.size)
            assert pinned() == before + memory.size
            info = dev.call("bo_info", handle=bo)
            assert (info.size, info.flags, info.mmap_offset) == (memory.size, 0, 0), info
            dev.bind(dev.vm_id, bo, AREA, memory.size)
            dev.finish_ok([raw.copy(dev.hbm_va, AREA, memory.size)])
            assert dev.hbm_map[:] == memory.view[:]
            dev.finish_ok([raw.fill(AREA + PAGE - 8, 16, 0x01020304)])
            assert memory.view[PAGE - 8 : PAGE + 8] == b"\4\3\2\1" * 4
            memory.view[:8] = b"later on"
            dev.finish_ok([raw.copy(dev.host_va, AREA, 8)])
            assert dev.host_map[:8] == b"later on"
            dev.unbind(dev.vm_id, AREA, memory.size)
            dev.close_bo(bo)
            assert pinned() == before


@case
def a_part_of_the_pages() -> None:
    """Any page of the memory may begin the buffer, any of the buffer's a mapping."""
    with Setup() as dev:
        memory = Memory(HUGE + 8 * PAGE)
        for page in range(memory.size // PAGE):
            memory.view[page * PAGE : page * PAGE + 4] = page.to_bytes(4, "little")
        bo = dev.userptr(memory.addr + 3 * PAGE, HUGE + 2 * PAGE)
        dev.bind(dev.vm_id, bo, AREA, HUGE - PAGE, READ, offset=2 * PAGE)
        for page in (0, 1, 300, HUGE // PAGE - 2):
            dev.finish_ok([raw.copy(dev.host_va, AREA + page * PAGE, 4)])
            assert int.from_bytes(dev.host_map[:4], "little") == page + 5
        lost = raw.copy(dev.host_va, AREA + HUGE - PAGE, 4)
        assert dev.finish(dev.queue_id, [lost]) == -errno.EFAULT
        with raises(errno.EINVAL):
            dev.bind(dev.vm_id, bo, AREA + (1 << 30), HUGE + 3 * PAGE, READ)


@case
def memory_to_read_only() -> None:
    with Setup() as dev:
        memory = Memory(2 * PAGE)
        memory.view[:8] = b"constant"
        memory.protect(mmap.PROT_READ)
        with raises(errno.EFAULT):
            dev.userptr(memory.addr, memory.size)
        bo = dev.userptr(memory.addr, memory.size, USERPTR_READ_ONLY)
        for rights in (WRITE, READ | WRITE):
            with raises(errno.EACCES):
                dev.bind(dev.vm_id, bo, AREA, memory.size, rights)
        dev.bind(dev.vm_id, bo, AREA, memory.size, READ)
        dev.finish_ok([raw.copy(dev.host_va, AREA, 8)])
        assert dev.host_map[:8] == b"constant"
        assert dev.finish(dev.queue_id, [raw.fill(AREA, 4, 1)]) == -errno.EFAULT
        assert dev.state(dev.queue_id).fault_cause == raw.FAULT_PROTECTION
        assert memory.view[:8] == b"constant"


@case
def what_cannot_be_pinned_is_refused() -> None:
    with Setup() as dev:
        memory, before = Memory(8 * PAGE), pinned()
        good = {"addr": memory.addr, "size": memory.size}
        wrong = [
            ({"flags": 2}, errno.EINVAL),
            ({"size": 0}, errno.EINVAL),
            ({"size": PAGE + 8}, errno.EINVAL),
            ({"addr": memory.addr + 8}, errno.EINVAL),
            ({"size": (1 << 64) - PAGE}, errno.EINVAL),
            ({"addr": (1 << 64) - PAGE, "size": 2 * PAGE}, errno.EINVAL),
            ({"addr": 0xFFFF_8880_0000_0000}, errno.EFAULT),
            ({"addr": 1 << 47, "size": PAGE}, errno.EFAULT),
            ({"addr": 0, "size": PAGE}, errno.EFAULT),
            ({"addr": PAGE, "size": 1 << 46}, errno.ENOMEM),
        ]
        for change, error in wrong:
            with raises(error):
                dev.call("bo_userptr", **{**good, **change})
        # The end is not there; neither is the middle.
        assert libc.munmap(memory.addr + 7 * PAGE, PAGE) == 0
        with raises(errno.EFAULT):
            dev.userptr(memory.addr, memory.size)
        memory.protect(0, 2 * PAGE, PAGE)
        with raises(errno.EFAULT):
            dev.userptr(memory.addr, 4 * PAGE)
        # Memory of a device is no memory of the process.
        view = ctypes.addressof(ctypes.c_char.from_buffer(dev.hbm_map))
        with raises(errno.EFAULT):
            dev.userptr(view, PAGE)
        assert pinned() == before
        assert dev.userptr(memory.addr, 2 * PAGE) and pinned() == before + 2 * PAGE


@case
def it_is_neither_mapped_nor_exported() -> None:
    with Device() as dev:
        memory = Memory(PAGE)
        bo = dev.userptr(memory.addr, PAGE)
        assert dev.call("bo_info", handle=bo).mmap_offset == 0
        with raises(errno.EPERM):
            dev.call("prime_handle_to_fd", handle=bo, flags=os.O_CLOEXEC)


@case
def a_user_pins_what_rlimit_memlock_allows() -> None:
    """Whatever the number of files and processes; freed memory counts no more."""

    def child(share: int) -> None:
        with Device() as dev, Device() as other:
            memory = Memory(17 * PAGE)
            with raises(errno.ENOMEM):
                dev.userptr(memory.addr, (share + 1) * PAGE)
            bo = dev.userptr(memory.addr, share * PAGE)
            for device in (dev, other):
                with raises(errno.ENOMEM):
                    device.userptr(memory.addr, PAGE)
            dev.close_bo(bo)
            other.userptr(memory.addr, share * PAGE)

    def work() -> None:
        child(16)
        with Device() as dev:
            memory = Memory(10 * PAGE)
            dev.userptr(memory.addr, 10 * PAGE)
            pid = os.fork()
            if not pid:
                try:
                    child(6)
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
        child(16)

    as_user(work, lock_pages=16)
    as_user(lambda: child(3), lock_pages=3)


@case
def a_capability_lifts_the_limit() -> None:
    memory = Memory(64 * PAGE)
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    try:
        with Device() as dev:
            dev.userptr(memory.addr, memory.size)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


@case
def fork_leaves_the_pages_to_the_parent() -> None:
    with Setup() as dev:
        memory = Memory(PAGE)
        memory.view[:6] = b"before"
        dev.bind(dev.vm_id, dev.userptr(memory.addr, PAGE), AREA, PAGE)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(writer)
            os.read(reader, 1)  # until the parent has written
            same = memory.view[:6] == b"before"
            memory.view[:6] = b"child."
            os._exit(not same)
        os.close(reader)
        memory.view[:6] = b"parent"
        os.close(writer)
        assert os.waitpid(child, 0)[1] == 0, "the child sees what was there at the fork"
        dev.finish_ok([raw.copy(dev.host_va, AREA, 6), raw.fill(AREA + 8, 4, 0x21212121)])
        assert dev.host_map[:6] == b"parent"
        assert memory.view[:12] == b"parent\0\0!!!!", memory.view[:12]


@case
def the_buffer_keeps_the_pages_not_the_addresses() -> None:
    with Setup() as dev:
        before = pinned()
        memory = Memory(4 * PAGE)
        memory.view[:] = b"x" * memory.size
        bo = dev.userptr(memory.addr, memory.size)
        dev.bind(dev.vm_id, bo, AREA, memory.size)
        memory.view.madvise(mmap.MADV_DONTNEED, 0, PAGE)
        assert memory.view[:4] == bytes(4)
        assert libc.munmap(memory.addr + PAGE, PAGE) == 0
        dev.finish_ok([raw.fill(AREA, 2 * PAGE, 0x79797979), raw.copy(dev.host_va, AREA, 4 * PAGE)])
        assert dev.host_map[: 2 * PAGE] == b"y" * 2 * PAGE
        assert dev.host_map[2 * PAGE : 4 * PAGE] == b"x" * 2 * PAGE
        assert memory.view[:4] == bytes(4), "the new page is not the device's"
        # Neither a closed handle nor a gone address frees what is mapped.
        dev.close_bo(bo)
        assert pinned() == before + memory.size
        dev.finish_ok([raw.copy(dev.host_va, AREA + PAGE, 4)])
        dev.unbind(dev.vm_id, AREA, memory.size)
        assert pinned() == before


@case
def a_killed_process_gives_its_pages_back() -> None:
    """While the device works on them; the next of the user may pin as much again."""

    def work() -> None:
        os.setsid()
        dev = Setup(timeout_ms=30000)
        memory = Memory(12 * PAGE)
        dev.bind(dev.vm_id, dev.userptr(memory.addr, memory.size), AREA, memory.size)
        dev.submit(dev.queue_id, [dev.run(raw.LOOP), raw.fill(AREA, PAGE, 1)])

    def user() -> None:
        for _ in range(3):
            child, pipe = child_of(work)
            assert os.read(pipe, 1) == b"k"
            os.close(pipe)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    as_user(user, lock_pages=16)


@case
def it_goes_with_the_device() -> None:
    """Unplugged, the file still open: nothing stays pinned, and closing is in order."""
    name = pci_device()
    before = pinned()
    dev = Setup()
    memory = Memory(HUGE)
    dev.bind(dev.vm_id, dev.userptr(memory.addr, HUGE), AREA, HUGE)
    idle = dev.userptr(memory.addr, PAGE)
    sync = dev.syncobj()
    dev.submit(
        dev.queue_id,
        [raw.wait(dev.hbm_va, 1), raw.fill(AREA, HUGE, 7)],
        [(sync, raw.SYNC_SIGNAL, 0)],
    )
    assert pinned() == before + HUGE + PAGE
    Path(DRIVER, "unbind").write_text(name)
    try:
        assert pinned() == before
        memory.view[:] = b"z" * HUGE
        with raises(errno.ENODEV):
            dev.userptr(memory.addr, PAGE)
        with raises(errno.ENODEV):
            dev.close_bo(idle)
        dev.close()
        assert memory.view[:] == b"z" * HUGE
    finally:
        Path(DRIVER, "bind").write_text(name)
    assert pinned() == before
    with Setup() as dev:
        dev.bind(dev.vm_id, dev.userptr(memory.addr, HUGE), AREA, HUGE)
        dev.finish_ok([raw.fill(AREA, 4, 1)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
