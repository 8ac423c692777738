# SPDX-License-Identifier: MIT
"""The race checker: every missing wait is found in one run, and nothing else is."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
from asm import R, ins, pc, program
from machine import Machine, Queue
from race_reference import Access, Step, races

Opener = Callable[..., Machine]
ROW = {"rows": 1, "row_bytes": 64, "dst_stride": 0, "src_stride": 0}
OUT = 2 << 20


@pytest.fixture
def checked(open_machine: Opener) -> Queue:
    return _open(open_machine)


def _open(open_machine: Opener, **options: object) -> Queue:
    machine = open_machine(**{"check_races": True, "hbm_bytes": 32 << 20} | options)
    machine.identity()
    machine.enable()
    return Queue(machine)


def _load(dst: int = 0, src: int = 1 << 20, **more: object) -> bytes:
    return ins("DMA_LOAD", dst=dst, src=src, **ROW, **more)  # type: ignore[arg-type]


def _store(src: int = 128, dst: int = OUT, **more: object) -> bytes:
    return ins("DMA_STORE", dst=dst, src=src, **ROW, **more)  # type: ignore[arg-type]


def _add(dst: int = 128, a: int = 0, b: int = 64, **more: object) -> bytes:
    strides = {"dst_stride": 64, "a_stride": 64, "b_stride": 64}
    return ins("V_ADD", dst=dst, a=a, b=b, rows=1, width=16, **strides, **more)  # type: ignore[arg-type]


def _fault(queue: Queue, *code: bytes) -> tuple[str, int, int, int, int]:
    """(cause, pc and pc of the other as indices, address, access)."""
    fault = queue.run_fault(program(*code))
    other = queue.reg("FAULT_OTHER_PC")
    found = (
        str(fault["cause"]), int(fault["pc"]) // 64, other // 64, int(fault["addr"]),
        int(fault["access"]),
    )  # fmt: skip
    queue.restart()
    return found


# --- one hazard at a time ---


@pytest.mark.parametrize("seed", range(6))
def test_each_wait_of_the_example_is_needed(open_machine: Opener, seed: int) -> None:
    """Whichever order was run: the report names both instructions."""
    queue = _open(open_machine, seed=seed)
    first, second = _load(0, signal=1), _load(64, signal=1)
    queue.run(program(first, second, _add(wait=(1, 2), signal=2), _store(wait=(2, 1))))
    # A load that may come after the sum; the first byte of the second row.
    assert _fault(queue, first, second, _add(wait=(1, 1), signal=2), _store(wait=(2, 1))) == (
        "RACE_VMEM", 2, 1, 64, 1,
    )  # fmt: skip
    cause, late, early, _, _ = _fault(queue, first, second, _add(signal=2), _store(wait=(2, 1)))
    assert (cause, late) == ("RACE_VMEM", 2) and early in (0, 1)
    assert _fault(queue, first, second, _add(wait=(1, 2), signal=2), _store()) == (
        "RACE_VMEM", 3, 2, 128, 1,
    )  # fmt: skip


def test_a_write_after_a_read_and_a_write_after_a_write(checked: Queue) -> None:
    # The load would overwrite what the sum reads, or what it writes.
    assert _fault(checked, _add(), _load(0)) == ("RACE_VMEM", 1, 0, 0, 2)
    assert _fault(checked, _add(dst=256), _load(256)) == ("RACE_VMEM", 1, 0, 256, 2)
    checked.run(program(_add(), _load(512)))
    checked.run(program(_store(0), _add()))  # two readers


def test_memory_is_watched_by_the_byte(checked: Queue) -> None:
    """Rows with gaps: what falls between them is no conflict, one word too much is."""
    strided = ins(
        "DMA_LOAD", dst=0, src=1 << 20, rows=4, row_bytes=64, dst_stride=256, src_stride=64
    )
    between = _add(dst=64 + 256, a=128, b=128)
    checked.run(program(strided, between))
    assert _fault(checked, strided, _add(dst=512, a=64, b=64)) == ("RACE_VMEM", 1, 0, 512, 2)
    wide = ins(
        "V_ADD", dst=64, a=1024, b=1024, rows=1, width=49, dst_stride=0, a_stride=0, b_stride=0
    )
    assert _fault(checked, strided, wide) == ("RACE_VMEM", 1, 0, 256, 2)


def test_scalar_words_race_with_engines(checked: Queue) -> None:
    assert _fault(checked, _load(), ins("LDV", rd=1, addr=60)) == ("RACE_VMEM", 1, 0, 60, 1)
    checked.run(program(_load(), ins("SYNC"), ins("LDV", rd=1, addr=60)))
    checked.run(program(_load(signal=3), ins("NOP", wait=(3, 1)), ins("LDV", rd=1, addr=60)))
    store = ins("ST", addr=OUT + 60, value=1, mode="U32")
    assert _fault(checked, _store(), store) == ("RACE_GLOBAL", 1, 0, OUT + 60, 2)
    load = ins("LD", rd=1, addr=OUT + 56, mode="U64")
    assert _fault(checked, _store(), load) == ("RACE_GLOBAL", 1, 0, OUT + 56, 1)
    # Issue comes before start: what the sequencer did before is done.
    checked.run(program(store, load, _load(0, OUT)))
    # The other way around it is not: the transfer may be late.
    assert _fault(checked, _load(0, OUT), store) == ("RACE_GLOBAL", 1, 0, OUT + 60, 2)


def test_tables_and_lists(checked: Queue) -> None:
    """A scatter and a gather of other rows are apart; of one row they race."""
    machine = checked.machine
    lists = machine.place(struct.pack("<6I", 3, 0xFFFFFFFF, 5, 4, 6, 5))
    table = {"table": OUT, "width": 16, "table_rows": 8, "fmt": "F16"}
    bring = ins("DMA_LOAD", dst=4096, src=lists, rows=1, row_bytes=24, dst_stride=0, src_stride=0)
    scatter = ins("DMA_SCATTER", src=0, index=4096, count=3, src_stride=64, **table)
    write = ins("ST", addr=OUT + 4 * 32, value=0, mode="U64")
    checked.run(program(bring, ins("SYNC"), scatter, write))  # row 4; the scatter's are 3 and 5
    row5 = ins("ST", addr=OUT + 5 * 32 + 24, value=0, mode="U64")
    assert _fault(checked, bring, ins("SYNC"), scatter, row5) == (
        "RACE_GLOBAL", 3, 2, OUT + 5 * 32 + 24, 2,
    )  # fmt: skip
    gather = ins("DMA_GATHER", dst=0, index=4104, count=2, dst_stride=64, **table)  # 5 and 4
    checked.run(program(bring, ins("SYNC"), gather, ins("ST", addr=OUT + 6 * 32, value=0)))
    assert _fault(checked, bring, ins("SYNC"), gather, write)[0] == "RACE_GLOBAL"
    # The list itself.
    take = ins(
        "V_TAKE", dst=0, src=512, index=4096, rows=1, width=16, src_rows=8, dst_stride=64,
        src_stride=64,
    )  # fmt: skip
    assert _fault(checked, bring, take)[:3] == ("RACE_VMEM", 1, 0)
    # Of the source only the rows that are named: row 3 lies at 512 + 192.
    checked.run(program(bring, ins("SYNC"), take, _load(512 + 256)))
    assert _fault(checked, bring, ins("SYNC"), take, _load(512 + 192))[3] == 512 + 192


def test_attention_and_its_cache(checked: Queue) -> None:
    machine = checked.machine
    lists = machine.place(struct.pack("<4I2I", 6, 2, 0, 0, 5, 0))  # a table; 5 keys, table 0
    bring = ins("DMA_LOAD", dst=4096, src=lists, rows=1, row_bytes=24, dst_stride=0, src_stride=0)
    attend = ins(
        "V_ATTN", dst=8192, q=0, k_cache=OUT, v_cache=OUT + (1 << 16), rows=1, row_info=4112,
        block_tables=4096, num_slots=64, fmt="F16", aux=1.0, heads=1, kv_heads=1, head_dim=16,
        block_size=4, max_blocks=4,
    )  # fmt: skip
    sync = ins("SYNC")
    # A slot is 32 bytes; blocks 6 (slots 24 to 27) and 2 (slot 8 alone).
    near = [ins("ST", addr=OUT + 32 * slot, value=0, mode="U64") for slot in (7, 9, 23, 28)]
    checked.run(program(bring, sync, attend, *near))
    for slot in (8, 24, 27):
        hit = ins("ST", addr=OUT + (1 << 16) + 32 * slot + 24, value=0, mode="U64")
        assert _fault(checked, bring, sync, attend, hit)[:3] == ("RACE_GLOBAL", 3, 2)
    # Table entries beyond the keys are not read.
    past = ins("DMA_LOAD", dst=4104, src=lists, rows=1, row_bytes=4, dst_stride=0, src_stride=0)
    checked.run(program(bring, sync, attend, past))


def test_products_read_their_weights_and_their_sum(checked: Queue) -> None:
    product = ins(
        "MATMUL", dst=4096, src=0, weight=OUT, m=2, n=16, k=32, dst_stride=64, src_stride=128,
        fmt="Q8_0",
    )  # fmt: skip
    weight = ins("ST", addr=OUT + 536, value=0, mode="U64")
    assert _fault(checked, product, weight) == ("RACE_GLOBAL", 1, 0, OUT + 536, 2)
    checked.run(program(product, ins("ST", addr=OUT + 544, value=0, mode="U64")))
    assert _fault(checked, product, _load(64 + 128))[:3] == ("RACE_VMEM", 1, 0)
    assert _fault(checked, product, _store(4096 + 64, 3 << 20))[:3] == ("RACE_VMEM", 1, 0)


# --- what orders ---


def test_order_is_passed_on(checked: Queue) -> None:
    """DMA to VPU to MXU: the product needs no wait of its own for the load."""
    product = ins(
        "MATMUL", dst=8192, src=0, weight=OUT, m=1, n=16, k=32, dst_stride=64, src_stride=128,
        fmt="Q8_0", wait=(2, 1),
    )  # fmt: skip
    checked.run(program(_load(0, signal=1), _add(1024, wait=(1, 1), signal=2), product))
    # Through the sequencer: a scalar's wait holds up all that is issued behind it.
    checked.run(program(_load(0, signal=1), ins("NOP", wait=(1, 1)), _add()))
    # Signalled by the sequencer in turn.
    checked.run(program(_load(0, signal=1), _add(wait=(2, 1)), ins("NOP", wait=(1, 1), signal=2)))


def test_a_wait_that_is_issued_first(checked: Queue) -> None:
    """An order against the program's: the sum waits for a load that comes later."""
    checked.run(program(_add(wait=(3, 1)), _load(0, signal=3)))
    checked.run(program(_add(dst=0, a=128, b=128, signal=3), _load(0, wait=(3, 1))))


def test_two_engines_on_one_counter(checked: Queue) -> None:
    """One signal may come from either engine; all of them leave no doubt."""
    load, other = _load(0, signal=1), _add(dst=512, a=1024, b=1024, signal=1)
    product = {
        "dst": 8192, "src": 0, "weight": OUT, "m": 1, "n": 16, "k": 32, "dst_stride": 64,
        "src_stride": 128, "fmt": "Q8_0",
    }  # fmt: skip
    both = ins("MATMUL", wait=(1, 2), **product)
    either = ins("MATMUL", wait=(1, 1), **product)
    checked.run(program(load, other, both))
    assert _fault(checked, load, other, either)[:3] == ("RACE_VMEM", 2, 0)
    # The other engine's signal may come early even when it is issued behind the wait.
    assert _fault(checked, load, either, other)[:3] == ("RACE_VMEM", 1, 0)
    # Unless it is behind the product's own.
    later = _add(dst=512, a=1024, b=1024, signal=1, wait=(4, 1))
    checked.run(program(load, ins("MATMUL", wait=(1, 1), signal=4, **product), later))
    # Or behind a scalar that waits for it.
    checked.run(
        program(
            load, ins("MATMUL", wait=(1, 1), signal=4, **product), ins("NOP", wait=(4, 1)), other
        )
    )


def test_a_second_signal_of_one_engine(checked: Queue) -> None:
    """The n-th of an engine's signals is behind all before."""
    loads = [_load(64 * i, signal=1) for i in range(4)]
    checked.run(program(*loads, _add(dst=1024, a=128, b=64, wait=(1, 3))))
    assert _fault(checked, *loads, _add(dst=1024, a=192, b=64, wait=(1, 3)))[:3] == (
        "RACE_VMEM", 4, 3,
    )  # fmt: skip


def test_counters_go_on_after_sync(checked: Queue) -> None:
    checked.run(
        program(
            _load(0, signal=1), ins("SYNC", signal=1), _load(64, signal=1),
            _add(dst=256, a=64, b=64, wait=(1, 3)),
        )
    )  # fmt: skip
    # Two signals were there before: the third is the one to wait for.
    assert _fault(
        checked, _load(0, signal=1), ins("SYNC", signal=1), _load(64, signal=1),
        _add(dst=256, a=64, b=64, wait=(1, 2)),
    )[:3] == ("RACE_VMEM", 3, 2)  # fmt: skip


def test_loops(checked: Queue) -> None:
    """A double buffer, three rounds: the wait for the buffer to be free is the subtle one."""

    def code(free: bool) -> bytes:
        wait = (2, R(2)) if free else None
        return program(
            ins("LI", rd=1, value=0),  # rounds
            ins("LI", rd=2, value=0),  # sums that must be over
            ins("LI", rd=4, value=1),
            _load(0, wait=wait, signal=1),  # 3
            _add(dst=1024, a=0, b=0, wait=(1, R(1) + 1), signal=2),
            ins("ADD", rd=1, a=R(1), b=1),
            ins("ADD", rd=2, a=R(2), b=1),
            ins("BLT", a=R(1), b=R(4) + 2, target=pc(3)),
        )

    checked.run(code(True))
    fault = checked.run_fault(code(False))
    assert (fault["cause"], fault["pc"]) == ("RACE_VMEM", pc(3))
    assert checked.reg("FAULT_OTHER_PC") == pc(4)


# --- what happens then ---


def test_a_fault_that_a_race_explains(checked: Queue) -> None:
    fault = checked.run_fault(program(_load(), _add(), ins("TRAP", code=1)))
    assert (fault["cause"], fault["pc"]) == ("RACE_VMEM", 64)
    assert any("it ended with TRAP" in line for line in checked.machine.errors)
    checked.restart()
    assert checked.run_fault(program(_load(), ins("TRAP", code=1)))["cause"] == "TRAP"
    assert checked.reg("FAULT_OTHER_PC") == 0


def test_it_is_said_in_words(checked: Queue) -> None:
    machine = checked.machine
    checked.run_fault(program(ins("NOP"), _load(), _add()))
    assert machine.errors[-1] == (
        "race: V_ADD at 0x80 reads VMEM 0x0 to 0x3f, and DMA_LOAD at 0x40, which writes it, "
        "is not ordered to it"
    )
    assert ("RACE", 0, 128, 64) in machine.events
    assert "fault RACE_VMEM access 1 address 0x0 pc 0x80 entry 0 with pc 0x40" in machine.describe()


def test_nothing_is_checked_unless_asked(open_machine: Opener) -> None:
    queue = _open(open_machine, check_races=False)
    queue.run(program(_load(), _add(), _store()))


def test_programs_are_apart(checked: Queue) -> None:
    checked.run(program(_load()))
    checked.run(program(_add()))


def test_more_than_is_kept_is_not_checked_until_the_next_sync(checked: Queue) -> None:
    """A hundred and forty thousand scalars between: no report, a message, and on after SYNC."""
    long = [
        ins("LI", rd=1, value=0), ins("ADD", rd=1, a=R(1), b=1), ins("LI", rd=2, value=70000),
        ins("BLT", a=R(1), b=R(2), target=pc(2)),
    ]  # fmt: skip
    checked.run(program(_load(), *long, _add()))
    assert any("too much between two SYNCs" in line for line in checked.machine.errors)
    assert _fault(checked, _load(), *long, ins("SYNC"), _load(), _add())[:3] == ("RACE_VMEM", 7, 6)


def test_being_set_aside_hides_nothing(open_machine: Opener) -> None:
    """Each queue has a log of its own: a program that races and one that does not."""
    clean = program(*[_load(signal=1), ins("NOP", wait=(1, 1)), _add(), ins("SYNC", signal=1)])
    racy = program(*[_load(64 * i + 4096) for i in range(20)], _add(a=4096 + 640))
    preemptions = 0
    for seed in range(1, 7):
        first = _open(open_machine, seed=seed)
        machine = first.machine
        second = Queue(machine, 1)
        fence = 0
        for _ in range(8):
            fence = first.push("RUN", first.run_payload(clean))
        second.push("RUN", second.run_payload(racy))
        first.ring_doorbell()
        second.ring_doorbell()
        machine.wait_irqs(0, 1)
        assert second.fault()["cause"] == "RACE_VMEM"
        assert (second.reg("FAULT_PC"), second.reg("FAULT_OTHER_PC")) == (pc(20), pc(10))
        preemptions += second.reg("PREEMPTIONS")
        first.wait(fence)
        preemptions += first.reg("PREEMPTIONS")
    assert preemptions, "no program was ever set aside"


# --- against brute force ---


def _random_program(chance: random.Random) -> list[Step]:
    """A few instructions over a few rows, with counters and waits at random."""
    steps, signals = [], [0] * 4
    for _ in range(chance.randint(3, 6)):
        engine = chance.choice(["DMA", "DMA", "VPU", "VPU", "SEQ"])
        counter = chance.randrange(4)
        value = chance.randint(0, signals[counter]) if counter else 0
        signal = chance.randrange(4)
        rows = [chance.randrange(4) for _ in range(3)]
        if engine == "DMA":
            accesses = [Access(rows[0], True)]
        elif engine == "VPU":
            accesses = [Access(rows[0], True), Access(rows[1], False), Access(rows[2], False)]
        else:
            accesses = [Access(rows[0], False)]
        steps.append(Step(engine, signal, counter, value, tuple(accesses)))
        signals[signal] += signal != 0
    return steps


def _encode(steps: list[Step]) -> bytes:
    made = []
    for step in steps:
        sync = {"signal": step.signal, "wait": (step.wait, step.value) if step.wait else None}
        at = [64 * access.row for access in step.accesses]
        if step.engine == "DMA":
            made.append(_load(at[0], **sync))
        elif step.engine == "VPU":
            made.append(_add(at[0], at[1], at[2], **sync))
        else:
            made.append(ins("LDV", rd=1, addr=at[0], **sync))  # type: ignore[arg-type]
    return program(*made)


def test_random_programs_against_all_their_orders(checked: Queue) -> None:
    """A race is reported exactly when two legal orders disagree about two accesses."""
    chance = random.Random(11)
    outcomes = []
    for _ in range(400):
        steps = _random_program(chance)
        wanted = races(steps)
        payload = checked.run_payload(_encode(steps))
        checked.machine._next_free = 4 << 20  # the program's memory again
        if not wanted:
            checked.do("RUN", payload)
        else:
            fault = checked.expect_fault("RUN", payload)
            assert fault["cause"] == "RACE_VMEM", steps
            pair = (checked.reg("FAULT_OTHER_PC") // 64, int(fault["pc"]) // 64)
            assert (*pair, int(fault["addr"]) // 64) in wanted, steps
            checked.restart()
        outcomes.append(bool(wanted))
    assert 50 < sum(outcomes) < 350


def test_the_report_does_not_depend_on_the_order_that_was_run(open_machine: Opener) -> None:
    chance = random.Random(5)
    codes = [_encode(_random_program(chance)) for _ in range(30)]

    def reports(seed: int) -> list[object]:
        queue = _open(open_machine, seed=seed, threads=1)
        found: list[object] = []
        for code in codes:
            queue.push("RUN", queue.run_payload(code))
            queue.ring_doorbell()
            machine = queue.machine
            machine.wait_for(lambda: queue.state == "FAULTED" or queue.fence == queue.fences, "end")
            if queue.state == "FAULTED":
                fault = queue.fault() | {"entry": 0}
                found.append((fault, queue.reg("FAULT_OTHER_PC")))
                queue.restart()
                queue.fences = 0
                struct.pack_into("<Q", machine.system, queue.fence_at, 0)
            else:
                found.append(None)
        return found

    wanted = reports(0)
    assert any(wanted) and not all(wanted)
    assert all(reports(seed) == wanted for seed in range(1, 9))
