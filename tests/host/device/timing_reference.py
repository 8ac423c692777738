# SPDX-License-Identifier: MIT
"""The timing model once more, one cycle at a time and with fractions.

It shares nothing with the machine's: no events, no rings, no bookkeeping of what
is known when. A program is a list of steps, straight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

DEPTH = 16


@dataclass(frozen=True)
class Chip:
    issue: int
    bandwidth: int
    latency: int
    burst: int
    setup: int
    arrays: int
    side: int
    load_rows: int
    cycles_a_row: int
    lanes: int
    vpu: int


CHIPS = {
    "v5e": Chip(4, 546, 500, 64, 100, 4, 128, 2, 1, 1024, 20),
    "edge": Chip(4, 34, 100, 32, 50, 1, 64, 1, 2, 128, 10),
}


@dataclass(frozen=True)
class Step:
    """LOAD of size * 4096 bytes; ADD of size rows of 256; MATMUL of size x 64 x 32 * size."""

    kind: str
    size: int
    signal: int
    wait: int
    value: int


@dataclass
class _Work:
    number: int
    signal: int
    lead: int
    work: int
    bytes: Fraction
    tail: int
    started: int = 0
    drain: int | None = None  # when the tail began


def _cost(chip: Chip, step: Step) -> tuple[int, int, int, int]:
    if step.kind == "LOAD":
        size = step.size * 4096
        return chip.setup + chip.latency, ceil(size / chip.bandwidth), size, 0
    if step.kind == "ADD":
        return chip.vpu, ceil(step.size * 256 / chip.lanes), 0, 0
    size = ceil(4 * step.size * 544 / chip.burst) * chip.burst
    tiles = ceil(32 * step.size / chip.side) * ceil(64 / chip.side)
    rounds = ceil(tiles / chip.arrays)
    load, rows = chip.side // chip.load_rows, step.size * chip.cycles_a_row
    work = load + (rounds - 1) * max(load, rows) + rows
    return chip.latency, work, size, 2 * chip.side - 2


def simulate(chip: Chip, steps: list[Step]) -> list[tuple[int, int]]:
    """(start, end) of each step, and of the HALT behind them."""
    spans = [(-1, -1)] * (len(steps) + 1)
    engines = {"LOAD": "DMA", "MATMUL": "MXU", "ADD": "VPU"}
    queues: dict[str, deque[int]] = {name: deque() for name in engines.values()}
    running: dict[str, _Work] = {}
    counters = [0] * 5
    steps = [*steps, Step("HALT", 0, 0, 0, 0)]
    at = 0  # the sequencer's step
    busy_until, started = 0, -1
    now = 0

    def reached(step: Step) -> bool:
        return not step.wait or counters[step.wait] >= step.value

    while True:
        # What ends in this cycle.
        if started >= 0 and now == busy_until:
            step = steps[at]
            if step.kind in engines:
                queues[engines[step.kind]].append(at)
            else:
                spans[at] = (started, now)
                counters[step.signal] += 1
            started, at = -1, at + 1
            if at == len(steps):
                return spans
        for name, work in list(running.items()):
            if (
                work.drain is None
                and work.bytes <= 0
                and now >= work.started + work.lead + work.work
            ):
                work.drain = now
            if work.drain is not None and now >= work.drain + work.tail:
                spans[work.number] = (work.started, now)
                counters[work.signal] += 1
                del running[name]
        # What starts.
        if started < 0:
            step = steps[at]
            if step.kind in engines:
                name = engines[step.kind]
                may = len(queues[name]) + (name in running) < DEPTH
            else:
                idle = not running and not any(queues.values())
                may = reached(step) and (step.kind == "NOP" or idle)
            if may:
                started, busy_until = now, now + chip.issue
        for name, queue in queues.items():
            if name not in running and queue and reached(steps[queue[0]]):
                number = queue.popleft()
                lead, work_cycles, size, tail = _cost(chip, steps[number])
                running[name] = _Work(
                    number, steps[number].signal, lead, work_cycles, Fraction(size), tail, now
                )
        # A cycle passes.
        streams = [w for w in running.values() if w.bytes > 0 and now >= w.started + w.lead]
        for work in streams:
            work.bytes -= Fraction(chip.bandwidth, len(streams))
        now += 1
