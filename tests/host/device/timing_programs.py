# SPDX-License-Identifier: MIT
"""Machines with a timing model, and the programs that its tests run on them."""

from __future__ import annotations

import random
from collections.abc import Callable

from asm import ins, program
from machine import Machine, Queue
from timing_reference import Step

Opener = Callable[..., Machine]
ROW = {"rows": 1, "dst_stride": 0, "src_stride": 0}


def open_timed(open_machine: Opener, **options: object) -> Queue:
    # Most programs here are about time, and race.
    settings = {"timing": "v5e", "hbm_bytes": 32 << 20, "check_races": False}
    machine = open_machine(**settings | options)
    machine.identity()
    machine.enable()
    return Queue(machine)


def load(size: int = 64, dst: int = 0, src: int = 0, **more: object) -> bytes:
    return ins("DMA_LOAD", dst=dst, src=src, row_bytes=size, **ROW, **more)  # type: ignore[arg-type]


def store(size: int = 64, **more: object) -> bytes:
    return ins("DMA_STORE", dst=8 << 20, src=128, row_bytes=size, **ROW, **more)  # type: ignore[arg-type]


def add(rows: int = 1, width: int = 16, **more: object) -> bytes:
    strides = {name: width * 4 for name in ("dst_stride", "a_stride", "b_stride")}
    return ins("V_ADD", dst=1 << 20, a=0, b=0, rows=rows, width=width, **strides, **more)  # type: ignore[arg-type]


def matmul(m: int, n: int, k: int, fmt: str = "Q8_0", **more: object) -> bytes:
    return ins(
        "MATMUL", dst=16 << 20, src=0, weight=1 << 20, m=m, n=n, k=k, dst_stride=4 * n,
        src_stride=4 * k, fmt=fmt, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def span(record: dict[str, int]) -> tuple[int, int, int]:
    return record["issue"], record["start"], record["end"]


def random_steps(chance: random.Random, length: int) -> list[Step]:
    """Instructions whose waits earlier ones satisfy; counters are shared at random."""
    steps: list[Step] = []
    signals = [0] * 5
    for _ in range(length):
        kind = chance.choice(["LOAD", "LOAD", "ADD", "ADD", "MATMUL", "NOP", "NOP", "SYNC"])
        wait, value = chance.randrange(5), 0
        if wait:
            value = chance.randint(0, signals[wait])
        signal = chance.randrange(5)
        signals[signal] += signal != 0
        steps.append(Step(kind, chance.choice([1, 3, 17]), signal, wait, value))
    return steps


def code_of(steps: list[Step]) -> bytes:
    made = []
    for step in steps:
        sync = {"signal": step.signal, "wait": (step.wait, step.value) if step.wait else None}
        if step.kind == "LOAD":
            made.append(load(step.size * 4096, dst=0, src=1 << 20, **sync))
        elif step.kind == "ADD":
            made.append(add(step.size, 256, **sync))
        elif step.kind == "MATMUL":
            made.append(matmul(step.size, 64, 32 * step.size, **sync))
        else:
            made.append(ins(step.kind, **sync))  # type: ignore[arg-type]
    return program(*made)
