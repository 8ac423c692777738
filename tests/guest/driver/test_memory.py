# SPDX-License-Identifier: MIT
"""The cases of memory_cases.py, in a guest whose device has little HBM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import booted, run_cases
from memory_cases import CASES

pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    with booted(device="hbm-size=32M") as guest:
        yield run_cases(guest, "memory_cases.py")


@pytest.mark.parametrize("name", CASES)
def test_memory(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)
