# SPDX-License-Identifier: MIT
"""The cases of each *_cases.py, run in the guest; a case is a test here."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from conftest import run_cases

TOPICS = ("userptr", "users", "dmabuf", "perfmon", "syncobj")
ALL = [
    (topic, name) for topic in TOPICS for name in importlib.import_module(f"{topic}_cases").CASES
]
pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def results(guest: Any) -> dict[str, dict[str, dict[str, Any]]]:
    return {topic: run_cases(guest, f"{topic}_cases.py") for topic in TOPICS}


@pytest.mark.parametrize(("topic", "name"), ALL)
def test_uapi(topic: str, name: str, results: dict[str, dict[str, dict[str, Any]]]) -> None:
    assert name in results[topic], "not reached"
    if not results[topic][name]["ok"]:
        pytest.fail(results[topic][name]["error"], pytrace=False)
