# SPDX-License-Identifier: MIT
"""The cases of memory_cases.py and residency_cases.py, in a guest whose device has little HBM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import booted, run_cases
from memory_cases import CASES
from residency_cases import CASES as RESIDENCY_CASES

pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    with booted(device="hbm-size=32M") as guest:
        files = "memory_cases.py", "residency_cases.py"
        yield {name: result for file in files for name, result in run_cases(guest, file).items()}


@pytest.mark.parametrize("name", [*CASES, *RESIDENCY_CASES])
def test_memory(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)
