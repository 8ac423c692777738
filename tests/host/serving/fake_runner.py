# SPDX-License-Identifier: MIT
"""A model runner without a model, and a strong oracle for scheduler bugs.

The next token is a hash of all tokens of the sequence *as read back from a paged
cache* through the block table. A block handed out twice, a wrong position, a
skipped or repeated token changes the hash, or is caught on the spot: the runner
keeps what it saw and raises on any inconsistency. `oracle()` gives the answer for a
prompt from the definition alone.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence

from vtpu.serving.step_plan import (
    NULL_BLOCK,
    SampledToken,
    SamplingParams,
    ScheduledRow,
    StepOutput,
    StepPlan,
)

Script = Callable[[list[int], int], int | None]


class InconsistentError(AssertionError):
    """The plan contradicts what the runner has seen."""


def _float32(value: float) -> float:
    (exact,) = struct.unpack("<f", struct.pack("<f", value))
    return float(exact)


def _digest(*parts: object) -> int:
    data = repr(parts).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def next_token(
    tokens: Sequence[int],
    sampling: SamplingParams,
    rng_position: int,
    low: int,
    high: int,
) -> SampledToken:
    """The fake model: a pure function of the prefix and the request's sampling."""
    prefix = _digest(list(tokens))
    draw = 0
    if sampling.temperature > 0:
        draw = _digest(sampling.seed, rng_position, sampling.temperature)
    token = low + _digest(prefix, draw) % (high - low)
    top = [
        (low + _digest(prefix, "top", i) % (high - low), _float32(-0.1 - i / 3))
        for i in range(sampling.n_logprobs)
    ]
    return SampledToken("", token, _float32(-(prefix % 1000) / 333), top)


class FakeRunner:
    """Simulates the paged cache on token ids.

    script: may dictate the next token (prompt and answer so far, number of answer
        tokens) -> token id or None for the hash.
    before_step: called with each plan; may block or raise.
    """

    def __init__(
        self,
        model_path: str = "",
        num_blocks: int = 65,
        block_size: int = 16,
        max_num_seqs: int = 16,
        backend: str | None = None,
        vocab_size: int = 49152,
        max_model_len: int = 8192,
        token_range: tuple[int, int] = (300, 20000),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_tokens = 512
        self.max_rows_sampled = 32
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.token_range = token_range
        self.script: Script | None = None
        self.before_step: Callable[[StepPlan], None] | None = None
        self.plans: list[list[tuple[str, int, int]]] = []
        self.problems: list[str] = []
        self.closed = False
        self._max_num_seqs = max_num_seqs
        # slot in the cache -> (request, position, token)
        self._cache: dict[int, tuple[str, int, int]] = {}
        self._rows: dict[int, tuple[str, int, tuple[int, ...]]] = {}
        self._step_id = 0
        self._thread: int | None = None

    def execute(self, plan: StepPlan) -> StepOutput:
        try:
            self._check_plan(plan)
            for row in plan.rows:
                self._check_row(row)
                self._write(row)
        except InconsistentError as error:
            self.problems.append(str(error))
            raise
        self.plans.append([(r.request_id, r.start, len(r.token_ids)) for r in plan.rows])
        if self.before_step:
            self.before_step(plan)
        sampled = [self._sample(row) for row in plan.rows if row.sample]
        return StepOutput(plan.step_id, sampled)

    def close(self) -> None:
        self._need(not self.closed, "closed twice")
        self._need(self._thread in (None, threading.get_ident()), "closed elsewhere")
        self.closed = True

    def _check_plan(self, plan: StepPlan) -> None:
        me = threading.get_ident()
        self._need(not self.closed, "execute() after close()")
        self._thread = self._thread or me
        total = sum(len(row.token_ids) for row in plan.rows)
        slots = [row.slot for row in plan.rows]
        sampled = sum(row.sample for row in plan.rows)
        blocks = [b for row in plan.rows for b in row.block_table]
        self._need(self._thread == me, "execute() from two threads")
        self._need(plan.step_id > self._step_id, "step ids must rise")
        self._need(total == plan.num_tokens, "num_tokens is not the rows' sum")
        self._need(0 < total <= self.max_tokens, f"{total} tokens in a step")
        self._need(sampled <= self.max_rows_sampled, f"{sampled} rows sampled")
        self._need(len(set(slots)) == len(slots), f"slots {slots} not distinct")
        self._need(len(set(blocks)) == len(blocks), "a block in two tables")
        self._step_id = plan.step_id

    def _check_row(self, row: ScheduledRow) -> None:
        end = row.start + len(row.token_ids)
        table = tuple(row.block_table)
        self._need(0 <= row.slot < self._max_num_seqs, f"slot {row.slot}")
        self._need(len(row.token_ids) > 0, "an empty row")
        self._need(end <= len(table) * self.block_size, "the table is too short")
        self._need(NULL_BLOCK not in table, "the null block was handed out")
        self._need(all(0 < b < self.num_blocks for b in table), f"blocks {table}")
        if row.is_new:
            self._need(row.start == 0, f"a new row starts at {row.start}")
        else:
            owner, position, before = self._rows.get(row.slot, ("", 0, ()))
            self._need(owner == row.request_id, f"slot {row.slot} was {owner}'s")
            self._need(position == row.start, f"start {row.start}, not {position}")
            self._need(table[: len(before)] == before, "the table did not only grow")
        self._rows[row.slot] = (row.request_id, end, table)

    def _write(self, row: ScheduledRow) -> None:
        for i, token in enumerate(row.token_ids):
            position = row.start + i
            self._cache[self._slot(row, position)] = (row.request_id, position, token)

    def _slot(self, row: ScheduledRow, position: int) -> int:
        block = row.block_table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _read(self, row: ScheduledRow) -> list[int]:
        tokens = []
        for position in range(row.start + len(row.token_ids)):
            owner, at, token = self._cache[self._slot(row, position)]
            expected = (row.request_id, position)
            if (owner, at) != expected:
                self.problems.append(f"read {(owner, at)} for {expected}")
            tokens.append(token)
        return tokens

    def _sample(self, row: ScheduledRow) -> SampledToken:
        tokens = self._read(row)
        result = next_token(tokens, row.sampling, row.rng_position, *self.token_range)
        result.request_id = row.request_id
        if self.script:
            forced = self.script(tokens, row.rng_position)
            if forced is not None:
                result.token_id = forced
        return result

    @staticmethod
    def _need(condition: bool, message: str) -> None:
        if not condition:
            raise InconsistentError(message)


def oracle(
    prompt: Sequence[int],
    count: int,
    sampling: SamplingParams,
    token_range: tuple[int, int] = (300, 20000),
) -> list[int]:
    """The first `count` tokens that the fake model answers to a prompt."""
    tokens = list(prompt)
    for position in range(count):
        sampled = next_token(tokens, sampling, position, *token_range)
        tokens.append(sampled.token_id)
    return tokens[len(prompt) :]
