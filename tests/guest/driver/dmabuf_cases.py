# SPDX-License-Identifier: MIT
"""Buffers shared with others as dma-bufs. Runs in the guest as root."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import vtpu_raw as raw
from cases import DRIVER, ENDS, VA, Setup, collector, main, pci_device, rebinding_amid
from userptr_cases import Memory, pinned
from vtpu_raw import HBM, HUGE, PAGE, READ, SYNC_SIGNAL, Device, raises
from watch import expects

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
AREA = VA + (16 << 30)
DMA_BUF_SYNC = 1 << 30 | 8 << 16 | ord("b") << 8
SYNC_READ, SYNC_END = 1, 4
UDMABUF_CREATE_LIST = 1 << 30 | 8 << 16 | ord("u") << 8 | 0x43
F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2
libc = ctypes.CDLL(None, use_errno=True)


def export(dev: Device, handle: int) -> int:
    return dev.call("prime_handle_to_fd", handle=handle, flags=os.O_CLOEXEC | os.O_RDWR).fd


def import_(dev: Device, fd: int) -> int:
    return dev.call("prime_fd_to_handle", fd=fd).handle


def udmabuf(pieces: list[tuple[int, int]], memory_size: int) -> tuple[int, mmap.mmap]:
    """A dma-buf of pieces (offset, size) of a memfd, and all of that."""
    memory = os.memfd_create("dmabuf-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, memory_size)
    fcntl.fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK)
    items = b"".join(struct.pack("<IIQQ", memory, 0, offset, size) for offset, size in pieces)
    with open("/dev/udmabuf", "rb") as maker:
        fd = libc.ioctl(
            maker.fileno(), UDMABUF_CREATE_LIST, struct.pack("<II", 1, len(pieces)) + items
        )
    assert fd >= 0, errno.errorcode[ctypes.get_errno()]
    view = mmap.mmap(memory, memory_size)
    os.close(memory)
    return fd, view


def sync(fd: int, flags: int) -> None:
    fcntl.ioctl(fd, DMA_BUF_SYNC, struct.pack("<Q", flags))


@case
def a_mapping_stays_where_it_was() -> None:
    """Of an exported buffer, whose offset in the device file is asked for afterwards."""
    with Device() as dev:
        before, handle = dev.bo(PAGE, HBM), dev.bo(2 * PAGE, HBM)
        fd = export(dev, handle)
        with mmap.mmap(fd, 2 * PAGE) as shared:
            with dev.map(before) as view:
                view[:5] = b"other"
            with dev.map(handle) as view:
                view[PAGE : PAGE + 4] = b"mine"
                assert shared[: 2 * PAGE] == bytes(PAGE) + b"mine" + bytes(PAGE - 4)
                shared[:3] = b"too"
                assert view[:3] == b"too"
        os.close(fd)


@case
def one_device_two_files() -> None:
    """What one file exports another of the same device imports as the very buffer."""
    with Setup() as one, Setup() as two:
        used = one.memory().hbm_used
        for flags in (0, HBM):
            handle = one.bo(4 * PAGE, flags)
            fd = export(one, handle)
            assert import_(one, fd) == handle
            theirs = import_(two, fd)
            assert import_(two, fd) == theirs
            info = two.call("bo_info", handle=theirs)
            assert (info.size, info.flags) == (4 * PAGE, flags) and info.mmap_offset, info
            with one.map(handle) as view:
                view[:4] = b"from"
            two.bind(two.vm_id, theirs, AREA, 4 * PAGE)
            two.finish_ok([raw.copy(two.host_va, AREA, 4), raw.fill(AREA + PAGE, 4, 7)])
            assert two.host_map[:4] == b"from"
            with mmap.mmap(fd, 4 * PAGE) as shared:
                assert shared[: PAGE + 1] == b"from" + bytes(PAGE - 4) + b"\7"
            one.close_bo(handle)
            two.finish_ok([raw.copy(two.host_va, AREA + PAGE, 4)])
            two.unbind(two.vm_id, AREA, 4 * PAGE)
            two.close_bo(theirs)
            if flags & HBM:
                assert one.memory().hbm_used >= used + 4 * PAGE, "the dma-buf has it still"
            os.close(fd)
        assert one.memory().hbm_used == used


@case
def every_piece_of_an_import_is_mapped() -> None:
    """Pages of another order, in pieces of different sizes, whole and in part."""
    rng = random.Random(4)
    pages = list(range(64))
    rng.shuffle(pages)
    pieces = [(page * PAGE, PAGE) for page in pages[:40]]
    pieces[7:7] = [(64 * PAGE, 5 * PAGE), (80 * PAGE, 2 * PAGE)]
    fd, memory = udmabuf(pieces, 96 * PAGE)
    memory[:] = rng.randbytes(96 * PAGE)
    wanted = b"".join(memory[offset : offset + size] for offset, size in pieces)
    size = len(wanted)
    with Setup(size=size) as dev:
        handle = import_(dev, fd)
        os.close(fd)
        info = dev.call("bo_info", handle=handle)
        assert (info.size, info.flags) == (size, 0), info
        dev.bind(dev.vm_id, handle, AREA, size)
        dev.finish_ok([raw.copy(dev.hbm_va, AREA, size)])
        assert dev.hbm_map[:] == wanted
        part, at = size - 11 * PAGE, 9 * PAGE
        dev.bind(dev.vm_id, handle, AREA + (1 << 30), part, READ, offset=at)
        dev.finish_ok([raw.copy(dev.host_va, AREA + (1 << 30), part)])
        assert dev.host_map[:part] == wanted[at : at + part]
        dev.finish_ok([raw.fill(AREA + 8 * PAGE, PAGE, 0x2A2A2A2A)])
        place = pieces[7][0] + PAGE
        assert memory[place : place + PAGE] == b"*" * PAGE
        with raises(errno.EINVAL):
            dev.bind(dev.vm_id, handle, AREA + (2 << 30), PAGE, READ, offset=size)


@case
def an_import_is_not_mapped_by_us() -> None:
    """Not even at the offset that it would have."""
    fd, _ = udmabuf([(0, 4 * PAGE)], 4 * PAGE)
    with Device() as dev:
        first = dev.call("bo_info", handle=dev.bo(PAGE)).mmap_offset
        handle = import_(dev, fd)
        last = dev.call("bo_info", handle=dev.bo(PAGE)).mmap_offset
        assert dev.call("bo_info", handle=handle).mmap_offset == 0
        assert last == first + 5 * PAGE, (first, last)
        with raises(errno.EINVAL, errno.EACCES):
            mmap.mmap(dev.fd, 4 * PAGE, offset=first + PAGE)
        again = export(dev, handle)
        assert os.fstat(again).st_ino == os.fstat(fd).st_ino, "passed on it is the exporter's"
        os.close(again)
    os.close(fd)


@case
def the_processor_waits_for_the_jobs() -> None:
    """DMA_BUF_IOCTL_SYNC returns when no job uses the buffer any more."""
    with Setup() as dev:
        fd = export(dev, dev.host)
        sync(fd, SYNC_READ)
        sync(fd, SYNC_READ | SYNC_END)
        with mmap.mmap(fd, dev.size) as shared:
            dev.submit(dev.queue_id, [raw.wait(dev.hbm_va, 1), raw.fill(dev.host_va, 4, 5)])
            began = threading.Event()

            def go() -> None:
                began.wait()
                time.sleep(0.1)
                dev.hbm_map[0] = 1

            thread = threading.Thread(target=go)
            thread.start()
            began.set()
            sync(fd, SYNC_READ)
            assert shared[0] == 5
            thread.join()
        # A signal ends the wait, not the job.
        dev.submit(dev.queue_id, [raw.wait(dev.hbm_va, 2)])
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            sync(fd, SYNC_READ)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGALRM
        dev.hbm_map[0] = 2
        sync(fd, SYNC_READ)
        os.close(fd)


@case
def a_dma_buf_outlives_its_device() -> None:
    """Unbound, its mappings read on, and closing is in order, whatever the order."""
    name = pci_device()
    dev = Setup()
    imported, memory = udmabuf([(0, HUGE)], HUGE)
    handle = import_(dev, imported)
    dev.bind(dev.vm_id, handle, AREA, HUGE)
    fds = [export(dev, dev.host), export(dev, dev.hbm)]
    host, hbm = (mmap.mmap(fd, dev.size) for fd in fds)
    host[:4], hbm[:4] = b"host", b"hbm."
    Path(DRIVER, "unbind").write_text(name)
    try:
        assert host[:4] == b"host", "system memory is there"
        assert hbm[:4] in (bytes(4), b"hbm.")
        hbm[8] = 1
        later = mmap.mmap(fds[1], dev.size)
        assert later[0] == 0, "a device that is gone reads as zeroes"
        sync(fds[0], SYNC_READ)
        memory[:4] = b"mine"
        with raises(errno.ENODEV):
            export(dev, dev.host)
        dev.close()
        assert host[:4] == b"host"
        for view in (host, hbm, later):
            view.close()
        for fd in [*fds, imported]:
            os.close(fd)
    finally:
        Path(DRIVER, "bind").write_text(name)
    with Setup() as dev:
        dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])


@case
@expects(resets=True)
def a_mapped_dma_buf_sees_a_function_reset() -> None:
    """Its pages of HBM are taken away and found again, like those of the device file."""
    path = Path(f"/sys/bus/pci/devices/{pci_device()}/reset")
    with Setup() as dev:
        fd = export(dev, dev.hbm)
        with mmap.mmap(fd, dev.size) as shared:
            shared[:4] = b"stay"
            path.write_text("1")
            assert shared[:4] == b"stay"
            shared[4:8] = b"here"
            dev.queue_id = dev.queue(dev.vm_id)
            dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, 8)])
            assert dev.host_map[:8] == b"stayhere"
        os.close(fd)


@case
def imports_and_closes_amid_jobs() -> None:
    """A closed import stays the jobs' until its mapping goes."""
    with Setup() as dev:
        for turn in range(8):
            fd, memory = udmabuf([(0, 16 * PAGE)], 16 * PAGE)
            handle = import_(dev, fd)
            os.close(fd)
            dev.bind(dev.vm_id, handle, AREA, 16 * PAGE)
            done = dev.syncobj()
            dev.submit(
                dev.queue_id,
                [raw.wait(dev.hbm_va, turn + 1), raw.fill(AREA + PAGE, PAGE, turn)],
                [(done, SYNC_SIGNAL, 0)],
            )
            dev.close_bo(handle)
            dev.hbm_map[0] = turn + 1
            dev.wait(done)
            assert memory[PAGE : PAGE + 4] == turn.to_bytes(4, "little")
            dev.unbind(dev.vm_id, AREA, 16 * PAGE)


@case
def memory_of_all_kinds_amid_unbinds() -> None:
    """Made, bound, used, exported and closed by threads, while the device goes and comes."""

    def use() -> None:
        area = Memory(8 * PAGE)
        with Setup() as dev, ExitStack() as open_files:
            fd, _ = udmabuf([(0, 8 * PAGE)], 8 * PAGE)
            open_files.callback(os.close, fd)
            for handle in (dev.userptr(area.addr, area.size), import_(dev, fd)):
                dev.bind(dev.vm_id, handle, AREA, 8 * PAGE)
                assert dev.finish(dev.queue_id, [raw.fill(AREA, 8 * PAGE, 1)]) in ENDS
                dev.unbind(dev.vm_id, AREA, 8 * PAGE)
            for handle in (dev.host, dev.hbm):
                shared = export(dev, handle)
                open_files.callback(os.close, shared)
                with mmap.mmap(shared, PAGE) as view:
                    view[0] = 1

    rebinding_amid(use, threads=3, times=6)
    assert pinned() == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
