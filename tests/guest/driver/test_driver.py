# SPDX-License-Identifier: MIT
"""The cases of driver_cases.py, run in a guest; each is a test here."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import run_cases
from driver_cases import ALONE, CASES

pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def results(guest: Any) -> dict[str, dict[str, Any]]:
    return run_cases(guest, "driver_cases.py")


@pytest.mark.parametrize("name", [name for name in CASES if name not in ALONE])
def test_driver(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)
