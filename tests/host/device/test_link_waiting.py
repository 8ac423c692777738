# SPDX-License-Identifier: MIT
"""A program that waits for another chip is set aside: others run, limits hold, nothing spins."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from asm import R, ins, pc, program
from fabric import Fabric, counter, enable_link, link_fault, start, wait_begun, wait_fault
from machine import D, Queue

WAIT = ins("LINK_WAIT", counter=1, value=1, chip=1)


@pytest.fixture
def pair(library: ctypes.CDLL) -> Iterator[Fabric]:
    with Fabric(library, "2") as fabric:
        fabric.add_all()
        yield fabric


@pytest.mark.parametrize("priority", [0, 1, 2])
@pytest.mark.parametrize("slice_us", [0, 2000])
def test_others_run_meanwhile(pair: Fabric, priority: int, slice_us: int) -> None:
    """Of any priority, without a time slice too, and with VMEM of their own."""
    machine = pair.machines[0]
    machine.write(D["REG_SLICE_US"], slice_us)
    data = machine.place(b"\x5a" * 64)
    row = {"rows": 1, "row_bytes": 64, "dst_stride": 0, "src_stride": 0}
    out = machine.alloc(4096)
    mine = start(
        pair.queues[0],
        program(
            ins("DMA_LOAD", dst=0, src=data, **row),
            ins("SYNC"),
            WAIT,
            ins("DMA_STORE", dst=out, src=0, **row),
        ),
    )
    wait_begun(pair.queues[0])
    other = Queue(machine, 1, priority=priority)
    for _ in range(5):
        other.run(program(ins("DMA_LOAD", dst=0, src=out + 1024, **row)))
        other.do("NOP")
    machine.wait_for(lambda: pair.queues[0].state == "PREEMPTED", "set aside")
    assert pair.queues[0].fence < mine
    pair.queues[1].run(program(ins("REMOTE_SIGNAL", chip=0, counter=1, add=1)))
    pair.queues[0].wait(mine)
    assert machine.get(out, 64) == b"\x5a" * 64, "its VMEM is its own"


def test_it_goes_on_beside_one_that_never_ends(pair: Fabric) -> None:
    """A lower priority may not keep it from what has arrived."""
    machine = pair.machines[0]
    fence = start(pair.queues[0], program(WAIT))
    low = Queue(machine, 1, priority=0)
    start(low, ins("JMP", target=0))
    machine.wait_for(lambda: low.state in ("RUNNING", "PREEMPTED"), "the other")
    pair.queues[1].run(program(ins("REMOTE_SIGNAL", chip=0, counter=1, add=1)))
    pair.queues[0].wait(fence)
    low.restart()


def test_the_watchdog_counts_waiting(pair: Fabric) -> None:
    queue = pair.queues[0]
    queue.set("WATCHDOG_US", 20_000)
    start(queue, program(ins("NOP"), WAIT))
    fault = wait_fault(queue)
    assert (fault["cause"], fault["pc"]) == ("WATCHDOG", pc(1))
    assert queue.reg("COMMAND_NS", 8) >= 20_000_000 > queue.reg("BUSY_NS", 8)


def test_command_ns_goes_on(pair: Fabric) -> None:
    queue = pair.queues[0]
    start(queue, program(WAIT))
    wait_begun(queue)
    before = queue.reg("COMMAND_NS", 8)
    queue.machine.wait_for(lambda: queue.reg("COMMAND_NS", 8) > before + 5_000_000, "time")
    assert queue.reg("PC") == 0


@pytest.mark.parametrize("how", ["parked", "asleep"])
def test_rest_is_not_waiting(pair: Fabric, how: str) -> None:
    """Else a stopped machine would find its watchdogs expired. The other chip has the clock."""
    queue, machine, clock = pair.queues[0], *pair.machines.values()
    start(queue, program(WAIT))
    wait_begun(queue)
    if how == "asleep":
        machine.sleep(True)
    machine.quiesce()
    if how == "asleep":
        machine.resume()
    before, began = queue.reg("COMMAND_NS", 8), clock.reg("TIME", 8)
    clock.wait_for(lambda: clock.reg("TIME", 8) > began + 50_000_000, "time")
    assert queue.reg("COMMAND_NS", 8) == before
    goes_on = clock.reg("TIME", 8)
    if how == "asleep":
        machine.sleep(False)
    else:
        machine.resume()
    machine.wait_for(lambda: queue.reg("COMMAND_NS", 8) > before, "waiting again")
    waited = queue.reg("COMMAND_NS", 8) - before
    assert waited <= clock.reg("TIME", 8) - goes_on


def test_two_programs_of_the_owner_wait_at_once(pair: Fabric) -> None:
    """Each for its own counter, released in the other order."""
    machine = pair.machines[0]
    second = Queue(machine, 1)
    first_fence = start(pair.queues[0], program(WAIT))
    second_fence = start(second, program(ins("LINK_WAIT", counter=2, value=1, chip=1)))
    wait_begun(pair.queues[0])
    wait_begun(second)
    pair.queues[1].run(program(ins("REMOTE_SIGNAL", chip=0, counter=2, add=1)))
    second.wait(second_fence)
    assert pair.queues[0].fence < first_fence
    pair.queues[1].run(program(ins("REMOTE_SIGNAL", chip=0, counter=1, add=1)))
    pair.queues[0].wait(first_fence)


def test_a_context_that_goes_away_takes_its_waits_along(pair: Fabric) -> None:
    machine = pair.machines[0]
    start(pair.queues[0], program(WAIT, ins("LD", rd=9, addr=0x100000)))
    wait_begun(pair.queues[0])
    machine.write(D["REG_CTX_ROOT"], 0, 8)
    machine.wait_for(lambda: not machine.reg("TLB_PENDING"), "invalidated")
    pair.queues[1].run(program(ins("REMOTE_SIGNAL", chip=0, counter=1, add=0)))
    machine.write(D["REG_LINK_COUNTER"] + 8, 1, 8)
    assert wait_fault(pair.queues[0])["cause"] == "BAD_CONTEXT"


@pytest.mark.parametrize("seed", [0, 3])
def test_stepped_machines_wait_without_blocking(library: ctypes.CDLL, seed: int) -> None:
    """One thread steps both: each round of a ping-pong needs the other's steps."""
    with Fabric(library, "2") as fabric:
        machines = [fabric.add(chip, stepped=True, seed=seed, ready=False) for chip in (0, 1)]
        for machine in machines:
            enable_link(machine)
        fences = []
        for chip in (0, 1):
            signal = ins("REMOTE_SIGNAL", chip=1 - chip, counter=1, add=1)
            wait = ins("LINK_WAIT", counter=1, value=R(9, 1), chip=1 - chip)
            body = [signal, wait] if chip == 0 else [wait, signal]
            code = program(
                ins("LI", rd=9, value=0),
                *body,
                ins("ADD", rd=9, a=R(9), b=1),
                ins("BLT", a=R(9), b=5, target=pc(1)),
            )
            fences.append(start(fabric.queues[chip], code))
        machines[0].wait_for(
            lambda: (
                [m.step() for m in machines] == [False, False]
                and [q.fence for q in fabric.queues.values()] == fences
            ),
            "the end",
        )
        assert [counter(machine, 1) for machine in machines] == [5, 5]


def test_a_fault_of_a_wait_that_was_set_aside(pair: Fabric) -> None:
    machine = pair.machines[0]
    low = Queue(machine, 1, priority=0)
    start(pair.queues[0], program(ins("NOP"), WAIT))
    start(low, ins("JMP", target=0))
    wait_begun(pair.queues[0])
    pair.machines[1].close()
    fault = wait_fault(pair.queues[0])
    assert link_fault(fault)[:2] == ("LOST", 1) and fault["pc"] == pc(1)
    low.restart()
