# SPDX-License-Identifier: MIT
"""The device comes, goes, fails and is reset with work on it, behind an IOMMU.

What the guest can do to itself is in lifecycle_cases.py; here is what its host does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from cases import FOLDER
from conftest import about_to_unplug, begin_to_watch, booted, run_cases
from lifecycle_cases import CASES
from test_aer import ERROR, LINK_RESET, RECOVERED, RECOVERIES, recoveries, report
from test_injection import DEVICE, inject
from watch import HANG, LOST, NOT_SERVED, PROBE_FAILED, STUCK_ENGINES, STUCK_QUEUE

pytestmark = [pytest.mark.guest, pytest.mark.stress]
HBM = 64 << 20
ARGUMENTS = ("-device", "intel-iommu,intremap=on,caching-mode=on")
LOG = f"{FOLDER}/lifecycle.log"


@pytest.fixture(scope="module")
def guest() -> Iterator[Any]:
    machine = {"extra_arguments": ARGUMENTS, "device": f"hbm-size={HBM}"}
    with booted(**machine, kernel_arguments="intel_iommu=on") as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, guest: Any) -> None:
    result = run_cases(guest, "lifecycle_cases.py", [name])[name]
    if not result["ok"]:
        pytest.fail(result["error"], pytrace=False)


# ---- Probe, of a device that is not as it should be ----

PROBE = f"""
import sys, errno
sys.path.insert(0, {FOLDER!r})
from pathlib import Path
from cases import DRIVER
from lifecycle_cases import bind, leavings, works

step, name = sys.argv[1:]
if step == "unbind":
    Path(DRIVER, "unbind").write_text(name)
elif step == "fail":
    try:
        bind(name)
        raise AssertionError("it was bound")
    except OSError as error:
        print(errno.errorcode[error.errno])
    assert leavings(name) == []
else:
    bind(name)
    works()
"""
BROKEN: dict[str, tuple[object, object, str, str]] = {
    "inject-dead": (True, False, "ENODEV", "identifies as 0xffffffff"),
    "inject-reset-stuck": (True, False, "ETIMEDOUT", "device reset did not finish"),
    "inject-irq-loss": (1, 0, "EIO", "no interrupt arrived"),
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.expects(f"vtpu .*{reason}", PROBE_FAILED))
        for fault, (_, _, _, reason) in BROKEN.items()
    ],
)
def test_probe_of_a_broken_device(fault: str, guest: Any) -> None:
    """It is refused, with the reason, and taken when it is whole again."""
    value, good, error, reason = BROKEN[fault]
    link = guest.run("readlink /sys/class/accel/accel0/device").check().text
    name = link.strip().rpartition("/")[2]
    guest.put(PROBE.encode(), f"{FOLDER}/probe.py")

    def step(what: str) -> str:
        return guest.run(["python3", f"{FOLDER}/probe.py", what, name]).check().text.strip()

    step("unbind")
    inject(guest, fault, value)
    try:
        assert step("fail") == error
    finally:
        inject(guest, fault, good)
        step("bind")
    assert reason in guest.run(["dmesg"]).text


# ---- It dies at work ----

DEAD = f"""
import sys, errno, os, time
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup, until
from lifecycle_cases import reset, works
from userq_cases import Driven

with Driven(timeout_ms=500) as dev:
    assert dev.finish(dev.queue_id, [raw.nop()]) == 1
    idle = dev.queue(dev.vm_id, 500)
    sync = dev.syncobj()
    dev.submit(dev.queue_id, [raw.wait(dev.host_va, 1)], [(sync, raw.SYNC_SIGNAL, 0)])
    dev.user.put(raw.wait(dev.host_va, 1))
    dev.user.ring_doorbell()
    print("ready", flush=True)
    until(lambda: os.path.exists("{FOLDER}/dead"), 60, "its death")
    dev.wait(sync, 60)
    assert dev.fence_error(sync) in (-errno.ETIMEDOUT, -errno.ENODEV), dev.fence_error(sync)
    other = dev.bo(raw.PAGE)
    dev.bind(dev.vm_id, other, dev.code_va, raw.PAGE)
print("closed", flush=True)
until(lambda: not os.path.exists("{FOLDER}/dead"), 60, "its return")
reset()
works()
print("survived", flush=True)
"""


@pytest.mark.expects(HANG, NOT_SERVED, STUCK_QUEUE, STUCK_ENGINES, LOST, resets=True)
def test_files_of_a_dead_device_close(guest: Any) -> None:
    """Its registers are all ones: jobs end, files close, and a reset brings it back."""
    guest.run(["rm", "-f", f"{FOLDER}/dead"]).check()
    guest.put(DEAD.encode(), f"{FOLDER}/dead.py")
    guest.run(f"python3 {FOLDER}/dead.py >{LOG} 2>&1 </dev/null &").check()
    wait_log(guest, f"grep -q -e ready -e Traceback {LOG}")
    inject(guest, "inject-dead", True)
    try:
        guest.run(["touch", f"{FOLDER}/dead"]).check()
        wait_log(guest, f"grep -q -e closed -e Traceback {LOG}")
    finally:
        inject(guest, "inject-dead", False)
        guest.run(["rm", "-f", f"{FOLDER}/dead"])
    wait_log(guest, f"grep -q survived {LOG}", f"grep -q Traceback {LOG}")


# ---- The host takes it away, or spoils the bus ----


def wait_log(guest: Any, condition: str, hopeless: str = "false") -> None:
    """A shell condition in the guest; the log tells why not."""
    guest.run(
        f"for i in $(seq 1500); do {condition} && exit 0; {hopeless} && break; sleep 0.1; done; "
        f"cat {LOG} >&2; exit 1",
        timeout=180,
    ).check()


def begin(guest: Any, what: str) -> None:
    guest.run(
        f"cd {FOLDER}; rm -f enough; python3 lifecycle_cases.py {what} >{LOG} 2>&1 </dev/null &"
    ).check()


def start(guest: Any, what: str) -> None:
    begin(guest, what)
    wait_log(guest, f"grep -q -e ready -e Traceback {LOG}")


def works(guest: Any) -> None:
    guest.run(
        [
            "python3",
            "-c",
            f"import sys; sys.path.insert(0, {FOLDER!r}); "
            "from lifecycle_cases import works; works()",
        ]
    ).check()


@pytest.mark.expects(ERROR, RECOVERED, LINK_RESET, resets=True)
def test_errors_on_the_bus_amid_everything(guest: Any) -> None:
    """Fatal ones and others, back to back: HBM stays, and all are served again."""
    before = recoveries(guest)
    start(guest, "everything_until_told")
    for number, error in enumerate(["COMP_TIME", "DLP"] * 3):
        report(guest, error)
        wait_log(guest, f"test $({RECOVERIES}) -gt {before + number}")
    guest.run(["touch", f"{FOLDER}/enough"]).check()
    wait_log(guest, f"grep -q survived {LOG}", f"grep -q Traceback {LOG}")


def plug_in(guest: Any) -> None:
    """Once the kernel has done with the slot: it would cut the power of the new one."""
    python = f"import sys; sys.path.insert(0, '{FOLDER}'); import lifecycle_cases as cases; "
    off = f"{python} cases.until(lambda: cases.slot_is_off('0'), 60, 'the slot is off')"
    guest.run(["python3", "-c", off]).check()
    deadline = time.monotonic() + 60
    while any(c["name"] == "vtpu0" for c in guest.qmp("qom-list", path="/machine/peripheral")):
        assert time.monotonic() < deadline, "the slot keeps it"
        time.sleep(0.05)
    guest.qmp("device_add", driver="vtpu", id="vtpu0", bus="vtpu-port", **{"hbm-size": HBM})
    wait_log(guest, "test -e /dev/accel/accel0")


@pytest.mark.parametrize("how", ["unplugged", "pulled"])
def test_it_goes_with_everything_in_use(how: str, guest: Any) -> None:
    """Asked for, and without a warning; then another one comes into the slot. After all others
    that this kernel runs, as unplugging ends lockdep."""
    about_to_unplug(guest)
    for _ in range(1 if how == "unplugged" else 2):
        start(guest, how)
        if how == "unplugged":
            guest.qmp("device_del", id="vtpu0")
        wait_log(guest, f"grep -q survived {LOG}", f"grep -q Traceback {LOG}")
        plug_in(guest)
    works(guest)


def boots(guest: Any) -> int:
    """How many kernels have come as far as init."""
    return len(re.findall(r"^vtpu-init: [\d.]+ start$", guest.console(), re.MULTILINE))


def test_the_next_kernel_finds_it_at_rest(guest: Any) -> None:
    """One kernel starts another while everything is in use. The last test of this guest.

    Before the new kernel's driver begins the device has neither queues nor address spaces;
    what it did of the old one's work after that, the IOMMU would report to the new one.
    """
    from vtpu_guest import GuestError
    from vtpu_guest.channels import ChannelError

    images = guest.machine.images
    if not images.packed_kernel:
        pytest.skip("kexec_file_load takes no ELF file")
    guest.put(images.packed_kernel, f"{FOLDER}/kernel")
    guest.put(images.initramfs, f"{FOLDER}/initramfs")
    before = boots(guest)
    begin(guest, "into_the_next_kernel")
    deadline = time.monotonic() + 300
    while boots(guest) == before:
        guest.check_running()
        assert time.monotonic() < deadline, guest.run(["cat", LOG], timeout=10).text
        time.sleep(0.1)
    state = guest.qmp("qom-get", path=DEVICE, property="state").splitlines()
    assert not [line for line in state if line.startswith(("queue", "context"))], state

    guest.release_agent()
    connected = False
    while not connected:
        assert time.monotonic() < deadline, guest.console()[-3000:]
        with suppress(GuestError, ChannelError, TimeoutError):
            guest.wait_agent(10)
            connected = True
    # Nobody has watched this kernel so far.
    messages = guest.run(["dmesg"]).text
    for bad in ("DMAR: [DMA", "DMAR: [INTR-REMAP", "WARNING:", "BUG:", "Oops"):
        assert bad not in messages, messages[-4000:]
    begin_to_watch(guest)
    works(guest)
