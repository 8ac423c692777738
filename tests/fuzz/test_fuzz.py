# SPDX-License-Identifier: MIT
"""Every fuzz target runs its corpus and a number of new inputs and finds nothing.

The number is bounded, not the time, and the seed is fixed: a run says the same on a
slow host. `make fuzz-device SECONDS=n` looks further.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from vtpu_guest import fuzz
from vtpu_guest.cache import build_lock

pytestmark = pytest.mark.fuzz
# Some ten seconds of a processor each.
EXECUTIONS = {
    "mmio": 20_000,
    "ring": 12_000,
    "walk": 12_000,
    "program": 4_000,
    "link": 12_000,
    "state": 8_000,
    "qemu": 3_000,
}
Runs = dict[str, tuple[Path, "Future[list[Path]]"]]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """All targets at once, as many as there are processors."""
    folder = tmp_path_factory.mktemp("fuzz")
    with build_lock():
        fuzzers = fuzz.build_all()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {}
        for fuzzer in fuzzers:
            log = folder / f"{fuzzer.name}.log"
            limit = [f"-runs={EXECUTIONS[fuzzer.name]}", "-seed=1"]
            run = pool.submit(fuzz.run, fuzzer, folder / fuzzer.name, log, limit)
            futures[fuzzer.name] = (log, run)
        yield futures


@pytest.mark.parametrize("name", EXECUTIONS)
def test_target_finds_nothing(runs: Runs, name: str) -> None:
    log, future = runs[name]
    found = future.result()
    text = log.read_text(errors="replace")
    assert not found, f"{found}\n{text[-4000:]}"
    assert f"Done {EXECUTIONS[name]} runs" in text, text[-2000:]


def test_every_target_has_a_corpus() -> None:
    assert set(EXECUTIONS) == {*fuzz.TARGETS, fuzz.QEMU}
    for name in EXECUTIONS:
        files = list((fuzz.CORPUS / name).iterdir())
        assert files, name
        assert sum(path.stat().st_size for path in files) < 200_000, name
