# SPDX-License-Identifier: MIT
"""User queues through the runtime. Runs in the guest, with programs.py beside it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import contextmanager

import vtpu_raw as raw
from cases import collector, main

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
RING = 512  # entries of the driver's


@contextmanager
def opened(timeout_ms: int = 5000):
    """A device, a user queue of it, and an executable that counts a word up."""
    import programs
    from vtpu.runtime import Device

    # Its number is another once the device was unplugged while a file was open.
    name = f"drm:{raw.node()}"
    with Device.open(name) as device, device.queue(timeout_ms=timeout_ms, user=True) as queue:
        code = programs.add_one(0) + programs.HALT
        yield device, queue, device.load(programs.executable({"count": code}, ["word"]))


def word(buffer) -> int:
    return buffer.map().cast("Q")[0]


@case
def jobs_of_each_kind() -> None:
    with opened() as (device, queue, counter):
        near, far = device.buffer(8192), device.buffer(8192, hbm=True)
        queue.nop().wait()
        queue.fill(far, 8192, 0x1234)
        queue.copy(near, far, 8192).wait()
        assert near.map().cast("I").tolist() == [0x1234] * 2048
        queue.fill(far, 8, 0)
        launch = queue.prepare(counter, [far], timed=True)
        for _ in range(10):
            fence = launch.submit()
        fence.wait()
        assert word(far) == 10 and launch.device_ns > 0
        assert queue.state.completed == queue.state.submitted == fence.point
        assert fence.done()


@case
def more_jobs_than_the_ring_has_room_for() -> None:
    with opened() as (device, queue, counter):
        buffer = device.buffer(8, hbm=True)
        launch = queue.prepare(counter, [buffer])
        fences = [launch.submit() for _ in range(3 * RING)]
        for fence in (fences[0], fences[RING], fences[-1]):
            fence.wait()
            assert word(buffer) >= fence.point
        assert word(buffer) == 3 * RING


@case
def fences_between_queues_of_both_kinds() -> None:
    """Neither kind of queue runs a job before what it was told to wait for."""
    with opened() as (device, user, counter), device.queue() as plain:
        buffer = device.buffer(4 << 20, hbm=True)
        for first, second in ((plain, user), (user, plain), (user, device.queue(user=True))):
            before = word(buffer)
            slow = [first.fill(buffer.va + 8, (4 << 20) - 8, n) for n in range(5)]
            ahead = first.prepare(counter, [buffer]).submit()
            behind = second.prepare(counter, [buffer]).submit(wait=[*slow, ahead])
            behind.wait()
            assert ahead.done() and word(buffer) == before + 2


@case
def awaited() -> None:
    with opened() as (device, queue, counter):
        buffer = device.buffer(8)
        launch = queue.prepare(counter, [buffer])

        async def work() -> None:
            await asyncio.gather(*(launch.submit() for _ in range(20)))
            assert word(buffer) == 20
            await launch.submit()

        asyncio.run(work())
        assert word(buffer) == 21


@case
def a_fault_and_a_hang_and_going_on() -> None:
    import programs
    from vtpu.runtime import TpuCancelledError, TpuFaultError, TpuHangError

    with opened(timeout_ms=700) as (device, queue, counter):
        buffer = device.buffer(8)
        launch = queue.prepare(counter, [buffer])
        spin = device.load(programs.executable({"spin": programs.SPIN}, []))
        ways = (
            (lambda: queue.copy(buffer, 1 << 45, 8), TpuFaultError),
            (lambda: queue.prepare(spin, []).submit(), TpuHangError),
        )
        for number, (spoil, expected) in enumerate(ways):
            good = launch.submit()
            bad = spoil()
            for fence, error in ((good, None), (bad, expected)):
                try:
                    fence.wait(30)
                    assert error is None, "it ended well"
                except expected as raised:
                    assert type(raised) is error
            try:
                launch.submit()
                raise AssertionError("a failed queue took a job")
            except (expected, TpuCancelledError):
                pass
            queue.recover()
            launch.submit().wait()
            assert word(buffer) == 2 * (number + 1)
            try:
                bad.wait(0)
                raise AssertionError("its fence forgot the error")
            except expected:
                pass


@case
def closed_with_work_left() -> None:
    import programs

    for _ in range(3):
        with opened(timeout_ms=600000) as (device, queue, counter):
            buffer = device.buffer(8)
            spin = device.load(programs.executable({"spin": programs.SPIN}, []))
            other = device.queue(timeout_ms=700, user=True)
            other.prepare(spin, []).submit()
            queue.prepare(counter, [buffer]).submit().wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
