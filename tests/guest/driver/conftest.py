# SPDX-License-Identifier: MIT
"""One guest for all of the driver's tests: booting takes longer than they do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
# cases.py is both the guest's program and, here, the list of its cases.
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def guest() -> Iterator[Any]:
    from vtpu_guest import Attached, Guest

    # make kmod-dev TEST=... tests the driver in the guest that is already there.
    folder = os.environ.get("VTPU_ATTACH")
    with Attached(Path(folder)) if folder else Guest() as running:
        put_cases(running)
        yield running


def put_cases(guest: Any) -> None:
    from cases import FOLDER

    guest.run(["mkdir", "-p", FOLDER]).check()
    for path in [HERE / "vtpu_raw.py", HERE / "cases.py", *HERE.glob("*_cases.py")]:
        guest.put(path, f"{FOLDER}/{path.name}")


def run_cases(guest: Any, file: str, names: Sequence[str] = (), seconds: float = 600) -> dict:
    """Runs a file's cases in the guest; what became of each, by name."""
    from cases import FOLDER

    done = guest.run(["python3", f"{FOLDER}/{file}", *names], timeout=seconds)
    found = {record["case"]: record for record in map(json.loads, done.text.splitlines())}
    for record in found.values():
        if "ok" not in record:
            tail = done.stderr.decode(errors="replace")[-2000:]
            record |= {"ok": False, "error": f"the run ended here: {tail}"}
    return found


def wait_for(guest: Any, condition: str, log: str = "/dev/null", seconds: int = 20) -> None:
    """Until a shell condition holds in the guest; the log tells why it did not."""
    guest.run(
        f"for i in $(seq $(({10 * seconds} * ${{VTPU_PATIENCE:-1}}))); do "
        f"{condition} && exit 0; sleep 0.1; done; cat {log} >&2; exit 1",
        timeout=seconds + 40,
    ).check()
