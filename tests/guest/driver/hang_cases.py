# SPDX-License-Identifier: MIT
"""Hangs, case by case: who is found, who goes on, and what is told. Runs in the guest as root:

    python3 hang_cases.py [NAME ...]

Those of ON_DEMAND need a device that test_hangs.py has told to misbehave.
"""

from __future__ import annotations

import errno
import glob
import os
import random
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import vtpu_raw as raw
from cases import DRIVER, Setup, collector, counting, disturbed, main, pci_device, until
from userq_cases import Driven, ended
from vtpu_raw import SYNC_SIGNAL, Device, UserQueue, raises
from watch import HANG, LOST, STUCK_ENGINES, STUCK_QUEUE, STUCK_RESET, expects

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
# The properties of the device that the host sets before a case.
ON_DEMAND: dict[str, dict[str, object]] = {}
PARAMETERS = Path("/sys/module/vtpu/parameters")
INSTRUCTIONS, COMMAND_NS = 3, 2
RESTARTABLE = 1
LONG_MS = 600000


def with_device(**properties: object) -> Callable:
    """A case that the device is told to misbehave for: inject-NAME=value."""

    def collect(function: Callable[[], None]) -> Callable[[], None]:
        names = {f"inject-{name.replace('_', '-')}": value for name, value in properties.items()}
        ON_DEMAND[function.__name__] = names
        return case(function)

    return collect


def debugfs(name: str) -> Path:
    [path] = glob.glob(f"/sys/kernel/debug/accel/{pci_device()}/{name}")
    return Path(path)


class Job:
    """One that was submitted, and what became of it."""

    def __init__(self, dev: Device, queue: int, commands: list, flags: int = 0) -> None:
        self.dev, self.queue, self.sync = dev, queue, dev.syncobj()
        dev.submit(queue, commands, [(self.sync, SYNC_SIGNAL, 0)], flags)

    def over(self, seconds: float = 20) -> int:
        """1: well; else its error."""
        self.dev.wait(self.sync, seconds)
        return self.dev.fence_error(self.sync)

    def file(self) -> int:
        """A sync_file of its fence, which outlives the file of the device."""
        return self.dev.call("syncobj_handle_to_fd", handle=self.sync, flags=1).fd

    def begun(self) -> None:
        """Returns when its program completes instructions."""
        until(lambda: self.dev.counters(self.queue, [INSTRUCTIONS])[0] > 0, 20, "the program runs")


class Innocent(Setup):
    """Somebody else, who wants to live. The host buffer has two words:

    how often the program of `patient` began, and what it waits for.
    """

    def __init__(self) -> None:
        super().__init__(timeout_ms=LONG_MS)

    def patient(self) -> tuple:
        """Counts that it began, then runs until it is let go."""
        count, flag = 41, 42
        return self.run(
            raw.instruction(0x05, [40], imm64=self.host_va)  # LI s40 = the words
            + raw.instruction(0x0E, [count, 40])  # LD
            + raw.instruction(0x06, [count, count], [0, 0, 1])  # ADD 1
            + raw.instruction(0x0F, [40, count])  # ST
            + raw.instruction(0x0E, [flag, 40], [0, 8])  # LD, again and again
            + raw.instruction(0x15, [flag], [0, 0, 64 * 4])  # BEQ 0
            + raw.HALT
        )

    @property
    def begins(self) -> int:
        return self.host_map[0]

    def let_go(self) -> None:
        self.host_map[8] = 1


def is_bus_master() -> bool:
    config = Path("/sys/bus/pci/devices", pci_device(), "config").read_bytes()
    return bool(config[4] & 4)


class Guilty(Setup):
    """A file whose queue runs a program without end, and is ended by hand."""

    LIMIT_MS = 590000  # by which it is told from others

    def __init__(self) -> None:
        super().__init__(timeout_ms=self.LIMIT_MS)
        self.job = Job(self, self.queue_id, [self.run(raw.LOOP)])
        self.behind = Job(self, self.queue_id, [raw.nop()])
        self.job.begun()

    def end(self, *failures: str) -> None:
        """As its hang would, but what is tried first fails."""
        queues = debugfs("queues").read_text().split("queue ")
        [mine] = [text for text in queues if f"timeout {self.LIMIT_MS} ms" in text]
        for name in failures:
            debugfs(f"inject/{name}").write_text("1")
        debugfs("reset_queue").write_text(mine.partition(":")[0])
        assert (self.job.over(), self.behind.over()) == (-errno.ETIMEDOUT, -errno.ECANCELED)
        assert self.state(self.queue_id).status == raw.HUNG


# What the driver believes to fail, and so which reset it ends with.
ENGINES, DEVICE = ("stop",), ("stop", "engines")
costs_the_engines = expects(STUCK_QUEUE, resets=True)
costs_the_device = expects(STUCK_QUEUE, STUCK_ENGINES, resets=True)


class Uevents:
    """The kernel's events from now on, of this device's node."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15)
        self.socket.bind((0, 1))
        self.socket.settimeout(20)

    def next_wedged(self) -> str:
        while True:
            fields = self.socket.recv(8192).decode(errors="replace").split("\0")
            values = dict(field.split("=", 1) for field in fields if "=" in field)
            if "WEDGED" in values:
                assert values["SUBSYSTEM"] == "accel" and values["ACTION"] == "change", values
                return values["WEDGED"]


def is_well(dev: Device, job: Job) -> None:
    assert job.over() == 1, (job.over(), dev.state(job.queue))
    assert dev.state(job.queue).status == raw.OK


# ---- Who hangs ----


@case
def what_gets_on_lives() -> None:
    """It executes for many times as long as it might stand still."""
    with Setup(timeout_ms=LONG_MS) as dev:
        queue = dev.queue(dev.vm_id, LONG_MS, stall_ms=100)
        rounds, before, took = 1 << 18, 0, 0
        while took < 500_000_000:
            code = counting(rounds)
            dev.program(code)
            is_well(dev, Job(dev, queue, [raw.run(dev.code_va, len(code))]))
            dev.unbind(dev.vm_id, dev.code_va, raw.PAGE)
            [now] = dev.counters(queue, [COMMAND_NS])
            rounds, before, took = rounds * 4, now, now - before


@case
@expects(HANG)
def the_time_limit_ends_what_gets_on() -> None:
    with Setup() as dev:
        queue = dev.queue(dev.vm_id, 300, stall_ms=LONG_MS)
        assert Job(dev, queue, [dev.run(raw.LOOP)]).over() == -errno.ETIMEDOUT
        assert dev.state(queue).status == raw.HUNG


@with_device(hang=True)
@expects(HANG)
def what_gets_nowhere_does_not() -> None:
    """Long before its time limit; its queue alone."""
    with Setup() as dev, Innocent() as other:
        before = dev.resets()
        queue = dev.queue(dev.vm_id, LONG_MS, stall_ms=400)
        hung, behind = (Job(dev, queue, [job]) for job in (dev.run(raw.LOOP), raw.nop()))
        is_well(other, Job(other, other.queue_id, [raw.nop()]))
        assert (hung.over(), behind.over()) == (-errno.ETIMEDOUT, -errno.ECANCELED)
        assert dev.state(queue).status == raw.HUNG
        with raises(errno.EIO):
            dev.submit(queue, [raw.nop()])
        is_well(other, Job(other, other.queue_id, [raw.nop()]))
        after = dev.resets()
        assert after.queue_resets == before.queue_resets + 1
        assert after.engine_resets == before.engine_resets


@with_device(irq_loss=1)
def a_fault_whose_interrupt_is_lost_is_no_hang() -> None:
    with Setup(timeout_ms=LONG_MS) as dev:
        queue = dev.queue(dev.vm_id, LONG_MS, stall_ms=400)
        job = Job(dev, queue, [dev.run(raw.trap(5), cookie=3)])
        assert job.over() == -errno.EFAULT
        assert dev.state(queue).fault_cookie == 3


@with_device(hang=True)
@expects(HANG)
def the_drivers_own_limits() -> None:
    """Queues that do not say have the module's."""
    defaults = {name: (PARAMETERS / name).read_text() for name in ("timeout_ms", "stall_ms")}
    assert {name: int(text) for name, text in defaults.items()} == {
        "timeout_ms": 60000,
        "stall_ms": 10000,
    }
    with Setup() as dev:
        (PARAMETERS / "stall_ms").write_text("300")
        queue = dev.queue(dev.vm_id)
        (PARAMETERS / "stall_ms").write_text(defaults["stall_ms"])
        assert Job(dev, queue, [dev.run(raw.LOOP)]).over() == -errno.ETIMEDOUT


@case
@expects(HANG)
def a_wait_has_the_time_limit_alone() -> None:
    with Setup() as dev:
        lives = dev.queue(dev.vm_id, LONG_MS, stall_ms=100)
        waits = Job(dev, lives, [raw.wait(dev.hbm_va, 1)])
        for _ in range(2):
            queue = dev.queue(dev.vm_id, 300)
            # Its time begins with its turn.
            assert Job(dev, queue, [raw.nop()]).over() == 1
            assert Job(dev, queue, [raw.wait(dev.hbm_va, 1)]).over() == -errno.ETIMEDOUT
            dev.call("queue_destroy", queue_id=queue)
        dev.hbm_map[0] = 1
        is_well(dev, waits)


@with_device(hang=True)
@expects(HANG)
def a_user_queue_that_gets_nowhere() -> None:
    with Driven() as dev:
        user = UserQueue(dev, dev.vm_id, LONG_MS, stall_ms=400)
        user.put(dev.run(raw.LOOP))
        user.ring_doorbell()
        ended(dev, user, raw.HUNG)
        dev.user.finish(raw.nop())
        user.unmap()


# ---- Who goes on ----


def others_go_on(failures: tuple[str, ...]) -> None:
    """Idle, with jobs in line behind one that waits, or with a ring that has gone round."""
    many = 400
    with Guilty() as guilty, Innocent() as idle, Innocent() as busy:
        before = guilty.resets()
        idle.finish_ok([raw.nop()])
        for _ in range(5):
            busy.finish_ok([raw.nop()] * 60)
        jobs = [Job(busy, busy.queue_id, [raw.wait(busy.host_va + 8, 1)])]
        for n in range(many):
            jobs.append(Job(busy, busy.queue_id, [raw.fill(busy.hbm_va + 8 * n, 8, n)]))
        guilty.end(*failures)
        assert busy.state(busy.queue_id).status == raw.OK
        busy.let_go()
        for job in jobs:
            is_well(busy, job)
        assert [busy.hbm_map[8 * n] for n in range(many)] == [n & 255 for n in range(many)]
        idle.finish_ok([raw.fill(idle.host_va, 4, 3)])
        after = guilty.resets()
        assert after.queues_lost == before.queues_lost
        devices = int("engines" in failures)
        assert after.engine_resets == before.engine_resets + 1 - devices
        assert after.device_resets == before.device_resets + devices
        if devices:
            assert after.jobs_replayed >= before.jobs_replayed + 1 + many
        with Setup() as late:
            late.finish_ok([raw.nop()])


@case
@costs_the_engines
def others_go_on_after_engines() -> None:
    others_go_on(ENGINES)


@case
@costs_the_device
def others_go_on_after_the_device() -> None:
    others_go_on(DEVICE)


def half_done_is_lost(failures: tuple[str, ...]) -> None:
    with Guilty() as guilty, Innocent() as busy:
        before = guilty.resets().queues_lost
        job = Job(busy, busy.queue_id, [busy.patient()])
        behind = Job(busy, busy.queue_id, [raw.nop()], RESTARTABLE)
        job.begun()
        guilty.end(*failures)
        assert (job.over(), behind.over()) == (-errno.ENODEV, -errno.ECANCELED)
        assert busy.state(busy.queue_id).status == raw.LOST
        assert guilty.resets().queues_lost == before + 1
        with raises(errno.EIO):
            busy.submit(busy.queue_id, [raw.nop()])
        queue = busy.queue(busy.vm_id)
        is_well(busy, Job(busy, queue, [raw.nop()]))


@case
@costs_the_engines
def half_done_is_lost_to_engines() -> None:
    half_done_is_lost(ENGINES)


@case
@costs_the_device
def half_done_is_lost_to_the_device() -> None:
    half_done_is_lost(DEVICE)


def restartable_runs_again(failures: tuple[str, ...]) -> None:
    with Guilty() as guilty, Innocent() as busy:
        before = guilty.resets()
        job = Job(busy, busy.queue_id, [raw.nop(), busy.patient()], RESTARTABLE)
        behind = Job(busy, busy.queue_id, [raw.nop()])
        until(lambda: busy.begins == 1, 20, "it has begun")
        guilty.end(*failures)
        until(lambda: busy.begins == 2, 20, "it has begun again")
        busy.let_go()
        is_well(busy, job)
        is_well(busy, behind)
        after = guilty.resets()
        assert after.jobs_replayed >= before.jobs_replayed + 2
        assert after.queues_lost == before.queues_lost


@case
@costs_the_engines
def restartable_runs_again_after_engines() -> None:
    restartable_runs_again(ENGINES)


@case
@costs_the_device
def restartable_runs_again_after_the_device() -> None:
    restartable_runs_again(DEVICE)


@case
@costs_the_engines
def user_queues_and_the_engines() -> None:
    """One at work is lost, and its sleeper is woken; one that is not goes on."""
    with Guilty() as guilty, Driven(timeout_ms=LONG_MS) as idle, Driven(timeout_ms=LONG_MS) as busy:
        idle.user.finish(raw.nop())
        busy.user.put(busy.run(raw.LOOP))
        busy.user.ring_doorbell()
        until(lambda: busy.counters(busy.user.id, [INSTRUCTIONS])[0] > 0, 20, "it runs")
        woken: list[int] = []

        def sleep() -> None:
            with raises(errno.EIO):
                busy.user.wait(1, 30)
            woken.append(1)

        sleeper = threading.Thread(target=sleep)
        sleeper.start()
        guilty.end(*ENGINES)
        sleeper.join()
        assert woken
        ended(busy, busy.user, raw.LOST)
        for _ in range(3):
            idle.user.finish(raw.fill(idle.host_va, 4, 9))


@case
@costs_the_device
def user_queues_and_the_device() -> None:
    with Guilty() as guilty, Driven(timeout_ms=LONG_MS) as idle:
        idle.user.finish(raw.nop())
        guilty.end(*DEVICE)
        ended(idle, idle.user, raw.LOST)
        idle.finish_ok([raw.nop()])
        again = UserQueue(idle, idle.vm_id)
        again.finish(raw.nop())
        again.unmap()


def batch(dev: Innocent, *first: tuple) -> Callable[[], None]:
    """Submits jobs that each leave a mark, behind commands of the first one.

    Returns what waits for them and looks for their marks.
    """
    jobs, size, mark = 8, 64, random.randrange(1, 256)
    submitted = []
    for n in range(jobs):
        fill = raw.fill(dev.hbm_va + size * n, size, 0x01010101 * mark)
        commands = [fill] if n else [*first, fill]
        submitted.append(Job(dev, dev.queue_id, commands, RESTARTABLE))

    def came_through() -> None:
        ends = [job.over() for job in submitted]
        assert ends == [1] * jobs, (ends, dev.state(dev.queue_id))
        assert dev.hbm_map[: size * jobs] == bytes([mark]) * size * jobs, "done, and yet not"
        dev.hbm_map[: size * jobs] = bytes(size * jobs)
        for job in submitted:
            dev.call("syncobj_destroy", handle=job.sync)

    return came_through


@case
@expects(resets=True)
def submissions_amid_resets() -> None:
    """Whoever submits while the device is reset, again and again, loses nothing.

    One has a batch in flight each time, which waits; what the others are at is as it happens.
    """
    rounds = 5
    with Innocent() as one, Innocent() as two, Innocent() as held:
        before = held.resets()

        with disturbed([lambda: batch(one)(), lambda: batch(two)()], excuses=()) as served:
            for _ in range(rounds):
                held.host_map[8] = 0
                came_through = batch(held, raw.wait(held.host_va + 8, 1))
                debugfs("reset_device").write_text("1")
                held.let_go()
                came_through()
                served()
        after = held.resets()
        assert after.device_resets == before.device_resets + rounds
        assert after.jobs_replayed >= before.jobs_replayed + rounds
        assert after.queues_lost == before.queues_lost


# ---- A device that does not stop ----


def hang(dev: Setup, done: Callable[[], bool]) -> Job:
    """Lets queues hang until the device has ignored the reset of one.

    It does so when it executes the program just then, and not a look at a WAIT of
    somebody else. The job, and the device's state, are those of that queue.
    """
    dev.program(raw.LOOP)
    for _ in range(20):
        queue = dev.queue(dev.vm_id, 300)
        job = Job(dev, queue, [raw.run(dev.code_va, len(raw.LOOP))])
        behind = Job(dev, queue, [raw.nop()])
        assert (job.over(), behind.over()) == (-errno.ETIMEDOUT, -errno.ECANCELED)
        assert dev.state(queue).status == raw.HUNG
        if done():
            return job
        dev.call("queue_destroy", queue_id=queue)
    raise AssertionError("the device never ignored a reset")


@with_device(stuck=1)
@expects(HANG, STUCK_QUEUE, resets=True)
def a_queue_that_does_not_stop_costs_the_engines() -> None:
    with Setup(timeout_ms=300) as dev, Innocent() as other:
        before = dev.resets()
        held = Job(other, other.queue_id, [raw.wait(other.host_va + 8, 1)])
        hang(dev, lambda: dev.resets().engine_resets > before.engine_resets)
        other.let_go()
        is_well(other, held)
        after = dev.resets()
        assert after.engine_resets == before.engine_resets + 1
        assert after.device_resets == before.device_resets
        queue = dev.queue(dev.vm_id)
        is_well(dev, Job(dev, queue, [raw.nop()]))


@with_device(stuck=2)
@expects(HANG, STUCK_QUEUE, STUCK_ENGINES, resets=True)
def engines_that_do_not_stop_cost_a_reset() -> None:
    events = Uevents()
    with Setup(timeout_ms=300) as dev, Innocent() as other:
        before = dev.resets()
        held = Job(other, other.queue_id, [raw.wait(other.host_va + 8, 1)])
        hang(dev, lambda: dev.resets().device_resets > before.device_resets)
        assert events.next_wedged() == "none"
        other.let_go()
        is_well(other, held)
        after = dev.resets()
        assert after.engine_resets == before.engine_resets
        assert after.device_resets == before.device_resets + 1
        assert not after.wedged


@with_device(stuck=2)
@costs_the_device
def close_does_not_wait() -> None:
    """It returns while the driver still tries, for seconds, and all is given back after that."""
    with Innocent() as other:
        used, before = other.memory().hbm_used, other.resets()
        dev = Setup(timeout_ms=LONG_MS)
        job = Job(dev, dev.queue_id, [dev.run(raw.LOOP)])
        job.begun()
        fd = job.file()
        dev.close()
        assert other.resets().device_resets == before.device_resets
        assert raw.sync_file_state(fd) == 0, "not before the device is done with it"
        until(lambda: raw.sync_file_state(fd) != 0, 20, "the job is over")
        assert raw.sync_file_state(fd) == -errno.ECANCELED
        os.close(fd)
        until(lambda: other.memory().hbm_used == used, 20, "HBM is back")
        assert other.resets().device_resets == before.device_resets + 1
        is_well(other, Job(other, other.queue_id, [raw.nop()]))


@with_device(stuck=2)
@expects(HANG, STUCK_QUEUE, STUCK_ENGINES, resets=True)
def unbound_while_it_recovers() -> None:
    """And a function reset meanwhile: both wait for it, and neither is lost."""
    name = pci_device()
    with Setup(timeout_ms=200) as dev:
        fd = Job(dev, dev.queue_id, [dev.run(raw.LOOP)]).file()
        until(lambda: dev.state(dev.queue_id).status != raw.OK, 20, "it is being ended")
        Path(f"/sys/bus/pci/devices/{name}/reset").write_text("1")
        Path(DRIVER, "unbind").write_text(name)
        state = raw.sync_file_state(fd)
        os.close(fd)
    Path(DRIVER, "bind").write_text(name)
    assert state == -errno.ETIMEDOUT
    with Setup() as dev:
        dev.finish_ok([raw.nop()])


@with_device(stuck=2, reset_stuck=True)
@expects(HANG, STUCK_QUEUE, STUCK_ENGINES, STUCK_RESET, LOST, resets=True)
def a_device_that_does_not_stop_is_given_up() -> None:
    """Everybody is told. The next case finds it so."""
    events = Uevents()
    with Setup(timeout_ms=300) as dev, Innocent() as other, Driven() as third:
        held = Job(other, other.queue_id, [raw.wait(other.host_va + 8, 1)])
        idle = other.queue(other.vm_id)
        assert is_bus_master()
        hang(dev, lambda: bool(dev.resets().wedged))
        assert not is_bus_master()
        assert held.over() == -errno.ENODEV
        assert events.next_wedged() == "bus-reset"
        assert other.state(other.queue_id).status == raw.LOST
        ended(third, third.user, raw.LOST)
        assert dev.resets().wedged == 1
        with raises(errno.EIO):
            dev.queue(dev.vm_id)
        # What had nothing in flight takes nothing; what it had mapped can be given back.
        assert Job(other, idle, [raw.nop()]).over() == -errno.ECANCELED
        assert other.state(idle).status == raw.LOST
        other.unbind(other.vm_id, other.hbm_va, other.size)
        other.close_bo(other.hbm)


@case
@expects(resets=True)
def a_function_reset_brings_it_back() -> None:
    with Device() as dev:
        assert dev.resets().wedged == 1
        Path(f"/sys/bus/pci/devices/{pci_device()}/reset").write_text("1")
        assert dev.resets().wedged == 0
    with Setup() as dev:
        dev.finish_ok([raw.fill(dev.hbm_va, 64, 1)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
