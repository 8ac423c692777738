# SPDX-License-Identifier: MIT
"""Parts of the library under the address and undefined-behaviour sanitisers. Host only."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import programs
import pytest

HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parents[2] / "libtpurt"
COMPILER = os.environ.get("CC", "cc")

pytestmark = pytest.mark.skipif(
    os.environ.get("VTPU_BACKEND", "core") != "core" or not shutil.which(COMPILER),
    reason="needs the sources and a compiler",
)


def build(target: Path, *sources: Path) -> Path:
    includes = ["include", "src", "../qemu-device/include"]
    subprocess.run(
        [
            COMPILER, "-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror",
            "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
            *(f"-I{LIBRARY / folder}" for folder in includes), "-o", str(target),
            *(str(source) for source in sources),
        ],
        check=True,
    )  # fmt: skip
    return target


def test_damaged_executables_stay_in_bounds(tmp_path: Path) -> None:
    code = programs.add_one(0) + programs.HALT
    image = tmp_path / "good.elf"
    records = [(0, "load", "model"), (64, "add", "model.layers.0")]
    image.write_bytes(
        programs.executable(
            {"main": code, "other": code}, ["word"], pc_map=programs.operation_map(records)
        )
    )
    sources = [LIBRARY / "src" / name for name in ("elf_image.c", "error.c")]
    program = build(tmp_path / "elf_mutations", HERE / "elf_mutations.c", *sources)
    done = subprocess.run([program, image, "100000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 0 < int(done.stdout.split()[0]) < 100000


def test_addresses_match_a_model(tmp_path: Path) -> None:
    program = build(tmp_path / "va_model", HERE / "va_model.c", LIBRARY / "src" / "va.c")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
