# SPDX-License-Identifier: MIT
"""What RUN writes into a profile buffer, read back."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from machine import Machine, Queue
from vtpu_compiler import hw

ENGINES = ("SEQ", "DMA", "MXU", "VPU", "LINK")


def _unpack(data: bytes, fields: dict[str, tuple[int, str, int]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (offset, code, count) in fields.items():
        values = struct.unpack_from(f"<{count}{code}", data, offset)
        found[name] = values[0] if count == 1 else list(values)
    return found


@dataclass
class Profile:
    """The totals, and the records in their order."""

    raw: bytes
    header: dict[str, Any]
    records: list[dict[str, Any]]

    def of(self, name: str) -> list[dict[str, Any]]:
        """The records of an operation, by pc."""
        code = hw.OPS[name].code
        return sorted((r for r in self.records if r["opcode"] == code), key=lambda r: r["pc"])

    def waited(self, who: str, whom: str) -> int:
        return int(self.header["wait"][8 * ENGINES.index(who) + ENGINES.index(whom)])

    def engine(self, total: str, name: str) -> int:
        return int(self.header[total][ENGINES.index(name)])


def read_profile(machine: Machine, va: int) -> Profile:
    header = _unpack(machine.get(va, hw.PROFILE_HEADER_BYTES), hw.PROFILE_HEADER)
    size = header["bytes"] + header["records"] * header["record_bytes"]
    raw = machine.get(va, size)
    records = [
        _unpack(raw[at : at + header["record_bytes"]], hw.PROFILE_RECORD)
        for at in range(header["bytes"], size, header["record_bytes"])
    ]
    return Profile(raw, header, records)


def with_profile(payload: bytes, va: int, size: int) -> bytes:
    """A RUN's payload (28 bytes) with a profile buffer."""
    return payload + struct.pack("<IQ", size, va)


def run_profiled(
    queue: Queue, code: bytes, args: tuple[int, ...] = (), records: int = 2000
) -> Profile:
    size = hw.PROFILE_HEADER_BYTES + records * hw.PROFILE_RECORD_BYTES
    va = queue.machine.alloc(size)
    queue.do("RUN", with_profile(queue.run_payload(code, args), va, size))
    return read_profile(queue.machine, va)
