# SPDX-License-Identifier: MIT
"""The race checker through PCIe: the property, the fault registers, the log and the monitor."""

from __future__ import annotations

from collections.abc import Callable

from asm import ins, program
from qtest import EXEC, READ, WRITE, AddressSpace, Queue, Vtpu

TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000


def _race(vtpu: Vtpu) -> tuple[Queue, bytes]:
    """A load and a sum of what it brings, without a wait."""
    space, queue = AddressSpace(vtpu, 0, TABLES), Queue(vtpu, 0)
    data = space.map(1, DATA, READ | WRITE)
    row = {"rows": 1, "dst_stride": 0}
    code = program(
        ins("DMA_LOAD", dst=0, src=data, row_bytes=64, src_stride=0, **row),
        ins("V_ADD", dst=64, a=0, b=0, width=16, a_stride=0, b_stride=0, **row),
    )
    vtpu.hbm_write(CODE, code)
    return queue, queue.run(space.map(0, CODE, READ | EXEC), len(code))


def test_a_race_is_a_fault(open_vtpu: Callable[..., Vtpu]) -> None:
    vtpu = open_vtpu(check_races="on")
    vtpu.enable()
    vtpu.qemu.trace("vtpu_race")
    queue, payload = _race(vtpu)
    assert queue.expect_fault("RUN", payload) == "RACE_VMEM"
    assert (queue.reg("FAULT_PC"), queue.reg("FAULT_OTHER_PC")) == (64, 0)
    (event,) = vtpu.qemu.traced("vtpu_race")
    assert event.endswith(" queue 0 pc 0x40 races with pc 0x0")
    assert "race: V_ADD at 0x40 reads VMEM 0x0 to 0x3f" in vtpu.qemu.log.read_text()
    assert "pc 0x40 entry 0 with pc 0x0" in vtpu.property("state")


def test_nobody_looks_by_default(vtpu: Vtpu) -> None:
    queue, payload = _race(vtpu)
    queue.do("RUN", payload)
