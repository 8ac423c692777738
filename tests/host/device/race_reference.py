# SPDX-License-Identifier: MIT
"""Races by definition: all legal orders of a small program, one after the other.

An execution is a sequence of moves: the sequencer takes or issues a step, an engine
starts its next one, an engine ends the one in progress. Two conflicting steps race when
there is an execution in which one has not ended as the other starts, and another one,
or the same, in which it is the other way around or they overlap. No clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGINES = ("DMA", "VPU")


@dataclass(frozen=True)
class Access:
    row: int
    write: bool


@dataclass(frozen=True)
class Step:
    engine: str  # SEQ: a scalar
    signal: int
    wait: int
    value: int
    accesses: tuple[Access, ...]


def _conflicts(steps: list[Step]) -> dict[tuple[int, int], set[int]]:
    """Rows that two steps of different engines fight for, by (earlier, later)."""
    found: dict[tuple[int, int], set[int]] = {}
    for j, late in enumerate(steps):
        for i, early in enumerate(steps[:j]):
            rows = {
                a.row
                for a in early.accesses
                for b in late.accesses
                if a.row == b.row and (a.write or b.write)
            }
            if rows and early.engine != late.engine:
                found[i, j] = rows
    return found


def races(steps: list[Step]) -> set[tuple[int, int, int]]:
    """(earlier, later, row) of every pair that some legal order leaves unordered."""
    before: set[tuple[int, int]] = set()  # (a, b): some execution ends a before b starts
    overlap: set[tuple[int, int]] = set()  # or has both in progress
    of_engine = {e: [n for n, s in enumerate(steps) if s.engine == e] for e in ENGINES}
    seen = set()
    # A state: steps that the sequencer has passed, and of each engine the starts and ends.
    stack = [(0, (0, 0), (0, 0))]
    while stack:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        at, starts, ends = state
        ended = [n for n in range(at) if steps[n].engine == "SEQ"]
        running, begun = [], set(ended)
        for e, engine in enumerate(ENGINES):
            ended += of_engine[engine][: ends[e]]
            running += of_engine[engine][ends[e] : starts[e]]
            begun |= set(of_engine[engine][: starts[e]])

        def reached(step: Step, ended: list[int] = ended) -> bool:
            count = sum(steps[n].signal == step.wait for n in ended)
            return not step.wait or count >= step.value

        def start(n: int, ended: list[int] = ended, running: list[int] = running) -> None:
            before.update((m, n) for m in ended)
            overlap.update((min(m, n), max(m, n)) for m in running)

        if at < len(steps):
            step = steps[at]
            if step.engine != "SEQ":
                stack.append((at + 1, starts, ends))
            elif reached(step):
                start(at)
                stack.append((at + 1, starts, ends))
        for e, engine in enumerate(ENGINES):
            mine = of_engine[engine]
            if starts[e] > ends[e]:
                stack.append((at, starts, (ends[0] + (e == 0), ends[1] + (e == 1))))
            elif starts[e] < len(mine) and mine[starts[e]] < at and reached(steps[mine[starts[e]]]):
                start(mine[starts[e]])
                stack.append((at, (starts[0] + (e == 0), starts[1] + (e == 1)), ends))
    found = set()
    for (i, j), rows in _conflicts(steps).items():
        if (i, j) in overlap or ((i, j) in before and (j, i) in before):
            found |= {(i, j, row) for row in rows}
    return found
