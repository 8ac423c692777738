# SPDX-License-Identifier: MIT
"""The cases of hang_cases.py: hangs, resets, and a device that does not stop when it is told to."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import run_cases
from hang_cases import CASES, ON_DEMAND

DEVICE = "/machine/peripheral/vtpu0"
pytestmark = pytest.mark.guest


def set_device(guest: Any, properties: dict[str, object]) -> None:
    for name, value in properties.items():
        guest.qmp("qom-set", path=DEVICE, property=name, value=value)


def run_each(guest: Any) -> dict[str, dict[str, Any]]:
    """In their order; those that the device is to misbehave for one by one."""
    found: dict[str, dict[str, Any]] = {}
    plain: list[str] = []
    for name in [*CASES, None]:
        if name is not None and name not in ON_DEMAND:
            plain.append(name)
            continue
        if plain:
            found |= run_cases(guest, "hang_cases.py", plain)
            plain = []
        if name is not None:
            set_device(guest, ON_DEMAND[name])
            found |= run_cases(guest, "hang_cases.py", [name])
            set_device(guest, {fault: type(value)(0) for fault, value in ON_DEMAND[name].items()})
    return found


@pytest.fixture(scope="module")
def results(guest: Any) -> dict[str, dict[str, Any]]:
    return run_each(guest)


@pytest.mark.parametrize("name", CASES)
def test_hangs(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)
