# SPDX-License-Identifier: MIT
"""The one contract between the scheduler and the model runner.

The scheduler hands the runner a `StepPlan`; the runner answers with a
`StepOutput`. Nothing else crosses the boundary, and neither side keeps a
reference into the other's state after `execute` returned, except that the
runner may remember what it wrote for a persistent batch slot.

Positions and lengths count tokens from 0; block ids index the physical KV
blocks `0 .. num_blocks - 1`. Block 0 is the *null block*: it is never handed to
a request, so a runner may point padding rows at it and let them scribble there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NULL_BLOCK = 0
MAX_LOGPROBS = 20


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How one request's next token is drawn.

    temperature: 0 means greedy (then top_k, top_p and seed have no effect).
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set whose probability reaches top_p, in (0, 1].
    seed: unsigned 64-bit; always set (the API draws one when the client gave
        none), so that a request's draws never depend on its neighbours.
    n_logprobs: 0..20 alternatives to report beside the sampled token's own
        log probability, which is always reported.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    n_logprobs: int = 0


@dataclass(slots=True)
class ScheduledRow:
    """One request's share of a step.

    request_id: as in the API response, so that traces can be joined.
    slot: persistent batch row, 0 .. max_num_seqs - 1, held from admission until
        the request finishes or is preempted.
    is_new: the slot was (re)assigned in this step: whatever the runner remembers
        of it is stale, and start is 0 unless a prefix was found in the cache.
    token_ids: the tokens to run through the model, at positions
        start .. start + len(token_ids) - 1. Never empty.
    start: position of the first of them = tokens whose KV is already present.
    block_table: physical block of every bs positions, covering at least
        start + len(token_ids). Owned by the scheduler: read it during `execute`,
        do not keep it or change it. Between two steps in which is_new is false
        it only grows.
    sample: whether the last token's logits are sampled. False for every chunk of
        a prompt but the last.
    sampling: the request's parameters.
    rng_position: which draw of the request this is = number of tokens it has
        generated so far. The random number is a function of (seed,
        rng_position) alone, so a preemption repeats nothing and skips nothing.
    """

    request_id: str
    slot: int
    is_new: bool
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: bool
    sampling: SamplingParams
    rng_position: int


@dataclass(slots=True)
class StepPlan:
    """Everything one step computes. `step_id` rises by one with each plan."""

    step_id: int
    rows: list[ScheduledRow]
    num_tokens: int


@dataclass(slots=True)
class SampledToken:
    """One row's result.

    logprob is the model's log-softmax before temperature and filters, as the f32
    that the device computed (a Python float holds it exactly). top_logprobs has
    exactly n_logprobs entries, most likely first, ties by lower token id.
    """

    request_id: str
    token_id: int
    logprob: float
    top_logprobs: list[tuple[int, float]]


@dataclass(slots=True)
class StepOutput:
    """One entry for each row with `sample`, in the plan's order."""

    step_id: int
    sampled: list[SampledToken]


class ModelRunner(Protocol):
    """What the engine needs of a runner. Constructed and called on one thread.

    num_blocks: physical KV blocks, the null block included.
    block_size: tokens a block.
    max_tokens: most tokens over all rows of one plan.
    max_rows_sampled: most rows with `sample` in one plan.
    max_model_len: most tokens of one request, prompt and answer together.
    """

    num_blocks: int
    block_size: int
    max_tokens: int
    max_rows_sampled: int
    vocab_size: int
    max_model_len: int

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step to its end.

        Any exception means that the step failed: the engine ends the plan's
        requests with an error, frees their blocks and goes on, so the runner must
        be ready for the next plan (whose rows all have is_new or belong to
        requests that were not in the failed one).
        """
        ...

    def close(self) -> None:
        """Give the device back. Called once, on the thread that calls `execute`."""
        ...
