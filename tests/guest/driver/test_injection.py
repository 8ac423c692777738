# SPDX-License-Identifier: MIT
"""What the driver makes of a device that misbehaves, sleeps or goes, as the host arranges it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from cases import FOLDER
from conftest import wait_for
from watch import HANG

DEVICE = "/machine/peripheral/vtpu0"
pytestmark = pytest.mark.guest


def inject(guest: Any, name: str, value: object) -> None:
    guest.qmp("qom-set", path=DEVICE, property=name, value=value)


def python(guest: Any, body: str) -> None:
    """Runs lines in the guest, with a Setup `dev` and the raw interface at hand."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    script = f"""
import sys, errno, time
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup
with Setup(timeout_ms=400) as dev:
{lines}
"""
    guest.run(["python3", "-c", script], timeout=60).check()


def test_a_lost_interrupt_is_no_hang(guest: Any) -> None:
    """The job's timeout finds it finished; the queue lives on."""
    inject(guest, "inject-irq-loss", 1)
    python(
        guest,
        """
before = dev.resets()
dev.finish_ok([raw.fill(dev.host_va, 4, 7)])
assert dev.host_map[0] == 7
assert dev.state(dev.queue_id).status == raw.OK
dev.finish_ok([raw.nop()])
assert dev.resets() == before
""",
    )


@pytest.mark.expects(HANG)
def test_an_injected_hang_ends_its_queue_alone(guest: Any) -> None:
    inject(guest, "inject-hang", True)
    python(
        guest,
        """
program = dev.run(raw.HALT)
got = dev.finish(dev.queue_id, [program])
assert got == -errno.ETIMEDOUT, got
assert dev.state(dev.queue_id).status == raw.HUNG
other = dev.queue(dev.vm_id)
assert dev.finish(other, [program]) == 1
""",
    )


def test_suspend_and_resume(guest: Any) -> None:
    """Its agent sleeps, too, and may miss what it is asked: the console tells when it is over."""
    log, over = f"{FOLDER}/suspend.log", "suspend_and_resume is over"
    guest.run(
        f"cd {FOLDER}; (python3 cases.py suspend_and_resume >{log}; echo {over} >/dev/ttyS0)"
        " </dev/null >/dev/null 2>&1 &"
    ).check()
    deadline = time.monotonic() + 180
    while over not in (guest.folder / "console.log").read_text(errors="replace"):
        guest.check_running()
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.1)
    assert '"ok": true' in guest.run(["cat", log]).text, guest.run(["cat", log]).text


UNPLUG = f"""
import sys, errno, time
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup, is_gone, until

with Setup(timeout_ms=30000) as dev:
    sync = dev.syncobj()
    dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, raw.SYNC_SIGNAL, 0)])
    fd = dev.call("syncobj_handle_to_fd", handle=sync, flags=1).fd
    dev.hbm_map[0] = 1
    print("ready", flush=True)
    until(lambda: is_gone(dev), 20, "the device is gone")
    assert raw.sync_file_state(fd) == -errno.ENODEV
    assert dev.hbm_map[0] in (0, 1)
print("survived", flush=True)
"""


def test_the_device_is_unplugged(guest: Any) -> None:
    """A program's file, fence and mapping outlive the hardware."""
    log = f"{FOLDER}/unplug.log"
    guest.put(UNPLUG.encode(), f"{FOLDER}/unplug.py")
    guest.run(f"cd {FOLDER}; python3 unplug.py >{log} 2>&1 </dev/null &").check()
    wait_for(guest, f"grep -q ready {log}", log)
    guest.qmp("device_del", id="vtpu0")
    wait_for(guest, f"grep -q survived {log}", log)
    wait_for(guest, "test ! -e /dev/accel/accel0", log)


def test_the_device_is_plugged_in_again(guest: Any) -> None:
    """Once the guest has cut the slot's power, which is when QEMU lets it go."""
    deadline = time.monotonic() + 60
    while any(c["name"] == "vtpu0" for c in guest.qmp("qom-list", path="/machine/peripheral")):
        assert time.monotonic() < deadline, "the slot keeps it"
        time.sleep(0.05)
    guest.qmp("device_add", driver="vtpu", id="vtpu0", bus="vtpu-port")
    wait_for(guest, "test -e /dev/accel/accel0")
    python(guest, "dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])")
