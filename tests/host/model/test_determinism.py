# SPDX-License-Identifier: MIT
"""A request's tokens and log-probability bits depend on nothing but the request."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from plans import GREEDY, Generation, generate
from vtpu.serving.step_plan import SamplingParams

if TYPE_CHECKING:
    from vtpu.runner import ModelRunner

LENGTH = 8
SAMPLED = SamplingParams(
    temperature=0.9, top_k=50, top_p=0.95, seed=0x1234567887654321, n_logprobs=5
)


def alone(runner: ModelRunner, prompt: list[int], sampling: SamplingParams, **how: object):
    sequence = Generation("a", prompt, range(1, 60), sampling=sampling, **how)
    generate(runner, [sequence], LENGTH)
    return sequence.sampled


@pytest.fixture(scope="module")
def prompt(documents: dict[str, list[int]]) -> list[int]:
    return documents["prose"][:120]


@pytest.fixture(scope="module", params=["greedy", "sampled"])
def sampling(request: pytest.FixtureRequest) -> SamplingParams:
    return {"greedy": GREEDY, "sampled": SAMPLED}[request.param]


@pytest.fixture(scope="module")
def expected(runner: ModelRunner, prompt: list[int], sampling: SamplingParams):
    return alone(runner, prompt, sampling)


def test_results_are_well_formed(expected, sampling: SamplingParams) -> None:
    assert len(expected) == LENGTH
    for token in expected:
        assert len(token.top_logprobs) == sampling.n_logprobs
        assert token.logprob <= 0
        keys = [(-logprob, id_) for id_, logprob in token.top_logprobs]
        assert keys == sorted(keys)
        if sampling is GREEDY:
            assert token.top_logprobs[0] == (token.token_id, token.logprob)


def test_again(runner: ModelRunner, prompt, sampling, expected) -> None:
    assert alone(runner, prompt, sampling) == expected


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_any_chunk_size(runner: ModelRunner, prompt, sampling, expected, chunk: int) -> None:
    assert alone(runner, prompt, sampling, chunk=chunk) == expected


@pytest.mark.parametrize("slot", [1, 15])
def test_any_slot_and_scattered_blocks(
    runner: ModelRunner, prompt, sampling, expected, slot: int
) -> None:
    blocks = random.Random(slot).sample(range(1, runner.num_blocks), 20)
    sequence = Generation("a", prompt, blocks, slot=slot, sampling=sampling, chunk=100)
    generate(runner, [sequence], LENGTH)
    assert sequence.sampled == expected


def test_in_a_batch_of_eight_others(
    runner: ModelRunner, documents, prompt, sampling, expected
) -> None:
    texts = [*documents.values(), *(t[40:] for t in documents.values())]
    batch = []
    for slot in range(9):
        blocks = range(1 + 30 * slot, 31 + 30 * slot)
        if slot == 4:
            sequence = Generation("a", prompt, blocks, slot, sampling, chunk=33)
        else:
            text = texts[slot % len(texts)][: 20 + 13 * slot]
            params = SamplingParams(1.0, seed=slot, n_logprobs=slot)
            sequence = Generation(f"b{slot}", text, blocks, slot, params, chunk=10 + slot)
        batch.append(sequence)
    generate(runner, batch, LENGTH)
    assert batch[4].sampled == expected


def test_another_seed_is_another_answer(runner: ModelRunner, prompt) -> None:
    first = alone(runner, prompt, SamplingParams(1.0, seed=1))
    second = alone(runner, prompt, SamplingParams(1.0, seed=2))
    assert [t.token_id for t in first] != [t.token_id for t in second]


def test_logprobs_are_of_the_unscaled_logits(runner: ModelRunner, prompt) -> None:
    """Temperature and filters change the draw, never what is reported."""
    greedy = alone(runner, prompt, GREEDY)
    hot = alone(runner, prompt, SamplingParams(2.0, top_k=1, seed=3, n_logprobs=20))
    assert hot == greedy
