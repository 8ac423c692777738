# SPDX-License-Identifier: MIT
"""The cases of failure_cases.py, on a kernel that lets allocations fail: KERNEL=debug."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import booted, run_cases
from failure_cases import CASES

pytestmark = [pytest.mark.guest, pytest.mark.stress]


@pytest.fixture(scope="module")
def guest() -> Iterator[Any]:
    """With little HBM, which is soon short."""
    with booted(device="hbm-size=32M") as running:
        if running.run("test -e /proc/self/fail-nth").returncode:
            pytest.skip("this kernel has no fault injection; KERNEL=debug has")
        yield running


@pytest.fixture(scope="module")
def results(guest: Any) -> dict[str, dict[str, Any]]:
    return run_cases(guest, "failure_cases.py", seconds=3600)


@pytest.mark.parametrize("name", CASES)
def test_failures(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)
