# SPDX-License-Identifier: MIT
"""Programs for the tests, and executables around them, written without the compiler.

Instruction and file layouts are spelt out here a second time on purpose: that is what
the runtime and the device are checked against.
"""

from __future__ import annotations

import json
import struct
from typing import Any

ARG0 = 8  # the first argument is in s8

_OPCODES = {"HALT": 0x01, "TRAP": 0x02, "ADD": 0x06, "LD": 0x0E, "ST": 0x0F, "JMP": 0x14}
_WORD, _DOUBLE = 0, 1  # modes of LD and ST


def instruction(name: str, *operands: tuple[int, int], mode: int = 0) -> bytes:
    """64 bytes; an operand is (register, immediate), register 0 being zero."""
    registers = [register for register, _ in operands] + [0] * (8 - len(operands))
    immediates = [value for _, value in operands] + [0] * (8 - len(operands))
    head = struct.pack("<8B2I", _OPCODES[name], 0, 0, 0, 0, 0, 0, mode, 0, 0)
    return head + struct.pack("<8B8IQ", *registers, *immediates, 0)


HALT = instruction("HALT")
SPIN = instruction("JMP", (0, 0))


def store(argument: int, value: int) -> bytes:
    """Stores a 32-bit number at the address in an argument."""
    return instruction("ST", (ARG0 + argument, 0), (0, value), mode=_WORD)


def store_argument(at: int, value: int) -> bytes:
    """Stores one argument's 64 bits at the address in another."""
    return instruction("ST", (ARG0 + at, 0), (ARG0 + value, 0), mode=_DOUBLE)


def add_one(argument: int) -> bytes:
    """Increments the 64-bit word at the address in an argument."""
    return (
        instruction("LD", (1, 0), (ARG0 + argument, 0), mode=_DOUBLE)
        + instruction("ADD", (1, 0), (1, 0), (0, 1))
        + instruction("ST", (ARG0 + argument, 0), (1, 0), mode=_DOUBLE)
    )


def trap(code: int) -> bytes:
    return instruction("TRAP", (0, code))


def operation_map(records: list[tuple[int, str, str]]) -> bytes:
    """.tpu.map: (pc, operation, module) of each instruction."""
    strings = b"\0"
    body = b""
    for pc, operation, module in records:
        offsets = []
        for text in (operation, module):
            offsets.append(len(strings))
            strings += text.encode() + b"\0"
        body += struct.pack("<III", pc, *offsets)
    return struct.pack("<II", 1, len(records)) + body + strings


def executable(
    kernels: dict[str, bytes],
    arguments: list[str],
    *,
    pc_map: bytes = b"",
    metadata: dict[str, Any] | None = None,
    machine: int = 0x5450,
    isa_version: int = 1,
    key: bytes = bytes(32),
) -> bytes:
    """An ELF file with these kernels' code."""
    facts = {"version": 1, "isa_version": 1, "arguments": arguments, **(metadata or {})}
    text = rodata = b""
    strings = b"\0"
    symbols = [bytes(24)]
    for name, code in kernels.items():
        text += bytes(-len(text) % 256)
        for symbol, kind, section, value, size in (
            (name, 2, 1, len(text), len(code)),
            (f"{name}.kd", 1, 2, len(rodata), 32),
        ):
            symbols.append(struct.pack("<IBBHQQ", len(strings), 16 | kind, 0, section, value, size))
            strings += symbol.encode() + b"\0"
        rodata += struct.pack("<5I12x", 0x444B5054, 1, len(text), len(code), len(arguments))
        text += code
    notes = b""
    for kind, body in ((0x21, json.dumps(facts).encode()), (0x22, key)):
        notes += struct.pack("<III4s", 4, len(body), kind, b"TPU\0") + body + bytes(-len(body) % 4)

    sections = [  # name, type, contents, link, entry bytes
        (".text", 1, text, 0, 0),
        (".rodata", 1, rodata, 0, 0),
        (".note.tpu", 7, notes, 0, 0),
        (".tpu.map", 1, pc_map, 0, 0),
        (".symtab", 2, b"".join(symbols), 6, 24),
        (".strtab", 3, strings, 0, 0),
    ]
    names = b"\0" + b"".join(name.encode() + b"\0" for name, *_ in sections) + b".shstrtab\0"
    sections.append((".shstrtab", 3, names, 0, 0))

    image = bytearray(64)
    headers = [bytes(64)]
    for name, kind, contents, link, entry_bytes in sections:
        image += bytes(-len(image) % 64)
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(
            struct.pack(
                "<IIQQQQIIQQ", at, kind, 0, 0, len(image), len(contents), link, 0, 8, entry_bytes
            )
        )
        image += contents
    image += bytes(-len(image) % 8)
    struct.pack_into(
        "<16sHHIQQQIHHHHHH", image, 0, b"\x7fELF\x02\x01\x01", 3, machine, 1, 0, 0, len(image),
        isa_version, 64, 0, 0, 64, len(headers), len(headers) - 1,
    )  # fmt: skip
    return bytes(image) + b"".join(headers)
