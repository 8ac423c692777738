# SPDX-License-Identifier: MIT
"""The device sleeps, alone and with the machine; what was in HBM is there afterwards.

Its HBM is a file, in which the host leaves garbage while the machine sleeps: what is
found there later is what the driver has saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import FOLDER
from conftest import put_cases, run_cases
from power_cases import CASES

pytestmark = pytest.mark.guest
HBM = 64 << 20
LOG = f"{FOLDER}/power.log"


def machine(folder: Path, **changes: Any) -> Any:
    from vtpu_guest import Guest

    disk = f"driver=file,node-name=swap,filename={folder}/swap"
    arguments = (
        *("-object", f"memory-backend-file,id=hbm,mem-path={folder}/hbm,size={HBM},share=on"),
        *("-blockdev", disk, "-device", "virtio-blk-pci,drive=swap,serial=swap"),
    )
    guest = Guest(device="hbm-memdev=hbm", extra_arguments=arguments, memory_mb=1024, **changes)
    images = guest.machine.images
    kernel = images.packed_kernel or images.kernel
    guest.machine = replace(guest.machine, images=replace(images, kernel=kernel))
    return guest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("power")
    with open(folder / "swap", "wb") as swap:
        swap.truncate(1 << 30)
    return folder


@pytest.fixture(scope="module")
def guests(folder: Path) -> Iterator[list[Any]]:
    """The one that runs; hibernating ends it, and another one goes on."""
    running = [machine(folder)]
    running[0].start()
    try:
        put_cases(running[0])
        yield running
    finally:
        # After a suspend to RAM the firmware has not set up again what would power it off.
        running[0].kill()


@pytest.fixture(scope="module")
def results(guests: list[Any]) -> dict[str, dict[str, Any]]:
    return run_cases(guests[0], "power_cases.py")


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)


# ---- With the machine ----


def over(kind: str) -> str:
    return f"the sleep is over: {kind}"


def begin(guest: Any, kind: str) -> None:
    """The guest sleeps soon, and its agent with it: the console tells when it is over."""
    guest.run(
        f"cd {FOLDER}; (python3 power_cases.py sleep {kind}; echo {over(kind)} >/dev/ttyS0)"
        f" </dev/null >{LOG} 2>&1 &"
    ).check()


def wait_asleep(guest: Any, kind: str, is_asleep: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not is_asleep():
        assert over(kind) not in guest.console(), said(guest)
        assert time.monotonic() < deadline, guest.console()[-3000:]
        time.sleep(0.1)


def spoil(folder: Path) -> None:
    with open(folder / "hbm", "r+b") as hbm:
        hbm.write(b"\xdb" * HBM)


def said(guest: Any) -> str:
    return guest.run(f"cat {LOG}; dmesg | tail -n 40").text


def goes_on(guest: Any, kind: str) -> None:
    deadline = time.monotonic() + 240
    while over(kind) not in guest.console():
        guest.check_running()
        assert time.monotonic() < deadline, guest.console()[-3000:]
        time.sleep(0.1)
    guest.release_agent()
    guest.wait_agent()
    assert guest.run(["tail", "-n", "1", LOG]).text == "survived\n", said(guest)
    messages = guest.run(["dmesg"]).text
    for bad in ("WARNING:", "BUG:", "Oops"):
        assert bad not in messages, messages[-3000:]


SWAP = """
for disk in /sys/block/vd*; do
    [ "$(cat $disk/serial)" = swap ] && swap=/dev/${disk##*/}
done
mkswap -q $swap && swapon $swap && echo shutdown >/sys/power/disk
echo 3 >/proc/sys/vm/drop_caches  # an image of what has to be in it
"""


@pytest.mark.stress  # an image is made, written and read under emulation
def test_hibernation(guests: list[Any], folder: Path) -> None:
    """The machine is switched off, and another one goes on where it was."""
    guests[0].run(SWAP).check()
    begin(guests[0], "disk")
    wait_asleep(guests[0], "disk", lambda: guests[0].has_ended)
    guests[0].kill()
    spoil(folder)
    guests[0] = machine(folder, kernel_arguments="vtpu.resume=swap")
    guests[0].start(wait=False)
    goes_on(guests[0], "disk")


def test_suspend_to_ram(guests: list[Any], folder: Path) -> None:
    """HBM loses its power, and with it what it held."""
    [guest] = guests
    if not guest.machine.images.packed_kernel:
        pytest.skip("QEMU writes this kernel's ELF file anew at wakeup")
    begin(guest, "mem")
    wait_asleep(guest, "mem", lambda: guest.qmp("query-status")["status"] == "suspended")
    spoil(folder)
    guest.qmp("system_wakeup")
    goes_on(guest, "mem")
