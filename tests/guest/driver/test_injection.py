# SPDX-License-Identifier: MIT
"""What the driver makes of a device that misbehaves or sleeps, as the host arranges it."""

from __future__ import annotations

from typing import Any

import pytest
from cases import FOLDER
from sleeping import run_asleep
from watch import HANG, NOT_SERVED

DEVICE = "/machine/peripheral/vtpu0"
pytestmark = pytest.mark.guest


def inject(guest: Any, name: str, value: object) -> None:
    guest.qmp("qom-set", path=DEVICE, property=name, value=value)


def python(guest: Any, body: str, timeout_ms: int = 400) -> None:
    """Runs lines in the guest, with a Setup `dev` and the raw interface at hand."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    script = f"""
import sys, errno, time
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup
with Setup(timeout_ms={timeout_ms}) as dev:
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


def test_interrupts_without_a_reason_and_twice(guest: Any) -> None:
    inject(guest, "inject-irq-duplicate", 50)
    for vector in range(4):
        inject(guest, "inject-irq-spurious", vector)
    python(
        guest,
        """
for n in range(50):
    dev.finish_ok([raw.fill(dev.host_va, 4, n)])
    assert dev.host_map[0] == n
assert dev.state(dev.queue_id).completed == 50
""",
    )


WRONG_FENCE = r"vtpu .*queue \d+: fence \d+ is written, the last job has \d+"


@pytest.mark.expects(WRONG_FENCE)
def test_a_wrong_fence_ends_no_job(guest: Any) -> None:
    """Neither its own, nor the ones behind it; the next one puts it right."""
    inject(guest, "inject-fence-corrupt", 1 << 40)
    python(
        guest,
        """
first, second = dev.syncobj(), dev.syncobj()
dev.submit(dev.queue_id, [raw.nop()], [(first, raw.SYNC_SIGNAL, 0)])
held = [raw.wait(dev.hbm_va, 1), raw.fill(dev.host_va, 4, 9)]
dev.submit(dev.queue_id, held, [(second, raw.SYNC_SIGNAL, 0)])
for job in first, second:
    with raw.raises(errno.ETIME):
        dev.wait(job, 0.5)
assert dev.host_map[0] == 0
dev.hbm_map[0] = 1
for job in first, second:
    dev.wait(job)
    assert dev.fence_error(job) == 1
assert dev.host_map[0] == 9
""",
        timeout_ms=60000,
    )


@pytest.mark.expects(WRONG_FENCE, NOT_SERVED)
def test_a_wrong_fence_that_stays_is_a_hang(guest: Any) -> None:
    inject(guest, "inject-fence-corrupt", 1 << 40)
    python(
        guest,
        """
got = dev.finish(dev.queue_id, [raw.nop()])
assert got == -errno.ETIMEDOUT, got
assert dev.state(dev.queue_id).status == raw.HUNG
assert dev.finish(dev.queue(dev.vm_id), [raw.nop()]) == 1
""",
    )


def test_a_lost_bit_of_hbm_ends_its_queue_alone(guest: Any) -> None:
    inject(guest, "inject-ecc-double", 1)
    python(
        guest,
        """
assert dev.finish(dev.queue_id, [raw.copy(dev.host_va, dev.hbm_va, 8)]) == -errno.EFAULT
state = dev.state(dev.queue_id)
assert state.status == raw.FAULTED and state.fault_cause == raw.FAULT_ECC, state
other = dev.queue(dev.vm_id)
assert dev.finish(other, [raw.copy(dev.host_va, dev.hbm_va, 8)]) == 1
""",
    )


@pytest.mark.parametrize("transfer", ["of the ring", "of the command", "of the fence"])
def test_a_failed_transfer_ends_its_queue_alone(guest: Any, transfer: str) -> None:
    number = ["of the ring", "of the command", "of the fence"].index(transfer) + 1
    inject(guest, "inject-dma-error", number)
    python(
        guest,
        """
assert dev.finish(dev.queue_id, [raw.fill(dev.host_va, 8, 5)]) == -errno.EFAULT
state = dev.state(dev.queue_id)
assert state.status == raw.FAULTED and state.fault_cause == raw.FAULT_BUS, state
other = dev.queue(dev.vm_id)
assert dev.finish(other, [raw.fill(dev.host_va, 8, 6)]) == 1
assert dev.host_map[0] == 6
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
    said = run_asleep(guest, "python3 presence_cases.py suspend_and_resume", seconds=180)
    assert '"ok": true' in said, said
