# SPDX-License-Identifier: MIT
"""Disassembly: symbolic operands, with the model's operation and source line."""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from . import hw
from .asm import Instr, bits_f32, decode, unpack_imm64
from .ir import Location
from .passes.codegen import Code
from .reader import ElfFile, read_elf


@dataclass(slots=True)
class Symbols:
    """Names for registers and for places in the weight image and launch block."""

    registers: dict[int, str] = field(default_factory=dict)
    places: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    words: dict[tuple[int, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: dict[str, Any]) -> Symbols:
        symbols = cls()
        for number, name in enumerate(metadata["arguments"], hw.FIRST_ARG):
            symbols.registers[number] = name
            items = {
                "weights": metadata["weights"]["entries"],
                "launch": metadata["launch"]["fields"],
            }.get(name, [])
            symbols.places[number] = sorted((item["offset"], item["name"]) for item in items)
        return symbols

    def register(self, number: int) -> str:
        return self.registers.get(number, f"s{number}")

    def place(self, register: int, offset: int) -> str:
        """Like weights[name+64], or register+offset."""
        table = self.places.get(register)
        if table:
            index = bisect_right(table, (offset, "\U0010ffff")) - 1
            if index >= 0:
                start, name = table[index]
                more = f"+{offset - start}" if offset > start else ""
                return f"{self.register(register)}[{_short(name)}{more}]"
        return f"{self.register(register)}+{offset}" if offset else self.register(register)


def _short(name: str) -> str:
    """Fused weights by their first part."""
    first, *rest = name.split("+")
    return f"{first}+{len(rest)} more" if rest else first


def format_instr(instr: Instr, symbols: Symbols) -> str:
    info = instr.info
    modes = {number: name for name, number in info.modes.items()}
    name = ".".join([instr.op, *([instr.fmt] if instr.fmt != "NONE" else [])])
    if modes:
        name += f".{modes[instr.mode]}"
    flags = [flag for flag, bit in info.flags.items() if instr.flags & bit]
    parts = [
        f"{label}={_operand(kind, reg, imm, symbols)}"
        for (reg, imm), (label, kind) in zip(instr.operands, info.operands, strict=True)
    ]
    if info.has_aux:
        parts.append(f"aux={bits_f32(instr.aux):g}")
    if info.imm64_fields:
        parts += [f"{key}={value}" for key, value in unpack_imm64(instr.op, instr.imm64).items()]
    elif info.imm64:
        parts.append(f"{info.imm64}=0x{instr.imm64:x}")
    text = " ".join([name, *flags, ", ".join(parts)]).rstrip()
    if instr.wait:
        register = f"{symbols.register(instr.wait_reg)}+" if instr.wait_reg else ""
        text += f" wait c{instr.wait}>={register}{instr.wait_imm}"
    if instr.signal:
        text += f" signal c{instr.signal}"
    # A length or pointer that is loaded gives its register its name.
    if instr.op == "LD":
        (register_, _), (base, offset) = instr.operands
        place = symbols.place(base, offset)
        if symbols.register(base) == "launch" and "+" not in place:
            symbols.registers[register_] = place.removeprefix("launch[").removesuffix("]")
    return text


def _operand(kind: str, reg: int, imm: int, symbols: Symbols) -> str:
    if kind in ("v", "v4"):
        base = f"{symbols.register(reg)}+" if reg else ""
        return f"[{base}0x{imm:x}]"
    if kind == "g":
        return symbols.place(reg, imm) if reg else f"0x{imm:x}"
    if kind == "pc":
        return f"0x{imm:x}" if not reg else f"{symbols.register(reg)}+0x{imm:x}"
    if reg:
        return symbols.register(reg) + (f"+{imm}" if imm else "")
    return str(imm)


def format_code(code: Code, symbols: Symbols | None = None) -> str:
    """A kernel that has just been generated."""
    symbols = symbols or Symbols()
    lines = [f"{code.name}:"]
    for index, line in enumerate(code.lines):
        text = format_instr(line.instr, symbols)
        lines.append(format_line(index, text, line.source, line.loc))
    return "\n".join(lines) + "\n"


def format_line(index: int, text: str, source: str, loc: Location) -> str:
    place = " ".join(
        filter(None, (source, loc.module, f"{loc.file}:{loc.line}" if loc.file else ""))
    )
    return f"  {index * hw.INSTR_BYTES:5x}: {text}" + (f"  ; {place}" if place else "")


def objdump(data: bytes) -> str:
    """The whole executable. Raises ExecutableError, or CompileError at a bad instruction."""
    elf = read_elf(data)
    symbols = Symbols.of(elf.metadata)
    sources = read_lines(elf.sections.get(".debug_line", b""))
    lines = [_header(elf), f"{elf.kernel}:"]
    for index in range(len(elf.code) // hw.INSTR_BYTES):
        pc = index * hw.INSTR_BYTES
        instr = decode(elf.code[pc : pc + hw.INSTR_BYTES])
        source, module = elf.origin(pc)
        file, line = sources[index] if index < len(sources) else ("", 0)
        loc = Location(file if line else "", line, module)
        lines.append(format_line(index, format_instr(instr, symbols), source, loc))
    return "\n".join(lines) + "\n"


def _header(elf: ElfFile) -> str:
    metadata = elf.metadata
    kernel = metadata["kernels"][elf.kernel]
    return "\n".join(
        [
            f"kernel {elf.kernel}({', '.join(metadata['arguments'])})",
            f"  key {elf.key.hex()}",
            f"  {kernel['instructions']} instructions, {kernel['vmem_bytes']} bytes of VMEM",
            f"  weights {metadata['weights']['bytes']} bytes, launch block "
            f"{metadata['launch']['bytes']} bytes",
            "  lengths "
            + ", ".join(f"{name} <= {most}" for name, most in metadata["lengths"].items()),
            *(f"  trap {code}: {meaning}" for code, meaning in metadata["traps"].items()),
            "",
        ]
    )


def read_lines(data: bytes) -> list[tuple[str, int]]:
    """(file, line) an instruction, from a .debug_line that this compiler wrote."""
    if not data:
        return []
    header_bytes, opcode_base = struct.unpack_from("<I", data, 6)[0], data[15]
    at = 15 + opcode_base + 1  # after the opcode lengths and the empty directory table
    files = [""]
    while data[at]:
        end = data.index(b"\0", at)
        files.append(data[at:end].decode())
        at = end + 4  # no directory, time or size
    at = 10 + header_bytes
    rows: list[tuple[str, int]] = []
    file, line = 1, 1
    while at < len(data):
        opcode = data[at]
        at += 1
        if opcode == 0:
            at += data[at] + 1
        elif opcode == 1:
            rows.append((files[file], line))
        else:
            value, at = _leb(data, at, signed=opcode == 3)
            if opcode == 3:
                line += value
            elif opcode == 4:
                file = value
    return rows


def _leb(data: bytes, at: int, signed: bool) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
    if signed and byte & 0x40:
        value -= 1 << shift
    return value, at
