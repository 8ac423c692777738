# SPDX-License-Identifier: MIT
"""Waits between the engines.

The sequencer issues in program order and each engine executes what it is given
in order, but the engines run beside each other. Every engine counts what it
completed in a counter of its own, and an instruction waits for one counter.
What must be waited for follows from the bytes of VMEM and the states that
instructions share: read after write, write after read, write after write.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from ..tile import Program, TileOp

ENGINES = ("DMA", "MXU", "VPU")
COUNTERS = {engine: number + 1 for number, engine in enumerate(ENGINES)}

# How many completions of each engine are known to have happened.
Clock = dict[str, int]


@dataclass(frozen=True, slots=True)
class Schedule:
    """hazards: off, every instruction waits for the one before it instead."""

    hazards: bool = True

    def run(self, program: Program) -> Program:
        state = _State()
        ops: list[TileOp] = []
        for op in program.ops:
            ops.extend(state.issue(op, _everything(state) if not self.hazards else None))
        program.ops = ops
        return program


@dataclass(slots=True)
class _Uses:
    """The last write of something, and the reads since, as (engine, count)."""

    write: tuple[str, int] | None = None
    reads: dict[str, int] = field(default_factory=dict)

    def needs(self, write: bool, into: Clock) -> None:
        if self.write is not None:
            engine, count = self.write
            into[engine] = max(into.get(engine, 0), count)
        if write:
            for engine, count in self.reads.items():
                into[engine] = max(into.get(engine, 0), count)

    def copy(self) -> _Uses:
        return _Uses(self.write, dict(self.reads))


@dataclass(slots=True)
class _Memory:
    """The uses of byte ranges: piece i is starts[i] up to starts[i + 1]."""

    starts: list[int] = field(default_factory=lambda: [0])
    pieces: list[_Uses] = field(default_factory=lambda: [_Uses()])

    def _cut(self, at: int) -> int:
        index = bisect_right(self.starts, at) - 1
        if self.starts[index] == at:
            return index
        self.starts.insert(index + 1, at)
        self.pieces.insert(index + 1, self.pieces[index].copy())
        return index + 1

    def needs(self, start: int, end: int, write: bool, into: Clock) -> None:
        first = bisect_right(self.starts, start) - 1
        last = bisect_right(self.starts, end - 1)
        for uses in self.pieces[first:last]:
            uses.needs(write, into)

    def record(self, start: int, end: int, write: bool, engine: str, count: int) -> None:
        first, last = self._cut(start), self._cut(end)
        if write:
            self.starts[first:last] = [start]
            self.pieces[first:last] = [_Uses((engine, count))]
        else:
            for uses in self.pieces[first:last]:
                uses.reads[engine] = count


@dataclass(slots=True)
class _State:
    vmem: _Memory = field(default_factory=_Memory)
    states: dict[str, _Uses] = field(default_factory=dict)
    issued: Clock = field(default_factory=lambda: dict.fromkeys(ENGINES, 0))
    # What has happened before anything that is issued from now on starts.
    sequencer: Clock = field(default_factory=lambda: dict.fromkeys(ENGINES, 0))
    # What has happened before the engine's next instruction starts.
    engines: dict[str, Clock] = field(
        default_factory=lambda: {name: dict.fromkeys(ENGINES, 0) for name in ENGINES}
    )
    # What has happened by the engine's n-th completion.
    completed: dict[str, list[Clock]] = field(
        default_factory=lambda: {name: [dict.fromkeys(ENGINES, 0)] for name in ENGINES}
    )

    def issue(self, op: TileOp, needs: Clock | None) -> list[TileOp]:
        """The operation with its waits; notes what it touches."""
        engine = op.engine
        if needs is None:
            needs = self._hazards(op)
        clock = self.engines[engine]
        _merge(clock, self.sequencer)
        waits = self._reduce(engine, needs)
        made: list[TileOp] = []
        while len(waits) > 1:
            other, count = waits.pop(0)
            # An instruction waits for one counter: the sequencer takes the others.
            made.append(
                TileOp("NOP", {}, loc=op.loc, source=op.source, wait=(COUNTERS[other], count))
            )
            _merge(self.sequencer, self.completed[other][count])
            _merge(clock, self.sequencer)
        if waits:
            other, count = waits[0]
            op.wait = (COUNTERS[other], count)
            _merge(clock, self.completed[other][count])
        if not op.unless_null:  # nothing ever waits for what may be skipped
            op.signal = COUNTERS[engine]
            self.issued[engine] += 1
            clock[engine] = self.issued[engine]
            self.completed[engine].append(dict(clock))
            self._record(op, self.issued[engine])
        return [*made, op]

    def _hazards(self, op: TileOp) -> Clock:
        needs: Clock = {}
        for view, write in op.accesses():
            self.vmem.needs(*view.span(), write, needs)
        for name, write in op.states():
            self.states.setdefault(name, _Uses()).needs(write, needs)
        return needs

    def _record(self, op: TileOp, count: int) -> None:
        # Reads first: an operation that works in place has written in the end.
        for view, write in sorted(op.accesses(), key=lambda access: access[1]):
            self.vmem.record(*view.span(), write, op.engine, count)
        for name, write in op.states():
            uses = self.states.setdefault(name, _Uses())
            if write:
                self.states[name] = _Uses((op.engine, count))
            else:
                uses.reads[op.engine] = count

    def _reduce(self, engine: str, needs: Clock) -> list[tuple[str, int]]:
        """The waits that do not follow from what is already known or awaited."""
        known = self.engines[engine]
        waits = [
            (other, count)
            for other, count in needs.items()
            if other != engine and count > known[other]
        ]
        return [
            (other, count)
            for other, count in waits
            if not any(self.completed[via][at][other] >= count for via, at in waits if via != other)
        ]


def _merge(into: Clock, other: Clock) -> None:
    for engine, count in other.items():
        if count > into[engine]:
            into[engine] = count


def _everything(state: _State) -> Clock:
    return dict(state.issued)
