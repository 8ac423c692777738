# SPDX-License-Identifier: MIT
"""Every allocation and every copy fails once while the device comes, goes and sleeps. Runs in the
guest, as root, on a kernel with fault injection; see failure_cases.py."""

from __future__ import annotations

import ctypes
import glob
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cases
import fault_injection as faults
import vtpu_raw as raw
from cases import DRIVER, MODULE, Setup, collector, main, module_is_idle, pci_device, until
from fault_injection import each_failure
from lifecycle_cases import bind, function_of, leavings, works
from power_cases import tell
from watch import PROBE_FAILED, expects

FINIT_MODULE = 313  # of x86-64
CASES: dict[str, Callable[[], None]] = {}
collect = collector(CASES)
# Not with the others: while the machine sleeps nobody may talk to its agent.
ALONE = {"suspend"}
# Whose failure makes drm_minor_alloc() put what it has not got (Linux 6.12).
SPARED = "drm_sysfs_minor_alloc"
# Which devtmpfs calls for the name of a node that goes: without it the node stays (Linux 6.12).
NODE_NAME = "device_get_devnode"
# What others say when they have no memory for a device.
NO_MEMORY = (
    r"^\[?(drm|kobject|workqueue|debugfs|kmemleak|ioremap)\b.*"
    r"(-12\b|[Cc]annot|can not|[Ff]ailed|out of)",
    r"drm_sched_init: Failed to setup GPU scheduler--out of memory",
    r"^Failed to add kobject for irq \d+",
    r"vtpu .*no MSI-X vectors",
    r"WARNING: .*remove_proc_entry",  # of an interrupt whose folder could not be made
)


def case(*messages: str) -> Callable:
    def decorate(function: Callable[[], None]) -> Callable[[], None]:
        return collect(expects(*faults.SAID, *messages)(function))

    return decorate


def left_nothing(name: str) -> None:
    found = leavings(name)
    assert not found, found


@contextmanager
def rebound_in_the_end(name: str) -> Iterator[None]:
    try:
        yield
    finally:
        if Path(DRIVER, name).exists():
            tell(f"{DRIVER}/unbind", name)
        bind(name)
    until(lambda: bool(glob.glob(raw.DEVICES)), 20, "the node is back")
    works()


@case(PROBE_FAILED, *NO_MEMORY)
def probe() -> None:
    """It fails at every step, undoes all, and succeeds afterwards."""
    name = pci_device()

    def unbound() -> None:
        if Path(DRIVER, name).exists():
            tell(f"{DRIVER}/unbind", name)
        left_nothing(name)
        assert (function_of(name) / "enable").read_text().strip() == "0"

    with rebound_in_the_end(name), faults.only_below(but=SPARED):
        assert each_failure(lambda: bind(name), before=unbound, steps=faults.fewer) > 5


@case()
def removal() -> None:
    """It needs no memory, and leaves nothing."""
    name = pci_device()

    def bound() -> None:
        if not Path(DRIVER, name).exists():
            left_nothing(name)
            bind(name)
        faults.not_the_drivers_own()

    with rebound_in_the_end(name), faults.only_below(but=NODE_NAME):
        unbind = each_failure(
            lambda: tell(f"{DRIVER}/unbind", name), before=bound, steps=lambda number: 2 * number
        )
        assert not unbind, "unbinding has failed"


@case(PROBE_FAILED, *NO_MEMORY)
def module_load() -> None:
    """The module is loaded or not; if it is, and its device is not bound, it can be."""
    name = pci_device()

    def unloaded() -> None:
        if Path(DRIVER).exists():
            until(module_is_idle, 10, "nothing holds the module")
            subprocess.run(["rmmod", "vtpu"], check=True)
        left_nothing(name)

    libc = ctypes.CDLL(None, use_errno=True)
    module = os.open(MODULE, os.O_RDONLY)

    def load() -> None:
        """Not insmod: only the calling thread fails."""
        if libc.syscall(FINIT_MODULE, module, b"", 0):
            raise OSError(ctypes.get_errno(), "finit_module")

    try:
        with faults.only_below("do_one_initcall", SPARED):
            assert each_failure(load, before=unloaded, steps=faults.fewer)
    finally:
        if not Path(DRIVER).exists():
            load()
        os.close(module)
    until(lambda: bool(glob.glob(raw.DEVICES)), 20, "the node is back")
    works()


@case(PROBE_FAILED, *NO_MEMORY)
def virtual_functions() -> None:
    """They are there, and bound or not; without them all is as before. What fails is below
    probe: the PCI core warns of what itself has no memory for."""
    count = function_of(pci_device()) / "sriov_numvfs"

    def none() -> None:
        tell(str(count), "0")
        assert len(glob.glob(raw.DEVICES)) == 1

    with faults.only_below("vtpu_probe", SPARED):
        assert not each_failure(lambda: tell(str(count), "1"), before=none, steps=faults.fewer)
    assert len(glob.glob(raw.DEVICES)) == 2
    # Nor is there one that would not wake in its turn.
    with faults.only_below("device_link_add"):
        assert each_failure(lambda: tell(str(count), "1"), before=none, steps=faults.fewer)
    none()
    works()


@case(r"vtpu .*no memory for", r"PM: .*-12", r"PM: Some devices failed")
def suspend() -> None:
    """The machine's sleep, down to the devices: what fails there keeps it awake."""
    Path("/sys/power/pm_test").write_text("devices")
    Path("/sys/module/suspend/parameters/pm_test_delay").write_text("0")
    Path("/sys/power/pm_async").write_text("0")
    with Setup() as dev:
        dev.hbm_map[:8] = b"survives"

        def awake() -> None:
            dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, 8)])
            assert dev.host_map[:8] == b"survives"

        with faults.only_below():
            assert each_failure(lambda: tell("/sys/power/state", "mem"), before=awake)
        awake()


if __name__ == "__main__":
    if not faults.is_possible():
        sys.exit("this kernel has no fault injection")
    faults.prepare()
    cases.CASE_SECONDS = 3600  # the kernels that have it are slow
    sys.exit(main(sys.argv[1:] or [name for name in CASES if name not in ALONE], CASES))
