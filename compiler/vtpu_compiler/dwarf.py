# SPDX-License-Identifier: MIT
"""DWARF 4: from an instruction's address to the model's source line."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from . import hw
from .ir import Location

_PRODUCER = "vtpu compiler"
# Tags, attributes and forms of the standard that are used here.
_TAG_COMPILE_UNIT, _TAG_SUBPROGRAM = 0x11, 0x2E
_AT_NAME, _AT_STMT_LIST, _AT_LOW_PC, _AT_HIGH_PC = 0x03, 0x10, 0x11, 0x12
_AT_LANGUAGE, _AT_COMP_DIR, _AT_PRODUCER, _AT_EXTERNAL = 0x13, 0x1B, 0x25, 0x3F
_FORM_ADDR, _FORM_DATA2, _FORM_DATA8, _FORM_STRING = 0x01, 0x05, 0x07, 0x08
_FORM_SEC_OFFSET, _FORM_FLAG_PRESENT = 0x17, 0x19
_LANG_PYTHON = 0x14
_OPCODE_LENGTHS = bytes((0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1))
_COPY, _ADVANCE_PC, _ADVANCE_LINE, _SET_FILE = 1, 2, 3, 4
_END_SEQUENCE, _SET_ADDRESS = 1, 2


@dataclass(frozen=True, slots=True)
class Debug:
    abbrev: bytes
    info: bytes
    line: bytes


def make_debug(name: str, address: int, locations: list[Location]) -> Debug:
    """locations: one an instruction of the kernel that starts at address."""
    size = len(locations) * hw.INSTR_BYTES
    unit = next((loc.file for loc in locations if loc.file), name)
    return Debug(_abbrev(), _info(name, unit, address, size), _line(unit, address, locations))


def _uleb(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _sleb(value: int) -> bytes:
    out = bytearray()
    while not -64 <= value < 64:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value & 0x7F)
    return bytes(out)


def _text(text: str) -> bytes:
    return text.encode().replace(b"\0", b"") + b"\0"


def _abbrev() -> bytes:
    def entry(code: int, tag: int, children: bool, *forms: tuple[int, int]) -> bytes:
        pairs = b"".join(_uleb(attribute) + _uleb(form) for attribute, form in forms)
        return _uleb(code) + _uleb(tag) + bytes((children,)) + pairs + b"\0\0"

    return (
        entry(
            1, _TAG_COMPILE_UNIT, True,
            (_AT_PRODUCER, _FORM_STRING), (_AT_LANGUAGE, _FORM_DATA2),
            (_AT_NAME, _FORM_STRING), (_AT_COMP_DIR, _FORM_STRING),
            (_AT_LOW_PC, _FORM_ADDR), (_AT_HIGH_PC, _FORM_DATA8),
            (_AT_STMT_LIST, _FORM_SEC_OFFSET),
        )
        + entry(
            2, _TAG_SUBPROGRAM, False,
            (_AT_NAME, _FORM_STRING), (_AT_LOW_PC, _FORM_ADDR),
            (_AT_HIGH_PC, _FORM_DATA8), (_AT_EXTERNAL, _FORM_FLAG_PRESENT),
        )
        + b"\0"
    )  # fmt: skip


def _info(name: str, unit: str, address: int, size: int) -> bytes:
    extent = struct.pack("<QQ", address, size)
    body = (
        struct.pack("<HIB", 4, 0, 8)  # version, abbreviations, address size
        + _uleb(1)
        + _text(_PRODUCER)
        + struct.pack("<H", _LANG_PYTHON)
        + _text(unit)
        + _text(".")
        + extent
        + struct.pack("<I", 0)
        + _uleb(2)
        + _text(name)
        + extent
        + _uleb(0)
    )
    return struct.pack("<I", len(body)) + body


def _line(unit: str, address: int, locations: list[Location]) -> bytes:
    files = {unit: 1}
    for loc in locations:
        if loc.file:
            files.setdefault(loc.file, len(files) + 1)
    tables = (
        _OPCODE_LENGTHS
        + b"\0"  # no directories: names are as the front end gave them
        + b"".join(_text(file) + b"\0\0\0" for file in files)
        + b"\0"
    )
    # Unit of addresses, operations an instruction, is_stmt, line base, line range, opcode base.
    header = struct.pack("<BBBbBB", hw.INSTR_BYTES, 1, 1, -5, 14, 13) + tables
    program = _program(files, address, locations)
    rest = struct.pack("<HI", 4, len(header)) + header + program
    return struct.pack("<I", len(rest)) + rest


def _program(files: dict[str, int], address: int, locations: list[Location]) -> bytes:
    out = bytearray((0, 9, _SET_ADDRESS)) + struct.pack("<Q", address)
    file, line = 1, 1
    for index, loc in enumerate(locations):
        # Line 0: no line of the model, such as the end of the program.
        wanted = (files[loc.file], loc.line) if loc.file else (file, 0)
        if index:
            out += bytes((_ADVANCE_PC, 1))
        if wanted[0] != file:
            file = wanted[0]
            out += bytes((_SET_FILE,)) + _uleb(file)
        if wanted[1] != line:
            out += bytes((_ADVANCE_LINE,)) + _sleb(wanted[1] - line)
            line = wanted[1]
        out.append(_COPY)
    out += bytes((_ADVANCE_PC, 1, 0, 1, _END_SEQUENCE))
    return bytes(out)
