# SPDX-License-Identifier: MIT
"""BAR0 as a driver sees it."""

from collections.abc import Callable

import pytest
from machine import D, Machine, Queue
from vtpu_compiler import hw


def test_identification(machine: Machine) -> None:
    assert machine.reg("ID") == hw.MAGIC
    assert machine.reg("VERSION") == hw.HW_VERSION
    assert machine.reg("ISA_VERSION") == hw.ISA_VERSION
    assert machine.reg("HBM_SIZE", 8) == len(machine.hbm)
    assert machine.reg("VMEM_SIZE") == hw.VMEM_BYTES
    assert machine.reg("NUM_QUEUES") == hw.NUM_QUEUES
    assert machine.reg("NUM_CONTEXTS") == hw.NUM_CONTEXTS
    assert machine.reg("NUM_MSIX") == hw.NUM_MSIX
    assert machine.reg("CAPS") == D["CAPS_ENGINE_RESET"] | D["CAPS_SENSORS"]
    assert not machine.errors


def test_scratch_holds_any_value(machine: Machine) -> None:
    for value in (0xFFFFFFFF, 0, 0xA5A55A5A):
        machine.write(D["REG_TEST_SCRATCH"], value)
        assert machine.reg("TEST_SCRATCH") == value


def test_eight_byte_registers_in_halves(machine: Machine) -> None:
    ctx = D["REG_CTX_ROOT"] + 8 * 5
    machine.write(ctx, 0x1234_5001)
    machine.write(ctx + 4, 0xAB)
    assert machine.read(ctx, 8) == 0xAB_1234_5001
    assert machine.read(ctx) == 0x1234_5001
    assert machine.read(ctx + 4) == 0xAB


def test_time_in_halves_does_not_tear(machine: Machine) -> None:
    for _ in range(1000):
        before = machine.reg("TIME", 8)
        low = machine.read(D["REG_TIME"])
        high = machine.read(D["REG_TIME"] + 4)
        assert before <= (high << 32 | low) <= machine.reg("TIME", 8)


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0x00C + 0x10, 8), (0x074, 4), (0x002, 4), (0x054 + 0x2, 4), (0x040, 8), (0x3FFC, 4), (0, 1)],
)
def test_no_register_reads_zero_and_is_logged(machine: Machine, offset: int, size: int) -> None:
    assert machine.read(offset, size) == 0
    machine.write(offset, 0xFFFF_FFFF, size)
    assert len(machine.errors) == 2


def test_read_only_registers_ignore_writes(machine: Machine) -> None:
    for name in ("ID", "STATUS", "RESET_COUNT", "NUM_QUEUES"):
        before = machine.reg(name)
        machine.write(D[f"REG_{name}"], ~before & 0xFFFFFFFF)
        assert machine.reg(name) == before
    assert len(machine.errors) == 4


def test_test_irq(machine: Machine) -> None:
    for vector in (0, 7, hw.NUM_MSIX - 1):
        machine.write(D["REG_TEST_IRQ"], vector)
        machine.wait_irqs(vector, 1)
    machine.write(D["REG_TEST_IRQ"], hw.NUM_MSIX)
    assert machine.errors


def test_queue_configuration_only_while_disabled(machine: Machine) -> None:
    queue = Queue(machine, 3)
    ring = queue.reg("RING_BASE", 8)
    for name in ("RING_BASE", "FENCE_ADDR", "RING_LOG2", "CONTEXT", "VECTOR"):
        before = queue.reg(name)
        queue.set(name, before + 1)
        assert queue.reg(name) == before
    assert queue.reg("RING_BASE", 8) == ring
    queue.set("PRIORITY", 2)
    assert queue.reg("PRIORITY") == 2
    queue.set("PRIORITY", 3)
    assert queue.reg("PRIORITY") == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RING_LOG2", hw.RING_LOG2_MIN - 1),
        ("RING_LOG2", hw.RING_LOG2_MAX + 1),
        ("RING_LOG2", 0xFFFFFFFF),
        ("RING_BASE", 0x1_0000_0008),
        ("FENCE_ADDR", 0x1_0000_0004),
        ("CONTEXT", hw.NUM_CONTEXTS),
        ("VECTOR", hw.NUM_MSIX),
    ],
)
def test_enable_checks_the_configuration(machine: Machine, name: str, value: int) -> None:
    queue = Queue(machine, 1, enable=False)
    queue.set(name, value, 8 if name.endswith(("BASE", "ADDR")) else 4)
    queue.set("CTRL", D["Q_CTRL_ENABLE"])
    machine.wait_irqs(0, 1)
    assert queue.state == "FAULTED"
    assert queue.fault()["cause"] == "BAD_RING"
    assert machine.events == [("FAULT", 1, hw.FAULT["BAD_RING"], 0)]


def test_device_reset_forgets_everything(machine: Machine, queue: Queue) -> None:
    queue.do("NOP")
    machine.write(D["REG_TEST_SCRATCH"], 5)
    count = machine.reg("RESET_COUNT")
    machine.write(D["REG_CTRL"], D["CTRL_RESET"])
    machine.wait_for(lambda: not machine.reg("STATUS") & D["STATUS_RESETTING"], "reset")
    assert machine.reg("RESET_COUNT") == count + 1
    assert machine.reg("STATUS") == 0
    assert machine.reg("TEST_SCRATCH") == 0
    assert queue.state == "DISABLED"
    assert queue.reg("RING_BASE", 8) == 0
    assert machine.read(D["REG_CTX_ROOT"], 8) == 0
    assert machine.reg("STAT_PROGRAMS", 8) == 0


def test_queues_wait_for_the_device_to_be_enabled(open_machine: Callable[..., Machine]) -> None:
    machine = open_machine()
    machine.identity()
    queue = Queue(machine)
    fence = queue.push("NOP")
    queue.ring_doorbell()
    # A self-test interrupt passes through the same thread: the queue was looked at.
    machine.write(D["REG_TEST_IRQ"], 9)
    machine.wait_irqs(9, 1)
    assert queue.fence == 0 and queue.state == "READY"
    machine.enable()
    queue.wait(fence)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hbm_bytes": 8 << 20}, "power of two"),
        ({"hbm_bytes": 48 << 20}, "power of two"),
        ({"threads": 1000}, "threads"),
        ({"isa": "mmx"}, "isa-path must be"),
    ],
)
def test_bad_configurations_are_refused(
    open_machine: Callable[..., Machine], config: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_machine(**config)
