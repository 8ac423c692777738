# SPDX-License-Identifier: MIT
"""HBM that is short: eviction, and coming back. Runs in a guest with little of it, as root."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import vtpu_raw as raw
from cases import VA, collector, main, until
from userptr_cases import as_user
from vtpu_raw import HBM, HUGE, PAGE, SYNC_SIGNAL, Device, raises

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
MIB = 1 << 20
STRIDE = 1 << 32
CGROUPS = "/sys/fs/cgroup"


def share(dev: Device, part: float) -> int:
    """Bytes: a part of HBM, in whole pages."""
    return int(dev.memory().hbm_bytes * part) // PAGE * PAGE


@functools.cache
def numbered(size: int) -> bytes:
    return b"".join(page.to_bytes(8, "little") * (PAGE // 8) for page in range(size // PAGE))


def pages_of(seed: int, size: int) -> bytes:
    """Each page says which it is; the first is number seed, modulo their number."""
    return numbered(size)[seed * PAGE :] + numbered(size)[: seed * PAGE]


class User(Device):
    def write(self, handle: int, data: bytes) -> None:
        with self.map(handle) as view:
            view[:] = data

    def read(self, handle: int) -> bytes:
        with self.map(handle) as view:
            return view[:]


class Client(User):
    """A file with an address space, a queue, and a page of system memory at VA."""

    def __init__(self) -> None:
        super().__init__()
        self.vm_id = self.vm()
        self.queue_id = self.queue(self.vm_id)
        self.host = self.bo(PAGE)
        self.bind(self.vm_id, self.host, VA, PAGE)
        self.page = self.map(self.host)
        self.free = VA

    def close(self) -> None:
        self.page.close()
        super().close()

    def place(self, handle: int, size: int) -> int:
        """Binds it at an address that is free."""
        self.free += STRIDE
        self.bind(self.vm_id, handle, self.free, size)
        return self.free

    def finish_ok(self, commands: list) -> None:
        got = self.finish(self.queue_id, commands, seconds=40)
        assert got == 1, f"fence {got}, state {self.state(self.queue_id)}"

    def word(self, va: int) -> int:
        """As the device reads it."""
        self.finish_ok([raw.copy(VA + 8, va, 8)])
        return int.from_bytes(self.page[8:16], "little")


def push_out(dev: Device) -> None:
    """Everything that is not in use leaves HBM."""
    before = dev.memory().evictions
    with Device() as other:
        other.bo(share(other, 254 / 256), HBM)
    assert dev.memory().evictions > before


@contextmanager
def processes(works: list[Callable[[], None]]) -> Iterator[None]:
    """Each in a process of its own; all of them must end well."""
    children = []
    for work in works:
        child = os.fork()
        if not child:
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    try:
        yield
        results = [os.waitpid(children.pop(0), 0)[1] for _ in range(len(children))]
        assert not any(results), results
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# ---- Contents ----


@case
def more_buffers_than_hbm() -> None:
    """Twice as much, written and read by the processor alone."""
    with Device() as dev:
        used = dev.memory()
        size = used.hbm_bytes // 8
        handles = [dev.bo(size, HBM) for _ in range(16)]
        views = [dev.map(handle) for handle in handles]
        for seed, view in enumerate(views):
            view[:] = pages_of(seed, size)
        now = dev.memory()
        assert now.hbm_used <= now.hbm_bytes
        assert now.hbm_evicted >= used.hbm_bytes
        assert now.hbm_evicted + now.hbm_used - used.hbm_used == size * len(handles)
        for seed, view in enumerate(views):
            assert view[:] == pages_of(seed, size), seed
            view.close()
        for handle in handles:
            dev.close_bo(handle)
        end = dev.memory()
        assert (end.hbm_used, end.hbm_evicted) == (used.hbm_used, used.hbm_evicted)


@case
def a_mapping_lives_through_eviction() -> None:
    size = 3 * MIB
    with Client() as dev:
        handle = dev.bo(size, HBM)
        va = dev.place(handle, size)
        with dev.map(handle) as view:
            view[:] = pages_of(7, size)
            push_out(dev)
            assert dev.memory().hbm_evicted >= size
            assert view[:] == pages_of(7, size)
            assert dev.memory().hbm_evicted < size
            view[PAGE : PAGE + 8] = b"by hand!"
            push_out(dev)
            # The device reads what the processor wrote, and the other way round.
            assert dev.word(va + PAGE) == int.from_bytes(b"by hand!", "little")
            assert dev.word(va + size - 8) == 6
            dev.finish_ok([raw.fill(va + 2 * PAGE, PAGE, 0x1234)])
            push_out(dev)
            assert view[2 * PAGE : 3 * PAGE] == (0x1234).to_bytes(4, "little") * (PAGE // 4)
            assert view[PAGE : PAGE + 8] == b"by hand!"


@case
def a_dma_buf_lives_through_eviction() -> None:
    """Mapped by its own descriptor, and used by another file that has it from there."""
    size = 3 * MIB
    with Client() as one, Client() as two:
        handle = one.bo(size, HBM)
        fd = one.call("prime_handle_to_fd", handle=handle, flags=os.O_RDWR | os.O_CLOEXEC).fd
        va = two.place(two.call("prime_fd_to_handle", fd=fd).handle, size)
        with mmap.mmap(fd, size) as view:
            os.close(fd)
            view[:] = pages_of(3, size)
            push_out(one)
            assert one.memory().hbm_evicted >= size
            assert view[:] == pages_of(3, size)
            push_out(one)
            assert two.word(va + PAGE) == 4
            two.finish_ok([raw.fill(va, PAGE, 0x55)])
            push_out(one)
            assert view[:4] == b"\x55\0\0\0" and view[PAGE] == 4


@case
def a_buffer_in_two_address_spaces() -> None:
    """Parts of it, at other addresses, bound before and while it is out."""
    size = 4 * MIB
    with Client() as dev:
        handle = dev.bo(size, HBM)
        dev.write(handle, pages_of(3, size))
        one = dev.place(handle, size)
        vm = dev.vm()
        queue = dev.queue(vm)
        dev.bind(vm, dev.host, VA, PAGE)
        dev.bind(vm, handle, VA + STRIDE, 2 * MIB, offset=2 * MIB)
        push_out(dev)
        dev.bind(vm, handle, VA + 2 * STRIDE, MIB, offset=MIB)
        unused = dev.place(handle, size)
        dev.unbind(dev.vm_id, unused, size)
        for va, offset in ((VA + STRIDE, 2 * MIB), (VA + 2 * STRIDE, MIB)):
            assert dev.finish(queue, [raw.copy(VA, va, 8)]) == 1
            assert int.from_bytes(dev.page[:8], "little") == 3 + offset // PAGE
        assert dev.word(one + PAGE) == 4


@case
def what_is_new_is_zero() -> None:
    """Though it gets the place of what was evicted."""
    with User() as dev:
        size = share(dev, 0.5)
        old = dev.bo(size, HBM)
        dev.write(old, b"\xa5" * size)
        for _ in range(2):
            new = dev.bo(size, HBM)
            assert dev.read(new) == bytes(size)
        assert dev.read(old) == b"\xa5" * size


# ---- Jobs ----


def worker(number: int, rounds: int) -> None:
    """Jobs over six tenths of HBM, compared with what they are to do."""
    rng = [number * 7919 + 1]

    def draw(limit: int) -> int:
        rng[0] = (rng[0] * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (rng[0] >> 33) % limit

    with Client() as dev:
        size = share(dev, 0.2)
        handles = [dev.bo(size, HBM) for _ in range(3)]
        vas = [dev.place(handle, size) for handle in handles]
        pages: dict[tuple[int, int], int] = {}
        for number_of_job in range(rounds):
            commands = []
            for _ in range(8):
                to = (draw(3), draw(size // PAGE))
                source = (draw(3), draw(size // PAGE))
                if draw(2) or to == source:
                    pages[to] = number << 16 | number_of_job
                    commands.append(raw.fill(vas[to[0]] + to[1] * PAGE, PAGE, pages[to]))
                else:
                    pages[to] = pages.get(source, 0)
                    where = (vas[to[0]] + to[1] * PAGE, vas[source[0]] + source[1] * PAGE)
                    commands.append(raw.copy(*where, PAGE))
            dev.finish_ok(commands)
        for index, handle in enumerate(handles):
            with dev.map(handle) as view:
                for page in range(size // PAGE):
                    want = pages.get((index, page), 0).to_bytes(4, "little")
                    got = view[page * PAGE : (page + 1) * PAGE]
                    assert got == want * (PAGE // 4), (number, index, page)


@case
def processes_take_hbm_from_each_other() -> None:
    with Device() as dev:
        before = dev.memory()
        with processes([lambda n=n: worker(n, 6) for n in range(1, 5)]):
            pass
        after = dev.memory()
        assert after.evictions - before.evictions >= 6, after
        until(lambda: dev.memory().hbm_used == before.hbm_used, 5, "HBM is back")
        assert dev.memory().hbm_evicted == before.hbm_evicted
        assert dev.resets().device_resets == 0


@case
def what_is_mapped_amid_jobs_is_there_for_them() -> None:
    """A buffer that was out, and in no address space, for a job that is in line already."""
    with Client() as dev, User() as other:
        size = share(dev, 0.5)
        handle = dev.bo(size, HBM)
        dev.write(handle, pages_of(5, size))
        other.bo(share(dev, 0.75), HBM)
        assert dev.memory().hbm_evicted == size
        sync, va = dev.syncobj(), dev.free + STRIDE
        job = [raw.wait(VA, 2), raw.copy(VA + 8, va + size - 8, 8)]
        dev.submit(dev.queue_id, job, [(sync, SYNC_SIGNAL, 0)])
        assert dev.place(handle, size) == va
        dev.page[0] = 2
        dev.wait(sync)
        assert dev.fence_error(sync) == 1, dev.state(dev.queue_id)
        assert dev.page[8:16] == pages_of(5, size)[-8:]


@case
def a_job_keeps_what_it_uses() -> None:
    """Who needs its place waits for it, and holds up nobody meanwhile."""
    with Client() as dev:
        size = share(dev, 0.7)
        handle = dev.bo(size, HBM)
        dev.write(handle, pages_of(5, size))
        va = dev.place(handle, size)
        sync = dev.syncobj()
        job = [raw.wait(VA, 2), raw.copy(VA + 8, va + size - 8, 8)]
        dev.submit(dev.queue_id, job, [(sync, SYNC_SIGNAL, 0)])
        evictions = dev.memory().evictions
        problems: list[BaseException] = []

        def taker() -> None:
            try:
                with Device() as other:
                    other.bo(size, HBM)
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=taker)
        thread.start()
        # Jobs of the address space go on being submitted, or it would never end.
        second = dev.queue(dev.vm_id)
        for value in (1, 2):
            thread.join(0.5)
            assert thread.is_alive() and dev.memory().evictions == evictions
            dev.submit(second, [raw.signal(VA, value)])
        dev.wait(sync)
        assert dev.fence_error(sync) == 1
        assert int.from_bytes(dev.page[8:16], "little") == 4
        thread.join(30)
        assert not thread.is_alive() and not problems, problems
        assert dev.memory().evictions == evictions + 1
        assert dev.word(va) == 5


@case
def jobs_that_do_not_end_keep_it() -> None:
    with Client() as dev:
        size = share(dev, 0.7)
        va = dev.place(dev.bo(size, HBM), size)
        queue = dev.queue(dev.vm_id, timeout_ms=60000)
        dev.submit(queue, [raw.wait(va, 1)])
        with Device() as other, raises(errno.ENOSPC):
            other.bo(size, HBM)
        assert dev.state(queue).status == raw.OK


# ---- What does not fit ----


@case
def more_in_one_address_space_than_hbm() -> None:
    with Client() as dev:
        with raises(errno.ENOSPC):
            dev.bo(dev.memory().hbm_bytes, HBM)
        size = share(dev, 0.4)
        vas = [dev.place(dev.bo(size, HBM), size) for _ in range(3)]
        evictions = dev.memory().evictions
        for _ in range(3):
            with raises(errno.ENOSPC):
                dev.submit(dev.queue_id, [raw.nop()])
        # It is known beforehand: nothing is moved for it.
        assert dev.memory().evictions == evictions
        dev.unbind(dev.vm_id, vas[1], size)
        dev.finish_ok([raw.fill(vas[0], 64, 1), raw.fill(vas[2], 64, 2)])
        assert dev.state(dev.queue_id).status == raw.OK


@case
def buffers_in_each_others_way() -> None:
    """Together they just fit into HBM, but not into what is left between them."""
    with Client() as dev:
        sizes = share(dev, 6 / 16), share(dev, 6 / 16), share(dev, 3.5 / 16)
        x = dev.bo(sizes[0], HBM)
        middle = dev.bo(share(dev, 3 / 16), HBM)
        y = dev.bo(sizes[1], HBM)
        dev.close_bo(middle)
        evictions = dev.memory().evictions
        z = dev.bo(sizes[2], HBM)
        # x had to go, and z lies where it was.
        assert dev.memory().evictions == evictions + 1
        vas = [dev.place(*bo) for bo in zip((x, y, z), sizes, strict=True)]
        for number, va in enumerate(vas):
            dev.finish_ok([raw.fill(va, 8, number + 1)])
        for number, handle in enumerate((x, y, z)):
            with dev.map(handle) as view:
                assert view[:8] == (number + 1).to_bytes(4, "little") * 2
        assert dev.memory().hbm_evicted == 0


@case
def page_tables_take_the_place_of_buffers() -> None:
    """More of them than fit into their own part of HBM."""
    with Client() as dev:
        total = dev.memory().hbm_bytes
        for_buffers = total - total // 256
        pool = [dev.bo(total // 16, HBM) for _ in range(15)]
        pool.append(dev.bo(for_buffers - 15 * (total // 16), HBM))
        evictions = dev.memory().evictions
        assert dev.memory().hbm_evicted == 0
        count = total // 256 // PAGE
        for i in range(count):
            dev.bind(dev.vm_id, dev.host, (64 << 30) + (i << 30), PAGE)
        assert dev.memory().evictions > evictions
        dev.finish_ok([raw.fill((64 << 30) + ((count - 1) << 30), 8, 77)])
        assert dev.page[:4] == (77).to_bytes(4, "little")
        # Buffers still find room around them.
        for handle in pool:
            dev.read(handle)


@case
def page_tables_leave_most_of_hbm_whole() -> None:
    """Even where the only free memory is low when they are made: something higher up leaves."""
    with Client() as dev:
        total = dev.memory().hbm_bytes
        for number in range(total // 256 // PAGE):  # what they have to themselves
            dev.bind(dev.vm_id, dev.host, (64 << 30) + (number << 30), PAGE)
        pool = [dev.bo(MIB, HBM) for _ in range(total // MIB - 1)]
        assert dev.memory().hbm_evicted == 0
        # They lie from the top down; so the hole of the last that went is the highest.
        for number in range(total * 3 // 4 // MIB):
            dev.close_bo(pool.pop())
            dev.bind(dev.vm_id, dev.host, (1 << 40) + (number << 30), PAGE)
        for handle in pool:
            dev.close_bo(handle)
        dev.close_bo(dev.bo(share(dev, 0.7), HBM))


@case
def strewn_page_tables_leave_room_for_more() -> None:
    """They need no large hole, and where one user's lie there are many small ones."""
    piece, size = 64 << 10, 64 * MIB
    with Client() as dev, Device() as other:
        total = dev.memory().hbm_bytes
        for number in range(total // 256 // PAGE):  # what they have to themselves
            dev.bind(dev.vm_id, dev.host, (64 << 30) + (number << 30), PAGE)
        pool = [dev.bo(piece, HBM) for _ in range(total // piece - 32)]
        assert dev.memory().hbm_evicted == 0
        # From the top down each gives way to a table and a buffer of what is left.
        for number in range(total // 4 // piece):
            dev.close_bo(pool[number])
            dev.bind(dev.vm_id, dev.host, (1 << 40) + number * HUGE, PAGE)
            pool[number] = dev.bo(piece - PAGE, HBM)
        other.bind(other.vm(), other.bo(size), VA, size)


# ---- System memory ----


@contextmanager
def cgroup(name: str) -> Iterator[Path]:
    if not Path(CGROUPS, "cgroup.controllers").exists():
        os.makedirs(CGROUPS, exist_ok=True)
        assert os.system(f"mount -t cgroup2 none {CGROUPS}") == 0
    Path(CGROUPS, "cgroup.subtree_control").write_text("+memory")
    group = Path(CGROUPS, name)
    group.mkdir()
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), 5, "its processes have ended")
        group.rmdir()


def leave_room(group: Path, more: int) -> None:
    """For so many bytes more than it has now."""
    used = int((group / "memory.current").read_text())
    (group / "memory.max").write_text(str(used + more))


def shmem_of(group: Path) -> int:
    lines = (group / "memory.stat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("shmem "))


@case
def contents_are_charged_to_who_made_the_buffer() -> None:
    """To its memory cgroup. When that is full others are refused, and nobody is killed."""
    with Device() as dev, cgroup("vtpu-test") as group:
        size = share(dev, 0.5)
        ready, go = os.pipe(), os.pipe()

        def owner() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            with Device() as mine:
                handle = mine.bo(size, HBM)
                with mine.map(handle) as view:
                    for page in range(size // PAGE):
                        view[page * PAGE : page * PAGE + 8] = page.to_bytes(8, "little")
                    os.write(ready[1], b"r")
                    os.read(go[0], 1)
                    for page in range(size // PAGE):
                        got = int.from_bytes(view[page * PAGE : page * PAGE + 8], "little")
                        assert got == page

        with processes([owner]):
            assert os.read(ready[0], 1) == b"r"
            assert shmem_of(group) < MIB
            leave_room(group, size // 2)
            before = dev.memory()
            with raises(errno.ENOMEM):
                dev.bo(share(dev, 0.75), HBM)
            after = dev.memory()
            assert (after.hbm_used, after.hbm_evicted) == (before.hbm_used, before.hbm_evicted)
            assert shmem_of(group) < MIB
            (group / "memory.max").write_text("max")
            handle = dev.bo(share(dev, 0.75), HBM)
            assert shmem_of(group) >= size
            dev.close_bo(handle)
            os.write(go[1], b"g")
        events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
        assert events["oom_kill"] == "0", events


@case
def a_full_cgroup_is_in_nobody_elses_way() -> None:
    """Its buffer would be the first to leave, but cannot; so another one does."""
    with User() as dev, cgroup("vtpu-full") as group:
        size = share(dev, 0.4)
        ready, go = os.pipe(), os.pipe()

        def owner() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            with Device() as mine:
                mine.bo(size, HBM)
                os.write(ready[1], b"r")
                os.read(go[0], 1)

        with processes([owner]):
            assert os.read(ready[0], 1) == b"r"
            leave_room(group, size // 2)
            newer = dev.bo(size, HBM)
            dev.write(newer, pages_of(3, size))
            for _ in range(2):
                handle = dev.bo(size, HBM)
                assert dev.memory().hbm_evicted == size and shmem_of(group) < MIB
                dev.close_bo(handle)
                assert dev.read(newer) == pages_of(3, size)
            os.write(go[1], b"g")


@case
def a_sixteenth_of_hbm_is_a_users_for_page_tables() -> None:
    """However thinly it spreads what it maps: nobody else makes room for its tables."""
    with Device() as dev:
        before = dev.memory()
        most = before.hbm_bytes // 16 // PAGE

    def work() -> None:
        with Device() as mine:
            vm, page, number = mine.vm(), mine.bo(PAGE), 0
            with raises(errno.ENOSPC):
                while number <= most:
                    number += 1
                    mine.bind(vm, page, number * HUGE, PAGE)
            # Each had a table of its own; 512 of those have one above them.
            assert most - most // 256 - 8 < number <= most, (number, most)
            assert mine.memory().hbm_used - before.hbm_used <= (most + 16) * PAGE
            with Device() as other:
                others, its = other.vm(), other.bo(PAGE)
                mine.unbind(vm, HUGE, PAGE)
                used = mine.memory().hbm_used
                with raises(errno.ENOSPC):
                    other.bind(others, its, HUGE, PAGE)
                # It needs three, and gives back the one that it could make.
                assert mine.memory().hbm_used == used
            mine.bind(vm, page, number * HUGE, PAGE)

    as_user(work)
    with Device() as dev:
        assert dev.memory().evictions == before.evictions
        until(lambda: dev.memory().hbm_used == before.hbm_used, 20, "its tables are free")


# ---- All at once ----


@case
def buffers_that_come_and_go_are_in_nobodys_way() -> None:
    """Three are too many at once; whoever is to have room waits for the others' to be cleared
    and can then put them out."""
    problems: list[str] = []

    def user() -> None:
        try:
            with Device() as dev:
                for _ in range(4):
                    dev.close_bo(dev.bo(share(dev, 0.4), HBM))
        except BaseException:
            problems.append(traceback.format_exc())

    threads = [threading.Thread(target=user) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]


@case
def storm() -> None:
    """Threads that create, map, bind, submit, read and close, in twice as much as there is."""
    stop = time.monotonic() + 4
    problems: list[str] = []

    def user(number: int) -> None:
        try:
            turn = 0
            while time.monotonic() < stop:
                turn += 1
                with Client() as dev:
                    size = share(dev, 1 / (3 + (turn + number) % 5))
                    handle = dev.bo(size, HBM)
                    va = dev.place(handle, size)
                    mark = number << 16 | turn
                    for _ in range(3):
                        dev.finish_ok([raw.fill(va + size - PAGE, PAGE, mark)])
                        with dev.map(handle) as view:
                            end = view[size - PAGE :]
                            assert end == mark.to_bytes(4, "little") * (PAGE // 4)
                            assert view[:PAGE] == bytes(PAGE)
        except BaseException:
            problems.append(traceback.format_exc())

    threads = [threading.Thread(target=user, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
