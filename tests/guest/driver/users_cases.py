# SPDX-License-Identifier: MIT
"""What one user may hold of the device. Runs in the guest as root."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import resource
import struct
import sys
from collections.abc import Callable

import vtpu_raw as raw
from cases import collector, main
from userptr_cases import USER, Memory, as_user, libc
from vtpu_raw import PAGE, Device, raises

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)


def exhaust(take: Callable[[Device], None]) -> list[Device]:
    """Takes from one new file after the other until a whole file gets nothing."""
    files: list[Device] = []
    while True:
        dev = Device()
        files.append(dev)
        count = 0
        try:
            while True:
                take(dev)
                count += 1
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
        if not count:
            return files


def count_contexts() -> tuple[int, list[Device]]:
    taken = 0

    def take(dev: Device) -> None:
        nonlocal taken
        dev.vm()
        taken += 1

    files = exhaust(take)
    return taken, files


def count_queues() -> tuple[int, list[Device]]:
    taken = 0
    vms: dict[Device, int] = {}

    def take(dev: Device) -> None:
        nonlocal taken
        if dev not in vms:
            vms[dev] = dev.vm()
        dev.queue(vms[dev])
        taken += 1

    files = exhaust(take)
    return taken, files


def close(files: list[Device]) -> None:
    for dev in files:
        dev.close()


@case
def half_of_the_device_is_a_users() -> None:
    """Over any number of files and processes; what is given back may be had again."""
    with Device() as dev:
        info = dev.info()

    def work() -> None:
        contexts, files = count_contexts()
        assert contexts == info.num_contexts // 2, contexts
        close(files)
        for _ in range(2):
            queues, files = count_queues()
            assert queues == info.num_queues // 2, queues
            child = os.fork()
            if not child:
                os._exit(count_queues()[0] != 0)
            assert os.waitpid(child, 0)[1] == 0, "a child's own files give no more"
            close(files)

    as_user(work)


@case
def two_users_share_the_device() -> None:
    with Device() as dev:
        total = dev.info().num_queues
    go, done = os.pipe(), os.pipe()

    def first() -> None:
        queues, _files = count_queues()
        assert queues == total // 2, queues
        os.write(done[1], b"k")
        os.read(go[0], 1)

    child = os.fork()
    if not child:
        try:
            as_user(first)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.read(done[0], 1) == b"k"

    def second() -> None:
        queues, files = count_queues()
        assert queues == total // 2, queues
        assert files[0].finish(1, [raw.nop()]) == 1

    as_user(second, uid=USER + 1)
    os.write(go[1], b"k")
    assert os.waitpid(child, 0)[1] == 0


@case
def a_file_stays_its_openers() -> None:
    """Handed to another user it is charged to who opened it."""
    with Device() as dev:
        total = dev.info().num_queues

    def work() -> None:
        queues, files = count_queues()
        assert queues == total // 2
        close(files)

    os.chmod(raw.node(), 0o666)
    # Opened by root, used by the user: root's share, and the user's is whole.
    with Device() as dev:
        vm = dev.vm()

        def mixed() -> None:
            dev.queue(vm)
            work()

        as_user(mixed)


@case
def a_capability_lifts_the_limits() -> None:
    with Device() as dev:
        info = dev.info()
    contexts, files = count_contexts()
    close(files)
    assert contexts == info.num_contexts, contexts
    queues, files = count_queues()
    close(files)
    assert queues == info.num_queues, queues


class Capability(enum.IntEnum):
    DAC_OVERRIDE = 1
    IPC_LOCK = 14
    SYS_ADMIN = 21
    SYS_NICE = 23
    SYS_RESOURCE = 24
    PERFMON = 38


def with_capabilities(mask: int, work: Callable[[], None]) -> None:
    """In a process of root that has only these."""

    def limited() -> None:
        header = struct.pack("<Ii", 0x20080522, 0)  # version 3, this thread
        low, high = mask & 0xFFFFFFFF, mask >> 32
        data = struct.pack("<6I", low, low, 0, high, high, 0)
        assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        work()

    as_user(limited, uid=None)


def high_priority() -> None:
    with Device() as dev:
        assert dev.finish(dev.queue(dev.vm(), priority=2), [raw.nop()]) == 1


def more_than_half() -> None:
    contexts, files = count_contexts()
    total = files[0].info().num_contexts
    close(files)
    if contexts < total:
        raise OSError(errno.ENOSPC, "limited")


def pin() -> None:
    memory = Memory(PAGE)
    with Device() as dev:
        dev.userptr(memory.addr, PAGE)


def device_counters() -> None:
    with Device() as dev:
        dev.counters(0, [1])


@case
def a_capability_counts_not_the_user() -> None:
    """Root without it is refused, and that alone is enough."""
    every = (1 << 41) - 1
    for capability, work, error, others in [
        (Capability.SYS_NICE, high_priority, errno.EPERM, ()),
        (Capability.SYS_RESOURCE, more_than_half, errno.ENOSPC, ()),
        (Capability.IPC_LOCK, pin, errno.ENOMEM, ()),
        (Capability.PERFMON, device_counters, errno.EACCES, (Capability.SYS_ADMIN,)),
    ]:

        def refused(work: Callable[[], None] = work, error: int = error) -> None:
            with raises(error):
                work()

        lacking = every & ~sum(1 << each for each in (capability, *others))
        with_capabilities(lacking, refused)
        with_capabilities(1 << capability | 1 << Capability.DAC_OVERRIDE, work)


@case
def lower_priorities_are_everybodys() -> None:
    def work() -> None:
        with Device() as dev:
            vm = dev.vm()
            for priority in (0, 1):
                assert dev.finish(dev.queue(vm, priority=priority), [raw.nop()]) == 1
            with raises(errno.EPERM):
                dev.queue(vm, priority=2)

    as_user(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
