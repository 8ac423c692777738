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

from qtest import Qemu, Vtpu, device_arguments, find_qemu  # noqa: E402


@pytest.fixture(scope="session")
def qemu_command() -> list[str]:
    return find_qemu()


@pytest.fixture
def open_vtpus(qemu_command: list[str], tmp_path: Path) -> Iterator[Callable[..., list[Vtpu]]]:
    """Starts QEMU with several devices; their properties as keyword arguments."""
    with ExitStack() as stack:

        def make(count: int, *options: str, **properties: str) -> list[Vtpu]:
            settings = {"hbm_size": "64M", "threads": "2"} | properties
            devices = [word for n in range(count) for word in device_arguments(n, **settings)]
            qemu = stack.enter_context(Qemu(qemu_command, tmp_path, *options, *devices))
            return [Vtpu(qemu, n) for n in range(count)]

        yield make


@pytest.fixture
def open_vtpu(open_vtpus: Callable[..., list[Vtpu]]) -> Callable[..., Vtpu]:
    """Starts QEMU with one device."""
    return lambda *options, **properties: open_vtpus(1, *options, **properties)[0]


@pytest.fixture
def vtpu(open_vtpu: Callable[..., Vtpu]) -> Vtpu:
    vtpu = open_vtpu()
    vtpu.enable()
    return vtpu
