# SPDX-License-Identifier: MIT
"""The cases of cases.py, run in a guest; each is a test here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cases import ALONE, CASES, FOLDER

SECONDS = 600
pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def results(guest: Any) -> dict[str, dict[str, Any]]:
    done = guest.run(["python3", f"{FOLDER}/cases.py"], timeout=SECONDS)
    found = {record["case"]: record for record in map(json.loads, done.text.splitlines())}
    for record in found.values():
        if "ok" not in record:
            tail = done.stderr.decode(errors="replace")[-2000:]
            record |= {"ok": False, "error": f"the run ended here: {tail}"}
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name not in ALONE])
def test_driver(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)
