# SPDX-License-Identifier: MIT
"""The cases of cases.py, run in a guest; each is a test here."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[2]
FOLDER = "/tmp/driver-tests"
SECONDS = 600


def _names() -> list[str]:
    sys.path.insert(0, str(HERE))
    spec = importlib.util.spec_from_file_location("driver_cases", HERE / "cases.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.CASES)


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    """All cases, in one guest and one process: booting takes longer than they do."""
    sys.path.insert(0, str(REPO / "guest-image"))
    from vtpu_guest import Guest

    with Guest() as guest:
        guest.run(["mkdir", "-p", FOLDER]).check()
        for name in ("vtpu_raw.py", "cases.py"):
            guest.put(HERE / name, f"{FOLDER}/{name}")
        done = guest.run(["python3", f"{FOLDER}/cases.py"], timeout=SECONDS)
        found = {}
        for line in done.text.splitlines():
            record = json.loads(line)
            found[record["case"]] = record
        for record in found.values():
            if "ok" not in record:
                tail = done.stderr.decode(errors="replace")[-2000:]
                record |= {"ok": False, "error": f"the run ended here: {tail}"}
        yield found


@pytest.mark.parametrize("name", _names())
def test_driver(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert name in results, "not reached"
    if not results[name]["ok"]:
        pytest.fail(results[name]["error"], pytrace=False)
