# SPDX-License-Identifier: MIT
"""The kernel's fault injection (its Documentation/fault-injection): allocations and copies that
fail, each once, or at random. Runs in the guest, as root, on a kernel that has it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hang_cases import debugfs
from vtpu_raw import PAGE

DEBUGFS = Path("/sys/kernel/debug")
KINDS = ("failslab", "fail_page_alloc", "fail_usercopy")
# What the allocators themselves say of it.
SAID = (r"SLUB: Unable to allocate", r"^  (cache|node \d+): ", r"Huh VM_FAULT_OOM")
# Out of memory, and what cannot be copied; shmem's word for an inode that it has not got.
ERRORS = {errno.ENOMEM, errno.EFAULT, errno.ENOSPC}


def is_possible() -> bool:
    return Path("/proc/self/fail-nth").exists() and all((DEBUGFS / kind).exists() for kind in KINDS)


def configure(kind: str, **values: object) -> None:
    for name, value in values.items():
        (DEBUGFS / kind / name.replace("_", "-")).write_text(str(value))


def prepare() -> None:
    """Whoever may sleep fails, too; and nothing is printed for each failure."""
    for kind in KINDS:
        configure(kind, verbose=0)
    configure("failslab", ignore_gfp_wait="N")
    configure("fail_page_alloc", ignore_gfp_wait="N", ignore_gfp_highmem="N", min_order=0)
    not_the_drivers_own()


def not_the_drivers_own() -> None:
    """Its faults on demand are no failures of memory: an empty range of who may have them."""
    for name in debugfs("inject").glob("fail_*"):
        (name / "require-end").write_text("0")


def extent(name: str) -> tuple[int, int]:
    """Where a function's code is, or all of the driver's."""
    lines = map(str.split, Path("/proc/kallsyms").read_text().splitlines())
    texts = [(int(at, 16), symbol, of) for at, kind, symbol, *of in lines if kind in "tTwW"]
    if name == "vtpu":
        driver = [at for at, _, of in texts if of == ["[vtpu]"]]
        return min(driver), max(driver) + PAGE
    [start] = [at for at, other, _ in texts if other == name]
    return start, min(at for at, _, _ in texts if at > start)


@contextmanager
def only_below(name: str = "vtpu", but: str = "") -> Iterator[None]:
    """What fails is called by that function, or any of the driver, through whatever others; but
    not through the one that is spared."""
    start, end = extent(name)
    ranges = {"require_start": hex(start), "require_end": hex(end)}
    if but:
        start, end = extent(but)
        ranges |= {"reject_start": hex(start), "reject_end": hex(end)}
    for kind in KINDS:
        configure(kind, **ranges)
    try:
        yield
    finally:
        everything = {"require_start": 0, "require_end": hex((1 << 64) - 1)}
        for kind in KINDS:
            configure(kind, **everything, reject_start=0, reject_end=0)


@contextmanager
def every_nth_below(name: str, slab: int, page: int, but: str = "") -> Iterator[None]:
    """On whatever thread, again and again: small allocations, and pages."""
    numbers = {"failslab": slab, "fail_page_alloc": page}
    with only_below(name, but):
        for kind, number in numbers.items():
            configure(kind, times=-1, interval=number, probability=100)
        try:
            yield
        finally:
            for kind in numbers:
                configure(kind, probability=0, interval=1)


class Nth:
    """The calling thread's chance of failing: the nth from now on."""

    def __init__(self) -> None:
        self.fd = os.open("/proc/thread-self/fail-nth", os.O_RDWR)

    def close(self) -> None:
        os.close(self.fd)

    def arm(self, number: int) -> None:
        # To write it is a copy, too, which may be the one to fail.
        try:
            os.pwrite(self.fd, b"%d" % number, 0)
        except OSError:
            os.pwrite(self.fd, b"%d" % number, 0)

    def disarm(self) -> bool:
        """Has it failed?"""
        try:
            failed = int(os.pread(self.fd, 16, 0)) == 0
        except OSError:
            failed = False
        self.arm(0)
        return failed


def each(number: int) -> int:
    return number + 1


def fewer(number: int) -> int:
    """Of a long path: the first chances all, then by and by fewer."""
    return number + 1 + number // 4


def each_failure(
    path: Callable[[], Any],
    undo: Callable[[Any], object] = lambda _: None,
    before: Callable[[], object] = lambda: None,
    steps: Callable[[int], int] = each,
) -> int:
    """Goes the path until nothing is left of it to fail, undoing what it did when it succeeds
    nevertheless; how often it failed with an error."""
    nth, number, times, errors = Nth(), 1, 0, 0
    try:
        while True:
            before()
            result, error = None, None
            nth.arm(number)
            try:
                result = path()
            except (OSError, MemoryError) as caught:
                error = caught
            failed = nth.disarm()
            if error:
                assert failed, f"chance {number} did not fail, but: {error!r}"
                code = getattr(error, "errno", errno.ENOMEM)
                assert code in ERRORS, f"chance {number}: {error!r}"
                errors += 1
            else:
                undo(result)
            if not failed:
                break
            times += 1
            number = steps(number)
    finally:
        nth.close()
    print(f"{path.__qualname__}: {times} failures, {errors} errors", file=sys.stderr, flush=True)
    return errors
