# SPDX-License-Identifier: MIT
"""Every allocation and every copy of each call fails once. Runs in the guest, as root, on a
kernel with fault injection.

The path of a call is gone again and again, with its 1st, 2nd, 3rd... chance of a failure failing
(Documentation/fault-injection), until it ends without having met that many. Each time it
succeeds or raises the error of what failed, and leaves nothing behind. On threads of the driver
every so many fail.
"""

from __future__ import annotations

import errno
import glob
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import cases
import fault_injection as faults
import vtpu_raw as raw
from cases import VA, Setup, collector, main, pci_device, until
from dmabuf_cases import export, import_, udmabuf
from fault_injection import each_failure
from hang_cases import debugfs
from lifecycle_cases import everything_readable
from memory_cases import Client, pages_of
from power_cases import falls_asleep, light_sleeper, tell
from userptr_cases import Memory, pinned
from userq_cases import Driven
from vtpu_raw import HBM, HUGE, PAGE, READ, SYNC_SIGNAL, SYNC_TIMELINE, WRITE, Device, UserQueue
from watch import HANG, Expected, expects

CASES: dict[str, Callable[[], None]] = {}
collect = collector(CASES)


def case(function: Callable[[], None]) -> Callable[[], None]:
    """What the allocators say is expected of all."""
    expected = getattr(function, "expected", Expected())
    expects(*faults.SAID, *expected.messages, resets=expected.resets)(function)
    return collect(function)


# ---- What is left ----


def has() -> list[str]:
    """What anybody has of the device."""
    files = [debugfs(name) for name in ("queues", "contexts", "dma")]
    files.append(Path("/sys/bus/pci/devices", pci_device(), "hbm_used"))
    return [file.read_text() for file in files]


def descriptors() -> set[int]:
    listed = os.listdir("/proc/self/fd")  # the list's own, too
    return {int(number) for number in listed if os.path.lexists(f"/proc/self/fd/{number}")}


@contextmanager
def nothing_left() -> Iterator[None]:
    before = has(), pinned(), descriptors()
    yield
    until(lambda: has() == before[0], 20, "all is given back")
    assert (pinned(), descriptors()) == before[1:]


@contextmanager
def lost_descriptors() -> Iterator[None]:
    """Whose number could not be copied to who asked for them; the process has them."""
    before = descriptors()
    yield
    for number in descriptors() - before:
        os.close(number)


# ---- Files and buffers ----


@case
def open_and_close() -> None:
    node = raw.node()
    with nothing_left():
        assert each_failure(lambda: os.open(node, os.O_RDWR), os.close)


@case
def queries() -> None:
    with nothing_left(), Device() as dev:
        for query in dev.info, dev.memory, dev.resets, lambda: dev.counters(0, [1, 2]):
            assert each_failure(query)


@case
def buffers() -> None:
    with nothing_left(), Device() as dev:
        for size, flags in (PAGE, 0), (PAGE, HBM), (3 << 20, HBM):
            assert each_failure(lambda size=size, flags=flags: dev.bo(size, flags), dev.close_bo)
            handle = dev.bo(size, flags)
            assert each_failure(lambda handle=handle: dev.call("bo_info", handle=handle))
            assert each_failure(lambda handle=handle: dev.call("bo_wait", handle=handle))
            dev.close_bo(handle)


@case
def mappings_of_buffers() -> None:
    """mmap, and the page faults of the kernel's own copy to it."""
    with nothing_left(), Device() as dev, open("/dev/zero", "rb", buffering=0) as zero:
        for size, flags in (2 * PAGE, 0), (2 * PAGE, HBM), (2 * HUGE, HBM):
            handle = dev.bo(size, flags)
            assert each_failure(lambda handle=handle: dev.map(handle), mmap.mmap.close)

            def touch(handle: int = handle) -> None:
                with dev.map(handle) as view:
                    zero.readinto(memoryview(view)[: 2 * PAGE])

            assert each_failure(touch)
            dev.close_bo(handle)


@case
def memory_of_a_process() -> None:
    with nothing_left(), Device() as dev:
        memory = Memory(8 * PAGE)
        memory.view[:] = bytes(memory.size)
        assert each_failure(lambda: dev.userptr(memory.addr, memory.size), dev.close_bo)


class Fresh:
    """A buffer that is made anew each time, as some of what is done to it stays done."""

    def __init__(self, dev: Device, make: Callable[[], int]) -> None:
        self.dev, self.make, self.handle = dev, make, 0

    def renew(self) -> None:
        self.drop()
        self.handle = self.make()

    def drop(self) -> None:
        if self.handle:
            self.dev.close_bo(self.handle)
        self.handle = 0


@case
def dma_bufs() -> None:
    """Ours, and those of others."""
    with nothing_left(), Device() as dev, Device() as other:
        for flags in 0, HBM:
            fresh = Fresh(dev, lambda flags=flags: dev.bo(4 * PAGE, flags))

            def give(fresh: Fresh = fresh) -> int:
                return export(dev, fresh.handle)

            with lost_descriptors():
                assert each_failure(give, os.close, before=fresh.renew)
            fd = give()
            assert each_failure(lambda fd=fd: import_(other, fd), other.close_bo)
            assert each_failure(lambda fd=fd: mmap.mmap(fd, 4 * PAGE), mmap.mmap.close)
            os.close(fd)
            fresh.drop()
        fd, view = udmabuf([(0, 2 * PAGE), (4 * PAGE, PAGE)], 8 * PAGE)
        with view:
            assert each_failure(lambda: import_(dev, fd), dev.close_bo)
        os.close(fd)


# ---- Address spaces ----


@case
def address_spaces() -> None:
    with nothing_left(), Device() as dev:
        assert each_failure(dev.vm, lambda vm: dev.call("vm_destroy", vm_id=vm))
        left = dev.vm()

        def destroy() -> None:
            dev.call("vm_destroy", vm_id=left)

        def make(_: None) -> None:
            nonlocal left
            left = dev.vm()

        assert each_failure(destroy, make)


@case
def bindings() -> None:
    """With tables all the way down, in small pages and huge ones; of all kinds of memory."""
    with nothing_left(), Device() as dev, ExitStack() as stack:
        vm, memory = dev.vm(), Memory(4 * PAGE)
        fd, view = udmabuf([(PAGE, PAGE), (4 * PAGE, PAGE)], 8 * PAGE)
        stack.callback(os.close, fd)
        stack.enter_context(view)
        for size, make in (
            (2 * PAGE, lambda: dev.bo(2 * PAGE)),
            (2 * PAGE, lambda: dev.bo(2 * PAGE, HBM)),
            (2 * HUGE, lambda: dev.bo(2 * HUGE, HBM)),
            (memory.size, lambda: dev.userptr(memory.addr, memory.size)),
            (2 * PAGE, lambda: import_(dev, fd)),
        ):
            fresh = Fresh(dev, make)

            def map_it(_: object = None, fresh: Fresh = fresh, size: int = size) -> None:
                dev.bind(vm, fresh.handle, VA, size, READ | WRITE)

            def unmap(_: object = None, size: int = size) -> None:
                dev.unbind(vm, VA, size)

            assert each_failure(map_it, unmap, before=fresh.renew)
            map_it()
            assert each_failure(unmap, map_it)
            fresh.drop()
            unmap()


# ---- Queues and jobs ----


@case
def queues() -> None:
    with nothing_left(), Device() as dev:
        vm = dev.vm()

        def destroy(queue: int) -> None:
            dev.call("queue_destroy", queue_id=queue)

        for flags in 0, raw.QUEUE_USER:

            def make(flags: int = flags) -> int:
                return dev.queue(vm, flags=flags)

            assert each_failure(make, destroy)
            made = [make()]
            assert each_failure(lambda made=made: dev.state(made[0]))
            assert each_failure(lambda made=made: dev.counters(made[0], [1, 2, 3, 4]))

            def end(made: list[int] = made) -> None:
                destroy(made[0])

            def again(_: object, made: list[int] = made, make: Callable[[], int] = make) -> None:
                made[0] = make()

            assert each_failure(end, again)
            end()


@case
def user_queues() -> None:
    """Their places in the device's file, and what a process finds there."""
    with nothing_left(), Device() as dev, open("/dev/zero", "rb", buffering=0) as zero:
        queue = UserQueue(dev, dev.vm())
        where = queue.where
        assert each_failure(lambda: dev.call("queue_map", queue_id=queue.id))
        for size, offset in (where.ring_bytes, where.ring_offset), (PAGE, where.doorbell_offset):

            def place(size: int = size, offset: int = offset) -> mmap.mmap:
                return mmap.mmap(dev.fd, size, offset=offset)

            assert each_failure(place, mmap.mmap.close)

            def write(place: Callable[[], mmap.mmap] = place) -> None:
                with place() as view, memoryview(view)[64:128] as part:
                    zero.readinto(part)

            assert each_failure(write) > 2
        queue.finish(raw.nop())
        assert each_failure(lambda: queue.wait(1))
        queue.unmap()

        def write_into_what_is_left() -> None:
            with memoryview(left)[64:128] as part:
                zero.readinto(part)

        with place() as left:
            queue.destroy()
            each_failure(write_into_what_is_left)


@case
def jobs() -> None:
    """SUBMIT with everything that it takes; one that succeeds has done its work."""
    with nothing_left(), Setup() as dev:
        done, line, before = dev.syncobj(), dev.syncobj(), dev.syncobj(signaled=True)
        point = 0
        job = [raw.fill(dev.hbm_va, PAGE, 7), raw.copy(dev.host_va, dev.hbm_va, 8)]

        def submit() -> None:
            signals = (done, SYNC_SIGNAL, 0), (line, SYNC_SIGNAL | SYNC_TIMELINE, point + 1)
            dev.submit(dev.queue_id, job, [(before, 0, 0), *signals])

        def finished(_: object) -> None:
            nonlocal point
            point += 1
            dev.wait(done)
            dev.wait_point(line, point)
            assert dev.fence_error(done) == 1 and dev.host_map[0] == 7
            dev.host_map[0] = 0

        assert each_failure(submit, finished)
        dev.finish_ok([dev.run(raw.HALT)])


@case
@expects(HANG)
def what_serves_jobs_needs_no_memory() -> None:
    """The driver's own threads start them, look after them and end the one that hangs."""
    with nothing_left():
        for function in ("vtpu_run_job", "vtpu_timedout_job", "vtpu_userq_watch"):
            with Driven() as dev, faults.every_nth_below(function, slab=1, page=1):
                hangs = dev.queue(dev.vm_id, 300)
                for number in range(50):
                    dev.finish_ok([raw.fill(dev.hbm_va, 8, number)])
                    dev.user.finish(raw.nop())
                assert dev.finish(hangs, [dev.run(raw.LOOP)]) == -errno.ETIMEDOUT
                dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, 8)])
                dev.user.finish(raw.nop())


@case
def jobs_that_fault() -> None:
    """A core dump is there or not; its job's file ends at once, and leaves nothing."""
    dumps, times = 0, 40
    # Which frees a dump twice when its device cannot be added (Linux 6.12).
    but = "dev_coredumpm_timeout"
    with (
        nothing_left(),
        faults.every_nth_below("vtpu_coredump_work", slab=11, page=1009, but=but),
    ):
        for _ in range(times):
            with Setup() as dev:
                assert dev.finish(dev.queue_id, [dev.run(raw.trap(1))]) == -errno.EFAULT
            for path in glob.glob("/sys/class/devcoredump/devcd*/data"):
                tell(path, "0")
                dumps += 1
    assert 0 < dumps < times, dumps


@case
def files_that_are_closed_with_everything() -> None:
    """What ends them needs no memory."""
    with nothing_left(), faults.every_nth_below("vtpu_file_end", slab=1, page=1):
        for _ in range(5):
            with Driven() as dev:
                dev.submit(dev.queue_id, [raw.wait(dev.host_va, 1)])
                dev.submit(dev.queue_id, [raw.nop()])


# ---- HBM that is short ----


@case
def eviction() -> None:
    """A buffer leaves HBM for another one, and comes back for a job or a process, as it was."""
    size = 8 * PAGE
    with nothing_left(), Device() as owner, Client() as dev:
        # Room is left for two buffers, by one that cannot leave.
        total = owner.memory().hbm_bytes
        rest = total - total // 256 - 2 * size
        vm = owner.vm()
        owner.queue(vm, flags=raw.QUEUE_USER)
        owner.bind(vm, owner.bo(rest, HBM), VA, rest)
        data = {dev.bo(size, HBM): pages_of(n, size) for n in range(2)}
        for handle, its in data.items():
            dev.write(handle, its)
            dev.place(handle, size)

        def all_in() -> None:
            """Whatever a call made whose answer could not be copied goes with its file."""
            nonlocal maker
            maker.close()
            maker = Device()
            dev.finish_ok([raw.nop()])
            assert dev.memory().hbm_evicted == 0

        def is_one_out(_: int) -> None:
            """The other one, if the first had no memory to leave to."""
            assert dev.memory().hbm_evicted == size

        def one_out() -> None:
            with Device() as other:
                other.bo(size, HBM)
            assert dev.memory().hbm_evicted == size

        def read() -> None:
            """Into a file, which has the kernel read it."""
            for handle in data:
                with dev.map(handle) as view:
                    os.pwrite(null, view, 0)

        maker = Device()
        assert each_failure(lambda: maker.bo(size, HBM), undo=is_one_out, before=all_in)
        maker.close()
        assert each_failure(lambda: dev.submit(dev.queue_id, [raw.nop()]), before=one_out)
        with open("/tmp/failures", "wb") as file:
            null = file.fileno()
            assert each_failure(read, before=one_out)
        for handle, its in data.items():
            assert dev.read(handle) == its


# ---- The device sleeps, is looked at and is reset ----


@case
def waking() -> None:
    with light_sleeper(), nothing_left(), Setup() as dev:

        def job() -> None:
            dev.submit(dev.queue_id, [raw.nop()])

        def counters() -> None:
            dev.counters(0, [1])

        for use in job, counters:
            assert each_failure(use, before=falls_asleep)
        dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, 8)])


@case
def whatever_is_read() -> None:
    with nothing_left(), Driven() as dev:
        dev.finish_ok([raw.nop()])
        for path in [*everything_readable(pci_device()), f"/proc/self/fdinfo/{dev.fd}"]:

            def read(path: str = path) -> None:
                with open(path, "rb", buffering=0) as file:
                    file.read(1 << 16)

            try:
                read()
            except OSError:
                continue
            each_failure(read)


@case
@expects(resets=True)
def resets_on_demand() -> None:
    with nothing_left(), Setup() as dev:
        for path in debugfs("reset_device"), Path("/sys/bus/pci/devices", pci_device(), "reset"):
            each_failure(lambda path=path: tell(str(path), "1"))
            dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, 8)])


if __name__ == "__main__":
    if not faults.is_possible():
        sys.exit("this kernel has no fault injection")
    faults.prepare()
    cases.CASE_SECONDS = 3600  # the kernels that have it are slow
    sys.exit(main(sys.argv[1:], CASES))
