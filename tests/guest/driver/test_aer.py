# SPDX-License-Identifier: MIT
"""Errors on the bus, up to Linux's error reporting and back."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import wait_for
from test_injection import python

pytestmark = pytest.mark.guest
DEVICE = "/sys/class/accel/accel0/device"


def report(guest: Any, error: str) -> None:
    line = f"pcie_aer_inject_error vtpu0 {error}"
    guest.qmp("human-monitor-command", **{"command-line": line})


def seen(guest: Any, kind: str, name: str, times: int) -> None:
    """Until the kernel has counted it for the device."""
    wait_for(
        guest, f"grep -q '^{name} {times}$' {DEVICE}/aer_dev_{kind}", f"{DEVICE}/aer_dev_{kind}"
    )


def recovered(guest: Any, times: int) -> None:
    said = "dmesg | grep -c 'AER: device recovery successful'"
    wait_for(guest, f"test $({said}) -eq {times}")


def test_a_correctable_error_is_counted(guest: Any) -> None:
    report(guest, "RCVR")
    seen(guest, "correctable", "RxErr", 1)
    python(guest, "dev.finish_ok([raw.nop()])")


def test_an_error_that_is_not_fatal_costs_nothing(guest: Any) -> None:
    report(guest, "COMP_TIME")
    seen(guest, "nonfatal", "CmpltTO", 1)
    recovered(guest, 1)
    python(guest, "assert dev.resets().device_resets == 0\ndev.finish_ok([raw.nop()])")


FATAL = """
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
until(lambda: dev.resets().device_resets == 1, 20, "the device is reset")
assert dev.finish(idle, [raw.copy(dev.host_va, dev.hbm_va, 8)]) == 1
assert dev.host_map[:8] == b"survives"
"""


def test_a_fatal_error_resets_the_link_and_the_device_comes_back(guest: Any) -> None:
    log = "/tmp/fatal.log"
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
    recovered(guest, 2)
    python(guest, "dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])")
