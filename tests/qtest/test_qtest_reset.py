# SPDX-License-Identifier: MIT
"""Resets under load: what was in flight before never reaches memory after."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from asm import R, ins
from qtest import COMMAND, EXEC, READ, WRITE, AddressSpace, D, Queue, Vtpu, wait_for

TABLES, CODE = 0x100000, 0x200000
ROUNDS = 10


def _by_register(vtpu: Vtpu) -> None:
    vtpu.set("CTRL", D["CTRL_RESET"])


def _by_function(vtpu: Vtpu) -> None:
    vtpu.pci.write(vtpu.pci.capability(0x10) + 8, 0x8000, 2)


def _by_bus(vtpu: Vtpu) -> None:
    control = vtpu.port.read(0x3E, 2)
    vtpu.port.write(0x3E, control | 0x40, 2)
    vtpu.port.write(0x3E, control, 2)


def _by_machine(vtpu: Vtpu) -> None:
    vtpu.qemu.qmp("system_reset")
    wait_for(lambda: vtpu.port.read(COMMAND, 2) & 6 == 0, "machine reset")


RESETS: dict[str, Callable[[Vtpu], None]] = {
    "register": _by_register,
    "function": _by_function,
    "bus": _by_bus,
    "machine": _by_machine,
}


def _load(vtpu: Vtpu) -> tuple[list[Queue], int]:
    """Queue 0 writes system memory for ever, the others complete what they can."""
    target = vtpu.ram + 0x100000
    space = AddressSpace(vtpu, 0, TABLES)
    va = space.map(1, target, READ | WRITE, hbm=False)
    code = ins("ADD", rd=R(1), a=R(1), b=1)
    code += ins("ST", addr=va, value=R(1), mode="U64") + ins("BLT", a=R(1), b=1 << 20, target=0)
    code += ins("HALT")
    vtpu.hbm_write(CODE, code)
    run = space.map(0, CODE, READ | EXEC)
    queues = [Queue(vtpu, n) for n in range(4)]
    for queue in queues:
        for _ in range(8):
            queue.push("NOP")
        queue.push("RUN", queue.run(run, len(code)))
    wait_for(lambda: vtpu.qemu.load(target, 8) > 0, "writing", vtpu)
    return queues, target


@pytest.mark.parametrize("name", RESETS)
def test_again_and_again_with_work_in_flight(vtpu: Vtpu, name: str) -> None:
    for _ in range(ROUNDS):
        queues, target = _load(vtpu)
        count = vtpu.reg("RESET_COUNT")
        RESETS[name](vtpu)
        if name == "register":
            vtpu.wait_reset()  # until then what is in progress may still write
        vtpu.qemu.write(target, bytes(4096))
        for queue in queues:
            vtpu.qemu.write(queue.ring, bytes(8192))
        for vector in range(D["NUM_MSIX"]):
            vtpu.clear_interrupt(vector)
        vtpu.setup()
        vtpu.wait_reset()
        assert vtpu.reg("RESET_COUNT") == count + 1
        assert all(queue.state == "DISABLED" for queue in queues)
        # A command of now has to pass where a late one of before would have been.
        vtpu.enable()
        Queue(vtpu, 9).do("NOP")
        assert vtpu.qemu.read(target, 4096) == bytes(4096)
        assert all(vtpu.qemu.read(queue.ring, 8192) == bytes(8192) for queue in queues)
        assert not any(vtpu.interrupted(v) for v in range(D["NUM_MSIX"]))


def test_a_reset_in_a_reset(vtpu: Vtpu) -> None:
    """While the first is stuck, the function and the bus are reset as well."""
    _load(vtpu)
    count = vtpu.reg("RESET_COUNT")
    vtpu.inject("reset-stuck", True)
    for name in ("register", "function", "bus"):
        RESETS[name](vtpu)
        vtpu.setup()
        assert vtpu.reg("STATUS") & D["STATUS_RESETTING"]
    vtpu.inject("reset-stuck", False)
    vtpu.wait_reset()
    assert vtpu.reg("RESET_COUNT") == count + 1
    vtpu.enable()
    Queue(vtpu, 9).do("NOP")


def test_the_machine_stops_under_load(vtpu: Vtpu) -> None:
    """QEMU is told to quit with a program running: the fixture sees its exit status."""
    _load(vtpu)
