# SPDX-License-Identifier: MIT
"""Virtual functions: how they come and go, what they share and what they do not."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from asm import R, ins, pc, program
from pcie import CAP_EXP, Config
from qtest import (
    COMMAND,
    COMMAND_MASTER,
    COMMAND_MEMORY,
    EXEC,
    READ,
    WRITE,
    AddressSpace,
    D,
    Pci,
    Queue,
    Vtpu,
    wait_for,
)

MIB = 1 << 20
SLICE = 32 * MIB
EXT_CAP_ARI, EXT_CAP_SRIOV = 0x0E, 0x10
# Registers of the capability.
CONTROL, INITIAL_VFS, TOTAL_VFS, NUM_VFS, OFFSET, STRIDE, DEVICE_ID, BARS = (
    *(0x08, 0x0C, 0x0E, 0x10, 0x14, 0x16, 0x1A, 0x24),
)
ENABLE, MEMORY = 1, 8
VF_REGS, VF_DOORBELLS, VF_HBM = 0x20_0000, 0x40_0000, 1 << 34  # from the physical function's


def config_of(pf: Vtpu, function: int = 0) -> Config:
    """With alternative routing ids there are no slots behind a port: 0 to 255 are functions."""
    return Config(pf.qemu, pf.bus, 0, function)


def extended(config: Config, number: int) -> int:
    return dict(config.extended())[number]


class Vf(Vtpu):
    """Virtual function `number`, from 1; its BARs are where enable_vfs() put them."""

    def __init__(self, pf: Vtpu, number: int) -> None:
        self.qemu, self.bus, self.number = pf.qemu, pf.bus, number
        self.port, self.pci = pf.port, Pci(pf.qemu, pf.bus, 0, number)
        self.regs = pf.regs + VF_REGS + (number - 1) * D["REGS_SIZE"]
        self.doorbells = pf.doorbells + VF_DOORBELLS + (number - 1) * D["NUM_QUEUES"] * 4096
        self.hbm = pf.hbm + VF_HBM + (number - 1) * SLICE
        self.ram, self.msix_at = pf.ram + number * 0x10_0000, pf.msix_at + number * 0x1000
        self.path = f"{pf.path}/vf{number}"
        self.setup()

    def setup(self) -> None:
        self.pci.write(COMMAND, COMMAND_MEMORY | COMMAND_MASTER, 2)
        self.wait_reset()
        self.enable_msix()
        self.enable()


def set_bars(pf: Vtpu, config: Config) -> int:
    """Of all virtual functions; returns where the capability is."""
    cap = extended(config, EXT_CAP_SRIOV)
    config.write(cap + BARS + 4 * D["BAR_REGS"], pf.regs + VF_REGS)
    config.write(cap + BARS + 4 * D["BAR_HBM"], pf.hbm + VF_HBM & 0xFFFFFFFF)
    config.write(cap + BARS + 4 * D["BAR_HBM"] + 4, pf.hbm + VF_HBM >> 32)
    config.write(cap + BARS + 4 * D["BAR_DOORBELL"], pf.doorbells + VF_DOORBELLS)
    return cap


def enable_vfs(pf: Vtpu, count: int) -> list[Vf]:
    config = config_of(pf)
    cap = set_bars(pf, config)
    config.write(cap + NUM_VFS, count, 2)
    config.write(cap + CONTROL, ENABLE | MEMORY, 2)
    return [Vf(pf, number) for number in range(1, count + 1)]


def disable_vfs(pf: Vtpu) -> None:
    config = config_of(pf)
    config.write(extended(config, EXT_CAP_SRIOV) + CONTROL, 0, 2)


@pytest.fixture
def pf(open_vtpu: Callable[..., Vtpu]) -> Vtpu:
    vtpu = open_vtpu(sriov_vfs="3", vf_hbm_size="32M")
    vtpu.enable()
    return vtpu


CODE, DATA = 0x20_0000, 0x30_0000  # in HBM
TABLES = 0x10_0000


class Worker:
    """A function with a queue and room for a program."""

    def __init__(self, vtpu: Vtpu) -> None:
        self.vtpu = vtpu
        self.space = AddressSpace(vtpu, 0, TABLES)
        self.code = self.space.map(0, CODE, READ | EXEC)
        self.data = self.space.map(1, DATA, READ | WRITE)
        self.queue = Queue(vtpu, 0)

    def load(self, code: bytes) -> bytes:
        self.vtpu.hbm_write(CODE, code)
        return self.queue.run(self.code, len(code))

    def store(self, value: int) -> None:
        """A program that stores the value, and its effect."""
        self.queue.do("RUN", self.load(program(ins("ST", addr=self.data, value=value, mode="U64"))))
        assert self.word() == value

    def word(self) -> int:
        return int(struct.unpack("<Q", self.vtpu.hbm_read(DATA, 8))[0])

    def count_forever(self) -> None:
        count = [
            ins("ADD", rd=30, a=R(30), b=1),
            ins("ST", addr=self.data, value=R(30), mode="U64"),
            ins("JMP", target=pc(0)),
        ]
        self.queue.push("RUN", self.load(b"".join(count)))
        wait_for(lambda: self.word() > 0, "counting", self.vtpu)

    def counts(self) -> None:
        seen = self.word()
        wait_for(lambda: self.word() > seen, "still counting", self.vtpu)


def test_the_capability(pf: Vtpu) -> None:
    config = config_of(pf)
    cap = extended(config, EXT_CAP_SRIOV)
    extended(config, EXT_CAP_ARI)
    assert config.read(cap + INITIAL_VFS, 2) == config.read(cap + TOTAL_VFS, 2) == 3
    assert config.read(cap + NUM_VFS, 2) == 0 and config.read(cap + CONTROL, 2) == 0
    assert config.read(cap + OFFSET, 2) == 1 and config.read(cap + STRIDE, 2) == 1
    assert config.read(cap + DEVICE_ID, 2) == D["VF_DEVICE_ID"]
    sizes = {"BAR_REGS": D["REGS_SIZE"], "BAR_HBM": SLICE, "BAR_DOORBELL": D["NUM_QUEUES"] * 4096}
    for name, size in sizes.items():
        bar = cap + BARS + 4 * D[name]
        config.write(bar, 0xFFFFFFFF)
        assert config.read(bar) & ~0xF == -size & 0xFFFFFFFF
        assert config.read(bar) & 0xF == (0xC if name == "BAR_HBM" else 0)


def test_without_virtual_functions_there_is_no_capability(open_vtpu: Callable[..., Vtpu]) -> None:
    config = config_of(open_vtpu())
    assert EXT_CAP_SRIOV not in dict(config.extended())


def test_functions_are_not_there_before_they_are_enabled(pf: Vtpu) -> None:
    assert config_of(pf, 1).read(0) == 0xFFFFFFFF
    vfs = enable_vfs(pf, 2)
    assert config_of(pf, 3).read(0) == 0xFFFFFFFF
    assert [vf.pci.read(8) for vf in vfs] == [D["CLASS"] << 8 | D["REVISION"]] * 2
    disable_vfs(pf)
    assert config_of(pf, 1).read(0) == 0xFFFFFFFF


def test_what_a_function_says_of_itself(pf: Vtpu) -> None:
    assert pf.reg("FUNCTION") == 0 and pf.reg("HBM_SIZE", 8) == 64 * MIB
    for number, vf in enumerate(enable_vfs(pf, 3), 1):
        assert vf.reg("ID") == D["MAGIC"] and vf.reg("FUNCTION") == number
        assert vf.reg("HBM_SIZE", 8) == SLICE
        assert vf.reg("NUM_QUEUES") == pf.reg("NUM_QUEUES")
        assert vf.reg("ISA_VERSION") == pf.reg("ISA_VERSION")
        extended(config_of(pf, number), EXT_CAP_ARI)


def test_all_work_at_once(pf: Vtpu) -> None:
    workers = [Worker(vtpu) for vtpu in (pf, *enable_vfs(pf, 3))]
    for worker in workers[:3]:
        worker.count_forever()
    for number in range(5):
        workers[3].store(number + 1)
    for worker in workers[:3]:
        worker.counts()


def test_each_has_its_interrupts(pf: Vtpu) -> None:
    one, two = enable_vfs(pf, 2)
    two.set("TEST_IRQ", 7)
    two.wait_interrupt(7)
    two.mask(8, True)
    two.set("TEST_IRQ", 8)
    wait_for(lambda: two.pending(8), "pending")
    one.set("TEST_IRQ", 8)
    one.wait_interrupt(8)
    assert not (pf.interrupted(7) or one.interrupted(7) or two.interrupted(8) or pf.pending(8))


def test_each_has_its_hbm(pf: Vtpu) -> None:
    """Slices do not overlap, and their ends are the ends of what can be addressed."""
    functions = [pf, *enable_vfs(pf, 3)]
    sizes = [vtpu.reg("HBM_SIZE", 8) for vtpu in functions]
    for number, (vtpu, size) in enumerate(zip(functions, sizes, strict=True), 1):
        vtpu.hbm_write(0, bytes([number]) * 8)
        vtpu.hbm_write(size - 8, bytes([number]) * 8)
    for number, (vtpu, size) in enumerate(zip(functions, sizes, strict=True), 1):
        assert vtpu.hbm_read(0, 8) == vtpu.hbm_read(size - 8, 8) == bytes([number]) * 8
        worker = Worker(vtpu)
        for target in (size, size + 4096, 1 << 40):
            beyond = worker.space.map(2, target, READ | WRITE)
            assert worker.queue.expect_fault("SIGNAL", struct.pack("<QQ", beyond, 1)) == (
                "BAD_PAGE_TABLE"
            )
            worker.queue.reset()
            worker.queue = Queue(vtpu, 0)


def test_each_is_a_bus_master_of_its_own(pf: Vtpu) -> None:
    one, two = enable_vfs(pf, 2)
    one.pci.write(COMMAND, COMMAND_MEMORY, 2)
    queue = Queue(one, 0)
    queue.push("NOP")
    wait_for(lambda: queue.state == "FAULTED", "fault")
    assert queue.cause == "BUS"
    Queue(two, 0).do("NOP")
    pf.pci.write(COMMAND, COMMAND_MEMORY, 2)
    Queue(two, 1).do("NOP")


def function_level_reset(vf: Vf) -> None:
    vf.pci.write(vf.pci.capability(CAP_EXP) + 8, 0x8000, 2)


def test_a_reset_of_one_leaves_the_others(pf: Vtpu) -> None:
    one, two = enable_vfs(pf, 2)
    workers = [Worker(vtpu) for vtpu in (pf, one, two)]
    for worker in workers:
        worker.count_forever()
    count = one.reg("RESET_COUNT")
    function_level_reset(one)
    one.setup()
    assert one.reg("RESET_COUNT") == count + 1
    for worker in (workers[0], workers[2]):
        worker.counts()
        assert worker.queue.state == "RUNNING"
    Worker(one).store(1)


def whole_slice(vf: Vf, folder: Path) -> bytes:
    """Through a file: the test's own socket is for a few bytes."""
    path = folder / "slice"
    vf.qemu.qmp("pmemsave", val=vf.hbm, size=SLICE, filename=str(path))
    return path.read_bytes()


def test_a_reset_leaves_nothing_for_the_next_owner(pf: Vtpu, tmp_path: Path) -> None:
    """Neither what was there nor what a program was writing; nor in between."""
    one, two = enable_vfs(pf, 2)
    two.hbm_write(0, b"neighbour")
    for _ in range(4):
        worker = Worker(one)
        one.hbm_write(SLICE - 8, b"a secret")
        worker.count_forever()
        function_level_reset(one)
        one.pci.write(COMMAND, COMMAND_MEMORY, 2)
        while one.reg("STATUS") & D["STATUS_RESETTING"]:
            assert one.hbm_read(SLICE - 8, 8) == bytes(8)
        one.setup()
        assert whole_slice(one, tmp_path) == bytes(SLICE)
    assert two.hbm_read(0, 9) == b"neighbour"


def test_a_stuck_reset_shows_nothing(pf: Vtpu) -> None:
    one = enable_vfs(pf, 1)[0]
    one.hbm_write(0, b"a secret")
    one.inject("reset-stuck", True)
    function_level_reset(one)
    one.pci.write(COMMAND, COMMAND_MEMORY, 2)
    assert one.reg("STATUS") & D["STATUS_RESETTING"]
    assert one.hbm_read(0, 8) == bytes(8)
    one.hbm_write(0, b"lost")
    one.inject("reset-stuck", False)
    one.setup()
    assert one.hbm_read(0, 8) == bytes(8)
    one.hbm_write(0, b"seen")
    assert one.hbm_read(0, 4) == b"seen"


def test_functions_go_while_they_work(pf: Vtpu) -> None:
    """Disabled and enabled again, with another number; the physical one is not disturbed."""
    worker = Worker(pf)
    worker.count_forever()
    for count in (3, 1, 2):
        vfs = enable_vfs(pf, count)
        for vf in vfs:
            assert vf.hbm_read(0, MIB) == bytes(MIB)
            Worker(vf).count_forever()
        disable_vfs(pf)
        worker.counts()
    for vf in enable_vfs(pf, 3):
        Worker(vf).store(5)


def test_too_many_are_refused(pf: Vtpu) -> None:
    config = config_of(pf)
    cap = set_bars(pf, config)
    config.write(cap + NUM_VFS, 4, 2)
    config.write(cap + CONTROL, ENABLE | MEMORY, 2)
    assert config.read(cap + CONTROL, 2) & ENABLE == 0
    assert config_of(pf, 1).read(0) == 0xFFFFFFFF
    vfs = enable_vfs(pf, 2)
    config.write(cap + NUM_VFS, 3, 2)  # not while they are enabled
    assert config.read(cap + NUM_VFS, 2) == 2
    Worker(vfs[1]).store(1)


@pytest.mark.parametrize("reset", ["flr", "bus", "machine"])
def test_a_reset_of_the_physical_function_ends_the_virtual_ones(pf: Vtpu, reset: str) -> None:
    for vf in enable_vfs(pf, 2):
        vf.hbm_write(SLICE - 8, b"a secret")
        Worker(vf).count_forever()
    if reset == "flr":
        pf.pci.write(pf.pci.capability(CAP_EXP) + 8, 0x8000, 2)
    elif reset == "bus":
        control = pf.port.read(0x3E, 2)
        pf.port.write(0x3E, control | 0x40, 2)
        pf.port.write(0x3E, control, 2)
    else:
        pf.qemu.qmp("system_reset")
        wait_for(lambda: pf.port.read(COMMAND, 2) & 6 == 0, "machine reset")
    pf.setup()
    config = config_of(pf)
    cap = extended(config, EXT_CAP_SRIOV)
    assert config.read(cap + CONTROL, 2) == 0 and config.read(cap + NUM_VFS, 2) == 0
    assert config_of(pf, 1).read(0) == 0xFFFFFFFF
    pf.wait_reset()
    pf.enable()
    for vf in enable_vfs(pf, 2):
        assert vf.hbm_read(SLICE - 8, 8) == bytes(8)
        Worker(vf).store(3)
    Worker(pf).store(4)


def test_reset_by_register_is_of_one_function(pf: Vtpu) -> None:
    """And clears nothing: the owner is the same."""
    one = enable_vfs(pf, 1)[0]
    Worker(one).count_forever()
    one.hbm_write(SLICE - 8, b"own data")
    pf.set("CTRL", D["CTRL_RESET"])
    pf.wait_reset()
    assert one.reg("STATUS") & D["STATUS_BUSY"]
    one.set("CTRL", D["CTRL_RESET"])
    one.wait_reset()
    assert one.hbm_read(SLICE - 8, 8) == b"own data"


def test_a_hang_of_one_leaves_the_others(pf: Vtpu) -> None:
    one, two = enable_vfs(pf, 2)
    hanging = Worker(one)
    one.inject("hang", True)
    hanging.queue.push("RUN", hanging.load(program()))
    one.wait_injected("hang", False)
    Worker(two).store(1)
    Worker(pf).store(2)
    assert hanging.queue.state == "RUNNING" and "queue 0" in one.property("state")
    hanging.queue.reset()
    assert pf.property("state") != one.property("state")


@pytest.mark.parametrize("enabled", [0, 2])
def test_unplug_and_plug(pf: Vtpu, enabled: int) -> None:
    for vf in enable_vfs(pf, enabled) if enabled else []:
        Worker(vf).count_forever()
    Worker(pf).count_forever()
    pf.qemu.qmp("device_del", id="tpu")
    pf.cut_power()
    pf.qemu.qmp(
        "device_add",
        **{"driver": "vtpu", "id": "tpu", "bus": "rp", "sriov-vfs": 3},
        **{"hbm-size": 64 * MIB, "vf-hbm-size": SLICE},
    )
    slot = pf.port.capability(CAP_EXP) + 0x18
    pf.port.write(slot, pf.port.read(slot, 2) & ~0x0700 | 0x0100, 2)  # power on
    pf.setup()
    pf.wait_reset()
    pf.enable()
    for vf in enable_vfs(pf, 3):
        assert vf.hbm_read(0, MIB) == bytes(MIB)
        Worker(vf).store(6)


def test_migration_waits_for_the_functions_to_go(pf: Vtpu) -> None:
    def blocked() -> bool:
        reasons = pf.qemu.qmp("query-migrate").get("blocked-reasons", [])
        return any("virtual functions are enabled" in reason for reason in reasons)

    assert not blocked()
    one = enable_vfs(pf, 1)[0]
    assert blocked()
    one.inject("reset-stuck", True)
    disable_vfs(pf)
    assert blocked()  # its slice is not cleared
    one.inject("reset-stuck", False)
    wait_for(lambda: not blocked(), "no longer blocked")


def test_a_backend_holds_all_slices(open_vtpu: Callable[..., Vtpu], tmp_path: Path) -> None:
    backing = tmp_path / "hbm"
    backing.write_bytes(b"x" * (128 * MIB))
    pf = open_vtpu(
        *("-object", f"memory-backend-file,id=hbm,size=128M,share=on,mem-path={backing}"),
        **{"hbm_memdev": "hbm", "sriov_vfs": "2", "vf_hbm_size": "32M"},
    )
    assert pf.reg("HBM_SIZE", 8) == 64 * MIB and pf.hbm_read(64 * MIB - 1, 1) == b"x"
    one, two = enable_vfs(pf, 2)
    one.hbm_write(0, b"first")
    two.hbm_write(0, b"second")
    text = backing.read_bytes()
    assert text[64 * MIB :].startswith(b"first\0") and text[96 * MIB :].startswith(b"second\0")
    assert text[: 64 * MIB] == b"x" * (64 * MIB)


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ("sriov-vfs=16", "sriov-vfs must be at most 15"),
        ("sriov-vfs=2,vf-hbm-size=48M", "vf-hbm-size must be a power of two"),
        ("sriov-vfs=1,vf-hbm-size=1M", "vf-hbm-size must be a power of two"),
        ("addr=1e.0,sriov-vfs=15", "in use by"),
        ("hbm-memdev=ram,sriov-vfs=2,vf-hbm-size=32M", "less sriov-vfs times vf-hbm-size"),
    ],
)
def test_bad_properties_are_refused(qemu_command: list[str], properties: str, message: str) -> None:
    import subprocess

    done = subprocess.run(
        [
            *qemu_command,
            *("-machine", "q35,accel=qtest", "-display", "none", "-nodefaults"),
            *("-object", "memory-backend-ram,id=ram,size=64M"),
            *("-device", f"vtpu,{properties}"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and message in done.stderr, done.stderr


def test_fifteen_functions(open_vtpu: Callable[..., Vtpu]) -> None:
    pf = open_vtpu(sriov_vfs="15", vf_hbm_size="32M")
    for vf in enable_vfs(pf, 15):
        assert vf.reg("FUNCTION") == vf.number
        if vf.number in (1, 7, 8):
            Worker(vf).store(vf.number)
