# SPDX-License-Identifier: MIT
"""Faults on demand, through properties over QMP."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest
from asm import ins, pc, program
from qtest import EXEC, READ, REPO, WRITE, AddressSpace, D, Queue, Vtpu, wait_for

TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000
NO_PC = 0xFFFFFFFF


@pytest.fixture
def space(vtpu: Vtpu) -> AddressSpace:
    return AddressSpace(vtpu, 0, TABLES)


def _code(vtpu: Vtpu, space: AddressSpace, code: bytes) -> int:
    vtpu.hbm_write(CODE, code)
    return space.map(0, CODE, READ | EXEC)


def test_every_property_is_documented_and_describes_itself(vtpu: Vtpu) -> None:
    listed = vtpu.qemu.qmp("qom-list-properties", typename="vtpu")
    ours = {p["name"]: p for p in listed if p["name"].startswith("inject-") or p["name"] == "state"}
    assert len(ours) == 15
    readme = (REPO / "qemu-device" / "README.md").read_text()
    for name, entry in ours.items():
        assert f"`{name}`" in readme
        assert entry.get("description")


def test_values_out_of_range_are_refused(vtpu: Vtpu) -> None:
    for fault, value, limit in (
        ("irq-spurious", D["NUM_MSIX"], f"it is 0 to {D['NUM_MSIX'] - 1}"),
        ("hang-pc", 1, f"it is a multiple of 64 below {D['MAX_CODE_BYTES']}"),
        ("hbm-slow", 0, "it is 1 to 1048576"),
        ("temperature", 1000001, "it is 0 to 1000000, or 4294967295"),
    ):
        with pytest.raises(RuntimeError, match=f"inject-{fault} cannot be {value}: {limit}"):
            vtpu.inject(fault, value)


def test_lost_interrupt(vtpu: Vtpu) -> None:
    vtpu.inject("irq-loss", 1)
    queue = Queue(vtpu, 0)
    queue.push("NOP")
    vtpu.wait_injected("irq-loss")
    assert queue.fence == 1 and not vtpu.interrupted(1)
    queue.do("NOP")


def test_duplicate_interrupt(vtpu: Vtpu) -> None:
    vtpu.qemu.trace("vtpu_irq")
    vtpu.inject("irq-duplicate", 1)
    queue = Queue(vtpu, 0)

    def raised() -> int:
        return sum(line.endswith(" vector 1") for line in vtpu.qemu.traced("vtpu_irq"))

    queue.push("NOP")
    wait_for(lambda: raised() == 2, "the second of the two")
    vtpu.wait_interrupt(1)
    assert vtpu.property("inject-irq-duplicate") == 0
    queue.do("NOP")
    vtpu.set("TEST_IRQ", 9)
    vtpu.wait_interrupt(9)
    assert raised() == 3


def test_spurious_interrupt(vtpu: Vtpu) -> None:
    vtpu.inject("irq-spurious", 7)
    vtpu.wait_interrupt(7)
    vtpu.inject("irq-spurious", 0)
    vtpu.wait_interrupt(0)
    assert vtpu.reg("ERR_QUEUES") == 0


def test_hang_and_queue_reset(vtpu: Vtpu, space: AddressSpace) -> None:
    vtpu.inject("hang", True)
    code = program()
    va = _code(vtpu, space, code)
    queue, other = Queue(vtpu, 0), Queue(vtpu, 1)
    queue.push("RUN", queue.run(va, len(code)))
    vtpu.wait_injected("hang", False)
    assert queue.state == "RUNNING" and queue.fence == 0
    queue.reset()
    other.do("NOP")
    again = Queue(vtpu, 0)
    again.do("RUN", again.run(va, len(code)))


def test_hang_at_a_pc(vtpu: Vtpu, space: AddressSpace) -> None:
    out = space.map(1, DATA, READ | WRITE)
    code = program(
        ins("LI", rd=1, value=out), ins("ST", addr=out, value=1), ins("ST", addr=out + 8, value=1)
    )
    va = _code(vtpu, space, code)
    vtpu.inject("hang-pc", pc(2))
    queue = Queue(vtpu, 0)
    queue.push("RUN", queue.run(va, len(code)))
    vtpu.wait_injected("hang-pc", NO_PC)
    assert vtpu.hbm_read(DATA, 16) == struct.pack("<QQ", 1, 0)
    assert "program at pc 0x80" in vtpu.property("state")
    queue.reset()
    again = Queue(vtpu, 0)
    again.do("RUN", again.run(va, len(code)))


def test_corrected_memory_errors_are_counted(vtpu: Vtpu, space: AddressSpace) -> None:
    source, target = space.map(1, DATA, READ), space.map(2, DATA + 4096, WRITE)
    data = os.urandom(64)
    vtpu.hbm_write(DATA, data)
    vtpu.inject("ecc-single", 2)
    queue = Queue(vtpu, 0)
    for _ in range(3):
        queue.do("COPY", struct.pack("<QQQ", target, source, 64))
    assert vtpu.hbm_read(DATA + 4096, 64) == data
    assert vtpu.reg("STAT_ECC_CORRECTED", 8) == 2


def test_an_uncorrectable_memory_error_is_a_fault(vtpu: Vtpu, space: AddressSpace) -> None:
    source, target = space.map(1, DATA, READ), space.map(2, DATA + 4096, WRITE)
    payload = struct.pack("<QQQ", target, source + 16, 64)
    vtpu.inject("ecc-double", 1)
    queue, other = Queue(vtpu, 0), Queue(vtpu, 1)
    assert queue.expect_fault("COPY", payload) == "ECC"
    assert queue.reg("FAULT_ADDR", 8) == source + 16 and queue.reg("FAULT_ACCESS") == 1
    other.do("COPY", payload)


@pytest.mark.parametrize(("nth", "access"), [(1, 1), (2, 2)], ids=["ring", "fence"])
def test_the_nth_transfer_fails(vtpu: Vtpu, nth: int, access: int) -> None:
    vtpu.inject("dma-error", nth)
    queue = Queue(vtpu, 0)
    assert queue.expect_fault("NOP") == "BUS"
    assert queue.reg("FAULT_ACCESS") == access
    assert queue.reg("FAULT_ADDR", 8) == (queue.ring, queue.fence_at)[nth - 1]
    queue.reset()
    Queue(vtpu, 0).do("NOP")


def test_corrupted_completion(vtpu: Vtpu) -> None:
    vtpu.inject("fence-corrupt", 1 << 63)
    queue = Queue(vtpu, 0)
    queue.push("NOP")
    vtpu.wait_interrupt(1)
    assert queue.fence == 1 | 1 << 63
    queue.push("NOP")
    vtpu.wait_interrupt(1)
    assert queue.fence == 2


def test_stuck_reset(vtpu: Vtpu) -> None:
    count = vtpu.reg("RESET_COUNT")
    vtpu.inject("reset-stuck", True)
    vtpu.set("CTRL", D["CTRL_RESET"])
    vtpu.set("TEST_SCRATCH", 1)
    assert vtpu.reg("STATUS") & D["STATUS_RESETTING"] and vtpu.reg("RESET_COUNT") == count
    assert "device: resetting" in vtpu.property("state")
    vtpu.inject("reset-stuck", False)
    vtpu.wait_reset()
    assert vtpu.reg("RESET_COUNT") == count + 1 and vtpu.reg("TEST_SCRATCH") == 0
    vtpu.enable()
    Queue(vtpu, 0).do("NOP")


@pytest.mark.parametrize("engines", [False, True])
def test_stuck_queue_and_engines(vtpu: Vtpu, space: AddressSpace, engines: bool) -> None:
    """What a queue's reset does not end, that of the engines does, or the device's at last."""
    code = ins("NOP") + ins("JMP", target=0)
    queue, other = Queue(vtpu, 0), Queue(vtpu, 1)
    vtpu.inject("stuck", 2 if engines else 1)
    queue.push("RUN", queue.run(_code(vtpu, space, code), len(code)))
    wait_for(lambda: queue.state == "RUNNING", "running")
    queue.set("CTRL", D["Q_CTRL_RESET"])
    other.push("NOP")
    vtpu.set("TEST_IRQ", 9)
    vtpu.wait_interrupt(9)
    assert queue.state == "RESETTING" and other.fence == 0

    vtpu.set("CTRL", D["CTRL_ENGINE_RESET"])
    if engines:
        vtpu.set("TEST_IRQ", 9)
        vtpu.wait_interrupt(9)
        assert vtpu.reg("STATUS") & D["STATUS_RESETTING"]
        vtpu.set("CTRL", D["CTRL_RESET"])
    vtpu.wait_reset()
    assert queue.state == "DISABLED" and vtpu.property("inject-stuck") == 0
    vtpu.set("CTRL", D["CTRL_ENABLE"])
    if engines:
        assert other.state == "DISABLED"
    else:
        vtpu.wait_interrupt(other.vector)
        assert other.fence == 1


def test_slow_memory_blocks_nobody(vtpu: Vtpu, space: AddressSpace) -> None:
    """As slow as can be: the registers, QMP and a queue's reset do not wait for it."""
    at = space.map(1, DATA, READ | WRITE)
    vtpu.inject("hbm-slow", 1 << 20)
    queue = Queue(vtpu, 0)
    queue.push("FILL", struct.pack("<QQI", at, 4096, 7))
    wait_for(lambda: queue.state == "RUNNING", "running")
    vtpu.set("TEST_IRQ", 9)
    vtpu.wait_interrupt(9)
    assert "serves queue 0" in vtpu.property("state") and queue.fence == 0
    vtpu.inject("hbm-slow", 1)
    vtpu.wait_interrupt(1)
    assert queue.fence == 1 and vtpu.hbm_read(DATA, 4096) == struct.pack("<I", 7) * 1024


def test_dead_device(vtpu: Vtpu) -> None:
    queue = Queue(vtpu, 0)
    queue.do("NOP")
    vtpu.hbm_write(DATA, b"kept")
    count = vtpu.reg("RESET_COUNT")
    vtpu.inject("dead", True)
    assert vtpu.reg("ID") == 0xFFFFFFFF and vtpu.reg("HBM_SIZE", 8) == (1 << 64) - 1
    assert queue.reg("QSTATUS") == 0xFFFFFFFF
    # In all its BARs, by accesses of any size.
    for at in (vtpu.regs + D["MSIX_TABLE"], vtpu.regs + D["MSIX_PBA"], vtpu.doorbells):
        assert vtpu.qemu.load(at, 4) == 0xFFFFFFFF and vtpu.qemu.read(at + 1, 7) == b"\xff" * 7
    assert vtpu.hbm_read(DATA, 4) == b"\xff" * 4
    vtpu.hbm_write(DATA, b"lost")
    vtpu.mask(1, True)
    vtpu.set("TEST_IRQ", 9)
    queue.push("NOP")
    vtpu.inject("dead", False)
    vtpu.wait_reset()
    assert vtpu.reg("ID") == D["MAGIC"] and vtpu.reg("RESET_COUNT") == count + 1
    assert queue.state == "DISABLED" and queue.fence == 1 and not vtpu.interrupted(9)
    assert vtpu.hbm_read(DATA, 4) == b"kept"
    vtpu.enable()
    Queue(vtpu, 0).do("NOP")


def test_a_device_that_is_not_there_yet_refuses(qemu_command: list[str], tmp_path: Path) -> None:
    bare = ("-machine", "q35,accel=qtest", "-display", "none", "-nodefaults")
    done = subprocess.run(
        [*qemu_command, *bare, "-device", "vtpu,inject-dead=on"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "inject-dead is a property of a running device" in done.stderr
