# SPDX-License-Identifier: MIT
"""Generating text in this process, without a server.

with LLM("model.gguf") as llm:
    print(llm.generate(["The sea is"], SamplingParams(temperature=0))[0].text)
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from vtpu.gguf import GGUFFile
from vtpu.runner import ModelRunner
from vtpu.serving.block_manager import BlockManager
from vtpu.serving.request import Request
from vtpu.serving.scheduler import Scheduler, SchedulerConfig
from vtpu.serving.step_plan import SampledToken, SamplingParams
from vtpu.tokenizer import Tokenizer


@dataclass(slots=True)
class Completion:
    """token_ids, with a final end-of-text token if that is what ended it; text,
    without. finish_reason: "stop" or "length"."""

    token_ids: list[int]
    text: str
    finish_reason: str
    sampled: list[SampledToken] = field(repr=False)


class LLM:
    """A model on a device. Owned by one thread; a context manager.

    Keyword arguments are ModelRunner's, which also names the errors raised.
    """

    def __init__(self, model: str | os.PathLike[str], **runner: Any) -> None:
        self.tokenizer = Tokenizer(GGUFFile(model).metadata)
        self.runner = ModelRunner(model, **runner)
        limit = min(self.runner.max_rows_sampled, self.runner.max_tokens)
        config = SchedulerConfig(limit, self.runner.max_tokens)
        blocks = BlockManager(self.runner.num_blocks, self.runner.block_size)
        self._longest = min(self.runner.max_model_len, blocks.capacity_tokens)
        self._scheduler = Scheduler(config, blocks)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | None = None,
        max_tokens: int = 128,
    ) -> list[Completion]:
        """Continues every prompt (text or token ids); the results in the same order.

        Raises ValueError for an empty or oversized prompt, and what ModelRunner.execute
        does; then all prompts of the call are given up.
        """
        sampling = sampling or SamplingParams(temperature=0.0)
        requests = [self._request(i, p, sampling, max_tokens) for i, p in enumerate(prompts)]
        sampled: dict[str, list[SampledToken]] = {r.request_id: [] for r in requests}
        reasons: dict[str, str] = {}
        for request in requests:
            self._scheduler.add(request)
        try:
            while (plan := self._scheduler.schedule()) is not None:
                for event in self._scheduler.postprocess(self.runner.execute(plan)):
                    if event.token is not None:
                        sampled[event.request.request_id].append(event.token)
                    if event.finish_reason:
                        reasons[event.request.request_id] = event.finish_reason
        finally:
            self._scheduler.fail(set(sampled), "given up")
        return [self._completion(r, sampled, reasons) for r in requests]

    def _request(
        self,
        index: int,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        max_tokens: int,
    ) -> Request:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        room = self._longest - len(tokens)
        if not tokens or room < 1:
            raise ValueError(
                f"prompt {index} has {len(tokens)} tokens, allowed: 1 to {self._longest - 1}"
            )
        stop = self.tokenizer.stop_token_ids
        return Request(str(index), tokens, sampling, min(max_tokens, room), stop)

    def _completion(
        self, request: Request, sampled: dict[str, list[SampledToken]], reasons: dict[str, str]
    ) -> Completion:
        tokens = request.token_ids[request.num_prompt_tokens :]
        name = request.request_id
        return Completion(tokens, self.tokenizer.decode(tokens), reasons[name], sampled[name])

    def close(self) -> None:
        """Gives the device back."""
        self.runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """`vtpu generate MODEL PROMPT`: prints the continuation."""
    parser = argparse.ArgumentParser(prog="vtpu generate", description="Continue a prompt.")
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", help="runtime back end; default: the first device")
    options = parser.parse_args(arguments)
    sampling = SamplingParams(temperature=options.temperature, seed=options.seed)
    try:
        with LLM(options.model, backend=options.backend) as llm:
            print(llm.generate([options.prompt], sampling, options.max_tokens)[0].text)
    except ValueError as error:
        print(f"vtpu generate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
