# SPDX-License-Identifier: MIT
"""The device is unplugged while it works, and plugged in again, as the host arranges it.

In a guest of its own, which lockdep watches no more afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from cases import FOLDER
from conftest import about_to_unplug, booted, wait_for
from test_injection import python

pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def guest() -> Iterator[Any]:
    with booted() as running:
        yield running


UNPLUG = f"""
import sys, errno, time
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup, is_gone, until

with Setup(timeout_ms=600000) as dev:
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
    about_to_unplug(guest)
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
