# SPDX-License-Identifier: MIT
"""The timing model through PCIe: properties, registers, a profile, the monitor."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from asm import ins, program
from qtest import EXEC, RAM, READ, WRITE, AddressSpace, D, Queue, Vtpu, wait_for
from vtpu_compiler import hw

TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000
ADD = ins("V_ADD", dst=0, a=0, b=0, rows=1, width=16, dst_stride=0, a_stride=0, b_stride=0)


def _run(vtpu: Vtpu, profile_va: int, size: int, space: AddressSpace) -> None:
    code = program(ADD)
    vtpu.hbm_write(CODE, code)
    queue = Queue(vtpu, 0)
    payload = queue.run(space.map(0, CODE, READ | EXEC), len(code))
    queue.do("RUN", payload + struct.pack("<IQ", size, profile_va))


def test_a_profile_in_system_memory(open_vtpu: Callable[..., Vtpu], tmp_path: Path) -> None:
    """Into memory of the host, page by page through the page tables."""
    trace = tmp_path / "trace.json"
    vtpu = open_vtpu(timing="v5e", timing_trace=str(trace))
    vtpu.enable()
    vtpu.qemu.trace("vtpu_timed")
    assert vtpu.reg("CAPS") & D["CAPS_TIMING"]
    assert vtpu.reg("MODEL_MHZ") == 1500
    space = AddressSpace(vtpu, 0, TABLES)
    _run(vtpu, space.map(1, RAM + 0x100000, READ | WRITE, hbm=False), 4096, space)
    header = vtpu.qemu.read(RAM + 0x100000, hw.PROFILE_HEADER_BYTES)
    offset, code, _ = hw.PROFILE_HEADER["cycles"]
    # Issued at 4, 20 + 1 cycles, HALT 4.
    assert struct.unpack_from("<" + code, header, offset)[0] == 29
    assert vtpu.reg("STAT_MODEL_CYCLES", 8) == 29
    records = vtpu.qemu.read(RAM + 0x100000 + len(header), 2 * hw.PROFILE_RECORD_BYTES)
    opcodes = [records[hw.PROFILE_RECORD["opcode"][0] + at] for at in (0, hw.PROFILE_RECORD_BYTES)]
    assert opcodes == [hw.OPS["V_ADD"].code, hw.OPS["HALT"].code]
    assert "model: 1500 MHz, cycles 29," in vtpu.property("state")
    wait_for(lambda: len(vtpu.qemu.traced("vtpu_timed")) == 1, "the event")
    assert vtpu.qemu.traced("vtpu_timed")[0].endswith(" queue 0 cycles 29 instructions 2")
    assert '"name":"V_ADD","pid":0,"tid":3' in trace.read_text()


def test_a_file_of_parameters(open_vtpu: Callable[..., Vtpu], tmp_path: Path) -> None:
    file = tmp_path / "chip.toml"
    file.write_text("clock_mhz = 7\n")
    assert open_vtpu(timing="edge", timing_file=str(file)).reg("MODEL_MHZ") == 7
