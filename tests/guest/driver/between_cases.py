# SPDX-License-Identifier: MIT
"""Buffers of one device in another. For a guest with two, as test_iommu.py's has."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import vtpu_raw as raw
from cases import DRIVER, VA, Setup, collector, is_gone, main, pci_device, until
from dmabuf_cases import export, import_, udmabuf
from userptr_cases import Memory, pinned
from vtpu_raw import HBM, HUGE, PAGE, raises

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
AREA = VA + (16 << 30)
GOING = "/tmp/driver-tests/going"


def nodes() -> list[str]:
    """Of both devices, in the order of their addresses. One that was bound again while its old
    files were not yet over has another number."""
    return [f"/dev/accel/{path.name}" for path in sorted(Path(DRIVER).glob("*:*/accel/accel*"))]


def on(node: str, timeout_ms: int = 5000) -> Setup:
    os.environ["VTPU_NODE"] = node
    return Setup(timeout_ms, HUGE)


@case
def system_memory_is_both_devices() -> None:
    with on(nodes()[0]) as one, on(nodes()[1]) as two:
        fd = export(one, one.host)
        handle = import_(two, fd)
        os.close(fd)
        two.bind(two.vm_id, handle, AREA, HUGE)
        one.finish_ok([raw.fill(one.host_va, HUGE // 2, 0x31313131)])
        two.finish_ok([raw.copy(AREA + HUGE // 2, AREA, HUGE // 2), raw.fill(AREA, 4, 0x32323232)])
        assert one.host_map[:] == b"2222" + b"1" * (HUGE - 4)
        # Its file may end before its memory does.
        one.close()
        two.finish_ok([raw.copy(two.host_va, AREA, HUGE)])
        assert two.host_map[:8] == b"22221111"


@case
def hbm_is_its_own_devices() -> None:
    with on(nodes()[0]) as one, on(nodes()[1]) as two:
        used = one.memory().hbm_used
        handle = one.bo(PAGE, HBM)
        fd = export(one, handle)
        with raises(errno.EOPNOTSUPP):
            import_(two, fd)
        assert import_(one, fd) == handle
        os.close(fd)
        one.close_bo(handle)
        assert one.memory().hbm_used == used


@case
def either_goes_while_they_share() -> None:
    for going in (0, 1):
        exporter, importer = map(on, nodes())
        os.environ["VTPU_NODE"] = nodes()[going]
        name = pci_device()
        fd = export(exporter, exporter.host)
        importer.bind(importer.vm_id, import_(importer, fd), AREA, HUGE)
        Path(DRIVER, "unbind").write_text(name)
        try:
            left = importer if going == 0 else exporter
            where = AREA if going == 0 else exporter.host_va
            left.finish_ok([raw.fill(where, 8, 0x33333333)])
            assert exporter.host_map[:8] == b"3" * 8
        finally:
            exporter.close()
            importer.close()
            os.close(fd)
            Path(DRIVER, "bind").write_text(name)
        with on(nodes()[going]) as again:
            again.finish_ok([raw.nop()])


def hold_until_it_is_gone() -> None:
    """Every kind of buffer of the second device in use, while that is unplugged."""
    exporter, dev = on(nodes()[0]), on(nodes()[1], timeout_ms=600000)
    memory = Memory(HUGE)
    fd = export(exporter, exporter.host)
    other, _ = udmabuf([(0, 4 * PAGE)], 4 * PAGE)
    handles = [dev.userptr(memory.addr, HUGE), import_(dev, fd), import_(dev, other)]
    for number, (handle, size) in enumerate(zip(handles, (HUGE, HUGE, 4 * PAGE), strict=True)):
        dev.bind(dev.vm_id, handle, AREA + number * HUGE, size)
    dev.submit(dev.queue_id, [dev.run(raw.LOOP)])
    Path(GOING).write_text("ready")
    until(lambda: is_gone(dev), 60, "the device is gone")
    until(lambda: pinned() == 0, 20, "nothing is pinned")
    dev.close()
    exporter.finish_ok([raw.fill(exporter.host_va, 4, 1)])
    exporter.close()
    Path(GOING).write_text("survived")


if __name__ == "__main__":
    if sys.argv[1:] == ["hold"]:
        hold_until_it_is_gone()
    else:
        sys.exit(main(sys.argv[1:], CASES))
