# SPDX-License-Identifier: MIT
"""The little HTTP that the API needs, on plain ASGI: routing, JSON, SSE."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vtpu.serving.errors import APIError, bad_request

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

log = logging.getLogger("vtpu.http")

dumps = json.JSONEncoder(separators=(",", ":")).encode


class DisconnectedError(Exception):
    """The client went away; there is nobody to answer."""


class Exchange:
    """One request and its response."""

    def __init__(self, scope: Message, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.started = False
        self._headers: list[Header] = scope["headers"]
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes

    async def read_json(self) -> Any:
        """The body. Raises APIError 400 or 413, DisconnectedError."""
        body = await self._read_body()
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"the request body is not valid JSON: {error}") from None

    async def _read_body(self) -> bytes:
        for name, value in self._headers:
            if name == b"content-length" and value.isdigit():
                self._check_size(int(value))
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            part = message.get("body", b"")
            size += len(part)
            self._check_size(size)
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts)

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            # The connection stays open and uvicorn throws the rest of the body away:
            # closing it under a client that still sends would lose it this answer.
            raise APIError(
                413,
                f"the request body has {size} bytes or more, "
                f"at most {self._max_body_bytes} are allowed",
            )

    async def wait_disconnect(self) -> None:
        """Return when the client is gone. Call it after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self, status: int, body: bytes, content_type: bytes, headers: tuple[Header, ...]
    ) -> None:
        length = str(len(body)).encode()
        await self._start(
            status,
            [(b"content-type", content_type), (b"content-length", length), *headers],
        )
        await self._send({"type": "http.response.body", "body": body})

    async def json(self, status: int, value: Any, headers: tuple[Header, ...] = ()) -> None:
        await self.respond(status, dumps(value).encode(), b"application/json", headers)

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        await self._start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
            ],
        )

    async def events(self, values: list[str]) -> None:
        """Send serialised JSON values, one event each, in one write."""
        await self._send({"type": "http.response.body", "body": _events(values), "more_body": True})

    async def end_events(self, values: list[str]) -> None:
        """Send the last values and the end mark, in one write."""
        body = _events([*values, "[DONE]"])
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _events(values: list[str]) -> bytes:
    return "".join(f"data: {value}\n\n" for value in values).encode()


Handler = Callable[[Exchange], Awaitable[None]]


class Router:
    """An ASGI application: path and method to handler, errors to JSON."""

    def __init__(self, max_body_bytes: int) -> None:
        self._routes: dict[str, dict[str, Handler]] = {}
        self._max_body_bytes = max_body_bytes

    def add(self, method: str, path: str, handler: Handler) -> None:
        """A path that ends in "/" also takes whatever follows it."""
        self._routes.setdefault(path, {})[method] = handler

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self._max_body_bytes)
        try:
            await self._find(exchange)(exchange)
        except APIError as error:
            await self._answer(exchange, error)
        except DisconnectedError:
            pass
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("%s %s", exchange.method, exchange.path)
            await self._answer(exchange, APIError(500, f"internal error: {type(error).__name__}"))

    def _find(self, exchange: Exchange) -> Handler:
        path = exchange.path
        methods = self._routes.get(path)
        if methods is None:
            methods = self._routes.get(path[: path.rfind("/") + 1])
        if methods is None:
            raise APIError(404, f"unknown path: {path}")
        handler = methods.get(exchange.method)
        if handler is None:
            allowed = ", ".join(methods)
            raise APIError(
                405,
                f"{path} does not take {exchange.method}, only {allowed}",
                headers=((b"allow", allowed.encode()),),
            )
        return handler

    @staticmethod
    async def _answer(exchange: Exchange, error: APIError) -> None:
        if not exchange.started:
            await exchange.json(error.status, error.body(), error.headers)
        else:
            await exchange.end_events([dumps(error.body())])
