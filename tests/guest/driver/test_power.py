# SPDX-License-Identifier: MIT
"""The device sleeps, alone and with the machine; what was in HBM is there afterwards.

Its HBM is a file, in which the host leaves garbage while the machine sleeps: what is
found there later is what the driver has saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run_cases
from power_cases import CASES
from sleeping import has_ram_sleep, hibernate, sleeper, suspend_to_ram
from watch import LOST_TO_SLEEP

pytestmark = pytest.mark.guest
HBM = 64 << 20
SLEEP = "python3 power_cases.py sleep "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("power")


@pytest.fixture(scope="module")
def guest(folder: Path) -> Iterator[Any]:
    hbm = f"memory-backend-file,id=hbm,mem-path={folder}/hbm,size={HBM},share=on"
    machine = {"device": "hbm-memdev=hbm", "extra_arguments": ("-object", hbm)}
    with sleeper(folder, **machine) as running:
        yield running


@pytest.fixture(scope="module")
def results(guest: Any) -> dict[str, dict[str, Any]]:
    return run_cases(guest, "power_cases.py")


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)


# ---- With the machine ----


def spoil(folder: Path) -> None:
    with open(folder / "hbm", "r+b") as hbm:
        hbm.write(b"\xdb" * HBM)


@pytest.mark.stress  # an image is made, written and read under emulation
@pytest.mark.expects(LOST_TO_SLEEP)
def test_hibernation(guest: Any, folder: Path) -> None:
    """The machine is switched off, and another one goes on where it was."""
    said = hibernate(guest, SLEEP + "disk", lambda: spoil(folder))
    assert said.endswith("survived\n"), said


@pytest.mark.expects(LOST_TO_SLEEP)
def test_suspend_to_ram(guest: Any, folder: Path) -> None:
    """HBM loses its power, and with it what it held."""
    if not has_ram_sleep(guest):
        pytest.skip("this kernel does not wake from it")
    said = suspend_to_ram(guest, SLEEP + "mem", lambda: spoil(folder))
    assert said.endswith("survived\n"), said
