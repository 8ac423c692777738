# SPDX-License-Identifier: MIT
"""An edited driver goes into a running guest; gdb reaches the kernel, the driver and QEMU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from vtpu_compiler import hw
from vtpu_guest import Attached, Guest, GuestError, debug, kernels, roots
from vtpu_guest.cache import build_lock
from vtpu_guest.driver import EXAMPLE, SOURCE, compile_driver, exchange
from vtpu_guest.stage import StageError

pytestmark = pytest.mark.guest

RAW = Path(__file__).parents[1] / "driver/vtpu_raw.py"
# Asks the driver and, by an address space, the device again and again, so that a
# breakpoint is hit whenever it is set.
ASK = """
import sys
sys.path.insert(0, "/tmp")
import vtpu_raw, time
with vtpu_raw.Device() as device:
    while True:
        device.call("dev_query")
        device.call("vm_destroy", vm_id=device.call("vm_create").vm_id)
        time.sleep(0.01)
"""
EDIT = '\tinit_completion(&vdev->test_irq);\n\tdev_info(vdev->drm.dev, "edited for a test\\n");\n'


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with Guest() as running:
        running.put(RAW, "/tmp/vtpu_raw.py")
        running.put(ASK.encode(), "/tmp/ask.py")
        running.release_agent()
        yield running.folder


def put_in(folder: Path, source: Path) -> str:
    with build_lock():
        kernel = kernels.chosen(roots.build_root(), roots.guest_root())
        module = compile_driver(kernel, source)
    with Attached(folder) as guest:
        return exchange(guest, module, kernel).messages


@pytest.fixture
def own_driver(folder: Path) -> Iterator[None]:
    """The guest has the checkout's driver again after the test."""
    yield
    put_in(folder, SOURCE)


def edited(folder: Path, old: str, new: str) -> Path:
    source = folder / "kmod"
    shutil.copytree(SOURCE, source)
    path = source / "vtpu_drv.c"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return source


@pytest.mark.usefixtures("own_driver")
def test_an_edited_driver_goes_into_the_running_guest(folder: Path, tmp_path: Path) -> None:
    boot = "/proc/sys/kernel/random/boot_id"
    with Attached(folder) as guest:
        before = guest.get(boot)
    source = edited(tmp_path, "\tinit_completion(&vdev->test_irq);\n", EDIT)
    assert "edited for a test" in put_in(folder, source)
    with Attached(folder) as guest:
        assert guest.get(boot) == before
        assert guest.run(["test", "-c", "/dev/accel/accel0"]).returncode == 0


def test_what_does_not_compile_is_named_with_file_and_line(folder: Path, tmp_path: Path) -> None:
    include = "#include <linux/module.h>\n"
    source = edited(tmp_path, include, f"{include}nonsense\n")
    line = (source / "vtpu_drv.c").read_text().splitlines().index("nonsense") + 1
    with pytest.raises(StageError, match=rf"kmod/vtpu_drv\.c:{line}:"):
        put_in(folder, source)
    with Attached(folder) as guest:
        assert guest.run(["test", "-c", "/dev/accel/accel0"]).returncode == 0


def test_a_driver_in_use_is_not_taken_away(folder: Path) -> None:
    with Attached(folder) as guest:
        guest.run("python3 /tmp/ask.py >/dev/null 2>&1 & echo $! >/tmp/pid").check()
        # It has the device open once it is in the list of its files.
        holds = "ls -l /proc/$(cat /tmp/pid)/fd | grep -q /dev/accel/"
        guest.run(f"until {holds}; do sleep 0.05; done").check()
    try:
        with pytest.raises(GuestError, match=r"in use by python3 \(process \d+\)"):
            put_in(folder, SOURCE)
    finally:
        with Attached(folder) as guest:
            guest.run("kill $(cat /tmp/pid); while [ -d /proc/$(cat /tmp/pid) ]; do :; done")


@pytest.mark.usefixtures("own_driver")
def test_the_example_driver_makes_the_device_work(folder: Path) -> None:
    messages = put_in(folder, EXAMPLE)
    assert "the device wrote 0x600d600d600d600d to its memory" in messages
    with Attached(folder) as guest:
        assert guest.run("ls /dev/accel").text == ""


@pytest.fixture
def asking(folder: Path) -> Iterator[None]:
    with Attached(folder) as guest:
        guest.run("python3 /tmp/ask.py >/dev/null 2>&1 &").check()
    yield
    with Attached(folder) as guest:  # it goes on after gdb, and so does the process
        guest.run(["pkill", "-f", "[a]sk.py"]).check()


@pytest.mark.usefixtures("asking")
def test_gdb_stops_the_kernel_in_the_driver(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = [
        "hbreak vtpu_dev_query_ioctl",
        "continue",
        "print ((struct vtpu_device *)$rdi)->num_queues",
        "list vtpu_dev_query_ioctl",
        "backtrace",
    ]
    assert debug.debug(folder, "kernel", ";".join(commands), timeout=300) == 0
    said = capfd.readouterr().out
    assert "Breakpoint 1, vtpu_dev_query_ioctl" in said
    assert f"$1 = {hw.NUM_QUEUES}\n" in said
    assert "struct drm_vtpu_dev_query *args = data;" in said  # the source of the checkout
    # The kernel's own names, up to where the process came in, through another module.
    stack = re.findall(r"^#\d+ +(?:0x\w+ in )?(\w+)", said, re.MULTILINE)
    assert stack[0] == "vtpu_dev_query_ioctl"
    assert stack[1:3] == ["drm_ioctl_kernel", "drm_ioctl"]
    assert "entry_SYSCALL_64_after_hwframe" in stack


@pytest.mark.usefixtures("asking")
def test_gdb_stops_qemu_in_the_device(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands = ["break vtpu_core_mmio_write", "continue", "print size", "backtrace 4"]
    assert debug.debug(folder, "qemu", ";".join(commands), timeout=300) == 0
    said = capfd.readouterr().out
    assert "vtpu_core_mmio_write" in said
    assert re.search(r"\$1 = [48]\b", said)
    assert "vtpu_regs_write" in said
    assert "vtpu_bars.c" in said
