# SPDX-License-Identifier: MIT
"""What the launch block holds after each plan, against a direct calculation."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest
from vtpu.artifacts import StepShape
from vtpu.launch_block import Field, LaunchBlock
from vtpu.serving.step_plan import SamplingParams, ScheduledRow, StepPlan

SHAPE = StepShape(max_tokens=64, max_seqs=8, block_size=4, context=128)
SLOTS = 4096
DIMS = {
    "token_ids": (64,),
    "positions": (64,),
    "slots": (64,),
    "row_info": (64, 2),
    "block_tables": (8, 32),
    "sample_rows": (8,),
    "sample_params": (8, 8),
    "sampled": (8, 48),
    "T": (1,),
    "R": (1,),
    "S": (1,),
    "N": (1,),
    "logits_va": (2,),
}


class Memory:
    """A launch block in a bytearray, with a numpy view of each field."""

    def __init__(self) -> None:
        self.fields: dict[str, Field] = {}
        at = 0
        for name, dims in DIMS.items():
            nbytes = 4 * int(np.prod(dims))
            self.fields[name] = Field(at, nbytes)
            at += -(-nbytes // 64) * 64
        self.data = bytearray(at)
        self.block = LaunchBlock(memoryview(self.data), self.fields, SHAPE, SLOTS)

    def __getitem__(self, name: str) -> Any:
        field = self.fields[name]
        flat = np.frombuffer(self.data, np.uint32, field.nbytes // 4, field.offset)
        return flat.reshape(DIMS[name])

    def check(self, plan: StepPlan) -> None:
        """All inputs are what the plan says."""
        at = sampled = 0
        for row in plan.rows:
            for offset, token in enumerate(row.token_ids):
                position = row.start + offset
                block = row.block_table[position // SHAPE.block_size]
                assert self["token_ids"][at] == token
                assert self["positions"][at] == position
                assert self["slots"][at] == block * 4 + position % 4
                assert list(self["row_info"][at]) == [position + 1, row.slot]
                at += 1
            used = len(row.block_table)
            assert list(self["block_tables"][row.slot][:used]) == list(row.block_table)
            if row.sample:
                assert self["sample_rows"][sampled] == at - 1
                p, words = row.sampling, self["sample_params"][sampled]
                assert bytes(words[:7]) == struct.pack(
                    "<fIfIQI", p.temperature, p.top_k, p.top_p, p.n_logprobs, p.seed,
                    row.rng_position,
                )  # fmt: skip
                sampled += 1
        assert self["T"][0] == at
        assert self["R"][0] == sampled
        assert self["S"][0] == max(row.slot for row in plan.rows) + 1
        assert self["N"][0] == SLOTS


def test_random_traffic() -> None:
    """Requests come, grow, are preempted and go; every step's block is right."""
    draw = random.Random(1)
    memory = Memory()
    live: dict[int, dict[str, Any]] = {}
    for step_id in range(600):
        rows: list[ScheduledRow] = []
        budget = SHAPE.max_tokens
        for slot in range(SHAPE.max_seqs):
            if slot in live and draw.random() < 0.05:
                del live[slot]
            is_new = slot not in live and draw.random() < 0.3
            if is_new:
                sampling = SamplingParams(
                    draw.choice([0.0, 0.5, 1.0]), draw.randrange(50), draw.uniform(0.1, 1),
                    draw.getrandbits(64), draw.randrange(21),
                )  # fmt: skip
                live[slot] = {"start": draw.choice([0, 8]), "table": [], "sampling": sampling}
            if slot not in live or budget == 0:
                continue
            if not is_new and draw.random() < 0.2:
                continue
            state = live[slot]
            count = min(draw.choice([1, 1, 1, 2, 5, 13]), budget, 128 - state["start"])
            if count <= 0:
                del live[slot]
                continue
            end = state["start"] + count
            while len(state["table"]) * 4 < end:
                state["table"].append(draw.randrange(1, 1024))
            tokens = [draw.randrange(49152) for _ in range(count)]
            rows.append(
                ScheduledRow(
                    f"r{slot}", slot, is_new, tokens, state["start"], state["table"],
                    draw.random() < 0.7, state["sampling"], draw.randrange(1000),
                )
            )  # fmt: skip
            state["start"] = end
            budget -= count
        if rows:
            draw.shuffle(rows)
            plan = StepPlan(step_id, rows, SHAPE.max_tokens - budget)
            memory.block.fill(plan)
            memory.check(plan)


def decode_row(slot: int = 0, **changes: Any) -> ScheduledRow:
    fields: dict[str, Any] = {
        "request_id": f"r{slot}",
        "slot": slot,
        "is_new": True,
        "token_ids": [7],
        "start": 0,
        "block_table": [3],
        "sample": True,
        "sampling": SamplingParams(n_logprobs=2),
        "rng_position": 0,
    }
    return ScheduledRow(**{**fields, **changes})


def test_results() -> None:
    memory = Memory()
    rows = [decode_row(0), decode_row(1, sample=False), decode_row(2)]
    plan = StepPlan(9, rows, 3)
    memory.block.fill(plan)
    result = memory["sampled"]
    result[0, :7] = [11, 0, 2, 0, 11, 12, 13]
    result.view(np.float32)[0, 1] = -0.5
    result.view(np.float32)[0, 24:27] = [-0.5, -1.5, -9]
    result[1, 0] = 49151
    output = memory.block.results(plan)
    assert output.step_id == 9
    assert [s.request_id for s in output.sampled] == ["r0", "r2"]
    first, second = output.sampled
    assert (first.token_id, first.logprob) == (11, -0.5)
    assert first.top_logprobs == [(11, -0.5), (12, -1.5)]
    assert second.token_id == 49151


def test_a_tiny_temperature_is_what_the_hardware_takes() -> None:
    memory = Memory()
    row = decode_row(sampling=SamplingParams(temperature=1e-9))
    memory.block.fill(StepPlan(1, [row], 1))
    assert memory["sample_params"].view(np.float32)[0, 0] == 2.0**-14


def test_no_top_p_becomes_zero() -> None:
    memory = Memory()
    for number, top_p in enumerate((5e-324, 1e-45, 1e-38)):
        row = decode_row(sampling=SamplingParams(top_p=top_p))
        memory.block.fill(StepPlan(number, [row], 1))
        assert memory["sample_params"].view(np.float32)[0, 2] >= 2.0**-126


@pytest.mark.parametrize(
    ("rows", "tokens", "message"),
    [
        ([decode_row(token_ids=[1] * 65, block_table=[1] * 17)], 65, "65 tokens in a step"),
        ([decode_row(block_table=[1] * 33)], 1, "33 blocks, the most is 32"),
        ([decode_row()], 2, "the plan's rows have 1 tokens, it says 2"),
    ],
)
def test_a_plan_that_does_not_fit(rows: list[ScheduledRow], tokens: int, message: str) -> None:
    memory = Memory()
    with pytest.raises(ValueError, match=message):
        memory.block.fill(StepPlan(1, rows, tokens))
    plan = StepPlan(2, [decode_row()], 1)
    memory.block.fill(plan)
    memory.check(plan)
