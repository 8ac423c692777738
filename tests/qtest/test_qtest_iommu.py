# SPDX-License-Identifier: MIT
"""The device behind an IOMMU: translated, passed through, refused."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from asm import R, ins
from qtest import (
    COMMAND,
    COMMAND_MEMORY,
    EXEC,
    READ,
    WRITE,
    AddressSpace,
    D,
    Queue,
    Vtpu,
    wait_for,
)
from vtd import ON, ON_WITH_REMAPPING, Domain, Fault, Iommu, remapped
from vtd import READ as MAY_READ

TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000
IOVA = 0x7_4000_0000  # no memory is at this address
SOURCE = 1 << 8
NO_WRITE, NO_READ = 5, 6  # fault reasons


class Behind:
    """A device in a domain that maps its rings and messages where they are, and IOVA to nothing."""

    def __init__(self, vtpu: Vtpu) -> None:
        self.vtpu, self.iommu = vtpu, Iommu(vtpu.qemu)
        self.domain = Domain(self.iommu, 1)
        self.domain.map(vtpu.ram, vtpu.ram, 32 * 8192)
        self.domain.map(vtpu.msix_at, vtpu.msix_at, 4096)
        self.iommu.attach(vtpu.bus, self.domain)
        self.iommu.translate()
        vtpu.enable()
        self.space = AddressSpace(vtpu, 0, TABLES)
        self.target = vtpu.ram + 0x100000  # not mapped where it is

    def window(self, page: int, iova: int) -> int:
        return self.space.map(page, iova, READ | WRITE, hbm=False)


@pytest.fixture
def behind(open_vtpu: Callable[..., Vtpu]) -> Behind:
    return Behind(open_vtpu(*ON))


def _signal(addr: int, value: int) -> bytes:
    return struct.pack("<QQ", addr, value)


def test_an_iommu_that_translates_nothing_yet(open_vtpu: Callable[..., Vtpu]) -> None:
    vtpu = open_vtpu(*ON)
    vtpu.enable()
    Queue(vtpu, 0).do("NOP")


def test_passed_through(open_vtpu: Callable[..., Vtpu]) -> None:
    vtpu = open_vtpu(*ON)
    iommu = Iommu(vtpu.qemu)
    assert iommu.passes_through
    iommu.attach(vtpu.bus, None)
    iommu.translate()
    vtpu.enable()
    Queue(vtpu, 0).do("NOP")
    assert iommu.fault() is None


def test_translated(behind: Behind) -> None:
    """Rings, fences, messages and data go where the tables say."""
    vtpu = behind.vtpu
    behind.domain.map(IOVA, behind.target, 2 * 4096)
    data = bytes(range(256)) * 32
    vtpu.hbm_write(DATA, data)
    source = [behind.space.map(n, DATA + (n - 1) * 4096, READ) for n in (1, 2)]
    target = [behind.window(n, IOVA + (n - 3) * 4096) for n in (3, 4)]
    queue = Queue(vtpu, 0)
    queue.do("COPY", struct.pack("<QQQ", target[0] + 8, source[0] + 8, 8192 - 8))
    assert vtpu.qemu.read(behind.target + 8, 8192 - 8) == data[8:]
    queue.do("COPY", struct.pack("<QQQ", behind.space.map(5, DATA + 0x8000, WRITE), target[1], 16))
    assert vtpu.hbm_read(DATA + 0x8000, 16) == data[4096:4112]
    assert behind.iommu.fault() is None


def test_an_address_that_is_not_mapped(behind: Behind) -> None:
    """A fault of the queue and one of the IOMMU; both name it."""
    vtpu = behind.vtpu
    va = behind.window(1, IOVA)
    queue = Queue(vtpu, 0)
    assert queue.expect_fault("SIGNAL", _signal(va + 16, 1)) == "BUS"
    assert queue.reg("FAULT_ADDR", 8) == IOVA + 16 and queue.reg("FAULT_ACCESS") == 2
    assert behind.iommu.fault() == Fault(SOURCE, IOVA, NO_WRITE, write=True)
    other = Queue(vtpu, 1)
    hbm = behind.space.map(2, DATA, WRITE)
    assert other.expect_fault("COPY", struct.pack("<QQQ", hbm, va, 64)) == "BUS"
    assert other.reg("FAULT_ADDR", 8) == IOVA and other.reg("FAULT_ACCESS") == 1
    assert behind.iommu.fault() == Fault(SOURCE, IOVA, NO_READ, write=False)
    Queue(vtpu, 2).do("NOP")


def test_read_only_for_the_iommu(behind: Behind) -> None:
    behind.domain.map(IOVA, behind.target, 4096, MAY_READ)
    va, queue = behind.window(1, IOVA), Queue(behind.vtpu, 0)
    assert queue.expect_fault("SIGNAL", _signal(va, 1)) == "BUS"
    assert behind.vtpu.qemu.load(behind.target, 8) == 0
    assert behind.iommu.fault() == Fault(SOURCE, IOVA, NO_WRITE, write=True)


@pytest.mark.parametrize("what", ["ring", "fence"])
def test_rings_and_fences_that_are_not_mapped(behind: Behind, what: str) -> None:
    queue = Queue(behind.vtpu, 0, **{what: IOVA})
    assert queue.expect_fault("NOP") == "BUS"
    assert queue.reg("FAULT_ADDR", 8) == IOVA
    assert behind.iommu.fault() == Fault(
        SOURCE, IOVA, NO_READ if what == "ring" else NO_WRITE, write=what == "fence"
    )


def test_a_mapping_that_changes_under_work(behind: Behind) -> None:
    """A program stores for ever through an IOVA; each invalidation sends it elsewhere."""
    vtpu = behind.vtpu
    pages = [behind.target, behind.target + 4096]
    behind.domain.map(IOVA, pages[0], 4096)
    va = behind.window(1, IOVA)
    code = ins("ADD", rd=R(1), a=R(1), b=1)
    code += ins("ST", addr=va, value=R(1), mode="U64") + ins("JMP", target=0)
    vtpu.hbm_write(CODE, code)
    queue = Queue(vtpu, 0)
    queue.push("RUN", queue.run(behind.space.map(0, CODE, READ | EXEC), len(code)))
    for turn in range(1, 20):
        now, before = pages[turn % 2], pages[1 - turn % 2]
        behind.domain.map(IOVA, now, 4096)
        behind.iommu.flush()
        vtpu.qemu.store(before, 0, 8)
        wait_for(lambda now=now: vtpu.qemu.load(now, 8) > 0, "written to the new page", vtpu)
        assert vtpu.qemu.load(before, 8) == 0
        assert queue.state == "RUNNING"
    behind.domain.unmap(IOVA, 4096)
    behind.iommu.flush()
    vtpu.wait_interrupt(0)
    assert queue.cause == "BUS" and queue.reg("FAULT_ADDR", 8) == IOVA
    assert queue.reg("FAULT_PC") == 64
    last = [vtpu.qemu.load(page, 8) for page in pages]
    Queue(vtpu, 1).do("NOP")
    assert [vtpu.qemu.load(page, 8) for page in pages] == last


@pytest.mark.parametrize("bar", ["registers", "doorbells", "MSI-X table"])
def test_no_way_to_registers_through_an_iova(behind: Behind, bar: str) -> None:
    """CVE-2023-0330's way: the device's own registers, mapped for it like memory."""
    vtpu = behind.vtpu
    page, offset = {
        "registers": (vtpu.regs, D["REG_TEST_SCRATCH"]),
        "doorbells": (vtpu.doorbells, 0),
        "MSI-X table": (vtpu.regs + D["MSIX_TABLE"], 0),
    }[bar]
    behind.domain.map(IOVA, page, 4096)
    va = behind.window(1, IOVA)
    before = vtpu.qemu.read(page + offset, 8)
    for number, (command, payload) in enumerate(
        [
            ("SIGNAL", _signal(va + offset & ~7, 0x1234)),
            ("FILL", struct.pack("<QQI", va, 4096, 7)),
            ("COPY", struct.pack("<QQQ", behind.space.map(2, DATA, WRITE), va, 64)),
        ]
    ):
        assert Queue(vtpu, number).expect_fault(command, payload) == "BUS"
    assert vtpu.qemu.read(page + offset, 8) == before
    ring = Queue(vtpu, 5, ring=IOVA)
    assert ring.expect_fault("NOP") == "BUS"
    Queue(vtpu, 6).do("NOP")


def test_two_devices_have_their_own_domains(open_vtpus: Callable[..., list[Vtpu]]) -> None:
    """The same address is other memory for each."""
    vtpus = open_vtpus(2, *ON)
    iommu = Iommu(vtpus[0].qemu)
    for number, vtpu in enumerate(vtpus):
        domain = Domain(iommu, number + 1)
        domain.map(vtpu.ram, vtpu.ram, 32 * 8192)
        domain.map(vtpu.msix_at & ~4095, vtpu.msix_at & ~4095, 4096)
        domain.map(IOVA, vtpu.ram + 0x100000, 4096)
        iommu.attach(vtpu.bus, domain)
    iommu.translate()
    for number, vtpu in enumerate(vtpus):
        vtpu.enable()
        space = AddressSpace(vtpu, 0, TABLES)
        Queue(vtpu, 0).do(
            "SIGNAL", _signal(space.map(1, IOVA, READ | WRITE, hbm=False), 100 + number)
        )
    assert [vtpus[0].qemu.load(vtpu.ram + 0x100000, 8) for vtpu in vtpus] == [100, 101]
    # And none of the other's.
    stranger = Queue(vtpus[1], 1, ring=vtpus[0].ram)
    assert stranger.expect_fault("NOP") == "BUS"
    assert iommu.fault() == Fault(2 << 8, vtpus[0].ram, NO_READ, write=False)


def test_resets_behind_an_iommu(behind: Behind) -> None:
    """A function-level reset with work on an IOVA; its context entry outlives it."""
    vtpu = behind.vtpu
    behind.domain.map(IOVA, behind.target, 4096)
    va = behind.window(1, IOVA)
    code = ins("ST", addr=va, value=1, mode="U64") + ins("JMP", target=0)
    vtpu.hbm_write(CODE, code)
    queue = Queue(vtpu, 0)
    queue.push("RUN", queue.run(behind.space.map(0, CODE, READ | EXEC), len(code)))
    wait_for(lambda: vtpu.qemu.load(behind.target, 8) == 1, "running")
    vtpu.pci.write(vtpu.pci.capability(0x10) + 8, 0x8000, 2)
    vtpu.qemu.store(behind.target, 0, 8)
    vtpu.setup()
    vtpu.wait_reset()
    vtpu.enable()
    Queue(vtpu, 1).do("NOP")
    assert vtpu.qemu.load(behind.target, 8) == 0
    vtpu.pci.write(COMMAND, COMMAND_MEMORY, 2)
    bare = Queue(vtpu, 2)
    bare.push("NOP")
    wait_for(lambda: bare.state == "FAULTED", "fault")
    assert bare.cause == "BUS" and behind.iommu.fault() is None  # nothing was asked of it


def _pending_in_apic(vtpu: Vtpu) -> str:
    text = vtpu.qemu.qmp("human-monitor-command", **{"command-line": "info lapic"})
    (line,) = (line for line in text.splitlines() if line.startswith("IRR"))
    return str(line)


def test_interrupts_are_remapped(open_vtpu: Callable[..., Vtpu]) -> None:
    """A message becomes what its entry in the table says, and nothing without one."""
    vtpu = open_vtpu(*ON_WITH_REMAPPING)
    iommu = Iommu(vtpu.qemu)
    iommu.remap_interrupts()
    iommu.interrupt_entry(5, 0x45, SOURCE)
    iommu.interrupt_entry(6, 0x46, SOURCE | 8)  # another function's
    for vector, index in ((1, 5), (2, 6), (3, 7)):
        at = vtpu.regs + D["MSIX_TABLE"] + 16 * vector
        vtpu.qemu.store(at, remapped(index), 4)
        vtpu.qemu.store(at + 8, 0, 4)
    vtpu.qemu.trace("vtpu_irq")
    for count, (vector, reason) in enumerate([(2, 0x26), (3, 0x22), (1, None)], 1):
        vtpu.set("TEST_IRQ", vector)
        wait_for(lambda count=count: len(vtpu.qemu.traced("vtpu_irq")) == count, "raised")
        fault = iommu.fault()
        assert (fault.reason if fault else None) == reason
        if fault:
            assert fault.source == SOURCE
            assert "69" not in _pending_in_apic(vtpu) and "70" not in _pending_in_apic(vtpu)
    wait_for(lambda: "69" in _pending_in_apic(vtpu), "vector 0x45")
