# SPDX-License-Identifier: MIT
"""The workloads as a client of an OpenAI server sees them, timed.

The prompts and lengths are those of llama_baseline.py.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection

PROMPT_TOKENS = 16
DECODE_TOKENS = 96
_TIMEOUT = 300


def prompt(sequence: int, length: int) -> list[int]:
    """Arbitrary ordinary tokens, different for each sequence."""
    return [1000 + (sequence * 7919 + i * 104729) % 40000 for i in range(length)]


@dataclass
class Stream:
    """When each event of one streamed completion arrived."""

    start: float
    tokens: int = 0
    events: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens so far)


def complete(
    port: int, ids: list[int], max_tokens: int, gate: threading.Barrier | None = None
) -> Stream:
    """One greedy completion; with a gate, all callers send at once."""
    body = {
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "logprobs": 0,
    }
    connection = HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    connection.connect()
    if gate is not None:
        gate.wait()
    stream = Stream(time.perf_counter())
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"bench: the server answered {response.status}: {response.read(1000)!r}")
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            stream.tokens += len((choice.get("logprobs") or {}).get("token_logprobs") or [])
            stream.events.append((time.perf_counter(), stream.tokens))
    connection.close()
    if stream.tokens != max_tokens:
        raise SystemExit(f"bench: asked for {max_tokens} tokens, got {stream.tokens}")
    return stream


def decode_rate(port: int, sequences: int) -> float:
    """Tokens/s of `sequences` concurrent requests, from the moment the last of
    them has its first token until the first of them ends."""
    gate = threading.Barrier(sequences)
    streams: list[Stream | None] = [None] * sequences

    def client(index: int) -> None:
        streams[index] = complete(port, prompt(index, PROMPT_TOKENS), DECODE_TOKENS, gate)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(sequences)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [s for s in streams if s is not None]
    if len(done) != sequences:
        raise SystemExit("bench: a request failed")
    begin = max(s.events[0][0] for s in done)
    end = min(s.events[-1][0] for s in done)
    total = 0
    for stream in done:
        before = max(count for at, count in stream.events if at <= begin)
        after = max(count for at, count in stream.events if at <= end)
        total += after - before
    return total / (end - begin)


def first_token_time(port: int, length: int) -> float:
    """Seconds from sending a prompt of `length` tokens to its first token."""
    stream = complete(port, prompt(0, length), 1)
    return stream.events[0][0] - stream.start
