# SPDX-License-Identifier: MIT
"""The driver's device core dumps: which program, where, and what of the model that is.

docs/driver-telemetry.md has the format. The dump holds the program's bytes but
not where they came from: that is in the executable, which is found by their hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from . import hw
from .asm import decode
from .ir import CompileError, Location
from .objdump import Symbols, format_instr, format_line, read_lines
from .reader import ElfFile, ExecutableError, read_elf

VERSION = 1
_TITLE = re.compile(r"vtpu coredump, version (\d+)")
_MEMORY = re.compile(r"memory (\S+) va=(\S+) bytes=(\d+)")
_NO_PC = 0xFFFF_FFFF
_ACCESSES = {1: "read", 2: "write", 3: "execute"}


class CoredumpError(ValueError):
    """The text is not a dump; the message says why."""


@dataclass(slots=True)
class Memory:
    va: int
    data: bytes


@dataclass(slots=True)
class Coredump:
    """A dump's parts; registers and values are numbers already."""

    head: dict[str, str]
    device: dict[str, int]
    queue: dict[str, int]
    ring: list[str]
    mappings: list[str]
    arguments: list[int] = field(default_factory=list)
    memory: dict[str, Memory] = field(default_factory=dict)

    @property
    def pc(self) -> int | None:
        """Of the instruction to blame; None when no program was at work."""
        if "code" not in self.memory:
            return None
        register = "Q_FAULT_PC" if self.head["reason"] == "fault" else "Q_PC"
        pc = self.queue[register]
        return None if pc == _NO_PC else pc


def read_coredump(text: str) -> Coredump:
    """Raises CoredumpError."""
    title, _, rest = text.partition("\n")
    match = _TITLE.fullmatch(title)
    if not match:
        raise CoredumpError("not a vtpu core dump")
    if int(match[1]) != VERSION:
        raise CoredumpError(f"a dump of version {match[1]}, not {VERSION}")
    try:
        return _read(rest.splitlines())
    except (KeyError, ValueError) as error:
        raise CoredumpError(f"corrupt: {error}") from None


def _read(lines: list[str]) -> Coredump:
    parts: dict[str, list[str]] = {"": []}
    part = parts[""]
    for line in lines:
        if line.startswith("[") and line.endswith("]"):
            part = parts.setdefault(line[1:-1], [])
        else:
            part.append(line)
    if "end" not in parts:
        raise CoredumpError("cut off: there is no end")
    dump = Coredump(
        head=dict(_pairs(parts[""])),
        device={name: int(value, 0) for name, value in _pairs(parts["device"])},
        queue={name: int(value, 0) for name, value in _pairs(parts["queue"])},
        ring=parts["ring"],
        mappings=parts["mappings"],
        arguments=[int(value, 0) for _, value in _pairs(parts.get("arguments", []))],
    )
    for name, body in parts.items():
        if match := _MEMORY.fullmatch(name):
            dump.memory[match[1]] = Memory(int(match[2], 0), _bytes(body, int(match[3])))
    if dump.head["reason"] not in ("fault", "hang"):
        raise CoredumpError(f"there is no reason {dump.head['reason']!r}")
    return dump


def _pairs(lines: list[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, colon, value = line.partition(": ")
        if not colon:
            raise CoredumpError(f"no value in {line!r}")
        yield name, value


def _bytes(lines: list[str], size: int) -> bytes:
    """The kernel's ASCII85 is of 32-bit numbers, Python's of big-endian ones."""
    data = base64.a85decode("".join(lines))
    if len(data) != size:
        raise CoredumpError(f"{len(data)} bytes of memory instead of {size}")
    words = struct.unpack(f">{size // 4}I", data)
    return struct.pack(f"<{size // 4}I", *words)


def find_executable(code: bytes, places: Iterable[Path]) -> tuple[Path, ElfFile] | None:
    """The executable, among files and folders of them, that the code was taken from."""
    digest = hashlib.sha256(code).hexdigest()
    for place in places:
        for path in sorted(place.rglob("*.elf")) if place.is_dir() else [place]:
            try:
                elf = read_elf(path.read_bytes())
            except ExecutableError:
                if path == place:
                    raise
                continue
            if elf.metadata["code_sha256"] == digest:
                return path, elf
    return None


def report(dump: Coredump, places: Iterable[Path] = (), around: int = 8) -> str:
    """In words; instructions `around` the one to blame are shown."""
    lines = [_summary(dump), *_who(dump)]
    code = dump.memory.get("code")
    if code is None:
        return "\n".join([*lines, *_ring(dump)]) + "\n"
    found = find_executable(code.data, places)
    if found:
        lines.append(f"program {found[1].kernel} of {found[0]}")
    else:
        digest = hashlib.sha256(code.data).hexdigest()
        lines.append(f"program of {len(code.data)} bytes, sha256 {digest}; no executable given")
    elf = found[1] if found else None
    symbols = Symbols.of(elf.metadata) if elf else Symbols()
    lines += _address(dump, elf, symbols)
    lines += _ring(dump)
    if elf:
        lines += _lengths(dump, elf)
    lines += ["", *_code(code.data, dump.pc, elf, symbols, around)]
    return "\n".join(lines) + "\n"


def _summary(dump: Coredump) -> str:
    if dump.head["reason"] == "hang":
        running = dump.queue["Q_COMMAND_NS"] / 1e9
        where = f" at pc {dump.pc:#x}" if dump.pc is not None else ""
        return f"hang: a command that has executed for {running:.3f} s{where}"
    cause = {number: name for name, number in hw.FAULT.items()}
    number, address = dump.queue["Q_FAULT_CAUSE"], dump.queue["Q_FAULT_ADDR"]
    text = f"fault: {cause.get(number, number)}"
    access = _ACCESSES.get(dump.queue["Q_FAULT_ACCESS"])
    text += f", {access} of {address:#x}" if access else f", {address:#x}"
    return text + (f" at pc {dump.pc:#x}" if dump.pc is not None else "")


def _who(dump: Coredump) -> list[str]:
    head = dump.head
    return [
        f"process {head['process']}, queue {head['queue']}, entry {head['entry']}, "
        f"job {int(head['fence'].split()[0]) + 1} of {head['fence'].split()[-1]}",
        f"device {head['device']}, kernel {head['kernel']}, {head['time']} s after its start",
    ]


def _ring(dump: Coredump) -> list[str]:
    return ["ring:", *(f"  {entry}" for entry in dump.ring[:4])] + (
        [f"  and {len(dump.ring) - 4} more"] if len(dump.ring) > 4 else []
    )


def _address(dump: Coredump, elf: ElfFile | None, symbols: Symbols) -> list[str]:
    """Where the address that faulted lies, or what it lies behind."""
    if not dump.queue["Q_FAULT_ACCESS"]:
        return []
    address = dump.queue["Q_FAULT_ADDR"]
    lines = []
    for line in dump.mappings:
        first, last = (int(number, 0) for number in line.split()[0].split("-"))
        if first <= address < last:
            lines.append(f"address {address:#x} is mapped: {line}")
            break
    else:
        lines.append(f"address {address:#x} is not mapped")
    below = [
        (value, number)
        for number, value in enumerate(dump.arguments)
        if value <= address and value in {m.va for m in dump.memory.values() if m.data}
    ]
    if elf and below:
        value, number = max(below)
        place = symbols.place(hw.FIRST_ARG + number, address - value)
        lines.append(f"  {place}")
    return lines


def _lengths(dump: Coredump, elf: ElfFile) -> list[str]:
    """The runtime lengths in the launch block."""
    names = elf.metadata["arguments"]
    launch = dump.memory.get(f"argument{names.index('launch')}") if "launch" in names else None
    if launch is None:
        return []
    lengths = [
        f"{item['name']}={struct.unpack_from('<I', launch.data, item['offset'])[0]}"
        for item in elf.metadata["launch"]["fields"]
        if item["kind"] == "length" and item["offset"] + 4 <= len(launch.data)
    ]
    return [f"launch block at {launch.va:#x}: {', '.join(lengths)}"] if lengths else []


def _code(
    code: bytes, pc: int | None, elf: ElfFile | None, symbols: Symbols, around: int
) -> list[str]:
    sources = read_lines(elf.sections.get(".debug_line", b"")) if elf else []
    at = (pc or 0) // hw.INSTR_BYTES
    lines = []
    # All of them: what is loaded names registers further down.
    for index in range(len(code) // hw.INSTR_BYTES):
        word = code[index * hw.INSTR_BYTES : (index + 1) * hw.INSTR_BYTES]
        try:
            text = format_instr(decode(word), symbols)
        except CompileError:
            text = f"? {word[:8].hex()}"
        if abs(index - at) > around:
            continue
        operation, module = elf.origin(index * hw.INSTR_BYTES) if elf else ("", "")
        file, line = sources[index] if index < len(sources) else ("", 0)
        loc = Location(file if line else "", line, module)
        mark = "=>" if pc is not None and index == at else "  "
        lines.append(mark + format_line(index, text, operation, loc))
    return lines
