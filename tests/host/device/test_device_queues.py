# SPDX-License-Identifier: MIT
"""Rings, commands, fences, priorities, resets."""

import os
import struct
from collections.abc import Callable

import pytest
from asm import R, ins, pc, program
from machine import EXEC, READ, SYSTEM_BASE, WRITE, D, Machine, Queue
from vtpu_compiler import hw

FOREVER = ins("JMP", target=0)


def test_nop_signals_fence_and_interrupt(machine: Machine, queue: Queue) -> None:
    for _ in range(40):  # more than the ring has entries
        queue.do("NOP")
    machine.wait_irqs(queue.vector, 40)
    assert queue.reg("HEAD") == queue.reg("TAIL") == 40
    machine.wait_for(lambda: queue.state == "READY", "ready again")


def test_flags_choose_fence_and_interrupt(machine: Machine, queue: Queue) -> None:
    queue.push("NOP", flags=0)
    queue.push("NOP", flags=D["RING_FLAG_FENCE"])
    last = queue.push("NOP")
    queue.ring_doorbell()
    queue.wait(last)
    machine.wait_irqs(queue.vector, 1)
    writes = [entry for entry in machine.dma_log if entry[0] == "write"]
    assert len(writes) == 2
    assert machine.irqs.count(queue.vector) == 1


def test_head_advances_before_the_fence(machine: Machine, queue: Queue) -> None:
    heads = []
    machine.on_dma = lambda kind, addr, size: (
        heads.append(queue.reg("HEAD")) if kind == "write" else None
    )
    for _ in range(3):
        queue.do("NOP")
    assert heads == [1, 2, 3]


def test_copy_fill_signal_timestamp(machine: Machine, queue: Queue) -> None:
    data = os.urandom(3 << 20)
    src, dst = machine.place(data), machine.alloc(len(data) + 64)
    queue.do("COPY", struct.pack("<QQQ", dst + 3, src, len(data)))
    assert machine.get(dst + 3, len(data)) == data
    assert machine.get(dst, 3) == bytes(3)
    assert sum(size for _, size in machine.dirty) == len(data)
    queue.do("FILL", struct.pack("<QQI", dst, 4096 + 8, 0xDEADBEEF))
    assert machine.get(dst, 4096 + 8) == struct.pack("<I", 0xDEADBEEF) * 1026
    assert machine.get(dst + 4104, 8) == data[4101:4109]
    queue.do("SIGNAL", struct.pack("<QQ", dst, 1 << 63))
    assert machine.word(dst) == 1 << 63
    before = machine.reg("TIME", 8)
    queue.do("TIMESTAMP", struct.pack("<Q", dst + 8))
    assert before <= machine.word(dst + 8) <= machine.reg("TIME", 8)


@pytest.mark.parametrize("from_system", [False, True])
@pytest.mark.parametrize("to_system", [False, True])
def test_copy_between_hbm_and_system_memory(
    machine: Machine, queue: Queue, from_system: bool, to_system: bool
) -> None:
    size, at = (2 << 20) + 4096, 1 << 20
    data = os.urandom(size)
    machine.map(0, 1 << 40, SYSTEM_BASE + at, size, READ | WRITE, hbm=False)
    machine.map(0, 2 << 40, SYSTEM_BASE + at + size, size, READ | WRITE, hbm=False)
    if from_system:
        src = 1 << 40
        machine.system[at : at + size] = data
    else:
        src = machine.place(data)
    dst = 2 << 40 if to_system else machine.alloc(size)
    queue.do("COPY", struct.pack("<QQQ", dst, src, size))
    got = bytes(machine.system[at + size :][:size]) if to_system else machine.get(dst, size)
    assert got == data
    assert all(entry[2] <= 1 << 20 for entry in machine.dma_log)


def test_wait_holds_its_own_queue_alone(machine: Machine, queue: Queue) -> None:
    word = machine.alloc(64)
    other = Queue(machine, 1)
    queue.push("WAIT", struct.pack("<QQ", word, 5))
    last = queue.push("NOP")
    queue.ring_doorbell()
    for _ in range(20):
        other.do("NOP")
    other.do("SIGNAL", struct.pack("<QQ", word, 4))
    other.do("NOP")
    assert queue.fence == 0
    other.do("SIGNAL", struct.pack("<QQ", word, 5))
    queue.wait(last)


def test_wait_sees_a_word_that_the_host_writes(machine: Machine, queue: Queue) -> None:
    word = machine.alloc(64)
    fence = queue.push("WAIT", struct.pack("<QQ", word, 1))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.reg("QSTATUS") == hw.QUEUE_STATE["READY"], "polling")
    machine.put(word, struct.pack("<Q", 1))
    queue.wait(fence)


def test_reset_ends_a_held_wait(machine: Machine, queue: Queue) -> None:
    queue.push("WAIT", struct.pack("<QQ", machine.alloc(64), 1))
    queue.ring_doorbell()
    queue.restart()
    queue.do("NOP")


def test_higher_priorities_come_first(machine: Machine) -> None:
    machine.write(D["REG_SLICE_US"], 0)
    gate = machine.alloc(64)
    blocker = Queue(machine, 0, priority=2)
    queues = [Queue(machine, n, priority=p) for n, p in ((1, 0), (2, 1), (3, 2), (4, 1))]
    order: list[int] = []
    machine.on_dma = lambda kind, addr, size: (
        order.append((addr - SYSTEM_BASE) // 8192) if kind == "write" else None
    )
    # A program that runs until the host lets it: everything queues up behind it.
    spin = program(ins("LD", rd=8, addr=gate, mode="U64"), ins("BEQ", a=R(8), b=0, target=pc(0)))
    done = blocker.push("RUN", blocker.run_payload(spin), flags=1)
    blocker.ring_doorbell()
    machine.wait_for(lambda: blocker.state == "RUNNING", "the blocker runs")
    for queue in queues:
        queue.push("NOP", flags=1)
        queue.push("NOP", flags=1)
        queue.ring_doorbell()
    machine.put(gate, struct.pack("<Q", 1))
    blocker.wait(done)
    for queue in queues:
        queue.wait(2)
    assert order[:3] == [0, 3, 3] and order[3] in (2, 4)
    assert sorted(order) == [0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    "entry",
    [
        struct.pack("<BB62x", 0, 0),
        struct.pack("<BB62x", 99, 0),
        struct.pack("<BBH60x", 1, 0, 1),
        struct.pack("<BB62x", 1, 4),
        struct.pack("<BB14xQ40x", 1, 0, 1),
        struct.pack("<BB22xQ32x", 1, 0, 1),
        struct.pack("<BB22xQQQ15xB", 3, 0, 0x1000, 0x2000, 8, 1),
        struct.pack("<BB22xQQQ16x", 3, 0, 0x1000, 0x1004, 8),
        struct.pack("<BB22xQQQ16x", 3, 0, 0x1004, 0x1000, 8),
        struct.pack("<BB22xQQI20x", 4, 0, 0x1000, 6, 0),
        struct.pack("<BB22xQQ24x", 5, 0, 0x1004, 0),
        struct.pack("<BB22xQQ24x", 6, 0, 0x1001, 0),
        struct.pack("<BB22xQ32x", 7, 0, 0x1004),
        struct.pack("<BB22xQIIQI12x", 2, 0, 0x1020, 64, 0, 0, 0),
        struct.pack("<BB22xQIIQI12x", 2, 0, 0x1000, 0, 0, 0, 0),
        struct.pack("<BB22xQIIQI12x", 2, 0, 0x1000, 60, 0, 0, 0),
        struct.pack("<BB22xQIIQI12x", 2, 0, 0x1000, (1 << 20) + 64, 0, 0, 0),
        struct.pack("<BB22xQIIQI12x", 2, 0, 0x1000, 64, 64, 0, 0),
        struct.pack("<BB22xQIIQI12x", 2, 0, 0x1000, 64, 32, 0, 0),
        struct.pack("<BB22xQIIQI12x", 2, 0, 0x1000, 64, 0, 4, 1),
        struct.pack("<BB22xQIIQI12x", 2, 0, 0x1000, 64, 0, 0, 17),
    ],
)
def test_bad_commands(queue: Queue, entry: bytes) -> None:
    assert len(entry) == hw.RING_ENTRY
    fault = queue.expect_fault("NOP", raw=entry)
    assert fault["cause"] == "BAD_COMMAND"
    assert fault["entry"] == 0 and fault["pc"] == 0xFFFFFFFF
    queue.restart()
    queue.do("NOP")


def test_doorbell_ahead_of_the_ring(machine: Machine, queue: Queue) -> None:
    machine.doorbell(0, 17)
    machine.wait_irqs(0, 1)
    assert queue.fault()["cause"] == "BAD_RING"
    machine.doorbell(0, 1)
    assert machine.errors  # a faulted queue takes no doorbell
    machine.doorbell(hw.NUM_QUEUES, 0)
    assert len(machine.errors) == 2


def test_a_fault_stops_one_queue_alone(machine: Machine, queue: Queue) -> None:
    other = Queue(machine, 5)
    fault = queue.run_fault(program(ins("TRAP", code=0x12345678)))
    assert fault == {"cause": "TRAP", "access": 0, "addr": 0x12345678, "pc": 0, "entry": 0}
    other.do("NOP")
    assert machine.reg("ERR_QUEUES") == 1
    machine.write(D["REG_ERR_QUEUES"], 1)
    assert machine.reg("ERR_QUEUES") == 0
    assert queue.state == "FAULTED"
    queue.restart()
    assert queue.fault()["cause"] == "NONE"
    queue.do("NOP")


def test_the_faulting_entry_is_named(queue: Queue) -> None:
    queue.do("NOP")
    queue.do("NOP")
    assert queue.run_fault(ins("TRAP", code=1))["entry"] == 2


def test_bus_errors_are_faults(machine: Machine, queue: Queue) -> None:
    machine.map(0, 1 << 40, SYSTEM_BASE - 4096, 4096, READ | WRITE, hbm=False)
    fault = queue.expect_fault("SIGNAL", struct.pack("<QQ", 1 << 40, 1))
    assert (fault["cause"], fault["addr"], fault["access"]) == ("BUS", SYSTEM_BASE - 4096, 2)
    queue.restart()
    machine.bus_ok = False
    fault = queue.expect_fault("NOP")
    assert (fault["cause"], fault["addr"], fault["access"]) == ("BUS", SYSTEM_BASE, 1)


def test_queue_reset_stops_an_endless_program(machine: Machine, queue: Queue) -> None:
    other = Queue(machine, 1)
    queue.push("RUN", queue.run_payload(FOREVER))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    assert machine.reg("STATUS") & D["STATUS_BUSY"]
    queue.restart()
    assert queue.fence == 0 and queue.vector not in machine.irqs
    queue.do("NOP")
    other.do("NOP")


def test_device_reset_stops_an_endless_program(machine: Machine, queue: Queue) -> None:
    queue.push("RUN", queue.run_payload(FOREVER))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    machine.reset()
    machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_RESETTING"], "reset")
    assert queue.state == "DISABLED" and queue.fence == 0 and not machine.irqs
    machine.identity()
    machine.enable()
    Queue(machine).do("NOP")


def test_invalidation_waits_for_an_instruction_boundary(machine: Machine, queue: Queue) -> None:
    """A running program cannot use a mapping after TLB_PENDING has cleared."""
    page, other_page = machine.place(struct.pack("<Q", 0)), machine.place(struct.pack("<Q", 1))
    va = 1 << 40
    machine.map(0, va, page, 4096, READ)
    code = program(
        ins("LI", rd=9, value=va),
        ins("LD", rd=8, addr=R(9), mode="U64"),
        ins("BEQ", a=R(8), b=0, target=pc(1)),
    )
    fence = queue.push("RUN", queue.run_payload(code))
    queue.ring_doorbell()
    machine.wait_for(lambda: machine.reg("STAT_INSTRUCTIONS", 8) > 100, "loops")
    machine.map(0, va, other_page, 4096, READ)
    machine.write(D["REG_TLB_INVALIDATE"], 0)
    machine.wait_for(lambda: machine.reg("TLB_PENDING") == 0, "invalidated")
    queue.wait(fence)  # ends only if the new mapping is used


def test_quiesce_parks_a_running_program(machine: Machine, queue: Queue) -> None:
    queue.push("RUN", queue.run_payload(FOREVER))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    machine.quiesce()
    count = machine.reg("STAT_INSTRUCTIONS", 8)
    assert machine.reg("STAT_INSTRUCTIONS", 8) == count
    machine.resume()
    machine.wait_for(lambda: machine.reg("STAT_INSTRUCTIONS", 8) > count, "goes on")
    queue.restart()


def test_free_with_a_program_running(open_machine: Callable[..., Machine]) -> None:
    machine = open_machine()
    machine.identity()
    machine.enable()
    queue = Queue(machine)
    queue.push("RUN", queue.run_payload(FOREVER))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    # The fixture frees it: that returns.


def test_contexts_are_isolated(machine: Machine, queue: Queue) -> None:
    """The same address is different memory, and VMEM shows nothing of others."""
    secret = machine.place(b"\xaa" * 4096)
    mine, theirs = machine.alloc(4096), machine.alloc(4096)
    machine.context(1)
    code_va, args_va = 0x10000, 0
    code = program(
        ins("DMA_STORE", dst=0x20000, src=4096, rows=1, row_bytes=4096, dst_stride=0, src_stride=0),
    )
    queue.run(
        program(
            ins(
                "DMA_LOAD", dst=4096, src=secret, rows=1, row_bytes=4096, dst_stride=0, src_stride=0
            ),
            ins(
                "DMA_STORE", dst=mine, src=4096, rows=1, row_bytes=4096, dst_stride=0, src_stride=0
            ),
        )
    )
    assert machine.get(mine, 4096) == b"\xaa" * 4096
    machine.map(1, code_va, machine.place(code), 4096, READ | EXEC)
    machine.put(theirs, b"\xbb" * 4096)
    machine.map(1, 0x20000, theirs, 4096, READ | WRITE)
    other = Queue(machine, 1, context=1)
    other.do("RUN", struct.pack("<QIIQI", code_va, len(code), 0, args_va, 0))
    assert machine.get(theirs, 4096) == bytes(4096)
    fault = other.expect_fault("SIGNAL", struct.pack("<QQ", secret, 1))
    assert (fault["cause"], fault["addr"], fault["access"]) == ("UNMAPPED", secret, 2)


def test_statistics(machine: Machine, queue: Queue) -> None:
    queue.run(program(ins("NOP"), ins("NOP")))
    assert machine.reg("STAT_PROGRAMS", 8) == 1
    assert machine.reg("STAT_INSTRUCTIONS", 8) == 3
    machine.wait_for(lambda: machine.reg("STAT_BUSY_NS", 8) > 0, "the time is booked")


def test_a_fault_of_the_last_queue(machine: Machine) -> None:
    """Those from 32 on have their bits in a register of their own."""
    last = Queue(machine, hw.NUM_QUEUES - 1, log2=2)
    last.set("VECTOR", 5)
    last.restart()
    last.vector = 5
    last.push("NOP", b"\1")
    last.ring_doorbell()
    machine.wait_irqs(0, 1)
    bit = 1 << (hw.NUM_QUEUES - 1 - 32)
    assert (machine.reg("ERR_QUEUES"), machine.reg("ERR_QUEUES_HIGH")) == (0, bit)
    machine.write(D["REG_ERR_QUEUES"], 0xFFFFFFFF)
    assert machine.reg("ERR_QUEUES_HIGH") == bit
    machine.write(D["REG_ERR_QUEUES_HIGH"], bit)
    assert machine.reg("ERR_QUEUES_HIGH") == 0
