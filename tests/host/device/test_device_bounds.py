# SPDX-License-Identifier: MIT
"""However long an instruction works, its queue stops in the time that the driver grants."""

from __future__ import annotations

import struct
import time

import pytest
from asm import ins, program
from machine import VALID, D, Machine, Queue

STOP_S = 1.0  # as kmod waits for a queue before it resets everyone's device
FOREVER = ins("JMP", target=0)
INFO, TABLES, LISTS = 1 << 20, 16 << 20, 4 << 20


def _attention(rows: int, heads: int, head_dim: int, block_size: int, max_blocks: int) -> bytes:
    """Block tables of zeros, as VMEM is at first: every key lies in the first block."""
    return ins(
        "V_ATTN",
        dst=24 << 20,
        q=0,
        k_cache=0,
        v_cache=0,
        rows=rows,
        row_info=INFO,
        block_tables=TABLES,
        num_slots=block_size,
        fmt="BF16",
        aux=1.0,
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
        max_blocks=max_blocks,
    )


def _matmul(m: int, k: int) -> bytes:
    return ins(
        "MATMUL",
        dst=16 << 20,
        src=0,
        weight=0,
        m=m,
        n=16,
        k=k,
        dst_stride=64,
        src_stride=0,
        fmt="Q4_0",
    )


def _infos(*infos: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<II", *info) for info in infos)


KEYS = 1 << 20
LONG = {
    # Rows whose keys are many, so that one row is much work.
    "attention of long contexts": (_infos(*[(KEYS, 0)] * 64), _attention(64, 4, 256, 1 << 11, 512)),
    # Rows that alternate between tables, so that each is checked anew.
    "tables to check": (
        _infos(*[(65535, 0), (65535, 1)] * 32768),
        _attention(65536, 1, 16, 1, 65535),
    ),
    "a matrix of few columns": (b"\0" * 8, _matmul(1 << 17, 1 << 18)),
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_instruction_stops_at_once(machine: Machine, queue: Queue, name: str) -> None:
    info, code = LONG[name]
    at = machine.place(info)
    row = min(len(info), 1 << 12)
    load = ins(
        "DMA_LOAD",
        dst=INFO,
        src=at,
        rows=len(info) // row,
        row_bytes=row,
        dst_stride=row,
        src_stride=row,
    )
    queue.push("RUN", queue.run_payload(program(load, code)))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    time.sleep(0.1)  # into the instruction
    assert queue.state == "RUNNING", queue.fault()
    start = time.monotonic()
    queue.restart()
    assert time.monotonic() - start < STOP_S
    queue.do("NOP")


def test_attention_has_a_limit_of_scores(machine: Machine, queue: Queue) -> None:
    """A row's scores are kept for all heads of a key head: that much, and no more."""
    info = machine.place(_infos((KEYS, 0)))
    load = ins("DMA_LOAD", dst=INFO, src=info, rows=1, row_bytes=8, dst_stride=8, src_stride=8)
    fault = queue.run_fault(program(load, _attention(1, 5, 16, 1 << 11, 512)))
    assert (fault["cause"], fault["addr"]) == ("BAD_OPERAND", INFO)


def test_another_contexts_invalidation_waits_for_no_program(machine: Machine, queue: Queue) -> None:
    """Nor for an injected hang, which looks at its own."""
    for hang in (False, True):
        if hang:
            machine.inject("HANG", 1)
        queue.push(
            "RUN", queue.run_payload(program(*([] if hang else [_matmul(1 << 17, 1 << 18)])))
        )
        queue.ring_doorbell()
        machine.wait_for(lambda: queue.state == "RUNNING", "running")
        time.sleep(0.05)
        machine.write(D["REG_TLB_INVALIDATE"], 1)
        assert machine.reg("TLB_PENDING") == 0
        if hang:
            machine.write(D["REG_TLB_INVALIDATE"], 0)
            machine.wait_for(lambda: machine.reg("TLB_PENDING") == 0, "its own, too")
        assert queue.state == "RUNNING"
        queue.restart()


def test_a_context_given_away_while_another_runs_shows_nothing(
    machine: Machine, queue: Queue
) -> None:
    """VMEM of a context whose root changed during a program of another one."""
    machine.identity(1)
    theirs = Queue(machine, 1, context=1)
    secret = machine.place(b"secret!!")
    copy = {"rows": 1, "row_bytes": 8, "dst_stride": 8, "src_stride": 8}
    theirs.run(program(ins("DMA_LOAD", dst=0, src=secret, **copy)))
    queue.push("RUN", queue.run_payload(program(_matmul(1 << 17, 1 << 18))))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    machine.write(D["REG_CTX_ROOT"] + 8, 0, 8)
    machine.write(D["REG_CTX_ROOT"] + 8, machine.roots[1] | VALID, 8)
    queue.restart()
    out = machine.alloc(8)
    theirs.run(program(ins("DMA_STORE", dst=out, src=0, **copy)))
    assert machine.get(out, 8) == bytes(8)


def test_doorbells_take_nothing_back(machine: Machine, queue: Queue) -> None:
    for _ in range(2):
        queue.push("RUN", queue.run_payload(FOREVER))
    queue.ring_doorbell()
    machine.wait_for(lambda: queue.state == "RUNNING", "running")
    machine.doorbell(0, 0)
    queue.set("CTRL", D["Q_CTRL_RESET"])
    machine.wait_for(lambda: queue.state == "DISABLED", "queue reset")
    queue.tail = 0
    queue.set("CTRL", D["Q_CTRL_ENABLE"])
    blocker = Queue(machine, 1, priority=2)
    blocker.push("RUN", blocker.run_payload(FOREVER))
    blocker.ring_doorbell()
    machine.wait_for(lambda: blocker.state == "RUNNING", "running")
    queue.push("NOP")
    queue.ring_doorbell()
    machine.doorbell(0, 0)
    blocker.restart()
    machine.wait_irqs(0, 1)
    assert queue.fault()["cause"] == "BAD_RING"


def test_samples_do_not_replace_their_logits(machine: Machine, queue: Queue) -> None:
    """The result lies in the logits it is drawn from: refused, nothing read past an array."""
    params = machine.place(struct.pack("<fIfIQII", 1.0, 8, 0.5, 0, 1, 2, 0))
    logits = machine.place(struct.pack("<48f", *[100.0] * 48))
    copy = {"rows": 1, "dst_stride": 192, "src_stride": 192}
    fault = queue.run_fault(
        program(
            ins("DMA_LOAD", dst=0, src=logits, row_bytes=192, **copy),
            ins("DMA_LOAD", dst=4096, src=params, row_bytes=32, **copy),
            ins("V_SAMPLE", dst=0, logits=0, params=4096, rows=1, vocab=48, logits_stride=192),
        )
    )
    assert fault["cause"] == "BAD_OPERAND"
