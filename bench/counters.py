# SPDX-License-Identifier: MIT
"""The device's own counters, read past the guest through QEMU's monitor.

So that where the time goes can be told without disturbing what is measured:
time that the device is not busy is the guest's (server, driver, kernel).
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

from vtpu_guest.guest import Guest

sys.path.append(str(Path(__file__).resolve().parents[1] / "compiler"))

from vtpu_compiler import hw

_KEEP_AWAKE = "echo on | tee /sys/bus/pci/drivers/vtpu/*/power/control"


class Counters:
    """Reads 64-bit registers of the guest's vTPU, which stays awake from then on: asleep, it
    decodes no address."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        guest.run(["sh", "-c", _KEEP_AWAKE], timeout=30).check()
        self._base = self._find(guest.qmp("query-pci"))

    @classmethod
    def _find(cls, buses: list[dict[str, Any]]) -> int:
        for bus in buses:
            devices = bus["devices"]
            for device in devices:
                identity = (device["id"]["vendor"], device["id"]["device"])
                if identity == (hw.VENDOR_ID, hw.DEVICE_ID):
                    return next(
                        int(region["address"])
                        for region in device["regions"]
                        if region["bar"] == hw.BAR_REGS
                    )
                if "pci_bridge" in device and device["pci_bridge"].get("devices"):
                    try:
                        return cls._find([device["pci_bridge"]])
                    except LookupError:
                        continue
        raise LookupError("the guest has no vTPU")

    def read(self, offset: int) -> int:
        """The 64-bit register at an offset of BAR0."""
        command = f"xp /1gx {self._base + offset:#x}"
        answer = self._guest.qmp("human-monitor-command", **{"command-line": command})
        match = re.search(r": (0x[0-9a-f]+)", answer)
        if match is None:
            raise LookupError(f"the monitor answered {answer!r} to {command!r}")
        return int(match[1], 16)


class BusyShare:
    """with BusyShare(counters) as share: ...; share.value in 0..1: how much of the
    time the device was executing commands."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.value = 0.0

    def __enter__(self) -> BusyShare:
        self._busy = self._counters.read(hw.REGISTERS["STAT_BUSY_NS"])
        self._start = time.perf_counter_ns()
        return self

    def __exit__(self, *_: object) -> None:
        elapsed = time.perf_counter_ns() - self._start
        busy = self._counters.read(hw.REGISTERS["STAT_BUSY_NS"]) - self._busy
        self.value = busy / elapsed
