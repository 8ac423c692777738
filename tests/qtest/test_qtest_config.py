# SPDX-License-Identifier: MIT
"""Configuration space word by word, and accesses that no driver should make."""

from __future__ import annotations

import pytest
from pcie import CAP_EXP, CAP_MSIX, CAP_PM, EXP_LNKCAP, EXP_LNKSTA, EXT_AER, Config
from qtest import COMMAND, DOORBELLS, D, Queue, Vtpu

DEVCAP2, LNKCTL2 = 0x24, 0x30


@pytest.fixture
def config(vtpu: Vtpu) -> Config:
    return Config(vtpu.qemu, vtpu.bus, 0)


def test_the_size_of_each_bar(vtpu: Vtpu, config: Config) -> None:
    sizes = {D["BAR_REGS"]: 64 << 10, D["BAR_HBM"]: 64 << 20, D["BAR_DOORBELL"]: 256 << 10}
    config.write(COMMAND, 0, 2)
    for bar in range(6):
        at = 0x10 + 4 * bar
        config.write(at, 0xFFFFFFFF)
        word = config.read(at)
        if bar in sizes:
            assert (~(word & ~0xF) + 1) & 0xFFFFFFFF == sizes[bar]
        elif bar == D["BAR_HBM"] + 1:  # the upper half
            assert word == 0xFFFFFFFF
        else:
            assert word == 0
    config.write(0x30, 0xFFFFFFFF)
    assert config.read(0x30) == 0  # no ROM
    vtpu.setup()
    assert vtpu.reg("ID") == D["MAGIC"]


def test_read_only_registers(vtpu: Vtpu, config: Config) -> None:
    """Ones, then zeros, over the whole space: what is fixed stays, nothing breaks."""
    pm, exp, msix = (config.find(number) for number in (CAP_PM, CAP_EXP, CAP_MSIX))
    fixed = {0x00: 4, 0x08: 4, 0x0E: 1, 0x2C: 4, 0x34: 1, 0x3D: 1}
    fixed |= {pm: 4, exp: 4, exp + 4: 4, exp + EXP_LNKCAP: 4, exp + EXP_LNKSTA: 2, exp + DEVCAP2: 4}
    fixed |= {msix: 2, msix + 4: 4, msix + 8: 4, 0x100: 4}
    before = {at: config.read(at, size) for at, size in fixed.items()}
    for value in (0xFFFFFFFF, 0):
        for at in range(0, 4096, 4):
            # A function-level reset is another test's.
            config.write(at, value & ~0x8000 if at == exp + 8 else value)
            assert {a: config.read(a, size) for a, size in fixed.items()} == before, hex(at)
        if value:
            config.write(pm + 4, 0, 2)
    assert config.read(0x3D, 1) == 0  # no INTx
    vtpu.setup()
    vtpu.wait_reset()
    vtpu.enable()
    Queue(vtpu, 0).do("NOP")


def test_the_chains_of_capabilities_end(config: Config) -> None:
    plain = [number for number, _ in config.capabilities()]
    assert sorted(plain) == [CAP_PM, CAP_EXP, CAP_MSIX]
    extended = list(config.extended())
    assert extended[0] == (EXT_AER, 0x100)
    assert len({at for _, at in extended}) == len(extended)


def test_the_link(vtpu: Vtpu, config: Config) -> None:
    """As a card of this kind has it, at both ends."""
    exp = config.find(CAP_EXP)
    assert config.read(exp + EXP_LNKCAP) & 0x3FF == 16 << 4 | 4  # x16, 16 GT/s
    assert config.read(exp + EXP_LNKSTA, 2) & 0x3FF == 16 << 4 | 4
    assert config.read(exp + LNKCTL2, 2) & 0xF == 4
    port = Config(vtpu.qemu, 0, 4)
    assert port.read(port.find(CAP_EXP) + EXP_LNKSTA, 2) & 0x3FF == 16 << 4 | 4


def test_there_is_one_function(vtpu: Vtpu, config: Config) -> None:
    assert config.read(0x0E, 1) == 0
    assert vtpu.qemu.load(0xB000_0000 + (1 << 20 | 1 << 12), 4) == 0xFFFFFFFF


ODD = [(size, shift) for size in (1, 2) for shift in range(4)] + [(4, n) for n in (1, 2, 3)]


@pytest.mark.parametrize(("size", "shift"), ODD)
def test_odd_accesses_change_nothing(vtpu: Vtpu, size: int, shift: int) -> None:
    """Bytes, words and what is not aligned: registers, MSI-X, doorbells read zero."""
    queue = Queue(vtpu, 0)
    queue.do("NOP")
    vtpu.set("TEST_SCRATCH", 0x01020304)
    places = [D[f"REG_{name}"] for name in ("TEST_SCRATCH", "Q_PRIORITY", "Q_CTRL", "CTRL")]
    places += [D["MSIX_TABLE"] + 16 * queue.vector + word for word in (0, 8, 12)]
    before = [vtpu.read(at) for at in places]
    for at in [vtpu.regs + place for place in places] + [vtpu.doorbells]:
        vtpu.qemu.write(at + shift, b"\x5a" * size)
        assert vtpu.qemu.read(at + shift, size) == bytes(size)
    assert [vtpu.read(at) for at in places] == before
    assert queue.reg("TAIL") == 1
    queue.do("NOP")


def test_holes_read_zero(vtpu: Vtpu) -> None:
    for offset in (0x28, 0x3F00, 0x7FF8, D["MSIX_TABLE"] + 16 * D["NUM_MSIX"], 0xFFF8):
        vtpu.write(offset, 0xFFFFFFFF)
        assert vtpu.read(offset) == 0 and vtpu.read(offset, 8) == 0
    assert vtpu.qemu.load(DOORBELLS, 4) == 0
