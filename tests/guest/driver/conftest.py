# SPDX-License-Identifier: MIT
"""One guest for all of the driver's tests: booting takes longer than they do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
# cases.py is both the guest's program and, here, the list of its cases.
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def guest() -> Iterator[Any]:
    from cases import FOLDER
    from vtpu_guest import Guest

    with Guest() as running:
        running.run(["mkdir", "-p", FOLDER]).check()
        for name in ("vtpu_raw.py", "cases.py"):
            running.put(HERE / name, f"{FOLDER}/{name}")
        yield running
