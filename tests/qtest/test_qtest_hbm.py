# SPDX-License-Identifier: MIT
"""The HBM BAR: its sizes, where it is placed, and what backs it."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from qtest import READ, WRITE, AddressSpace, D, Queue, Vtpu

BAR = 0x10 + 4 * D["BAR_HBM"]
LAZY = ("-object", "memory-backend-ram,id=hbm,size={},reserve=off")


@pytest.mark.parametrize("gigabytes", [0.25, 8, 64])
def test_sizes(open_vtpu: Callable[..., Vtpu], gigabytes: float) -> None:
    """Placed above 4 GiB, usable to the last page by processor and device, touched lazily."""
    size = int(gigabytes * (1 << 30))
    vtpu = open_vtpu(*(word.format(size) for word in LAZY), hbm_memdev="hbm")
    vtpu.pci.write(BAR, 0xFFFFFFFF)
    vtpu.pci.write(BAR + 4, 0xFFFFFFFF)
    assert vtpu.pci.read(BAR) & 0xF == 0xC  # 64-bit, prefetchable
    mask = vtpu.pci.read(BAR + 4) << 32 | vtpu.pci.read(BAR) & ~0xF
    assert -mask & (1 << 64) - 1 == size
    vtpu.setup()
    assert vtpu.reg("HBM_SIZE", 8) == size
    vtpu.enable()
    last = size - 4096
    vtpu.hbm_write(last, b"the last page")
    space = AddressSpace(vtpu, 0, size - 0x100000)  # its tables lie up there, too
    source, target = space.map(1, last, READ), space.map(2, 0, WRITE)
    Queue(vtpu, 0).do("COPY", struct.pack("<QQQ", target, source, 4096))
    assert vtpu.hbm_read(0, 13) == b"the last page"
    status = Path(f"/proc/{vtpu.qemu.process.pid}/status").read_text()
    resident = next(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmRSS"))
    assert resident < 1 << 20  # KiB


def test_a_backend_of_shared_memory(open_vtpu: Callable[..., Vtpu]) -> None:
    """Another process sees what the device writes."""
    vtpu = open_vtpu("-object", "memory-backend-memfd,id=hbm,size=32M,share=on", hbm_memdev="hbm")
    vtpu.enable()
    space = AddressSpace(vtpu, 0, 0x100000)
    at = space.map(1, 0x300000, WRITE)
    Queue(vtpu, 0).do("FILL", struct.pack("<QQI", at, 4096, 0x01020304))
    folder = Path(f"/proc/{vtpu.qemu.process.pid}/fd")
    (memfd,) = [fd for fd in folder.iterdir() if "memory-backend-memfd" in os.readlink(fd)]
    with memfd.open("rb") as file:
        file.seek(0x300000)
        assert file.read(4096) == b"\4\3\2\1" * 1024


def _refused(command: list[str], *arguments: str) -> str:
    bare = ("-machine", "q35,accel=qtest", "-display", "none", "-nodefaults")
    done = subprocess.run([*command, *bare, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("size", ["48M", "8M", "128G"])
def test_wrong_sizes_are_refused(qemu_command: list[str], size: str) -> None:
    message = "must be a power of two from 16 MiB to 64 GiB"
    backend = tuple(word.format(size) for word in LAZY)
    said = _refused(qemu_command, *backend, "-device", "vtpu,hbm-memdev=hbm")
    assert f"vtpu: hbm-memdev 'hbm' {message}" in said
    said = _refused(qemu_command, "-device", f"vtpu,hbm-size={size}")
    assert f"vtpu: hbm-size {message}" in said


def test_a_backend_serves_one_device(qemu_command: list[str]) -> None:
    device = ("-device", "vtpu,hbm-memdev=hbm")
    backend = ("-object", "memory-backend-memfd,id=hbm,size=32M,share=on")
    said = _refused(qemu_command, *backend, *device, *device)
    assert "vtpu: memory backend 'hbm' is already in use" in said


def test_a_backend_that_is_not_there(qemu_command: list[str]) -> None:
    assert "hbm" in _refused(qemu_command, "-device", "vtpu,hbm-memdev=hbm")


def test_huge_pages_that_the_host_does_not_have(qemu_command: list[str]) -> None:
    """QEMU's own error, before there is a device."""
    pages = Path("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages")
    if pages.is_file() and int(pages.read_text()):
        pytest.skip("this host has them")
    backend = "memory-backend-memfd,id=hbm,size=1G,hugetlb=on,hugetlbsize=1G,prealloc=on"
    said = _refused(qemu_command, "-object", backend, "-device", "vtpu,hbm-memdev=hbm")
    assert "unable to map backing store for guest RAM: Cannot allocate memory" in said


def test_more_memory_than_the_host_gives(qemu_command: list[str], tmp_path: Path) -> None:
    """Says how much, and ends: a limit on addresses stands for a small host."""
    command = ["prlimit", f"--as={8 << 30}", *qemu_command]
    said = _refused(command, "-device", "vtpu,hbm-size=32G")
    assert "vtpu-hbm" in said and "Cannot allocate memory" in said
