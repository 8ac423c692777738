# SPDX-License-Identifier: MIT
"""Faults on demand, one by one, and that they are used up."""

import os
import struct

import pytest
from asm import ins, pc, program
from machine import EXEC, INJECTIONS, SYSTEM_BASE, D, Machine, Queue
from vtpu_compiler import hw

IDLE = {"HANG_PC": 0xFFFFFFFF, "HBM_SLOW": 1, "TEMPERATURE": 0xFFFFFFFF}


def test_nothing_is_injected_at_first(machine: Machine) -> None:
    assert {name: machine.injected(name) for name in INJECTIONS} == {
        name: IDLE.get(name, 0) for name in INJECTIONS
    }


@pytest.mark.parametrize(
    ("fault", "value"),
    [
        ("HANG", 2),
        ("HANG_PC", 32),
        ("HANG_PC", 1 << 20),
        ("IRQ_SPURIOUS", hw.NUM_MSIX),
        ("RESET_STUCK", 2),
        ("HBM_SLOW", 0),
        ("HBM_SLOW", (1 << 20) + 1),
        ("DEAD", 2),
        ("STUCK", 3),
        ("TEMPERATURE", 1_000_001),
    ],
)
def test_bad_values_are_refused(machine: Machine, fault: str, value: int) -> None:
    assert not machine.inject(fault, value)
    assert machine.injected(fault) == IDLE.get(fault, 0)


def test_a_hang_ends_with_a_reset(machine: Machine, queue: Queue) -> None:
    other = Queue(machine, 1)
    machine.inject("HANG", 1)
    queue.push("RUN", queue.run_payload(program()))
    queue.ring_doorbell()
    machine.wait_for(lambda: machine.injected("HANG") == 0, "hanging")
    other.do("NOP")
    assert queue.state in ("RUNNING", "PREEMPTED")
    assert machine.reg("STAT_PROGRAMS", 8) == 0 and queue.fence == 0
    queue.restart()
    queue.run(program())


def test_a_hang_at_a_pc(machine: Machine, queue: Queue) -> None:
    """Instructions before it are done, the one at it is not."""
    out = machine.alloc(4096)
    code = program(ins("ST", addr=out, value=1), ins("ST", addr=out + 8, value=1))
    machine.inject("HANG_PC", pc(1))
    queue.push("RUN", queue.run_payload(code))
    queue.ring_doorbell()
    machine.wait_for(lambda: machine.injected("HANG_PC") == IDLE["HANG_PC"], "hanging")
    assert (machine.word(out), machine.word(out + 8)) == (1, 0)
    assert machine.reg("STAT_INSTRUCTIONS", 8) == 1 and queue.fence == 0
    assert f"program at pc {pc(1):#x}" in machine.describe()
    queue.restart()
    queue.run(code)
    assert machine.word(out + 8) == 1


def test_a_device_reset_disarms_hangs(machine: Machine) -> None:
    machine.inject("HANG", 1)
    machine.inject("HANG_PC", 0)
    machine.inject("IRQ_LOSS", 1)
    machine.write(D["REG_CTRL"], D["CTRL_RESET"])
    machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_RESETTING"], "reset")
    assert machine.injected("HANG") == 0 and machine.injected("HANG_PC") == IDLE["HANG_PC"]
    assert machine.injected("IRQ_LOSS") == 1


def test_a_hang_at_a_pc_finds_a_running_program(machine: Machine, queue: Queue) -> None:
    queue.push("RUN", queue.run_payload(ins("NOP") + ins("JMP", target=0)))
    queue.ring_doorbell()
    machine.wait_for(lambda: machine.reg("STAT_INSTRUCTIONS", 8) > 10, "loops")
    machine.inject("HANG_PC", pc(1))
    machine.wait_for(lambda: machine.injected("HANG_PC") == IDLE["HANG_PC"], "hanging")
    queue.restart()


def test_lost_duplicate_and_spurious_interrupts(machine: Machine, queue: Queue) -> None:
    machine.inject("IRQ_LOSS", 2)
    machine.inject("IRQ_DUPLICATE", 1)
    for _ in range(4):  # lost, lost, twice, once
        queue.do("NOP")
    machine.wait_irqs(queue.vector, 3)
    machine.inject("IRQ_SPURIOUS", 9)
    machine.wait_irqs(9, 1)
    assert machine.irqs == [queue.vector] * 3 + [9]
    assert machine.injected("IRQ_LOSS") == machine.injected("IRQ_DUPLICATE") == 0


def test_single_bit_errors_are_corrected_and_counted(machine: Machine, queue: Queue) -> None:
    machine.inject("ECC_SINGLE", 3)
    data = os.urandom(64)
    src, dst = machine.place(data), machine.alloc(64)
    for _ in range(4):
        queue.do("COPY", struct.pack("<QQQ", dst, src, 64))
    assert machine.get(dst, 64) == data
    assert machine.reg("STAT_ECC_CORRECTED", 8) == 3 and machine.injected("ECC_SINGLE") == 0
    machine.write(D["REG_CTRL"], D["CTRL_RESET"])
    machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_RESETTING"], "reset")
    assert machine.reg("STAT_ECC_CORRECTED", 8) == 0


def test_a_double_bit_error_is_a_fault_of_the_reader(machine: Machine, queue: Queue) -> None:
    src, dst = machine.alloc(4096), machine.alloc(4096)
    payload = struct.pack("<QQQ", dst, src + 8, 64)
    machine.inject("ECC_DOUBLE", 1)
    queue.do("SIGNAL", struct.pack("<QQ", dst, 1))  # a write is no read
    fault = queue.expect_fault("COPY", payload)
    assert (fault["cause"], fault["addr"], fault["access"]) == ("ECC", src + 8, 1)
    queue.restart()
    queue.do("COPY", payload)


def test_a_double_bit_error_in_a_program_has_a_pc(machine: Machine, queue: Queue) -> None:
    """The program lies in system memory: the weights are its first read of HBM."""
    weights, va, at = machine.alloc(4096), 1 << 40, 1 << 20
    shape = {"m": 1, "n": 16, "k": 32, "dst_stride": 64, "src_stride": 128}
    matmul = ins("MATMUL", dst=0, src=4096, weight=weights, fmt="Q8_0", **shape)
    code = program(ins("NOP"), matmul)
    machine.system[at : at + len(code)] = code
    machine.map(0, va, SYSTEM_BASE + at, 4096, EXEC, hbm=False)
    payload = struct.pack("<QIIQI", va, len(code), 0, 0, 0)
    machine.inject("ECC_DOUBLE", 1)
    fault = queue.expect_fault("RUN", payload)
    assert fault == {"cause": "ECC", "access": 1, "addr": weights, "pc": pc(1), "entry": 0}
    queue.restart()
    queue.do("RUN", payload)


@pytest.mark.parametrize(("nth", "access", "of"), [(1, 1, "ring"), (2, 2, "fence")])
def test_the_nth_transfer_fails(
    machine: Machine, queue: Queue, nth: int, access: int, of: str
) -> None:
    address = {"ring": queue.ring, "fence": queue.fence_at}[of] + SYSTEM_BASE
    machine.inject("DMA_ERROR", nth)
    fault = queue.expect_fault("NOP")
    assert (fault["cause"], fault["access"], fault["addr"]) == ("BUS", access, address)
    assert queue.fence == 0 and machine.injected("DMA_ERROR") == 0
    queue.restart()
    queue.do("NOP")


def test_a_corrupted_completion(machine: Machine, queue: Queue) -> None:
    machine.inject("FENCE_CORRUPT", 0xFF00)
    queue.push("NOP", flags=0)  # has no fence to corrupt
    for expected in (2 ^ 0xFF00, 3):
        queue.push("NOP")
        queue.ring_doorbell()
        machine.wait_for(lambda expected=expected: queue.fence == expected, "the fence")


def test_a_stuck_reset_ends_when_it_is_let_go(machine: Machine, queue: Queue) -> None:
    machine.inject("RESET_STUCK", 1)
    count = machine.reg("RESET_COUNT")
    queue.push("RUN", queue.run_payload(ins("JMP", target=0)))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    machine.write(D["REG_CTRL"], D["CTRL_RESET"])
    machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_BUSY"], "work abandoned")
    # A self-test interrupt passes through the thread that would end the reset.
    machine.write(D["REG_TEST_IRQ"], 9)
    machine.wait_irqs(9, 1)
    assert machine.reg("STATUS") & D["STATUS_RESETTING"]
    assert machine.reg("RESET_COUNT") == count
    machine.inject("RESET_STUCK", 0)
    machine.wait_for(lambda: machine.reg("RESET_COUNT") == count + 1, "reset")
    machine.identity()
    machine.enable()
    Queue(machine).run(program())


def test_a_slow_memory_holds_no_lock(machine: Machine, queue: Queue) -> None:
    """While an instruction is slowed, everything else is served; the data is right."""
    machine.inject("HBM_SLOW", 1 << 20)
    src, out = machine.place(b"\x5a" * (1 << 20)), machine.alloc(1 << 20)
    rows = {"rows": 4, "row_bytes": 1 << 18, "dst_stride": 1 << 18, "src_stride": 1 << 18}
    code = program(
        ins("DMA_LOAD", dst=0, src=src, **rows), ins("DMA_STORE", dst=out, src=0, **rows)
    )
    fence = queue.push("RUN", queue.run_payload(code))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    for vector in (9, 10):
        machine.write(D["REG_TEST_IRQ"], vector)
        machine.wait_irqs(vector, 1)
        machine.write(D["REG_TLB_INVALIDATE"], 0)
        machine.wait_for(lambda: machine.reg("TLB_PENDING") == 0, "invalidated")
    assert queue.state == "RUNNING" and machine.reg("STAT_INSTRUCTIONS", 8) == 0
    machine.inject("HBM_SLOW", 1)
    queue.wait(fence)
    assert machine.get(out, 1 << 20) == b"\x5a" * (1 << 20)


def test_a_reset_ends_a_slow_instruction(machine: Machine, queue: Queue) -> None:
    machine.inject("HBM_SLOW", 1 << 20)
    at = machine.alloc(4 << 20)
    queue.push("FILL", struct.pack("<QQI", at, 4 << 20, 7))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    queue.restart()
    assert queue.fence == 0
    machine.inject("HBM_SLOW", 1)
    queue.do("NOP")


def test_a_dead_device(machine: Machine, queue: Queue) -> None:
    queue.push("RUN", queue.run_payload(ins("JMP", target=0)))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    count = machine.reg("RESET_COUNT")
    machine.inject("DEAD", 1)
    assert machine.reg("ID") == 0xFFFFFFFF
    assert machine.reg("HBM_SIZE", 8) == (1 << 64) - 1
    machine.write(D["REG_TEST_SCRATCH"], 5)
    machine.enable()
    machine.write(D["REG_TEST_IRQ"], 9)
    queue.ring_doorbell()
    machine.inject("DEAD", 0)
    machine.wait_for(lambda: machine.reg("RESET_COUNT") == count + 1, "back")
    assert machine.reg("ID") == hw.MAGIC
    assert machine.reg("TEST_SCRATCH") == machine.reg("STATUS") == 0
    assert queue.state == "DISABLED" and queue.fence == 0 and not machine.irqs
    machine.identity()
    machine.enable()
    Queue(machine).do("NOP")
