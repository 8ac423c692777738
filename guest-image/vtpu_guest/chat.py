# SPDX-License-Identifier: MIT
"""A client of the guest's OpenAI API, small enough to need no library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

_TIMEOUT = 600


class ApiError(Exception):
    """The server answered with an error, or broke off."""


def is_healthy(port: int) -> bool:
    """Whether GET /health answers 200; anything else is 'not yet'."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def served_model(port: int) -> str:
    """The id of the model that the server has."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/v1/models")
        name: str = json.loads(connection.getresponse().read())["data"][0]["id"]
        return name
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise ApiError(f"GET /v1/models: {error}") from None
    finally:
        connection.close()


def stream_chat(port: int, prompt: str, max_tokens: int) -> Iterator[str]:
    """The pieces of the answer to one user message, as they come."""
    body = {
        "model": served_model(port),
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ApiError(
                f"status {response.status}: {response.read(2000).decode(errors='replace')}"
            )
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ApiError(str(event["error"].get("message", event["error"])))
            for choice in event.get("choices", []):
                if piece := choice.get("delta", {}).get("content"):
                    yield piece
        raise ApiError("the answer broke off before its end")
    except (OSError, http.client.HTTPException) as error:
        raise ApiError(f"no answer from the server: {error}") from None
    finally:
        connection.close()
