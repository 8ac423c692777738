# SPDX-License-Identifier: MIT
"""Errors on the bus, up to Linux's error reporting and back."""

from __future__ import annotations

from typing import Any

import pytest
from cases import FOLDER
from conftest import wait_for
from test_injection import python
from watch import LOST, STUCK_RESET

pytestmark = pytest.mark.guest
DEVICE = "/sys/class/accel/accel0/device"
RECOVERIES = "dmesg | grep -c 'AER: device recovery successful'"
# What the kernel says of it.
ERROR = r"vtpu .*(PCIe Bus Error|error status/mask=|\[ ?\d+\] (RxErr|CmpltTO) )"
RECOVERED = r"pcieport .*AER: device recovery successful"
LINK_RESET = r"pcieport .*AER: Root Port link has been reset \(0\)"


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
sync = dev.syncobj()
dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, raw.SYNC_SIGNAL, 0)])
open("/tmp/running", "w").close()
dev.wait(sync)
assert dev.fence_error(sync) == -errno.ENODEV, dev.fence_error(sync)
assert dev.state(dev.queue_id).status == raw.LOST
# What had nothing in flight goes on once the device is there again.
until(lambda: dev.resets().device_resets == before + 1, 20, "the device is reset")
assert dev.finish(idle, [raw.copy(dev.host_va, dev.hbm_va, 8)]) == 1
assert dev.host_map[:8] == b"survives"
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
