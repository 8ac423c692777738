# SPDX-License-Identifier: MIT
"""The launch block: a step's inputs and results in memory shared with the device.

Written for an emulated processor, where Python is ten times slower and importing
numpy alone takes seconds: views are made once, what a slot keeps from step to step
is not written again, and a decoded token costs eight stores.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from vtpu.artifacts import StepShape
from vtpu.serving.step_plan import (
    SampledToken,
    SamplingParams,
    ScheduledRow,
    StepOutput,
    StepPlan,
)

# 32-bit words of the hardware's sample_params and sample_result.
_PARAM_WORDS, _TEMPERATURE, _TOP_K, _TOP_P, _NUM_LOGPROBS, _SEED, _POSITION = 8, 0, 1, 2, 3, 4, 6
_RESULT_WORDS, _TOKEN, _LOGPROB, _IDS, _LOGPROBS = 48, 0, 1, 4, 24

# The hardware takes no smaller temperature but 0. Below it, one token has all the
# probability anyway: logits 2^-10 apart already differ by a factor of e^16.
_MIN_TEMPERATURE = 2.0**-14
# Nor does it take a top_p of 0, which is what a smaller number becomes in f32. The
# likeliest token alone has more than this.
_MIN_TOP_P = 2.0**-126


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the block. offset and nbytes are in bytes, nbytes for the maxima."""

    offset: int
    nbytes: int


class LaunchBlock:
    """Typed views on a mapped launch block; owned by one thread.

    memory: the whole block, writable, zeroed; the device may read it only while a
        step runs.
    fields: by name, as the executable's metadata has them.
    num_slots: rows of the KV cache.
    """

    def __init__(
        self, memory: memoryview, fields: dict[str, Field], shape: StepShape, num_slots: int
    ) -> None:
        def place(name: str) -> memoryview:
            field = fields[name]
            return memory[field.offset : field.offset + field.nbytes]

        def view(name: str) -> memoryview:
            return place(name).cast("I")

        self._shape = shape
        self._token_ids = view("token_ids")
        self._positions = view("positions")
        self._slots = view("slots")
        self._row_info = view("row_info")
        self._block_tables = view("block_tables")
        self._sample_rows = view("sample_rows")
        self._params = view("sample_params")
        self._params_f32 = place("sample_params").cast("f")
        self._sampled = view("sampled")
        self._sampled_f32 = place("sampled").cast("f")
        self._num_tokens, self._num_rows = view("T"), view("R")
        self._num_seqs = view("S")
        self._logits_va = place("logits_va").cast("Q")
        view("N")[0] = num_slots
        # What the device's memory holds from the steps before: the entries of each
        # slot's block table, and the parameters of each sampled row.
        self._table_len = [0] * shape.max_seqs
        self._row_params: list[SamplingParams | None] = [None] * shape.max_seqs

    def set_logits(self, va: int) -> None:
        """Device address for the logits of the sampled rows, f32 [R, vocab]; 0: none."""
        self._logits_va[0] = va

    def fill(self, plan: StepPlan) -> None:
        """Writes a step's inputs.

        Raises ValueError when the plan is larger than the program was compiled for;
        the block stays usable for the next plan.
        """
        shape = self._shape
        if plan.num_tokens > shape.max_tokens:
            raise ValueError(f"{plan.num_tokens} tokens in a step, the most is {shape.max_tokens}")
        token_ids, positions, slots = self._token_ids, self._positions, self._slots
        row_info, block_size = self._row_info, shape.block_size
        at = sampled = seqs = 0
        for row in plan.rows:
            slot, start, table = row.slot, row.start, row.block_table
            if slot >= seqs:
                seqs = slot + 1
            if row.is_new or len(table) != self._table_len[slot]:
                self._write_table(row)
            if len(row.token_ids) == 1:
                token_ids[at] = row.token_ids[0]
                positions[at] = start
                slots[at] = table[start // block_size] * block_size + start % block_size
                row_info[2 * at] = start + 1
                row_info[2 * at + 1] = slot
                at += 1
            else:
                at = self._write_chunk(row, at)
            if row.sample:
                self._sample_rows[sampled] = at - 1
                if self._row_params[sampled] is not row.sampling:
                    self._write_params(sampled, row.sampling)
                self._params[sampled * _PARAM_WORDS + _POSITION] = row.rng_position
                sampled += 1
        if at != plan.num_tokens:
            raise ValueError(f"the plan's rows have {at} tokens, it says {plan.num_tokens}")
        self._num_tokens[0] = at
        self._num_rows[0] = sampled
        self._num_seqs[0] = seqs

    def results(self, plan: StepPlan) -> StepOutput:
        """Reads what the device sampled, after the step has ended.

        Raises ArithmeticError when a row's logits were not numbers.
        """
        words, floats = self._sampled, self._sampled_f32
        sampled = []
        base = 0
        for row in plan.rows:
            if not row.sample:
                continue
            top: list[tuple[int, float]] = []
            count = row.sampling.n_logprobs
            if count:
                ids = words[base + _IDS : base + _IDS + count].tolist()
                top = list(
                    zip(ids, floats[base + _LOGPROBS : base + _LOGPROBS + count], strict=True)
                )
            token, logprob = words[base + _TOKEN], floats[base + _LOGPROB]
            if logprob != logprob:
                raise ArithmeticError(f"{row.request_id}: the model's logits are not numbers")
            sampled.append(SampledToken(row.request_id, token, logprob, top))
            base += _RESULT_WORDS
        return StepOutput(plan.step_id, sampled)

    def _write_table(self, row: ScheduledRow) -> None:
        """Appends what a slot's table has grown by; all of it for a new request."""
        known = 0 if row.is_new else self._table_len[row.slot]
        table = row.block_table
        if len(table) > self._shape.max_blocks:
            raise ValueError(
                f"{row.request_id}: {len(table)} blocks, the most is {self._shape.max_blocks}"
            )
        base = row.slot * self._shape.max_blocks
        self._block_tables[base + known : base + len(table)] = array("I", table[known:])
        self._table_len[row.slot] = len(table)

    def _write_chunk(self, row: ScheduledRow, at: int) -> int:
        """Several tokens of one request, with slice copies; returns where they end."""
        start, count = row.start, len(row.token_ids)
        end = at + count
        self._token_ids[at:end] = array("I", row.token_ids)
        self._positions[at:end] = array("I", range(start, start + count))
        self._row_info[2 * at : 2 * end : 2] = array("I", range(start + 1, start + count + 1))
        self._row_info[2 * at + 1 : 2 * end : 2] = array("I", [row.slot]) * count
        size = self._shape.block_size
        first, last = start // size, (start + count - 1) // size
        slots: array[int] = array("I")
        for block in row.block_table[first : last + 1]:
            slots.extend(range(block * size, block * size + size))
        skip = start % size
        self._slots[at:end] = slots[skip : skip + count]
        return end

    def _write_params(self, index: int, sampling: SamplingParams) -> None:
        base = index * _PARAM_WORDS
        temperature = sampling.temperature
        if temperature:
            temperature = max(temperature, _MIN_TEMPERATURE)
        self._params_f32[base + _TEMPERATURE] = temperature
        self._params[base + _TOP_K] = sampling.top_k
        self._params_f32[base + _TOP_P] = max(sampling.top_p, _MIN_TOP_P)
        self._params[base + _NUM_LOGPROBS] = sampling.n_logprobs
        self._params[base + _SEED] = sampling.seed & 0xFFFFFFFF
        self._params[base + _SEED + 1] = sampling.seed >> 32
        self._row_params[index] = sampling


def fields_of(metadata: dict[str, Any]) -> dict[str, Field]:
    """The launch block's layout in an executable's metadata."""
    return {
        entry["name"]: Field(int(entry["offset"]), int(entry["bytes"]))
        for entry in metadata["launch"]["fields"]
    }
