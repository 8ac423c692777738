# SPDX-License-Identifier: MIT
"""What cases share, and what runs them. A case is a function that says what the driver promises.

Its file is a program, run in the guest as root, with the standard library alone:

    python3 *_cases.py [NAME ...]

Prints one JSON object a case. Importable anywhere, to list the names.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import mmap
import operator
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import vtpu_raw as raw
from vtpu_raw import EXEC, HBM, PAGE, READ, Device
from watch import Expected, Watch

FOLDER = "/tmp/driver-tests"  # where these files are in the guest
VA = 1 << 32
CASE_SECONDS = 120 * raw.PATIENCE
DRIVER = "/sys/bus/pci/drivers/vtpu"
# The guest's own, or the one that `make kmod-dev` has put in since.
MODULE = next(filter(os.path.exists, ["/run/vtpu-dev/vtpu.ko"]), "/opt/vtpu/modules/vtpu.ko")


def collector(table: dict[str, Callable[[], None]]) -> Callable:
    def collect(function: Callable[[], None]) -> Callable[[], None]:
        table[function.__name__] = function
        return function

    return collect


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    seconds *= raw.PATIENCE
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def is_gone(device: Device) -> bool:
    """Its function was unplugged or disabled."""
    try:
        device.info()
    except OSError as error:
        assert error.errno == errno.ENODEV, error
        return True
    return False


class Setup(Device):
    """A file with an address space, a queue, and a mapped buffer of each kind."""

    def __init__(self, timeout_ms: int = 5000 * raw.PATIENCE, size: int = 4 * PAGE) -> None:
        super().__init__()
        self.size = size
        self.host_va, self.hbm_va, self.code_va = VA, VA + (1 << 30), VA + (2 << 30)
        self.maps: list[mmap.mmap] = []
        try:
            self.vm_id = self.vm()
            self.queue_id = self.queue(self.vm_id, timeout_ms)
            self.host = self.bo(size)
            self.hbm = self.bo(size, HBM)
            self.bind(self.vm_id, self.host, self.host_va, size)
            self.bind(self.vm_id, self.hbm, self.hbm_va, size)
            self.host_map = self.map(self.host)
            self.hbm_map = self.map(self.hbm)
        except BaseException:
            self.close()
            raise

    def map(self, handle: int) -> mmap.mmap:
        self.maps.append(super().map(handle))
        return self.maps[-1]

    def close(self) -> None:
        # A mapping holds the file open.
        for view in self.maps:
            view.close()
        super().close()

    def program(self, code: bytes) -> None:
        handle = self.bo(PAGE)
        view = self.map(handle)
        view[: len(code)] = code
        view.close()
        self.bind(self.vm_id, handle, self.code_va, PAGE, READ | EXEC)

    def run(self, code: bytes, cookie: int = 0) -> tuple:
        self.program(code)
        return raw.run(self.code_va, len(code), cookie=cookie)

    def finish_ok(self, commands: list) -> None:
        got = self.finish(self.queue_id, commands)
        assert got == 1, f"fence {got}, state {self.state(self.queue_id)}"


def counting(count: int, at: int = 0) -> bytes:
    """A program, as the instruction of that number on, that counts and halts."""
    return (
        raw.instruction(0x06, [30, 30], [0, 0, 1])  # ADD s30 = s30 + 1
        + raw.instruction(0x17, [30], [0, count, 64 * at])  # BLT s30 < count
        + raw.HALT
    )


def long_matmul(weights: int) -> bytes:
    """One instruction that works for seconds, on 3 MiB of weights."""
    dst, src, rows, columns, depth, q4_0 = 16 << 20, 0, 1 << 18, 16, 1 << 18, 9
    return (
        raw.instruction(0x05, [40], imm64=weights)
        + raw.instruction(0x30, [0, 0, 40], [dst, src, 0, rows, columns, depth, 64, 0], fmt=q4_0)
        + raw.HALT
    )


def child_of(work: Callable[[], None]) -> tuple[int, int]:
    """A process that does some work, says so, and waits to be killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
            os.write(writer, b"k")
            time.sleep(60)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writer)
    return child, reader


def pci_device() -> str:
    """The one that the other cases use."""
    node = os.path.basename(raw.node())
    return os.path.basename(os.path.realpath(f"/sys/class/accel/{node}/device"))


def module_is_idle() -> bool:
    return Path("/sys/module/vtpu/refcnt").read_text().strip() == "0"


# ---- Disturbed ----

ENDS = (1, -errno.ENODEV, -errno.ECANCELED)  # what a job's fence may say amid resets
GONE = {errno.ENODEV, errno.ENOENT, errno.EIO, errno.ENXIO}


@contextmanager
def disturbed(
    uses: Sequence[Callable[[], None]], excuses: Collection[int] = GONE
) -> Iterator[Callable[[], None]]:
    """Threads use the device again and again, each in its way, while the block disturbs them.

    A use that ends with one of these errors, as when the device is not there, begins anew. The
    block gets a function that waits until each of them has been served from beginning to end.
    """
    stop = threading.Event()
    problems: list[str] = []
    served = [0] * len(uses)

    def user(number: int) -> None:
        while not stop.is_set():
            try:
                uses[number]()
                served[number] += 1
            except OSError as error:
                if error.errno not in excuses:
                    problems.append(traceback.format_exc())
                # Who tries again and again takes the processor from what disturbs.
                stop.wait(0.01)
            except BaseException:
                problems.append(traceback.format_exc())

    def all_are_served() -> None:
        # The second from now on has begun after this.
        goals = [count + 2 for count in served]
        until(lambda: bool(problems) or all(map(operator.ge, served, goals)), 60, "all are served")
        assert not problems, problems[0]

    users = [threading.Thread(target=user, args=(number,)) for number in range(len(uses))]
    for thread in users:
        thread.start()
    try:
        yield all_are_served
    finally:
        stop.set()
        for thread in users:
            thread.join()
    assert not problems, problems[0]


def rebinding_amid(use: Callable[[], None], threads: int, times: int) -> None:
    """Threads use the device again and again, while it goes and comes so many times.

    Fewer times on a slow kernel, where each is more work for all.
    """
    name = pci_device()

    try:
        with disturbed([use] * threads) as served:
            for _ in range(max(2, times // raw.PATIENCE)):
                served()
                Path(DRIVER, "unbind").write_text(name)
                time.sleep(0.05)
                Path(DRIVER, "bind").write_text(name)
    finally:
        # Once more with every file closed, so that the node has its first number.
        try:
            until(module_is_idle, 5, "nothing holds the module")
        finally:
            if Path(DRIVER, name).exists():
                Path(DRIVER, "unbind").write_text(name)
            Path(DRIVER, "bind").write_text(name)


# ---- Runner ----


def run_case(name: str, work: Callable[[], None], watch: Watch | None) -> dict[str, object]:
    error = ""
    start = time.monotonic()

    def out_of_time(_number: int, _frame: object) -> None:
        raise AssertionError(f"not finished in {CASE_SECONDS} s")

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(CASE_SECONDS)
    try:
        work()
    except BaseException:
        error = traceback.format_exc()
    signal.alarm(0)
    if watch:
        error += "\n".join(watch.problems(getattr(work, "expected", Expected())))
    return {"case": name, "ok": not error, "error": error, "seconds": time.monotonic() - start}


def main(
    names: list[str], table: dict[str, Callable[[], None]], alone: Collection[str] = ()
) -> int:
    """Those of the table with these names, or all but those that run alone."""
    faulthandler.enable()
    # Who runs several of these at once watches over all of them.
    watch = None if "VTPU_NODE" in os.environ else Watch()
    failed = 0
    for name in names or [name for name in table if name not in alone]:
        print(json.dumps({"case": name, "started": True}), flush=True)
        result = run_case(name, table[name], watch)
        failed += not result["ok"]
        print(json.dumps(result), flush=True)
    return 1 if failed else 0
