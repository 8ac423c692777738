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
    digest = hashlib.sha256(old).hexdigest().encode()
    assert json.dumps(executable.metadata).encode().count(digest) == 1
    elf = executable.elf.replace(old, code)
    return elf.replace(digest, hashlib.sha256(code).hexdigest().encode())


def strip_waits(executable: Executable) -> bytes:
    return rewrite(executable, lambda _, instr: replace(instr, wait=0, wait_imm=0))
