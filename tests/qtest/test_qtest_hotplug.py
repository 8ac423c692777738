# SPDX-License-Identifier: MIT
"""Plugging in, pulling out, and the twin that comes after."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from asm import R, ins
from qtest import EXEC, READ, WRITE, AddressSpace, D, Queue, Vtpu, wait_for

TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000
BACKEND = ("-object", "memory-backend-memfd,id=hbm,size=32M,share=on")


def _busy(vtpu: Vtpu) -> Queue:
    """A program that writes system memory for ever."""
    vtpu.enable()
    space = AddressSpace(vtpu, 0, TABLES)
    target = vtpu.ram + 0x100000
    va = space.map(1, target, READ | WRITE, hbm=False)
    code = ins("ADD", rd=R(1), a=R(1), b=1)
    code += ins("ST", addr=va, value=R(1), mode="U64") + ins("JMP", target=0)
    vtpu.hbm_write(CODE, code)
    queue = Queue(vtpu, 0)
    queue.push("RUN", queue.run(space.map(0, CODE, READ | EXEC), len(code)))
    wait_for(lambda: vtpu.qemu.load(target, 8) > 0, "writing", vtpu)
    return queue


def _plug(vtpu: Vtpu, **properties: object) -> None:
    vtpu.qemu.qmp("device_add", driver="vtpu", id="tpu", bus="rp", threads=2, **properties)
    slot = vtpu.port.capability(0x10) + 0x18
    vtpu.port.write(slot, vtpu.port.read(slot, 2) & ~0x0700 | 0x0100, 2)  # power on
    wait_for(lambda: vtpu.pci.read(0) != 0xFFFFFFFF, "plugged in")
    vtpu.setup()
    vtpu.wait_reset()


@pytest.mark.parametrize("asked", [True, False], ids=["device_del", "pulled"])
@pytest.mark.parametrize("backed", [True, False], ids=["backend", "own memory"])
def test_a_twin_after_a_removal_with_work(
    open_vtpu: Callable[..., Vtpu], asked: bool, backed: bool
) -> None:
    """Again and again: the same name, slot and memory; nothing of before writes."""
    vtpu = open_vtpu(*BACKEND, hbm_memdev="hbm") if backed else open_vtpu(hbm_size="32M")
    memory = {"hbm-memdev": "hbm"} if backed else {"hbm-size": 32 << 20}
    for _ in range(4):
        _busy(vtpu)
        vtpu.hbm_write(DATA, b"left behind")
        if asked:
            vtpu.qemu.qmp("device_del", id="tpu")
        vtpu.cut_power()
        target = vtpu.ram + 0x100000
        vtpu.qemu.store(target, 0, 8)
        _plug(vtpu, **memory)
        assert vtpu.reg("STATUS") == 0 and vtpu.read(D["REG_Q_QSTATUS"]) == 0
        # Memory of its own is new; a backend is whoever's it is.
        assert vtpu.hbm_read(DATA, 11) == (b"left behind" if backed else bytes(11))
        vtpu.enable()
        Queue(vtpu, 1).do("NOP")
        assert vtpu.qemu.load(target, 8) == 0


def test_a_machine_without_its_device_is_reset(vtpu: Vtpu) -> None:
    _busy(vtpu)
    vtpu.cut_power()
    vtpu.qemu.qmp("system_reset")
    wait_for(lambda: vtpu.port.read(4, 2) & 6 == 0, "machine reset")
    assert vtpu.qemu.qmp("query-status")["running"]


def test_a_device_that_cannot_be_made_leaves_nothing(vtpu: Vtpu) -> None:
    """After a failure in each step, the same names can be used."""
    vtpu.cut_power()
    vtpu.qemu.qmp("object-add", **{"qom-type": "memory-backend-ram", "id": "m", "size": 32 << 20})
    for wrong in (
        {"hbm-size": 3 << 20},
        {"threads": 100000},
        {"hbm-memdev": "m", "isa-path": "mmx"},
    ):
        with pytest.raises(RuntimeError, match="vtpu"):
            vtpu.qemu.qmp("device_add", driver="vtpu", id="tpu", bus="rp", **wrong)
    _plug(vtpu, **{"hbm-memdev": "m"})
    vtpu.enable()
    Queue(vtpu, 0).do("NOP")
