# SPDX-License-Identifier: MIT
"""Preemption, the watchdog and resets of programs set aside, through PCIe."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from asm import R, ins, pc, program
from qtest import EXEC, READ, WRITE, AddressSpace, D, Queue, Vtpu, wait_for

TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000
FOREVER = ins("JMP", target=0)
LOW, HIGH = 0, 2


class Programs:
    """An address space with a word to wait for, and room for programs."""

    def __init__(self, vtpu: Vtpu) -> None:
        self.vtpu, self.used = vtpu, 1
        self.space = AddressSpace(vtpu, 0, TABLES)
        self.word = self.space.map(0, DATA, READ | WRITE)

    def start(self, queue: Queue, code: bytes) -> int:
        """Without waiting for it."""
        self.vtpu.hbm_write(CODE + self.used * 4096, code)
        va = self.space.map(self.used, CODE + self.used * 4096, READ | EXEC)
        self.used += 1
        return queue.push("RUN", queue.run(va, len(code)))

    def waits(self) -> bytes:
        return program(
            ins("LI", rd=9, value=self.word),
            ins("LD", rd=8, addr=R(9), mode="U64"),
            ins("BEQ", a=R(8), b=0, target=pc(1)),
        )

    def sets(self) -> bytes:
        return program(ins("LI", rd=9, value=self.word), ins("ST", addr=R(9), value=1, mode="U64"))


def _queue(vtpu: Vtpu, number: int, priority: int = 1) -> Queue:
    queue = Queue(vtpu, number)
    queue.set("PRIORITY", priority)
    return queue


def _has_begun(queue: Queue) -> None:
    wait_for(lambda: queue.reg("INSTRUCTIONS", 8) > 0, "it has begun")


@pytest.mark.parametrize("seed", ["0", "5"])
def test_a_program_waits_for_another_queue(open_vtpu: Callable[..., Vtpu], seed: str) -> None:
    vtpu = open_vtpu(schedule_seed=seed)
    vtpu.enable()
    for event in ("preempted", "resumed"):
        vtpu.qemu.trace(f"vtpu_command_{event}")
    programs = Programs(vtpu)
    waiter, setter = _queue(vtpu, 0, HIGH), _queue(vtpu, 1, LOW)
    programs.start(waiter, programs.waits())
    _has_begun(waiter)
    programs.start(setter, programs.sets())
    vtpu.wait_interrupt(waiter.vector)
    vtpu.wait_interrupt(setter.vector)
    assert waiter.fence == setter.fence == 1
    kinds = {line.split()[0] for line in vtpu.qemu.traced("vtpu_command")}
    assert kinds == {"vtpu_command_preempted", "vtpu_command_resumed"}


def test_transfers_do_not_lengthen_a_slice(vtpu: Vtpu) -> None:
    """A program that stores to system memory all the time gives way as any other."""
    vtpu.set("SLICE_US", 1_000_000)  # longer than a host makes a transfer wait
    programs = Programs(vtpu)
    word = programs.space.map(300, vtpu.ram + 0x10_0000, WRITE, hbm=False)
    storing, other = _queue(vtpu, 0), _queue(vtpu, 1)
    programs.start(
        storing, program(ins("ST", addr=word, value=1, mode="U64"), ins("JMP", target=0))
    )
    _has_begun(storing)
    programs.start(other, program(ins("NOP")))
    vtpu.wait_interrupt(other.vector)
    assert storing.reg("PREEMPTIONS") > 0
    storing.reset()


def test_the_state_says_where_a_program_is(vtpu: Vtpu) -> None:
    vtpu.set("SLICE_US", 0)
    programs = Programs(vtpu)
    low, high = _queue(vtpu, 0, LOW), _queue(vtpu, 1, HIGH)
    programs.start(low, program(ins("NOP"), ins("JMP", target=pc(1))))
    _has_begun(low)
    programs.start(high, FOREVER)
    wait_for(lambda: low.state == "PREEMPTED", "set aside")
    assert low.reg("PC") in (0, pc(1)) and high.reg("PC") == 0
    words = vtpu.property("state")
    assert "queue 0: PREEMPTED" in words and f"program at pc {low.reg('PC'):#x}" in words
    high.reset()
    wait_for(lambda: low.state == "RUNNING", "goes on")
    low.reset()


def test_the_watchdog_raises_the_error_vector(vtpu: Vtpu) -> None:
    programs = Programs(vtpu)
    queue, other = _queue(vtpu, 0), _queue(vtpu, 1)
    queue.set("WATCHDOG_US", 20_000)
    programs.start(queue, program(ins("NOP"), ins("JMP", target=pc(1))))
    other.do("NOP")
    vtpu.wait_interrupt(0)
    assert vtpu.reg("ERR_QUEUES") == 1 and queue.state == "FAULTED"
    assert queue.cause == "WATCHDOG" and queue.reg("FAULT_PC") in (0, pc(1))
    assert queue.fence == 0 and not vtpu.interrupted(queue.vector)
    other.do("NOP")


def test_a_function_level_reset_with_programs_set_aside(vtpu: Vtpu) -> None:
    vtpu.set("SLICE_US", 100)
    programs = Programs(vtpu)
    queues = [_queue(vtpu, n, n % 3) for n in range(4)]
    for queue in queues:
        programs.start(queue, FOREVER)
    wait_for(lambda: sum(q.state == "PREEMPTED" for q in queues) >= 2, "set aside")
    vtpu.pci.write(vtpu.pci.capability(0x10) + 8, 0x8000, 2)
    vtpu.setup()
    vtpu.wait_reset()
    assert all(queue.state == "DISABLED" for queue in queues)
    assert vtpu.reg("SLICE_US") == D["QUEUE_SLICE_US"]
    vtpu.enable()
    Programs(vtpu)
    Queue(vtpu, 5).do("NOP")
    assert all(struct.unpack("<Q", vtpu.qemu.read(q.fence_at, 8)) == (0,) for q in queues)
