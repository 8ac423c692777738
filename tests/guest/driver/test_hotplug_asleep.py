# SPDX-License-Identifier: MIT
"""The device is taken out while the machine hibernates: the one that goes on has an empty slot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from cases import FOLDER
from conftest import about_to_unplug, wait_for
from sleeping import hibernate, sleeper
from test_hotplug import UNPLUG
from vtpu_guest.machine import Machine
from watch import LOST_TO_SLEEP

# An image is made, written and read under emulation.
pytestmark = [pytest.mark.guest, pytest.mark.stress]
# An empty slot has another name in the tables of QEMU's firmware.
OTHER_TABLES = r"^ACPI BIOS Error .*DSDT|^ACPI: DSDT|^ACPI Error: Please"


@dataclass(frozen=True)
class EmptySlot(Machine):
    def _vtpu(self) -> list[str]:
        *slot, _, _ = super()._vtpu()
        return slot


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with sleeper(tmp_path_factory.mktemp("hotplug")) as running:
        yield running


@pytest.mark.expects(LOST_TO_SLEEP, OTHER_TABLES)
def test_it_is_gone_when_the_machine_wakes(guest: Any) -> None:
    """A program with a job and a mapping goes on; and then the driver can go."""
    log = f"{FOLDER}/unplug.log"
    guest.put(UNPLUG.encode(), f"{FOLDER}/unplug.py")
    guest.run(f"cd {FOLDER}; python3 unplug.py >{log} 2>&1 </dev/null &").check()
    wait_for(guest, f"grep -q ready {log}", log)

    def take_out() -> None:
        guest.machine = EmptySlot(**vars(guest.machine))

    about_to_unplug(guest)
    hibernate(guest, "echo disk >/sys/power/state", take_out)
    wait_for(guest, f"grep -q survived {log}", log)
    wait_for(guest, "test ! -e /dev/accel/accel0", log)
    wait_for(guest, f"rmmod vtpu 2>{FOLDER}/rmmod.log", f"{FOLDER}/rmmod.log")
