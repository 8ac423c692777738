# SPDX-License-Identifier: MIT
"""What `make bench` reads of the device past the guest."""

from __future__ import annotations

import time

import pytest

from bench.counters import BusyShare, Counters

from .conftest import Served

pytestmark = pytest.mark.guest
STATUS = "cat /sys/bus/pci/drivers/vtpu/*/power/runtime_status"


def test_the_busy_share_of_a_device_that_has_slept(served: Served) -> None:
    deadline = time.monotonic() + 60
    while served.guest.run(["sh", "-c", STATUS]).check().text.strip() != "suspended":
        assert time.monotonic() < deadline, "an idle device does not sleep"
        time.sleep(0.1)
    counters = Counters(served.guest)
    with BusyShare(counters) as idle:
        pass
    with BusyShare(counters) as share:
        served.client.completions.create(model=served.model, prompt="A recipe", max_tokens=16)
    assert idle.value == 0
    assert 0 < share.value <= 1
