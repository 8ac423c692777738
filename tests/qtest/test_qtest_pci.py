# SPDX-License-Identifier: MIT
"""The PCIe function: identification, capabilities, resets, interrupts, bus mastering."""

from collections.abc import Callable
from pathlib import Path

import pytest
from qtest import COMMAND, COMMAND_MEMORY, DOORBELLS, REGS, D, Queue, Vtpu, wait_for

CAP_PM, CAP_PCIE, CAP_MSIX = 0x01, 0x10, 0x11


def test_identification(vtpu: Vtpu) -> None:
    assert vtpu.pci.read(0, 2) == D["VENDOR_ID"]
    assert vtpu.pci.read(2, 2) == D["DEVICE_ID"]
    assert vtpu.pci.read(8) == D["CLASS"] << 8 | D["REVISION"]
    assert vtpu.reg("ID") == D["MAGIC"]
    assert vtpu.reg("HBM_SIZE", 8) == 64 << 20


def test_bars(vtpu: Vtpu) -> None:
    bar = 0x10 + 4 * D["BAR_HBM"]
    assert vtpu.pci.read(bar) & 0xF == 0xC  # 64-bit, prefetchable
    assert vtpu.pci.read(0x10 + 4 * D["BAR_REGS"]) & 0xF == 0
    assert vtpu.pci.read(0x10 + 4 * D["BAR_DOORBELL"]) & 0xF == 0
    vtpu.pci.write(bar, 0xFFFFFFFF)
    assert vtpu.pci.read(bar) == 0xFC00000C  # 64 MiB


def test_capabilities(vtpu: Vtpu) -> None:
    msix = vtpu.pci.capability(CAP_MSIX)
    assert vtpu.pci.read(msix + 2, 2) & 0x7FF == D["NUM_MSIX"] - 1
    assert vtpu.pci.read(msix + 4) == D["MSIX_TABLE"] | D["BAR_REGS"]
    assert vtpu.pci.read(msix + 8) == D["MSIX_PBA"] | D["BAR_REGS"]
    pcie = vtpu.pci.capability(CAP_PCIE)
    assert vtpu.pci.read(pcie + 2, 2) >> 4 & 0xF == 0  # endpoint
    assert vtpu.pci.read(pcie + 4) >> 28 & 1  # FLR
    vtpu.pci.capability(CAP_PM)


def test_scratch_and_register_sizes(vtpu: Vtpu) -> None:
    vtpu.set("TEST_SCRATCH", 0xCAFEBABE)
    assert vtpu.reg("TEST_SCRATCH") == 0xCAFEBABE
    assert vtpu.qemu.read(REGS, 1) == b"\0"  # no byte accesses
    assert vtpu.reg("TIME", 8) < vtpu.reg("TIME", 8)


def test_self_test_interrupt(vtpu: Vtpu) -> None:
    for vector in (0, 5, D["NUM_MSIX"] - 1):
        vtpu.set("TEST_IRQ", vector)
        vtpu.wait_interrupt(vector)


def test_a_masked_interrupt_is_kept(vtpu: Vtpu) -> None:
    vtpu.mask(3, True)
    vtpu.set("TEST_IRQ", 3)
    wait_for(lambda: vtpu.pending(3), "pending bit")
    assert not vtpu.interrupted(3)
    vtpu.mask(3, False)
    vtpu.wait_interrupt(3)
    assert not vtpu.pending(3)


def _dirty_state(vtpu: Vtpu) -> int:
    vtpu.set("TEST_SCRATCH", 77)
    queue = Queue(vtpu, 0)
    queue.do("NOP")
    return vtpu.reg("RESET_COUNT")


def _expect_reset(vtpu: Vtpu, count: int) -> None:
    vtpu.wait_reset()
    assert vtpu.reg("RESET_COUNT") == count + 1
    assert vtpu.reg("TEST_SCRATCH") == 0
    assert vtpu.reg("STATUS") == 0
    assert vtpu.read(D["REG_Q_QSTATUS"]) == D["QUEUE_STATE_DISABLED"]
    vtpu.enable()
    Queue(vtpu, 0).do("NOP")


def test_reset_by_register(vtpu: Vtpu) -> None:
    count = _dirty_state(vtpu)
    vtpu.set("CTRL", D["CTRL_RESET"])
    _expect_reset(vtpu, count)


def test_function_level_reset(vtpu: Vtpu) -> None:
    count = _dirty_state(vtpu)
    vtpu.pci.write(vtpu.pci.capability(CAP_PCIE) + 8, 0x8000, 2)
    assert vtpu.pci.read(COMMAND, 2) & 6 == 0  # the function forgot its BARs, too
    vtpu.setup()
    _expect_reset(vtpu, count)


def test_secondary_bus_reset(vtpu: Vtpu) -> None:
    count = _dirty_state(vtpu)
    control = vtpu.port.read(0x3E, 2)
    vtpu.port.write(0x3E, control | 0x40, 2)
    vtpu.port.write(0x3E, control, 2)
    vtpu.setup()
    _expect_reset(vtpu, count)


def test_machine_reset(vtpu: Vtpu) -> None:
    count = _dirty_state(vtpu)
    vtpu.qemu.qmp("system_reset")
    wait_for(lambda: vtpu.port.read(COMMAND, 2) & 6 == 0, "machine reset")
    vtpu.setup()
    _expect_reset(vtpu, count)


def test_bus_master_off_is_a_bus_fault(vtpu: Vtpu) -> None:
    queue = Queue(vtpu, 0)
    queue.do("NOP")
    vtpu.pci.write(COMMAND, COMMAND_MEMORY, 2)
    queue.push("NOP")
    wait_for(lambda: queue.state == "FAULTED", "fault")
    assert queue.cause == "BUS"
    assert queue.reg("FAULT_ADDR", 8) == queue.ring + 64
    assert queue.fence == 1
    vtpu.setup()
    queue.reset()
    Queue(vtpu, 0).do("NOP")


def test_power_state_d3_and_back(vtpu: Vtpu) -> None:
    vtpu.set("TEST_SCRATCH", 99)
    control = vtpu.pci.capability(CAP_PM) + 4
    vtpu.pci.write(control, 3, 2)
    assert vtpu.pci.read(control, 2) & 3 == 3
    vtpu.pci.write(control, 0, 2)
    assert vtpu.reg("TEST_SCRATCH") == 99  # No_Soft_Reset


def test_doorbell_page(vtpu: Vtpu) -> None:
    vtpu.qemu.store(DOORBELLS + 4, 1, 4)  # beside the doorbell
    vtpu.qemu.store(DOORBELLS + 31 * 4096, 1, 4)  # of a disabled queue
    text = vtpu.qemu.log.read_text()
    assert "beside its doorbell" in text and "one that does not run" in text
    queue = Queue(vtpu, 31)
    queue.do("NOP")


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"hbm_size": "48M"}, "power of two"),
        ({"hbm_size": "1M"}, "power of two"),
        ({"isa_path": "mmx"}, "isa-path must be amx, avx512, avx2 or scalar"),
        ({"threads": "100000"}, "threads must be at most 256"),
        ({"vf_hbm_size": "3M"}, "vf-hbm-size must be a power of two from 16 MiB to 64 GiB"),
        ({"chip": "1"}, "chip is a number in a fabric"),
        ({"timing": "v6"}, "vtpu: timing: no chip 'v6' (there are v5e, edge)"),
        ({"timing_file": "/nowhere"}, "vtpu: timing-file /nowhere: No such file"),
        ({"timing_trace": "x"}, "timing-trace needs a timing model"),
    ],
)
def test_bad_properties_are_refused(
    qemu_command: list[str], tmp_path: Path, properties: dict[str, str], message: str
) -> None:
    import subprocess

    words = ",".join(f"{key.replace('_', '-')}={value}" for key, value in properties.items())
    done = subprocess.run(
        [
            *qemu_command,
            "-machine",
            "q35,accel=qtest",
            "-display",
            "none",
            "-nodefaults",
            "-device",
            f"vtpu,{words}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and message in done.stderr


def test_memory_backend(open_vtpu: Callable[..., Vtpu], tmp_path: Path) -> None:
    backing = tmp_path / "hbm"
    vtpu = open_vtpu(
        "-object",
        f"memory-backend-file,id=hbm,size=32M,share=on,mem-path={backing}",
        hbm_memdev="hbm",
    )
    assert vtpu.reg("HBM_SIZE", 8) == 32 << 20
    vtpu.hbm_write(0x1000, b"through the BAR")
    assert backing.read_bytes()[0x1000:0x100F] == b"through the BAR"
