# SPDX-License-Identifier: MIT
"""Reads an executable without other libraries; every error says what is wrong."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from typing import Any

from . import hw
from .elf import (
    EHDR,
    KD,
    KD_MAGIC,
    KD_VERSION,
    MACHINE,
    MAP_HEADER,
    MAP_RECORD,
    MAP_VERSION,
    NOTE_CACHE_KEY,
    NOTE_DIGEST,
    NOTE_METADATA,
    NOTE_OWNER,
    SHDR,
    SHT_NOBITS,
)

METADATA_VERSION = 1


class ExecutableError(ValueError):
    """The bytes are not an executable for this device; the message says why."""


@dataclass(slots=True)
class ElfFile:
    """An executable's parts. code: the kernel's instructions."""

    metadata: dict[str, Any]
    key: bytes
    code: bytes
    entry: int
    sections: dict[str, bytes]
    _map: list[tuple[str, str]] = field(default_factory=list)

    @property
    def kernel(self) -> str:
        return str(next(iter(self.metadata["kernels"])))

    def origin(self, pc: int) -> tuple[str, str]:
        """(graph operation, module) of the instruction at a byte offset of the code."""
        if not self._map:
            self._map = _read_map(self.sections.get(".tpu.map", b""))
        index = pc // hw.INSTR_BYTES
        return self._map[index] if 0 <= index < len(self._map) else ("", "")


def read_elf(data: bytes) -> ElfFile:
    """Raises ExecutableError."""
    try:
        return _read(memoryview(data))
    except ExecutableError:
        raise
    except (struct.error, IndexError):
        raise ExecutableError(f"the file of {len(data)} bytes is truncated") from None
    except (KeyError, ValueError) as error:  # names, text or JSON that is none
        raise ExecutableError(f"corrupt: {error}") from None


def read_metadata(data: bytes) -> dict[str, Any]:
    """The metadata of an executable. Raises ExecutableError."""
    return read_elf(data).metadata


def _read(data: memoryview) -> ElfFile:
    if bytes(data[:4]) != b"\x7fELF":
        raise ExecutableError("not an ELF file")
    fields = EHDR.unpack_from(data)
    ident, machine, section_offset = fields[0], fields[2], fields[6]
    count, names_index = fields[12], fields[13]
    if ident[4:6] != b"\x02\x01":
        raise ExecutableError("not a 64-bit little-endian ELF file")
    if machine != MACHINE:
        raise ExecutableError(f"made for machine 0x{machine:x}, not 0x{MACHINE:x}")
    sections = _sections(data, section_offset, count, names_index)
    for name in (".note.tpu", ".text", ".rodata"):
        if name not in sections:
            raise ExecutableError(f"there is no section {name}")
    notes = _notes(sections[".note.tpu"])
    digest = hashlib.sha256(notes[NOTE_METADATA] + notes[NOTE_CACHE_KEY]).digest()
    if digest != notes[NOTE_DIGEST]:
        raise ExecutableError("its metadata does not match its checksum")
    metadata = json.loads(notes[NOTE_METADATA])
    if not isinstance(metadata, dict) or metadata.get("version") != METADATA_VERSION:
        raise ExecutableError(f"its metadata is not of version {METADATA_VERSION}")
    if metadata["isa_version"] != hw.ISA_VERSION:
        raise ExecutableError(
            f"made for ISA version {metadata['isa_version']}, this is {hw.ISA_VERSION}"
        )
    magic, version, entry, code_bytes, _ = KD.unpack_from(sections[".rodata"])
    if magic != KD_MAGIC or version != KD_VERSION:
        raise ExecutableError("its kernel descriptor is corrupt")
    code = sections[".text"][entry : entry + code_bytes]
    if len(code) != code_bytes or code_bytes % hw.INSTR_BYTES:
        raise ExecutableError(f"its code should be {code_bytes} bytes, .text has {len(code)}")
    if hashlib.sha256(code).hexdigest() != metadata["code_sha256"]:
        raise ExecutableError("its code does not match its checksum")
    return ElfFile(metadata, notes[NOTE_CACHE_KEY], code, entry, sections)


def _sections(data: memoryview, at: int, count: int, names_index: int) -> dict[str, bytes]:
    headers = [SHDR.unpack_from(data, at + index * SHDR.size) for index in range(count)]
    names_header = headers[names_index]
    names = bytes(data[names_header[4] : names_header[4] + names_header[5]])
    sections: dict[str, bytes] = {}
    for name_offset, kind, _, _, offset, size, *_ in headers[1:]:
        name = names[name_offset : names.index(b"\0", name_offset)].decode()
        if kind == SHT_NOBITS:
            continue
        if offset + size > len(data):
            raise ExecutableError(f"section {name} goes past the end of the file: truncated")
        sections[name] = bytes(data[offset : offset + size])
    return sections


def _notes(data: bytes) -> dict[int, bytes]:
    notes: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        name_bytes, size, kind = struct.unpack_from("<III", data, at)
        start = at + 12 + (name_bytes + 3) // 4 * 4
        if data[at + 12 : at + 12 + name_bytes] == NOTE_OWNER:
            notes[kind] = data[start : start + size]
        at = start + (size + 3) // 4 * 4
    for kind in (NOTE_METADATA, NOTE_CACHE_KEY, NOTE_DIGEST):
        if kind not in notes:
            raise ExecutableError(f"there is no note of type 0x{kind:x}")
    return notes


def _read_map(data: bytes) -> list[tuple[str, str]]:
    if not data:
        return []
    version, count = MAP_HEADER.unpack_from(data)
    if version != MAP_VERSION:
        raise ExecutableError(f".tpu.map is of version {version}, not {MAP_VERSION}")
    strings = data[MAP_HEADER.size + count * MAP_RECORD.size :]

    def text(offset: int) -> str:
        return strings[offset : strings.index(b"\0", offset)].decode()

    records = MAP_RECORD.iter_unpack(data[MAP_HEADER.size :][: count * MAP_RECORD.size])
    return [(text(source), text(module)) for _, source, module in records]
