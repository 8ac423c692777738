# SPDX-License-Identifier: MIT
"""OpenAI response objects. One class an endpoint, streamed and not."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Any

from vtpu.serving.generation import Delta, Generation, TokenInfo
from vtpu.serving.http import dumps

# What the official API gives for a probability of zero, which JSON cannot say.
_LEAST_LOGPROB = -9999.0

RawBytes = Callable[[int], bytes]


class Responder(ABC):
    """Shapes one endpoint's answers."""

    kind = ""
    chunk_kind = ""

    def __init__(
        self,
        generation: Generation,
        model: str,
        raw_bytes: RawBytes,
        want_logprobs: bool,
        include_usage: bool = False,
    ) -> None:
        self._generation = generation
        self._raw_bytes = raw_bytes
        self._want_logprobs = want_logprobs
        self._include_usage = include_usage
        self._head = {
            "id": generation.generation_id,
            "object": self.chunk_kind,
            "created": int(time.time()),
            "model": model,
        }
        # Choice -> what stands before and after the text in a plain chunk.
        self._frames: dict[int, tuple[str, str]] = {}

    def opening(self) -> list[str]:
        """Chunks that a stream begins with, before any text, as JSON."""
        return []

    @abstractmethod
    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One chunk of a stream."""

    @abstractmethod
    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The unstreamed answer; one delta a choice, in order."""

    def chunk_json(self, delta: Delta) -> str:
        """One chunk, serialised.

        Nearly all chunks of a stream differ in their text alone, so the rest is
        serialised once: in the emulated guest a JSON encoder costs as much as all
        else that is done for a token.
        """
        if delta.tokens or delta.finish_reason:
            return dumps(self.chunk(delta))
        frame = self._frames.get(delta.index)
        if frame is None:
            mark = "\0"
            before, after = dumps(self.chunk(Delta(delta.index, mark))).split(dumps(mark))
            frame = self._frames[delta.index] = before, after
        return frame[0] + encode_basestring_ascii(delta.text) + frame[1]

    def usage_json(self) -> str:
        """The last chunk when usage was asked for."""
        return dumps({**self._head, "choices": [], "usage": self._usage()})

    def _usage(self) -> dict[str, int]:
        prompt = self._generation.num_prompt_tokens
        output = self._generation.num_output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self._include_usage:
            # Only the last chunk has it, but all have the key.
            chunk["usage"] = None
        return chunk

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {**self._head, "object": self.kind}
        return {**head, "choices": choices, "usage": self._usage()}


class CompletionResponder(Responder):
    kind = "text_completion"
    chunk_kind = "text_completion"

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._chunk([self._choice(delta)])

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        return self._whole([self._choice(delta) for delta in deltas])

    def _choice(self, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs(delta.tokens) if self._want_logprobs else None
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, tokens: list[TokenInfo]) -> dict[str, Any]:
        def name(token_id: int) -> str:
            return token_name(self._raw_bytes(token_id))

        tops = []
        for token in tokens:
            sampled = token.sampled
            top = {name(i): finite(value) for i, value in sampled.top_logprobs}
            # The sampled token is always there, even if it is not among the top.
            top.setdefault(name(sampled.token_id), finite(sampled.logprob))
            tops.append(top)
        return {
            "tokens": [name(token.sampled.token_id) for token in tokens],
            "token_logprobs": [finite(token.sampled.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": [token.text_offset for token in tokens],
        }


class ChatResponder(Responder):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[str]:
        role = {"role": "assistant", "content": ""}
        return [
            dumps(self._chunk([self._choice(choice.request.index, "delta", role, None, None)]))
            for choice in self._generation.choices
        ]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.tokens else {}
        return self._chunk([self._of(delta, "delta", content)])

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        return self._whole(
            [self._of(d, "message", {"role": "assistant", "content": d.text}) for d in deltas]
        )

    def _of(self, delta: Delta, key: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._want_logprobs:
            logprobs = {"content": [self._token(token) for token in delta.tokens]}
        return self._choice(delta.index, key, message, logprobs, delta.finish_reason)

    @staticmethod
    def _choice(
        index: int,
        key: str,
        message: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            key: message,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _token(self, token: TokenInfo) -> dict[str, Any]:
        sampled = token.sampled
        top = [self._alternative(i, value) for i, value in sampled.top_logprobs]
        return {
            **self._alternative(sampled.token_id, sampled.logprob),
            "top_logprobs": top,
        }

    def _alternative(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._raw_bytes(token_id)
        return {
            "token": token_name(raw),
            "logprob": finite(logprob),
            "bytes": list(raw),
        }


def token_name(raw: bytes) -> str:
    """A token as text; one that is no UTF-8 by itself as "bytes:\\xe2\\x82"."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
