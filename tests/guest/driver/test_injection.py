# SPDX-License-Identifier: MIT
"""What the driver makes of a device that misbehaves or sleeps, as the host arranges it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from cases import FOLDER
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
    command = "python3 presence_cases.py suspend_and_resume"
    guest.run(
        f"cd {FOLDER}; ({command} >{log}; echo {over} >/dev/ttyS0) </dev/null >/dev/null 2>&1 &"
    ).check()
    deadline = time.monotonic() + 180
    while over not in (guest.folder / "console.log").read_text(errors="replace"):
        guest.check_running()
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.1)
    assert '"ok": true' in guest.run(["cat", log]).text, guest.run(["cat", log]).text
