# SPDX-License-Identifier: MIT
"""Damages executables in ways that keep them well-formed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace

from vtpu_compiler import Executable, read_elf
from vtpu_compiler.asm import Instr, decode, encode


def rewrite(executable: Executable, change: Callable[[int, Instr], Instr]) -> bytes:
    """The executable with every instruction passed through change, checksum renewed."""
    old = read_elf(executable.elf).code
    code = b"".join(
        encode(change(at // 64, decode(old[at : at + 64]))) for at in range(0, len(old), 64)
    )
    return recode(executable, old, code)


def recode(executable: Executable, old: bytes, code: bytes) -> bytes:
    """Replaces the code by one of the same length."""
    changes = {old: code}
    return remake(executable, changes | {_hex(old): _hex(code)})


def remake(executable: Executable, changes: dict[bytes, bytes]) -> bytes:
    """Replaces bytes of the file by as many others, the metadata's checksum renewed."""
    elf = executable.elf
    for old, new in changes.items():
        assert elf.count(old) == 1 and len(old) == len(new)
        elf = elf.replace(old, new)
    metadata = json.dumps(executable.metadata, separators=(",", ":")).encode()
    at = executable.elf.index(metadata)
    digests = [
        hashlib.sha256(file[at : at + len(metadata)] + executable.key).digest()
        for file in (executable.elf, elf)
    ]
    assert elf.count(digests[0]) == 1
    return elf.replace(*digests)


def _hex(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def strip_waits(executable: Executable) -> bytes:
    return rewrite(executable, lambda _, instr: replace(instr, wait=0, wait_imm=0))
