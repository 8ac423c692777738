# SPDX-License-Identifier: MIT
"""Device operations to instructions: registers for arguments, lengths, addresses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .. import hw
from ..asm import Instr, encode, f32_bits, pack_imm64
from ..ir import UNKNOWN, CompileError, Dim, Location
from ..tile import Global, Operand, Program, TileOp, View

_LENGTHS = range(24, 40)  # scalar registers of lengths and pointers
_ADDRESSES = range(40, 56)  # of the states' addresses
_STRIDES = range(56, hw.NUM_SREGS)  # of the distances between them


@dataclass(frozen=True, slots=True)
class Line:
    """An instruction with where it comes from."""

    instr: Instr
    loc: Location
    source: str


@dataclass(frozen=True, slots=True)
class Code:
    """A finished kernel. traps: what each code of a TRAP instruction means."""

    name: str
    lines: tuple[Line, ...]
    traps: dict[int, str]

    def encode(self) -> bytes:
        return b"".join(encode(line.instr) for line in self.lines)


@dataclass(frozen=True, slots=True)
class Codegen:
    """max_bytes: the longest program the device fetches."""

    max_bytes: int = hw.MAX_CODE_BYTES

    def run(self, program: Program) -> Code:
        code = _Generator(program).run()
        size = len(code.lines) * hw.INSTR_BYTES
        if size > self.max_bytes:
            raise CompileError(f"the code takes {size} bytes, the device fetches {self.max_bytes}")
        return code


@dataclass(slots=True)
class _Registers:
    """Registers of computed values, by slot bytes; the least recently used makes room.

    So what one instruction uses is not lost while its other operands are made.
    """

    free: list[int]
    held: dict[int, int] = field(default_factory=dict)

    def find(self, key: int) -> int | None:
        if key not in self.held:
            return None
        self.held[key] = self.held.pop(key)  # the last now
        return self.held[key]

    def hold(self, key: int) -> int:
        if not self.free:
            self.free.append(self.held.pop(next(iter(self.held))))
        self.held[key] = self.free.pop(0)
        return self.held[key]


@dataclass(slots=True, eq=False)
class _Generator:
    program: Program
    lines: list[Line] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)  # launch field -> register
    addresses: _Registers = field(default_factory=lambda: _Registers(list(_ADDRESSES)))
    strides: _Registers = field(default_factory=lambda: _Registers(list(_STRIDES)))
    guards: dict[str, int] = field(default_factory=dict)  # length -> line that checks it
    loc: Location = UNKNOWN
    source: str = ""

    def run(self) -> Code:
        for op in self.program.ops:
            self.loc, self.source = op.loc, op.source
            instr = self.instruction(op)  # may emit what loads its registers
            if op.unless_null:
                # The branch goes to the instruction after the operation.
                pointer = self.launch_word(op.unless_null)
                target = (len(self.lines) + 2) * hw.INSTR_BYTES
                self.emit(Instr("BEQ", ((pointer, 0), (0, 0), (0, target))))
            self.emit(instr)
        self.loc, self.source = UNKNOWN, "end"
        self.emit(Instr("HALT"))
        meanings = self.traps()
        return Code(self.program.name, tuple(self.lines), meanings)

    def traps(self) -> dict[int, str]:
        """A trap a length, behind the end, and the guards' branches to them."""
        meanings: dict[int, str] = {}
        for code, (name, index) in enumerate(self.guards.items(), 1):
            guard = self.lines[index]
            target = (0, len(self.lines) * hw.INSTR_BYTES)
            patched = replace(guard.instr, operands=(*guard.instr.operands[:2], target))
            self.lines[index] = replace(guard, instr=patched)
            self.source = f"{name} out of range"
            self.emit(Instr("TRAP", ((0, code),)))
            most = self.program.fields[name].most
            meanings[code] = f"the launch block's length {name} is greater than {most}"
        return meanings

    def emit(self, instr: Instr) -> None:
        self.lines.append(Line(instr, self.loc, self.source))

    def instruction(self, op: TileOp) -> Instr:
        info = hw.OPS[op.name]
        operands = tuple(self.operand(op.operands[name]) for name, _ in info.operands)
        flags = 0
        for flag in op.flags:
            flags |= info.flags[flag]
        counter, count = op.wait or (0, 0)
        return Instr(
            op.name,
            operands,
            op.fmt,
            flags,
            info.modes[op.mode] if op.mode else 0,
            op.signal,
            counter,
            0,
            count,
            0 if op.aux is None else f32_bits(op.aux),
            pack_imm64(op.name, op.fields) if op.fields else 0,
        )

    def operand(self, operand: Operand) -> tuple[int, int]:
        if isinstance(operand, View):
            return 0, operand.buffer.offset + operand.offset
        if isinstance(operand, Dim):
            return self.launch_word(operand.name), 0
        if isinstance(operand, int):
            return 0, operand
        if operand.pointer:
            return self.launch_word(operand.pointer), 0
        if operand.slot_bytes:
            return self.state_address(operand), operand.offset
        return self.argument(operand.arg), operand.offset

    def argument(self, name: str) -> int:
        return hw.FIRST_ARG + self.program.arguments.index(name)

    def launch_word(self, name: str) -> int:
        """The register of a length or pointer; loads it when first asked for."""
        register = self.loaded.get(name)
        if register is None:
            if len(self.loaded) == len(_LENGTHS):
                raise CompileError(f"more than {len(_LENGTHS)} lengths and pointers are used")
            register = self.loaded[name] = _LENGTHS[len(self.loaded)]
            place = self.program.fields[name]
            mode = "U64" if place.kind == "pointer" else "U32"
            address = (self.argument("launch"), place.offset)
            self.emit(Instr("LD", ((register, 0), address), mode=hw.OPS["LD"].modes[mode]))
            if place.kind == "length":
                # VMEM is planned for the maximum: more would overwrite other buffers.
                self.guards[name] = len(self.lines)
                self.emit(Instr("BLT", ((0, place.most), (register, 0), (0, 0))))
        return register

    def state_address(self, place: Global) -> int:
        """Argument + slot_bytes * slots, kept in a register for a while.

        States of one width follow each other, so that one is usually a fixed
        distance after the one before: one addition.
        """
        found = self.addresses.find(place.slot_bytes)
        if found is not None:
            return found
        held = self.addresses.held
        before = max((at for at in held if at < place.slot_bytes), default=0)
        base = held.get(before, self.argument(place.arg))
        stride = self.stride(place.slot_bytes - before)
        register = self.addresses.hold(place.slot_bytes)
        self.emit(Instr("ADD", ((register, 0), (base, 0), (stride, 0))))
        return register

    def stride(self, slot_bytes: int) -> int:
        """The register of slot_bytes * slots."""
        found = self.strides.find(slot_bytes)
        if found is not None:
            return found
        slots = self.program.slots
        assert isinstance(slots, Dim)
        length = self.launch_word(slots.name)
        register = self.strides.hold(slot_bytes)
        self.emit(Instr("MUL", ((register, 0), (length, 0), (0, slot_bytes))))
        return register
