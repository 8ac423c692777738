# SPDX-License-Identifier: MIT
"""Queues, programs and faults through PCIe."""

from __future__ import annotations

import os
import struct

import pytest
from asm import R, ins, program
from qtest import DOORBELLS, EXEC, RAM, READ, REGS, WRITE, AddressSpace, Queue, Vtpu, wait_for

TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000
FOREVER = ins("JMP", target=0)


@pytest.fixture
def space(vtpu: Vtpu) -> AddressSpace:
    return AddressSpace(vtpu, 0, TABLES)


def _code(vtpu: Vtpu, space: AddressSpace, code: bytes) -> int:
    vtpu.hbm_write(CODE, code)
    return space.map(0, CODE, READ | EXEC)


def test_nop_fence_interrupt(vtpu: Vtpu) -> None:
    queue = Queue(vtpu, 0)
    for _ in range(40):
        queue.do("NOP")
    assert queue.reg("HEAD") == 40


def test_copy_and_fill(vtpu: Vtpu, space: AddressSpace) -> None:
    queue = Queue(vtpu, 0)
    data = os.urandom(4096)
    vtpu.qemu.write(RAM + 0x100000, data)
    host = space.map(1, RAM + 0x100000, READ | WRITE, hbm=False)
    hbm = space.map(2, DATA, READ | WRITE)
    queue.do("COPY", struct.pack("<QQQ", hbm, host, 4096))
    assert vtpu.hbm_read(DATA, 4096) == data
    queue.do("FILL", struct.pack("<QQI", host + 16, 32, 0x01020304))
    assert vtpu.qemu.read(RAM + 0x100000, 64) == data[:16] + b"\4\3\2\1" * 8 + data[48:64]


def test_run_with_arguments(vtpu: Vtpu, space: AddressSpace) -> None:
    code = program(
        ins("MUL", rd=R(9), a=R(8), b=3),
        ins("ST", addr=R(10), value=R(9), mode="U64"),
    )
    code_va, out = _code(vtpu, space, code), space.map(1, DATA, READ | WRITE)
    args = space.map(2, DATA + 4096, READ)
    vtpu.hbm_write(DATA + 4096, struct.pack("<3Q", 14, 0, out))
    queue = Queue(vtpu, 0)
    queue.do("RUN", queue.run(code_va, len(code), args, 3))
    assert vtpu.hbm_read(DATA, 8) == struct.pack("<Q", 42)
    assert vtpu.reg("STAT_PROGRAMS", 8) == 1


def test_faults_are_recorded(vtpu: Vtpu, space: AddressSpace) -> None:
    read_only = space.map(1, DATA, READ)
    past_hbm = space.raw(2, (1 << 40) | 0x1F)
    unmapped = space.BASE + 5 * 4096
    cases = [
        (unmapped, "UNMAPPED", unmapped),
        (1 << 50, "UNMAPPED", 1 << 50),
        (read_only + 8, "PROTECTION", read_only + 8),
        (past_hbm, "BAD_PAGE_TABLE", past_hbm),
    ]
    for addr, cause, expected in cases:
        queue = Queue(vtpu, 2)
        assert queue.expect_fault("SIGNAL", struct.pack("<QQ", addr, 1)) == cause
        assert queue.reg("FAULT_ADDR", 8) == expected
        assert queue.reg("FAULT_ACCESS") == 2
        assert vtpu.reg("ERR_QUEUES") == 4
        vtpu.set("ERR_QUEUES", 4)
        queue.reset()


def test_illegal_instructions_name_their_pc(vtpu: Vtpu, space: AddressSpace) -> None:
    stray = bytearray(ins("NOP"))
    stray[40] = 1
    for bad in (bytes(64), bytes(stray)):
        code = ins("NOP") + bad
        queue = Queue(vtpu, 0)
        va = _code(vtpu, space, code)
        assert queue.expect_fault("RUN", queue.run(va, len(code))) == "ILLEGAL_INSTRUCTION"
        assert queue.reg("FAULT_PC") == 64
        queue.reset()


def test_reserved_command_bits(vtpu: Vtpu) -> None:
    queue = Queue(vtpu, 0)
    assert queue.expect_fault("NOP", b"\1") == "BAD_COMMAND"


def test_code_needs_the_execute_right(vtpu: Vtpu, space: AddressSpace) -> None:
    vtpu.hbm_write(DATA, program())
    va = space.map(1, DATA, READ | WRITE)
    queue = Queue(vtpu, 0)
    assert queue.expect_fault("RUN", queue.run(va, 64)) == "PROTECTION"
    assert queue.reg("FAULT_ACCESS") == 3


def test_disabled_context(vtpu: Vtpu) -> None:
    queue = Queue(vtpu, 0, context=7)
    assert queue.expect_fault("SIGNAL", struct.pack("<QQ", 0, 0)) == "BAD_CONTEXT"


def test_doorbell_ahead_of_the_ring(vtpu: Vtpu) -> None:
    queue = Queue(vtpu, 0)
    vtpu.qemu.store(DOORBELLS, 17, 4)
    vtpu.wait_interrupt(0)
    assert queue.cause == "BAD_RING"


@pytest.mark.parametrize("target", [REGS + 0x60, DOORBELLS], ids=["registers", "doorbells"])
def test_no_dma_into_own_registers(vtpu: Vtpu, space: AddressSpace, target: int) -> None:
    page = target & ~4095
    va = space.map(1, page, READ | WRITE, hbm=False) + target - page
    queue = Queue(vtpu, 0)
    assert queue.expect_fault("SIGNAL", struct.pack("<QQ", va, 0x1234)) == "BUS"
    assert vtpu.reg("TEST_SCRATCH") == 0
    queue.reset()
    # The ring itself, and the fence.
    ring = Queue(vtpu, 1, ring=page)
    assert ring.expect_fault("NOP") == "BUS"
    fence = Queue(vtpu, 3, fence=target)
    assert fence.expect_fault("NOP") == "BUS"
    assert vtpu.reg("TEST_SCRATCH") == 0


def test_reset_while_a_program_runs(vtpu: Vtpu, space: AddressSpace) -> None:
    """After a function-level reset, nothing of before it is written."""
    queue = Queue(vtpu, 0)
    va = _code(vtpu, space, FOREVER)
    queue.push("RUN", queue.run(va, 64))
    wait_for(lambda: queue.state == "RUNNING", "running")
    vtpu.pci.write(vtpu.pci.capability(0x10) + 8, 0x8000, 2)
    vtpu.setup()
    vtpu.wait_reset()
    vtpu.enable()
    AddressSpace(vtpu, 0, TABLES)
    Queue(vtpu, 1).do("NOP")
    assert vtpu.qemu.load(queue.fence_at, 8) == 0 and not vtpu.interrupted(queue.vector)


def test_two_contexts_are_isolated(vtpu: Vtpu) -> None:
    spaces = [AddressSpace(vtpu, c, TABLES + c * 0x10000) for c in (0, 1)]
    queues = [Queue(vtpu, c, context=c) for c in (0, 1)]
    for context, (space, queue) in enumerate(zip(spaces, queues, strict=True)):
        va = space.map(1, DATA + context * 4096, READ | WRITE)
        queue.do("SIGNAL", struct.pack("<QQ", va, 100 + context))
    assert struct.unpack("<Q", vtpu.hbm_read(DATA, 8)) == (100,)
    assert struct.unpack("<Q", vtpu.hbm_read(DATA + 4096, 8)) == (101,)
    only_first = spaces[0].map(2, DATA + 8192, READ | WRITE)
    cause = queues[1].expect_fault("SIGNAL", struct.pack("<QQ", only_first, 1))
    assert cause == "UNMAPPED"
    queues[0].do("SIGNAL", struct.pack("<QQ", only_first, 1))


def test_an_unmapped_page_is_gone_after_invalidation(vtpu: Vtpu, space: AddressSpace) -> None:
    queue = Queue(vtpu, 0)
    va = space.map(1, DATA, READ | WRITE)
    queue.do("SIGNAL", struct.pack("<QQ", va, 1))
    space.raw(1, 0)
    vtpu.set("TLB_INVALIDATE", 0)
    wait_for(lambda: vtpu.reg("TLB_PENDING") == 0, "invalidated")
    assert queue.expect_fault("SIGNAL", struct.pack("<QQ", va, 2)) == "UNMAPPED"
    assert vtpu.hbm_read(DATA, 8) == struct.pack("<Q", 1)


def test_surprise_removal(vtpu: Vtpu, space: AddressSpace) -> None:
    """The device leaves with a program running; QEMU goes on."""
    queue = Queue(vtpu, 0)
    va = _code(vtpu, space, FOREVER)
    queue.push("RUN", queue.run(va, 64))
    wait_for(lambda: queue.state == "RUNNING", "running")
    vtpu.qemu.qmp("device_del", id="tpu")
    vtpu.cut_power()  # what the slot's guest does when it is asked
    assert vtpu.qemu.qmp("query-status")["running"]
