# SPDX-License-Identifier: MIT
"""The endpoints: /v1/models, /v1/completions, /v1/chat/completions, /health, /metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from vtpu.serving import engine as engines
from vtpu.serving.errors import APIError
from vtpu.serving.frontend import Frontend
from vtpu.serving.generation import Delta, Generation, GenerationError
from vtpu.serving.http import Exchange, Router
from vtpu.serving.params import GenerationParams, parse_chat, parse_completion
from vtpu.serving.responses import ChatResponder, CompletionResponder, Responder

MODELS = "/v1/models"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HEALTH = "/health"
METRICS = "/metrics"


class API:
    """Handlers over one Frontend."""

    def __init__(self, frontend: Frontend, max_body_bytes: int) -> None:
        self._frontend = frontend
        self.app = Router(max_body_bytes)
        self.app.add("GET", MODELS, self.models)
        self.app.add("GET", MODELS + "/", self.model)
        self.app.add("POST", COMPLETIONS, self.completions)
        self.app.add("POST", CHAT, self.chat_completions)
        self.app.add("GET", HEALTH, self.health)
        self.app.add("GET", METRICS, self.metrics)

    async def health(self, exchange: Exchange) -> None:
        state = self._frontend.state
        status = 200 if state == engines.READY else 503
        await exchange.json(status, {"status": state})

    async def metrics(self, exchange: Exchange) -> None:
        body = self._frontend.metrics.expose().encode()
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        await exchange.respond(200, body, kind, ())

    async def models(self, exchange: Exchange) -> None:
        await exchange.json(200, {"object": "list", "data": [self._model()]})

    async def model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix(MODELS + "/")
        if name != self._frontend.model_name:
            raise APIError(
                404,
                f"the model {name!r} does not exist; this server has {self._frontend.model_name!r}",
                "model",
                "model_not_found",
            )
        await exchange.json(200, self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._frontend.model_name,
            "object": "model",
            "created": self._frontend.created,
            "owned_by": "vtpu",
            "max_model_len": self._frontend.engine.limits.max_model_len,
        }

    async def completions(self, exchange: Exchange) -> None:
        params = parse_completion(await exchange.read_json())
        await self._generate(exchange, params, "cmpl", CompletionResponder)

    async def chat_completions(self, exchange: Exchange) -> None:
        params = parse_chat(await exchange.read_json())
        await self._generate(exchange, params, "chatcmpl", ChatResponder)

    async def _generate(
        self,
        exchange: Exchange,
        params: GenerationParams,
        prefix: str,
        make_responder: type[CompletionResponder | ChatResponder],
    ) -> None:
        frontend = self._frontend
        generation = await frontend.generate(params, prefix)
        responder = make_responder(
            generation,
            frontend.model_name,
            frontend.raw_bytes,
            params.logprobs is not None,
            params.include_usage,
        )
        watcher = asyncio.create_task(_abort_on_disconnect(exchange, generation))
        try:
            if params.stream:
                await _stream(exchange, generation, responder, params.include_usage)
            else:
                await _answer(exchange, generation, responder)
        except GenerationError as error:
            raise APIError(500, str(error)) from None
        finally:
            watcher.cancel()
            generation.abort()  # Whatever ended this handler, free the blocks.


async def _abort_on_disconnect(exchange: Exchange, generation: Generation) -> None:
    await exchange.wait_disconnect()
    generation.abort()


async def _stream(
    exchange: Exchange,
    generation: Generation,
    responder: Responder,
    include_usage: bool,
) -> None:
    # Headers wait for the first token, so that a request that fails before it gets
    # a proper status.
    chunks = responder.opening()
    while deltas := await generation.next():
        if not exchange.started:
            await exchange.start_events()
        chunks.extend(responder.chunk_json(delta) for delta in deltas)
        await exchange.events(chunks)
        chunks = []
    if not generation.aborted:
        await exchange.end_events([responder.usage_json()] if include_usage else [])


async def _answer(exchange: Exchange, generation: Generation, responder: Responder) -> None:
    whole: dict[int, Delta] = {}
    while deltas := await generation.next():
        for delta in deltas:
            if delta.index in whole:
                whole[delta.index].merge(delta)
            else:
                whole[delta.index] = delta
    if not generation.aborted:
        ordered = [whole[index] for index in sorted(whole)]
        await exchange.json(200, responder.whole(ordered))
