# SPDX-License-Identifier: MIT
"""Many submissions in flight, and many processes. Runs in the guest as root."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import cases
import vtpu_raw as raw
from cases import Setup, child_of, collector, main, module_is_idle, until
from vtpu_raw import PAGE, SYNC_SIGNAL, SYNC_TIMELINE, Device, UserQueue

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
MANY = 10_000
MOST = 16384  # jobs of one queue, of which none has ended
PROCESSES = 64
EACH = 10  # jobs that each process has to get done


def available() -> int:
    """Bytes that the kernel could still give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no MemAvailable")


class Held(Setup):
    """Queues whose first job waits until open() is called; each job appends to its log."""

    def __init__(self, num_queues: int, jobs: int) -> None:
        size = (1 + num_queues) * PAGE + -(-8 * jobs * num_queues // PAGE) * PAGE
        super().__init__(timeout_ms=600000, size=size)
        self.queues = [self.queue_id]
        while len(self.queues) < num_queues:
            self.queues.append(self.queue(self.vm_id, 600000))
        self.lines = [self.syncobj() for _ in self.queues]
        self.jobs = jobs
        self.points = [0] * num_queues
        for queue in self.queues:
            self.submit(queue, [raw.wait(self.host_va, 1)])

    def log(self, q: int) -> int:
        return (1 + len(self.queues)) * PAGE + 8 * self.jobs * q

    def add(self, q: int) -> None:
        """A job that logs how many were before it, then counts itself. The last one signals.

        One point a job would make DRM walk all earlier points of the timeline each time.
        """
        n = self.points[q]
        sync = [(self.lines[q], SYNC_SIGNAL | SYNC_TIMELINE, n + 1)] if n + 1 == self.jobs else []
        counter = self.host_va + (1 + q) * PAGE
        self.submit(
            self.queues[q],
            [
                raw.copy(self.host_va + self.log(q) + 8 * n, counter, 8),
                raw.signal(counter, n + 1),
            ],
            sync,
        )
        self.points[q] = n + 1

    def open(self) -> None:
        self.host_map[0] = 1

    def check(self) -> None:
        for q, queue in enumerate(self.queues):
            self.wait_point(self.lines[q], self.points[q], 50)
            state = self.state(queue)
            assert (state.status, state.completed) == (raw.OK, 1 + self.points[q]), state
            words = memoryview(self.host_map)[self.log(q) :][: 8 * self.points[q]].cast("Q")
            assert list(words) == list(range(self.points[q])), "out of order"
            words.release()


@case
def ten_thousand_on_one_queue() -> None:
    with Held(1, MANY) as dev:
        before = available()
        for _ in range(MANY):
            dev.add(0)
        assert dev.state(dev.queue_id).completed == 0
        used = before - available()
        assert used < 64 << 20, f"{used >> 20} MiB for {MANY} jobs"
        dev.open()
        dev.check()
        dev.finish_ok([raw.nop()])


@case
def ten_thousand_over_many_queues() -> None:
    files = [Held(8, MANY // 32 + 1) for _ in range(4)]
    try:
        for n in range(MANY // 32 + 1):
            for q in range(8):
                for dev in files:
                    dev.add(q)
                    assert n or not dev.state(dev.queues[q]).completed
        for dev in files:
            dev.open()
        for dev in files:
            dev.check()
    finally:
        for dev in files:
            dev.close()


@case
def a_queue_takes_so_many_and_no_more() -> None:
    """What one process can make the kernel keep is bounded; there is room as jobs end."""
    with Held(1, 1) as dev:
        taken = 1
        again = dev.resubmitter(dev.queue_id, [raw.nop()])
        try:
            while taken <= MOST:
                again()
                taken += 1
        except OSError as error:
            assert error.errno == errno.EBUSY, error
        assert taken == MOST, taken
        dev.open()
        until(lambda: dev.state(dev.queue_id).completed == MOST, 50, "they have ended")

        def fits() -> bool:
            try:
                dev.finish_ok([raw.nop()])
            except OSError as error:
                assert error.errno == errno.EBUSY, error
                return False
            return True

        until(fits, 20, "room for one more")


@case
def killed_with_ten_thousand() -> None:
    with Device() as dev:
        used = dev.memory().hbm_used

        def work() -> None:
            mine = Held(1, 1)
            again = mine.resubmitter(mine.queue_id, [raw.nop()])
            for _ in range(MANY):
                again()

        child, pipe = child_of(work)
        assert os.read(pipe, 1) == b"k"
        os.close(pipe)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        until(lambda: dev.memory().hbm_used == used, 20, "HBM is back")
        with Setup() as after:
            after.finish_ok([raw.nop()])
    until(module_is_idle, 20, "nothing holds the module")


# ---- Many processes ----


def work_until_stopped(number: int, counts: memoryview) -> None:
    """Keeps a few jobs in flight, every other process on a user queue."""
    go, stop = PROCESSES, PROCESSES + 1
    size = 16 * PAGE
    with Device() as dev:
        vm = dev.vm()
        bo = dev.bo(size)
        dev.bind(vm, bo, raw.HUGE, size)
        command = raw.fill(raw.HUGE, size, number)
        if number % 2:
            user, line = UserQueue(dev, vm), 0
        else:
            queue, line = dev.queue(vm), dev.syncobj()
        counts[number] = 1  # ready
        while not counts[go]:
            time.sleep(0.01)
        submitted = done = 0
        while not counts[stop]:
            while submitted < done + 4:
                submitted += 1
                if line:
                    sync = (line, SYNC_SIGNAL | SYNC_TIMELINE, submitted)
                    dev.submit(queue, [command], [sync])
                else:
                    user.put(command)
                    user.ring_doorbell()
            done += 1
            if line:
                dev.wait_point(line, done, 50)
            else:
                user.wait(done, 50)
            counts[number] = 1 + done
        state = dev.state(queue if line else user.id)
        assert state.status == raw.OK and state.completed >= done, state
        view = dev.map(bo)
        assert view[:] == number.to_bytes(4, "little") * (size // 4)
        view.close()
        if not line:
            user.unmap()


@case
def sixty_four_processes() -> None:
    """All at once, each with its own queue and address space; compared by work done."""
    shared = mmap.mmap(-1, PAGE)
    counts = memoryview(shared).cast("Q")
    children = []
    for number in range(PROCESSES):
        child = os.fork()
        if not child:
            status = 1
            try:
                work_until_stopped(number, counts)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        children.append(child)
    try:
        until(lambda: all(counts[:PROCESSES]), 100, "all have a queue")
        counts[PROCESSES] = 1
        until(lambda: min(counts[:PROCESSES]) > EACH, 300, "each has done its part")
        done = [count - 1 for count in counts[:PROCESSES]]
        counts[PROCESSES + 1] = 1
        statuses = [os.waitpid(child, 0)[1] for child in children]
        children = []
        assert not any(statuses), statuses
        # Until the last had done its part the others did not do many times as much.
        assert sum(done) / PROCESSES <= 8 * EACH, sorted(done)
        # A call costs the processor more than a doorbell, and a slow kernel's many times more.
        least = sum(done) / (8 * raw.PATIENCE)
        for kind in (0, 1):
            assert sum(done[kind::2]) >= least, f"a kind of queue is starved: {sorted(done)}"
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        counts.release()
        shared.close()
    until(module_is_idle, 20, "nothing holds the module")


if __name__ == "__main__":
    cases.CASE_SECONDS *= 5  # so many processes take turns of a slow machine
    sys.exit(main(sys.argv[1:], CASES))
