# SPDX-License-Identifier: MIT
"""Errors on the bus, up to Linux's error reporting and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import FOLDER
from conftest import HERE, booted, wait_for
from test_injection import python
from watch import LOST, STUCK_RESET

pytestmark = pytest.mark.guest
DEVICE = "/sys/class/accel/accel*/device"
RECOVERIES = "dmesg | grep -c 'AER: device recovery successful'"
# What the kernel says of it.
ERROR = r"vtpu .*(PCIe Bus Error|error status/mask=|\[ ?\d+\] (RxErr|CmpltTO) )"
RECOVERED = r"pcieport .*AER: device recovery successful"
LINK_RESET = r"pcieport .*AER: Root Port link has been reset \(0\)"
GIVEN_UP = r"AER: (can't recover \(no error_detected callback\)|device recovery failed)"
NO_RECOVERY = r"vtpu .*no recovery from the error on the bus"


def report(guest: Any, error: str) -> None:
    line = f"pcie_aer_inject_error vtpu0 {error}"
    guest.qmp("human-monitor-command", **{"command-line": line})


def counted(guest: Any, kind: str, name: str, error: str) -> None:
    """Reports an error, and returns when the kernel has counted it for the device."""
    log = f"{DEVICE}/aer_dev_{kind}"
    count = f"awk '$1 == \"{name}\" {{print $2}}' {log}"
    before = int(guest.run(count).check().text)
    report(guest, error)
    wait_for(guest, f"test $({count}) -eq {before + 1}", log)


def recoveries(guest: Any) -> int:
    return int(guest.run(RECOVERIES).text)


def recovered(guest: Any, before: int) -> None:
    """Once more than before."""
    wait_for(guest, f"test $({RECOVERIES}) -eq {before + 1}")


@pytest.mark.expects(ERROR)
def test_a_correctable_error_is_counted(guest: Any) -> None:
    counted(guest, "correctable", "RxErr", "RCVR")
    python(guest, "dev.finish_ok([raw.nop()])")


@pytest.mark.expects(ERROR, RECOVERED)
def test_an_error_that_is_not_fatal_costs_nothing(guest: Any) -> None:
    before = recoveries(guest)
    counted(guest, "nonfatal", "CmpltTO", "COMP_TIME")
    recovered(guest, before)
    python(guest, "dev.finish_ok([raw.nop()])")


GIVE_UP = """
debugfs("inject/reset").write_text("1")
with raises(errno.EIO):
    tell(str(debugfs("reset_device")), "1")
assert Device().resets().wedged
"""
STILL = """
assert Device().resets().wedged
reset()
works()
"""


@pytest.mark.expects(ERROR, RECOVERED, STUCK_RESET, LOST, resets=True)
def test_an_error_that_is_not_fatal_brings_no_device_back(guest: Any) -> None:
    """One that was given up reaches memory again only after a reset."""

    def script(code: str) -> None:
        imports = (
            f"import sys, errno; sys.path.insert(0, {FOLDER!r})\n"
            "from vtpu_raw import Device, raises; from hang_cases import debugfs\n"
            "from lifecycle_cases import reset, works; from power_cases import tell\n"
        )
        guest.run(["python3", "-c", imports + code]).check()

    before = recoveries(guest)
    script(GIVE_UP)
    counted(guest, "nonfatal", "CmpltTO", "COMP_TIME")
    recovered(guest, before)
    script(STILL)


FATAL = """
before = dev.resets().device_resets
idle = dev.queue(dev.vm_id)
assert dev.finish(idle, [raw.nop()]) == 1
dev.hbm_map[:8] = b"survives"
sync, amid = dev.syncobj(), dev.syncobj()
dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, raw.SYNC_SIGNAL, 0)])
open("/tmp/running", "w").close()
dev.wait(sync)
# What had nothing in flight goes on, with what comes before the device is there again.
dev.submit(idle, [raw.copy(dev.host_va, dev.hbm_va, 8)], [(amid, raw.SYNC_SIGNAL, 0)])
new = dev.queue(dev.vm_id)
assert dev.finish(new, [raw.nop()]) == 1
dev.wait(amid)
assert dev.fence_error(amid) == 1 and dev.host_map[:8] == b"survives"
assert dev.fence_error(sync) == -errno.ENODEV, dev.fence_error(sync)
assert dev.state(dev.queue_id).status == raw.LOST
assert dev.resets().device_resets == before + 1
"""


@pytest.mark.expects(ERROR, RECOVERED, LINK_RESET, resets=True)
def test_a_fatal_error_resets_the_link_and_the_device_comes_back(guest: Any) -> None:
    log, before = "/tmp/fatal.log", recoveries(guest)
    lines = "\n".join(f"    {line}" for line in FATAL.strip().splitlines())
    script = (
        "import sys, errno\nsys.path.insert(0, '/tmp/driver-tests')\n"
        "import vtpu_raw as raw\nfrom cases import Setup, until\n"
        f"with Setup(timeout_ms=60000) as dev:\n{lines}\nprint('done')\n"
    )
    guest.put(script.encode(), "/tmp/fatal.py")
    guest.run(f"rm -f /tmp/running; python3 /tmp/fatal.py >{log} 2>&1 </dev/null &").check()
    wait_for(guest, "test -e /tmp/running", log)
    report(guest, "DLP")
    wait_for(guest, f"grep -q done {log}", log)
    # The kernel counts no fatal error of a device: its link may be down.
    assert "severity=Uncorrectable (Fatal)" in guest.run(["dmesg"]).text
    recovered(guest, before)
    python(guest, "dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])")


# ---- While it sleeps ----

ASLEEP = f"""
import os, sys
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup, until
from power_cases import falls_asleep, light_sleeper

resets = int(sys.argv[1])
with light_sleeper(), Setup() as dev:
    before = dev.resets().device_resets
    dev.hbm_map[:8] = b"survives"
    falls_asleep()
    print("asleep", flush=True)
    until(lambda: os.path.exists("{FOLDER}/enough"), 60, "the error")
    dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, 8)])
    assert dev.host_map[:8] == b"survives"
    assert dev.resets().device_resets == before + resets
    falls_asleep()
print("done", flush=True)
"""


@pytest.mark.parametrize("error", ["RCVR", "COMP_TIME", "DLP"])
@pytest.mark.expects(ERROR, RECOVERED, LINK_RESET, resets=True)
def test_an_error_while_it_sleeps(error: str, guest: Any) -> None:
    """It is woken for the recovery, has forgotten nothing, and falls asleep again."""
    log, before = f"{FOLDER}/asleep.log", recoveries(guest)
    guest.put(ASLEEP.encode(), f"{FOLDER}/asleep.py")
    guest.run(
        f"cd {FOLDER}; rm -f enough; "
        f"python3 asleep.py {int(error == 'DLP')} >{log} 2>&1 </dev/null &"
    ).check()
    wait_for(guest, f"grep -q asleep {log}", log)
    assert guest.run(f"cat {DEVICE}/power_state").text == "D3hot\n"
    if error == "RCVR":
        counted(guest, "correctable", "RxErr", error)
    else:
        report(guest, error)
        recovered(guest, before)
    guest.run(["touch", f"{FOLDER}/enough"]).check()
    wait_for(guest, f"grep -q done {log}", log, seconds=30)


# ---- Without a recovery ----


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    """A guest where the device shares its slot with a function that has no driver, for whose
    sake the core gives up all that are there."""
    beside = ("-device", "pvpanic-pci,bus=vtpu-port,addr=0.1")
    with booted(device="addr=0.0,multifunction=on", extra_arguments=beside) as running:
        yield running


def fails(guest: Any) -> None:
    """Reports a fatal error, and returns when the core has given up."""
    count = "dmesg | grep -c 'AER: device recovery failed'"
    before = int(guest.run(count).text)
    report(guest, "DLP")
    wait_for(guest, f"test $({count}) -eq {before + 1}")


RESET = f"import sys; sys.path.insert(0, {FOLDER!r}); from lifecycle_cases import reset; reset()"
GIVES_UP = [pytest.param("given-up", marks=pytest.mark.stress), "unbound", "reset"]


@pytest.mark.parametrize("end", GIVES_UP)
@pytest.mark.expects(ERROR, LINK_RESET, GIVEN_UP, NO_RECOVERY, resets=True)
def test_an_error_without_a_recovery(end: str, shared: Any) -> None:
    """It is gone for its files, at the latest when the driver gives up, too, or is told to go;
    the next one finds it whole."""
    guest, log = shared, f"{FOLDER}/hold.log"
    # Its node has another number after a binding with a file of before still open.
    name = guest.run("basename /sys/bus/pci/drivers/vtpu/*:*").check().text.strip()
    guest.run(
        f"cd {FOLDER}; rm -f enough; "
        f"python3 lifecycle_cases.py held_until_told >{log} 2>&1 </dev/null &"
    ).check()
    wait_for(guest, f"grep -q ready {log}", log)
    fails(guest)
    if end == "given-up":
        # The newest kernels tell the driver; for others it waits 90 s.
        wait_for(guest, f"grep -q gone {log}", log, seconds=120)
        fails(guest)
    if end == "reset" and not guest.run("ls /dev/accel/*").returncode:
        # One of the function brings it back for all, unless the driver was told to give up.
        guest.run(["python3", "-c", RESET]).check()
        python(guest, "dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])")
        assert guest.run(["cat", log]).text == "ready\n"
    guest.run(f"echo {name} >/sys/bus/pci/drivers/vtpu/unbind").check()
    wait_for(guest, f"grep -q gone {log}", log)
    guest.run(f"echo {name} >/sys/bus/pci/drivers/vtpu/bind").check()
    python(guest, "dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])")
    guest.run(["touch", f"{FOLDER}/enough"]).check()
    wait_for(guest, f"grep -q survived {log}", log)


@pytest.mark.expects(ERROR, RECOVERED, r"neighbour", resets=True)
def test_another_function_has_the_slot_reset(shared: Any) -> None:
    """An error that is not fatal costs the device a reset where a neighbour asks for one. The
    last test of this guest: from here on the neighbour has a driver."""
    from vtpu_guest import kernels, roots
    from vtpu_guest.cache import build_lock
    from vtpu_guest.driver import compile_driver

    guest, before = shared, recoveries(shared)
    with build_lock():
        kernel = kernels.chosen(roots.build_root(), roots.guest_root())
        module = compile_driver(kernel, HERE / "neighbour")
    guest.put(module, f"{FOLDER}/neighbour.ko")
    guest.run(["insmod", f"{FOLDER}/neighbour.ko"]).check()
    python(guest, "dev.hbm_map[:8] = bytes(8)")
    counted(guest, "nonfatal", "CmpltTO", "COMP_TIME")
    recovered(guest, before)
    assert "neighbour: the slot is reset" in guest.run(["dmesg"]).text
    python(guest, "dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])")
