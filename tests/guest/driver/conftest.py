# SPDX-License-Identifier: MIT
"""The guest that most tests share, as booting takes longer than they do; and what watches it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import latency

# *_cases.py are both programs of the guest and, here, the lists of their cases.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import (
    HERE,
    WATCHED,
    about_to_unplug,
    begin_to_watch,
    booted,
    run_cases,
    unexpected,
    wait_for,
)
from watch import Expected

__all__ = [  # for the tests
    "HERE",
    "about_to_unplug",
    "begin_to_watch",
    "booted",
    "run_cases",
    "wait_for",
]


@pytest.fixture(scope="session")
def guest() -> Iterator[Any]:
    # make kmod-dev TEST=... tests the driver in the guest that is already there.
    folder = os.environ.get("VTPU_ATTACH")
    with (
        latency.disk() as disk,  # for test_latency.py
        booted(Path(folder) if folder else None, extra_arguments=disk) as running,
    ):
        yield running


@pytest.fixture(autouse=True)
def nothing_unexpected(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test by what it did to its guest beside what it was to do.

    Cases that ran in the guest one after another (results) were watched there.
    """
    yield
    if "results" in request.fixturenames or not WATCHED:
        return
    marker = request.node.get_closest_marker("expects")
    expected = Expected(marker.args, **marker.kwargs) if marker else Expected()
    if found := unexpected(WATCHED[-1], expected):
        pytest.fail("\n".join(found), pytrace=False)
