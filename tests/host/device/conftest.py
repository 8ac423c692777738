# SPDX-License-Identifier: MIT
"""Builds libvtpucore.so and opens machines."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[3]
sys.path[:0] = [str(REPO / "compiler"), str(Path(__file__).parent)]

from fabric import Fabric, OpenFabric  # noqa: E402
from machine import Chip, Machine, OpenFunctions, Queue, load_library  # noqa: E402


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    core = REPO / "qemu-device" / "core"
    build = os.environ.get("VTPU_CORE_BUILD", str(core / "build"))
    done = subprocess.run(
        ["make", "-s", "-C", str(core), f"BUILD={build}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return load_library(Path(build) / "libvtpucore.so")


@pytest.fixture
def open_machine(library: ctypes.CDLL) -> Iterator[Callable[..., Machine]]:
    """Makes machines that end with the test."""
    with ExitStack() as stack:

        def make(**config: Any) -> Machine:
            return stack.enter_context(Machine(library, **config))

        yield make


@pytest.fixture
def machine(open_machine: Callable[..., Machine]) -> Machine:
    """Enabled, context 0 identity-mapped."""
    machine = open_machine()
    machine.identity()
    machine.enable()
    return machine


@pytest.fixture
def queue(machine: Machine) -> Queue:
    return Queue(machine)


@pytest.fixture
def open_functions(library: ctypes.CDLL) -> Iterator[OpenFunctions]:
    """Functions of one chip, enabled, context 0 identity-mapped."""
    with ExitStack() as stack:

        def make(count: int) -> list[Machine]:
            chip = Chip(library)
            stack.callback(chip.close)
            machines = [
                stack.enter_context(Machine(library, chip=chip, function=number))
                for number in range(count)
            ]
            for machine in machines:
                machine.identity()
                machine.enable()
            return machines

        yield make


@pytest.fixture
def open_fabric(library: ctypes.CDLL) -> Iterator[OpenFabric]:
    with ExitStack() as stack:
        yield lambda shape: stack.enter_context(Fabric(library, shape))


@pytest.fixture
def pair(open_fabric: OpenFabric) -> Fabric:
    fabric = open_fabric("2")
    fabric.add_all()
    return fabric
