# SPDX-License-Identifier: MIT
"""The same request gives the same bits: alone, in company, and on the host."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import Served

pytestmark = pytest.mark.guest
PROMPTS = [
    "The history of the lighthouse begins",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "La capitale de la France est",
    "The three laws of thermodynamics are",
    "SELECT name FROM users WHERE",
    "A recipe for bread:",
    "Dear Sir or Madam,",
    "In 1969, the first",
]
Answer = list[tuple[str, bytes]]


def ask(served: Served, index: int) -> Answer:
    """Tokens with the bits of their log-probabilities."""
    sampled = {} if index % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": 100 + index}
    options = {"temperature": 0} | sampled
    answer = served.client.completions.create(
        model=served.model,
        prompt=PROMPTS[index] * (1 + index * 3),
        max_tokens=16,
        logprobs=1,
        extra_body={"ignore_eos": True, "top_k": 40 if index % 4 == 0 else 0},
        **options,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs
    return [
        (token, struct.pack("<d", value))
        for token, value in zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    ]


def test_alone_and_in_a_batch(served: Served) -> None:
    alone = [ask(served, index) for index in range(len(PROMPTS))]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda index: ask(served, index), range(len(PROMPTS))))
    assert together == alone
    assert len({str(answer) for answer in alone}) == len(PROMPTS)
