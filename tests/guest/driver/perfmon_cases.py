# SPDX-License-Identifier: MIT
"""Counters of queues and of the device. Runs in the guest as root."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

import vtpu_raw as raw
from cases import Setup, collector, counting, main
from userptr_cases import as_user
from vtpu_raw import Device, raises

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
BUSY_NS, COMMAND_NS, INSTRUCTIONS, PREEMPTIONS = QUEUE = [1, 2, 3, 4]
DEVICE = [1, 2, 3, 4, 5, 6]  # time, busy, programs, instructions, HBM bytes, ECC
MODEL = range(16, 31)
MAX = 64


@case
def a_queue_counts_what_its_programs_do() -> None:
    turns = 1000
    with Setup() as dev:
        other = dev.queue(dev.vm_id)
        assert dev.counters(dev.queue_id, QUEUE) == [0, 0, 0, 0]
        program = dev.run(counting(turns))
        for runs in (1, 2):
            dev.finish_ok([program])
            busy, command, instructions, _ = dev.counters(dev.queue_id, QUEUE)
            assert instructions == runs * (2 * turns + 1), instructions
            assert 0 < command <= busy, (command, busy)
        assert dev.counters(other, QUEUE) == [0, 0, 0, 0]
        assert (
            dev.counters(dev.queue_id, [INSTRUCTIONS, BUSY_NS, INSTRUCTIONS])[::2]
            == [instructions] * 2
        )


@case
def programs_in_turns_are_preempted() -> None:
    """Two queues of a priority that both have work, as each one's counter tells."""
    with Setup() as dev:
        queues = [dev.queue_id, dev.queue(dev.vm_id)]
        program = dev.run(raw.LOOP)
        for queue in queues:
            dev.submit(queue, [program])
        seen = [0, 0]
        for _ in range(1000):
            seen = [dev.counters(queue, [PREEMPTIONS])[0] for queue in queues]
            if min(seen):
                break
        assert min(seen), seen
        for queue in queues:
            dev.call("queue_destroy", queue_id=queue)


@case
def the_device_counts_for_all() -> None:
    turns = 500
    with Setup() as one, Setup() as two:
        for dev in (one, two):
            before = one.counters(0, DEVICE)
            dev.finish_ok([dev.run(counting(turns))])
            after = one.counters(0, DEVICE)
            grown = [b - a for a, b in zip(before, after, strict=True)]
            assert grown[2] == 1 and grown[3] == 2 * turns + 1, grown
            assert 0 < grown[1] <= grown[0], grown


@case
def counters_of_others_are_not_to_be_had() -> None:
    with Setup() as dev:

        def work() -> None:
            with Setup() as mine, Device() as bare:
                assert mine.counters(mine.queue_id, QUEUE) == [0, 0, 0, 0]
                for file in (mine, bare):
                    for number in (*DEVICE, *MODEL, 999):
                        with raises(errno.EACCES):
                            file.counters(0, [number])
                with raises(errno.ENOENT):
                    bare.counters(1, QUEUE)
                with raises(errno.ENOENT):
                    mine.counters(mine.queue_id + 1, QUEUE)

        as_user(work)
        dev.call("queue_destroy", queue_id=dev.queue_id)
        with raises(errno.ENOENT):
            dev.counters(dev.queue_id, QUEUE)


@case
def perfmon_arguments() -> None:
    with Setup() as dev:
        for wrong in ([0], [5], [1, 99], [2**32 - 1]):
            with raises(errno.EINVAL):
                dev.counters(dev.queue_id, wrong)
        for wrong in ([0], [7], [15], [31]):
            with raises(errno.EINVAL):
                dev.counters(0, wrong)
        for number in MODEL:  # no chip is modelled here
            with raises(errno.EOPNOTSUPP):
                dev.counters(0, [number])
        good = raw.words("IIQ" * MAX, *[1, 0, 0] * MAX)
        bad = raw.words("IIQ", 1, 1, 0)
        call = {"queue_id": dev.queue_id, "counters": raw.buffer_address(good)}
        dev.call("perfmon", **call, num_counters=MAX)
        for change, error in [
            ({"num_counters": 0}, errno.EINVAL),
            ({"num_counters": MAX + 1}, errno.EINVAL),
            ({"counters": raw.buffer_address(bad)}, errno.EINVAL),
            ({"counters": 0}, errno.EFAULT),
            ({"counters": 1 << 62}, errno.EFAULT),
            ({"queue_id": 99}, errno.ENOENT),
        ]:
            with raises(error):
                dev.call("perfmon", **{"num_counters": 1, **call, **change})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
