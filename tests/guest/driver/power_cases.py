# SPDX-License-Identifier: MIT
"""The device sleeps and wakes, alone and with the machine. Runs in the guest as root."""

from __future__ import annotations

import errno
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import vtpu_raw as raw
from cases import DRIVER, Setup, collector, disturbed, main, module_is_idle, pci_device, until
from lifecycle_cases import bind, reset, works
from userptr_cases import AREA, Memory
from userq_cases import Driven, ended, is_alive
from vtpu_raw import HBM, HUGE, PAGE, SYNC_SIGNAL, Device, UserQueue
from watch import expects

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
DELAY_MS, LONG_MS = 20, 600000


def attribute(name: str) -> Path:
    return Path("/sys/bus/pci/devices", pci_device(), name)


def is_asleep() -> bool:
    return attribute("power/runtime_status").read_text() == "suspended\n"


def milliseconds(state: str) -> int:
    """For how long it was so in all, by the kernel's count."""
    return int(attribute(f"power/runtime_{state}_time").read_text())


def falls_asleep() -> None:
    until(is_asleep, 20, "the device sleeps")
    assert attribute("power_state").read_text() == "D3hot\n"


@contextmanager
def light_sleeper() -> Iterator[None]:
    """Sleeps soon after it was used, instead of after two seconds."""
    delay = attribute("power/autosuspend_delay_ms")
    before = delay.read_text()
    delay.write_text(str(DELAY_MS))
    try:
        yield
    finally:
        delay.write_text(before)


# ---- While the machine works ----


@case
def it_sleeps_and_whoever_needs_it_wakes_it() -> None:
    with light_sleeper(), Setup() as dev:
        data = random.Random(1).randbytes(dev.size)
        dev.hbm_map[:] = data
        resets = dev.resets()

        def touch() -> None:
            assert dev.hbm_map[:] == data

        def job() -> None:
            dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, dev.size)])
            assert dev.host_map[:] == data

        def map_more() -> None:
            dev.bind(dev.vm_id, dev.hbm, AREA, dev.size)
            dev.unbind(dev.vm_id, AREA, dev.size)

        def new_buffer() -> None:
            handle = dev.bo(PAGE, HBM)
            falls_asleep()
            with dev.map(handle) as view:
                assert view[:] == bytes(PAGE)
            dev.close_bo(handle)

        def new_queue() -> None:
            queue = dev.queue(dev.vm_id)
            falls_asleep()
            assert dev.finish(queue, [raw.nop()]) == 1
            dev.call("queue_destroy", queue_id=queue)

        def new_file() -> None:
            with Setup() as other:
                other.finish_ok([raw.nop()])

        for wake in (touch, job, map_more, new_buffer, new_queue, new_file):
            falls_asleep()
            awake = milliseconds("active")
            wake()
            until(lambda awake=awake: milliseconds("active") > awake, 20, "it was awake")
        falls_asleep()
        # It was the same device all the time, which has forgotten nothing.
        assert dev.resets() == resets
        assert dev.state(dev.queue_id).status == raw.OK


@case
def work_keeps_it_awake() -> None:
    """A job until it ends, a user queue as long as there is one."""
    with light_sleeper(), Driven(timeout_ms=60000) as dev:
        gate = dev.host_va + PAGE
        for hold in ("job", "queue"):
            if hold == "job":
                dev.user.destroy()
                sync = dev.syncobj()
                dev.submit(dev.queue_id, [raw.wait(gate, 1)], [(sync, SYNC_SIGNAL, 0)])
            else:
                user = UserQueue(dev, dev.vm_id)
            for _ in range(5):
                time.sleep(2 * DELAY_MS / 1000)
                assert not is_asleep(), hold
            if hold == "job":
                dev.host_map[PAGE] = 1
                dev.wait(sync)
            else:
                user.finish(raw.fill(dev.hbm_va, 8, 3))
                user.destroy()
                user.unmap()
            falls_asleep()
        assert dev.hbm_map[0] == 3


@case
def it_is_told_to_stay_awake() -> None:
    with light_sleeper():
        falls_asleep()
        attribute("power/control").write_text("on")
        try:
            for _ in range(5):
                time.sleep(2 * DELAY_MS / 1000)
                assert not is_asleep()
        finally:
            attribute("power/control").write_text("auto")
        falls_asleep()


@case
@expects(resets=True)
def resets_and_removal_while_it_sleeps() -> None:
    with light_sleeper():
        for method in ("flr", "bus"):
            with Setup() as dev:
                dev.hbm_map[:5] = b"still"
                falls_asleep()
                reset(method)
                dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, 8)])
                assert dev.host_map[:5] == b"still"
                falls_asleep()
        name = pci_device()
        with Setup() as dev:
            dev.hbm_map[0] = 1
            falls_asleep()
            Path(DRIVER, "unbind").write_text(name)
            assert dev.hbm_map[0] in (0, 1)
        until(module_is_idle, 10, "nothing holds the module")
        bind(name)
    works()


@case
def it_naps_between_uses() -> None:
    """Of several threads: each finds it asleep, about to sleep, or about to wake."""
    with light_sleeper(), Setup() as dev, Setup() as other:
        attribute("power/autosuspend_delay_ms").write_text("0")

        def touch() -> None:
            dev.hbm_map[:] = data = random.randbytes(dev.size)
            time.sleep(random.random() / 50)
            assert dev.hbm_map[:] == data

        def job() -> None:
            fill = random.getrandbits(32)
            other.finish_ok([raw.fill(other.hbm_va, 4, fill)])
            time.sleep(random.random() / 50)
            assert int.from_bytes(other.hbm_map[:4], "little") == fill

        with disturbed([touch, job]) as served:
            for _ in range(20):
                asleep = milliseconds("suspended")
                until(lambda asleep=asleep: milliseconds("suspended") > asleep, 20, "it sleeps")
            served()


# ---- While the machine sleeps ----


class Lasting:
    """All that a process can have, before the machine sleeps and after it.

    Time limits so long that a job whose interrupt is lost is not found by its timer.
    """

    def __init__(self) -> None:
        self.dev = dev = Driven(LONG_MS, size=HUGE)
        self.data = random.Random(4).randbytes(HUGE)
        dev.hbm_map[:] = dev.host_map[:] = self.data
        is_alive(dev)
        dev.hbm_map[:8] = dev.host_map[:8] = self.data[:8]
        # A buffer that is not in HBM when it happens, for want of room.
        share = dev.memory().hbm_bytes * 6 // 10 // PAGE * PAGE
        self.out, self.taker = dev.bo(share, HBM), Device()
        with dev.map(self.out) as view:
            view[:PAGE] = view[share - PAGE :] = self.data[:PAGE]
        self.big = self.taker.bo(share, HBM)
        self.big_map = self.taker.map(self.big)
        self.big_map[:PAGE] = self.big_map[share - PAGE :] = self.data[-PAGE:]
        assert dev.memory().hbm_evicted >= share
        self.share = share
        self.memory = Memory(PAGE)
        self.memory.view[:] = self.data[:PAGE]
        dev.bind(dev.vm_id, dev.userptr(self.memory.addr, PAGE), AREA, PAGE)
        self.resets = dev.resets()
        # One job never ends, one waits for it.
        self.lost, self.later = dev.syncobj(), dev.syncobj()
        self.looping, self.waiting = dev.queue(dev.vm_id, LONG_MS), dev.queue(dev.vm_id, LONG_MS)
        dev.submit(self.looping, [dev.run(raw.LOOP)], [(self.lost, SYNC_SIGNAL, 0)])
        copy = raw.copy(dev.host_va, dev.hbm_va + PAGE, PAGE)
        dev.submit(self.waiting, [copy], [(self.lost, 0, 0), (self.later, SYNC_SIGNAL, 0)])
        self.sleepers_end: list[int] = []
        self.sleeper = threading.Thread(target=self._sleep, daemon=True)
        self.sleeper.start()

    def _sleep(self) -> None:
        try:
            self.dev.user.wait(self.dev.user.word + 1, 600)
        except OSError as error:
            self.sleepers_end.append(error.errno or 0)

    def check(self) -> None:
        dev = self.dev
        assert dev.hbm_map[:] == self.data, "HBM as the process sees it"
        share = self.share
        assert self.big_map[:PAGE] == self.big_map[share - PAGE :] == self.data[-PAGE:]
        assert dev.host_map[PAGE:] == self.data[PAGE:]
        # What ran for ever is lost, with its queue alone.
        dev.wait(self.lost, 30)
        assert dev.fence_error(self.lost) == -errno.ENODEV
        assert dev.state(self.looping).status == raw.LOST
        dev.wait(self.later, 30)
        assert dev.fence_error(self.later) == 1
        assert dev.host_map[:PAGE] == self.data[PAGE : 2 * PAGE]
        assert dev.state(dev.queue_id).status == dev.state(self.waiting).status == raw.OK
        # The device has the same address space, and all that it maps.
        dev.host_map[:] = bytes(HUGE)
        dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, HUGE)])
        assert dev.host_map[:] == self.data, "HBM as the device sees it"
        dev.finish_ok([raw.copy(dev.host_va, AREA, PAGE), raw.fill(AREA, PAGE, 0x77777777)])
        assert dev.host_map[:PAGE] == self.data[:PAGE] and self.memory.view[:4] == b"wwww"
        with dev.map(self.out) as view:
            assert view[:PAGE] == view[share - PAGE :] == self.data[:PAGE], "what was out"
        # A user queue's process counts on from where it was: it has ended, a new one works.
        self.sleeper.join(30)
        assert self.sleepers_end == [errno.EIO], self.sleepers_end
        ended(dev, dev.user, raw.LOST)
        successor = UserQueue(dev, dev.vm_id)
        successor.finish(raw.fill(dev.host_va, 8, 5))
        assert dev.host_map[0] == 5
        successor.unmap()
        assert dev.resets() == self.resets
        dev.close()
        self.big_map.close()
        self.taker.close()


def tell(path: str, word: str) -> None:
    """Once: a buffered file would try again when it is closed."""
    with open(path, "wb", buffering=0) as file:
        file.write(word.encode())


def the_machine_sleeps(kind: str) -> None:
    lasting = Lasting()
    print("ready", flush=True)
    tell("/sys/power/state", kind)
    lasting.check()
    is_alive_again()
    print("survived", flush=True)


def is_alive_again() -> None:
    with Driven() as dev:
        is_alive(dev)


if __name__ == "__main__":
    if sys.argv[1:2] == ["sleep"]:
        the_machine_sleeps(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:], CASES))
