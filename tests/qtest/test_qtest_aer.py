# SPDX-License-Identifier: MIT
"""Advanced error reporting: what the device reports, and that it reaches the root port."""

from __future__ import annotations

import struct

import pytest
from pcie import CAP_EXP, EXP_DEVCTL, EXP_DEVSTA, Aer, Config
from qtest import COMMAND, READ, WRITE, AddressSpace, Queue, Vtpu

TABLES, DATA = 0x100000, 0x300000
STATUS, PARITY, MASTER_ABORT, DETECTED_PARITY = 0x06, 1 << 8, 1 << 13, 1 << 15
ROOT_COR, ROOT_UNCOR, ROOT_FIRST_FATAL, ROOT_NONFATAL, ROOT_FATAL = 1, 4, 16, 32, 64
DEVICE_ID = 1 << 8  # bus 1, device 0


@pytest.fixture
def aer(vtpu: Vtpu) -> Aer:
    return Aer(vtpu)


def _inject(vtpu: Vtpu, words: str) -> None:
    vtpu.qemu.qmp("human-monitor-command", **{"command-line": f"pcie_aer_inject_error {words}"})


def _copy(vtpu: Vtpu) -> bytes:
    space = AddressSpace(vtpu, 0, TABLES)
    source, target = space.map(1, DATA, READ), space.map(2, DATA + 4096, WRITE)
    return struct.pack("<QQQ", target, source, 64)


def test_the_monitors_errors_reach_the_root_port(vtpu: Vtpu, aer: Aer) -> None:
    _inject(vtpu, "tpu RCVR")
    assert aer.signalled() and aer.root_status & 0x7F == ROOT_COR
    assert aer.sources[0] == DEVICE_ID
    assert aer.reg(aer.COR_STATUS) == 1
    aer.acknowledge()
    assert aer.root_status & 0x7F == 0
    _inject(vtpu, "tpu COMP_TIME")
    assert aer.signalled() and aer.root_status & 0x7F == ROOT_UNCOR | ROOT_NONFATAL
    aer.acknowledge()
    _inject(vtpu, "tpu DLP")
    fatal = ROOT_UNCOR | ROOT_FIRST_FATAL | ROOT_FATAL
    assert aer.signalled() and aer.root_status & 0x7F == fatal
    assert aer.sources[1] == DEVICE_ID
    device = aer.device
    assert device.read(device.find(CAP_EXP) + EXP_DEVSTA, 2) & 7 == 7
    Queue(vtpu, 0).do("NOP")


def test_nothing_is_reported_that_software_did_not_enable(vtpu: Vtpu, aer: Aer) -> None:
    control = aer.device.find(CAP_EXP) + EXP_DEVCTL
    aer.device.write(control, 0, 2)
    _inject(vtpu, "tpu RCVR")
    _inject(vtpu, "tpu COMP_TIME")
    assert not aer.signalled() and aer.root_status & 0x7F == 0
    assert aer.reg(aer.COR_STATUS) == 1 and aer.reg(aer.UNC_STATUS) == 1 << 14


def test_a_corrected_memory_error(vtpu: Vtpu, aer: Aer) -> None:
    aer.unmask()
    vtpu.inject("ecc-single", 1)
    Queue(vtpu, 0).do("COPY", _copy(vtpu))
    assert aer.reg(aer.COR_STATUS) == aer.COR_INTERNAL
    assert aer.signalled() and aer.root_status & 0x7F == ROOT_COR
    assert aer.sources[0] == DEVICE_ID


@pytest.mark.parametrize("fatal", [True, False], ids=["fatal", "non-fatal"])
def test_an_uncorrectable_memory_error(vtpu: Vtpu, aer: Aer, fatal: bool) -> None:
    """An internal error of the severity that software wants; the queue's fault is the same."""
    aer.unmask()
    if not fatal:
        severity = aer.reg(aer.UNC_SEVERITY)
        assert severity & aer.INTERNAL
        aer.device.write(aer.at + aer.UNC_SEVERITY, severity & ~aer.INTERNAL)
    vtpu.inject("ecc-double", 1)
    queue = Queue(vtpu, 0)
    assert queue.expect_fault("COPY", _copy(vtpu)) == "ECC"
    assert aer.reg(aer.UNC_STATUS) == aer.INTERNAL
    assert aer.signalled()
    expected = ROOT_FATAL | ROOT_FIRST_FATAL if fatal else ROOT_NONFATAL
    assert aer.root_status & 0x7F == ROOT_UNCOR | expected
    aer.clear(aer.UNC_STATUS, aer.INTERNAL)
    assert aer.reg(aer.UNC_STATUS) == 0


def test_poisoned_data_is_an_advisory_error(vtpu: Vtpu, aer: Aer) -> None:
    """The queue contains it, so that it is signalled as correctable."""
    aer.unmask()
    vtpu.pci.write(COMMAND, vtpu.pci.read(COMMAND, 2) | 0x40, 2)  # parity error response
    vtpu.inject("dma-error", 1)
    assert Queue(vtpu, 0).expect_fault("NOP") == "BUS"
    assert aer.reg(aer.UNC_STATUS) == aer.POISONED and aer.reg(aer.COR_STATUS) == aer.COR_ADVISORY
    assert aer.signalled() and aer.root_status & 0x7F == ROOT_COR
    assert vtpu.pci.read(STATUS, 2) & (PARITY | DETECTED_PARITY) == PARITY | DETECTED_PARITY


def test_internal_errors_are_masked_at_first(vtpu: Vtpu, aer: Aer) -> None:
    """As the specification has it: they are there to be read, and nobody is interrupted."""
    vtpu.inject("ecc-single", 1)
    queue, copy = Queue(vtpu, 0), _copy(vtpu)
    queue.do("COPY", copy)
    vtpu.inject("ecc-double", 1)
    assert queue.expect_fault("COPY", copy) == "ECC"
    assert aer.reg(aer.COR_STATUS) == aer.COR_INTERNAL
    assert aer.reg(aer.UNC_STATUS) == aer.INTERNAL
    assert not aer.signalled() and aer.root_status & 0x7F == 0


def test_a_read_that_nobody_answers_is_a_master_abort(vtpu: Vtpu) -> None:
    config = Config(vtpu.qemu, vtpu.bus, 0)
    assert not config.read(STATUS, 2) & MASTER_ABORT
    assert Queue(vtpu, 0, ring=0xE000_0000).expect_fault("NOP") == "BUS"
    assert config.read(STATUS, 2) & MASTER_ABORT
    config.write(STATUS, MASTER_ABORT, 2)
    assert not config.read(STATUS, 2) & MASTER_ABORT
    # A write gets no answer, and with bus mastering off nothing is asked.
    assert Queue(vtpu, 1, fence=0xE000_0000).expect_fault("NOP") == "BUS"
    assert not config.read(STATUS, 2) & MASTER_ABORT


def test_a_function_level_reset_keeps_the_record_of_errors(vtpu: Vtpu, aer: Aer) -> None:
    """Sticky registers tell after the reset what led to it; the enables are gone."""
    _inject(vtpu, "tpu COMP_TIME")
    control = aer.device.find(CAP_EXP) + EXP_DEVCTL
    aer.device.write(control, 0x8000 | 0xF, 2)
    assert aer.reg(aer.UNC_STATUS) == 1 << 14
    assert aer.device.read(control, 2) & 0xF == 0
