# SPDX-License-Identifier: MIT
"""Processes that open, map, fork, duplicate, submit and are killed, all at once. Minutes long."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path

import vtpu_raw as raw
from cases import CASE_SECONDS, Setup, child_of, collector, main, module_is_idle, pci_device, until
from vtpu_raw import HUGE
from watch import expects

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
ROUNDS = 15
OF_EACH = 2


class Storm:
    """What the processes do, and what may become of it when the device is reset meanwhile."""

    def __init__(self, errors: Collection[int] = ()) -> None:
        self.errors = errors

    def job(self, dev: Setup) -> None:
        got = dev.finish(dev.queue_id, [raw.fill(dev.host_va, 8, 1), raw.fill(dev.hbm_va, 8, 2)])
        assert got == 1 or -got in self.errors, f"fence {got}, {dev.state(dev.queue_id)}"

    def open_and_close(self, _rng: random.Random) -> None:
        with Setup() as dev:
            self.job(dev)

    def map_and_touch(self, rng: random.Random) -> None:
        """The mappings outlive the file."""
        with Setup(size=HUGE) as dev:
            self.job(dev)
            os.close(dev.fd)
            dev.fd = -1
            for view in (dev.host_map, dev.hbm_map):
                for at in rng.sample(range(16, dev.size), 8):
                    view[at] = at % 251
                    assert view[at] == at % 251

    def fork(self, rng: random.Random) -> None:
        """A child works with what it inherits; sometimes it is the last to have the file."""
        dev = Setup()
        child = os.fork()
        if not child:
            self.end_with(lambda: self.job(dev))
        if rng.randrange(2):
            self.job(dev)
        dev.close()
        assert os.waitpid(child, 0)[1] == 0

    def duplicate(self, _rng: random.Random) -> None:
        with Setup() as dev:
            first, dev.fd = dev.fd, os.dup(dev.fd)
            os.close(first)
            self.job(dev)

    def kill(self, rng: random.Random) -> None:
        """In the middle of a program, of jobs that wait, or of its own end."""

        def work() -> None:
            mine = Setup(timeout_ms=30000)
            other = mine.queue(mine.vm_id)
            mine.submit(other, [raw.wait(mine.hbm_va, 1)])
            mine.submit(mine.queue_id, [mine.run(raw.LOOP)])

        child, pipe = child_of(work)
        time.sleep(rng.random() / 10)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(pipe)

    def end_with(self, work: Callable[[], None]) -> None:
        """Does it and ends this process, with 0 when nothing went wrong."""
        status = 0
        try:
            work()
        except OSError as error:
            if error.errno not in self.errors:
                traceback.print_exc()
                status = 1
        except BaseException:
            traceback.print_exc()
            status = 1
        os._exit(status)

    def process(self, work: Callable[[random.Random], None], seed: int) -> int:
        child = os.fork()
        if child:
            return child
        rng = random.Random(seed)

        def rounds() -> None:
            for _ in range(ROUNDS):
                try:
                    work(rng)
                except OSError as error:
                    if error.errno not in self.errors:
                        raise

        self.end_with(rounds)
        raise AssertionError

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        signal.alarm(10 * CASE_SECONDS)
        works = [self.open_and_close, self.map_and_touch, self.fork, self.duplicate, self.kill]
        children = [
            self.process(work, seed * OF_EACH + n)
            for seed, work in enumerate(works)
            for n in range(OF_EACH)
        ]
        try:
            meanwhile()
            statuses = [os.waitpid(child, 0)[1] for child in children]
            children = []
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        assert not any(statuses), statuses
        until(module_is_idle, 10, "nothing holds the module")
        with Setup() as dev:
            dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])


@case
def processes_come_and_go_at_once() -> None:
    Storm().run()


@case
@expects(resets=True)
def the_device_is_reset_meanwhile() -> None:
    path = Path(f"/sys/bus/pci/devices/{pci_device()}/reset")

    def reset() -> None:
        for _ in range(10):
            time.sleep(0.3)
            path.write_text("1")

    Storm({errno.EIO, errno.ENODEV, errno.ECANCELED}).run(reset)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
