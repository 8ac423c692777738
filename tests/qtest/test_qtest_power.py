# SPDX-License-Identifier: MIT
"""Power states: in D3hot the function is silent and keeps its state."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from asm import R, ins
from qtest import EXEC, RAM_SHARE, READ, WRITE, AddressSpace, D, Queue, Vtpu, wait_for
from vtd import ON as IOMMU
from vtd import Domain, Iommu

CAP_PM, CAP_PCIE = 0x01, 0x10
TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000


def _set_power(vtpu: Vtpu, state: int) -> None:
    control = vtpu.pci.capability(CAP_PM) + 4
    vtpu.pci.write(control, state, 2)


def _power(vtpu: Vtpu) -> int:
    return vtpu.pci.read(vtpu.pci.capability(CAP_PM) + 4, 2) & 3


@contextmanager
def asleep(vtpu: Vtpu) -> Iterator[None]:
    _set_power(vtpu, 3)
    assert "device: asleep" in vtpu.property("state")
    yield
    _set_power(vtpu, 0)


@pytest.fixture
def space(vtpu: Vtpu) -> AddressSpace:
    return AddressSpace(vtpu, 0, TABLES)


def _count_into(vtpu: Vtpu, space: AddressSpace, target: int, *, hbm: bool) -> Queue:
    """A program that stores a growing number for ever."""
    out = space.map(1, target & ~4095, READ | WRITE, hbm=hbm) + target % 4096
    code = ins("ADD", rd=R(1), a=R(1), b=1)
    code += ins("ST", addr=out, value=R(1), mode="U64") + ins("JMP", target=0)
    vtpu.hbm_write(CODE, code)
    queue = Queue(vtpu, 0)
    queue.push("RUN", queue.run(space.map(0, CODE, READ | EXEC), len(code)))
    return queue


def test_state_is_kept_and_nothing_answers(vtpu: Vtpu) -> None:
    vtpu.set("TEST_SCRATCH", 99)
    vtpu.hbm_write(DATA, b"kept")
    queue = Queue(vtpu, 0)
    queue.do("NOP")
    count = vtpu.reg("RESET_COUNT")
    with asleep(vtpu):
        assert vtpu.pci.read(vtpu.pci.capability(CAP_PM) + 4, 2) & 0xB == 0xB  # No_Soft_Reset
        # QEMU answers for nobody with zeros, where a real bridge gives ones.
        assert vtpu.reg("ID") != D["MAGIC"] and vtpu.hbm_read(DATA, 4) != b"kept"
        vtpu.set("TEST_SCRATCH", 1)
        vtpu.hbm_write(DATA, b"lost")
        assert vtpu.pci.read(0) == D["DEVICE_ID"] << 16 | D["VENDOR_ID"]
    assert vtpu.reg("TEST_SCRATCH") == 99 and vtpu.hbm_read(DATA, 4) == b"kept"
    assert vtpu.reg("RESET_COUNT") == count
    assert queue.state == "READY" and queue.reg("HEAD") == 1
    queue.do("NOP")  # MSI-X is as it was, too


@pytest.mark.parametrize("hbm", [True, False], ids=["HBM", "system memory"])
def test_running_work_stands_still_and_goes_on(vtpu: Vtpu, space: AddressSpace, hbm: bool) -> None:
    at = DATA if hbm else vtpu.ram + 0x100000

    def count() -> int:
        data = vtpu.hbm_read(at, 8) if hbm else vtpu.qemu.read(at, 8)
        return int(struct.unpack("<Q", data)[0])

    queue = _count_into(vtpu, space, at, hbm=hbm)
    wait_for(lambda: count() > 0, "counting", vtpu)
    with asleep(vtpu):
        # The state is read again only once the program stands at an instruction.
        instructions = _settled_instructions(vtpu)
        seen = None if hbm else count()
        for _ in range(50):
            assert _instructions(vtpu) == instructions
        assert hbm or count() == seen
        assert not vtpu.interrupted(0) and not vtpu.interrupted(1)
    after = count()
    assert seen is None or after >= seen
    wait_for(lambda: count() > after, "counting again", vtpu)
    assert queue.state == "RUNNING"
    queue.reset()
    Queue(vtpu, 0).do("NOP")


def _instructions(vtpu: Vtpu) -> str:
    (line,) = (x for x in vtpu.property("state").splitlines() if x.startswith("engine SEQ"))
    return line


def _settled_instructions(vtpu: Vtpu) -> str:
    """What the counter says once it has stood still for some looks."""
    same, last = 0, ""
    while same < 20:
        now = _instructions(vtpu)
        same, last = (same + 1, last) if now == last else (0, now)
    return last


@pytest.mark.parametrize("options", [(), IOMMU], ids=["memory", "IOMMU"])
def test_a_command_amid_its_transfers_stands_still(
    open_vtpu: Callable[..., Vtpu], options: tuple[str, ...]
) -> None:
    """From the write to the register on nothing more arrives, and then all of it."""
    vtpu = open_vtpu(*options)
    pages, target = 256, vtpu.ram + 0x100000
    if options:
        iommu = Iommu(vtpu.qemu)
        domain = Domain(iommu, 1)
        domain.map(vtpu.ram, vtpu.ram, RAM_SHARE)
        domain.map(vtpu.msix_at, vtpu.msix_at, 4096)
        iommu.attach(vtpu.bus, domain)
        iommu.translate()
    vtpu.enable()
    space, queue = AddressSpace(vtpu, 0, TABLES), Queue(vtpu, 0)
    vtpu.qemu.trace("vtpu_dma")
    line = len("vtpu_dma dev 0x123456789abc write 1 address 0x123456789 bytes 4096 ok 1\n") + 32
    control = vtpu.pci.capability(CAP_PM) + 4
    for page in range(pages):  # backwards, so that each is a transfer
        space.map(page, target + (pages - 1 - page) * 4096, WRITE, hbm=False)
    for _ in range(8):
        for value in range(10):
            payload = struct.pack("<QQI", space.BASE, pages * 4096, value)
            fence = queue.push("FILL", payload, flags=1)
        vtpu.pci.write(control, 3, 2)
        logged = vtpu.qemu.log.stat().st_size
        seen = vtpu.qemu.read(target, pages * 4096)
        for _ in range(3):
            assert vtpu.qemu.read(target, pages * 4096) == seen
        # The line of the last one before may come late.
        assert vtpu.qemu.log.stat().st_size <= logged + line
        vtpu.pci.write(control, 0, 2)
        wait_for(lambda fence=fence: queue.fence == fence, "the last", vtpu)
        assert vtpu.qemu.read(target, pages * 4096) == struct.pack("<I", 9) * (pages * 1024)


def test_a_doorbell_in_d3_is_lost_and_one_before_it_is_served_after(vtpu: Vtpu) -> None:
    queue = Queue(vtpu, 0)
    queue.do("NOP")
    with asleep(vtpu):
        queue.push("NOP")  # its doorbell reaches nobody
        assert queue.fence == 1
    assert queue.reg("TAIL") == 1
    queue.do("NOP")
    assert queue.fence == 3 and queue.reg("HEAD") == 3


def test_an_interrupt_waits_for_d0(vtpu: Vtpu) -> None:
    """Asked for in D0, not yet raised when the function goes to sleep."""
    with asleep(vtpu):
        vtpu.inject("irq-spurious", 9)
        for _ in range(50):
            assert not vtpu.interrupted(9)
        assert not vtpu.pci.read(6, 2) & 0xF900
    vtpu.wait_interrupt(9)


def test_resets_in_d3_lead_to_d0(vtpu: Vtpu, space: AddressSpace) -> None:
    for reset in ("function", "bus", "machine"):
        count = vtpu.reg("RESET_COUNT")
        vtpu.enable()
        space = AddressSpace(vtpu, 0, TABLES)
        queue = _count_into(vtpu, space, vtpu.ram + 0x100000, hbm=False)
        wait_for(lambda queue=queue: queue.state == "RUNNING", "running")
        _set_power(vtpu, 3)
        if reset == "function":
            vtpu.pci.write(vtpu.pci.capability(CAP_PCIE) + 8, 0x8000, 2)
        elif reset == "bus":
            control = vtpu.port.read(0x3E, 2)
            vtpu.port.write(0x3E, control | 0x40, 2)
            vtpu.port.write(0x3E, control, 2)
        else:
            vtpu.qemu.qmp("system_reset")
            wait_for(lambda: vtpu.port.read(4, 2) & 6 == 0, "machine reset")
        vtpu.setup()
        assert _power(vtpu) == 0
        vtpu.wait_reset()
        assert vtpu.reg("RESET_COUNT") == count + 1


def test_states_that_do_not_exist(vtpu: Vtpu) -> None:
    for state in (1, 2):
        _set_power(vtpu, state)
        assert _power(vtpu) == 0
    assert vtpu.reg("ID") == D["MAGIC"]


def test_unplugged_asleep_with_a_transfer_waiting(vtpu: Vtpu, space: AddressSpace) -> None:
    _count_into(vtpu, space, vtpu.ram + 0x100000, hbm=False)
    wait_for(lambda: vtpu.qemu.load(vtpu.ram + 0x100000, 8) > 0, "counting")
    _set_power(vtpu, 3)
    vtpu.qemu.qmp("device_del", id="tpu")
    vtpu.cut_power()
    assert vtpu.qemu.qmp("query-status")["running"]
