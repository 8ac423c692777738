# SPDX-License-Identifier: MIT
"""Who rings a doorbell of an idle machine executes what is short, and nothing else."""

import random
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from asm import ins
from machine import Machine, Queue

FOREVER = ins("JMP", target=0)
SHORT_MOST = 16  # commands a doorbell's caller executes


@pytest.fixture
def machine(open_machine: Callable[..., Machine]) -> Machine:
    machine = open_machine(serve_short=True)
    machine.identity()
    machine.enable()
    return machine


@pytest.fixture
def threads(machine: Machine) -> Iterator[list[int]]:
    """Who made each DMA callback."""
    found: list[int] = []
    machine.on_dma = lambda *_: found.append(threading.get_ident())
    yield found
    machine.on_dma = None


def serve(machine: Machine, queue: Queue, threads: list[int], command: str, payload: bytes) -> bool:
    """Whether the caller did all of the command before its doorbell returned."""
    threads.clear()
    fence = queue.push(command, payload)
    queue.ring_doorbell()
    inline = queue.fence == fence and set(threads) == {threading.get_ident()}
    queue.wait(fence)
    machine.wait_for(lambda: queue.state == "READY", "ready")
    return inline


def settle(machine: Machine, queue: Queue, threads: list[int]) -> None:
    """The command thread goes to sleep."""
    machine.wait_for(lambda: serve(machine, queue, threads, "NOP", b""), "a sleeping machine")


def test_short_commands_are_done_when_the_doorbell_returns(
    machine: Machine, queue: Queue, threads: list[int]
) -> None:
    settle(machine, queue, threads)
    word = machine.alloc(64)
    for n in range(40):
        irqs = machine.irqs.count(queue.vector)
        assert serve(machine, queue, threads, "NOP", b"")
        assert serve(machine, queue, threads, "SIGNAL", struct.pack("<QQ", word, n + 1))
        assert machine.word(word) == n + 1
        assert serve(machine, queue, threads, "TIMESTAMP", struct.pack("<Q", word + 8))
        assert machine.irqs.count(queue.vector) == irqs + 3
    assert queue.reg("HEAD") == queue.reg("TAIL")


def test_what_may_take_long_is_the_command_threads(
    machine: Machine, queue: Queue, threads: list[int]
) -> None:
    word = machine.alloc(4096)
    for command, payload in (
        ("RUN", queue.run_payload(ins("HALT"))),
        ("COPY", struct.pack("<QQQ", word, word + 64, 64)),
        ("FILL", struct.pack("<QQI", word, 64, 7)),
        ("WAIT", struct.pack("<QQ", word, 0)),
    ):
        settle(machine, queue, threads)
        assert not serve(machine, queue, threads, command, payload)
        # The caller has looked at the entry, and no more.
        assert threads.count(threading.get_ident()) == 1 < len(threads)


def test_nothing_is_executed_beside_a_program(
    machine: Machine, queue: Queue, threads: list[int]
) -> None:
    other = Queue(machine, 1)
    settle(machine, other, threads)
    queue.push("RUN", queue.run_payload(FOREVER))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    for _ in range(5):
        threads.clear()
        fence = other.push("NOP")
        other.ring_doorbell()
        assert threading.get_ident() not in threads
        other.wait(fence)  # between two slices
    queue.restart()


def test_a_long_row_is_left_to_the_command_thread(machine: Machine, threads: list[int]) -> None:
    queue = Queue(machine, log2=6)
    settle(machine, queue, threads)
    word = machine.alloc(8)
    threads.clear()
    for n in range(60):
        last = queue.push("SIGNAL", struct.pack("<QQ", word, n))
    queue.ring_doorbell()
    queue.wait(last)
    assert machine.word(word) == 59
    mine = threading.get_ident()
    assert threads.count(mine) in (2 * SHORT_MOST, 2 * SHORT_MOST + 1)


def test_an_entry_is_read_once(machine: Machine, queue: Queue, threads: list[int]) -> None:
    """So its owner cannot turn a NOP that was looked at into a program."""
    settle(machine, queue, threads)
    mine = threading.get_ident()
    for _ in range(20):
        assert serve(machine, queue, threads, "NOP", b"")
        assert threads == [mine, mine]  # the entry and its fence


def test_a_bad_entry_faults_its_queue(machine: Machine, queue: Queue, threads: list[int]) -> None:
    settle(machine, queue, threads)
    other = Queue(machine, 1)
    assert queue.expect_fault("NOP", b"\1")["cause"] == "BAD_COMMAND"
    settle(machine, other, threads)
    assert other.expect_fault("SIGNAL", struct.pack("<QQ", 1 << 50, 1))["cause"] == "UNMAPPED"
    queue.restart()
    settle(machine, queue, threads)


def test_doorbells_of_many_threads(machine: Machine) -> None:
    """Callers, the command thread and resets of queues take turns: all is done, in order."""
    count, rounds = 6, 150
    queues = [Queue(machine, n, log2=6) for n in range(count)]
    words = [machine.alloc(64) for _ in queues]
    failures: list[BaseException] = []

    def drive(n: int) -> None:
        queue, word, rng = queues[n], words[n], random.Random(n)
        try:
            for r in range(rounds):
                for _ in range(rng.randrange(1, 20)):
                    kind = rng.randrange(4)
                    if kind == 0:
                        queue.push("NOP")
                    elif kind == 1:
                        queue.push("FILL", struct.pack("<QQI", word + 8, 8, r))
                    else:
                        queue.push("SIGNAL", struct.pack("<QQ", word, r))
                last = queue.push("SIGNAL", struct.pack("<QQ", word, r + 1))
                queue.ring_doorbell()
                queue.wait(last)
                assert machine.word(word) == r + 1
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=drive, args=(n,)) for n in range(count)]
    for worker in workers:
        worker.start()
    spare = Queue(machine, count)
    while any(worker.is_alive() for worker in workers):
        spare.push("RUN", spare.run_payload(FOREVER))
        spare.ring_doorbell()
        spare.restart()
        machine.quiesce()
        machine.resume()
    assert not failures, failures
