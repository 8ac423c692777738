# SPDX-License-Identifier: MIT
"""The archive format that the kernel unpacks as its first root ("newc")."""

from __future__ import annotations

from collections.abc import Iterable

_DIRECTORY = 0o040755
_FILE = 0o100755
_CONSOLE = 0o020600


def _entry(number: int, name: str, mode: int, data: bytes, device: tuple[int, int]) -> bytes:
    raw = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(raw), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + raw
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def archive(folders: Iterable[str], files: Iterable[tuple[str, bytes]]) -> bytes:
    """An archive of folders, executable files and /dev/console."""
    entries = [(name, _DIRECTORY, b"", (0, 0)) for name in ("dev", *folders)]
    entries += [("dev/console", _CONSOLE, b"", (5, 1))]
    entries += [(name, _FILE, data, (0, 0)) for name, data in files]
    body = [_entry(i, *entry) for i, entry in enumerate(entries, 1)]
    return b"".join(body) + _entry(0, "TRAILER!!!", 0, b"", (0, 0))
