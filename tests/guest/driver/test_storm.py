# SPDX-License-Identifier: MIT
"""The cases of storm_cases.py, run in the guest."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import run_cases
from storm_cases import CASES

pytestmark = [pytest.mark.guest, pytest.mark.stress]


@pytest.mark.parametrize("name", CASES)
def test_storm(name: str, guest: Any) -> None:
    found = run_cases(guest, "storm_cases.py", [name])[name]
    if not found["ok"]:
        pytest.fail(found["error"], pytrace=False)
