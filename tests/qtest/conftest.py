# SPDX-License-Identifier: MIT
"""Opens QEMU with the device under qtest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
sys.path[:0] = [
    str(REPO / "guest-image"),
    str(REPO / "compiler"),
    str(REPO / "tests" / "host" / "device"),
    str(Path(__file__).parent),
]

from qtest import ROOT_PORT, Qemu, Vtpu, find_qemu  # noqa: E402


@pytest.fixture(scope="session")
def qemu_command() -> list[str]:
    return find_qemu()


@pytest.fixture
def open_vtpu(qemu_command: list[str], tmp_path: Path) -> Iterator[Callable[..., Vtpu]]:
    """Starts QEMU; options of the device as keyword arguments."""
    with ExitStack() as stack:

        def make(*options: str, **properties: str) -> Vtpu:
            settings = {"hbm_size": "64M", "threads": "2"} | properties
            words = ",".join(f"{key.replace('_', '-')}={value}" for key, value in settings.items())
            device = ("-device", f"vtpu,id=tpu,bus=rp,{words}")
            qemu = stack.enter_context(Qemu(qemu_command, tmp_path, *options, *ROOT_PORT, *device))
            return Vtpu(qemu)

        yield make


@pytest.fixture
def vtpu(open_vtpu: Callable[..., Vtpu]) -> Vtpu:
    vtpu = open_vtpu()
    vtpu.enable()
    return vtpu
