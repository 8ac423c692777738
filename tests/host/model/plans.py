# SPDX-License-Identifier: MIT
"""Runs token sequences through a model runner without the scheduler.

The tests decide what the scheduler would: which chunks, which batch, which blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from vtpu.serving.step_plan import SampledToken, SamplingParams, ScheduledRow, StepPlan

if TYPE_CHECKING:
    from vtpu.runner import ModelRunner

_step_ids = count(1)

GREEDY = SamplingParams(temperature=0.0, n_logprobs=20)


@dataclass
class Generation:
    """One request: its tokens so far, where they are cached, what was sampled."""

    name: str
    prompt: Sequence[int]
    blocks: Sequence[int]
    slot: int = 0
    sampling: SamplingParams = GREEDY
    chunk: int = 512
    sampled: list[SampledToken] = field(default_factory=list)
    computed: int = 0

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *(s.token_id for s in self.sampled)]

    def row(self, block_size: int, budget: int) -> ScheduledRow:
        start = self.computed
        tokens = self.tokens[start : start + min(self.chunk, budget)]
        self.computed = start + len(tokens)
        used = -(-self.computed // block_size)
        return ScheduledRow(
            request_id=self.name,
            slot=self.slot,
            is_new=start == 0,
            token_ids=tokens,
            start=start,
            block_table=self.blocks[:used],
            sample=self.computed == len(self.tokens),
            sampling=self.sampling,
            rng_position=len(self.sampled),
        )


def step(runner: ModelRunner, rows: list[ScheduledRow]) -> dict[str, SampledToken]:
    plan = StepPlan(next(_step_ids), rows, sum(len(row.token_ids) for row in rows))
    output = runner.execute(plan)
    assert output.step_id == plan.step_id
    return {s.request_id: s for s in output.sampled}


def generate(
    runner: ModelRunner,
    sequences: Sequence[Generation],
    length: int,
    watch: Callable[[dict[str, SampledToken]], None] = lambda sampled: None,
) -> None:
    """Continues every sequence to `length` sampled tokens, all in one batch."""
    while True:
        live = [s for s in sequences if len(s.sampled) < length]
        if not live:
            return
        rows: list[ScheduledRow] = []
        budget = runner.max_tokens
        for sequence in live:
            if budget:
                rows.append(sequence.row(runner.block_size, budget))
                budget -= len(rows[-1].token_ids)
        sampled = step(runner, rows)
        for sequence in live:
            if sequence.name in sampled:
                sequence.sampled.append(sampled[sequence.name])
        watch(sampled)
