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
SECRET = b"of its last owner"


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
        for word in range(words):
            at = hw.REGISTERS[register] // 4 + word
            self.registers[at] = value >> 32 * word & 0xFFFFFFFF

    def reset(self) -> None:
        """It begins anew: and is ready when its memory is clear."""
        fcntl.ioctl(self.fd, RESET)
        deadline = time.monotonic() + 60
        while self.read("STATUS") & 2:
            assert time.monotonic() < deadline, "RESETTING"
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


def work(function: Function) -> None:
    """Commands through a ring in this process's memory, each with its interrupt."""
    iova = 7 << 30
    memory = mmap.mmap(-1, 2 * PAGE)
    function.dma(memory, iova)
    events = function.interrupts(2)
    function.write("Q_RING_BASE", iova, 2)
    function.write("Q_FENCE_ADDR", iova + PAGE, 2)
    function.write("Q_RING_LOG2", 4)
    function.write("Q_VECTOR", 1)
    function.write("Q_CTRL", 1)
    for number in range(1, 21):
        entry = struct.pack("<BBHIQQ40x", 1, 3, 0, number, number, 0)  # NOP; fence, interrupt
        at = (number - 1) % 16 * 64
        memory[at : at + 64] = entry
        function.doorbells[0] = number
        assert select.select([events[1]], [], [], 60)[0], "no interrupt"
        os.read(events[1], 8)
        assert int.from_bytes(memory[PAGE : PAGE + 8], "little") == number
    function.no_dma(iova, 2 * PAGE)
    for event in events:
        os.close(event)


def main(address: str) -> None:
    first = Function(address)
    assert first.read("ID") == hw.MAGIC, hex(first.read("ID"))
    first.reset()
    work(first)
    try:
        os.open(group_of(address), os.O_RDWR)
        raise AssertionError("two have it at once")
    except OSError as error:
        assert error.errno == errno.EBUSY, error
    hbm = first.map(hw.BAR_HBM)
    hbm.cast("B")[: len(SECRET)] = SECRET
    first.close()
    # Who has it next finds nothing.
    second = Function(address)
    second.reset()
    assert not any(second.map(hw.BAR_HBM)[:1024]), "its last owner's memory"
    work(second)
    second.close()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
