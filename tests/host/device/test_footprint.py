# SPDX-License-Identifier: MIT
"""Who watches a program, the timing model and the race checker, changes nothing of it."""

from __future__ import annotations

from collections.abc import Callable

from asm import ins, program
from machine import Machine, Queue
from vtpu_compiler import hw


def test_what_did_nothing_has_no_footprint(open_machine: Callable[..., Machine]) -> None:
    """Attention over no rows looks at no address, and nor do those who watch it."""
    machine = open_machine(timing="v5e", check_races=True)
    machine.identity()
    machine.enable()
    shape = {"heads": 1, "kv_heads": 1, "head_dim": 16, "block_size": 1, "max_blocks": 1}
    nowhere = {"q": 0, "k_cache": 0, "v_cache": 0, "row_info": hw.VMEM_BYTES + 64}
    lists = {"block_tables": 0, "num_slots": 1}
    attend = ins("V_ATTN", dst=0, rows=0, **nowhere, **lists, **shape, fmt="F32", aux=1.0)
    Queue(machine).run(program(attend))
