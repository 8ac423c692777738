# SPDX-License-Identifier: MIT
"""The cases of cases.py, run in a guest; each is a test here."""

from __future__ import annotations

from typing import Any

import pytest
from cases import ALONE, CASES
from conftest import run_cases

pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def results(guest: Any) -> dict[str, dict[str, Any]]:
    return run_cases(guest, "cases.py")


@pytest.mark.parametrize("name", [name for name in CASES if name not in ALONE])
def test_driver(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)
