# SPDX-License-Identifier: MIT
"""A bounded part of `make fuzz-driver`: the corpus and new inputs break nothing.

On a kernel without kcov, such as Debian's, the inputs are random ones.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from vtpu_guest import accel, fuzz_driver
from vtpu_guest.build import build
from vtpu_guest.kernels import chosen_name
from vtpu_guest.machine import Machine
from vtpu_guest.stage import StageError

pytestmark = pytest.mark.guest
EXECUTIONS = 1500
# Some 1700 where kcov shows the way.
PAIRS = 1200


def test_the_driver_withstands_the_corpus_and_new_inputs() -> None:
    outcome = fuzz_driver.run(["100000", str(EXECUTIONS), "1"], fuzz_driver.tree_corpus())
    assert not outcome.complaint, outcome.complaint
    assert outcome.said.startswith(f"{EXECUTIONS} executions")
    assert outcome.said.endswith("end")
    worked = re.search(r"(\d+) of (\d+) calls worked", outcome.said)
    assert worked and worked[1] == worked[2], outcome.said
    pairs = re.search(r"(\d+) pairs", outcome.said)
    if chosen_name() == "debug":
        assert pairs and int(pairs[1]) > PAIRS, outcome.said


def test_without_the_device_the_fuzzer_says_so() -> None:
    machine = Machine(images=build(), accelerator=accel.choose(), device=None)
    with pytest.raises(StageError, match="/dev/accel/accel0: No such file or directory"):
        fuzz_driver.run(["100000", str(EXECUTIONS), "1"], fuzz_driver.tree_corpus(), machine)


def test_a_complaint_of_the_kernel_is_found_and_its_inputs_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = "[ 1.0] vtpu: queue 0: job 1 is over its time limit\n"
    assert fuzz_driver.complaint_of(console) == ""
    console += "[ 2.0] BUG: KASAN: use-after-free in vtpu_open+0x1/0x2 [vtpu]\n[ 2.0] Call Trace:\n"
    said = fuzz_driver.complaint_of(console)
    assert "use-after-free in vtpu_open" in said
    monkeypatch.setattr(fuzz_driver, "FINDINGS", tmp_path)
    inputs = [b"\0\1\2", b"", bytes(4096)]
    path = fuzz_driver.keep_finding(fuzz_driver.Outcome(said, inputs, [], ""))
    assert fuzz_driver.unpack(path.read_bytes()) == inputs
    assert "use-after-free" in path.with_suffix(".txt").read_text()
