# SPDX-License-Identifier: MIT
"""Several devices in one machine: independent, and each other's memory by DMA."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

import pytest
from asm import ins
from pcie import Aer
from qtest import (
    COMMAND,
    COMMAND_MASTER,
    EXEC,
    READ,
    WRITE,
    AddressSpace,
    D,
    Queue,
    Vtpu,
    wait_for,
)

TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000
FOREVER = ins("JMP", target=0)


@pytest.fixture
def four(open_vtpus: Callable[..., list[Vtpu]]) -> list[Vtpu]:
    vtpus = open_vtpus(4)
    for vtpu in vtpus:
        vtpu.enable()
    return vtpus


@pytest.fixture
def pair(open_vtpus: Callable[..., list[Vtpu]]) -> list[Vtpu]:
    vtpus = open_vtpus(2)
    for vtpu in vtpus:
        vtpu.enable()
    return vtpus


def _run_for_ever(vtpu: Vtpu, number: int = 0) -> Queue:
    space = AddressSpace(vtpu, 0, TABLES)
    vtpu.hbm_write(CODE, FOREVER)
    queue = Queue(vtpu, number)
    queue.push("RUN", queue.run(space.map(0, CODE, READ | EXEC), 64))
    wait_for(lambda: queue.state == "RUNNING", "running", vtpu)
    return queue


def test_four_at_work_at_once(four: list[Vtpu]) -> None:
    """All have work before the first is waited for; each has its own result and interrupt."""
    queues = []
    for number, vtpu in enumerate(four):
        vtpu.hbm_write(DATA, bytes([number + 1]) * 4096)
        space, queue = AddressSpace(vtpu, 0, TABLES), Queue(vtpu, 3)
        at, out = space.map(1, DATA, READ), space.map(2, vtpu.ram + 0x100000, WRITE, hbm=False)
        for _ in range(8):
            queue.push("COPY", struct.pack("<QQQ", out, at, 4096))
        queues.append(queue)
    for number, (vtpu, queue) in enumerate(zip(four, queues, strict=True)):
        wait_for(lambda queue=queue: queue.fence == 8, "fences", vtpu)
        vtpu.wait_interrupt(queue.vector)
        assert vtpu.qemu.read(vtpu.ram + 0x100000, 4096) == bytes([number + 1]) * 4096
        assert not any(vtpu.interrupted(v) for v in range(D["NUM_MSIX"]) if v != queue.vector)


@pytest.mark.parametrize("how", ["register", "function", "bus"])
def test_a_reset_is_one_devices(four: list[Vtpu], how: str) -> None:
    running = [_run_for_ever(vtpu) for vtpu in four]
    victim = four[2]
    counts = [vtpu.reg("RESET_COUNT") for vtpu in four]
    if how == "register":
        victim.set("CTRL", D["CTRL_RESET"])
    elif how == "function":
        victim.pci.write(victim.pci.capability(0x10) + 8, 0x8000, 2)
    else:
        control = victim.port.read(0x3E, 2)
        victim.port.write(0x3E, control | 0x40, 2)
        victim.port.write(0x3E, control, 2)
    victim.setup()
    victim.wait_reset()
    counts[2] += 1
    assert [vtpu.reg("RESET_COUNT") for vtpu in four] == counts
    assert [queue.state for queue in running] == ["RUNNING", "RUNNING", "DISABLED", "RUNNING"]
    victim.enable()
    Queue(victim, 1).do("NOP")


def test_a_fault_a_death_and_a_sleep_are_one_devices(four: list[Vtpu]) -> None:
    assert Queue(four[0], 0).expect_fault("NOP", b"\1") == "BAD_COMMAND"
    four[1].inject("dead", True)
    four[2].pci.write(four[2].pci.capability(0x01) + 4, 3, 2)
    Queue(four[3], 0).do("NOP")
    assert four[3].reg("ERR_QUEUES") == 0 and not four[3].interrupted(0)
    assert four[0].reg("ERR_QUEUES") == 1


def test_errors_name_their_device(pair: list[Vtpu]) -> None:
    first, second = Aer(pair[0]), Aer(pair[1])
    second.unmask()
    pair[1].inject("dma-error", 1)
    assert Queue(pair[1], 0).expect_fault("NOP") == "BUS"
    assert second.sources[0] == 2 << 8 and second.root_status & 1
    assert first.root_status & 0x7F == 0


def test_peer_to_peer(pair: list[Vtpu]) -> None:
    """One device reads and writes the other's HBM by its bus address."""
    one, other = pair
    data = os.urandom(8192)
    one.hbm_write(DATA, data)
    space, queue = AddressSpace(one, 0, TABLES), Queue(one, 0)
    local = [space.map(n, DATA + n * 4096, READ | WRITE) for n in range(4)]
    peer = [space.map(4 + n, other.hbm + DATA + n * 4096, READ | WRITE, hbm=False) for n in (0, 1)]
    queue.do("COPY", struct.pack("<QQQ", peer[0] + 64, local[0], 8192 - 64))
    assert other.hbm_read(DATA + 64, 8192 - 64) == data[: 8192 - 64]
    queue.do("COPY", struct.pack("<QQQ", local[2], peer[0] + 64, 4096))
    assert one.hbm_read(DATA + 8192, 4096) == data[:4096]
    # Words arrive whole: one device may wait for what the other signals.
    waiting = Queue(other, 0)
    at = AddressSpace(other, 0, TABLES).map(1, DATA, READ)
    waiting.push("WAIT", struct.pack("<QQ", at, 5))
    queue.do("SIGNAL", struct.pack("<QQ", peer[0], 5))
    other.wait_interrupt(waiting.vector)


def test_its_own_bar_is_a_peer_like_others(pair: list[Vtpu]) -> None:
    one = pair[0]
    space = AddressSpace(one, 0, TABLES)
    va = space.map(1, one.hbm + DATA, READ | WRITE, hbm=False)
    Queue(one, 0).do("SIGNAL", struct.pack("<QQ", va, 77))
    assert one.hbm_read(DATA, 8) == struct.pack("<Q", 77)


@pytest.mark.parametrize("target", ["registers", "doorbells", "MSI-X table"])
def test_no_way_to_anothers_registers(pair: list[Vtpu], target: str) -> None:
    one, other = pair
    page, offset = {
        "registers": (other.regs, D["REG_TEST_SCRATCH"]),
        "doorbells": (other.doorbells, 0),
        "MSI-X table": (other.regs + D["MSIX_TABLE"], 0),
    }[target]
    before = one.qemu.read(page + offset, 8)
    va = AddressSpace(one, 0, TABLES).map(1, page, READ | WRITE, hbm=False)
    assert Queue(one, 0).expect_fault("SIGNAL", struct.pack("<QQ", va + offset, 1)) == "BUS"
    assert Queue(one, 1, ring=page).expect_fault("NOP") == "BUS"
    assert one.qemu.read(page + offset, 8) == before
    Queue(other, 0).do("NOP")


@pytest.mark.parametrize("how", ["memory off", "asleep", "dead", "unplugged"])
def test_a_peer_that_does_not_answer(pair: list[Vtpu], how: str) -> None:
    """A BUS fault of who asked, at that address; nothing of the peer changes."""
    one, other = pair
    other.hbm_write(DATA, b"as it was")
    va = AddressSpace(one, 0, TABLES).map(1, other.hbm + DATA, READ | WRITE, hbm=False)
    if how == "memory off":
        other.pci.write(COMMAND, COMMAND_MASTER, 2)
    elif how == "asleep":
        other.pci.write(other.pci.capability(0x01) + 4, 3, 2)
    elif how == "dead":
        other.inject("dead", True)
    else:
        one.qemu.qmp("device_del", id="tpu1")
        other.cut_power()
    queue = Queue(one, 0)
    assert queue.expect_fault("SIGNAL", struct.pack("<QQ", va, 1)) == "BUS"
    assert queue.reg("FAULT_ADDR", 8) == other.hbm + DATA
    if how == "asleep":
        other.pci.write(other.pci.capability(0x01) + 4, 0, 2)
        assert other.hbm_read(DATA, 9) == b"as it was"
    queue.reset()
    Queue(one, 0).do("NOP")


def test_a_peer_that_leaves_under_a_copy(pair: list[Vtpu]) -> None:
    """The copies end with a BUS fault or went through; QEMU and the device live on."""
    one, other = pair
    space = AddressSpace(one, 0, TABLES)
    at = space.map(1, DATA, READ)
    peer = space.map(2, other.hbm + DATA, WRITE, hbm=False)
    code = ins("ST", addr=peer, value=1, mode="U64") + FOREVER
    one.hbm_write(CODE, code)
    queue = Queue(one, 0)
    queue.push("RUN", queue.run(space.map(0, CODE, READ | EXEC), len(code)))
    wait_for(lambda: other.hbm_read(DATA, 1) == b"\1", "written", one)
    one.qemu.qmp("device_del", id="tpu1")
    other.cut_power()
    one.wait_interrupt(0)
    assert queue.cause == "BUS" and queue.reg("FAULT_ADDR", 8) == other.hbm + DATA
    again = Queue(one, 1)
    again.do("COPY", struct.pack("<QQQ", space.map(3, DATA + 4096, WRITE), at, 64))
