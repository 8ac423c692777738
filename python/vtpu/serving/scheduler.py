# SPDX-License-Identifier: MIT
"""Continuous batching with a token budget a step.

There is no prefill phase and no decode phase. Each request has
`num_computed_tokens`, which chases `num_tokens`; every step hands out a budget of
tokens, first to running requests, then to waiting ones in order of arrival. A
prompt longer than what is left of the budget is computed in chunks. When blocks
run out, the request that was admitted last gives its blocks back and is computed
again later; what it has generated stays.

No thread safety here: the engine thread makes all calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vtpu.serving.block_manager import BlockManager
from vtpu.serving.request import ABORT, ERROR, FINISHED, RUNNING, WAITING, Request
from vtpu.serving.step_plan import SampledToken, ScheduledRow, StepOutput, StepPlan


@dataclass(slots=True, frozen=True)
class SchedulerConfig:
    """Limits of one step.

    max_num_seqs: requests in the running batch (= persistent slots).
    max_num_batched_tokens: token budget of a step.
    max_prefill_chunk: most tokens of one request in one step; 0 means no cap but
        the budget.
    chunked_prefill: when false, a prompt is computed in one step or waits.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int = 0
    chunked_prefill: bool = True


@dataclass(slots=True)
class TokenEvent:
    """What a step did to one request.

    token is None when the request ended without a new token (abort, failure).
    error is the message of the failure when finish_reason is "error".
    """

    request: Request
    token: SampledToken | None
    finish_reason: str | None
    error: str | None = None


class Scheduler:
    """Decides what each step computes and takes in what it sampled."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        if config.max_num_batched_tokens < config.max_num_seqs:
            # A decode step needs one token a running request, or some would starve.
            raise ValueError(
                f"max_num_batched_tokens ({config.max_num_batched_tokens}) is less "
                f"than max_num_seqs ({config.max_num_seqs})"
            )
        self.config = config
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._step_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits (see Limits)."""
        self.waiting.append(request)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to compute."""
        rows: list[ScheduledRow] = []
        budget = self.config.max_num_batched_tokens
        budget, preempted = self._schedule_running(rows, budget)
        if not preempted:
            # Blocks just taken from one request must not go to a newcomer.
            budget = self._schedule_waiting(rows, budget)
        if not rows:
            return None
        self._step_id += 1
        used = self.config.max_num_batched_tokens - budget
        return StepPlan(self._step_id, rows, used)

    def _schedule_running(self, rows: list[ScheduledRow], budget: int) -> tuple[int, bool]:
        preempted = False
        position = 0
        # Indexed by hand because preempt() shortens the list's tail meanwhile.
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            while not self.blocks.can_append(request):
                victim = self.running[-1]
                self.preempt(victim)
                preempted = True
                if victim is request:
                    break
            if request.status != RUNNING:
                break
            self.blocks.may_append(request)
            count = self._chunk(request, budget)
            if count:
                rows.append(self._row(request, count, is_new=False))
                budget -= count
            position += 1
        return budget, preempted

    def _schedule_waiting(self, rows: list[ScheduledRow], budget: int) -> int:
        while self.waiting and self._free_slots and budget > 0:
            request = self.waiting[0]
            count = self._chunk(request, budget)
            if not count or not self.blocks.can_allocate(request):
                break  # First come, first served: nobody overtakes the head.
            self.waiting.popleft()
            self.blocks.allocate(request)
            request.slot = self._free_slots.pop()
            request.status = RUNNING
            self.running.append(request)
            rows.append(self._row(request, count, is_new=True))
            budget -= count
        return budget

    def _chunk(self, request: Request, budget: int) -> int:
        """How many of the request's pending tokens go into a step."""
        count = request.num_tokens - request.num_computed_tokens
        cap = self.config.max_prefill_chunk
        if cap and count > cap:
            count = cap
        if count > budget:
            return budget if self.config.chunked_prefill else 0
        return count

    @staticmethod
    def _row(request: Request, count: int, is_new: bool) -> ScheduledRow:
        start = request.num_computed_tokens
        end = start + count
        # Advanced now, not when the result is in: the next step could be planned
        # while this one runs.
        request.num_computed_tokens = end
        return ScheduledRow(
            request.request_id,
            request.slot,
            is_new,
            request.token_ids[start:end],
            start,
            request.block_table,
            end == request.num_tokens,
            request.sampling,
            request.num_output_tokens,
        )

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and slot; it recomputes from its start.

        It goes to the head of the queue: it arrived before all that wait there.
        """
        self._release(request)
        request.status = WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def postprocess(self, output: StepOutput) -> list[TokenEvent]:
        """Append the sampled tokens; finish the requests that they end."""
        by_id = {request.request_id: request for request in self.running}
        events = []
        for sampled in output.sampled:
            request = by_id[sampled.request_id]
            reason = request.append(sampled.token_id)
            if reason:
                self._finish(request)
            events.append(TokenEvent(request, sampled, reason))
        return events

    def abort(self, request: Request) -> TokenEvent | None:
        """End a request early; None when it has already ended."""
        return self._end(request, ABORT, None)

    def fail(self, request_ids: set[str], message: str) -> list[TokenEvent]:
        """End the given requests with an error."""
        everyone = [*self.running, *self.waiting]
        failed = [r for r in everyone if r.request_id in request_ids]
        events = (self._end(request, ERROR, message) for request in failed)
        return [event for event in events if event]

    def _end(self, request: Request, reason: str, error: str | None) -> TokenEvent | None:
        if request.status == FINISHED:
            return None
        if request.status == RUNNING:
            self._finish(request)
        else:
            if request in self.waiting:
                self.waiting.remove(request)
            request.status = FINISHED
        return TokenEvent(request, None, reason, error)

    def _finish(self, request: Request) -> None:
        self._release(request)
        request.status = FINISHED

    def _release(self, request: Request) -> None:
        self.blocks.free(request)
        self._free_slots.append(request.slot)
        request.slot = -1
        self.running.remove(request)

    def check_idle(self) -> None:
        """With no request left, everything must be back. Raises RuntimeError."""
        assert not self.has_work
        self.blocks.check_idle()
        if sorted(self._free_slots) != list(range(self.config.max_num_seqs)):
            raise RuntimeError(f"batch slot leak: free slots {self._free_slots}")
