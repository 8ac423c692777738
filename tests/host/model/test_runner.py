# SPDX-License-Identifier: MIT
"""The runner's own behaviour: limits, failed steps, which artifacts it takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from plans import GREEDY, Generation, generate, step
from vtpu.serving.step_plan import ScheduledRow

if TYPE_CHECKING:
    from vtpu.runner import ModelRunner

pytestmark = pytest.mark.slow

PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47]


def answer(runner: ModelRunner, first_block: int = 1) -> list[int]:
    sequence = Generation("a", PROMPT, range(first_block, first_block + 4), sampling=GREEDY)
    generate(runner, [sequence], 5)
    return [token.token_id for token in sequence.sampled]


def test_says_what_the_scheduler_needs(runner: ModelRunner) -> None:
    assert runner.num_blocks == 512
    assert runner.block_size == 16
    assert runner.max_tokens == 512
    assert runner.max_rows_sampled >= 16
    assert runner.vocab_size == 49152
    assert runner.max_model_len == 8192


def test_a_fault_ends_its_step_and_nothing_else(runner: ModelRunner) -> None:
    """A block outside of the cache: the error names the operation, the rest goes on."""
    from vtpu.runtime import TpuFaultError

    before = answer(runner)
    kept = Generation("kept", PROMPT, range(100, 104))
    generate(runner, [kept], 2)
    bad = ScheduledRow("bad", 3, True, [1, 2, 3], 0, [1 << 19], True, GREEDY, 0)
    for _ in range(2):
        with pytest.raises(TpuFaultError) as caught:
            step(runner, [bad])
        assert "model.layers.0" in str(caught.value)
    assert answer(runner) == before
    # A request that was not in the failed step finds its cache as it was.
    generate(runner, [kept], 5)
    assert [token.token_id for token in kept.sampled] == before


def test_a_plan_that_is_too_large_is_refused(runner: ModelRunner) -> None:
    tokens = list(range(600))
    row = ScheduledRow("long", 0, True, tokens, 0, range(1, 40), True, GREEDY, 0)
    with pytest.raises(ValueError, match="600 tokens in a step, the most is 512"):
        step(runner, [row])
    assert len(answer(runner)) == 5


def test_a_step_without_sampling(runner: ModelRunner) -> None:
    row = ScheduledRow("a", 0, True, [1, 2, 3], 0, [5], False, GREEDY, 0)
    assert step(runner, [row]) == {}


@pytest.mark.parametrize("num_blocks", [1, 1 << 20])
def test_impossible_cache_sizes(
    model_path: Path, aot_dir: Path, machine: None, num_blocks: int
) -> None:
    from vtpu.runner import ModelRunner

    with pytest.raises(ValueError, match=f"{num_blocks} KV blocks of 16 tokens"):
        ModelRunner(model_path, aot_dir=aot_dir, backend="core", num_blocks=num_blocks)


def test_compiles_now_what_does_not_fit(
    model_path: Path,
    aot_dir: Path,
    machine: None,
    runner: ModelRunner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another block size is another program, made and kept without being asked."""
    from vtpu.runner import ModelRunner

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines: list[str] = []
    with ModelRunner(
        model_path, aot_dir=aot_dir, backend="core", block_size=32, progress=lines.append
    ) as other:
        assert other.block_size == 32
        assert other.num_blocks > 100
        assert answer(other) == answer(runner)
    assert any("compiling the model now" in line and "block_size=32" in line for line in lines)
    made = list((tmp_path / "vtpu").glob("aot-*/manifest.json"))
    assert len(made) == 1


def test_a_damaged_folder_is_not_used(
    model_path: Path,
    aot_dir: Path,
    machine: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vtpu.runner import ModelRunner

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    damaged = tmp_path / "damaged"
    shutil.copytree(aot_dir, damaged)
    with (damaged / "weights.bin").open("r+b") as file:
        file.truncate(1000)
    lines: list[str] = []
    with ModelRunner(
        model_path, aot_dir=damaged, backend="core", num_blocks=64, progress=lines.append
    ) as other:
        assert len(answer(other)) == 5
    assert any("weights.bin: 1000 bytes, expected" in line for line in lines)
