# SPDX-License-Identifier: MIT
"""The compiler runs in the guest too, and gives the same executable as on the host."""

from __future__ import annotations

import pytest

from .conftest import Served

pytestmark = pytest.mark.guest

SCRIPT = """
import os
from pathlib import Path
from vtpu import artifacts
from vtpu.gguf import GGUFFile
from vtpu.models.llama import Llama
from vtpu.step import trace_step
from vtpu_compiler import compile_graph

folder = Path(os.environ["VTPU_AOT_DIR"])
made = artifacts.read(folder)
model = Llama(GGUFFile(next(Path("/opt/model").glob("*.gguf"))))
elf = compile_graph(trace_step(model, made.shape)).elf
assert elf == (folder / artifacts.EXECUTABLE).read_bytes(), len(elf)
print(len(elf))
"""


def test_the_guest_compiles_what_the_host_compiled(served: Served) -> None:
    done = served.guest.run(["python3", "-c", SCRIPT], timeout=120).check()
    assert int(done.text) > 10_000
