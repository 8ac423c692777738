# SPDX-License-Identifier: MIT
"""The engine loop: one thread that owns the model runner and the scheduler.

The asyncio side talks to it through three thread-safe calls (submit, abort,
stop) and hears from it through one callback a step, scheduled with
`call_soon_threadsafe`: a wake-up of the event loop costs a system call, and a
step of sixteen requests must cost one, not sixteen.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from vtpu.serving.block_manager import BlockManager
from vtpu.serving.request import Request
from vtpu.serving.scheduler import Scheduler, SchedulerConfig, TokenEvent
from vtpu.serving.step_plan import ModelRunner, StepOutput, StepPlan

log = logging.getLogger("vtpu.engine")

LOADING = "loading"
READY = "ready"
DEAD = "dead"
STOPPED = "stopped"


class QueueFullError(Exception):
    """The bounded waiting queue has no room; try again later (HTTP 429)."""


class EngineUnavailableError(Exception):
    """The engine is loading, dead or stopped (HTTP 503)."""


class StepListener(Protocol):
    """Hears from the engine, always on the event loop's thread."""

    def on_ready(self) -> None: ...
    def on_events(self, events: list[TokenEvent], now: float) -> None: ...
    def on_dead(self, error: BaseException) -> None: ...


@dataclass(slots=True, frozen=True)
class Limits:
    """What a request may ask for; known once the runner is loaded.

    max_model_len: most tokens of a request, prompt and answer together: the least
        of the model's own, the configured one, and what the KV cache can hold, so
        that an admitted request can always finish, if need be alone.
    """

    max_model_len: int
    vocab_size: int
    max_waiting: int


class Engine:
    """Runs steps until stopped.

    make_runner: called on the engine thread, so that a runner with thread
        affinity is built where it is used.
    max_model_len: configured limit in tokens; 0 takes the runner's.
    max_waiting: requests that may wait for admission before QueueFullError.
    """

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        config: SchedulerConfig,
        listener: StepListener,
        loop: asyncio.AbstractEventLoop,
        max_model_len: int = 0,
        max_waiting: int = 256,
    ) -> None:
        self.state = LOADING
        self.limits = Limits(max_model_len, 0, max_waiting)
        self.scheduler: Scheduler | None = None
        self.num_steps = 0
        self.num_failed_steps = 0
        self._make_runner = make_runner
        self._config = config
        self._listener = listener
        self._loop = loop
        self._wake = threading.Condition()
        # Both under _wake. num_waiting counts what the scheduler has not admitted.
        self._inbox: deque[tuple[str, Request]] = deque()
        self._num_new = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- called from any thread ----

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all requests or none. Raises QueueFullError or EngineUnavailableError."""
        with self._wake:
            if self.state != READY or self._stopping:
                raise EngineUnavailableError(f"the engine is {self.state}")
            if self.num_waiting + len(requests) > self.limits.max_waiting:
                raise QueueFullError(
                    f"{self.num_waiting} requests are waiting, "
                    f"the queue holds {self.limits.max_waiting}"
                )
            self._inbox.extend(("add", request) for request in requests)
            self._num_new += len(requests)
            self._wake.notify()

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests; those that have ended already are left alone."""
        with self._wake:
            self._inbox.extend(("abort", request) for request in requests)
            self._wake.notify()

    def stop(self) -> None:
        """End every request with an error and then the thread. Does not wait."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread; False when it is still in a step after `timeout` s."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        waiting = len(self.scheduler.waiting) if self.scheduler else 0
        return self._num_new + waiting

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running) if self.scheduler else 0

    # ---- the engine thread ----

    def _run(self) -> None:
        try:
            runner, scheduler = self._load()
        except BaseException as error:
            self._die(error)
            return
        self._post(self._listener.on_ready)
        try:
            self._loop_until_stopped(runner, scheduler)
        except BaseException as error:
            log.exception("the engine died")
            self._end_all(scheduler, f"the engine died: {error}")
            self._die(error)
        else:
            self._end_all(scheduler, "the server is shutting down")
            self.state = STOPPED
        try:
            runner.close()
        except Exception:
            log.exception("the model runner did not close")

    def _loop_until_stopped(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        while self._take_inbox(scheduler):
            plan = scheduler.schedule()
            if plan is not None:
                self._step(runner, scheduler, plan)
            elif scheduler.has_work:
                raise RuntimeError("requests are waiting but none can be scheduled")
            if not scheduler.has_work:
                scheduler.check_idle()

    def _load(self) -> tuple[ModelRunner, Scheduler]:
        runner = self._make_runner()
        try:
            return runner, self._configure(runner)
        except BaseException:
            runner.close()
            raise

    def _configure(self, runner: ModelRunner) -> Scheduler:
        config = replace(
            self._config,
            max_num_batched_tokens=min(self._config.max_num_batched_tokens, runner.max_tokens),
        )
        if config.max_num_seqs > runner.max_rows_sampled:
            raise ValueError(
                f"max_num_seqs is {config.max_num_seqs}, "
                f"the model runner samples at most {runner.max_rows_sampled} rows"
            )
        blocks = BlockManager(runner.num_blocks, runner.block_size)
        longest = min(runner.max_model_len, blocks.capacity_tokens)
        if self.limits.max_model_len:
            longest = min(longest, self.limits.max_model_len)
        if not config.chunked_prefill:
            # A preempted request is recomputed in one step, answer and all.
            longest = min(longest, config.max_num_batched_tokens)
        self.limits = replace(self.limits, max_model_len=longest, vocab_size=runner.vocab_size)
        scheduler = Scheduler(config, blocks)
        self.scheduler = scheduler
        self.state = READY
        return scheduler

    def _take_inbox(self, scheduler: Scheduler) -> bool:
        """Apply what others asked for; sleep while there is nothing to do.

        Aborts take effect here, between steps, so a block is never freed while
        the device may still write to it. Returns False when it is time to stop.
        """
        aborted = []
        with self._wake:
            while not (self._inbox or self._stopping or scheduler.has_work):
                self._wake.wait()
            while self._inbox:
                verb, request = self._inbox.popleft()
                if verb == "add":
                    self._num_new -= 1
                    scheduler.add(request)
                elif event := scheduler.abort(request):
                    aborted.append(event)
            stopping = self._stopping
        if aborted:
            self._post(self._listener.on_events, aborted, time.monotonic())
        return not stopping

    def _step(self, runner: ModelRunner, scheduler: Scheduler, plan: StepPlan) -> None:
        started = time.monotonic()
        for request in scheduler.running:
            if not request.scheduled_time:
                request.scheduled_time = started
        self.num_steps += 1
        try:
            output = runner.execute(plan)
            _check_output(plan, output, runner.vocab_size)
        except Exception as error:
            log.exception("step %d failed", plan.step_id)
            self.num_failed_steps += 1
            ids = {row.request_id for row in plan.rows}
            events = scheduler.fail(ids, f"{type(error).__name__}: {error}")
        else:
            events = scheduler.postprocess(output)
        if events:
            self._post(self._listener.on_events, events, time.monotonic())

    def _end_all(self, scheduler: Scheduler, message: str) -> None:
        with self._wake:
            self._stopping = True  # No submit can slip in behind this.
            for verb, request in self._inbox:
                if verb == "add":
                    scheduler.add(request)
            self._inbox.clear()
            self._num_new = 0
        everyone = {r.request_id for r in (*scheduler.running, *scheduler.waiting)}
        events = scheduler.fail(everyone, message)
        self._post(self._listener.on_events, events, time.monotonic())

    def _die(self, error: BaseException) -> None:
        self.state = DEAD
        self._post(self._listener.on_dead, error)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("event loop closed; dropped %s", callback)


def _check_output(plan: StepPlan, output: StepOutput, vocab_size: int) -> None:
    """A runner that answers for the wrong rows must not corrupt other requests."""
    expected = [row for row in plan.rows if row.sample]
    if [row.request_id for row in expected] != [s.request_id for s in output.sampled]:
        raise RuntimeError("the runner's output does not match the plan's rows")
    for row, sampled in zip(expected, output.sampled, strict=True):
        if not 0 <= sampled.token_id < vocab_size:
            raise RuntimeError(
                f"sampled token id {sampled.token_id} of {row.request_id} is outside "
                f"the vocabulary of {vocab_size}"
            )
        if len(sampled.top_logprobs) != row.sampling.n_logprobs:
            raise RuntimeError(
                f"{len(sampled.top_logprobs)} top logprobs for {row.request_id}, "
                f"{row.sampling.n_logprobs} were asked for"
            )
