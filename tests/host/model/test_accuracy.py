# SPDX-License-Identifier: MIT
"""The device's logits against the float32 reference, teacher-forced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from plans import step
from vtpu.serving.step_plan import SamplingParams, ScheduledRow

if TYPE_CHECKING:
    from vtpu.runner import ModelRunner

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0)


def log_softmax(logits: Any) -> Any:
    x = np.asarray(logits, dtype=np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def forced_logits(runner: ModelRunner, documents: dict[str, list[int]]) -> dict[str, Any]:
    """All documents in one batch, a token a step, as decoding does it."""
    per_document = (runner.num_blocks - 1) // len(documents)
    logits = {
        name: np.empty((len(tokens), runner.vocab_size), np.float32)
        for name, tokens in documents.items()
    }
    for position in range(max(map(len, documents.values()))):
        rows, names = [], []
        for slot, (name, tokens) in enumerate(documents.items()):
            if position >= len(tokens):
                continue
            first = 1 + slot * per_document
            table = range(first, first + position // runner.block_size + 1)
            names.append(name)
            rows.append(
                ScheduledRow(
                    name, slot, position == 0, [tokens[position]], position, table, True,
                    GREEDY, position,
                )
            )  # fmt: skip
        step(runner, rows)
        for index, row in enumerate(np.asarray(runner.last_logits(len(rows)))):
            logits[names[index]][position] = row
    return logits


def test_close_to_the_reference(
    runner: ModelRunner,
    documents: dict[str, list[int]],
    reference_logits: dict[str, Any],
    record_property: Callable[[str, object], None],
) -> None:
    """Mean KL <= 0.001 and top-1 agreement >= 99% over at least 500 positions."""
    assert sum(map(len, documents.values())) >= 500
    found = forced_logits(runner, documents)
    divergences, agreements = [], []
    for name in documents:
        expected, got = log_softmax(reference_logits[name]), log_softmax(found[name])
        assert np.isfinite(got).all(), name
        divergence = (np.exp(expected) * (expected - got)).sum(axis=-1)
        agreement = expected.argmax(axis=-1) == got.argmax(axis=-1)
        print(f"{name}: KL {divergence.mean():.6f}, top-1 {agreement.mean():.4f}")
        divergences.append(divergence)
        agreements.append(agreement)
    mean_kl = float(np.concatenate(divergences).mean())
    top1 = float(np.concatenate(agreements).mean())
    print(f"all: KL {mean_kl:.6f}, top-1 {top1:.4f}")
    record_property("mean_kl", mean_kl)
    record_property("top1", top1)
    assert mean_kl <= 0.001
    assert top1 >= 0.99
