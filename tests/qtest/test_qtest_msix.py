# SPDX-License-Identifier: MIT
"""MSI-X: an interrupt is never lost while masked, and comes once when it is not."""

from __future__ import annotations

import pytest
from qtest import COMMAND, COMMAND_MEMORY, D, Queue, Vtpu, wait_for

CAP_MSIX = 0x11
ENABLE, FUNCTION_MASK = 0x8000, 0x4000
LAST = D["NUM_MSIX"] - 1


def _control(vtpu: Vtpu, bits: int) -> None:
    vtpu.pci.write(vtpu.pci.capability(CAP_MSIX) + 2, bits, 2)


def _raise(vtpu: Vtpu, vector: int) -> None:
    """Returns when the device has made it, whether it is seen or not."""
    before = len(vtpu.qemu.traced("vtpu_irq"))
    vtpu.set("TEST_IRQ", vector)
    wait_for(lambda: len(vtpu.qemu.traced("vtpu_irq")) > before, "raised")


@pytest.fixture
def traced(vtpu: Vtpu) -> Vtpu:
    vtpu.qemu.trace("vtpu_irq")
    return vtpu


@pytest.mark.parametrize("vector", [0, 1, 31, 32, LAST])
def test_one_masked_vector(traced: Vtpu, vector: int) -> None:
    vtpu = traced
    vtpu.mask(vector, True)
    for _ in range(3):
        _raise(vtpu, vector)
    assert not vtpu.interrupted(vector)
    assert [v for v in range(LAST + 1) if vtpu.pending(v)] == [vector]
    other = 5
    _raise(vtpu, other)
    vtpu.wait_interrupt(other)
    vtpu.mask(vector, False)
    vtpu.wait_interrupt(vector)
    # Once: neither the next unmasking nor the enabling of all brings it again.
    assert not vtpu.pending(vector)
    vtpu.mask(vector, True)
    vtpu.mask(vector, False)
    _control(vtpu, ENABLE | FUNCTION_MASK)
    _control(vtpu, ENABLE)
    assert not vtpu.interrupted(vector)


def test_the_whole_function_masked(traced: Vtpu) -> None:
    vtpu = traced
    vtpu.mask(7, True)
    _control(vtpu, ENABLE | FUNCTION_MASK)
    for vector in (0, 3, 7):
        _raise(vtpu, vector)
    assert not any(vtpu.interrupted(v) for v in (0, 3, 7))
    assert [v for v in range(LAST + 1) if vtpu.pending(v)] == [0, 3, 7]
    _control(vtpu, ENABLE)
    vtpu.wait_interrupt(0)
    vtpu.wait_interrupt(3)
    # The seventh is masked by itself.
    assert not vtpu.interrupted(7) and vtpu.pending(7)
    vtpu.mask(7, False)
    vtpu.wait_interrupt(7)
    assert not any(vtpu.pending(v) for v in range(LAST + 1))


def test_an_interrupt_from_before_enabling_is_kept(traced: Vtpu) -> None:
    vtpu = traced
    _control(vtpu, 0)
    _raise(vtpu, 4)
    assert not vtpu.interrupted(4) and vtpu.pending(4)
    _control(vtpu, ENABLE)
    vtpu.wait_interrupt(4)


def test_completions_while_masked_are_one_interrupt(vtpu: Vtpu) -> None:
    """The fence says how many they were."""
    queue = Queue(vtpu, 0)
    vtpu.mask(queue.vector, True)
    for _ in range(5):
        fence = queue.push("NOP")
    wait_for(lambda: vtpu.pending(queue.vector) and queue.fence == fence, "pending", vtpu)
    assert not vtpu.interrupted(queue.vector)
    vtpu.mask(queue.vector, False)
    vtpu.wait_interrupt(queue.vector)
    assert not vtpu.pending(queue.vector)


def test_the_message_of_the_moment_of_unmasking_counts(traced: Vtpu) -> None:
    """As when the kernel moves an interrupt to another processor."""
    vtpu = traced
    vtpu.mask(2, True)
    _raise(vtpu, 2)
    at = vtpu.regs + D["MSIX_TABLE"] + 16 * 2
    vtpu.qemu.store(at, vtpu.msix_at + 4 * 50, 4)
    vtpu.qemu.store(at + 8, 0x1000 + 50, 4)
    vtpu.mask(2, False)
    vtpu.wait_interrupt(50)
    assert not vtpu.interrupted(2)


def test_the_pending_bits_cannot_be_written(vtpu: Vtpu) -> None:
    vtpu.write(D["MSIX_PBA"], 0xFFFFFFFF)
    assert vtpu.read(D["MSIX_PBA"]) == 0 and not vtpu.interrupted(0)
    assert "attempt to write to MSI-X PBA" in vtpu.qemu.log.read_text()


@pytest.mark.parametrize("vectors", [1, 2, 5])
def test_with_fewer_vectors_than_queues(vtpu: Vtpu, vectors: int) -> None:
    """All queues share what the operating system gave; the others stay masked."""
    for vector in range(vectors, LAST + 1):
        vtpu.mask(vector, True)
    queues = [Queue(vtpu, n, vector=n % vectors) for n in range(D["NUM_QUEUES"])]
    for queue in queues:
        fence = queue.push("NOP")
        vtpu.wait_interrupt(queue.vector)
        assert queue.fence == fence
    faulty = queues[3]
    assert faulty.expect_fault("NOP", b"\1") == "BAD_COMMAND"
    assert not any(vtpu.pending(v) for v in range(LAST + 1))


def test_bus_mastering_off_loses_the_message_and_nothing_else(traced: Vtpu) -> None:
    vtpu = traced
    vtpu.pci.write(COMMAND, COMMAND_MEMORY, 2)
    _raise(vtpu, 6)
    assert not vtpu.interrupted(6) and not vtpu.pending(6)
    vtpu.setup()
    _raise(vtpu, 6)
    vtpu.wait_interrupt(6)


def test_a_function_level_reset_forgets_what_was_pending(traced: Vtpu) -> None:
    vtpu = traced
    vtpu.mask(3, True)
    _raise(vtpu, 3)
    vtpu.pci.write(vtpu.pci.capability(0x10) + 8, 0x8000, 2)
    vtpu.setup()
    assert not vtpu.pending(3) and not vtpu.interrupted(3)
