# SPDX-License-Identifier: MIT
"""Queues that a process drives itself. Runs in the guest as root."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import vtpu_raw as raw
from cases import DRIVER, Setup, child_of, collector, main, module_is_idle, pci_device, until
from vtpu_raw import HBM, PAGE, Device, UserQueue, raises
from watch import expects

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
IRQ_RATE = Path("/sys/module/vtpu/parameters/irq_rate")
FAULT_BAD_COMMAND, FAULT_BAD_RING, FAULT_WATCHDOG = 9, 10, 16


class Driven(Setup):
    """A Setup that has a user queue, too."""

    def __init__(self, timeout_ms: int = 5000, size: int = 4 * PAGE) -> None:
        super().__init__(timeout_ms, size)
        try:
            self.user = UserQueue(self, self.vm_id, timeout_ms)
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        # Not there when something failed before it.
        if user := getattr(self, "user", None):
            user.unmap()
        super().close()


def is_alive(dev: Driven) -> None:
    """Both kinds of queue work."""
    dev.user.finish(raw.fill(dev.hbm_va, 8, 0x11))
    dev.finish_ok([raw.fill(dev.host_va, 8, 0x22)])
    assert dev.hbm_map[0] == 0x11 and dev.host_map[0] == 0x22


def ended(dev: Device, user: UserQueue, status: int) -> None:
    until(lambda: user.state.status != raw.OK, 30, "the queue has ended")
    assert user.state.status == status, user.state
    with raises(errno.EIO):
        user.wait(user.word + 1)


# ---- Rules ----


def mapped_at(offset: int) -> int:
    """Where this process has a place of the device file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, its_offset, _, _, *path = line.split()
        if path and "/accel" in path[0] and int(its_offset, 16) == offset:
            return int(addresses.split("-")[0], 16)
    raise AssertionError("not mapped")


def protect(address: int, rights: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), rights)
    return ctypes.get_errno() if failed else 0


@case
def arguments() -> None:
    with Setup() as dev:
        plain = dev.queue_id
        user = dev.queue(dev.vm_id, flags=raw.QUEUE_USER)
        for name, values in (("queue_map", {}), ("queue_wait", {"timeout_ns": 0})):
            with raises(errno.EINVAL):
                dev.call(name, queue_id=plain, **values)
            with raises(errno.EINVAL):
                dev.call(name, queue_id=user, pad=1, **values)
            with raises(errno.ENOENT):
                dev.call(name, queue_id=user + 5, **values)
        with raises(errno.EINVAL):
            dev.submit(user, [raw.nop()])
        with raises(errno.ETIMEDOUT):
            dev.call("queue_wait", queue_id=user, value=1, timeout_ns=raw.absolute(0.05))
        dev.call("queue_wait", queue_id=user, value=0, timeout_ns=0)


@case
def mapping_rules() -> None:
    with Driven() as dev, Driven() as other:
        at = dev.user.where
        shared, private = mmap.MAP_SHARED, mmap.MAP_PRIVATE

        def attempt(
            fd: int,
            offset: int,
            size: int,
            flags: int = shared,
            prot: int = mmap.PROT_READ,
        ) -> mmap.mmap:
            return mmap.mmap(fd, size, flags=flags, prot=prot, offset=offset)

        pieces = (
            (at.ring_offset, at.ring_bytes),
            (at.fence_offset, PAGE),
            (at.doorbell_offset, PAGE),
        )
        for offset, size in pieces:
            attempt(dev.fd, offset, size).close()
            for wrong in (size - PAGE or 2 * PAGE, size + PAGE):
                with raises(errno.EINVAL):
                    attempt(dev.fd, offset, wrong)
            with raises(errno.EINVAL):
                attempt(dev.fd, offset, size, flags=private)
            with raises(errno.EINVAL, errno.EPERM, errno.EACCES):
                attempt(dev.fd, offset, size, prot=mmap.PROT_READ | mmap.PROT_EXEC)
            # Another file's queue, and no queue at all.
            with raises(errno.EINVAL):
                attempt(other.fd, offset, size)
            with raises(errno.EINVAL):
                attempt(dev.fd, offset + (64 << 20), size)
        with raises(errno.EINVAL):
            attempt(dev.fd, at.ring_offset + PAGE, PAGE)
        with raises(errno.EACCES):
            attempt(dev.fd, at.fence_offset, PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        assert protect(mapped_at(at.fence_offset), mmap.PROT_READ) == 0
        assert protect(mapped_at(at.fence_offset), mmap.PROT_WRITE) == errno.EACCES
        dev.user.destroy()
        for offset, size in pieces:
            with raises(errno.EINVAL):
                attempt(dev.fd, offset, size)


@case
def queues_count_against_the_limit_of_the_file() -> None:
    with Setup() as dev:
        queues = [dev.queue_id]
        with raises(errno.ENOSPC):
            while True:
                queues.append(dev.queue(dev.vm_id, flags=raw.QUEUE_USER))
        assert len(queues) == 8
        dev.call("queue_destroy", queue_id=queues.pop())
        with raises(errno.EBUSY):
            dev.call("vm_destroy", vm_id=dev.vm_id)
        dev.queue(dev.vm_id, flags=raw.QUEUE_USER)


# ---- Work ----


@case
def every_command() -> None:
    with Driven() as dev:
        user = dev.user
        dev.host_map[:] = random.Random(1).randbytes(dev.size)
        user.finish(raw.copy(dev.hbm_va, dev.host_va, dev.size))
        assert dev.hbm_map[:] == dev.host_map[:]
        user.finish(
            raw.fill(dev.host_va, PAGE, 0x5A5A5A5A),
            raw.signal(dev.host_va + PAGE, 77),
            raw.wait(dev.host_va + PAGE, 77),
            raw.timestamp(dev.host_va + PAGE + 8),
            raw.nop(),
            dev.run(raw.HALT),
        )
        assert dev.host_map[:PAGE] == b"\x5a" * PAGE
        assert int.from_bytes(dev.host_map[PAGE : PAGE + 8], "little") == 77
        assert any(dev.host_map[PAGE + 8 : PAGE + 16])
        assert user.word == user.tail == user.state.completed == 7
        is_alive(dev)


@case
def round_the_ring_in_order() -> None:
    """Four rings' worth in batches: each command sees the one before it done."""
    with Driven() as dev:
        user, rng = dev.user, random.Random(3)
        total = 4 * user.num_entries
        while user.tail < total:
            for _ in range(rng.randrange(1, user.num_entries)):
                n = user.tail + 1
                user.put(
                    raw.signal(dev.host_va, n)
                    if n % 3
                    else raw.copy(dev.hbm_va + 8 * (n % 64), dev.host_va, 8)
                )
            user.ring_doorbell()
            user.wait(user.tail)
        for n in range(user.tail, user.tail - 64, -1):
            if n % 3 == 0:
                at = 8 * (n % 64)
                assert int.from_bytes(dev.hbm_map[at : at + 8], "little") == n - 1
        assert user.state.status == raw.OK


@case
def sleepers_are_woken() -> None:
    """By entries that end later, with an interrupt and without, and by each its own."""
    with Driven() as dev:
        user = dev.user
        gate = dev.host_va
        for number, flags in enumerate((raw.RING_FENCE | raw.RING_IRQ, raw.RING_FENCE)):
            user.put(raw.wait(gate, number + 1), flags)
            user.ring_doorbell()
            woken: list[int] = []

            def sleep(value: int, woken: list[int] = woken) -> None:
                user.wait(value)
                woken.append(user.word)

            threads = [threading.Thread(target=sleep, args=(user.tail,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            with raises(errno.ETIMEDOUT):
                user.wait(user.tail, 0.1)
            assert not woken
            dev.host_map[0] = number + 1
            for thread in threads:
                thread.join(20)
            assert woken == [user.tail] * 3, woken


@case
def no_wake_up_is_lost() -> None:
    """The driver looks again after a second: rarely may a waiter have needed that."""
    with Driven() as dev:
        late = 0
        for n in range(400):
            fence = dev.user.put(raw.fill(dev.hbm_va, 4 << (n % 12), n))
            dev.user.ring_doorbell()
            start = time.monotonic()
            dev.user.wait(fence)
            late += time.monotonic() - start >= 1
        assert late < 20, f"{late} of 400 waiters were woken by the clock"


@case
def polled_without_a_call() -> None:
    with Driven() as dev:
        for _ in range(100):
            fence = dev.user.put(raw.nop(), raw.RING_FENCE)
            dev.user.ring_doorbell()
            until(lambda f=fence: dev.user.word >= f, 20, "the fence word")


# ---- What a process does wrong ----


@case
def a_fault_is_its_own() -> None:
    with Driven() as dev, Driven() as other:
        dev.user.finish(raw.nop())
        dev.user.put(raw.copy(dev.hbm_va, 1 << 40, 64, cookie=91))
        dev.user.put(raw.fill(dev.host_va, 8, 1))
        dev.user.ring_doorbell()
        ended(dev, dev.user, raw.FAULTED)
        state = dev.user.state
        assert state.fault_cause == raw.FAULT_UNMAPPED and state.fault_addr == 1 << 40
        assert (state.fault_access, state.fault_cookie, state.completed) == (1, 91, 1)
        assert dev.user.word == 1 and not dev.host_map[0]
        dev.user.wait(1)  # what was reached stays reached
        # The doorbell of a queue that has ended is of no use, and does no harm.
        for tail in (3, 1 << 31, 0):
            dev.user.ring_doorbell(tail)
        is_alive(other)
        dev.finish_ok([raw.nop()])
        dev.user.destroy()
        with raises(errno.ENOENT):
            dev.state(dev.user.id)


@case
def bad_doorbells_and_entries() -> None:
    with Driven() as dev:
        spoiled = {
            FAULT_BAD_RING: (
                lambda q: q.ring_doorbell(q.num_entries + 1),
                lambda q: q.ring_doorbell(0xFFFFFFFF),
                lambda q: (q.finish(raw.nop()), q.ring_doorbell(0)),
            ),
            FAULT_BAD_COMMAND: (
                lambda q: (q.put((0, 0, 0, 0, 0, 0, 0)), q.ring_doorbell()),
                lambda q: (q.put((99, 0, 0, 0, 0, 0, 0)), q.ring_doorbell()),
                lambda q: (q.put(raw.nop(), flags=0xFF), q.ring_doorbell()),
                lambda q: (q.put((raw.NOP, 0, 1, 0, 0, 0, 0)), q.ring_doorbell()),
            ),
        }
        for cause, ways in spoiled.items():
            for way in ways:
                user = UserQueue(dev, dev.vm_id)
                way(user)
                ended(dev, user, raw.FAULTED)
                assert user.state.fault_cause == cause, (cause, user.state)
                user.destroy()
                user.unmap()
        is_alive(dev)


@case
def garbage_reaches_nobody() -> None:
    """Rings full of anything, doorbells of any number: the neighbour's memory and work stay."""
    rng = random.Random(7)
    with Driven() as dev, Driven() as other:
        pattern = rng.randbytes(other.size)
        for at in (other.host_map, other.hbm_map):
            at[:] = pattern
        addresses = (dev.host_va, dev.hbm_va, other.host_va, other.hbm_va, 1 << 47, 0, 2**64 - 64)
        for _ in range(15):
            user = UserQueue(dev, dev.vm_id, 500)
            for n in range(user.num_entries):
                kind = rng.randrange(4)
                if kind == 0:
                    user.ring[n * 64 : n * 64 + 64] = rng.randbytes(64)
                else:
                    words = [rng.choice(addresses) + rng.randrange(0, 64, 8) for _ in range(5)]
                    words[2] = rng.choice((0, 8, 64, PAGE, 1 << 62))
                    user.tail = n
                    user.put((rng.randrange(9), n, *words), rng.randrange(4), rng.getrandbits(64))
            for _ in range(rng.randrange(1, 4)):
                user.ring_doorbell(rng.choice((1, 3, 64, user.num_entries, rng.getrandbits(32))))
                user.ring[:] = rng.randbytes(len(user.ring))
            other.user.finish(raw.nop())
            user.destroy()
            user.unmap()
        assert other.host_map[:] == pattern and other.hbm_map[:] == pattern
        is_alive(other)


@case
def a_hang_is_found_and_others_go_on() -> None:
    with Driven(timeout_ms=700) as dev, Driven() as other:
        before = dev.resets()
        dev.user.put(dev.run(raw.LOOP, cookie=5))
        dev.user.put(raw.nop())
        dev.user.ring_doorbell()
        done = {"user": 0, "job": 0}
        while dev.user.state.status == raw.OK:
            other.user.finish(raw.nop())
            done["user"] += 1
            other.finish_ok([raw.nop()])
            done["job"] += 1
        # They had their turns while the other had not ended.
        assert min(done.values()) >= 3, done
        ended(dev, dev.user, raw.HUNG)
        state = dev.user.state
        assert (state.fault_cause, state.fault_cookie) == (FAULT_WATCHDOG, 5), state
        assert state.completed == 0
        assert dev.resets().device_resets == before.device_resets
        dev.finish_ok([raw.nop()])
        is_alive(other)


@case
def waiting_is_no_hang() -> None:
    """A WAIT entry has no limit, and costs nobody anything; destroying the queue ends it."""
    with Driven(timeout_ms=300) as dev, Driven() as other:
        dev.user.put(raw.wait(dev.host_va, 1))
        dev.user.ring_doorbell()
        with raises(errno.ETIMEDOUT):
            dev.user.wait(1, 1.5)
        assert dev.user.state.status == raw.OK
        is_alive(other)
        dev.host_map[0] = 1
        dev.user.wait(1)


@case
def a_buffer_unmapped_too_early() -> None:
    with Driven(timeout_ms=20000) as dev, Driven() as other:
        spare = dev.bo(PAGE, HBM)
        va = dev.hbm_va + (1 << 20)
        dev.bind(dev.vm_id, spare, va, PAGE)
        used = dev.memory().hbm_used
        for _ in range(dev.user.num_entries - 1):
            dev.user.put(raw.copy(va, dev.hbm_va, PAGE))
        dev.user.put(raw.wait(va, 1))
        dev.user.ring_doorbell()
        dev.close_bo(spare)
        assert dev.memory().hbm_used == used, "mapped, so it lives"
        dev.unbind(dev.vm_id, va, PAGE)
        assert dev.memory().hbm_used < used
        ended(dev, dev.user, raw.FAULTED)
        assert dev.user.state.fault_addr in range(va, va + PAGE)
        is_alive(other)


def interrupts_taken() -> int:
    """By the kernel, of all vectors of the driver."""
    lines = Path("/proc/interrupts").read_text().splitlines()
    counts = [line.split()[1:-3] for line in lines if line.endswith("vtpu")]
    return sum(int(count) for line in counts for count in line if count.isdigit())


@contextmanager
def one_interrupt_a_tick() -> Iterator[Callable[[], int]]:
    """Is all that a vector may send, then it is masked: how often, the driver's trace says."""
    usual, trace = IRQ_RATE.read_text(), Path("/sys/kernel/tracing/instances/driver-tests")
    trace.mkdir()
    (trace / "events/vtpu/vtpu_irq_masked/enable").write_text("1")
    IRQ_RATE.write_text("1")
    # The tick that has begun allows more.
    time.sleep(0.05)
    try:
        yield lambda: (trace / "trace").read_text().count("vtpu_irq_masked:")
    finally:
        IRQ_RATE.write_text(usual)
        trace.rmdir()


@case
def interrupts_are_moderated() -> None:
    """Of entries that all interrupt the processor is not drowned in them, nor is it deaf after."""
    most_a_ms, ticks_ms, rounds = 1, 2 * 10, 10
    with Driven(timeout_ms=60000) as dev, one_interrupt_a_tick() as masked:
        user = dev.user
        for _ in range(user.num_entries):
            user.put(raw.nop(), fence=1)
        before, start = interrupts_taken(), time.monotonic()
        for number in range(1, rounds + 1):
            user.tail -= 1
            last = user.put(raw.nop(), fence=1 + number)
            user.ring_doorbell()
            user.wait(last, seconds=40)
            user.tail += user.num_entries
        passed_ms = (time.monotonic() - start) * 1000
        assert 0 < interrupts_taken() - before <= most_a_ms * (passed_ms + ticks_ms), passed_ms
        until(lambda: masked() == interrupts_taken() - before, 10, "each was masked after")
        user.tail -= user.num_entries
        for _ in range(3):
            before = interrupts_taken()
            user.finish(raw.nop())
            until(lambda before=before: interrupts_taken() > before, 20, "its interrupt")
        is_alive(dev)


# ---- Ends ----


def shows_nothing(user: UserQueue) -> None:
    """Its mappings read zero; writing to them does no harm, and is forgotten."""
    assert user.word == 0 and user.fence[:] == bytes(PAGE)
    assert user.ring[:] == bytes(len(user.ring)) and user.doorbell[:] == bytes(PAGE)
    user.ring_doorbell(123)
    user.ring[:4] = b"gone"
    assert user.fence[:] == bytes(PAGE)


@case
def what_is_left_may_be_made_writable() -> None:
    """By who could only read it when he touched it; everybody's page of zeroes is not."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    with Driven() as dev:
        where = dev.user.where
        views = [
            libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, dev.fd, offset)
            for size, offset in (
                (where.ring_bytes, where.ring_offset),
                (PAGE, where.doorbell_offset),
            )
        ]
        dev.user.destroy()
        assert [ctypes.string_at(view, 8) for view in views] == [bytes(8)] * 2
        for view in views:
            assert libc.mprotect(view, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
            ctypes.memset(view, 0xDB, PAGE)
        untouched = mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        assert untouched[:] == bytes(PAGE)
        for view, size in zip(views, (where.ring_bytes, PAGE), strict=True):
            assert libc.munmap(ctypes.c_void_p(view), ctypes.c_size_t(size)) == 0
        dev.user.unmap()


@case
def destroyed_while_it_works() -> None:
    """Its mappings lead nowhere, least of all to the hardware's next owner."""
    with Driven(timeout_ms=30000) as dev:
        dev.user.put(dev.run(raw.LOOP))
        dev.user.ring_doorbell()
        woken: list[int] = []

        def sleep() -> None:
            with raises(errno.EIO):
                dev.user.wait(1)
            woken.append(1)

        sleeper = threading.Thread(target=sleep)
        sleeper.start()
        with raises(errno.ETIMEDOUT):
            dev.user.wait(1, 0.1)
        dev.user.destroy()
        sleeper.join(20)
        assert woken
        shows_nothing(dev.user)
        successors = [UserQueue(dev, dev.vm_id) for _ in range(6)]
        # One of them has the same hardware, and so the same place.
        assert dev.user.where.ring_offset in [s.where.ring_offset for s in successors]
        for value in (1, 0xFFFF, 0xFFFFFFFF):
            dev.user.ring_doorbell(value)
            dev.user.ring[:] = b"\xff" * len(dev.user.ring)
        for successor in successors:
            assert successor.ring[:] == bytes(len(successor.ring)), "a ring begins empty"
            successor.finish(raw.fill(dev.host_va, 8, 1))
            successor.unmap()


@case
def a_killed_process_leaves_nothing() -> None:
    with Device() as dev:
        used = dev.memory().hbm_used

        def work() -> None:
            mine = Driven(timeout_ms=30000)
            mine.user.put(mine.run(raw.LOOP))
            mine.user.ring_doorbell()
            held = UserQueue(mine, mine.vm_id)
            held.put(raw.wait(mine.host_va, 1))
            held.ring_doorbell()

        for _ in range(dev.info().num_queues // 2):
            child, pipe = child_of(work)
            assert os.read(pipe, 1) == b"k"
            os.close(pipe)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        until(lambda: dev.memory().hbm_used == used, 10, "HBM is back")
        with Driven() as after:
            is_alive(after)
    until(module_is_idle, 10, "nothing holds the module")


@case
def a_child_has_no_part_in_it() -> None:
    with Driven() as dev:
        for touch in (
            lambda: dev.user.ring_doorbell(1),
            lambda: dev.user.word,
            lambda: dev.user.ring[:1],
        ):
            child = os.fork()
            if not child:
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                touch()
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV, status
        is_alive(dev)


@case
def closed_with_mappings_left() -> None:
    """They hold the file open; when the last one goes, all is over."""
    dev = Driven()
    is_alive(dev)
    for view in dev.maps:
        view.close()
    os.close(dev.fd)
    dev.fd = -1
    fence = dev.user.put(raw.nop())
    dev.user.ring_doorbell()
    until(lambda: dev.user.word >= fence, 20, "it still works")
    dev.user.unmap()
    until(module_is_idle, 10, "nothing holds the module")


@case
@expects(resets=True)
def a_function_reset_ends_it() -> None:
    path = Path(f"/sys/bus/pci/devices/{pci_device()}/reset")
    with Driven() as dev:
        is_alive(dev)
        dev.user.put(raw.wait(dev.host_va + 64, 1))
        dev.user.ring_doorbell()
        path.write_text("1")
        ended(dev, dev.user, raw.LOST)
        dev.user.ring_doorbell(99)
        # The idle job queue goes on, and a new user queue works.
        dev.finish_ok([raw.nop()])
        successor = UserQueue(dev, dev.vm_id)
        successor.finish(raw.fill(dev.host_va, 8, 3))
        assert dev.host_map[0] == 3
        successor.unmap()


@case
def an_unplug_ends_it() -> None:
    name = pci_device()
    dev = Driven()
    try:
        is_alive(dev)
        dev.user.put(raw.wait(dev.host_va + 64, 1))
        dev.user.ring_doorbell()
        ends: list[int] = []

        def sleep() -> None:
            try:
                dev.user.wait(dev.user.tail)
            except OSError as error:
                ends.append(error.errno or 0)

        sleeper = threading.Thread(target=sleep)
        sleeper.start()
        with raises(errno.ETIMEDOUT):
            dev.user.wait(dev.user.tail, 0.1)
        Path(DRIVER, "unbind").write_text(name)
        sleeper.join(20)
        assert ends in ([errno.EIO], [errno.ENODEV]), ends
        shows_nothing(dev.user)
        with raises(errno.ENODEV):
            dev.user.wait(1)
        with raises(errno.ENODEV, errno.EINVAL):
            mmap.mmap(dev.fd, PAGE, offset=dev.user.where.doorbell_offset)
    finally:
        Path(DRIVER, "bind").write_text(name)
        dev.close()
    with Driven() as after:
        is_alive(after)
    until(module_is_idle, 10, "nothing holds the module")


@case
def comings_and_goings() -> None:
    """Threads that create, use, touch and destroy user queues at once."""
    stop = time.monotonic() + 4
    problems: list[str] = []
    counts = [0] * 3

    def churn(number: int) -> None:
        rng = random.Random(number)
        try:
            while time.monotonic() < stop:
                with Setup() as dev:
                    for _ in range(4):
                        user = UserQueue(dev, dev.vm_id)
                        for n in range(rng.randrange(1, 40)):
                            user.put(raw.fill(dev.hbm_va, 8, n))
                        user.ring_doorbell()
                        if rng.randrange(2):
                            user.wait(user.tail)
                        toucher = threading.Thread(
                            target=lambda u=user: [u.ring_doorbell(u.tail) for _ in range(50)]
                        )
                        toucher.start()
                        user.destroy()
                        toucher.join()
                        user.unmap()
                        counts[number] += 1
        except BaseException as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=churn, args=(n,)) for n in range(len(counts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems
    assert all(counts), counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
