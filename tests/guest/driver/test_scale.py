# SPDX-License-Identifier: MIT
"""The cases of scale_cases.py, run in the guest."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import run_cases
from scale_cases import CASES

pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def results(guest: Any) -> dict[str, dict[str, Any]]:
    return run_cases(guest, "scale_cases.py", seconds=1800)


@pytest.mark.parametrize("name", CASES)
def test_scale(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)
