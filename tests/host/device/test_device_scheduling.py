# SPDX-License-Identifier: MIT
"""Which queue is served: preemption, shares of time, what is kept of a program that is
set aside, the watchdog. A test waits for what a program does or for time that the
device has counted, never for the host's clock."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import numpy as np
import pytest
from asm import R, ins, pc, program
from machine import READ, WRITE, D, Machine, Queue
from vtpu_compiler import hw

LOW, NORMAL, HIGH = 0, 1, 2
FOREVER = ins("JMP", target=0)
NEVER_SLICE = 0
PAGE = 4096


def until(word: int, index: int) -> list[bytes]:
    """Two instructions that go on once the word is not zero; they start at `index`."""
    return [ins("LD", rd=60, addr=word, mode="U64"), ins("BEQ", a=R(60), b=0, target=pc(index))]


def open_gate(machine: Machine, word: int) -> None:
    machine.put(word, struct.pack("<Q", 1))


def start(queue: Queue, code: bytes, args: tuple[int, ...] = ()) -> int:
    fence = queue.push("RUN", queue.run_payload(code, args))
    queue.ring_doorbell()
    return fence


def runs(queue: Queue) -> None:
    queue.machine.wait_for(lambda: queue.reg("INSTRUCTIONS", 8) > 0, "it has begun")


def set_aside(machine: Machine, victim: Queue, by: Queue) -> int:
    """Holds the victim's program aside; returns the word that ends the other's."""
    machine.write(D["REG_SLICE_US"], NEVER_SLICE)
    word = machine.alloc(64)
    runs(victim)
    start(by, program(*until(word, 0)))
    machine.wait_for(lambda: by.state == "RUNNING" and by.reg("INSTRUCTIONS", 8) > 0, "took over")
    assert victim.state == "PREEMPTED"
    return word


# --- who is served


@pytest.mark.parametrize("first", [LOW, NORMAL, HIGH])
@pytest.mark.parametrize("second", [LOW, NORMAL, HIGH])
def test_a_program_that_waits_for_another_queue_ends(
    machine: Machine, first: int, second: int
) -> None:
    """Whatever the priorities: without preemption this never ends."""
    word = machine.alloc(64)
    waiter, setter = Queue(machine, 0, priority=first), Queue(machine, 1, priority=second)
    fence = start(waiter, program(*until(word, 0)))
    runs(waiter)
    setter.run(program(ins("ST", addr=word, value=1, mode="U64")))
    waiter.wait(fence)
    assert waiter.reg("PREEMPTIONS") > 0


@pytest.mark.parametrize("seed", [1, 5, 9])
def test_whoever_gets_the_machine_makes_a_step(
    open_machine: Callable[..., Machine], seed: int
) -> None:
    """At random the low one is served long before its turn, and would always be put off."""
    machine = open_machine(seed=seed)
    machine.identity()
    machine.enable()
    word = machine.alloc(64)
    waiter, setter = Queue(machine, 0, priority=HIGH), Queue(machine, 1, priority=LOW)
    fence = start(waiter, program(*until(word, 0)))
    runs(waiter)
    setter.run(program(*[ins("NOP")] * 50, ins("ST", addr=word, value=1, mode="U64")))
    waiter.wait(fence)


@pytest.mark.parametrize("command", ["SIGNAL", "WAIT"])
def test_other_commands_preempt_too(machine: Machine, command: str) -> None:
    word, done = machine.alloc(64), machine.alloc(64)
    waiter, other = Queue(machine, 0), Queue(machine, 1)
    fence = start(waiter, program(ins("ST", addr=done, value=1, mode="U64"), *until(word, 1)))
    if command == "WAIT":
        other.push("WAIT", struct.pack("<QQ", done, 1))
    last = other.push("SIGNAL", struct.pack("<QQ", word, 1))
    other.ring_doorbell()
    other.wait(last)
    waiter.wait(fence)


def test_a_waking_higher_priority_takes_over_at_once(machine: Machine) -> None:
    """Without slices nothing else than its waking makes the low one give way."""
    machine.write(D["REG_SLICE_US"], NEVER_SLICE)
    low, normal, high = (Queue(machine, n, priority=n) for n in (LOW, NORMAL, HIGH))
    start(low, FOREVER)
    runs(low)
    for _ in range(50):
        high.do("NOP")
        normal.do("NOP")
    assert low.fence == 0 and low.reg("PREEMPTIONS") > 0
    before = low.reg("INSTRUCTIONS", 8)
    machine.wait_for(lambda: low.reg("INSTRUCTIONS", 8) > before, "the low one goes on")


def test_without_slices_equals_wait_and_higher_ones_do_not(machine: Machine) -> None:
    machine.write(D["REG_SLICE_US"], NEVER_SLICE)
    gate = machine.alloc(64)
    holder, equal, low = Queue(machine, 0), Queue(machine, 1), Queue(machine, 2, priority=LOW)
    high = Queue(machine, 3, priority=HIGH)
    last = start(holder, program(*until(gate, 0)))
    runs(holder)
    fences = [start(queue, program(ins("NOP"))) for queue in (equal, low)]
    for _ in range(20):
        high.run(program(ins("NOP")))
    assert equal.reg("INSTRUCTIONS", 8) == low.reg("INSTRUCTIONS", 8) == 0
    assert holder.fence == 0
    open_gate(machine, gate)
    holder.wait(last)
    equal.wait(fences[0])
    low.wait(fences[1])


def test_a_priority_may_change_while_a_program_runs(machine: Machine) -> None:
    machine.write(D["REG_SLICE_US"], NEVER_SLICE)
    first, second = Queue(machine, 0), Queue(machine, 1)
    start(first, FOREVER)
    runs(first)
    fence = start(second, program(ins("NOP")))
    assert second.fence == 0
    second.set("PRIORITY", HIGH)
    second.wait(fence)
    assert first.fence == 0


def _busy(queues: list[Queue]) -> list[int]:
    """The queues' times at one moment."""
    queues[0].machine.quiesce()
    times = [queue.reg("BUSY_NS", 8) for queue in queues]
    queues[0].machine.resume()
    return times


def test_equals_share_by_time_not_by_instructions(machine: Machine) -> None:
    """Small steps on one, steps of milliseconds on two others: after each has had 30
    slices none is behind by more than a few of what cannot be divided."""
    machine.write(D["REG_SLICE_US"], 500)
    data = machine.alloc(8 << 20)
    big = ins(
        "DMA_LOAD", dst=0, src=data, rows=16, row_bytes=1 << 19, dst_stride=1 << 19, src_stride=0
    )
    queues = [Queue(machine, n) for n in range(3)]
    machine.write(D["REG_CTRL"], 0)
    for queue, code in zip(queues, (FOREVER, big + FOREVER, big * 8 + FOREVER), strict=True):
        start(queue, code)
    machine.enable()
    machine.wait_for(lambda: min(_busy(queues)) > 15_000_000, "each has had its time")
    machine.wait_for(lambda: max(t := _busy(queues)) < 1.25 * min(t), "and as much")


def test_shares_go_by_priority_and_nobody_starves(machine: Machine) -> None:
    machine.write(D["REG_SLICE_US"], 100)
    queues = [Queue(machine, n, priority=n) for n in (LOW, NORMAL, HIGH)]
    machine.write(D["REG_CTRL"], 0)
    for queue in queues:
        start(queue, FOREVER)
    machine.enable()  # all begin at once
    machine.wait_for(lambda: _busy(queues)[LOW] > 1_000_000, "the low one gets on")

    def shares_are_right() -> bool:
        low, normal, high = _busy(queues)
        return 6 < high / normal < 10 and 5 < normal / low < 11

    machine.wait_for(shares_are_right, "64 : 8 : 1")


def test_sleeping_saves_nothing_up(machine: Machine) -> None:
    """
    Who comes after the other has worked alone gets as much as it. Were it owed the time
    that it slept, it would stay ahead by that.
    """
    machine.write(D["REG_SLICE_US"], 500)
    worker, sleeper = Queue(machine, 0), Queue(machine, 1)
    start(worker, FOREVER)
    machine.wait_for(lambda: worker.reg("BUSY_NS", 8) > 100_000_000, "alone for a while")
    start(sleeper, FOREVER)
    machine.wait_for(lambda: sleeper.reg("INSTRUCTIONS", 8) > 0, "the other has come")
    begin = _busy([worker, sleeper])

    def even() -> bool:
        now = _busy([worker, sleeper])
        alone, late = now[0] - begin[0], now[1] - begin[1]
        return late > 200_000_000 and late - alone < 50_000_000

    machine.wait_for(even, "as much for one as for the other")


# --- what a program that is set aside keeps


def test_registers_counters_and_issued_instructions_survive(machine: Machine) -> None:
    out, gate = machine.alloc(PAGE), machine.alloc(64)
    victim, other = Queue(machine, 0, priority=LOW), Queue(machine, 1, priority=HIGH)
    code = program(
        ins("LI", rd=9, value=0x123456789ABCDEF0),
        ins("NOP", signal=3),
        *until(gate, 2),
        ins("ST", addr=out, value=R(9), mode="U64", wait=(3, 1)),
    )
    fence = start(victim, code)
    word = set_aside(machine, victim, other)
    open_gate(machine, gate)
    assert victim.fence == 0
    open_gate(machine, word)
    victim.wait(fence)
    assert machine.word(out) == 0x123456789ABCDEF0


def test_a_resumed_program_faults_as_any_other(machine: Machine) -> None:
    gate = machine.alloc(64)
    victim, other = Queue(machine, 0, priority=LOW), Queue(machine, 1, priority=HIGH)
    victim.do("NOP")
    start(victim, program(*until(gate, 0), ins("TRAP", code=77)))
    word = set_aside(machine, victim, other)
    open_gate(machine, gate)
    open_gate(machine, word)
    machine.wait_irqs(0, 1)
    assert victim.fault() == {"cause": "TRAP", "access": 0, "addr": 77, "pc": pc(2), "entry": 1}
    other.do("NOP")


def _own_vmem(machine: Machine, mine: bytes, ready: int, all_ready: list[int], out: int) -> bytes:
    """Stores what VMEM holds at first, fills a part, waits for the others, stores it again."""
    head = [
        ins("DMA_STORE", dst=out, src=0, rows=1, row_bytes=PAGE, dst_stride=0, src_stride=0),
        ins(
            "DMA_LOAD", dst=0, src=machine.place(mine), rows=1, row_bytes=PAGE,
            dst_stride=0, src_stride=0,
        ),
        ins("SYNC"),
        ins("ST", addr=ready, value=1, mode="U64"),
    ]  # fmt: skip
    for word in all_ready:
        head += until(word, len(head))
    return program(
        *head,
        ins("DMA_STORE", dst=out + PAGE, src=0, rows=1, row_bytes=PAGE, dst_stride=0, src_stride=0),
    )


def test_each_program_in_progress_has_its_own_vmem(machine: Machine) -> None:
    """Six at once, of three contexts, each in need of all the others."""
    machine.identity(1)
    machine.identity(2)
    contexts = [0, 0, 1, 1, 2, 2]
    queues = [Queue(machine, n, context=c) for n, c in enumerate(contexts)]
    data = [bytes([n + 1]) * PAGE for n in range(6)]
    ready = [machine.alloc(64) for _ in queues]
    out = [machine.alloc(2 * PAGE) for _ in queues]
    fences = [
        start(queue, _own_vmem(machine, data[n], ready[n], ready, out[n]))
        for n, queue in enumerate(queues)
    ]
    for queue, fence in zip(queues, fences, strict=True):
        queue.wait(fence)
    for n in range(6):
        assert machine.get(out[n], PAGE) == bytes(PAGE), f"queue {n} saw others' data"
        assert machine.get(out[n] + PAGE, PAGE) == data[n]


def _store_then_load(machine: Machine, out: int, mine: bytes) -> bytes:
    return program(
        ins("DMA_STORE", dst=out, src=0, rows=1, row_bytes=PAGE, dst_stride=0, src_stride=0),
        ins("DMA_LOAD", dst=0, src=machine.place(mine), rows=1, row_bytes=PAGE, dst_stride=0,
            src_stride=0),
    )  # fmt: skip


def test_vmem_is_left_by_the_last_program_of_the_context_to_end(machine: Machine) -> None:
    gate, ready, out = machine.alloc(64), machine.alloc(64), machine.alloc(4 * PAGE)
    first, second = Queue(machine, 0, priority=LOW), Queue(machine, 1, priority=HIGH)
    fence = start(first, _own_vmem(machine, b"\x11" * PAGE, ready, [gate], out))
    machine.wait_for(lambda: machine.word(ready) == 1, "it has its data")
    second.run(_store_then_load(machine, out, b"\x22" * PAGE))
    assert machine.get(out, PAGE) == bytes(PAGE)  # the first has its image for itself
    second.run(_store_then_load(machine, out, b"\x33" * PAGE))
    assert machine.get(out, PAGE) == b"\x22" * PAGE
    open_gate(machine, gate)
    first.wait(fence)
    second.run(_store_then_load(machine, out, b"\x44" * PAGE))
    assert machine.get(out, PAGE) == b"\x11" * PAGE


def test_a_new_root_while_set_aside(machine: Machine) -> None:
    """The program goes on in the new address space; what it leaves in VMEM is seen no more."""
    machine.context(1)
    old, new = machine.alloc(PAGE), machine.alloc(PAGE)
    gate, ready, out = machine.alloc(64), machine.alloc(64), machine.alloc(4 * PAGE)
    victim = Queue(machine, 0, priority=LOW, context=1)
    other = Queue(machine, 1, priority=HIGH)

    def tables(page: int) -> None:
        machine.context(1)
        machine.map(1, 0, 0, len(machine.hbm) - (4 << 20), huge=True)
        machine.map(1, 1 << 40, page, PAGE, READ | WRITE)

    tables(old)
    code = program(
        ins("DMA_LOAD", dst=0, src=machine.place(b"\x55" * PAGE), rows=1, row_bytes=PAGE,
            dst_stride=0, src_stride=0),
        ins("LI", rd=9, value=1 << 40),
        ins("ST", addr=R(9), value=1, mode="U64"),
        ins("ST", addr=ready, value=1, mode="U64"),
        *until(gate, 4),
        ins("ST", addr=R(9), value=2, mode="U64"),
    )  # fmt: skip
    fence = start(victim, code)
    machine.wait_for(lambda: machine.word(ready) == 1, "it has translated")
    word = set_aside(machine, victim, other)
    tables(new)
    assert machine.reg("TLB_PENDING") == 0  # nothing of the context runs
    open_gate(machine, gate)
    open_gate(machine, word)
    victim.wait(fence)
    assert (machine.word(old), machine.word(new)) == (1, 2)
    victim.run(_store_then_load(machine, out, bytes(PAGE)))
    assert machine.get(out, PAGE) == bytes(PAGE)


def test_an_invalidation_while_set_aside_is_done_at_once(machine: Machine) -> None:
    page, other_page = machine.place(bytes(8)), machine.place(struct.pack("<Q", 1))
    machine.map(0, 1 << 40, page, PAGE, READ)
    machine.identity(1)
    victim = Queue(machine, 0, priority=LOW)
    other = Queue(machine, 1, priority=HIGH, context=1)
    code = program(
        ins("LI", rd=9, value=1 << 40),
        ins("LD", rd=8, addr=R(9), mode="U64"),
        ins("BEQ", a=R(8), b=0, target=pc(1)),
    )
    fence = start(victim, code)
    word = set_aside(machine, victim, other)
    machine.map(0, 1 << 40, other_page, PAGE, READ)
    machine.write(D["REG_TLB_INVALIDATE"], 0)
    assert machine.reg("TLB_PENDING") == 0
    open_gate(machine, word)
    victim.wait(fence)


def test_a_context_that_is_disabled_while_set_aside(machine: Machine) -> None:
    machine.identity(1)
    gate = machine.alloc(64)
    victim = Queue(machine, 0, priority=LOW, context=1)
    other = Queue(machine, 1, priority=HIGH)
    start(victim, program(*until(gate, 0)))
    word = set_aside(machine, victim, other)
    machine.write(D["REG_CTX_ROOT"] + 8, 0, 8)
    open_gate(machine, word)
    machine.wait_irqs(0, 1)
    fault = victim.fault()
    assert (fault["cause"], fault["addr"], fault["pc"]) == ("BAD_CONTEXT", gate, 0)


# --- stops


def test_a_queue_reset_drops_what_is_set_aside(machine: Machine) -> None:
    """At once, and more often than there can be VMEM images."""
    victim, other = Queue(machine, 0, priority=LOW), Queue(machine, 1, priority=HIGH)
    start(victim, FOREVER)
    word = set_aside(machine, victim, other)
    for _ in range(3 * hw.NUM_QUEUES):
        victim.set("CTRL", D["Q_CTRL_RESET"])
        assert victim.state == "DISABLED" and victim.reg("PC") == 0xFFFFFFFF
        victim.restart()
        assert victim.state == "READY" and victim.reg("PREEMPTIONS") == 0
        open_gate(machine, word)
        start(victim, FOREVER)
        machine.wait_for(lambda: victim.reg("INSTRUCTIONS", 8) > 0, "runs again")
        machine.put(word, bytes(8))
        start(other, program(*until(word, 0)))
        machine.wait_for(lambda: victim.state == "PREEMPTED", "set aside again")
    open_gate(machine, word)


@pytest.mark.parametrize("how", ["CTRL", "core", "dead"])
def test_a_device_reset_with_programs_set_aside(machine: Machine, how: str) -> None:
    queues = [Queue(machine, n, priority=n % 3) for n in range(6)]
    machine.write(D["REG_SLICE_US"], 100)
    for queue in queues:
        start(queue, FOREVER)
    machine.wait_for(lambda: all(q.reg("PREEMPTIONS") for q in queues[1:]), "all are in progress")
    if how == "CTRL":
        machine.write(D["REG_CTRL"], D["CTRL_RESET"])
    elif how == "core":
        machine.reset()
    else:
        machine.inject("DEAD", 1)
        machine.inject("DEAD", 0)
    machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_RESETTING"], "reset")
    assert all(q.state == "DISABLED" and q.reg("PC") == 0xFFFFFFFF for q in queues)
    assert not machine.reg("STATUS") & D["STATUS_BUSY"]
    assert machine.reg("SLICE_US") == D["QUEUE_SLICE_US"] and queues[0].reg("WATCHDOG_US") == 0
    machine.identity()
    machine.enable()
    machine.irqs.clear()
    Queue(machine).do("NOP")


def test_free_with_programs_set_aside(open_machine: Callable[..., Machine]) -> None:
    machine = open_machine()
    machine.identity()
    machine.enable()
    for n in range(4):
        start(Queue(machine, n, priority=n % 3), FOREVER)
    machine.wait_for(
        lambda: any(f"queue {n}: PREEMPTED" in machine.describe() for n in range(4)), "set aside"
    )


def test_disabling_the_device_lets_commands_in_progress_end(machine: Machine) -> None:
    gate = machine.alloc(64)
    victim, other = Queue(machine, 0, priority=LOW), Queue(machine, 1, priority=HIGH)
    fence = start(victim, program(*until(gate, 0)))
    word = set_aside(machine, victim, other)
    idle = Queue(machine, 2)
    machine.write(D["REG_CTRL"], 0)
    idle.push("NOP")
    idle.ring_doorbell()
    open_gate(machine, gate)
    open_gate(machine, word)
    victim.wait(fence)
    other.wait(1)
    machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_BUSY"], "not busy")
    assert idle.fence == 0 and idle.reg("HEAD") == 0
    machine.enable()
    idle.wait(1)


def test_a_hung_program_is_set_aside_and_keeps_hanging(machine: Machine) -> None:
    hung, other = Queue(machine, 0, priority=HIGH), Queue(machine, 1, priority=LOW)
    machine.inject("HANG", 1)
    fence = start(hung, program(ins("NOP")))
    machine.wait_for(lambda: machine.injected("HANG") == 0, "hangs")
    for _ in range(5):
        other.run(program(ins("NOP")))
    assert hung.fence < fence and hung.reg("INSTRUCTIONS", 8) == 0
    hung.restart()
    hung.do("NOP")


# --- what software sees


def test_the_state_of_a_program_that_is_set_aside(machine: Machine) -> None:
    victim, other = Queue(machine, 0, priority=LOW), Queue(machine, 1, priority=HIGH)
    assert victim.reg("PC") == 0xFFFFFFFF
    fence = start(victim, program(ins("NOP"), *until(gate := machine.alloc(64), 1)))
    word = set_aside(machine, victim, other)
    counted = victim.reg("INSTRUCTIONS", 8)
    spent = victim.reg("COMMAND_NS", 8), victim.reg("BUSY_NS", 8)
    assert victim.reg("PC") in (pc(1), pc(2)) and 0 < spent[0] <= spent[1]
    assert other.reg("PC") in (pc(0), pc(1))
    assert machine.reg("STATUS") & D["STATUS_BUSY"]
    (line,) = [x for x in machine.describe().splitlines() if x.startswith("queue 0: ")]
    assert line.startswith("queue 0: PREEMPTED,") and f"program at pc {victim.reg('PC'):#x}" in line
    victim.push("NOP")
    victim.ring_doorbell()  # a queue that is set aside takes doorbells
    before = other.reg("BUSY_NS", 8)
    machine.wait_for(lambda: other.reg("BUSY_NS", 8) > before, "time goes on for the other")
    assert victim.reg("INSTRUCTIONS", 8) == counted
    assert (victim.reg("COMMAND_NS", 8), victim.reg("BUSY_NS", 8)) == spent
    assert victim.reg("PREEMPTIONS") == 1
    open_gate(machine, gate)
    open_gate(machine, word)
    victim.wait(fence + 1)
    other.wait(1)
    machine.wait_for(lambda: victim.state == "READY", "ready")
    assert victim.reg("PC") == 0xFFFFFFFF
    steps = [event for event in machine.events if event[1] == 0 and event[0] != "DOORBELL"]
    assert [event[0] for event in steps] == ["BEGIN", "PREEMPTED", "RESUMED", "END", "BEGIN", "END"]
    assert steps[1][2] == steps[2][2] and steps[1][2] in (pc(1), pc(2))


def test_a_bad_doorbell_waits_for_the_end_of_what_is_set_aside(machine: Machine) -> None:
    gate = machine.alloc(64)
    victim, other = Queue(machine, 0, priority=LOW), Queue(machine, 1, priority=HIGH)
    fence = start(victim, program(*until(gate, 0)))
    word = set_aside(machine, victim, other)
    machine.doorbell(0, 1000)
    open_gate(machine, gate)
    open_gate(machine, word)
    machine.wait_irqs(0, 1)
    assert victim.fence == fence and victim.fault()["cause"] == "BAD_RING"
    assert victim.fault()["entry"] == 1


def test_quiesce_with_programs_set_aside(machine: Machine) -> None:
    machine.write(D["REG_SLICE_US"], 100)
    queues = [Queue(machine, n) for n in range(3)]
    for queue in queues:
        start(queue, FOREVER)
    machine.wait_for(lambda: all(queue.reg("PREEMPTIONS") for queue in queues), "in turns")
    machine.quiesce()
    before = [(q.reg("INSTRUCTIONS", 8), q.reg("BUSY_NS", 8)) for q in queues]
    queues[0].set("PRIORITY", HIGH)
    queues[1].set("CTRL", D["Q_CTRL_RESET"])
    assert [(q.reg("INSTRUCTIONS", 8), q.reg("BUSY_NS", 8)) for q in (queues[0], queues[2])] == [
        before[0],
        before[2],
    ]
    machine.resume()
    machine.wait_for(lambda: queues[1].state == "DISABLED", "the reset ends")
    for n in (0, 2):
        machine.wait_for(lambda n=n: queues[n].reg("INSTRUCTIONS", 8) > before[n][0], "goes on")


# --- the watchdog

LIMIT_US = 50_000


def _is_over(queue: Queue) -> dict[str, int | str]:
    queue.machine.wait_irqs(0, 1)
    fault = queue.fault()
    assert (fault["cause"], fault["access"], fault["addr"]) == ("WATCHDOG", 0, 0)
    assert queue.reg("COMMAND_NS", 8) >= LIMIT_US * 1000 and queue.state == "FAULTED"
    assert queue.reg("PC") == 0xFFFFFFFF and queue.fence == queue.fences - 1
    return fault


def test_the_watchdog_ends_a_loop(machine: Machine, queue: Queue) -> None:
    other = Queue(machine, 1)
    queue.set("WATCHDOG_US", LIMIT_US)
    queue.do("NOP")
    start(queue, program(ins("NOP"), ins("NOP"), ins("JMP", target=pc(1))))
    fault = _is_over(queue)
    assert fault["pc"] in (pc(1), pc(2)) and fault["entry"] == 1
    other.do("NOP")
    queue.restart()
    assert queue.reg("WATCHDOG_US") == LIMIT_US
    queue.run(program(ins("NOP")))


@pytest.mark.parametrize("fault", ["HANG", "HANG_PC"])
def test_the_watchdog_ends_an_injected_hang(machine: Machine, queue: Queue, fault: str) -> None:
    queue.set("WATCHDOG_US", LIMIT_US)
    machine.inject(fault, 1 if fault == "HANG" else pc(1))
    start(queue, program(ins("NOP"), ins("NOP")))
    assert _is_over(queue)["pc"] == (0 if fault == "HANG" else pc(1))


def test_the_watchdog_ends_a_long_instruction(open_machine: Callable[..., Machine]) -> None:
    machine = open_machine(isa="scalar", hbm_bytes=128 << 20)
    machine.identity()
    machine.enable()
    queue = Queue(machine)
    queue.set("WATCHDOG_US", LIMIT_US)
    matmul = ins(
        "MATMUL", dst=16 << 20, src=0, weight=1 << 20, m=512, n=8192, k=4096,
        dst_stride=8192 * 4, src_stride=0, fmt="Q8_0",
    )  # fmt: skip
    start(queue, program(ins("NOP"), matmul))
    assert _is_over(queue)["pc"] == pc(1)
    assert queue.reg("INSTRUCTIONS", 8) == 1  # it was not done


def test_the_watchdog_ends_other_commands(machine: Machine, queue: Queue) -> None:
    machine.inject("HBM_SLOW", 1 << 20)
    queue.set("WATCHDOG_US", LIMIT_US)
    queue.push("COPY", struct.pack("<QQQ", machine.alloc(1 << 20), machine.alloc(1 << 20), 1 << 20))
    queue.ring_doorbell()
    assert _is_over(queue)["pc"] == 0xFFFFFFFF


def test_a_held_wait_is_no_execution(machine: Machine, queue: Queue) -> None:
    word = machine.alloc(64)
    other = Queue(machine, 1)
    queue.set("WATCHDOG_US", 100_000)
    queue.push("WAIT", struct.pack("<QQ", word, 1))
    last = queue.push("NOP")
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.reg("BUSY_NS", 8) > 0, "held")
    start(other, FOREVER)
    machine.wait_for(lambda: other.reg("BUSY_NS", 8) > 300_000_000, "much time")
    open_gate(machine, word)
    queue.wait(last)


def test_the_time_set_aside_does_not_count(machine: Machine) -> None:
    limit_us = 300_000
    gate = machine.alloc(64)
    victim, other = Queue(machine, 0, priority=LOW), Queue(machine, 1, priority=HIGH)
    victim.set("WATCHDOG_US", limit_us)
    fence = start(victim, program(*until(gate, 0)))
    word = set_aside(machine, victim, other)
    machine.wait_for(lambda: other.reg("COMMAND_NS", 8) > 2000 * limit_us, "much longer")
    open_gate(machine, gate)
    open_gate(machine, word)
    victim.wait(fence)


def test_the_watchdog_adds_up_what_is_executed_in_turns(machine: Machine) -> None:
    machine.write(D["REG_SLICE_US"], 500)
    queue, other = Queue(machine, 0), Queue(machine, 1)
    start(other, FOREVER)
    queue.set("WATCHDOG_US", LIMIT_US)
    start(queue, FOREVER)
    assert _is_over(queue)["pc"] == 0
    machine.wait_for(lambda: other.state == "RUNNING", "the other goes on")


def test_a_machine_at_rest_does_not_count(machine: Machine, queue: Queue) -> None:
    limit_us = 300_000
    gate = machine.alloc(64)
    queue.set("WATCHDOG_US", limit_us)
    fence = start(queue, program(*until(gate, 0)))
    runs(queue)
    machine.quiesce()
    time.sleep(limit_us * 1.5e-6)
    open_gate(machine, gate)
    machine.resume()
    queue.wait(fence)


def test_a_limit_may_come_while_the_command_runs(machine: Machine, queue: Queue) -> None:
    start(queue, FOREVER)
    machine.wait_for(lambda: queue.reg("COMMAND_NS", 8) > LIMIT_US * 1000, "runs")
    queue.set("WATCHDOG_US", LIMIT_US)
    assert _is_over(queue)["pc"] == 0


# --- all together


def _sums(machine: Machine, data: int, out: int, width: int, rounds: int) -> bytes:
    """out = the sum of data's rows, then doubled: loads, sums and stores on three engines."""
    row = 4 * width
    body = [
        ins("LI", rd=20, value=data),
        ins("DMA_LOAD", dst=row, src=R(20), rows=1, row_bytes=row, dst_stride=0, src_stride=0,
            wait=(2, R(21)), signal=1),
        ins("ADD", rd=21, a=R(21), b=1),
        ins("V_ADD", dst=0, a=0, b=row, rows=1, width=width, dst_stride=0, a_stride=0, b_stride=0,
            wait=(1, R(21)), signal=2),
        ins("ADD", rd=20, a=R(20), b=row),
        ins("BLT", a=R(21), b=rounds, target=pc(1)),
        ins("SYNC"),
        ins("V_ADD", dst=0, a=0, b=0, rows=1, width=width, dst_stride=0, a_stride=0, b_stride=0,
            signal=3),
        ins("DMA_STORE", dst=out, src=0, rows=1, row_bytes=row, dst_stride=0, src_stride=0,
            wait=(3, 1)),
    ]  # fmt: skip
    clear = ins("DMA_LOAD", dst=0, src=machine.place(bytes(row)), rows=1, row_bytes=row,
                dst_stride=0, src_stride=0)  # fmt: skip
    # The jump's target is counted from the program's start.
    body[5] = ins("BLT", a=R(21), b=rounds, target=pc(3))
    return program(clear, ins("SYNC"), *body)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_preemption_changes_no_result(
    open_machine: Callable[..., Machine], seed: int
) -> None:
    """A schedule seed sets programs aside at random, several in a context."""
    machine = open_machine(seed=seed)
    machine.identity(0)
    machine.identity(1)
    machine.write(D["REG_SLICE_US"], 50)
    rng = np.random.default_rng(seed)
    queues = [Queue(machine, n, context=n % 2, priority=n % 3) for n in range(6)]
    width, rounds, programs = 256, 40, 3
    expected: list[tuple[int, bytes]] = []
    for queue in queues:
        for _ in range(programs):
            data = rng.standard_normal((rounds, width)).astype(np.float32)
            out = machine.alloc(4 * width)
            total = np.zeros(width, np.float32)
            for one in data:
                total = total + one
            expected.append((out, (total + total).tobytes()))
            code = _sums(machine, machine.place(data.tobytes()), out, width, rounds)
            queue.push("RUN", queue.run_payload(code))
    for queue in queues:
        queue.ring_doorbell()
    machine.enable()  # all begin at once
    for queue in queues:
        queue.wait(programs)
    assert sum(queue.reg("PREEMPTIONS") for queue in queues) > 100
    for out, result in expected:
        assert machine.get(out, len(result)) == result
