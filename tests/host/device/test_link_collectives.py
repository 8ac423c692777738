# SPDX-License-Identifier: MIT
"""Collectives as device programs: the link together with the matrix and vector engines."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from asm import ins, program
from fabric import Fabric, counter
from machine import D
from numerics_reference import dequantise, make_tiles

FMT_Q8_0 = 8
PARTIAL, TEMPORARY, SOURCE = 0, 8 << 20, 16 << 20  # in VMEM


def dense(rows: int, row_bytes: int) -> dict[str, int]:
    return {"rows": rows, "row_bytes": row_bytes, "dst_stride": row_bytes, "src_stride": row_bytes}


def exchange(chip: int, chips: int, out: int, block: int) -> bytes:
    """All-gather over a ring: each chip's block travels to all, one hop at a time."""
    to, back, size = (chip + 1) % chips, (chip - 1) % chips, block
    code = []
    for step in range(chips - 1):
        at = out + (chip - step) % chips * size
        code += [
            ins(
                "REMOTE_STORE", chip=to, dst=at, src=at, **dense(1, size), counter=1, mode="GLOBAL"
            ),
            ins("LINK_WAIT", counter=1, value=step + 1, chip=back),
        ]
    return program(*code)


@pytest.mark.parametrize(("shape", "seed"), [("2", 0), ("4", 3), ("4x4", 5)])
def test_all_gather(library: ctypes.CDLL, shape: str, seed: int) -> None:
    with Fabric(library, shape) as fabric:
        machines = fabric.add_all(seed=seed)
        block = 24 << 10
        blocks = [np.random.default_rng(chip).bytes(block) for chip in range(fabric.size)]
        out = 4 << 20
        for chip, machine in enumerate(machines):
            machine.put(out + chip * block, blocks[chip])
        fabric.run_all(
            {chip: (exchange(chip, fabric.size, out, block), ()) for chip in range(fabric.size)}
        )
        for machine in machines:
            assert machine.get(out, block * fabric.size) == b"".join(blocks)


def all_reduce(
    chip: int, chips: int, m: int, n: int, k: int, x: int, w: int, base: int
) -> tuple[bytes, int]:
    """
    out = sum over the chips of x w^T: the product of this chip's share of k, then
    reduce-scatter and all-gather of rows over the ring. Returns the program and
    where the result lies, which is the same on all chips.
    """
    to, back = (chip + 1) % chips, (chip - 1) % chips
    rows, row = m // chips, n * 4
    size = rows * row
    slots, out = 6 << 20, 5 << 20

    def part(step: int) -> int:  # in VMEM
        return PARTIAL + (chip - step) % chips * size

    code = [
        ins("DMA_LOAD", dst=SOURCE, src=x, **dense(m, k * 4), signal=1),
        ins(
            "MATMUL",
            dst=PARTIAL,
            src=SOURCE,
            weight=w,
            m=m,
            n=n,
            k=k,
            dst_stride=row,
            src_stride=k * 4,
            fmt="Q8_0",
            wait=(1, 1),
            signal=2,
        ),
    ]
    # Counter 2 counts the product and the sums, 1 the loads; link counter 1 what arrived.
    for step in range(chips - 1):
        code += [
            ins(
                "REMOTE_STORE",
                chip=to,
                dst=slots + step * size,
                src=part(step),
                **dense(rows, row),
                counter=1,
                mode="VMEM",
                wait=(2, step + 1),
            ),
            ins("LINK_WAIT", counter=1, value=base + step + 1, chip=back),
            ins(
                "DMA_LOAD",
                dst=TEMPORARY,
                src=slots + step * size,
                **dense(rows, row),
                wait=(2, step + 1),
                signal=1,
            ),
            ins(
                "V_ADD",
                dst=part(step + 1),
                a=part(step + 1),
                b=TEMPORARY,
                rows=rows,
                width=n,
                dst_stride=row,
                a_stride=row,
                b_stride=row,
                wait=(1, step + 2),
                signal=2,
            ),
        ]
    mine = (chip + 1) % chips  # the block whose sum is complete here
    code += [
        ins(
            "DMA_STORE",
            dst=out + mine * size,
            src=PARTIAL + mine * size,
            **dense(rows, row),
            wait=(2, chips),
            signal=1,
        )
    ]
    for step in range(chips - 1):
        at = out + (mine - step) % chips * size
        code += [
            ins(
                "REMOTE_STORE",
                chip=to,
                dst=at,
                src=at,
                **dense(1, size),
                counter=1,
                mode="GLOBAL",
                wait=(1, chips + 1),
            ),
            ins("LINK_WAIT", counter=1, value=base + chips + step, chip=back),
        ]
    return program(*code), out


@pytest.mark.parametrize(("chips", "seeds"), [(2, (0, 1, 2)), (4, (0, 1, 2)), (8, (0, 7))])
def test_all_reduce_of_sharded_products(
    library: ctypes.CDLL, chips: int, seeds: tuple[int, ...]
) -> None:
    """Tensor parallelism: a matrix split along k; the sum against numpy, and equal on all chips."""
    m, n, k = 16, 64, 64
    rng = np.random.default_rng(chips)
    x = rng.standard_normal((m, k * chips)).astype(np.float32)
    shards, reference = [], np.zeros((m, n))
    for chip in range(chips):
        q = rng.integers(-127, 128, (n, k)).astype(np.int64)
        d = rng.uniform(0.01, 0.02, (n, k // 32)).astype(np.float16)
        none = np.zeros_like(d)
        shards.append(make_tiles(q, d, none, FMT_Q8_0))
        weights = np.asarray(dequantise(q, d, none, FMT_Q8_0), np.float64)
        reference += x[:, chip * k : (chip + 1) * k].astype(np.float64) @ weights.T
    results = set()
    for seed in seeds:
        with Fabric(library, str(chips)) as fabric:
            machines = fabric.add_all(seed=seed)
            programs = {}
            for chip, machine in enumerate(machines):
                share = x[:, chip * k : (chip + 1) * k]
                x_at = machine.place(share.tobytes())
                w_at = machine.place(bytes(shards[chip]))
                code, out = all_reduce(chip, chips, m, n, k, x_at, w_at, 0)
                programs[chip] = (code, ())
            fabric.run_all(programs)
            for machine in machines:
                results.add(machine.get(out, m * n * 4))
                assert counter(machine, 1) == 2 * (chips - 1)
                assert machine.reg("LINK_ERR") == 0 == machine.read(D["REG_ERR_QUEUES"])
    assert len(results) == 1, "the same bits on every chip and in every order"
    got = np.frombuffer(results.pop(), np.float32).reshape(m, n)
    # The one rounding that is not f32's is that of the activations, to 16 bits a block.
    assert np.abs(got - reference).max() <= 1e-4 * np.abs(reference).max()
