# SPDX-License-Identifier: MIT
"""Functions that share the engines of a chip: fair turns, and nothing else in common."""

from __future__ import annotations

import random
import struct
import threading

import pytest
from asm import R, ins, pc, program, vmem_program
from machine import SYSTEM_BASE, D, Machine, OpenFunctions, Queue

MIB = 1 << 20
SYSTEM_VA = 1 << 31
PROGRESS = 0x80000  # HBM offset where a program that never ends counts its rounds


def start(queue: Queue, command: str, payload: bytes) -> int:
    fence = queue.push(command, payload)
    queue.ring_doorbell()
    return fence


def endless(*body: bytes) -> bytes:
    """The body again and again, each time with a thousand steps of a loop, counting at PROGRESS."""
    loop = pc(len(body) + 1)
    rounds = [
        ins("LI", rd=31, value=0),
        ins("ADD", rd=31, a=R(31), b=1),
        ins("BLT", a=R(31), b=1000, target=loop),
        ins("ADD", rd=30, a=R(30), b=1),
        ins("ST", addr=PROGRESS, value=R(30), mode="U64"),
        ins("JMP", target=pc(0)),
    ]
    return b"".join([*body, *rounds])


def run_endless(machine: Machine, *body: bytes) -> Queue:
    queue = Queue(machine)
    start(queue, "RUN", queue.run_payload(endless(*body)))
    machine.wait_for(lambda: machine.word(PROGRESS) > 0, "the first round")
    return queue


def test_functions_have_numbers(open_functions: OpenFunctions) -> None:
    assert [machine.reg("FUNCTION") for machine in open_functions(3)] == [0, 1, 2]


def test_equal_work_makes_equal_progress(open_functions: OpenFunctions) -> None:
    machines = open_functions(3)
    for machine in machines:
        run_endless(machine)
    begin = [machine.word(PROGRESS) for machine in machines]
    total, done = 9000, [0, 0, 0]
    while sum(done) < total:
        done = [m.word(PROGRESS) - b for m, b in zip(machines, begin, strict=True)]
    assert min(done) > total / 3 * 0.7, done


def test_long_instructions_do_not_buy_time(open_functions: OpenFunctions) -> None:
    """One instruction of the one takes several slices of the other."""
    size = dict(rows=24, row_bytes=MIB, dst_stride=MIB, src_stride=MIB)
    long, short = open_functions(2)
    queues = []
    for machine, body in ((long, ins("DMA_LOAD", dst=0, src=MIB, **size)), (short, b"")):
        machine.quiesce()
        queues.append(Queue(machine))
        start(queues[-1], "RUN", queues[-1].run_payload(endless(body)))
    for machine in (long, short):
        machine.resume()
    long.wait_for(lambda: long.word(PROGRESS) >= 60, "rounds of the long one")
    for queue in queues:
        queue.restart()  # the time of a command counts once it is over
    used = [machine.reg("STAT_BUSY_NS", 8) for machine in (long, short)]
    assert max(used) < 2 * min(used), used


def test_sleep_saves_nothing_up(open_functions: OpenFunctions) -> None:
    """After a time alone, the one that ran does not stand back for the other."""
    early, late = open_functions(2)
    run_endless(early)
    early.wait_for(lambda: early.word(PROGRESS) > 3000, "a long time alone")
    run_endless(late)
    begin = early.word(PROGRESS), late.word(PROGRESS)
    late.wait_for(lambda: late.word(PROGRESS) > begin[1] + 1500, "progress")
    assert early.word(PROGRESS) > begin[0] + 500


def test_a_function_that_hangs_holds_up_no_other(open_functions: OpenFunctions) -> None:
    hanging, other = open_functions(2)
    queue = Queue(hanging)
    hanging.inject("HANG", 1)
    start(queue, "RUN", queue.run_payload(program()))
    hanging.wait_for(lambda: hanging.injected("HANG") == 0, "hanging")
    Queue(other).run(program())
    assert queue.state == "RUNNING"
    queue.restart()
    queue.run(program())


def test_an_endless_program_holds_up_no_other(open_functions: OpenFunctions) -> None:
    loops, other = open_functions(2)
    queue, work = run_endless(loops), Queue(other)
    for _ in range(20):
        work.run(program())
    queue.restart()
    queue.run(program())
    assert other.reg("STAT_PROGRAMS", 8) == 20


def test_a_parked_function_holds_up_no_other(open_functions: OpenFunctions) -> None:
    parked, other = open_functions(2)
    run_endless(parked)
    parked.quiesce()
    seen = parked.word(PROGRESS)
    Queue(other).run(program())
    assert parked.word(PROGRESS) == seen
    parked.resume()
    parked.wait_for(lambda: parked.word(PROGRESS) > seen, "going on")


def test_a_slow_function_holds_up_no_other(open_functions: OpenFunctions) -> None:
    slow, other = open_functions(2)
    slow.inject("HBM_SLOW", 1 << 20)
    queue = Queue(slow)
    start(queue, "FILL", struct.pack("<QQI", MIB, 8 * MIB, 7))
    slow.wait_for(lambda: slow.get(9 * MIB - 4, 4) == b"\7\0\0\0", "filled")
    Queue(other).run(program())
    assert queue.fence == 0
    slow.inject("HBM_SLOW", 1)
    queue.wait(1)


class Stuck:
    """A function in an instruction that does not end before it is let go: it has the engines."""

    def __init__(self, machine: Machine) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        machine.on_dma = self._hold
        self.target = SYSTEM_BASE + 0x40000
        machine.map(0, SYSTEM_VA, self.target, 4096, hbm=False)
        self.queue = Queue(machine)
        code = vmem_program([(0, SYSTEM_VA, 4096)], [], [])
        self.fence = start(self.queue, "RUN", self.queue.run_payload(code))
        assert self.inside.wait(60)

    def _hold(self, _: str, addr: int, __: int) -> None:
        if addr == self.target:
            self.inside.set()
            assert self.go_on.wait(60)

    def end(self) -> None:
        self.go_on.set()
        self.queue.wait(self.fence)


@pytest.mark.parametrize("command", ["RUN", "COPY", "FILL"])
@pytest.mark.parametrize("leave", ["queue reset", "device reset", "quiesce", "exit"])
def test_who_waits_for_the_engines_can_leave(
    open_functions: OpenFunctions, leave: str, command: str
) -> None:
    holder, waits = open_functions(2)
    stuck, queue = Stuck(holder), Queue(waits)
    payload = {
        "RUN": queue.run_payload(program()),
        "COPY": struct.pack("<QQQ", MIB, 2 * MIB, 64),
        "FILL": struct.pack("<QQI", MIB, 64, 7),
    }[command]
    before = waits.get(MIB, 64)
    fence = start(queue, command, payload)
    waits.wait_for(lambda: queue.state == "RUNNING", "waiting")
    if leave == "queue reset":
        queue.restart()
        queue.do("NOP")  # which needs no engine
    elif leave == "device reset":
        waits.reset()
        waits.wait_reset()
    elif leave == "quiesce":
        waits.quiesce()
        stuck.end()
        assert queue.state == "PREEMPTED" and queue.fence == 0
        waits.resume()
        queue.wait(fence)
        return
    else:
        waits.close()
    assert waits.get(MIB, 64) == before
    stuck.end()


def test_a_waiting_function_still_answers(open_functions: OpenFunctions) -> None:
    """Invalidations and test interrupts do not wait for another function's instruction."""
    holder, waits = open_functions(2)
    stuck, queue = Stuck(holder), Queue(waits)
    fence = start(queue, "RUN", queue.run_payload(program()))
    waits.wait_for(lambda: queue.state == "RUNNING", "waiting")
    waits.write(D["REG_TLB_INVALIDATE"], 0)
    waits.write(D["REG_TEST_IRQ"], 9)
    waits.wait_irqs(9, 1)
    waits.wait_for(lambda: waits.reg("TLB_PENDING") == 0, "invalidation")
    assert queue.fence == 0
    stuck.end()
    queue.wait(fence)


def test_waiting_is_not_work(open_functions: OpenFunctions) -> None:
    holder, waits = open_functions(2)
    stuck, queue = Stuck(holder), Queue(waits)
    begin = waits.reg("TIME", 8)
    fence = start(queue, "RUN", queue.run_payload(program()))
    waits.wait_for(lambda: waits.reg("TIME", 8) > begin + 500_000_000, "time goes by")
    stuck.end()
    queue.wait(fence)
    assert waits.reg("STAT_BUSY_NS", 8) < 250_000_000


def test_a_holder_that_exits_leaves_the_engines(open_functions: OpenFunctions) -> None:
    machines = open_functions(3)
    for machine in machines[:2]:
        run_endless(machine)
    work = Queue(machines[2])
    work.run(program())
    machines[0].close()
    work.run(program())
    machines[1].close()
    work.run(program())


def test_vmem_is_each_functions_own(open_functions: OpenFunctions) -> None:
    """The same context number of two functions is two contexts."""
    one, two = open_functions(2)
    mark, out = bytes(range(256)) * 16, 4 * MIB
    first, second = Queue(one), Queue(two)
    first.run(vmem_program([(0, one.place(mark), 4096)], [], []))
    two.put(out, b"\xff" * 4096)
    second.run(vmem_program([], [], [(out, 0, 4096)]))
    assert two.get(out, 4096) == bytes(4096)
    first.run(vmem_program([], [], [(out, 0, 4096)]))
    assert one.get(out, 4096) == mark


def test_resets_of_one_leave_anothers_work_whole(open_functions: OpenFunctions) -> None:
    """The threads skip the parts of a stopped function's job, and only those."""
    rng = random.Random(7)
    victim, works = open_functions(2)
    queue = Queue(works)
    size = 6 * MIB
    for number in range(25):
        victim.identity()
        victim.enable()
        broken = Queue(victim)
        start(broken, "COPY", struct.pack("<QQQ", 32 * MIB, 8 * MIB, 16 * MIB))
        data = rng.randbytes(4096) * (size // 4096)
        works.put(8 * MIB, data)
        fence = start(queue, "COPY", struct.pack("<QQQ", 24 * MIB, 8 * MIB, size))
        victim.reset()
        queue.wait(fence)
        assert works.get(24 * MIB, size) == data, number
        victim.wait_reset()


def test_a_reset_that_clears(open_functions: OpenFunctions) -> None:
    """No program of before writes once it is over, and nothing is left."""
    machine, other = open_functions(2)
    other.put(0, b"other")
    for number in range(1, 6):
        machine.put(3 * MIB, b"secret")
        machine.put(len(machine.hbm) - 1, b"x")
        machine.identity()
        machine.enable()
        run_endless(machine)
        machine.reset_and_clear()
        machine.wait_reset()
        assert machine.cleared == number
        assert machine.hbm.tobytes() == bytes(len(machine.hbm))
    machine.put(3 * MIB, b"secret")
    machine.reset_and_clear()  # with nothing to stop
    machine.wait_reset()
    assert machine.get(3 * MIB, 6) == bytes(6)
    assert other.get(0, 5) == b"other" and other.cleared == 0


def test_clearing_goes_on_after_a_pause(open_functions: OpenFunctions) -> None:
    machine = open_functions(1)[0]
    for number in range(1, 21):
        machine.put(len(machine.hbm) - 6, b"secret")
        machine.reset_and_clear()
        machine.quiesce()
        machine.resume()
        machine.wait_reset()
        assert machine.get(len(machine.hbm) - 6, 6) == bytes(6) and machine.cleared == number


def test_clearing_ends_with_the_machine(open_functions: OpenFunctions) -> None:
    machine = open_functions(1)[0]
    machine.inject("RESET_STUCK", 1)
    machine.put(0, b"x")
    machine.reset_and_clear()
    assert machine.reg("STATUS") & D["STATUS_RESETTING"]
    assert machine.get(0, 1) == b"x" and machine.cleared == 0
    machine.inject("RESET_STUCK", 0)
    machine.wait_for(lambda: machine.cleared == 1, "cleared")
    machine.reset_and_clear()
    machine.close()
