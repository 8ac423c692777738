# SPDX-License-Identifier: MIT
"""The timing model's LINK engine, by hand; parameters are written out, apart from timing.toml.

v5e: issue 4 cycles, HBM 546 bytes a cycle after 500, a store is set up in 100, a cable carries
33 bytes a cycle and takes 500 to the next chip.
"""

from __future__ import annotations

import ctypes

import pytest
from asm import ins, program
from fabric import DOWN, XP, Fabric
from profiles import run_profiled


def store(chip: int, size: int, mode: str) -> bytes:
    return ins(
        "REMOTE_STORE",
        chip=chip,
        dst=4 << 20,
        src=0,
        rows=1,
        row_bytes=size,
        dst_stride=0,
        src_stride=0,
        counter=1,
        mode=mode,
    )


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize(
    ("chip", "hops"), [(0, 0), (1, 1), (2, 2), (3, 1), (5, 2), (10, 4), (15, 2)]
)
def test_cycles_of_a_store(library: ctypes.CDLL, chip: int, hops: int, seed: int) -> None:
    with Fabric(library, "4x4") as fabric:
        fabric.add(0, timing="v5e", seed=seed)
        for other in range(1, 16):
            fabric.add(other)
        queue = fabric.queues[0]
        profile = run_profiled(queue, program(store(chip, 65536, "VMEM")))
        # Issue; 65536 / 33 = 1985.9; there and back; HALT.
        vmem = 4 + 100 + 1986 + 2 * hops * 500 + 4
        assert profile.header["cycles"] == vmem
        fabric.inject(0, XP, DOWN, 1)  # the model knows no detours
        profile = run_profiled(queue, program(store(chip, 65536, "GLOBAL")))
        assert profile.header["cycles"] == vmem + 500
        assert profile.header["hbm_read"] == 65536 and profile.header["hbm_written"] == 0


def test_a_store_beside_other_engines(library: ctypes.CDLL) -> None:
    """A cable is slower than HBM: what streams beside it is not held up by much."""
    with Fabric(library, "2") as fabric:
        fabric.add(0, timing="v5e")
        fabric.add(1)
        load = ins("DMA_LOAD", dst=0, src=0, rows=1, row_bytes=54592, dst_stride=0, src_stride=0)
        profile = run_profiled(fabric.queues[0], program(store(1, 64, "VMEM"), load))
        # The load is issued at 8 and takes 100 + 500 + 100; the store 100 + 2 + 1000 from 4 on.
        assert profile.header["cycles"] == 4 + 100 + 2 + 1000 + 4
        assert profile.header["busy"][1] == 700 and profile.header["busy"][4] == 1102


def test_a_wait_takes_no_modelled_time(library: ctypes.CDLL) -> None:
    with Fabric(library, "2") as fabric:
        fabric.add(0, timing="v5e")
        fabric.add(1)
        fabric.queues[1].run(program(ins("REMOTE_SIGNAL", chip=0, counter=1, add=1)))
        profile = run_profiled(
            fabric.queues[0], program(ins("LINK_WAIT", counter=1, value=1, chip=1))
        )
        assert profile.header["cycles"] == 4 + 4
