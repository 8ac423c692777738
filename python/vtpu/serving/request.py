# SPDX-License-Identifier: MIT
"""One sequence being generated, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vtpu.serving.step_plan import SamplingParams

WAITING = "waiting"
RUNNING = "running"
FINISHED = "finished"

# Finish reasons. The first two are OpenAI's; the others never reach a client as
# finish_reason but label metrics and errors.
STOP = "stop"
LENGTH = "length"
ABORT = "abort"
ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """State of one sequence. Once submitted, the engine thread owns it.

    token_ids holds the prompt and then the generated tokens. num_computed_tokens
    (tokens whose KV is, or is about to be, in the cache) chases its length: there
    is no other notion of prefill and decode.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    index: int = 0
    arrival_time: float = 0.0

    num_prompt_tokens: int = field(init=False)
    status: str = field(init=False, default=WAITING)
    num_computed_tokens: int = field(init=False, default=0)
    block_table: list[int] = field(init=False, default_factory=list)
    slot: int = field(init=False, default=-1)
    num_preemptions: int = field(init=False, default=0)
    scheduled_time: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> str | None:
        """Add a generated token; return the finish reason it brings, if any."""
        self.token_ids.append(token_id)
        generated = self.num_output_tokens
        if token_id in self.stop_token_ids and generated > self.min_tokens:
            return STOP
        if generated >= self.max_tokens:
            return LENGTH
        return None
