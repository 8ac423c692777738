# SPDX-License-Identifier: MIT
"""What one user may hold of the device. Runs in the guest as root, as cases.py does."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

import vtpu_raw as raw
from cases import collector, main
from userptr_cases import USER, as_user
from vtpu_raw import Device

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
