# SPDX-License-Identifier: MIT
"""The offline API: scheduler, runner and device together, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from vtpu.serving.step_plan import SamplingParams

if TYPE_CHECKING:
    from vtpu.llm import LLM, Completion

pytestmark = pytest.mark.slow

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def llm(model_path: Path, aot_dir: Path, machine: None) -> Iterator[LLM]:
    from vtpu.llm import LLM

    # Few blocks, so that the batch below has to preempt.
    with LLM(model_path, aot_dir=aot_dir, backend="core", num_blocks=24) as llm:
        yield llm


def draws(answer: Completion) -> list[tuple[object, ...]]:
    return [(s.token_id, s.logprob, s.top_logprobs) for s in answer.sampled]


def test_a_question_is_answered(llm: LLM) -> None:
    (answer,) = llm.generate([QUESTION], max_tokens=20)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    assert len(answer.sampled) == len(answer.token_ids)


def test_a_batch_under_preemption_gives_what_each_gives_alone(llm: LLM) -> None:
    prompts = [QUESTION, "The sea is", "def add(a, b):", "Once upon a time", "1, 2, 3,"] * 2
    sampling = SamplingParams(temperature=0.8, top_k=40, seed=5, n_logprobs=3)
    together = llm.generate(prompts, sampling, max_tokens=40)
    assert llm._scheduler.num_preemptions > 0
    for prompt, answer in zip(prompts[:5], together[:5], strict=True):
        (alone,) = llm.generate([prompt], sampling, max_tokens=40)
        assert draws(alone) == draws(answer)
    assert [*map(draws, together[:5])] == [*map(draws, together[5:])]


def test_prompts_that_never_fit(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt 1 has 0 tokens, allowed: 1 to"):
        llm.generate(["a", ""])
    with pytest.raises(ValueError, match="prompt 0 has 9000 tokens, allowed: 1 to"):
        llm.generate([[1] * 9000])
    assert llm.generate(["One, two,"], max_tokens=3)[0].finish_reason == "length"
