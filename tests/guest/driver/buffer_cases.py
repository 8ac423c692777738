# SPDX-License-Identifier: MIT
"""Buffers and address spaces. Runs in the guest as root."""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
import sys
from collections.abc import Callable
from pathlib import Path

import vtpu_raw as raw
from cases import VA, Setup, collector, main
from vtpu_raw import HBM, HUGE, PAGE, READ, Device, raises

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)


# ---- Queries and buffers ----


@case
def query_info() -> None:
    with Device() as dev:
        info = dev.info()
        assert info.hw_version >> 16 == 1 and info.isa_version == 1, info
        assert info.hbm_bytes >= 16 << 20 and info.num_queues and info.num_contexts, info
        assert info.page_bytes == PAGE and 0 < info.va_start < info.va_end == 1 << 48, info
        memory = dev.memory()
        assert memory.hbm_bytes == info.hbm_bytes and memory.hbm_used < memory.hbm_bytes
        assert dev.resets().device_resets >= 0


@case
def query_sizes() -> None:
    with Device() as dev:
        known = dev.call("dev_query", query=0, size=0, data=0).size
        assert known == 48, known
        short = ctypes.create_string_buffer(b"\xff" * 8, 8)
        assert dev.call("dev_query", query=0, size=4, data=ctypes.addressof(short)).size == known
        assert short.raw[4:] == b"\xff" * 4 and short.raw[:4] != b"\xff" * 4
        long = ctypes.create_string_buffer(b"\xff" * 64, 64)
        dev.call("dev_query", query=0, size=64, data=ctypes.addressof(long))
        assert long.raw[known:] == bytes(64 - known)


@case
def bo_host_and_hbm_map() -> None:
    with Device() as dev:
        for flags in (0, HBM):
            handle = dev.bo(PAGE + 1, flags)
            info = dev.call("bo_info", handle=handle)
            assert info.size == 2 * PAGE and info.flags == flags
            with dev.map(handle) as view:
                assert view[:] == bytes(2 * PAGE)
                view[10:14], view[PAGE : PAGE + 4] = b"abcd", b"wxyz"
            with dev.map(handle) as view:
                assert view[10:14] == b"abcd" and view[PAGE : PAGE + 4] == b"wxyz"
            dev.close_bo(handle)
            with raises(errno.ENOENT):
                dev.call("bo_info", handle=handle)


@case
def bo_large_hbm_map() -> None:
    size = 3 * HUGE + PAGE
    with Device() as dev:
        used = dev.memory().hbm_used
        handle = dev.bo(size, HBM)
        assert dev.memory().hbm_used == used + size
        with dev.map(handle) as view:
            marks = [0, PAGE, HUGE - 1, HUGE, 2 * HUGE + 5 * PAGE, size - 1]
            for place in marks:
                assert view[place] == 0
                view[place] = place % 251 + 1
            assert [view[place] for place in marks] == [place % 251 + 1 for place in marks]
        dev.close_bo(handle)
        assert dev.memory().hbm_used == used


@case
def hbm_is_mapped_in_huge_pages() -> None:
    """A large buffer costs a process no page tables, but for a last piece; and what takes such a
    page apart leaves the rest."""

    def tables() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmPTE:")[2].split()[0])

    if "[always]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        return
    size = 48 * HUGE
    with Device() as dev:
        info = dev.call("bo_info", handle=dev.bo(size, HBM))
        for length in (size, size - PAGE):
            before = tables()
            with mmap.mmap(dev.fd, length, offset=info.mmap_offset) as view:
                marks = range(0, length, HUGE)
                for at in marks:
                    assert view[at] == 0  # read first, then written
                    view[at] = view[at + HUGE - 2 * PAGE] = at // HUGE + 1
                assert tables() - before < len(marks) * 4 // 2, "kB of tables"
                for at in marks:
                    assert view[at] == view[at + HUGE - 2 * PAGE] == at // HUGE + 1
                    view[at] = view[at + HUGE - 2 * PAGE] = 0
        with dev.map(info.handle) as view:
            view[HUGE] = view[HUGE + PAGE] = view[2 * HUGE - 1] = 7
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            libc = ctypes.CDLL(None, use_errno=True)
            hole, page = ctypes.c_void_p(address + HUGE), ctypes.c_size_t(PAGE)
            assert libc.mprotect(hole, page, mmap.PROT_READ) == 0
            assert view[HUGE] == view[HUGE + PAGE] == view[2 * HUGE - 1] == 7
            view[HUGE + PAGE] = 8
            assert libc.mprotect(hole, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
            view[HUGE] = 9
            assert (view[HUGE], view[HUGE + PAGE], view[2 * HUGE - 1]) == (9, 8, 7)


@case
def hbm_is_zero_for_the_next_owner() -> None:
    size = 2 * HUGE
    with Device() as dev:
        handle = dev.bo(size, HBM)
        with dev.map(handle) as view:
            view[:] = b"\xa5" * size
        dev.close_bo(handle)
    with Device() as dev:
        for handle in [dev.bo(size, HBM), *(dev.bo(PAGE, HBM) for _ in range(16))]:
            with dev.map(handle) as view:
                assert not any(view[:])


@case
def hbm_exhaustion_is_an_error() -> None:
    with Setup() as dev:
        total, used = dev.memory().hbm_bytes, dev.memory().hbm_used
        with raises(errno.ENOSPC):
            dev.bo(total + PAGE, HBM)
        with raises(errno.ENOSPC):
            dev.bo(total, HBM)
        assert dev.memory().hbm_used == used


@case
def private_mapping_of_hbm_is_refused() -> None:
    with Device() as dev:
        info = dev.call("bo_info", handle=dev.bo(PAGE, HBM))
        with raises(errno.EINVAL):
            mmap.mmap(dev.fd, PAGE, flags=mmap.MAP_PRIVATE, offset=info.mmap_offset)


# ---- Address spaces ----


@case
def vm_bind_errors() -> None:
    with Device() as dev:
        vm = dev.vm()
        bo = dev.bo(4 * PAGE, HBM)
        good = {"vm_id": vm, "handle": bo, "flags": READ, "va": VA, "size": PAGE}
        wrong = [
            ({"vm_id": vm + 1}, errno.ENOENT),
            ({"handle": 999}, errno.ENOENT),
            ({"op": 2}, errno.EINVAL),
            ({"flags": 0}, errno.EINVAL),
            ({"flags": 8}, errno.EINVAL),
            ({"size": 0}, errno.EINVAL),
            ({"size": 100}, errno.EINVAL),
            ({"size": 5 * PAGE}, errno.EINVAL),
            ({"va": VA + 8}, errno.EINVAL),
            ({"va": 0}, errno.EINVAL),
            ({"va": 1 << 48}, errno.EINVAL),
            ({"va": (1 << 48) - PAGE, "size": 2 * PAGE}, errno.EINVAL),
            ({"va": (1 << 64) - PAGE, "size": 2 * PAGE}, errno.EINVAL),
            ({"size": (1 << 64) - PAGE}, errno.EINVAL),
            ({"bo_offset": 8}, errno.EINVAL),
            ({"bo_offset": 4 * PAGE}, errno.EINVAL),
            ({"bo_offset": (1 << 64) - PAGE, "size": 2 * PAGE}, errno.EINVAL),
            ({"op": raw.UNMAP}, errno.EINVAL),
        ]
        for change, error in wrong:
            with raises(error):
                dev.call("vm_bind", **{**good, **change})
        dev.bind(vm, bo, VA, 2 * PAGE)
        for va, size in ((VA, PAGE), (VA + PAGE, PAGE), (VA - PAGE, 2 * PAGE), (VA, 4 * PAGE)):
            with raises(errno.EEXIST):
                dev.bind(vm, bo, va, size)
        for va, size in ((VA, PAGE), (VA + PAGE, PAGE), (VA, 3 * PAGE), (VA - PAGE, 3 * PAGE)):
            with raises(errno.ENOENT):
                dev.unbind(vm, va, size)
        for name, value in (("handle", bo), ("flags", READ), ("bo_offset", PAGE), ("op", 2)):
            unmap = {"vm_id": vm, "op": raw.UNMAP, "va": VA, "size": 2 * PAGE}
            with raises(errno.EINVAL):
                dev.call("vm_bind", **{**unmap, name: value})
        dev.unbind(vm, VA, 2 * PAGE)
        with raises(errno.ENOENT):
            dev.unbind(vm, VA, 2 * PAGE)
        dev.bind(vm, bo, VA, 4 * PAGE)


@case
def vm_limit_and_destroy() -> None:
    with Device() as dev:
        vms = []
        with raises(errno.ENOSPC):
            for _ in range(100):
                vms.append(dev.vm())
        assert 4 <= len(vms) < 64, len(vms)
        queue = dev.queue(vms[0])
        with raises(errno.EBUSY):
            dev.call("vm_destroy", vm_id=vms[0])
        dev.call("queue_destroy", queue_id=queue)
        for vm in vms:
            dev.call("vm_destroy", vm_id=vm)
        with raises(errno.ENOENT):
            dev.call("vm_destroy", vm_id=vms[0])
        dev.vm()


@case
def unmapped_buffer_memory_returns() -> None:
    with Device() as dev:
        used = dev.memory().hbm_used
        vm = dev.vm()
        bo = dev.bo(2 * HUGE, HBM)
        dev.bind(vm, bo, VA, 2 * HUGE)
        dev.bind(vm, bo, VA + (1 << 40), PAGE)
        dev.close_bo(bo)
        assert dev.memory().hbm_used >= used + 2 * HUGE
        dev.unbind(vm, VA, 2 * HUGE)
        assert dev.memory().hbm_used >= used + 2 * HUGE
        dev.unbind(vm, VA + (1 << 40), PAGE)
        assert dev.memory().hbm_used < used + HUGE
        dev.call("vm_destroy", vm_id=vm)
        assert dev.memory().hbm_used == used


@case
def map_unmap_at_random() -> None:
    """Small and huge leaves side by side, checked by the device's own copies."""
    rng = random.Random(1)
    with Setup() as dev:
        used = dev.memory().hbm_used
        bo = dev.bo(4 * HUGE, HBM)
        base, mapped = VA + (1 << 34), {}
        with dev.map(bo) as view:
            for page in range(0, 4 * HUGE, PAGE):
                view[page : page + 4] = page.to_bytes(4, "little")
        for _ in range(150):
            if mapped and rng.random() < 0.45:
                va = rng.choice(list(mapped))
                dev.unbind(dev.vm_id, va, mapped.pop(va)[1])
                continue
            unit = rng.choice((PAGE, HUGE))
            va = base + rng.randrange(0, 8 * HUGE, unit)
            offset = rng.randrange(0, 4 * HUGE, unit)
            size = min(unit * rng.randint(1, 3), 4 * HUGE - offset)
            clash = any(va < v + s and v < va + size for v, (_, s) in mapped.items())
            try:
                dev.bind(dev.vm_id, bo, va, size, READ, offset)
                assert not clash
                mapped[va] = (offset, size)
            except OSError as error:
                assert clash and error.errno == errno.EEXIST, error
        assert mapped
        for va, (offset, size) in mapped.items():
            last = size - PAGE
            dev.finish_ok([raw.copy(dev.host_va, va, 4), raw.copy(dev.host_va + 4, va + last, 4)])
            got = [int.from_bytes(dev.host_map[i : i + 4], "little") for i in (0, 4)]
            assert got == [offset, offset + last], (va, offset, size, got)
        for va, (_, size) in mapped.items():
            dev.unbind(dev.vm_id, va, size)
        dev.close_bo(bo)
        assert dev.memory().hbm_used == used


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
