# SPDX-License-Identifier: MIT
"""Drives a function from user space, through vfio-pci. Runs in the guest as root:

    python3 vfio_user.py ADDRESS

The function is bound to vfio-pci. Prints "done".
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import struct
import sys
import time

from vtpu_compiler import hw

PAGE = 4096
# <linux/vfio.h>: calls, and the numbers of a PCI device's regions (as of its BARs) and interrupts.
SET_IOMMU, SET_CONTAINER, GET_DEVICE = 0x3B66, 0x3B68, 0x3B6A
REGION_INFO, SET_IRQS, RESET, MAP_DMA, UNMAP_DMA = 0x3B6C, 0x3B6E, 0x3B6F, 0x3B71, 0x3B72
TYPE1 = 1
CONFIG, MSIX = 7, 2
STATE = ("CTX_ROOT", "Q_QSTATUS", "Q_HEAD", "Q_TAIL", "Q_RING_BASE", "Q_FENCE_ADDR", "Q_VECTOR")


def group_of(address: str) -> str:
    link = os.readlink(f"/sys/bus/pci/devices/{address}/iommu_group")
    return f"/dev/vfio/{os.path.basename(link)}"


class Function:
    """A function of this process's own, with its DMA and its interrupts."""

    def __init__(self, address: str) -> None:
        self.container = os.open("/dev/vfio/vfio", os.O_RDWR)
        self.group = os.open(group_of(address), os.O_RDWR)
        fcntl.ioctl(self.group, SET_CONTAINER, struct.pack("i", self.container))
        fcntl.ioctl(self.container, SET_IOMMU, TYPE1)
        self.fd = fcntl.ioctl(self.group, GET_DEVICE, bytearray(address.encode() + b"\0"))
        self.views: list[memoryview | mmap.mmap] = []
        # Memory space and bus master.
        os.pwrite(self.fd, b"\6\0", self.region(CONFIG)[1] + 4)
        self.registers = self.map(hw.BAR_REGS)
        self.doorbells = self.map(hw.BAR_DOORBELL)
        self.hbm = self.map(hw.BAR_HBM)

    def close(self) -> None:
        for view in reversed(self.views):
            view.release() if isinstance(view, memoryview) else view.close()
        for fd in (self.fd, self.group, self.container):
            os.close(fd)

    def region(self, index: int) -> tuple[int, int]:
        """Size, and offset in the device's file."""
        data = bytearray(struct.pack("<IIIIQQ", 32, 0, index, 0, 0, 0))
        fcntl.ioctl(self.fd, REGION_INFO, data)
        return struct.unpack_from("<QQ", data, 16)

    def map(self, index: int) -> memoryview:
        """A region, to be accessed in words of four bytes."""
        size, offset = self.region(index)
        view = mmap.mmap(self.fd, size, offset=offset)
        words = memoryview(view).cast("I")
        self.views += [view, words]
        return words

    def read(self, register: str) -> int:
        return self.registers[hw.REGISTERS[register] // 4]

    def write(self, register: str, value: int, words: int = 1) -> None:
        """Of two words the high one first: the low one may say that both are valid."""
        for word in reversed(range(words)):
            at = hw.REGISTERS[register] // 4 + word
            self.registers[at] = value >> 32 * word & 0xFFFFFFFF

    def reset(self) -> None:
        fcntl.ioctl(self.fd, RESET)

    def begin(self) -> None:
        """After a reset, and its memory is clear by then: it knows nothing of what was."""
        deadline = time.monotonic() + 60
        while self.read("STATUS") & 2:
            assert time.monotonic() < deadline, "RESETTING"
        left = {name: value for name in STATE if (value := self.read(name))}
        assert not left, left
        hbm, nothing = self.hbm.cast("B"), bytes(1 << 20)
        for at in range(0, len(hbm), len(nothing)):
            assert hbm[at : at + len(nothing)] == nothing, f"its last owner's memory at {at:#x}"
        self.write("CTRL", 1)

    def interrupts(self, count: int) -> list[int]:
        """An eventfd for each vector."""
        fds = [os.eventfd(0) for _ in range(count)]
        head = struct.pack("<IIIII", 20 + 4 * count, 0x24, MSIX, 0, count)
        fcntl.ioctl(self.fd, SET_IRQS, head + struct.pack(f"<{count}i", *fds))
        return fds

    def dma(self, memory: mmap.mmap, iova: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        fcntl.ioctl(
            self.container, MAP_DMA, struct.pack("<IIQQQ", 32, 3, address, iova, len(memory))
        )

    def no_dma(self, iova: int, size: int) -> None:
        data = bytearray(struct.pack("<IIQQ", 24, 0, iova, size))
        fcntl.ioctl(self.container, UNMAP_DMA, data)


# The tables of docs/hardware-programming.md, as words of HBM: one page of HBM, and behind
# it, as the device sees it, one of this process.
TABLES, HBM_PAGE, HBM_VA = 0x100000, 0x200000, 0x40000000
IOVA = 7 << 30
VALID, READ_WRITE, IN_HBM = 1, 6, 16


def write_tables(hbm: memoryview) -> None:
    words = {
        TABLES: TABLES + 0x1000 | VALID,
        TABLES + 0x1008: TABLES + 0x2000 | VALID,
        TABLES + 0x2000: TABLES + 0x3000 | VALID,
        TABLES + 0x3000: HBM_PAGE | VALID | READ_WRITE | IN_HBM,
        TABLES + 0x3008: IOVA | VALID | READ_WRITE,
    }
    for at, word in words.items():
        hbm[at // 4], hbm[at // 4 + 1] = word & 0xFFFFFFFF, word >> 32


def work(function: Function) -> None:
    """Copies from this process's memory to HBM and back, each with its interrupt."""
    memory = mmap.mmap(-1, 3 * PAGE)  # data, ring, fence
    function.dma(memory, IOVA)
    events = function.interrupts(2)
    write_tables(function.hbm)
    function.write("CTX_ROOT", TABLES | VALID, 2)
    function.write("Q_RING_BASE", IOVA + PAGE, 2)
    function.write("Q_FENCE_ADDR", IOVA + 2 * PAGE, 2)
    function.write("Q_RING_LOG2", 4)
    function.write("Q_CONTEXT", 0)
    function.write("Q_VECTOR", 1)
    function.write("Q_CTRL", 1)

    def copy(number: int, target: int, source: int) -> None:
        entry = struct.pack("<BBHIQQQQQ16x", 3, 3, 0, number, number, 0, target, source, 8)
        at = PAGE + (number - 1) % 16 * 64
        memory[at : at + 64] = entry
        function.doorbells[0] = number
        assert select.select([events[1]], [], [], 60)[0], "no interrupt"
        os.read(events[1], 8)
        assert int.from_bytes(memory[2 * PAGE : 2 * PAGE + 8], "little") == number

    for number in range(1, 21, 2):
        memory[:8] = number.to_bytes(8, "little")
        copy(number, HBM_VA, HBM_VA + PAGE)
        copy(number + 1, HBM_VA + PAGE + 8, HBM_VA)
        assert memory[8:16] == memory[:8]
    function.no_dma(IOVA, len(memory))
    for event in events:
        os.close(event)


def main(address: str) -> None:
    first = Function(address)
    assert first.read("ID") == hw.MAGIC, hex(first.read("ID"))
    for _ in range(2):
        first.reset()
        first.begin()
        work(first)
    try:
        os.open(group_of(address), os.O_RDWR)
        raise AssertionError("two have it at once")
    except OSError as error:
        assert error.errno == errno.EBUSY, error
    first.close()
    # The kernel resets it for who has it next.
    second = Function(address)
    second.begin()
    work(second)
    second.close()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
