# SPDX-License-Identifier: MIT
"""Power states as the machine sees them: asleep it stands still, and loses nothing."""

import struct
from collections.abc import Callable

import pytest
from asm import R, ins
from machine import D, Machine, Queue


def _counting(out: int) -> bytes:
    """Stores a number that grows for ever."""
    add = ins("ADD", rd=R(1), a=R(1), b=1)
    return add + ins("ST", addr=out, value=R(1), mode="U64") + ins("JMP", target=0)


class Clock:
    """Another machine at work: what it does meanwhile, this one would have done."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.identity()
        machine.enable()
        queue = Queue(machine)
        queue.push("RUN", queue.run_payload(_counting(machine.alloc(4096))))
        queue.ring_doorbell()

    def wait(self, instructions: int = 20000) -> None:
        end = self.machine.reg("STAT_INSTRUCTIONS", 8) + instructions
        self.machine.wait_for(lambda: self.machine.reg("STAT_INSTRUCTIONS", 8) > end, "time passed")


@pytest.fixture
def clock(open_machine: Callable[..., Machine]) -> Clock:
    return Clock(open_machine(hbm_bytes=16 << 20, threads=1))


def test_a_program_stands_still_and_goes_on(machine: Machine, queue: Queue, clock: Clock) -> None:
    out = machine.alloc(4096)
    queue.push("RUN", queue.run_payload(_counting(out)))
    queue.ring_doorbell()
    machine.wait_for(lambda: machine.word(out) > 0, "counting")
    machine.sleep(True)
    machine.quiesce()  # comes back when the program stands at an instruction
    machine.resume()
    assert machine.describe().startswith("device: asleep, 0 resets")
    seen, executed = machine.word(out), machine.reg("STAT_INSTRUCTIONS", 8)
    clock.wait()
    assert machine.reg("STAT_INSTRUCTIONS", 8) == executed and machine.word(out) == seen
    machine.sleep(False)
    machine.wait_for(lambda: machine.word(out) > seen, "counting again")
    assert queue.state == "RUNNING"


def test_no_command_begins(machine: Machine, queue: Queue, clock: Clock) -> None:
    machine.sleep(True)
    machine.quiesce()
    machine.resume()
    fence = queue.push("NOP")
    queue.ring_doorbell()
    machine.write(D["REG_TEST_IRQ"], 9)
    clock.wait()
    assert queue.reg("HEAD") == 0 and queue.fence == 0 and not machine.dma_log and not machine.irqs
    machine.sleep(False)
    queue.wait(fence)
    machine.wait_irqs(9, 1)


def test_a_reset_wakes(machine: Machine, queue: Queue) -> None:
    out = machine.alloc(4096)
    queue.push("RUN", queue.run_payload(_counting(out)))
    queue.ring_doorbell()
    machine.wait_for(lambda: machine.word(out) > 0, "counting")
    machine.sleep(True)
    machine.quiesce()
    machine.resume()
    machine.reset()
    machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_RESETTING"], "reset")
    machine.enable()
    machine.identity()
    Queue(machine, 1).do("NOP")


def test_errors_are_reported_beside_their_fault(machine: Machine, queue: Queue) -> None:
    source, target = machine.alloc(4096), machine.alloc(4096)
    copy = struct.pack("<QQQ", target, source, 64)
    machine.inject("ECC_SINGLE", 1)
    queue.do("COPY", copy)
    assert machine.hardware_errors == ["CORRECTED"]
    machine.inject("ECC_DOUBLE", 1)
    assert queue.expect_fault("COPY", copy)["cause"] == "ECC"
    assert machine.hardware_errors == ["CORRECTED", "UNCORRECTED"]
    queue.restart()
    machine.inject("DMA_ERROR", 1)  # the ring is read
    assert queue.expect_fault("NOP")["cause"] == "BUS"
    queue.restart()
    machine.inject("DMA_ERROR", 2)  # the fence is written: nothing comes back
    assert queue.expect_fault("NOP")["cause"] == "BUS"
    assert machine.hardware_errors == ["CORRECTED", "UNCORRECTED", "POISONED"]
