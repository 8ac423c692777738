# SPDX-License-Identifier: MIT
"""Virtual functions in Linux, behind an IOMMU: enabled by sysfs, driven by the same driver."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import pytest
from cases import FOLDER
from conftest import HERE, wait_for
from sleeping import hibernate, run_asleep, sleeper
from watch import NOT_SERVED

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
DRIVER = "/sys/bus/pci/drivers/vtpu"
HOLD = "lifecycle_cases.py held_until_told"
TAKEN_AWAY = (
    r"vtpu .*queue \d+ does not start, state 0$",
    r"vtpu .*device is not ready after reset, status 0x0$",
)


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    machine = {"device": None, "extra_arguments": ARGUMENTS, "kernel_arguments": "intel_iommu=on"}
    with sleeper(tmp_path_factory.mktemp("sriov"), **machine) as running:
        yield running


def physical_function(guest: Any) -> str:
    """Its folder, whether it has a driver or not: the one with virtual functions to enable."""
    [count] = guest.run("ls /sys/bus/pci/devices/*/sriov_numvfs").check().text.split()
    return str(PurePosixPath(count).parent)


def set_vfs(guest: Any, count: int) -> list[str]:
    """The functions' nodes, all of them, that of the physical function first."""
    pci = physical_function(guest)
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


def hold(guest: Any, nodes: Sequence[str], program: str = HOLD) -> None:
    """A program on each, with a job that never ends, until they are released."""
    guest.run(["rm", "-f", f"{FOLDER}/enough"]).check()
    for number, node in enumerate(nodes):
        guest.run(
            f"cd {FOLDER}; VTPU_NODE=/dev/accel/{node} "
            f"python3 {program} >hold{number}.log 2>&1 </dev/null &"
        ).check()
    holders_say(guest, "ready", nodes)


def holders_say(guest: Any, word: str, nodes: Sequence[str]) -> None:
    for number in range(len(nodes)):
        log = f"{FOLDER}/hold{number}.log"
        wait_for(guest, f"grep -q -e {word} -e Error {log}", log, seconds=60)
        assert word in (said := guest.run(["cat", log]).check().text), said


def release(guest: Any, nodes: Sequence[str]) -> None:
    guest.run(["touch", f"{FOLDER}/enough"]).check()
    holders_say(guest, "survived", nodes)


def test_functions_go_while_programs_run(guest: Any) -> None:
    """Their processes learn that the device has gone; the physical function works on."""
    set_vfs(guest, 0)
    physical, *virtual = set_vfs(guest, 2)
    hold(guest, virtual)
    set_vfs(guest, 0)
    holders_say(guest, "gone", virtual)
    run_cases(guest, {physical: CASES})
    run_cases(guest, dict.fromkeys(set_vfs(guest, 1), ("submit_copy_fill",)))
    release(guest, virtual)


UNLOAD = f"""
import glob, subprocess, sys
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import MODULE, module_is_idle, until
from lifecycle_cases import rmmod

until(module_is_idle, 20, "nothing holds the module")
assert rmmod()
assert not glob.glob(raw.DEVICES) and not glob.glob("/sys/bus/pci/devices/*/virtfn*")
subprocess.run(["insmod", MODULE], check=True)
until(lambda: bool(glob.glob(raw.DEVICES)), 20, "the node is back")
"""


def test_the_physical_function_goes_with_all_at_work(guest: Any) -> None:
    """Unbound, and then unloaded, with the virtual ones enabled: they go with it."""
    set_vfs(guest, 0)
    nodes, pci = set_vfs(guest, 2), physical_function(guest)
    hold(guest, nodes)
    guest.run(f"echo {PurePosixPath(pci).name} >{DRIVER}/unbind").check()
    holders_say(guest, "gone", nodes)
    assert guest.run(f"cat {pci}/sriov_numvfs; ls {pci} | grep -c virtfn").text == "0\n0\n"
    refused = guest.run(["rmmod", "vtpu"])
    assert refused.returncode and b"in use" in refused.stderr, refused
    # While the old ones are held, there are new ones.
    guest.run(f"echo {PurePosixPath(pci).name} >{DRIVER}/bind").check()
    run_cases(guest, dict.fromkeys(set_vfs(guest, 2), CASES[:2]))
    release(guest, nodes)
    guest.run(["python3", "-c", UNLOAD]).check()
    run_cases(guest, dict.fromkeys(set_vfs(guest, 2), CASES[:2]))


AWAKE = f"""
import os, sys
from contextlib import ExitStack
sys.path.insert(0, {FOLDER!r})
from lifecycle_cases import works
from power_cases import attribute, falls_asleep, is_asleep, light_sleeper, milliseconds

def use(node):
    os.environ["VTPU_NODE"] = f"/dev/accel/{{node}}"

physical, *virtual = sys.argv[1:]
with ExitStack() as stack:
    for node in (physical, *virtual):
        use(node)
        stack.enter_context(light_sleeper())
    use(physical)
    slept = milliseconds("suspended")
    for _ in range(5):
        # Whoever is not needed sleeps by then.
        for node in virtual:
            use(node)
            falls_asleep()
        use(physical)
        assert not is_asleep()
        for node in virtual:
            use(node)
            works()
    use(physical)
    assert milliseconds("suspended") == slept
"""
ASLEEP = f"""
import sys
sys.path.insert(0, {FOLDER!r})
from power_cases import falls_asleep, light_sleeper
with light_sleeper():
    falls_asleep()
"""


def test_the_physical_function_is_awake_for_the_others(guest: Any) -> None:
    """As long as there are any, though nobody uses it itself."""
    set_vfs(guest, 0)
    nodes = set_vfs(guest, 2)
    guest.run(["python3", "-c", AWAKE, *nodes]).check()
    run_cases(guest, dict.fromkeys(nodes[1:], CASES))
    set_vfs(guest, 0)
    guest.run(["python3", "-c", ASLEEP]).check()
    run_cases(guest, {nodes[0]: CASES[:2]})


SLEEP = f"""
import os, random, sys
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup
from pathlib import Path
from power_cases import tell

kind, level, *nodes = sys.argv[1:]
owners = []
for node in nodes:
    os.environ["VTPU_NODE"] = f"/dev/accel/{{node}}"
    owners.append((Setup(), random.Random(node).randbytes(raw.PAGE)))
for dev, data in owners:
    dev.hbm_map[: raw.PAGE] = data
    dev.finish_ok([raw.nop()])
Path("/sys/power/pm_test").write_text(level)
Path("/sys/module/suspend/parameters/pm_test_delay").write_text("0")
try:
    tell("/sys/power/state", kind)
finally:
    Path("/sys/power/pm_test").write_text("none")
for dev, data in owners:
    dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, raw.PAGE)])
    assert dev.host_map[: raw.PAGE] == data
    dev.close()
print("survived")
"""


@pytest.mark.parametrize("level", ["devices", "core"])
def test_the_machine_sleeps(level: str, guest: Any) -> None:
    """So do all functions, and go on as they were; at core they have been in D3hot.

    Of a suspend to RAM this machine's firmware brings no extended configuration space back.
    """
    set_vfs(guest, 0)
    nodes = set_vfs(guest, 2)
    guest.put(SLEEP.encode(), f"{FOLDER}/sleep.py")
    said = run_asleep(guest, f"python3 sleep.py mem {level} {' '.join(nodes)}")
    assert said == "survived\n", said
    run_cases(guest, dict.fromkeys(nodes, CASES))


@pytest.mark.stress  # an image is made, written and read under emulation
def test_hibernation(guest: Any) -> None:
    """The functions are there again once the physical one has enabled them, on another machine."""
    set_vfs(guest, 0)
    nodes = set_vfs(guest, 2)
    guest.put(SLEEP.encode(), f"{FOLDER}/sleep.py")
    said = hibernate(guest, f"python3 sleep.py disk none {' '.join(nodes)}", lambda: None)
    assert said == "survived\n", said
    run_cases(guest, dict.fromkeys(nodes, CASES))


RESET_UNDER = f"""
import errno, os, sys
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup, until

def again(dev):
    try:
        return dev.finish(dev.queue(dev.vm_id), [raw.fill(dev.hbm_va, 8, 1)], 30)
    except OSError as error:
        return -error.errno

with Setup() as dev:
    sync = dev.syncobj()
    dev.submit(dev.queue_id, [dev.run(raw.LOOP)], [(sync, raw.SYNC_SIGNAL, 0)])
    print("ready", flush=True)
    until(lambda: os.path.exists("{FOLDER}/enough"), 60, "the reset")
    dev.wait(sync, 30)
    assert dev.fence_error(sync) in (-errno.ETIMEDOUT, -errno.ENODEV), dev.fence_error(sync)
    assert (end := again(dev)) in (1, -errno.EIO, -errno.EFAULT), end
print("survived", flush=True)
"""


# Their registers read zero.
@pytest.mark.expects(NOT_SERVED, *TAKEN_AWAY, resets=True)
def test_a_reset_of_the_physical_function_takes_the_others(guest: Any) -> None:
    """Under their drivers: what they have in flight ends, and they come again when asked for."""
    set_vfs(guest, 0)
    physical, *virtual = set_vfs(guest, 2)
    guest.put(RESET_UNDER.encode(), f"{FOLDER}/reset_under.py")
    hold(guest, virtual, "reset_under.py")
    guest.run(f"echo 1 >{physical_function(guest)}/reset").check()
    run_cases(guest, {physical: CASES[:2]})
    release(guest, virtual)
    set_vfs(guest, 0)
    run_cases(guest, dict.fromkeys(set_vfs(guest, 2), CASES))


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
