# SPDX-License-Identifier: MIT
"""Joins the API to the engine: prompts in, generations out, metrics kept.

Everything here runs on the event loop's thread, but for loading and for
tokenising long prompts, which run on a helper thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from vtpu.serving import engine as engines
from vtpu.serving.chat_template import ChatTemplate, ChatTemplateError
from vtpu.serving.detokenizer import Detokenizer
from vtpu.serving.engine import Engine, EngineUnavailableError, QueueFullError
from vtpu.serving.errors import APIError, bad_request, overloaded, unavailable
from vtpu.serving.generation import Choice, Generation
from vtpu.serving.metrics import Metrics
from vtpu.serving.params import GenerationParams
from vtpu.serving.request import ERROR, Request
from vtpu.serving.scheduler import SchedulerConfig, TokenEvent
from vtpu.serving.step_plan import ModelRunner, SamplingParams

if TYPE_CHECKING:
    from vtpu.tokenizer import Tokenizer

log = logging.getLogger("vtpu.frontend")

# Above this many characters prompts are tokenised off the event loop, so that other
# clients' streams do not stall.
_LONG_PROMPT = 4096
_U64 = 2**64 - 1
# Odd, so that the seeds of a request's choices never repeat.
_SEED_STEP = 0x9E3779B97F4A7C15


class TextModel(Protocol):
    """What loading a model's text side gives."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


class Frontend:
    """Owns the engine; makes generations and hands them their tokens.

    load_text: reads the tokeniser and the chat template; runs on a helper thread
        while the engine thread loads the runner.
    on_fatal: called once if the model cannot be loaded.
    """

    def __init__(
        self,
        model_name: str,
        load_text: Callable[[], TextModel],
        make_runner: Callable[[], ModelRunner],
        config: SchedulerConfig,
        on_fatal: Callable[[BaseException], None],
        max_model_len: int = 0,
        max_waiting: int = 256,
    ) -> None:
        self.model_name = model_name
        self.created = int(time.time())
        self.metrics = Metrics(model_name)
        self._load_text = load_text
        self._on_fatal = on_fatal
        self._text: TextModel | None = None
        self._open: dict[str, tuple[Generation, Choice]] = {}
        self._loop = asyncio.get_running_loop()
        self.engine = Engine(make_runner, config, self, self._loop, max_model_len, max_waiting)
        self._add_readings()

    # ---- life ----

    async def load(self) -> None:
        """Load model and tokeniser side by side; returns when the latter is in."""
        self.engine.start()
        try:
            self._text = await asyncio.to_thread(self._load_text)
        except Exception as error:
            self._on_fatal(error)
            return
        self._check_vocabulary()

    def close(self) -> None:
        """End all requests with an error and the engine after its current step."""
        self.engine.stop()

    @property
    def state(self) -> str:
        if self._text is None and self.engine.state == engines.READY:
            return engines.LOADING
        return self.engine.state

    def raw_bytes(self, token_id: int) -> bytes:
        """A token's bytes, for log probabilities."""
        assert self._text is not None
        return self._text.tokenizer.raw_bytes(token_id)

    def on_ready(self) -> None:
        self._check_vocabulary()

    def on_dead(self, error: BaseException) -> None:
        for generation, _ in list(self._open.values()):
            generation.fail(f"the engine died: {error}")
        self._open.clear()
        if self.engine.scheduler is None:  # It never came to life.
            self._on_fatal(error)

    def _check_vocabulary(self) -> None:
        if self._text is None or self.engine.state != engines.READY:
            return
        has, needs = self.engine.limits.vocab_size, self._text.tokenizer.vocab_size
        if has < needs:
            self._on_fatal(ValueError(f"the tokeniser has {needs} tokens, the model only {has}"))

    # ---- requests ----

    async def generate(self, params: GenerationParams, prefix: str) -> Generation:
        """Tokenise, check against the limits, and queue.

        prefix: of the response id, which is also the id that the device's traces
            carry. Raises APIError: 400 for what can never fit, 429, 503.
        """
        text = self._text
        if text is None or self.state != engines.READY:
            raise unavailable(f"the model is not ready: the engine is {self.state}")
        if params.model not in (None, self.model_name):
            raise APIError(
                404,
                f"the model {params.model!r} does not exist; this server has {self.model_name!r}",
                "model",
                "model_not_found",
            )
        param = "messages" if params.messages else "prompt"
        prompts = await self._tokenize(text, params, param)
        generation = self._new_generation(text, params, prompts, param, prefix)
        try:
            self.engine.submit([choice.request for choice in generation.choices])
        except QueueFullError as error:
            raise overloaded(f"the server is overloaded: {error}") from None
        except EngineUnavailableError as error:
            raise unavailable(str(error)) from None
        # The engine's first event reaches this thread later than this line does.
        for choice in generation.choices:
            self._open[choice.request.request_id] = (generation, choice)
        return generation

    async def _tokenize(
        self, text: TextModel, params: GenerationParams, param: str
    ) -> list[list[int]]:
        prompts = params.prompts
        if params.messages:
            if text.template is None:
                raise bad_request("the model has no chat template", param)
            try:
                prompts = [text.template.render(params.messages)]
            except ChatTemplateError as error:
                raise bad_request(str(error), param) from None
        tokenizer, add_bos = text.tokenizer, not params.messages
        limit = self.engine.limits.max_model_len
        length = 0
        for prompt in prompts:
            if isinstance(prompt, str):
                length += len(prompt)
                # Told from the length alone where that will do: reading megabytes
                # only to refuse them takes the emulated guest a minute.
                least = tokenizer.least_tokens(prompt)
                if least >= limit:
                    raise _too_long(limit, param, f"at least {least}")

        def encode() -> list[list[int]]:
            return [p if isinstance(p, list) else tokenizer.encode(p, add_bos) for p in prompts]

        try:
            return encode() if length < _LONG_PROMPT else await asyncio.to_thread(encode)
        except UnicodeEncodeError:
            raise bad_request(f"{param} has a lone surrogate character", param) from None

    def _new_generation(
        self,
        text: TextModel,
        params: GenerationParams,
        prompts: list[list[int]],
        param: str,
        prefix: str,
    ) -> Generation:
        limits, tokenizer = self.engine.limits, text.tokenizer
        count = len(prompts) * params.n
        if count > limits.max_waiting:
            raise bad_request(
                f"{len(prompts)} prompts with n={params.n} are {count} sequences, "
                f"at most {limits.max_waiting} fit the queue",
                param,
            )
        for token in params.stop_token_ids:
            _check_token(token, limits.vocab_size, "stop_token_ids")
        # A control token has no text to match, but its id can be compared.
        ids, control = set(params.stop_token_ids), tokenizer.control_ids
        ids.update(control[s] for s in params.stop if s in control)
        if not params.ignore_eos:
            ids |= tokenizer.stop_token_ids
        stop_ids = frozenset(ids)
        seed = params.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        generation_id = f"{prefix}-{uuid.uuid4().hex}"
        now = time.monotonic()
        choices = []
        for index in range(count):
            number, child = divmod(index, params.n)
            prompt = prompts[number]
            max_tokens = self._max_tokens(params, prompt, param)
            request = Request(
                generation_id if count == 1 else f"{generation_id}-{index}",
                list(prompt),
                self._sampling(params, (seed + child * _SEED_STEP) & _U64),
                max_tokens,
                stop_ids,
                params.min_tokens,
                index,
                now,
            )
            detokenizer = Detokenizer(tokenizer.token_bytes, params.stop)
            choices.append(Choice(request, detokenizer, params.logprobs is not None))
        num_prompt_tokens = sum(map(len, prompts))
        return Generation(generation_id, choices, num_prompt_tokens, self.engine.abort)

    def _sampling(self, params: GenerationParams, seed: int) -> SamplingParams:
        top_k = 0 if params.top_k >= self.engine.limits.vocab_size else params.top_k
        return SamplingParams(params.temperature, top_k, params.top_p, seed, params.logprobs or 0)

    def _max_tokens(self, params: GenerationParams, prompt: list[int], param: str) -> int:
        """The most tokens to generate; refuses what can never fit."""
        limits, length = self.engine.limits, len(prompt)
        if not prompt:
            raise bad_request(f"{param} is empty: it must have at least one token", param)
        limit = limits.max_model_len
        if length >= limit:
            raise _too_long(limit, param, str(length))
        for token in prompt if params.prompts else ():
            _check_token(token, limits.vocab_size, param)
        room = limit - length
        if params.max_tokens is None:
            return min(room, params.default_max_tokens or room)
        if params.max_tokens > room:
            raise APIError(
                400,
                f"the maximum context length is {limit} tokens, but {length} in "
                f"{param} and max_tokens {params.max_tokens} make "
                f"{length + params.max_tokens}",
                "max_tokens",
                "context_length_exceeded",
            )
        return params.max_tokens

    # ---- events of the engine ----

    def on_events(self, events: list[TokenEvent], now: float) -> None:
        for event in events:
            entry = self._open.get(event.request.request_id)
            if entry is None:
                continue  # Ended on this side (stop string) before the engine knew.
            generation, choice = entry
            try:
                self._on_event(event, generation, choice, now)
            except Exception as error:
                log.exception("request %s", event.request.request_id)
                self._open.pop(event.request.request_id, None)
                generation.fail(f"internal error: {type(error).__name__}: {error}")

    def _on_event(
        self, event: TokenEvent, generation: Generation, choice: Choice, now: float
    ) -> None:
        delta = choice.feed(event)
        if event.token is not None:
            self._count_token(choice, now)
        reason = choice.finish_reason
        if reason is not None:
            del self._open[event.request.request_id]
            self._count_end(choice, reason, now)
            if event.finish_reason is None:
                self.engine.abort([choice.request])  # A stop string ended it.
        if reason == ERROR:
            generation.fail(event.error or "the step failed")
        else:
            generation.push(delta)

    def _count_token(self, choice: Choice, now: float) -> None:
        metrics, request = self.metrics, choice.request
        metrics.generation_tokens.add(1)
        if choice.num_tokens == 1:
            choice.first_token_time = now
            metrics.prompt_tokens.add(request.num_prompt_tokens)
            metrics.time_to_first_token.observe(now - request.arrival_time)
            metrics.request_queue_time.observe(request.scheduled_time - request.arrival_time)
            metrics.request_prefill_time.observe(now - request.scheduled_time)
        else:
            metrics.inter_token_latency.observe(now - choice.last_token_time)
        choice.last_token_time = now

    def _count_end(self, choice: Choice, reason: str, now: float) -> None:
        metrics = self.metrics
        metrics.request_success.add(1, reason)
        metrics.e2e_request_latency.observe(now - choice.request.arrival_time)
        if choice.num_tokens:
            metrics.request_decode_time.observe(now - choice.first_token_time)

    def _add_readings(self) -> None:
        engine, add = self.engine, self.metrics.add_reading

        def kv_usage() -> float:
            return engine.scheduler.blocks.usage if engine.scheduler else 0.0

        def preemptions() -> float:
            return engine.scheduler.num_preemptions if engine.scheduler else 0

        add("num_requests_running", "Running.", lambda: engine.num_running)
        add("num_requests_waiting", "Waiting.", lambda: engine.num_waiting)
        add("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", kv_usage)
        add("num_preemptions_total", "Preemptions.", preemptions, "counter")
        # The prefix cache is not there yet; dashboards expect its counters.
        add("prefix_cache_queries_total", "Tokens looked up.", lambda: 0, "counter")
        add("prefix_cache_hits_total", "Tokens found.", lambda: 0, "counter")


def _check_token(token: int, vocab_size: int, param: str) -> None:
    if not 0 <= token < vocab_size:
        raise bad_request(f"{param} has token id {token}, must be 0 to {vocab_size - 1}", param)


def _too_long(limit: int, param: str, tokens: str) -> APIError:
    return APIError(
        400,
        f"the maximum context length is {limit} tokens, prompt and answer together, "
        f"but {param} has {tokens} tokens",
        param,
        "context_length_exceeded",
    )
