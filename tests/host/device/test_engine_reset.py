# SPDX-License-Identifier: MIT
"""CTRL.ENGINE_RESET: what is in progress ends, all else stays; and queues that do not stop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from asm import ins, program
from machine import D, Machine, Queue

FOREVER = ins("NOP") + ins("JMP", target=0)


def begin(machine: Machine, queue: Queue, code: bytes = FOREVER) -> None:
    queue.push("RUN", queue.run_payload(code))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")


def is_resetting(machine: Machine) -> bool:
    return bool(machine.reg("STATUS") & D["STATUS_RESETTING"])


def engine_reset(machine: Machine) -> None:
    machine.write(D["REG_CTRL"], D["CTRL_ENGINE_RESET"])
    machine.wait_for(lambda: not is_resetting(machine), "engine reset")


def pass_through(machine: Machine) -> None:
    """Returns after the command thread has attended to everything asked for.

    The second interrupt comes after what followed the first one.
    """
    for _ in range(2):
        seen = machine.irqs.count(9)
        machine.write(D["REG_TEST_IRQ"], 9)
        machine.wait_irqs(9, seen + 1)


def test_capability(machine: Machine) -> None:
    assert machine.reg("CAPS") & D["CAPS_ENGINE_RESET"]


def test_it_ends_what_is_in_progress_alone(machine: Machine) -> None:
    """Running and set aside: disabled. Waiting in the ring: kept, with its head."""
    machine.write(D["REG_SLICE_US"], 0)
    aside, running, waiting, idle = (Queue(machine, n) for n in range(4))
    waiting.do("NOP")
    running.set("PRIORITY", 2)
    machine.write(D["REG_TEST_SCRATCH"], 77)
    root, resets = machine.reg("CTX_ROOT", 8), machine.reg("RESET_COUNT")
    begin(machine, aside)
    begin(machine, running)
    assert aside.state == "PREEMPTED"
    waiting.push("NOP")
    waiting.ring_doorbell()

    engine_reset(machine)
    assert [q.state for q in (aside, running, waiting, idle)] == [
        "DISABLED",
        "DISABLED",
        "READY",
        "READY",
    ]
    assert not machine.reg("STATUS") & (D["STATUS_READY"] | D["STATUS_BUSY"])
    assert (waiting.reg("HEAD"), waiting.reg("TAIL"), waiting.fence) == (1, 2, 1)
    assert aside.reg("RING_BASE", 8) and aside.reg("RING_LOG2") and aside.fence == 0
    assert machine.reg("TEST_SCRATCH") == 77
    assert (machine.reg("CTX_ROOT", 8), machine.reg("RESET_COUNT")) == (root, resets)

    machine.enable()
    waiting.wait(2)
    idle.do("NOP")
    aside.restart()
    aside.run(program())


def test_of_idle_engines(machine: Machine, queue: Queue) -> None:
    """It is over at once, and takes READY away alone."""
    queue.do("NOP")
    engine_reset(machine)
    assert queue.state == "READY"
    queue.push("NOP")
    queue.ring_doorbell()
    pass_through(machine)
    assert queue.fence == 1
    machine.enable()
    queue.wait(2)


def test_a_held_wait_is_held_afterwards(machine: Machine, queue: Queue) -> None:
    word = machine.alloc(8)
    queue.push("WAIT", word.to_bytes(8, "little") + (5).to_bytes(8, "little"))
    queue.ring_doorbell()
    pass_through(machine)
    engine_reset(machine)
    assert queue.state == "READY" and queue.reg("HEAD") == 0
    machine.enable()
    Queue(machine, 1).do("SIGNAL", word.to_bytes(8, "little") + (5).to_bytes(8, "little"))
    queue.wait(1)


def test_a_faulted_queue_stays_so(machine: Machine, queue: Queue) -> None:
    queue.run_fault(program(ins("TRAP", code=3)))
    fault = queue.fault()
    engine_reset(machine)
    assert queue.state == "FAULTED" and queue.fault() == fault


def test_a_device_reset_is_more(machine: Machine, queue: Queue) -> None:
    begin(machine, queue)
    machine.inject("RESET_STUCK", 1)
    machine.write(D["REG_CTRL"], D["CTRL_RESET"])
    machine.write(D["REG_CTRL"], D["CTRL_ENGINE_RESET"])
    pass_through(machine)
    assert is_resetting(machine)
    machine.inject("RESET_STUCK", 0)
    machine.wait_for(lambda: not is_resetting(machine), "reset")
    assert machine.reg("CTX_ROOT", 8) == 0


def test_a_stuck_queue_ends_with_an_engine_reset(machine: Machine, queue: Queue) -> None:
    """Until then nobody else is served, whatever the priority."""
    other = Queue(machine, 1)
    other.set("PRIORITY", 2)
    machine.inject("STUCK", 1)
    begin(machine, queue)
    queue.set("CTRL", D["Q_CTRL_RESET"])
    other.push("NOP")
    other.ring_doorbell()
    pass_through(machine)
    assert queue.state == "RESETTING" and other.fence == 0
    engine_reset(machine)
    assert queue.state == "DISABLED" and machine.injected("STUCK") == 0
    machine.enable()
    other.wait(1)
    queue.restart()
    queue.run(program())


def test_stuck_engines_end_with_a_device_reset(machine: Machine, queue: Queue) -> None:
    machine.inject("STUCK", 2)
    begin(machine, queue)
    queue.set("CTRL", D["Q_CTRL_RESET"])
    machine.write(D["REG_CTRL"], D["CTRL_ENGINE_RESET"])
    pass_through(machine)
    assert is_resetting(machine) and queue.state == "RESETTING"
    machine.write(D["REG_CTRL"], D["CTRL_RESET"])
    machine.wait_for(lambda: not is_resetting(machine), "reset")
    assert queue.state == "DISABLED" and machine.injected("STUCK") == 0
    assert not machine.reg("STATUS")


@pytest.mark.parametrize("by", ["queue", "engines"])
def test_what_is_stuck_can_be_let_go(machine: Machine, queue: Queue, by: str) -> None:
    machine.inject("STUCK", 2)
    begin(machine, queue)
    if by == "queue":
        queue.set("CTRL", D["Q_CTRL_RESET"])
    else:
        machine.write(D["REG_CTRL"], D["CTRL_ENGINE_RESET"])
    pass_through(machine)
    assert queue.state == "RESETTING"
    machine.inject("STUCK", 0)
    machine.wait_for(lambda: queue.state == "DISABLED" and not is_resetting(machine), "let go")


def test_the_watchdog_does_not_end_what_is_stuck(machine: Machine, queue: Queue) -> None:
    machine.inject("STUCK", 1)
    begin(machine, queue)
    queue.set("CTRL", D["Q_CTRL_RESET"])
    pass_through(machine)
    queue.set("WATCHDOG_US", 1)
    at = machine.reg("TIME", 8)
    machine.wait_for(lambda: machine.reg("TIME", 8) > at + 20_000_000, "long over its limit")
    pass_through(machine)
    assert queue.state == "RESETTING"
    engine_reset(machine)
    assert queue.state == "DISABLED" and queue.fault()["cause"] == "NONE"


@pytest.mark.parametrize("pending", [False, True])
def test_saved_with_an_engine_reset(
    machine: Machine, open_machine: Callable[..., Machine], pending: bool
) -> None:
    """One that is stuck goes on where the machine does; what it has ended stays ended."""
    queue = Queue(machine)
    if pending:
        machine.inject("STUCK", 2)
    begin(machine, queue)
    machine.write(D["REG_CTRL"], D["CTRL_ENGINE_RESET"])
    machine.quiesce()
    image = machine.save()
    copy = open_machine()
    copy.quiesce()
    assert not copy.load(image)
    assert bool(copy.reg("STATUS") & D["STATUS_RESETTING"]) == pending
    copy.resume()
    copy.inject("STUCK", 0)
    copy.wait_for(lambda: not is_resetting(copy), "engine reset")
    assert copy.read(D["REG_Q_QSTATUS"]) == D["QUEUE_STATE_DISABLED"]
