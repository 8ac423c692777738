# SPDX-License-Identifier: MIT
"""Verifies a finished binary, from its bytes and metadata alone.

It follows the program through every branch with the lengths at their maxima and
checks that instructions decode, operands stay inside VMEM and the launch block,
waits can be satisfied, and that any two instructions of different engines that
touch the same bytes (one of them writing) are ordered by waits. Nothing is
shared with schedule.py: an error there must not hide itself here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import hw
from .asm import Instr, decode, unpack_imm64
from .ir import CompileError
from .reader import read_elf

_ENGINES = ("DMA", "MXU", "VPU")
_ARGUMENT_SHIFT = 48  # where arguments point, so far apart that sums stay apart
_U64 = (1 << 64) - 1


class CheckError(CompileError):
    """The binary is wrong; the message names the instruction's byte offset."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Rows of bytes in VMEM."""

    start: int
    rows: int
    row_bytes: int
    stride: int

    @property
    def end(self) -> int:
        return self.start + (self.rows - 1) * self.stride + self.row_bytes

    def overlaps(self, other: _Range) -> bool:
        if self.end <= other.start or other.end <= self.start:
            return False
        stride = self.stride
        if self.rows > 1 and other.rows > 1 and stride == other.stride:
            # Columns of matrices with one stride: apart in every row, or not.
            gap = (other.start - self.start) % stride
            return gap < self.row_bytes or gap + other.row_bytes > stride
        return True


@dataclass(frozen=True, slots=True)
class _Access:
    """key: a place in HBM that is written as well as read, or None for VMEM.

    source: the global address that a load's bytes come from.
    """

    write: bool
    range: _Range | None = None
    key: int | None = None
    source: int = 0


@dataclass(slots=True, eq=False)
class _Step:
    """An instruction of an engine, as it was issued."""

    pc: int
    instr: Instr
    accesses: list[_Access]
    number: int  # it is this engine's n-th
    before: dict[str, int]  # what has completed when it starts


def check_executable(data: bytes) -> None:
    """Raises CheckError, or ExecutableError when the file itself is broken."""
    elf = read_elf(data)
    instrs: list[Instr] = []
    for pc in range(0, len(elf.code), hw.INSTR_BYTES):
        try:
            instrs.append(decode(elf.code[pc : pc + hw.INSTR_BYTES]))
        except CompileError as error:
            raise CheckError(f"0x{pc:x}: {error}") from None
    _Checker(instrs, elf.metadata).run()


@dataclass(slots=True, eq=False)
class _Checker:
    instrs: list[Instr]
    metadata: dict[str, Any]
    registers: list[int | None] = field(default_factory=lambda: [None] * hw.NUM_SREGS)
    steps: dict[str, list[_Step]] = field(default_factory=lambda: {e: [] for e in _ENGINES})
    signals: dict[int, list[_Step]] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)  # counter -> the engine that signals it
    known: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ENGINES, 0))
    pc: int = 0

    def run(self) -> None:
        self.registers[0] = 0
        for number in range(len(self.metadata["arguments"])):
            self.registers[hw.FIRST_ARG + number] = (number + 1) << _ARGUMENT_SHIFT
        index = 0
        while True:
            if index >= len(self.instrs):
                self.fail("the program runs past its end")
            instr = self.instrs[index]
            self.pc = index * hw.INSTR_BYTES
            if instr.op == "HALT":
                break
            self.wait(instr, self.known)
            if instr.info.engine == "SEQ":
                self.sequence(instr)
            else:
                self.engine(instr)
            index += 1
        for engine in _ENGINES:
            for step in self.steps[engine]:
                self.hazards(engine, step)

    def fail(self, message: str, pc: int | None = None) -> None:
        raise CheckError(f"0x{self.pc if pc is None else pc:x}: {message}")

    def value(self, instr: Instr, name: str) -> int:
        for (reg, imm), (label, _) in zip(instr.operands, instr.info.operands, strict=True):
            if label == name:
                base = self.registers[reg]
                if base is None:
                    self.fail(f"{instr.op} reads s{reg}, which was never written")
                    return 0
                return (base + imm) & _U64
        raise KeyError(name)

    def wait(self, instr: Instr, clock: dict[str, int]) -> None:
        """Adds to clock what the instruction's wait says has completed."""
        if not instr.wait:
            return
        if instr.wait_reg:
            self.fail("a wait depends on a register")
        signalled = self.signals.get(instr.wait, [])
        if len(signalled) < instr.wait_imm:
            self.fail(
                f"waits for counter {instr.wait} to reach {instr.wait_imm}, only "
                f"{len(signalled)} signals come before"
            )
        if instr.info.engine == "SEQ" and instr.wait_imm:
            _merge(clock, self.after(signalled[instr.wait_imm - 1]))

    def after(self, step: _Step) -> dict[str, int]:
        """What has completed once the step has."""
        return step.before | {step.instr.info.engine: step.number}

    def sequence(self, instr: Instr) -> None:
        info = instr.info
        if instr.signal:
            self.fail("the sequencer signals a counter")
        if instr.op == "SYNC":
            for engine in _ENGINES:
                self.known[engine] = len(self.steps[engine])
        elif instr.op in ("JMP", "BEQ", "BNE", "BLT"):
            target = self.value(instr, "target")
            inside = target % hw.INSTR_BYTES == 0 and target < len(self.instrs) * hw.INSTR_BYTES
            if not inside or target <= self.pc or instr.op == "JMP":
                self.fail(f"a jump to 0x{target:x}: only branches forwards are understood")
            if self.instrs[target // hw.INSTR_BYTES].op == "TRAP":
                return
            # Falling through does all that jumping does, and what it skips must
            # not be relied on.
            for skipped in self.instrs[self.pc // hw.INSTR_BYTES + 1 : target // hw.INSTR_BYTES]:
                if skipped.signal or skipped.info.engine == "SEQ":
                    self.fail(f"{skipped.op} is skipped, and something may rely on it")
        elif info.operands and info.operands[0][1] == "rd":
            self.registers[instr.operands[0][0]] = self.scalar(instr)
        elif instr.op == "TRAP":
            self.fail("the program runs past its end, into a trap")
        elif instr.op != "NOP":
            self.fail(f"{instr.op} is not understood")

    def scalar(self, instr: Instr) -> int:
        if instr.op == "LI":
            return instr.imm64
        if instr.op == "LD":
            return self.load(instr)
        a, b = self.value(instr, "a"), self.value(instr, "b")
        results = {
            "ADD": a + b,
            "SUB": a - b,
            "MUL": a * b,
            "AND": a & b,
            "MIN": min(a, b),
            "MAX": max(a, b),
        }
        if instr.op not in results:
            self.fail(f"{instr.op} is not understood")
        return results[instr.op] & _U64

    def load(self, instr: Instr) -> int:
        """A length at its maximum; a pointer somewhere of its own."""
        address = self.value(instr, "addr")
        base = (self.metadata["arguments"].index("launch") + 1) << _ARGUMENT_SHIFT
        for place in self.metadata["launch"]["fields"]:
            if base + place["offset"] == address and place["kind"] in ("length", "pointer"):
                if place["kind"] == "length":
                    return int(self.metadata["lengths"][place["name"]])
                return 0xFF << _ARGUMENT_SHIFT
        self.fail("loads what is neither a length nor a pointer of the launch block")
        return 0

    def engine(self, instr: Instr) -> None:
        name = instr.info.engine
        steps = self.steps[name]
        before = dict(self.known)
        if steps:
            _merge(before, self.after(steps[-1]))
        if instr.wait and instr.wait_imm:
            _merge(before, self.after(self.signals[instr.wait][instr.wait_imm - 1]))
        step = _Step(self.pc, instr, _accesses(self, instr), len(steps) + 1, before)
        for access in step.accesses:
            if access.range is not None and access.range.end > hw.VMEM_BYTES:
                self.fail(f"{instr.op} reaches 0x{access.range.end:x}, outside VMEM")
        steps.append(step)
        if instr.signal:
            if self.owners.setdefault(instr.signal, name) != name:
                self.fail(f"counter {instr.signal} is signalled by two engines")
            self.signals.setdefault(instr.signal, []).append(step)

    def hazards(self, engine: str, step: _Step) -> None:
        """Against every instruction of another engine issued before, not known complete."""
        for other in _ENGINES:
            if other == engine:
                continue
            for earlier in self.steps[other][step.before[other] :]:
                if earlier.pc > step.pc:
                    break
                if _conflict(step, earlier):
                    self.fail(
                        f"{step.instr.op} does not wait for {earlier.instr.op} at "
                        f"0x{earlier.pc:x}, which touches the same memory",
                        step.pc,
                    )


def _merge(into: dict[str, int], other: dict[str, int]) -> None:
    for engine, count in other.items():
        into[engine] = max(into[engine], count)


def _conflict(one: _Step, other: _Step) -> bool:
    for a in one.accesses:
        for b in other.accesses:
            if not (a.write or b.write):
                continue
            if a.range is not None and b.range is not None:
                if a.range.overlaps(b.range):
                    return True
            elif a.key is not None and a.key == b.key:
                return True
    return False


def _accesses(checker: _Checker, instr: Instr) -> list[_Access]:
    """What an instruction reads and writes, from the instruction set's table."""

    def get(name: str) -> int:
        return checker.value(instr, name)

    def vmem(name: str, rows: int, row_bytes: int, stride: int, write: bool = False) -> _Access:
        return _Access(write, _Range(get(name), rows, row_bytes, stride))

    def matrix(name: str, rows: int, width: int, write: bool = False) -> _Access:
        return vmem(name, rows, 4 * width, get(f"{name}_stride"), write)

    def index(name: str, count: int, words: int = 1) -> _Access:
        return vmem(name, count, 4 * words, 4 * words)

    op = instr.op
    found: list[_Access] = []
    if op in ("DMA_LOAD", "DMA_STORE"):
        name, place = ("dst", "src") if op == "DMA_LOAD" else ("src", "dst")
        bytes_ = get("row_bytes")
        range_ = _Range(get(name), get("rows"), bytes_, get(f"{name}_stride"))
        if op == "DMA_LOAD":
            found = [_Access(True, range_, source=get(place))]
        else:
            found = [_Access(False, range_)]
            found.append(_Access(True, key=get(place)))
    elif op == "DMA_GATHER":
        count = get("count")
        found = [matrix("dst", count, get("width"), True), index("index", count)]
    elif op == "DMA_SCATTER":
        count = get("count")
        found = [matrix("src", count, get("width")), index("index", count)]
        found.append(_Access(True, key=get("table")))
    elif op == "MATMUL":
        rows = get("m")
        found = [matrix("dst", rows, get("n"), True), matrix("src", rows, get("k"))]
    elif op == "V_RMSNORM":
        rows, width = get("rows"), get("width")
        found = [matrix("dst", rows, width, True), matrix("src", rows, width)]
        found.append(index("weight", 1, width))
    elif op in ("V_ADD", "V_MUL", "V_SILU_MUL"):
        rows, width = get("rows"), get("width")
        names = [name for name, kind in instr.info.operands if kind == "v"]
        found = [matrix(name, rows, width, name == "dst") for name in names]
    elif op == "V_TAKE":
        rows, width = get("rows"), get("width")
        found = [matrix("dst", rows, width, True), matrix("src", get("src_rows"), width)]
        found.append(index("index", rows))
    elif op == "V_ROPE":
        rows, width = get("rows"), get("heads") * get("head_dim")
        found = [matrix("dst", rows, width, True), matrix("src", rows, width)]
        found.append(index("cos_sin", rows, get("head_dim")))
    elif op == "V_ATTN":
        rows, fields = get("rows"), unpack_imm64(op, instr.imm64)
        row_bytes = 4 * fields["heads"] * fields["head_dim"]
        found = [
            vmem("dst", rows, row_bytes, row_bytes, True),
            vmem("q", rows, row_bytes, row_bytes),
            index("row_info", rows, 2),
            vmem("block_tables", 1, _loaded(checker, get("block_tables")), 0),
            _Access(False, key=get("k_cache")),
            _Access(False, key=get("v_cache")),
        ]
    elif op == "V_SAMPLE":
        rows = get("rows")
        found = [
            vmem("dst", rows, hw.SAMPLE_RESULT_BYTES, hw.SAMPLE_RESULT_BYTES, True),
            vmem("params", rows, hw.SAMPLE_PARAMS_BYTES, hw.SAMPLE_PARAMS_BYTES),
            vmem("logits", rows, 4 * get("vocab"), get("logits_stride")),
        ]
    else:
        checker.fail(f"{op} is not understood")
    return found


def _loaded(checker: _Checker, address: int) -> int:
    """Bytes of the launch block's input that was loaded to address: how far an
    operand reaches whose extent the instruction does not say."""
    launch = (checker.metadata["arguments"].index("launch") + 1) << _ARGUMENT_SHIFT
    for step in reversed(checker.steps["DMA"]):
        for access in step.accesses:
            found = access.range
            if access.write and found is not None and found.start <= address < found.end:
                offset = access.source - launch + address - found.start
                for place in checker.metadata["launch"]["fields"]:
                    if place["offset"] == offset and place["kind"] == "input":
                        return int(place["bytes"])
    checker.fail(f"no input was loaded to 0x{address:x}")
    return 0
