# SPDX-License-Identifier: MIT
"""User queues: the cases of userq_cases.py and, through the runtime, runtime_userq_cases.py."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from cases import FOLDER
from conftest import run_cases

pytestmark = pytest.mark.guest
PROGRAMS = Path(__file__).parents[2] / "host/runtime/programs.py"
FILES = ("userq_cases", "runtime_userq_cases")
ALL = [(file, name) for file in FILES for name in importlib.import_module(file).CASES]


@pytest.fixture(scope="module")
def results(guest: Any) -> dict[str, dict[str, dict[str, Any]]]:
    guest.put(PROGRAMS, f"{FOLDER}/{PROGRAMS.name}")
    return {file: run_cases(guest, f"{file}.py") for file in FILES}


@pytest.mark.parametrize(("file", "name"), ALL)
def test_user_queue(file: str, name: str, results: dict[str, dict[str, dict[str, Any]]]) -> None:
    assert name in results[file], "not reached"
    if not results[file][name]["ok"]:
        pytest.fail(results[file][name]["error"], pytrace=False)
