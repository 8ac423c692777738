# SPDX-License-Identifier: MIT
"""Syncobjs as a job's conditions and results, binary and timelines, in every combination.

Runs in the guest as root.
"""

from __future__ import annotations

import errno
import itertools
import os
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack

import vtpu_raw as raw
from cases import VA, Setup, collector, main
from vtpu_raw import SYNC_SIGNAL, SYNC_TIMELINE, Device, raises

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)


class Gate:
    """A queue's first job, which holds until the gate is opened."""

    def __init__(self, dev: Setup, queue: int) -> None:
        self.dev = dev
        dev.hbm_map[0] = 0
        dev.submit(queue, [raw.wait(dev.hbm_va, 1)])

    def open(self) -> None:
        self.dev.hbm_map[0] = 1


def transfer(dev: Device, src: int, src_point: int, dst: int, dst_point: int) -> None:
    dev.call(
        "syncobj_transfer",
        src_handle=src,
        dst_handle=dst,
        src_point=src_point,
        dst_point=dst_point,
    )


def payload(dev: Device, syncobj: int) -> int:
    """The point that a timeline has reached."""
    handles, points = raw.words("I", syncobj), raw.words("Q", 0)
    dev.call(
        "syncobj_query",
        handles=raw.buffer_address(handles),
        points=raw.buffer_address(points),
        count=1,
    )
    return struct.unpack("<Q", points.raw)[0]


def condition(
    dev: Device, kind: str, stack: ExitStack
) -> tuple[tuple[int, int, int], Callable[[], None]]:
    """Something to wait for, and what makes it come true."""
    sync = dev.syncobj()
    if kind == "binary":
        fenced = stack.enter_context(Setup())
        gate = Gate(fenced, fenced.queue_id)
        far = fenced.syncobj()
        fenced.submit(fenced.queue_id, [raw.nop()], [(far, SYNC_SIGNAL, 0)])
        fd = fenced.call("syncobj_handle_to_fd", handle=far, flags=1).fd
        dev.call("syncobj_fd_to_handle", handle=sync, flags=1, fd=fd)
        os.close(fd)
        return (sync, 0, 0), gate.open
    queue = dev.queue(dev.vm_id)
    assert isinstance(dev, Setup)
    gate = Gate(dev, queue)
    dev.submit(queue, [raw.nop()], [(sync, SYNC_SIGNAL | SYNC_TIMELINE, 7)])
    point = {"timeline": 7, "earlier point": 5}[kind]
    return (sync, SYNC_TIMELINE, point), gate.open


@case
def every_condition_with_every_result() -> None:
    """What is waited for times what is signalled: in order, and with the job's bytes there."""
    for waited, signalled in itertools.product(
        ("binary", "timeline", "earlier point"), ("binary", "timeline", "both")
    ):
        with ExitStack() as stack:
            dev = stack.enter_context(Setup())
            sync, fulfil = condition(dev, waited, stack)
            syncs, binary, line = [sync], dev.syncobj(), dev.syncobj()
            if signalled != "timeline":
                syncs.append((binary, SYNC_SIGNAL, 0))
            if signalled != "binary":
                syncs.append((line, SYNC_SIGNAL | SYNC_TIMELINE, 3))
            dev.submit(dev.queue_id, [raw.fill(dev.host_va, 4, 9)], syncs)
            if signalled != "timeline":
                with raises(errno.ETIME):
                    dev.wait(binary, 0.02)
            if signalled != "binary":
                with raises(errno.ETIME):
                    dev.wait_point(line, 3, 0.02)
                assert payload(dev, line) == 0
            assert dev.host_map[0] == 0, (waited, signalled)
            fulfil()
            if signalled != "timeline":
                dev.wait(binary)
            if signalled != "binary":
                dev.wait_point(line, 3)
                assert payload(dev, line) == 3
            assert dev.host_map[0] == 9, (waited, signalled)


@case
def a_wait_before_the_submit_is_refused() -> None:
    """A job cannot wait for what nobody has promised; a thread can."""
    with Setup() as dev:
        line, binary = dev.syncobj(), dev.syncobj()
        for sync in ((binary, 0, 0), (line, SYNC_TIMELINE, 1)):
            with raises(errno.EINVAL):
                dev.submit(dev.queue_id, [raw.nop()], [sync])
        dev.submit(dev.queue_id, [raw.nop()], [(line, SYNC_SIGNAL | SYNC_TIMELINE, 2)])
        dev.submit(dev.queue_id, [raw.nop()], [(line, SYNC_TIMELINE, 2)])
        with raises(errno.EINVAL):
            dev.submit(dev.queue_id, [raw.nop()], [(line, SYNC_TIMELINE, 3)])
        child = os.fork()
        if not child:
            try:
                dev.wait_point(line, 9)
                os._exit(0)
            finally:
                os._exit(1)
        dev.submit(dev.queue_id, [raw.nop()], [(line, SYNC_SIGNAL | SYNC_TIMELINE, 9)])
        assert os.waitpid(child, 0)[1] == 0
        assert dev.state(dev.queue_id).status == raw.OK


@case
def point_zero_and_signalled_points() -> None:
    """Zero, and what the timeline has passed, is no condition at all."""
    with Setup() as dev:
        line = dev.syncobj()
        dev.signal_point(line, 5)
        for point in (0, 1, 5):
            dev.submit(dev.queue_id, [raw.nop()], [(line, SYNC_TIMELINE, point)])
        done = dev.syncobj()
        dev.submit(dev.queue_id, [raw.nop()], [(done, SYNC_SIGNAL, 0)])
        dev.wait(done)
        made = dev.syncobj(signaled=True)
        dev.submit(dev.queue_id, [raw.nop()], [(made, 0, 0), (done, SYNC_SIGNAL, 0)])
        dev.wait(done)


@case
def points_out_of_order() -> None:
    """A lower point after a higher: the timeline never goes back, and nobody waits for ever."""
    with Setup() as dev:
        line, done = dev.syncobj(), dev.syncobj()
        other = dev.queue(dev.vm_id)
        gate = Gate(dev, dev.queue_id)
        dev.submit(dev.queue_id, [raw.fill(dev.host_va, 4, 1)], [(line, 3, 10)])
        # Behind point 10 in the chain, though of a queue that is free.
        dev.submit(other, [raw.fill(dev.host_va + 8, 4, 2)], [(line, 3, 4)])
        with raises(errno.ETIME):
            dev.wait_point(line, 4, 0.02)
        assert payload(dev, line) < 10
        dev.submit(other, [raw.nop()], [(line, SYNC_TIMELINE, 4), (done, SYNC_SIGNAL, 0)])
        gate.open()
        dev.wait_point(line, 10)
        dev.wait_point(line, 4)
        dev.wait(done)
        assert dev.host_map[0] == 1 and dev.host_map[8] == 2
        dev.submit(dev.queue_id, [raw.nop()], [(line, 3, 20)])
        dev.wait_point(line, 20)
        assert payload(dev, line) == 20


@case
def transfers_keep_the_fence() -> None:
    """From binary to a point, from a point to binary, from line to line: pending ones, too."""
    with Setup() as dev:
        gate = Gate(dev, dev.queue_id)
        binary, line, second, back = (dev.syncobj() for _ in range(4))
        dev.submit(dev.queue_id, [raw.fill(dev.host_va, 4, 3)], [(binary, SYNC_SIGNAL, 0)])
        transfer(dev, binary, 0, line, 6)
        transfer(dev, line, 6, second, 2)
        transfer(dev, second, 2, back, 0)
        done = dev.syncobj()
        other = dev.queue(dev.vm_id)
        conditions = [(line, SYNC_TIMELINE, 6), (second, SYNC_TIMELINE, 1), (back, 0, 0)]
        dev.submit(
            other,
            [raw.copy(dev.host_va + 8, dev.host_va, 4)],
            [*conditions, (done, SYNC_SIGNAL, 0)],
        )
        with raises(errno.ETIME):
            dev.wait(done, 0.02)
        gate.open()
        dev.wait(done)
        assert dev.host_map[8] == 3
        assert payload(dev, line) == 6 and payload(dev, second) == 2
        with raises(errno.EINVAL):
            transfer(dev, line, 7, back, 0)


@case
def a_job_that_fails_signals_with_its_error() -> None:
    """Binary or point, of the guilty job and of those behind it: nobody waits for ever."""
    with Setup() as dev:
        binary, line = dev.syncobj(), dev.syncobj()
        gate = Gate(dev, dev.queue_id)
        bad = raw.copy(dev.host_va, VA + (77 << 30), 4)
        syncs = [(binary, SYNC_SIGNAL, 0), (line, SYNC_SIGNAL | SYNC_TIMELINE, 1)]
        dev.submit(dev.queue_id, [bad], syncs)
        dev.submit(dev.queue_id, [raw.nop()], [(line, SYNC_SIGNAL | SYNC_TIMELINE, 2)])
        gate.open()
        dev.wait_point(line, 2)
        dev.wait(binary)
        assert payload(dev, line) == 2, "a failed point is a signalled one"
        assert dev.fence_error(binary) == -errno.EFAULT
        assert dev.state(dev.queue_id).status == raw.FAULTED


@case
def who_waits_for_a_failed_job_runs() -> None:
    """An error says that bytes are missing, not who needed them: that is the process's to know."""
    with Setup() as dev, Setup() as other:
        failed = dev.syncobj()
        dev.submit(dev.queue_id, [raw.copy(dev.host_va, VA, 4)], [(failed, SYNC_SIGNAL, 0)])
        dev.unbind(dev.vm_id, dev.host_va, dev.size)
        bad = dev.queue(dev.vm_id)
        dev.submit(bad, [raw.fill(dev.host_va, 4, 1)], [(failed, SYNC_SIGNAL, 0)])
        fd = dev.call("syncobj_handle_to_fd", handle=failed, flags=1).fd
        sync = other.syncobj()
        other.call("syncobj_fd_to_handle", handle=sync, flags=1, fd=fd)
        os.close(fd)
        done = other.syncobj()
        other.submit(
            other.queue_id,
            [raw.fill(other.host_va, 4, 6)],
            [(sync, 0, 0), (done, SYNC_SIGNAL, 0)],
        )
        other.wait(done)
        assert dev.fence_error(failed) == -errno.EFAULT
        assert other.fence_error(done) == 1 and other.host_map[0] == 6
        assert other.state(other.queue_id).status == raw.OK


@case
def a_point_that_is_waited_for_and_signalled() -> None:
    """By one job: it waits for what was there, and puts its own behind it."""
    with Setup() as dev:
        line = dev.syncobj()
        gate = Gate(dev, dev.queue_id)
        dev.submit(dev.queue_id, [raw.fill(dev.host_va + 4, 4, 1)], [(line, 3, 1)])
        other = dev.queue(dev.vm_id)
        for point in range(2, 40):
            queue = (dev.queue_id, other)[point % 2]
            dev.submit(
                queue,
                [raw.copy(dev.host_va + 4 * point, dev.host_va + 4 * (point - 1), 4)],
                [(line, SYNC_TIMELINE, point - 1), (line, 3, point)],
            )
        gate.open()
        dev.wait_point(line, 39)
        assert dev.host_map[4 * 39] == 1
        dev.submit(dev.queue_id, [raw.nop()], [(line, 3, 50), (line, 3, 60)])
        dev.wait_point(line, 60)
        assert payload(dev, line) == 60


@case
def a_replaced_binary_frees_the_old_fence() -> None:
    """A binary syncobj has the last job's fence, a reset one none."""
    with Setup() as dev:
        sync = dev.syncobj()
        gate = Gate(dev, dev.queue_id)
        other = dev.queue(dev.vm_id)
        dev.submit(dev.queue_id, [raw.nop()], [(sync, SYNC_SIGNAL, 0)])
        dev.submit(other, [raw.nop()], [(sync, SYNC_SIGNAL, 0)])
        dev.wait(sync)
        gate.open()
        handles = raw.words("I", sync)
        dev.call("syncobj_reset", handles=raw.buffer_address(handles), count=1)
        with raises(errno.EINVAL):
            dev.submit(dev.queue_id, [raw.nop()], [(sync, 0, 0)])
        dev.call("syncobj_signal", handles=raw.buffer_address(handles), count=1)
        dev.submit(dev.queue_id, [raw.nop()], [(sync, 0, 0)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
