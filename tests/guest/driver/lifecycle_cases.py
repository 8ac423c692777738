# SPDX-License-Identifier: MIT
"""The device comes, goes and is reset with work on it. Runs in the guest as root."""

from __future__ import annotations

import ctypes
import errno
import glob
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import vtpu_raw as raw
from cases import (
    DRIVER,
    ENDS,
    FOLDER,
    MODULE,
    Setup,
    child_of,
    collector,
    disturbed,
    is_gone,
    main,
    module_is_idle,
    pci_device,
    until,
)
from dmabuf_cases import export, import_, udmabuf
from userptr_cases import AREA, Memory, pinned
from userq_cases import Driven, shows_nothing
from vtpu_raw import HBM, HUGE, PAGE, SYNC_SIGNAL, Device, UserQueue, raises
from watch import HANG, PROBE_FAILED, expects

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
FAIL_PROBE = Path("/sys/module/vtpu/parameters/fail_probe")


def function() -> Path:
    return Path("/sys/bus/pci/devices", pci_device())


def works() -> None:
    with Driven() as dev:
        dev.finish_ok([raw.fill(dev.hbm_va, 64, 7), raw.copy(dev.host_va, dev.hbm_va, 8)])
        dev.user.finish(raw.fill(dev.host_va + 8, 8, 9))
        assert dev.host_map[:16:4] == b"\7\7\t\t"


# ---- Probe ----


def bind(name: str) -> None:
    """Once: a buffered file would try again when it is closed."""
    with open(f"{DRIVER}/bind", "wb", buffering=0) as file:
        file.write(name.encode())


def leavings(name: str) -> list[str]:
    """What a driver that was bound to a function has left of itself."""
    regions = Path("/proc/iomem").read_text().splitlines()
    vectors = Path("/proc/interrupts").read_text().splitlines()
    found = [line for line in regions if line.endswith(": vtpu")]
    found += [line for line in vectors if line.endswith("vtpu")]
    return found + glob.glob(raw.DEVICES) + glob.glob(f"/sys/kernel/debug/accel/{name}")


@case
@expects(PROBE_FAILED)
def probe_fails_at_each_step() -> None:
    """And each time all that was done before is undone."""
    name = pci_device()
    Path(DRIVER, "unbind").write_text(name)
    step, bound = 0, False
    try:
        while not bound:
            step += 1
            FAIL_PROBE.write_text(str(step))
            try:
                bind(name)
                bound = True
            except OSError as error:
                assert error.errno == errno.EIO, (step, error)
                assert leavings(name) == [], step
                assert (function_of(name) / "enable").read_text().strip() == "0", step
    finally:
        FAIL_PROBE.write_text("0")
        if not bound:
            bind(name)
    assert step > 10, step
    until(module_is_idle, 5, "nothing holds the module")
    works()


def function_of(name: str) -> Path:
    return Path("/sys/bus/pci/devices", name)


@case
@expects(r"vtpu .*no MSI-X vectors", PROBE_FAILED)
def probe_without_msix() -> None:
    name = pci_device()
    Path(DRIVER, "unbind").write_text(name)
    vectors = function_of(name) / "msi_bus"
    vectors.write_text("0")
    try:
        with raises(errno.ENOSPC, errno.EINVAL, errno.EOPNOTSUPP):
            bind(name)
        assert leavings(name) == []
    finally:
        vectors.write_text("1")
        bind(name)
    works()


# ---- The module ----


def rmmod() -> bool:
    done = subprocess.run(["rmmod", "vtpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "in use" in done.stderr, done.stderr
    return done.returncode == 0


def fence_of_a_job_that_never_ran() -> int:
    """As a sync_file: its queue ends while it waits for another queue's job."""
    with Setup(timeout_ms=60000) as dev:
        before, sync = dev.syncobj(), dev.syncobj()
        dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(before, SYNC_SIGNAL, 0)])
        other = dev.queue(dev.vm_id)
        dev.submit(other, [raw.nop()], [(before, 0, 0), (sync, SYNC_SIGNAL, 0)])
        dev.call("queue_destroy", queue_id=other)
        fd = dev.call("syncobj_handle_to_fd", handle=sync, flags=1).fd
    until(lambda: raw.sync_file_state(fd) == -errno.ESRCH, 10, "it is cancelled")
    return fd


@case
def unload_is_refused_while_anything_is_held() -> None:
    """Be it all that is left of a file: a mapping, a dma-buf, a fence."""

    def mapping(stack: ExitStack) -> None:
        with Device() as dev:
            stack.enter_context(dev.map(dev.bo(PAGE, HBM)))

    def users_ring(stack: ExitStack) -> None:
        with Device() as dev:
            user = UserQueue(dev, dev.vm())
            stack.callback(user.unmap)
            user.finish(raw.nop())

    def dma_buf(flags: int, stack: ExitStack) -> None:
        with Device() as dev:
            stack.callback(os.close, export(dev, dev.bo(PAGE, flags)))

    def fence(stack: ExitStack) -> None:
        with Setup(timeout_ms=60000) as dev:
            sync = dev.syncobj()
            dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, SYNC_SIGNAL, 0)])
            fd = dev.call("syncobj_handle_to_fd", handle=sync, flags=1).fd
            stack.callback(os.close, fd)

    def file(stack: ExitStack) -> None:
        stack.callback(Device().close)

    holders = [
        file,
        mapping,
        users_ring,
        lambda stack: dma_buf(0, stack),
        lambda stack: dma_buf(HBM, stack),
        fence,
        lambda stack: stack.callback(os.close, fence_of_a_job_that_never_ran()),
    ]
    for hold in holders:
        until(module_is_idle, 10, "nothing holds the module")
        with ExitStack() as stack:
            hold(stack)
            assert not rmmod(), hold
            works()
    until(module_is_idle, 10, "nothing holds the module")
    assert rmmod()
    subprocess.run(["insmod", MODULE], check=True)
    until(lambda: bool(glob.glob(raw.DEVICES)), 10, "the node is back")
    works()


@case
def unload_after_the_device_with_files_open() -> None:
    """They keep the module, though nothing keeps the device."""
    name = pci_device()
    dev = Driven()
    dev.hbm_map[0] = 1
    fd = export(dev, dev.hbm)
    Path(DRIVER, "unbind").write_text(name)
    assert not rmmod()
    shows_nothing(dev.user)
    dev.close()
    assert not rmmod()
    os.close(fd)
    until(module_is_idle, 10, "nothing holds the module")
    assert rmmod()
    subprocess.run(["insmod", MODULE], check=True)
    until(lambda: bool(glob.glob(raw.DEVICES)), 10, "the node is back")
    works()


@case
def a_fence_outlives_its_device() -> None:
    """Whoever has one may ask whose it was."""
    name = pci_device()
    fd = fence_of_a_job_that_never_ran()
    Path(DRIVER, "unbind").write_text(name)
    try:
        its = raw.sync_file_name(fd)
        assert its.startswith(("drm_sched-vtpu-q", "detached-driver-")), its
    finally:
        bind(name)
        os.close(fd)
    works()


# ---- Uses, to be disturbed ----


def use_jobs() -> None:
    with Setup(timeout_ms=30000) as dev:
        for number in range(1, 6):
            mark = number * 0x01010101
            copy = raw.copy(dev.host_va, dev.hbm_va, 8)
            done = dev.finish(dev.queue_id, [raw.fill(dev.hbm_va, 8, mark), copy])
            assert done in ENDS, done
            if done != 1:
                return
            assert dev.host_map[0] == number


def use_a_user_queue() -> None:
    with Driven(timeout_ms=30000) as dev:
        for number in range(1, 6):
            dev.user.finish(raw.fill(dev.host_va, 8, number))
            assert dev.host_map[0] == number


def use_memory() -> None:
    """What it gets is zero, what it writes stays, and the device sees it."""
    size, pattern = 16 * PAGE, b"\xa5" * 16 * PAGE
    with Setup(timeout_ms=30000) as dev:
        handle = dev.bo(size, HBM)
        dev.bind(dev.vm_id, handle, AREA, size)
        view = dev.map(handle)
        assert view[:] == bytes(size), "not zero"
        view[:] = pattern
        done = dev.finish(dev.queue_id, [raw.copy(dev.host_va, AREA + size - PAGE, PAGE)])
        assert done in ENDS, done
        assert done != 1 or dev.host_map[:PAGE] == pattern[:PAGE], "the device saw something else"
        assert view[:] == pattern, "not kept"
        dev.unbind(dev.vm_id, AREA, size)
        dev.close_bo(handle)


def use_a_process_that_is_killed() -> None:
    def work() -> None:
        dev = Driven(timeout_ms=30000)
        dev.submit(dev.queue_id, [dev.run(raw.LOOP)])
        dev.user.put(raw.wait(dev.host_va, 1))
        dev.user.ring_doorbell()

    def child_work() -> None:
        # If the device was away: to be killed is all that it is for.
        with suppress(OSError):
            work()

    child, pipe = child_of(child_work)
    try:
        os.read(pipe, 1)
    finally:
        os.close(pipe)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


USES = [use_jobs, use_a_user_queue, use_memory, use_a_process_that_is_killed]


class Kept:
    """Contents of HBM that resets leave alone, as the process and as the device see it."""

    def __init__(self, size: int = HUGE) -> None:
        self.dev = Setup(size=size)
        self.data = random.Random(size).randbytes(size)
        self.dev.hbm_map[:] = self.data

    def check(self) -> None:
        dev = self.dev
        assert dev.hbm_map[:] == self.data
        dev.host_map[:] = bytes(dev.size)
        queue = dev.queue(dev.vm_id)
        done = dev.finish(queue, [raw.copy(dev.host_va, dev.hbm_va, dev.size)])
        assert done == 1, (done, dev.state(queue))
        assert dev.host_map[:] == self.data
        dev.close()


# ---- Resets of the function and of the bus ----


def methods() -> list[str]:
    return (function() / "reset_method").read_text().split()


def reset(method: str = "flr") -> None:
    (function() / "reset_method").write_text(method)
    try:
        (function() / "reset").write_text("1")
    finally:
        (function() / "reset_method").write_text("default")


@case
@expects(resets=True)
def resets_of_each_kind_amid_everything() -> None:
    """One after the other: HBM stays, and all are served again."""
    assert {"flr", "bus"} <= set(methods()), methods()
    kept = Kept()
    before = kept.dev.resets().device_resets

    with disturbed(USES) as served:
        for method in ["flr", "bus"] * 3:
            served()
            reset(method)
        served()
    kept.check()
    with Device() as dev:
        assert dev.resets().device_resets == before + 6
    works()


@case
@expects(resets=True)
def nobody_who_waits_holds_up_a_reset() -> None:
    """Waits for a buffer, a fence, a queue, and for HBM that is short: all are ended by it."""
    with Driven(600000) as dev, Setup(600000) as holder, Device() as other:
        dev.submit(dev.queue_id, [dev.run(raw.LOOP)])
        sync = dev.syncobj()
        dev.submit(dev.queue_id, [raw.nop()], [(sync, SYNC_SIGNAL, 0)])
        dev.user.put(raw.wait(dev.host_va, 1))
        dev.user.ring_doorbell()
        share = dev.memory().hbm_bytes * 6 // 10 // PAGE * PAGE
        holder.bind(holder.vm_id, holder.bo(share, HBM), AREA, share)
        holder.submit(holder.queue_id, [raw.wait(holder.host_va, 1)])
        ends: dict[str, str] = {}

        def waiter(name: str, wait: Callable[[], object]) -> threading.Thread:
            def body() -> None:
                try:
                    wait()
                    ends[name] = "done"
                except OSError as error:
                    ends[name] = errno.errorcode[error.errno or 0]

            thread = threading.Thread(target=body, daemon=True)
            thread.start()
            return thread

        forever = raw.absolute(600)
        threads = [
            waiter("buffer", lambda: dev.call("bo_wait", handle=dev.host, timeout_ns=forever)),
            waiter("fence", lambda: dev.wait(sync, 600)),
            waiter("queue", lambda: dev.user.wait(1, 600)),
            waiter("memory", lambda: other.bo(share, HBM)),
        ]
        time.sleep(0.3)
        assert not ends, ends
        reset()
        for thread in threads:
            thread.join(30)
        assert ends == {"buffer": "done", "fence": "done", "queue": "EIO", "memory": "done"}, ends
        assert dev.fence_error(sync) == -errno.ENODEV
    works()


@case
@expects(resets=True)
def resets_leak_nothing() -> None:
    """Of files that had work when it happened, however many there were."""
    with Device() as dev:
        used = dev.memory().hbm_used
        for turn in range(dev.info().num_queues + 4):
            with Driven(timeout_ms=600000) as lost:
                lost.submit(lost.queue_id, [lost.run(raw.LOOP)])
                lost.user.put(raw.wait(lost.host_va, 1))
                lost.user.ring_doorbell()
                if turn % 4 == 0:
                    reset()
                    with raises(errno.EIO):
                        lost.submit(lost.queue_id, [raw.nop()])
        until(lambda: dev.memory().hbm_used == used, 10, "HBM is back")
    until(module_is_idle, 10, "nothing holds the module")
    works()


def everything_readable(name: str) -> list[str]:
    folders = [function_of(name), Path("/sys/kernel/debug/accel", name)]
    found = []
    for folder in folders:
        for pattern in ("*", "hwmon/hwmon*/*", "power/*", "accel/accel*/*"):
            found += [path for path in folder.glob(pattern) if is_readable(path)]
    # Space of the hardware itself, which is not the driver's to guard.
    return [str(path) for path in found if not path.name.startswith("resource")]


def is_readable(path: Path) -> bool:
    try:
        return path.is_file() and bool(path.stat().st_mode & 0o444)
    except OSError:
        return False


@case
@expects(resets=True)
def whatever_is_read_amid_comings_and_goings() -> None:
    """Attributes and debugfs never reach a BAR that is not there."""
    name = pci_device()
    told: set[str] = set()

    def look() -> None:
        for path in everything_readable(name):
            try:
                with open(path, "rb", buffering=0) as file:
                    file.read(1 << 16)
                told.add(os.path.basename(path))
            except OSError as error:
                assert error.errno in {
                    errno.ENODEV,
                    errno.ENOENT,
                    errno.EBUSY,
                    errno.EIO,
                    errno.ENODATA,
                    errno.EINVAL,
                }, (path, error)

    with disturbed([look, look, use_jobs]) as served:
        for turn in range(6):
            served()
            reset("bus" if turn % 2 else "flr")
            Path(DRIVER, "unbind").write_text(name)
            time.sleep(0.05)
            bind(name)
        served()
    assert {"hbm_used", "busy_time_us", "registers", "queues"} <= told, told
    until(module_is_idle, 10, "nothing holds the module")
    with ExitStack() as stack:
        paths = everything_readable(name)
        held = [stack.enter_context(open(path, "rb", buffering=0)) for path in paths]
        Path(DRIVER, "unbind").write_text(name)
        for file in held:
            with suppress(OSError):
                file.read(1 << 16)
    bind(name)
    works()


@case
@expects(HANG, resets=True)
def time_limits_race_with_ends() -> None:
    """Jobs that are over their limit just when their queue, file or function goes."""
    rng = random.Random(5)

    def use() -> None:
        with Setup(timeout_ms=60) as dev:
            other = dev.queue(dev.vm_id, 60)
            dev.submit(dev.queue_id, [raw.wait(dev.host_va, 1)])
            dev.submit(other, [dev.run(raw.LOOP)])
            for queue in (dev.queue_id, other):
                dev.submit(queue, [raw.nop()])
            time.sleep(rng.uniform(0.04, 0.12))
            if rng.random() < 0.5:
                dev.call("queue_destroy", queue_id=other)

    with disturbed([use] * 4) as served:
        for _ in range(6):
            served()
            reset()
        served()
    works()


@case
def timers_race_with_queues_that_end() -> None:
    """They look every few milliseconds after a job that lives; others are in line behind it."""
    rng = random.Random(6)

    def use() -> None:
        with Setup() as dev:
            loop = dev.run(raw.LOOP)
            for _ in range(10):
                queue = dev.queue(dev.vm_id, 60000, stall_ms=40)
                for job in [loop, *[raw.nop()] * 20]:
                    dev.submit(queue, [job])
                time.sleep(rng.uniform(0, 0.02))
                dev.call("queue_destroy", queue_id=queue)

    with disturbed([use] * 3) as served:
        for _ in range(3):
            served()
    works()


# ---- The device is taken away ----


POWER_OFF, INDICATOR_OFF, BOTH_INDICATORS_OFF, INTERRUPTS = 1 << 10, 3 << 8, 0xF << 6, 1 << 5


def slot_control(port: Path) -> tuple[int, int]:
    """Where a port's Slot Control register is in its configuration, and what it says."""
    space = (port / "config").read_bytes()
    at = space[0x34]
    while space[at] != 0x10:
        at = space[at + 1]
    return at + 0x18, struct.unpack_from("<H", space, at + 0x18)[0]


def slot_is_off(slot: str) -> bool:
    """The kernel has cut its power, and a second later its light, which is when the machine
    lets go whatever is in it by then."""
    bus = Path("/sys/bus/pci/slots", slot, "address").read_text().rpartition(":")[0]
    _, value = slot_control(Path("/sys/class/pci_bus", bus).resolve().parents[1])
    off = POWER_OFF | INDICATOR_OFF
    return value & off == off


def pull_out(port: Path) -> None:
    """What is in a slot, at once: nobody is asked.

    The machine lets a device go when its slot's power is off, but that must not be
    what the kernel sees, which would think it had done so itself: no interrupt until
    the power is on again.
    """
    control, value = slot_control(port)
    with open(port / "config", "r+b", buffering=0) as config:
        for word in ((value | POWER_OFF | BOTH_INDICATORS_OFF) & ~INTERRUPTS, value):
            config.seek(control)
            config.write(struct.pack("<H", word))


def held_when_it_goes(pull: bool) -> None:
    """All kinds of use of a device that is about to go; says ready, and survived."""
    name = pci_device()
    port = function_of(name).resolve().parent
    dev = Driven(timeout_ms=600000, size=HUGE)
    sync = dev.syncobj()
    memory = Memory(HUGE)
    fd = export(dev, dev.hbm)
    other, _ = udmabuf([(0, 4 * PAGE)], 4 * PAGE)
    for number, handle in enumerate((dev.userptr(memory.addr, HUGE), import_(dev, other))):
        dev.bind(dev.vm_id, handle, AREA + number * HUGE, HUGE if number == 0 else 4 * PAGE)
    dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, SYNC_SIGNAL, 0)])
    dev.submit(dev.queue_id, [raw.nop()])
    fence = dev.call("syncobj_handle_to_fd", handle=sync, flags=1).fd
    dev.user.put(raw.wait(dev.host_va + 64, 1))
    dev.user.ring_doorbell()
    ends: dict[str, int] = {}

    def waiter(name: str, wait: Callable[[], object]) -> None:
        try:
            wait()
            ends[name] = 0
        except OSError as error:
            ends[name] = error.errno or 0

    def toucher() -> None:
        while not is_gone(dev):
            dev.hbm_map[::PAGE] = b"t" * (HUGE // PAGE)
            dev.user.ring_doorbell()

    forever = raw.absolute(600)
    calls = {
        "buffer": lambda: dev.call("bo_wait", handle=dev.host, timeout_ns=forever),
        "fence": lambda: dev.wait(sync, 600),
        "queue": lambda: dev.user.wait(dev.user.tail, 600),
    }
    threads = [threading.Thread(target=waiter, args=c, daemon=True) for c in calls.items()]
    threads.append(threading.Thread(target=toucher, daemon=True))
    for thread in threads:
        thread.start()

    with disturbed([use_jobs, use_a_user_queue]) as served:
        served()
        print("ready", flush=True)
        if pull:
            pull_out(port)
        until(lambda: is_gone(dev), 60, "the device is gone")
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), ends
    assert set(ends.values()) <= {0, errno.ENODEV, errno.EIO}, ends
    assert raw.sync_file_state(fence) == -errno.ENODEV
    until(lambda: pinned() == 0, 20, "nothing is pinned")
    assert dev.user.word == 0 and dev.user.fence[:] == bytes(PAGE)
    assert dev.hbm_map[: 4 * PAGE : PAGE] in (bytes(4), b"tttt")
    with mmap.mmap(fd, HUGE) as view:
        view[:4] = b"void"
    assert not rmmod()
    dev.close()
    os.close(fd)
    os.close(fence)
    until(module_is_idle, 20, "nothing holds the module")
    print("survived", flush=True)


# ---- Until a file says so ----

ENOUGH = Path(FOLDER, "enough")


def held_until_told() -> None:
    """A job that never ends and a mapping, of a device that goes; says ready, gone, survived."""
    dev = Setup(timeout_ms=600000)
    dev.hbm_map[:4] = b"mine"
    sync = dev.syncobj()
    dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, SYNC_SIGNAL, 0)])
    fence = dev.call("syncobj_handle_to_fd", handle=sync, flags=1).fd
    print("ready", flush=True)
    until(lambda: raw.sync_file_state(fence) != 0, 60, "the job has ended")
    assert raw.sync_file_state(fence) == -errno.ENODEV
    # Waits while the device may come back; then it may still show what is there.
    bytes(dev.hbm_map[:4])
    until(lambda: is_gone(dev), 60, "the device is gone")
    print("gone", flush=True)
    until(ENOUGH.exists, 120, "the end")
    assert dev.hbm_map[:4] == bytes(4)
    dev.close()
    os.close(fence)
    print("survived", flush=True)


def everything_until_told() -> None:
    kept = Kept()
    ENOUGH.unlink(missing_ok=True)

    with disturbed(USES) as served:
        served()
        print("ready", flush=True)
        until(ENOUGH.exists, 300, "the end")
        served()
    kept.check()
    works()
    print("survived", flush=True)


# ---- The next kernel ----

KEXEC_FILE_LOAD, REBOOT_KEXEC = 320, 0x45584543


def into_the_next_kernel() -> None:
    """With all of the device at work: nobody is asked to end first."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = Path("/proc/cmdline").read_bytes().strip() + b"\0"
    files = [os.open(f"{FOLDER}/{name}", os.O_RDONLY) for name in ("kernel", "initramfs")]
    if libc.syscall(KEXEC_FILE_LOAD, *files, len(words), words, 0):
        raise OSError(ctypes.get_errno(), "kexec_file_load")
    dev = Driven(timeout_ms=600000)
    dev.submit(dev.queue_id, [dev.run(raw.LOOP)])
    dev.user.put(raw.wait(dev.host_va + 64, 1))
    dev.user.ring_doorbell()

    with disturbed(USES) as served:
        served()
        libc.reboot(REBOOT_KEXEC)
    raise OSError(ctypes.get_errno(), "reboot")


BACKGROUND = {
    "into_the_next_kernel": into_the_next_kernel,
    "unplugged": lambda: held_when_it_goes(False),
    "pulled": lambda: held_when_it_goes(True),
    "everything_until_told": everything_until_told,
    "held_until_told": held_until_told,
}

if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in BACKGROUND:
        BACKGROUND[sys.argv[1]]()
    else:
        sys.exit(main(sys.argv[1:], CASES))
