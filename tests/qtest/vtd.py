# SPDX-License-Identifier: MIT
"""QEMU's intel-iommu as an operating system programs it, in legacy mode.

Root and context entries and second-level page tables of 4 KiB pages, written
into guest memory; register-based invalidation. Terms and offsets are those of
Intel's Virtualization Technology for Directed I/O specification.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from qtest import Qemu, wait_for

UNIT = 0xFED9_0000
CAP, ECAP, GCMD, GSTS, RTADDR, CCMD, FSTS, IRTA = 0x08, 0x10, 0x18, 0x1C, 0x20, 0x28, 0x34, 0xB8
TRANSLATE, SET_ROOT, REMAP_INTERRUPTS, SET_REMAP_TABLE = 1 << 31, 1 << 30, 1 << 25, 1 << 24
READ, WRITE = 1, 2
TABLES = 0x400_0000  # in guest memory, to its end
REMAP_TABLE = 0x300_0000

ON = ("-device", "intel-iommu,intremap=off,caching-mode=on")
ON_WITH_REMAPPING = ("-device", "intel-iommu,intremap=on,eim=off,caching-mode=on")


@dataclass(frozen=True)
class Fault:
    source: int
    address: int
    reason: int
    write: bool


class Domain:
    def __init__(self, iommu: Iommu, number: int) -> None:
        self.iommu, self.number, self.root = iommu, number, iommu.table()

    def map(self, iova: int, target: int, size: int, rights: int = READ | WRITE) -> None:
        for at in range(0, size, 4096):
            self._write(iova + at, target + at | rights)

    def unmap(self, iova: int, size: int) -> None:
        for at in range(0, size, 4096):
            self._write(iova + at, 0)

    def _write(self, iova: int, entry: int) -> None:
        table = self.root
        for level in range(self.iommu.levels - 1, 0, -1):
            at = table + 8 * (iova >> 12 + 9 * level & 511)
            word = self.iommu.qemu.load(at, 8)
            if not word:
                word = self.iommu.table() | READ | WRITE
                self.iommu.qemu.store(at, word, 8)
            table = word & ~0xFFF
        self.iommu.qemu.store(table + 8 * (iova >> 12 & 511), entry, 8)


class Iommu:
    def __init__(self, qemu: Qemu) -> None:
        self.qemu, self._free, self._enabled = qemu, TABLES, 0
        widths = self.load(CAP, 8) >> 8 & 31
        self.levels = 4 if widths & 4 else 3
        extended = self.load(ECAP, 8)
        self._iotlb = (extended >> 8 & 0x3FF) * 16 + 8
        self._records = (self.load(CAP, 8) >> 24 & 0x3FF) * 16
        self.passes_through = bool(extended >> 6 & 1)
        self._root = self.table()
        self.store(RTADDR, self._root, 8)
        self._command(SET_ROOT)

    def load(self, offset: int, size: int = 4) -> int:
        return self.qemu.load(UNIT + offset, size)

    def store(self, offset: int, value: int, size: int = 4) -> None:
        self.qemu.store(UNIT + offset, value, size)

    def table(self) -> int:
        at = self._free
        self._free += 4096
        self.qemu.write(at, bytes(4096))
        return at

    def _command(self, bit: int, *, keep: bool = False) -> None:
        self.store(GCMD, self._enabled | bit)
        wait_for(lambda: bool(self.load(GSTS) & bit), "IOMMU command")
        if keep:
            self._enabled |= bit

    def translate(self) -> None:
        self.flush_contexts()
        self._command(TRANSLATE, keep=True)

    def attach(self, bus: int, domain: Domain | None, devfn: int = 0) -> None:
        """Function to domain; None: passed through."""
        root = self._root + 16 * bus
        contexts = self.qemu.load(root, 8) & ~0xFFF
        if not contexts:
            contexts = self.table()
            self.qemu.store(root, contexts | 1, 8)
        width = self.levels - 2
        entry = (domain.root | 1, domain.number << 8 | width) if domain else (2 << 2 | 1, width)
        self.qemu.write(contexts + 16 * devfn, struct.pack("<QQ", *entry))
        self.flush_contexts()

    def flush_contexts(self) -> None:
        self.store(CCMD, 1 << 63 | 1 << 61, 8)
        wait_for(lambda: not self.load(CCMD, 8) >> 63, "context invalidation")
        self.flush()

    def flush(self) -> None:
        """All translations that the unit has cached."""
        self.store(self._iotlb, 1 << 63 | 1 << 60, 8)
        wait_for(lambda: not self.load(self._iotlb, 8) >> 63, "IOTLB invalidation")

    def fault(self) -> Fault | None:
        """The oldest recorded fault, which is taken away."""
        low, high = (self.load(self._records + at, 8) for at in (0, 8))
        if not high >> 63:
            return None
        self.store(self._records + 12, 1 << 31)
        self.store(FSTS, 1)
        return Fault(high & 0xFFFF, low & ~0xFFF, high >> 32 & 0xFF, not high >> 62 & 1)

    def remap_interrupts(self) -> None:
        """With a table of 256 entries, none of them present yet."""
        self.qemu.write(REMAP_TABLE, bytes(4096))
        self.store(IRTA, REMAP_TABLE | 7, 8)
        self._command(SET_REMAP_TABLE)
        self._command(REMAP_INTERRUPTS, keep=True)

    def interrupt_entry(self, index: int, vector: int, source: int) -> None:
        """To processor 0, from that function alone."""
        low, high = vector << 16 | 1, 1 << 18 | source
        self.qemu.write(REMAP_TABLE + 16 * index, struct.pack("<QQ", low, high))


def remapped(index: int) -> int:
    """The address of a message in remappable format."""
    return 0xFEE0_0000 | (index & 0x7FFF) << 5 | 1 << 4
