# SPDX-License-Identifier: MIT
"""Two devices behind an IOMMU with remapped interrupts, both at work: Linux programs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cases import FOLDER
from conftest import HERE

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
    from vtpu_guest import Guest

    kind, words = request.param
    with Guest(extra_arguments=ARGUMENTS, kernel_arguments=words, device="hbm-size=256M") as guest:
        guest.run(["mkdir", "-p", FOLDER]).check()
        for name in ("vtpu_raw.py", "cases.py"):
            guest.put(HERE / name, f"{FOLDER}/{name}")
        yield guest, kind


def test_the_kernel_uses_the_iommu(behind: tuple[Any, str]) -> None:
    guest, kind = behind
    for node in NODES:
        group = f"/sys/class/accel/{node}/device/iommu_group/type"
        assert guest.run(["cat", group]).check().text.strip() == kind
    vectors = guest.run("grep -c 'IR-PCI-MSIX.*vtpu' /proc/interrupts").text
    assert int(vectors) == 2 * 33


def test_both_devices_at_once(behind: tuple[Any, str]) -> None:
    guest, _ = behind
    run = " ".join(
        f"VTPU_NODE=/dev/accel/{node} python3 {FOLDER}/cases.py {' '.join(CASES)} >{node}.log &"
        for node in NODES
    )
    guest.run(f"cd {FOLDER}; {run} wait", timeout=300)
    for node in NODES:
        lines = guest.run(["cat", f"{FOLDER}/{node}.log"]).check().text.splitlines()
        done = {r["case"]: r for r in map(json.loads, lines) if "ok" in r}
        assert set(done) == set(CASES), lines[-1:]
        assert [r["error"] for r in done.values() if not r["ok"]] == []
    messages = guest.run(["dmesg"]).text
    for bad in ("DMAR: [DMA", "DMAR: [INTR-REMAP", "WARNING:", "BUG:"):
        assert bad not in messages, messages[-3000:]
