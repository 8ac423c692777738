# SPDX-License-Identifier: MIT
"""Guests that sleep amid a command. So does their agent, which may then miss what it is asked:
the console tells when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import FOLDER
from harness import ends_well, watched

LOG = f"{FOLDER}/asleep.log"
SECONDS = 240


@contextmanager
def sleeper(folder: Path | None = None, **machine: Any) -> Iterator[Any]:
    """As booted; its machine can suspend to RAM, if has_ram_sleep() says so, and hibernate, if
    there is a folder for the image."""
    from vtpu_guest import Guest

    if folder:
        machine["extra_arguments"] = (*machine.get("extra_arguments", ()), *_swap_disk(folder))
    guest = Guest(memory_mb=1536, **machine)
    images = guest.machine.images
    kernel = images.packed_kernel or images.kernel
    guest.machine = replace(guest.machine, images=replace(images, kernel=kernel))
    guest.start()
    try:
        with watched(guest):
            yield guest
        ends_well(guest)
    finally:
        # After a suspend to RAM the firmware has not set up again what would power it off.
        guest.kill()


def _swap_disk(folder: Path) -> tuple[str, ...]:
    with open(folder / "swap", "wb") as swap:
        swap.truncate(1 << 30)
    disk = f"driver=file,node-name=swap,filename={folder}/swap"
    return ("-blockdev", disk, "-device", "virtio-blk-pci,drive=swap,serial=swap")


def has_ram_sleep(guest: Any) -> bool:
    """Or QEMU would write the kernel's ELF file anew at wakeup."""
    return guest.machine.images.packed_kernel is not None


def run_asleep(guest: Any, command: str, seconds: float = SECONDS) -> str:
    """What a shell command printed, which wakes again by itself."""
    return _goes_on(guest, _begin(guest, command), seconds)


def suspend_to_ram(guest: Any, command: str, meanwhile: Callable[[], None]) -> str:
    """Likewise, of a command that suspends; and what to do before it is woken."""

    def is_suspended() -> bool:
        return bool(guest.qmp("query-status")["status"] == "suspended")

    over = _begin(guest, command)
    _wait_until_asleep(guest, over, is_suspended)
    meanwhile()
    guest.qmp("system_wakeup")
    return _goes_on(guest, over)


SWAP = """
for disk in /sys/block/vd*; do
    [ "$(cat $disk/serial)" = swap ] && swap=/dev/${disk##*/}
done
mkswap -q $swap && swapon $swap && echo shutdown >/sys/power/disk
echo 3 >/proc/sys/vm/drop_caches  # an image of what has to be in it
"""


def hibernate(guest: Any, command: str, meanwhile: Callable[[], None]) -> str:
    """Likewise; the machine is switched off, and another one goes on."""
    guest.run(SWAP).check()
    over = _begin(guest, command)
    _wait_until_asleep(guest, over, lambda: guest.has_ended)
    guest.kill()
    meanwhile()
    words = f"{guest.machine.kernel_arguments} vtpu.resume=swap"
    guest.machine = replace(guest.machine, kernel_arguments=words)
    guest.start(wait=False)
    return _goes_on(guest, over)


def _begin(guest: Any, command: str) -> str:
    """Returns what the console says when it is over."""
    from vtpu_guest import GuestError
    from vtpu_guest.channels import ChannelError

    over = f"the sleep is over: {time.monotonic_ns()}"
    run = f"cd {FOLDER}; ({command}; echo {over} >/dev/ttyS0) </dev/null >{LOG} 2>&1 &"
    # It may be asleep before its agent has told that this has begun.
    with suppress(ChannelError, GuestError, TimeoutError):
        guest.run(run).check()
    return over


def _wait(guest: Any, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    from vtpu_guest.kernels import patience

    deadline = time.monotonic() + seconds * patience()
    while not condition():
        assert time.monotonic() < deadline, _console(guest)[-3000:]
        time.sleep(0.1)


def _wait_until_asleep(guest: Any, over: str, is_asleep: Callable[[], bool]) -> None:
    def has_fallen_asleep() -> bool:
        assert over not in _console(guest), guest.run(f"cat {LOG}; dmesg | tail -n 60").text
        return is_asleep()

    _wait(guest, has_fallen_asleep)


def _goes_on(guest: Any, over: str, seconds: float = SECONDS) -> str:
    from vtpu_guest import Guest

    def is_over() -> bool:
        guest.check_running()
        return over in _console(guest)

    _wait(guest, is_over, seconds)
    # Its agent answers whoever comes anew; on newer kernels nobody else.
    if isinstance(guest, Guest):
        guest.release_agent()
        guest.wait_agent()
    return _printed(guest)


def _console(guest: Any) -> str:
    text: str = (guest.folder / "console.log").read_text(errors="replace")
    return text


def _printed(guest: Any) -> str:
    text: str = guest.run(["cat", LOG]).check().text
    return text
