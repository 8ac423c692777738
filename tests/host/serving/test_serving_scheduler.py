# SPDX-License-Identifier: MIT
"""The scheduler and the block manager, driven step by step without an engine."""

from __future__ import annotations

import random

import pytest
from fake_runner import FakeRunner, oracle
from vtpu.serving.block_manager import BlockManager
from vtpu.serving.request import ABORT, ERROR, LENGTH, STOP, Request
from vtpu.serving.scheduler import Scheduler, SchedulerConfig
from vtpu.serving.step_plan import SamplingParams, StepPlan

GREEDY = SamplingParams(temperature=0.0)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [1000 + (salt * 7919 + i * 31) % 5000 for i in range(length)]


def request(name: str, length: int, max_tokens: int = 8, **fields: object) -> Request:
    sampling = fields.pop("sampling", GREEDY)
    tokens = prompt(length, salt=sum(map(ord, name)))
    return Request(name, tokens, sampling, max_tokens, **fields)  # type: ignore[arg-type]


class Rig:
    """A scheduler and a fake runner."""

    def __init__(self, num_blocks: int = 1025, **config: object) -> None:
        self.config = SchedulerConfig(**config)  # type: ignore[arg-type]
        self.runner = FakeRunner(num_blocks=num_blocks, max_num_seqs=self.config.max_num_seqs)
        self.runner.max_tokens = self.config.max_num_batched_tokens
        self.blocks = BlockManager(num_blocks, self.runner.block_size)
        self.scheduler = Scheduler(self.config, self.blocks)
        self.finished: dict[str, str] = {}

    def step(self) -> dict[str, int]:
        """Run one step; tokens computed by request."""
        plan = self.scheduler.schedule()
        if plan is None:
            return {}
        self.check(plan)
        for event in self.scheduler.postprocess(self.runner.execute(plan)):
            if event.finish_reason:
                self.finished[event.request.request_id] = event.finish_reason
        return {row.request_id: len(row.token_ids) for row in plan.rows}

    def check(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.config.max_num_seqs

    def run(self, requests: list[Request]) -> list[dict[str, int]]:
        for r in requests:
            self.scheduler.add(r)
        steps = []
        while self.scheduler.has_work:
            steps.append(self.step())
            assert steps[-1], "a step without progress"
        self.scheduler.check_idle()
        assert not self.runner.problems
        return steps


def answer(r: Request) -> list[int]:
    return r.token_ids[r.num_prompt_tokens :]


def expected(r: Request) -> list[int]:
    head = r.token_ids[: r.num_prompt_tokens]
    return oracle(head, r.max_tokens, r.sampling)


def test_chunks_share_the_budget_in_order() -> None:
    rig = Rig(max_num_batched_tokens=1024, max_prefill_chunk=400)
    requests = [request(name, 800) for name in "abc"]
    for r in requests:
        rig.scheduler.add(r)
    assert rig.step() == {"a": 400, "b": 400, "c": 224}
    assert rig.step() == {"a": 400, "b": 400, "c": 224}
    assert rig.step() == {"a": 1, "b": 1, "c": 352}


def test_without_chunking_a_long_head_is_not_overtaken() -> None:
    rig = Rig(max_num_batched_tokens=256, chunked_prefill=False)
    rig.scheduler.add(request("early", 200))
    rig.scheduler.add(request("long", 250))
    rig.scheduler.add(request("short", 10))
    assert rig.step() == {"early": 200}
    # 255 tokens are left, but every step takes one for "early": "long" waits for
    # room, and "short" waits behind it.
    rig.config = rig.scheduler.config
    assert rig.step() == {"early": 1, "long": 250}
    assert rig.step() == {"early": 1, "long": 1, "short": 10}


def test_preemption_keeps_the_token_in_flight() -> None:
    rig = Rig(num_blocks=11)  # Ten usable ones.
    first, second = request("first", 80, 20), request("second", 80, 20)
    rig.scheduler.add(first)
    rig.scheduler.add(second)
    assert rig.step() == {"first": 80, "second": 80}
    in_flight = second.token_ids[-1]
    assert rig.step() == {"first": 1}
    assert second.num_preemptions == 1
    assert second.block_table == [] and second.num_computed_tokens == 0
    assert second.num_tokens == 81 and second.token_ids[-1] == in_flight
    while rig.scheduler.has_work:
        rig.step()
    assert answer(first) == expected(first)
    assert answer(second) == expected(second)
    rig.scheduler.check_idle()


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    rig = Rig(num_blocks=11)
    rig.scheduler.add(request("first", 80, 20))
    rig.scheduler.add(request("second", 80, 20))
    rig.step()
    rig.scheduler.add(request("tiny", 1, 1))
    assert set(rig.step()) == {"first"}
    assert [r.request_id for r in rig.scheduler.waiting] == ["second", "tiny"]


def test_preempted_requests_keep_their_order() -> None:
    rig = Rig(num_blocks=7)
    requests = [request(name, 32, 60) for name in "abc"]
    for r in requests:
        rig.scheduler.add(r)
    while not rig.scheduler.num_preemptions:
        rig.step()
    # "a" needs a third block: "c" gives its two back.
    assert [r.request_id for r in rig.scheduler.waiting] == ["c"]
    while len(rig.scheduler.waiting) < 2:
        rig.step()
    assert [r.request_id for r in rig.scheduler.waiting] == ["b", "c"]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_computes_exactly_prompt_and_all_but_the_last_token(max_tokens: int) -> None:
    rig = Rig()
    steps = rig.run([request("a", 40, max_tokens)])
    assert sum(step["a"] for step in steps) == 40 + max_tokens - 1
    assert rig.finished == {"a": LENGTH}


def test_stop_token_ends_the_request_but_not_before_min_tokens() -> None:
    plain = request("a", 20, 10)
    stop = expected(plain)[3]
    early = request("a", 20, 10, stop_token_ids=frozenset([stop]))
    late = request("a", 20, 10, stop_token_ids=frozenset([stop]), min_tokens=4)
    rig = Rig()
    rig.run([early])
    assert answer(early) == expected(plain)[:4]
    assert rig.finished == {"a": STOP}
    Rig().run([late])
    assert answer(late) == expected(plain)


def test_seeded_answers_do_not_depend_on_neighbours_or_chunks() -> None:
    def make() -> Request:
        return request("x", 333, 12, sampling=SamplingParams(0.8, seed=42))

    alone = make()
    Rig().run([alone])
    assert answer(alone) == expected(alone)
    crowd = [request(f"n{i}", 50 + i, 20) for i in range(9)]
    for chunk in (1, 7, 64, 500):
        again = make()
        rig = Rig(max_num_batched_tokens=512, max_prefill_chunk=chunk)
        rig.run([*crowd[:5], again, *crowd[5:]])
        assert answer(again) == answer(alone)
        crowd = [request(f"n{i}{chunk}", 50 + i, 20) for i in range(9)]


def test_running_is_bounded_and_slots_are_reused() -> None:
    rig = Rig(max_num_seqs=4)
    requests = [request(f"r{i}", 10 + i, 3 + i % 5) for i in range(20)]
    rig.run(requests)
    assert all(answer(r) == expected(r) for r in requests)


def test_abort_in_any_order_keeps_what_was_generated() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        rig = Rig(num_blocks=41, max_num_batched_tokens=64)
        requests = [request(f"r{i}", rng.randint(1, 90), 30) for i in range(8)]
        for r in requests:
            rig.scheduler.add(r)
        order = rng.sample(requests, len(requests))
        for r in order:
            for _ in range(rng.randint(0, 6)):
                rig.step()
            ended = rig.scheduler.abort(r)
            assert (ended is None) == (r.request_id in rig.finished)
            if ended:
                assert ended.finish_reason == ABORT
            assert rig.scheduler.abort(r) is None, "a second abort does nothing"
        assert not rig.scheduler.has_work
        rig.scheduler.check_idle()
        for r in requests:
            assert answer(r) == expected(r)[: r.num_output_tokens]


def test_failed_step_ends_its_requests_only() -> None:
    rig = Rig(max_num_seqs=2)
    requests = [request(f"r{i}", 20, 5) for i in range(3)]
    for r in requests:
        rig.scheduler.add(r)
    plan = rig.scheduler.schedule()
    assert plan is not None
    ids = {row.request_id for row in plan.rows}
    events = rig.scheduler.fail(ids, "page fault")
    assert {(e.request.request_id, e.finish_reason, e.error) for e in events} == {
        ("r0", ERROR, "page fault"),
        ("r1", ERROR, "page fault"),
    }
    while rig.scheduler.has_work:
        rig.step()
    assert answer(requests[2]) == expected(requests[2])
    rig.scheduler.check_idle()


def test_random_load_under_block_pressure() -> None:
    """Preemption, chunking, aborts and arrivals together, against the oracle."""
    preemptions = 0
    for seed in range(30):
        rng = random.Random(seed)
        num_blocks = rng.randint(12, 40)
        rig = Rig(
            num_blocks=num_blocks,
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.choice([8, 33, 128]),
            max_prefill_chunk=rng.choice([0, 5, 20]),
        )
        limit = rig.blocks.capacity_tokens
        todo, done, aborted = [], [], set()
        for i in range(25):
            length = rng.randint(1, limit // 2)
            count = rng.randint(1, min(60, limit - length))
            sampling = SamplingParams(rng.choice([0.0, 0.7]), seed=rng.getrandbits(64))
            todo.append(request(f"r{i}", length, count, sampling=sampling))
        while todo or rig.scheduler.has_work:
            if todo and rng.random() < 0.3:
                done.append(todo.pop())
                rig.scheduler.add(done[-1])
            if done and rng.random() < 0.02:
                victim = rng.choice(done)
                if rig.scheduler.abort(victim):
                    aborted.add(victim.request_id)
            rig.step()
        rig.scheduler.check_idle()
        assert not rig.runner.problems
        for r in done:
            count = r.num_output_tokens
            assert answer(r) == expected(r)[:count]
            assert r.request_id in aborted or count == r.max_tokens
        preemptions += rig.scheduler.num_preemptions
    assert preemptions > 50, "the load is meant to preempt"


def test_budget_must_cover_a_full_batch() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Scheduler(SchedulerConfig(16, 8), BlockManager(10, 16))


def test_failed_allocation_changes_nothing() -> None:
    blocks = BlockManager(5, 16)
    big = request("big", 65)
    assert not blocks.can_allocate(big)
    with pytest.raises(RuntimeError):
        blocks.allocate(big)
    assert big.block_table == [] and blocks.num_free_blocks == 4
    fits = request("fits", 64)
    blocks.allocate(fits)
    fits.token_ids.append(7)
    table = list(fits.block_table)
    assert not blocks.can_append(fits)
    with pytest.raises(RuntimeError):
        blocks.may_append(fits)
    assert fits.block_table == table
    assert blocks.usage == 1.0
    blocks.free(fits)
    blocks.free(fits)
    blocks.check_idle()


def test_free_returns_tails_first() -> None:
    blocks = BlockManager(5, 16)
    first = request("first", 64)
    blocks.allocate(first)
    table = list(first.block_table)
    blocks.free(first)
    second = request("second", 64)
    blocks.allocate(second)
    assert second.block_table == table[::-1]


def test_a_leak_is_found_when_idle() -> None:
    rig = Rig()
    rig.blocks.allocate(request("lost", 20))
    with pytest.raises(RuntimeError, match="leak"):
        rig.scheduler.check_idle()


def test_a_double_free_is_found_when_idle() -> None:
    rig = Rig()
    r = request("twice", 20)
    rig.blocks.allocate(r)
    table = list(r.block_table)
    rig.blocks.free(r)
    r.block_table = table
    rig.blocks.free(r)
    with pytest.raises(RuntimeError, match="leak"):
        rig.scheduler.check_idle()
