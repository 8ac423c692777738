# SPDX-License-Identifier: MIT
"""Translation: sizes, rights, reserved bits, the TLB, ranges that are not in one piece."""

from __future__ import annotations

import os
import random
import struct

import pytest
from machine import (
    EXEC,
    HBM,
    HUGE,
    READ,
    SYSTEM_BASE,
    VALID,
    WRITE,
    D,
    Machine,
    Queue,
)

VA = 0x7F00_0000_0000


@pytest.fixture
def guest(machine: Machine) -> Queue:
    """A queue in context 1, whose address space is empty."""
    machine.context(1)
    return Queue(machine, 1, context=1)


def _signal(va: int, value: int = 1) -> bytes:
    return struct.pack("<QQ", va, value)


def test_pages_of_both_sizes(machine: Machine, guest: Queue) -> None:
    small = machine.alloc(4096)
    huge = machine.alloc(2 << 20, 2 << 20)
    machine.map(1, VA, small, 4096)
    machine.map(1, VA + (4 << 20), huge, 2 << 20, huge=True)
    guest.do("SIGNAL", _signal(VA + 8, 11))
    guest.do("SIGNAL", _signal(VA + (4 << 20) + 0x12340, 22))
    assert machine.word(small + 8) == 11
    assert machine.word(huge + 0x12340) == 22


def _fault(machine: Machine, queue: Queue, va: int) -> tuple[object, object, object]:
    fault = queue.expect_fault("SIGNAL", _signal(va))
    queue.restart()
    return fault["cause"], fault["access"], fault["addr"]


@pytest.mark.parametrize("va", [VA + 4096, VA - 8, 1 << 48, (1 << 64) - 8, 0])
def test_unmapped(machine: Machine, guest: Queue, va: int) -> None:
    machine.map(1, VA, machine.alloc(4096), 4096)
    assert _fault(machine, guest, va) == ("UNMAPPED", 2, va)


def test_rights(machine: Machine, guest: Queue) -> None:
    page = machine.alloc(4096)
    machine.map(1, VA, page, 4096, READ | EXEC)
    assert _fault(machine, guest, VA + 16) == ("PROTECTION", 2, VA + 16)
    machine.map(1, VA + 4096, page, 4096, WRITE | EXEC)
    fault = guest.expect_fault("COPY", struct.pack("<QQQ", VA + 4096, VA + 4096 + 8, 8))
    assert (fault["cause"], fault["access"]) == ("PROTECTION", 1)
    guest.restart()
    machine.map(1, VA + 8192, page, 4096, READ | WRITE)
    fault = guest.expect_fault("RUN", struct.pack("<QIIQI", VA + 8192, 64, 0, 0, 0))
    assert (fault["cause"], fault["access"], fault["addr"]) == ("PROTECTION", 3, VA + 8192)


@pytest.mark.parametrize("level", [3, 2, 1, 0])
@pytest.mark.parametrize("kind", ["reserved low", "reserved high", "outside HBM"])
def test_bad_entries_at_every_level(machine: Machine, guest: Queue, level: int, kind: str) -> None:
    machine.map(1, VA, machine.alloc(4096), 4096)
    entry = machine.pte_at(1, VA, level)
    good = machine.word(entry)
    leaf = VALID | READ | WRITE | HBM
    bad = {
        "reserved low": good | 1 << 7,
        "reserved high": good | 1 << 60,
        "outside HBM": (len(machine.hbm) | (leaf if level == 0 else VALID)),
    }[kind]
    machine.put(entry, struct.pack("<Q", bad))
    assert _fault(machine, guest, VA) == ("BAD_PAGE_TABLE", 2, VA)
    machine.put(entry, struct.pack("<Q", good))
    guest.do("SIGNAL", _signal(VA))


@pytest.mark.parametrize(
    ("level", "entry"),
    [
        (0, VALID | READ | WRITE | HBM | HUGE),
        (2, VALID | READ | WRITE | HBM | HUGE),
        (1, VALID | READ | WRITE | HBM | HUGE | 0x1000),  # not 2 MiB aligned
        (1, VALID | READ | WRITE),  # a table has no rights
    ],
)
def test_bad_huge_pages(machine: Machine, guest: Queue, level: int, entry: int) -> None:
    machine.put(machine.pte_at(1, VA, level), struct.pack("<Q", entry))
    assert _fault(machine, guest, VA)[0] == "BAD_PAGE_TABLE"


@pytest.mark.parametrize("bits", [0x10, 0x800])
def test_bad_roots(machine: Machine, guest: Queue, bits: int) -> None:
    machine.write(D["REG_CTX_ROOT"] + 8, machine.roots[1] | VALID | bits, 8)
    assert _fault(machine, guest, VA)[0] == "BAD_PAGE_TABLE"
    machine.write(D["REG_CTX_ROOT"] + 8, len(machine.hbm) | VALID, 8)
    assert _fault(machine, guest, VA)[0] == "BAD_PAGE_TABLE"
    machine.write(D["REG_CTX_ROOT"] + 8, machine.roots[1], 8)
    assert _fault(machine, guest, VA)[0] == "BAD_CONTEXT"


def test_the_tlb_keeps_until_invalidated(machine: Machine, guest: Queue) -> None:
    first, second = machine.alloc(4096), machine.alloc(4096)
    machine.map(1, VA, first, 4096)
    guest.do("SIGNAL", _signal(VA, 1))
    machine.map(1, VA, second, 4096)
    machine.write(D["REG_TLB_INVALIDATE"], 1)
    machine.wait_for(lambda: machine.reg("TLB_PENDING") == 0, "invalidated")
    guest.do("SIGNAL", _signal(VA, 2))
    assert (machine.word(first), machine.word(second)) == (1, 2)
    # A new root drops them, too.
    machine.context(1)
    assert _fault(machine, guest, VA)[0] == "UNMAPPED"


def test_new_mappings_need_no_invalidation(machine: Machine, guest: Queue) -> None:
    page = machine.alloc(8192)
    machine.map(1, VA, page, 4096)
    guest.do("SIGNAL", _signal(VA))
    assert _fault(machine, guest, VA + 4096)[0] == "UNMAPPED"
    machine.map(1, VA + 4096, page + 4096, 4096)
    guest.do("FILL", struct.pack("<QQI", VA, 8192, 0x11111111))
    assert machine.get(page, 8192) == b"\x11" * 8192


def test_more_spans_than_the_tlb_holds(machine: Machine, guest: Queue) -> None:
    count = 300
    pages = [machine.alloc(4096) for _ in range(count)]
    random.Random(5).shuffle(pages)
    for index, page in enumerate(pages):
        machine.map(1, VA + index * 4096, page, 4096)
    data = os.urandom(count * 4096)
    src = VA + (1 << 30)
    machine.map(1, src, machine.place(data), len(data))
    for _ in range(2):
        guest.do("COPY", struct.pack("<QQQ", VA, src, len(data)))
    for index, page in enumerate(pages):
        assert machine.get(page, 4096) == data[index * 4096 :][:4096]
    assert sum(size for _, size in machine.dirty) == 2 * len(data)


def test_a_hole_in_the_middle_of_a_copy(machine: Machine, guest: Queue) -> None:
    machine.map(1, VA, machine.alloc(8192), 8192)
    hole = VA + 8192
    machine.map(1, hole + 4096, machine.alloc(4096), 4096)
    fault = guest.expect_fault("FILL", struct.pack("<QQI", VA, 16384, 1))
    assert (fault["cause"], fault["addr"]) == ("UNMAPPED", hole)


def test_system_pages(machine: Machine, guest: Queue) -> None:
    machine.map(1, VA, SYSTEM_BASE + (1 << 20), 8192, READ | WRITE, hbm=False)
    guest.do("SIGNAL", _signal(VA + 4096, 0x55))
    assert struct.unpack_from("<Q", machine.system, (1 << 20) + 4096) == (0x55,)
    guest.do("WAIT", _signal(VA + 4096, 0x55))
