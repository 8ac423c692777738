# SPDX-License-Identifier: MIT
"""The device goes, comes back and is reset. Runs in the guest as root.

lifecycle_cases.py has the long ones.
"""

from __future__ import annotations

import errno
import glob
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import vtpu_raw as raw
from cases import (
    DRIVER,
    ENDS,
    MODULE,
    VA,
    Setup,
    collector,
    main,
    module_is_idle,
    pci_device,
    rebinding_amid,
    until,
)
from vtpu_raw import HBM, PAGE, SYNC_SIGNAL, Device, raises
from watch import expects

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
# Not with the others: while the machine sleeps nobody may talk to its agent.
ALONE = {"suspend_and_resume"}


@case
def unload_and_reload() -> None:
    dev = Device()
    assert subprocess.run(["rmmod", "vtpu"], capture_output=True, check=False).returncode != 0
    dev.close()
    until(module_is_idle, 5, "nothing holds the module")
    for _ in range(2):
        subprocess.run(["rmmod", "vtpu"], check=True)
        assert not glob.glob(raw.DEVICES)
        subprocess.run(["insmod", MODULE], check=True)
        until(lambda: bool(glob.glob(raw.DEVICES)), 5, "the node is back")
        with Setup() as dev:
            dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])


@case
def unbind_under_load() -> None:
    name = pci_device()
    dev = Setup(timeout_ms=30000)
    sync, behind = dev.syncobj(), dev.syncobj()
    dev.hbm_map[0] = 5
    dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, SYNC_SIGNAL, 0)])
    dev.submit(dev.queue_id, [raw.nop()], [(behind, SYNC_SIGNAL, 0)])
    fd = dev.call("syncobj_handle_to_fd", handle=sync, flags=1).fd
    Path(DRIVER, "unbind").write_text(name)
    try:
        # The fence is signalled, the mapping does not kill, the file says ENODEV.
        assert raw.sync_file_state(fd) == -errno.ENODEV
        assert dev.hbm_map[0] in (0, 5)
        dev.hbm_map[1] = 7
        with raises(errno.ENODEV):
            dev.vm()
        dev.close()
        os.close(fd)
    finally:
        Path(DRIVER, "bind").write_text(name)
    with Setup() as dev:
        dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])


@case
def unbind_and_bind_amid_a_storm() -> None:
    """Files open and close, map and submit, while the device goes and comes."""

    def use() -> None:
        with Setup() as dev:
            dev.hbm_map[0] = 1
            for _ in range(5):
                assert dev.finish(dev.queue_id, [raw.fill(dev.hbm_va, 8, 1)]) in ENDS

    rebinding_amid(use, threads=4, times=8)
    with Setup() as dev:
        dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])


@case
@expects(resets=True)
def function_reset_under_load() -> None:
    path = Path(f"/sys/bus/pci/devices/{pci_device()}/reset")
    assert path.exists(), "the device offers no reset"
    with Setup(timeout_ms=30000) as dev:
        idle = dev.queue(dev.vm_id)
        assert dev.finish(idle, [raw.nop()]) == 1
        dev.hbm_map[:8] = b"survives"
        before = dev.resets()
        sync = dev.syncobj()
        dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, SYNC_SIGNAL, 0)])
        time.sleep(0.05)
        path.write_text("1")
        dev.wait(sync)
        assert dev.fence_error(sync) == -errno.ENODEV, dev.fence_error(sync)
        assert dev.state(dev.queue_id).status == raw.LOST
        with raises(errno.EIO):
            dev.submit(dev.queue_id, [raw.nop()])
        # What had nothing in flight goes on, in the same address space.
        assert dev.state(idle).status == raw.OK
        assert dev.finish(idle, [raw.copy(dev.host_va, dev.hbm_va, 8)]) == 1
        assert dev.host_map[:8] == b"survives"
        assert dev.resets().device_resets == before.device_resets + 1


@case
@expects(resets=True)
def function_reset_amid_allocations() -> None:
    """While the BARs are away nothing is lost that goes through them."""
    path = Path(f"/sys/bus/pci/devices/{pci_device()}/reset")
    size, pattern = 16 * PAGE, b"\xa5" * 16 * PAGE
    stop = threading.Event()
    problems: list[str] = []

    def user(dev: Device) -> None:
        """What it gets is zero, what it writes stays, what it unmaps is unmapped."""
        try:
            vm = dev.vm()
            while not stop.is_set():
                handle = dev.bo(size, HBM)
                dev.bind(vm, handle, VA, size)
                with dev.map(handle) as view:
                    assert view[:] == bytes(size), "not zero"
                    view[:] = pattern
                    assert view[:] == pattern, "not kept"
                dev.unbind(vm, VA, size)
                dev.close_bo(handle)
        except BaseException:
            problems.append(traceback.format_exc())

    with Device() as one, Device() as two, Setup() as dev:
        threads = [threading.Thread(target=user, args=(d,)) for d in (one, two)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            path.write_text("1")
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join()
        assert not problems, problems[0]
        dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])


@case
def suspend_and_resume() -> None:
    """Down to the devices and back; what was idle goes on."""
    Path("/sys/power/pm_test").write_text("devices")
    Path("/sys/module/suspend/parameters/pm_test_delay").write_text("1")
    with Setup() as dev:
        dev.finish_ok([raw.nop()])
        dev.hbm_map[:8] = b"survives"
        Path("/sys/power/state").write_text("freeze")
        dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, 8)])
        assert dev.host_map[:8] == b"survives"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES, ALONE))
