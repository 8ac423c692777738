# SPDX-License-Identifier: MIT
"""The cases of memory_cases.py, in a guest whose device has little HBM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import FOLDER
from conftest import HERE, run_cases
from memory_cases import CASES

pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    from vtpu_guest import Guest

    with Guest(device="hbm-size=32M") as guest:
        guest.run(["mkdir", "-p", FOLDER]).check()
        for name in ("vtpu_raw.py", "cases.py", "memory_cases.py"):
            guest.put(HERE / name, f"{FOLDER}/{name}")
        yield run_cases(guest, "memory_cases.py")


@pytest.mark.parametrize("name", CASES)
def test_memory(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)
