# SPDX-License-Identifier: MIT
"""Virtual functions in Linux, behind an IOMMU: enabled by sysfs, driven by the same driver."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from cases import FOLDER
from conftest import HERE, booted, wait_for

pytestmark = pytest.mark.guest
CASES = (
    "submit_copy_fill",
    "bo_host_and_hbm_map",
    "hbm_is_zero_for_the_next_owner",
    "submit_many_in_order",
    "page_fault",
    "address_spaces_are_separate",
)
USER_QUEUES = (
    "every_command",
    "round_the_ring_in_order",
    "a_fault_is_its_own",
    "garbage_reaches_nobody",
    "destroyed_while_it_works",
)
# Firmware leaves no room for the BARs of functions that are not there yet.
ARGUMENTS = (
    *("-device", "intel-iommu,intremap=on,caching-mode=on"),
    *("-device", "pcie-root-port,id=port1,chassis=1,pref64-reserve=1G,mem-reserve=16M"),
    *("-device", "vtpu,id=tpu,bus=port1,hbm-size=128M,sriov-vfs=2,vf-hbm-size=64M"),
)
PF = "/sys/class/accel/accel0/device"


@pytest.fixture(scope="module")
def guest() -> Iterator[Any]:
    machine = {"device": None, "extra_arguments": ARGUMENTS}
    with booted(**machine, kernel_arguments="intel_iommu=on") as running:
        yield running


def set_vfs(guest: Any, count: int) -> list[str]:
    """The functions' nodes, all of them."""
    pci = guest.run(["realpath", PF]).check().text.strip()
    guest.run(f"echo {count} >{pci}/sriov_numvfs", timeout=60).check()
    found = guest.run(f"cd {pci}; ls accel; for f in virtfn*/; do ls $f/accel; done").text.split()
    assert len(found) == 1 + count, guest.run(["dmesg"]).text[-3000:]
    return found


def run_cases(guest: Any, cases: dict[str, Sequence[str]], file: str = "driver_cases.py") -> None:
    """Of each node, all nodes at once."""
    run = " ".join(
        f"VTPU_NODE=/dev/accel/{node} python3 {FOLDER}/{file} {' '.join(names)} >{node}.log &"
        for node, names in cases.items()
    )
    guest.run(f"cd {FOLDER}; {run} wait", timeout=400)
    for node, names in cases.items():
        lines = guest.run(["cat", f"{FOLDER}/{node}.log"]).check().text.splitlines()
        done = {r["case"]: r for r in map(json.loads, lines) if "ok" in r}
        assert set(done) == set(names), (node, lines[-1:])
        assert [r["error"] for r in done.values() if not r["ok"]] == []


def test_all_functions_at_once(guest: Any) -> None:
    nodes = set_vfs(guest, 2)
    groups = {
        guest.run(["realpath", f"/sys/class/accel/{node}/device/iommu_group"]).text
        for node in nodes
    }
    # The sensors are the chip's, and those of the physical function.
    assert guest.run("ls -d /sys/class/accel/accel*/device/hwmon/*").check().text.count("\n") == 1
    assert len(groups) == 3  # each can be given to an owner of its own
    sizes = {
        node: int(
            guest.run(
                f"cd {FOLDER}; VTPU_NODE=/dev/accel/{node} python3 -c "
                "'import vtpu_raw as raw; print(raw.Device().info().hbm_bytes)'"
            )
            .check()
            .text
        )
        for node in nodes
    }
    assert sorted(sizes.values()) == [64 << 20, 64 << 20, 128 << 20]
    run_cases(guest, dict.fromkeys(nodes, CASES))


OWN = f"""
import os, random, sys
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup

owners = []
for node in sys.argv[1:]:
    os.environ["VTPU_NODE"] = f"/dev/accel/{{node}}"
    owners.append((Setup(size=raw.HUGE), random.Random(node).randbytes(raw.HUGE)))
for dev, data in owners:
    dev.hbm_map[:] = data
for dev, data in owners:
    assert dev.hbm_map[:] == data, "as its process sees it"
    dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, dev.size)])
    assert dev.host_map[:] == data, "as the function sees it"
    dev.close()
"""


def test_each_function_has_hbm_of_its_own(guest: Any) -> None:
    """What one keeps there stays, whatever the others write, in the same places of theirs."""
    set_vfs(guest, 0)
    guest.run(["python3", "-c", OWN, *set_vfs(guest, 2)], timeout=60).check()


def test_user_queues_of_all_functions(guest: Any) -> None:
    set_vfs(guest, 0)
    run_cases(guest, dict.fromkeys(set_vfs(guest, 2), USER_QUEUES), "userq_cases.py")


RESET = f"""
import sys, errno, time
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from pathlib import Path
from cases import Setup, pci_device

with Setup(timeout_ms=30000) as dev:
    dev.hbm_map[:6] = b"secret"
    idle = dev.queue(dev.vm_id)
    dev.finish(idle, [raw.nop()])
    sync = dev.syncobj()
    dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, raw.SYNC_SIGNAL, 0)])
    time.sleep(0.05)
    Path(f"/sys/bus/pci/devices/{{pci_device()}}/reset").write_text("1")
    dev.wait(sync)
    assert dev.fence_error(sync) == -errno.ENODEV
    assert dev.hbm_map[:6] == bytes(6)
    copy = [raw.copy(dev.host_va, dev.hbm_va, 8)]
    assert dev.finish(idle, copy) == -errno.EFAULT
with Setup() as dev:
    dev.finish_ok([raw.fill(dev.hbm_va, 8, 1)])
"""


@pytest.mark.expects(resets=True)
def test_a_reset_of_one_leaves_the_others(guest: Any) -> None:
    """A function-level reset by sysfs while all are at work: it begins empty."""
    set_vfs(guest, 0)
    physical, first, second = set_vfs(guest, 2)
    guest.put(RESET.encode(), f"{FOLDER}/reset.py")
    guest.run(
        f"cd {FOLDER}; export VTPU_NODE=/dev/accel/{first}; "
        "for i in 1 2 3; do python3 reset.py || exit; done >reset.log 2>&1 & "
        "echo $! >reset.pid"
    ).check()
    run_cases(guest, dict.fromkeys((physical, second), CASES))
    guest.run(f"cd {FOLDER}; while test -e /proc/$(cat reset.pid); do sleep 0.1; done").check()
    assert guest.run(["cat", f"{FOLDER}/reset.log"]).text == ""
    run_cases(guest, {first: CASES})


GOING = f"""
import sys, errno
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup, is_gone, until

with Setup(timeout_ms=30000) as dev:
    sync = dev.syncobj()
    dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, raw.SYNC_SIGNAL, 0)])
    fd = dev.call("syncobj_handle_to_fd", handle=sync, flags=1).fd
    print("ready", flush=True)
    until(lambda: is_gone(dev), 40, "the function is gone")
    assert raw.sync_file_state(fd) == -errno.ENODEV
print("survived", flush=True)
"""


def test_functions_go_while_a_program_runs(guest: Any) -> None:
    """Its process learns that the device has gone; the physical function works on."""
    set_vfs(guest, 0)
    physical, first, _ = set_vfs(guest, 2)
    log = f"{FOLDER}/going.log"
    guest.put(GOING.encode(), f"{FOLDER}/going.py")
    guest.run(f"VTPU_NODE=/dev/accel/{first} python3 {FOLDER}/going.py >{log} 2>&1 </dev/null &")
    for word in ("ready", "survived"):
        wait_for(guest, f"grep -q {word} {log}", log, seconds=30)
        if word == "ready":
            set_vfs(guest, 0)
    run_cases(guest, {physical: CASES})
    run_cases(guest, dict.fromkeys(set_vfs(guest, 1), ("submit_copy_fill",)))


GIVE = """
set -e
modprobe -qa vfio-pci vfio_iommu_type1 || exit 77
cd /sys/bus/pci/devices/$1
echo $2 >driver_override
echo $1 >driver/unbind
echo $1 >/sys/bus/pci/drivers_probe
test "$(basename $(readlink driver))" = $2
echo >driver_override
"""


# Newer kernels say so as a warning.
@pytest.mark.expects(r"vfio-pci .*: (resetting|reset done)")
def test_a_function_is_given_to_a_process(guest: Any) -> None:
    """By vfio-pci, with the physical function and the other one at work; and taken back."""
    set_vfs(guest, 0)
    physical, first, second = set_vfs(guest, 2)
    link = guest.run(["readlink", "-f", f"/sys/class/accel/{first}/device"]).check().text
    address = link.strip().rpartition("/")[2]
    given = guest.run(["sh", "-c", GIVE, "give", address, "vfio-pci"])
    if given.returncode == 77:
        pytest.skip("the kernel has no vfio-pci")
    given.check()
    guest.put(HERE / "vfio_user.py", f"{FOLDER}/vfio_user.py")
    log = f"{FOLDER}/vfio.log"
    environment = "PYTHONPATH=/opt/vtpu/python"
    guest.run(f"{environment} python3 {FOLDER}/vfio_user.py {address} >{log} 2>&1 </dev/null &")
    run_cases(guest, dict.fromkeys((physical, second), CASES[:2]))
    wait_for(guest, f"grep -q -e done -e Error {log}", log, seconds=60)
    assert guest.run(["cat", log]).text == "done\n"
    guest.run(["sh", "-c", GIVE, "give", address, "vtpu"]).check()
    [node] = guest.run(["ls", f"/sys/bus/pci/devices/{address}/accel"]).check().text.split()
    run_cases(guest, {node: CASES[:2]})
