# SPDX-License-Identifier: MIT
"""Two devices behind an IOMMU with remapped interrupts, both at work: Linux programs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cases import FOLDER
from conftest import about_to_unplug, booted, run_cases, wait_for

pytestmark = pytest.mark.guest
NODES = ("accel0", "accel1")
CASES = (
    "submit_copy_fill",
    "bo_host_and_hbm_map",
    "submit_many_in_order",
    "page_fault",
    "address_spaces_are_separate",
    "map_unmap_at_random",
    "function_reset_under_load",
)
USERPTR = (
    "device_and_process_see_the_same_bytes",
    "a_part_of_the_pages",
    "memory_to_read_only",
    "the_buffer_keeps_the_pages_not_the_addresses",
    "it_goes_with_the_device",
)
DMABUF = (
    "one_device_two_files",
    "every_piece_of_an_import_is_mapped",
    "a_dma_buf_outlives_its_device",
    "imports_and_closes_amid_jobs",
)
USER_QUEUES = (
    "every_command",
    "round_the_ring_in_order",
    "a_fault_is_its_own",
    "destroyed_while_it_works",
    "a_function_reset_ends_it",
    "an_unplug_ends_it",
)
ARGUMENTS = (
    *("-device", "intel-iommu,intremap=on,caching-mode=on"),
    *("-device", "pcie-root-port,id=port1,chassis=2"),
    *("-device", "vtpu,id=vtpu1,bus=port1,hbm-size=256M"),
)


@pytest.fixture(
    scope="module",
    params=[("DMA", "intel_iommu=on"), ("identity", "intel_iommu=on iommu=pt")],
    ids=["translated", "passed-through"],
)
def behind(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """The guest, and what kind of domain its devices are in."""
    kind, words = request.param
    machine = {"extra_arguments": ARGUMENTS, "kernel_arguments": words, "device": "hbm-size=256M"}
    with booted(**machine) as guest:
        yield guest, kind


def test_the_kernel_uses_the_iommu(behind: tuple[Any, str]) -> None:
    guest, kind = behind
    for node in NODES:
        group = f"/sys/class/accel/{node}/device/iommu_group/type"
        assert guest.run(["cat", group]).check().text.strip() == kind
    vectors = guest.run("grep -c 'IR-PCI-MSIX.*vtpu' /proc/interrupts").text
    assert int(vectors) == 2 * 33


@pytest.mark.expects(resets=True)
def test_both_devices_at_once(behind: tuple[Any, str]) -> None:
    guest, _ = behind
    cases = f"python3 {FOLDER}/driver_cases.py {' '.join(CASES)}"
    run = " ".join(f"VTPU_NODE=/dev/accel/{node} {cases} >{node}.log &" for node in NODES)
    guest.run(f"cd {FOLDER}; {run} wait", timeout=300)
    for node in NODES:
        lines = guest.run(["cat", f"{FOLDER}/{node}.log"]).check().text.splitlines()
        done = {r["case"]: r for r in map(json.loads, lines) if "ok" in r}
        assert set(done) == set(CASES), lines[-1:]
        assert [r["error"] for r in done.values() if not r["ok"]] == []


def all_pass(guest: Any, file: str, names: tuple[str, ...]) -> None:
    done = run_cases(guest, file, names)
    assert len(done) >= 3
    assert [r["error"] for r in done.values() if not r["ok"]] == []


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("userptr_cases.py", USERPTR),
        ("dmabuf_cases.py", DMABUF),
        ("between_cases.py", ()),
    ],
)
def test_memory_of_processes(behind: tuple[Any, str], file: str, names: tuple[str, ...]) -> None:
    guest, _ = behind
    all_pass(guest, file, names)


def test_user_queues(behind: tuple[Any, str]) -> None:
    guest, _ = behind
    all_pass(guest, "userq_cases.py", USER_QUEUES)


def test_a_device_goes_with_its_memory_in_use(behind: tuple[Any, str]) -> None:
    """Unplugged, with it what the IOMMU knew of it, while a process has all of it mapped. The
    last test of its guest, as unplugging ends lockdep."""
    guest, _ = behind
    about_to_unplug(guest)
    guest.run(
        f"cd {FOLDER}; rm -f going; python3 between_cases.py hold >hold.log 2>&1 </dev/null &"
    ).check()
    for word in ("ready", "survived"):
        wait_for(guest, f"grep -q {word} {FOLDER}/going", f"{FOLDER}/hold.log", seconds=60)
        if word == "ready":
            guest.qmp("device_del", id="vtpu1")
    guest.run(
        f"while pgrep -f '[b]etween_cases.py hold'; do sleep 0.1; done; cat {FOLDER}/hold.log"
    )
