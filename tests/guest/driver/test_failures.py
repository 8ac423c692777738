# SPDX-License-Identifier: MIT
"""The cases of failure_cases.py and lifecycle_failure_cases.py, on a kernel that lets allocations
fail: KERNEL=debug."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import booted, run_cases
from failure_cases import CASES
from lifecycle_failure_cases import ALONE
from lifecycle_failure_cases import CASES as LIFECYCLE_CASES
from sleeping import run_asleep

pytestmark = [pytest.mark.guest, pytest.mark.stress]
# With little HBM, which is soon short; firmware leaves no room for a virtual function.
ARGUMENTS = (
    *("-device", "pcie-root-port,id=port1,chassis=1,pref64-reserve=1G,mem-reserve=16M"),
    *("-device", "vtpu,id=tpu,bus=port1,hbm-size=32M,sriov-vfs=1,vf-hbm-size=16M"),
)
TOGETHER = [*CASES, *(name for name in LIFECYCLE_CASES if name not in ALONE)]


@pytest.fixture(scope="module")
def guest() -> Iterator[Any]:
    with booted(device=None, extra_arguments=ARGUMENTS) as running:
        if running.run("test -e /proc/self/fail-nth").returncode:
            pytest.skip("this kernel has no fault injection; KERNEL=debug has")
        yield running


@pytest.fixture(scope="module")
def results(guest: Any) -> dict[str, dict[str, Any]]:
    files = "failure_cases.py", "lifecycle_failure_cases.py"
    return {k: v for file in files for k, v in run_cases(guest, file, seconds=3600).items()}


@pytest.mark.parametrize("name", TOGETHER)
def test_failures(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)


def test_failures_on_the_way_to_sleep(guest: Any) -> None:
    said = run_asleep(guest, "python3 lifecycle_failure_cases.py suspend", seconds=300)
    results = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert results[-1].get("ok"), said
