# SPDX-License-Identifier: MIT
"""Symbols for a debugger: a kernel's own list of them, as an ELF file; where a module is.

Debian's kernel comes without a symbol table, and its debug package is a
gigabyte. The running kernel knows its names and addresses (/proc/kallsyms);
types come with the driver's own debug information.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_ET_EXEC, _EM_X86_64 = 2, 62
_SHT_PROGBITS, _SHT_SYMTAB, _SHT_STRTAB, _SHT_NOBITS = 1, 2, 3, 8
_SHF_ALLOC_EXEC = 2 | 4
_STT_OBJECT, _STT_FUNC = 1, 2
_HEADER, _SECTION, _SYMBOL = 64, 64, 24


@dataclass(frozen=True)
class Symbol:
    address: int
    name: str
    is_function: bool


def parse_kallsyms(text: str) -> list[Symbol]:
    """Lines "address type name [module]", sorted by address."""
    symbols = []
    for line in text.splitlines():
        address, kind, name = line.split()[:3]
        # Per-CPU symbols are offsets, and a restricted list is all zero.
        if int(address, 16) >= 1 << 63:
            symbols.append(Symbol(int(address, 16), name, kind in "tTwW"))
    return sorted(symbols, key=lambda symbol: symbol.address)


def symbol_elf(symbols: Iterable[Symbol]) -> bytes:
    """An executable without contents, of one section that spans all symbols.

    Format: the ELF-64 object file format.
    """
    ordered = list(symbols)
    if not ordered:
        raise ValueError("no symbols: /proc/kallsyms shows addresses to root alone")
    names = bytearray(b"\0")
    # The first symbol of every table is the undefined one.
    table = bytearray(_SYMBOL)
    for at, symbol in enumerate(ordered):
        following = ordered[at + 1].address if at + 1 < len(ordered) else symbol.address
        kind = _STT_FUNC if symbol.is_function else _STT_OBJECT
        size = min(following - symbol.address, 1 << 20)
        table += struct.pack("<IBBHQQ", len(names), 1 << 4 | kind, 0, 1, symbol.address, size)
        names += symbol.name.encode() + b"\0"
    section_names = b"\0.text\0.symtab\0.strtab\0"
    start = ordered[0].address
    span = ordered[-1].address + 1 - start

    table_at = _HEADER
    names_at = table_at + len(table)
    section_names_at = names_at + len(names)
    sections_at = (section_names_at + len(section_names) + 7) & ~7
    sections = [
        bytes(_SECTION),
        _section(1, _SHT_NOBITS, _SHF_ALLOC_EXEC, start, 0, span),
        _section(7, _SHT_SYMTAB, 0, 0, table_at, len(table), link=3, info=1, entry=_SYMBOL),
        _section(15, _SHT_STRTAB, 0, 0, names_at, len(names)),
        _section(15, _SHT_STRTAB, 0, 0, section_names_at, len(section_names)),
    ]
    header = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    header += struct.pack("<HHIQQQI", _ET_EXEC, _EM_X86_64, 1, start, 0, sections_at, 0)
    header += struct.pack("<HHHHHH", _HEADER, 0, 0, _SECTION, len(sections), len(sections) - 1)
    body = header + table + names + section_names
    return body + bytes(sections_at - len(body)) + b"".join(sections)


def placed(module: bytes, addresses: Mapping[str, int]) -> bytes:
    """A relocatable file, such as a module, whose sections are at addresses, by name.

    gdb takes addresses beside the file as well, but it reads lines of code
    outside .text as if they were in it.
    """
    out = bytearray(module)
    (table,) = struct.unpack_from("<Q", out, 40)
    size, count, names = struct.unpack_from("<HHH", out, 58)
    (names_at,) = struct.unpack_from("<Q", out, table + names * size + 24)
    for at in range(table, table + count * size, size):
        start = names_at + struct.unpack_from("<I", out, at)[0]
        name = out[start : out.index(0, start)].decode()
        if name in addresses:
            struct.pack_into("<Q", out, at + 16, addresses[name])
    return bytes(out)


def _section(
    name: int, kind: int, flags: int, address: int, offset: int, size: int,
    *, link: int = 0, info: int = 0, entry: int = 0,
) -> bytes:  # fmt: skip
    return struct.pack(
        "<IIQQQQIIQQ", name, kind, flags, address, offset, size, link, info, 8, entry
    )
