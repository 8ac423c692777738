# SPDX-License-Identifier: MIT
"""Extended configuration space, and advanced error reporting up to the root port."""

from __future__ import annotations

from collections.abc import Iterator

from qtest import Pci, Qemu, Vtpu

ECAM = 0xB000_0000
CAP_PM, CAP_EXP, CAP_MSIX = 0x01, 0x10, 0x11
EXT_AER = 0x0001
EXP_DEVCTL, EXP_DEVSTA, EXP_LNKCAP, EXP_LNKSTA = 0x08, 0x0A, 0x0C, 0x12
PORT_ERROR_AT = 0x1EF_0000  # where the root port's message lands in RAM


def place_ecam(qemu: Qemu) -> None:
    """Tells the host bridge where configuration space lies in memory, as firmware would."""
    Pci(qemu, 0, 0).write(0x60, ECAM | 1)


class Config:
    """All 4 KiB of one function's configuration space, through memory."""

    def __init__(self, qemu: Qemu, bus: int, slot: int, function: int = 0) -> None:
        self.qemu, self._at = qemu, ECAM + (bus << 20 | slot << 15 | function << 12)
        place_ecam(qemu)

    def read(self, offset: int, size: int = 4) -> int:
        letter = {1: "b", 2: "w", 4: "l"}[size]
        return int(self.qemu.command(f"read{letter} {self._at + offset:#x}")[0], 0)

    def write(self, offset: int, value: int, size: int = 4) -> None:
        letter = {1: "b", 2: "w", 4: "l"}[size]
        self.qemu.command(f"write{letter} {self._at + offset:#x} {value:#x}")

    def capabilities(self) -> Iterator[tuple[int, int]]:
        """Number and offset of each, in the order of the chain."""
        at = self.read(0x34, 1)
        while at:
            yield self.read(at, 1), at
            at = self.read(at + 1, 1)

    def extended(self) -> Iterator[tuple[int, int]]:
        at = 0x100
        while at:
            header = self.read(at)
            yield header & 0xFFFF, at
            at = header >> 20

    def find(self, number: int) -> int:
        return dict(self.capabilities())[number]


class Aer:
    """A device and the port above it, set up to report errors as an operating system would."""

    UNC_STATUS, UNC_MASK, UNC_SEVERITY, COR_STATUS, COR_MASK = 0x04, 0x08, 0x0C, 0x10, 0x14
    ROOT_COMMAND, ROOT_STATUS, ROOT_SOURCE = 0x2C, 0x30, 0x34
    POISONED, UNSUPPORTED, INTERNAL = 1 << 12, 1 << 20, 1 << 22
    COR_ADVISORY, COR_INTERNAL = 1 << 13, 1 << 14

    def __init__(self, vtpu: Vtpu) -> None:
        qemu = vtpu.qemu
        self.vtpu = vtpu
        self.device = Config(qemu, vtpu.bus, 0)
        self.port = Config(qemu, 0, 3 + vtpu.bus)
        self.at = dict(self.device.extended())[EXT_AER]
        self.port_at = dict(self.port.extended())[EXT_AER]
        for config in (self.device, self.port):
            config.write(config.find(CAP_EXP) + EXP_DEVCTL, 0xF, 2)
        self.port.write(0x3E, self.port.read(0x3E, 2) | 2, 2)  # SERR# of the bridge
        self.port.write(self.port_at + self.ROOT_COMMAND, 7)
        self._port_msix()

    def _port_msix(self) -> None:
        """The port's errors have a vector of its MSI-X table: all of them into one word."""
        bar = self.vtpu.regs + (8 << 20)
        self.port.write(0x10, bar)
        cap = self.port.find(CAP_MSIX)
        table = bar + (self.port.read(cap + 4) & ~7)
        for vector in range((self.port.read(cap + 2, 2) & 0x7FF) + 1):
            for word, value in enumerate((PORT_ERROR_AT, 0, 1, 0)):
                self.vtpu.qemu.store(table + 16 * vector + 4 * word, value, 4)
        self.port.write(cap + 2, 0x8000, 2)

    def unmask(self) -> None:
        self.device.write(self.at + self.UNC_MASK, 0)
        self.device.write(self.at + self.COR_MASK, 0)

    def reg(self, offset: int) -> int:
        return self.device.read(self.at + offset)

    def clear(self, offset: int, bits: int) -> None:
        self.device.write(self.at + offset, bits)

    @property
    def root_status(self) -> int:
        return self.port.read(self.port_at + self.ROOT_STATUS)

    @property
    def sources(self) -> tuple[int, int]:
        """Who reported the first correctable and the first uncorrectable error."""
        word = self.port.read(self.port_at + self.ROOT_SOURCE)
        return word & 0xFFFF, word >> 16

    def signalled(self) -> bool:
        """Whether the port has interrupted since the last call."""
        word = self.vtpu.qemu.load(PORT_ERROR_AT, 4)
        self.vtpu.qemu.store(PORT_ERROR_AT, 0, 4)
        return word == 1

    def acknowledge(self) -> None:
        self.port.write(self.port_at + self.ROOT_STATUS, 0x7F)
