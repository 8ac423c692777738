# SPDX-License-Identifier: MIT
"""What the monitor shows: trace events, and the state in words."""

from __future__ import annotations

import struct
from collections.abc import Callable

from asm import R, ins, pc, program
from qtest import DEVICE, EXEC, READ, WRITE, AddressSpace, Queue, Vtpu, wait_for

TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000


def _run(vtpu: Vtpu, queue: Queue, space: AddressSpace, code: bytes) -> None:
    vtpu.hbm_write(CODE, code)
    queue.do("RUN", queue.run(space.map(0, CODE, READ | EXEC), len(code)))


def test_trace_of_a_program(vtpu: Vtpu) -> None:
    space, queue = AddressSpace(vtpu, 0, TABLES), Queue(vtpu, 2)
    data = space.map(1, DATA, READ | WRITE)
    row = {"rows": 1, "dst_stride": 0, "src_stride": 0}
    code = program(
        ins("LI", rd=1, value=data),
        ins("DMA_LOAD", dst=0, src=R(1), row_bytes=64, **row),
        ins("V_ADD", dst=0, a=0, b=0, rows=1, width=16, dst_stride=0, a_stride=0, b_stride=0),
        ins(
            "MATMUL", dst=0, src=4096, weight=data, m=1, n=16, k=32, dst_stride=64,
            src_stride=128, fmt="Q8_0",
        ),
    )  # fmt: skip
    _run(vtpu, queue, space, code)
    assert not vtpu.qemu.traced("vtpu_instruction")
    vtpu.set("TEST_IRQ", 9)  # passes once the command thread has left the program
    vtpu.wait_interrupt(9)
    for event in ("doorbell", "command_*", "instruction_*", "irq", "fault", "injected"):
        vtpu.qemu.trace(f"vtpu_{event}")
    _run(vtpu, queue, space, code)
    words = [line.split(" queue 2 ")[1] for line in vtpu.qemu.traced("vtpu_instruction")]
    assert words == [
        f"pc {pc(index):#x} {name}"
        for index, name in enumerate(["LI", "DMA_LOAD", "V_ADD", "MATMUL", "HALT"])
    ]
    kinds = [line.split()[0] for line in vtpu.qemu.traced("vtpu_instruction")]
    assert kinds == [f"vtpu_instruction_{name}" for name in ("seq", "dma", "vpu", "mxu", "seq")]
    assert [line.split("queue")[1] for line in vtpu.qemu.traced("vtpu_doorbell")] == [" 2 tail 2"]
    assert len(vtpu.qemu.traced("vtpu_command_begin")) == 1
    wait_for(lambda: len(vtpu.qemu.traced("vtpu_command_end")) == 1, "the command's end")
    assert [line.split("vector")[1] for line in vtpu.qemu.traced("vtpu_irq")] == [" 3"]


def test_trace_of_faults_and_injections(vtpu: Vtpu) -> None:
    for event in ("fault", "injected"):
        vtpu.qemu.trace(f"vtpu_{event}")
    queue = Queue(vtpu, 1)
    vtpu.inject("dma-error", 1)
    assert queue.expect_fault("NOP") == "BUS"
    (fault,) = vtpu.qemu.traced("vtpu_fault")
    assert fault.endswith(f" queue 1 cause 5 address {queue.ring:#x}")
    assert len(vtpu.qemu.traced("vtpu_injected")) == 1


def test_only_the_class_wanted_is_traced(vtpu: Vtpu) -> None:
    vtpu.qemu.trace("vtpu_instruction_vpu")
    space, queue = AddressSpace(vtpu, 0, TABLES), Queue(vtpu, 0)
    add = ins("V_ADD", dst=0, a=0, b=0, rows=1, width=16, dst_stride=0, a_stride=0, b_stride=0)
    _run(vtpu, queue, space, program(ins("NOP"), add))
    assert [line.split()[-1] for line in vtpu.qemu.traced("vtpu_instruction")] == ["V_ADD"]


def test_the_state_in_words(vtpu: Vtpu) -> None:
    space = AddressSpace(vtpu, 5, TABLES)
    queue, faulty = Queue(vtpu, 0, context=5), Queue(vtpu, 3, context=6)
    _run(vtpu, queue, space, program())
    faulty.expect_fault("SIGNAL", struct.pack("<QQ", 0x40, 1))
    lines = vtpu.property("state").splitlines()
    assert lines[0].startswith("device: ready")
    assert "engine SEQ: 1 instructions" in lines and "engine DMA: 0 instructions" in lines
    assert f"context 5: root {TABLES:#x}" in lines
    assert "queue 0: READY, context 5, priority 1, vector 1, head 1, tail 1" in lines
    assert (
        "queue 3: FAULTED, context 6, priority 1, vector 4, head 0, tail 1, "
        "fault BAD_CONTEXT access 2 address 0x40 pc 0xffffffff entry 0"
    ) in lines


def _info(vtpu: Vtpu) -> list[str]:
    text = vtpu.qemu.qmp("human-monitor-command", **{"command-line": "info vtpu"})
    return str(text).splitlines()


def test_info_vtpu(open_vtpus: Callable[..., list[Vtpu]]) -> None:
    """Every device with its place, and its state indented below."""
    vtpus = open_vtpus(2)
    vtpus[1].enable()
    Queue(vtpus[1], 3)
    lines = _info(vtpus[0])
    heads = [line for line in lines if not line.startswith("  ")]
    assert heads == ["tpu: 01:00.0, HBM 64 MiB", "tpu1: 02:00.0, HBM 64 MiB"]
    first, second = lines[1 : lines.index(heads[1])], lines[lines.index(heads[1]) + 1 :]
    assert first[0].startswith("  device: disabled") and second[0].startswith("  device: ready")
    assert "  engine MXU: 0 instructions" in first
    assert not any(line.startswith("  queue") for line in first)
    assert [x.split(",")[0] for x in second if "queue" in x] == ["  queue 3: READY"]
    for vtpu in vtpus:
        vtpu.cut_power()
    assert _info(vtpus[0]) == ["no vTPU"]


def test_the_state_in_the_human_monitor(vtpu: Vtpu) -> None:
    text = vtpu.qemu.qmp("human-monitor-command", **{"command-line": f"qom-get {DEVICE} state"})
    assert "engine MXU: 0 instructions" in text
