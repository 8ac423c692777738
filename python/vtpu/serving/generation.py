# SPDX-License-Identifier: MIT
"""The API's side of a request: token events in, text deltas out.

A Generation is one HTTP request; it has one Choice a sequence. All of this runs on
the event loop's thread. Events are turned into text as soon as they arrive, not
when the client reads, so a stop string ends a sequence however slow its client is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from vtpu.serving.detokenizer import Detokenizer
from vtpu.serving.request import ABORT, STOP, Request
from vtpu.serving.scheduler import TokenEvent
from vtpu.serving.step_plan import SampledToken


class GenerationError(Exception):
    """A step that this request was part of failed (HTTP 500 or an error event)."""


@dataclass(slots=True)
class TokenInfo:
    """A generated token with where its text starts, in characters of the answer."""

    sampled: SampledToken
    text_offset: int


@dataclass(slots=True)
class Delta:
    """What is new in one choice since the last one. finish_reason ends it."""

    index: int
    text: str
    tokens: list[TokenInfo] = field(default_factory=list)
    finish_reason: str | None = None

    def merge(self, later: Delta) -> None:
        self.text += later.text
        self.tokens += later.tokens
        self.finish_reason = later.finish_reason


class Choice:
    """One sequence: its detokeniser, its count of tokens, its times."""

    __slots__ = (
        "detokenizer",
        "finish_reason",
        "first_token_time",
        "last_token_time",
        "num_tokens",
        "request",
        "want_logprobs",
    )

    def __init__(self, request: Request, detokenizer: Detokenizer, want_logprobs: bool) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self.want_logprobs = want_logprobs
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.first_token_time = 0.0
        self.last_token_time = 0.0

    def feed(self, event: TokenEvent) -> Delta:
        """Take an event in. Must not be called once finish_reason is set."""
        request, sampled = self.request, event.token
        delta = Delta(request.index, "")
        reason = event.finish_reason
        if sampled is not None:
            self.num_tokens += 1
            detokenizer = self.detokenizer
            if self.want_logprobs:
                delta.tokens = [TokenInfo(sampled, detokenizer.num_chars)]
            may_stop = self.num_tokens > request.min_tokens
            delta.text = detokenizer.append(sampled.token_id, may_stop)
            if detokenizer.stopped:
                reason = STOP
        if reason is not None:
            if reason != ABORT:
                delta.text += self.detokenizer.flush()
            self.finish_reason = delta.finish_reason = reason
        return delta


class Generation:
    """All choices of one HTTP request, and the deltas that wait to be sent.

    num_prompt_tokens: over all prompts, each counted once whatever n is.
    abort_requests: tells the engine to end sequences.
    """

    def __init__(
        self,
        generation_id: str,
        choices: list[Choice],
        num_prompt_tokens: int,
        abort_requests: Callable[[list[Request]], None],
    ) -> None:
        self.generation_id = generation_id
        self.choices = choices
        self.num_prompt_tokens = num_prompt_tokens
        self._abort_requests = abort_requests
        self._pending: dict[int, Delta] = {}
        self._error: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.aborted = False

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def push(self, delta: Delta) -> None:
        """Queue a delta; one of the same choice that still waits absorbs it."""
        waiting = self._pending.get(delta.index)
        if waiting is not None:
            waiting.merge(delta)
        elif delta.text or delta.tokens or delta.finish_reason:
            self._pending[delta.index] = delta
        else:
            return  # Nothing to show yet, such as half a character.
        self._notify()

    def fail(self, message: str) -> None:
        """Make next() raise; the other sequences of the request are ended."""
        if self._error is None:
            self._error = message
            self.abort()
            self._notify()

    def abort(self) -> None:
        """End the sequences that have not ended. Safe to call at any time."""
        if self.aborted:
            return
        self.aborted = True
        open_requests = [c.request for c in self.choices if not c.finish_reason]
        if open_requests:
            self._abort_requests(open_requests)
        self._notify()

    async def next(self) -> list[Delta]:
        """Wait for deltas; [] when all has been given or the request was aborted.

        Raises GenerationError.
        """
        while not self._pending:
            if self._error is not None:
                raise GenerationError(self._error)
            if self.aborted or self.finished:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas = list(self._pending.values())
        self._pending.clear()
        return deltas

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
