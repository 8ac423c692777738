# SPDX-License-Identifier: MIT
"""Writes the executable: ELF64, little endian, that stock tools read."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

from . import hw
from .dwarf import make_debug
from .passes.codegen import Code

MACHINE = 0x5450
NOTE_OWNER = b"TPU\0"
NOTE_METADATA = 0x21
NOTE_CACHE_KEY = 0x22
NOTE_DIGEST = 0x23  # sha256 of the metadata and the key
KD_MAGIC = 0x444B5054  # "TPKD"
KD_VERSION = 1
KD = struct.Struct("<5I12x")  # magic, version, entry in .text, code bytes, arguments
MAP_VERSION = 1
MAP_HEADER = struct.Struct("<II")  # version, records
MAP_RECORD = struct.Struct("<III")  # pc, then offsets of operation and module in the strings

EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
PHDR = struct.Struct("<IIQQQQQQ")
SHDR = struct.Struct("<IIQQQQIIQQ")
SYM = struct.Struct("<IBBHQQ")
ET_DYN = 3
PT_LOAD, PT_NOTE = 1, 4
PF_X, PF_R = 1, 4
SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_NOTE, SHT_NOBITS = 1, 2, 3, 7, 8
SHF_ALLOC, SHF_EXECINSTR = 2, 4
_STT_OBJECT, _STT_FUNC, _STB_GLOBAL = 1, 2, 1
_TEXT_ALIGN = 256


@dataclass(slots=True)
class Section:
    """size: of a NOBITS section, which has no data."""

    name: str
    type: int
    data: bytes = b""
    flags: int = 0
    align: int = 1
    size: int = 0
    link: int = 0
    info: int = 0
    entry_bytes: int = 0
    offset: int = 0


def write_elf(
    code: Code,
    binary: bytes,
    metadata: dict[str, Any],
    key: bytes,
    texts: dict[str, str],
) -> bytes:
    """binary: the code, encoded. key: the cache key. texts: the stages to keep, by name."""
    arena_bytes = metadata["kernels"][code.name]["vmem_bytes"]
    kd = KD.pack(KD_MAGIC, KD_VERSION, 0, len(binary), len(metadata["arguments"]))
    note = json.dumps(metadata, separators=(",", ":")).encode()
    sections = [
        Section(".note.tpu", SHT_NOTE, _note(note, key), SHF_ALLOC, 4),
        Section(".rodata", SHT_PROGBITS, kd, SHF_ALLOC, 64),
        Section(".text", SHT_PROGBITS, binary, SHF_ALLOC | SHF_EXECINSTR, hw.PAGE_BYTES),
        Section(".bss.arena", SHT_NOBITS, size=arena_bytes, align=64),
        Section(".tpu.weights", SHT_NOBITS, size=metadata["weights"]["bytes"], align=64),
        Section(".tpu.map", SHT_PROGBITS, make_map(code), align=4),
        *(Section(f".tpu.ir.{name}", SHT_PROGBITS, text.encode()) for name, text in texts.items()),
    ]
    header_bytes = EHDR.size + 3 * PHDR.size
    _place(sections, header_bytes)
    rodata, text_section = sections[1], sections[2]
    # Alloc sections lie at their file offsets, so that addresses need no other map.
    debug = make_debug(code.name, text_section.offset, [line.loc for line in code.lines])
    strings, symbols = _symbols(code.name, rodata.offset, text_section.offset, len(binary))
    sections += [
        Section(".debug_abbrev", SHT_PROGBITS, debug.abbrev),
        Section(".debug_info", SHT_PROGBITS, debug.info),
        Section(".debug_line", SHT_PROGBITS, debug.line),
        Section(
            ".symtab", SHT_SYMTAB, symbols, align=8, link=len(sections) + 5, info=1,
            entry_bytes=SYM.size,
        ),
        Section(".strtab", SHT_STRTAB, strings),
    ]  # fmt: skip
    return _assemble(sections, header_bytes)


def make_map(code: Code) -> bytes:
    """Which operation of the model each instruction belongs to."""
    strings = bytearray(b"\0")
    offsets: dict[str, int] = {"": 0}

    def intern(text: str) -> int:
        if text not in offsets:
            offsets[text] = len(strings)
            strings.extend(text.encode() + b"\0")
        return offsets[text]

    records = b"".join(
        MAP_RECORD.pack(index * hw.INSTR_BYTES, intern(line.source), intern(line.loc.module))
        for index, line in enumerate(code.lines)
    )
    return MAP_HEADER.pack(MAP_VERSION, len(code.lines)) + records + bytes(strings)


def _note(metadata: bytes, key: bytes) -> bytes:
    out = b""
    digest = hashlib.sha256(metadata + key).digest()
    for kind, body in (
        (NOTE_METADATA, metadata),
        (NOTE_CACHE_KEY, key),
        (NOTE_DIGEST, digest),
    ):
        header = struct.pack("<III", len(NOTE_OWNER), len(body), kind)
        out += header + NOTE_OWNER + body + bytes(-len(body) % 4)
    return out


def _symbols(name: str, rodata: int, text: int, text_bytes: int) -> tuple[bytes, bytes]:
    """The string table, and the symbols of the kernel and its descriptor."""
    strings = b"\0" + name.encode() + b"\0" + f"{name}.kd".encode() + b"\0"
    second = len(name.encode()) + 2
    return strings, (
        bytes(SYM.size)
        + SYM.pack(1, _STB_GLOBAL << 4 | _STT_FUNC, 0, 3, text, text_bytes)
        + SYM.pack(second, _STB_GLOBAL << 4 | _STT_OBJECT, 0, 2, rodata, KD.size)
    )


def _place(sections: list[Section], at: int) -> int:
    """Gives every section its file offset; returns the end."""
    for section in sections:
        at = -(-at // section.align) * section.align
        section.offset = at
        at += len(section.data)
    return at


def _assemble(sections: list[Section], header_bytes: int) -> bytes:
    names = bytearray(b"\0")
    name_offsets = []
    sections.append(Section(".shstrtab", SHT_STRTAB))
    for section in sections:
        name_offsets.append(len(names))
        names += section.name.encode() + b"\0"
    sections[-1].data = bytes(names)
    end = -(-_place(sections, header_bytes) // 8) * 8

    note, rodata, text = sections[:3]
    readable = rodata.offset + len(rodata.data)
    segments = b"".join(
        (
            PHDR.pack(PT_LOAD, PF_R, 0, 0, 0, readable, readable, hw.PAGE_BYTES),
            _segment(PT_LOAD, PF_R | PF_X, text, hw.PAGE_BYTES),
            _segment(PT_NOTE, PF_R, note, 4),
        )
    )
    ident = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)  # 64 bit, little endian, version 1
    header = EHDR.pack(
        ident, ET_DYN, MACHINE, 1, text.offset, EHDR.size, end, hw.ISA_VERSION,
        EHDR.size, PHDR.size, 3, SHDR.size, len(sections) + 1, len(sections),
    )  # fmt: skip
    out = bytearray(header + segments)
    for section in sections:
        out += bytes(section.offset - len(out)) + section.data
    out += bytes(end - len(out)) + bytes(SHDR.size)
    for section, name in zip(sections, name_offsets, strict=True):
        alloc = section.flags & SHF_ALLOC
        out += SHDR.pack(
            name, section.type, section.flags, section.offset if alloc else 0, section.offset,
            len(section.data) or section.size, section.link, section.info, section.align,
            section.entry_bytes,
        )  # fmt: skip
    return bytes(out)


def _segment(kind: int, flags: int, section: Section, align: int) -> bytes:
    size = len(section.data)
    at = section.offset
    return PHDR.pack(kind, flags, at, at, at, size, size, align)
