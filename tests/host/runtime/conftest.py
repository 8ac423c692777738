# SPDX-License-Identifier: MIT
"""Opens the device under test.

VTPU_BACKEND names the back end: "core" (default), or "drm" in a guest. On the host the
libraries are built into VTPU_RUNTIME_BUILD; a guest has them installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vtpu.runtime import Device, Queue

HERE = Path(__file__).resolve().parent
BACKEND = os.environ.get("VTPU_BACKEND", "core")
sys.path.insert(0, str(HERE))


def _build() -> None:
    library = HERE.parents[2] / "libtpurt"
    build = Path(os.environ.get("VTPU_RUNTIME_BUILD", library / "build"))
    done = subprocess.run(
        ["make", "-s", "-C", str(library), "host", f"OUT={build}", f"PYTHON={sys.executable}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.exit(f"the runtime does not build:\n{done.stdout}{done.stderr}", 2)
    sys.path.insert(0, str(build))


if BACKEND == "core":
    _build()


@pytest.fixture(scope="session")
def open_device() -> Callable[[], Device]:
    """Opens the back end under test anew."""
    from vtpu.runtime import Device

    if BACKEND == "core":
        return lambda: Device.open("core", hbm_bytes=256 << 20, threads=2)
    return lambda: Device.open(os.environ.get("VTPU_DEVICE", "drm:/dev/accel/accel0"))


@pytest.fixture
def device(open_device: Callable[[], Device]) -> Iterator[Device]:
    with open_device() as device:
        yield device


@pytest.fixture
def queue(device: Device) -> Iterator[Queue]:
    with device.queue(timeout_ms=5000) as queue:
        yield queue
