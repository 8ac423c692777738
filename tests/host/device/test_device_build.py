# SPDX-License-Identifier: MIT
"""QEMU's build and the library's build compile the same files for the same instructions."""

import re
from pathlib import Path

DEVICE = Path(__file__).parents[3] / "qemu-device"


def test_meson_names_every_source() -> None:
    meson = (DEVICE / "qemu" / "meson.build").read_text()
    named = re.findall(r"'core/(\w+\.c)'", meson)
    assert sorted(named) == sorted(path.name for path in (DEVICE / "core").glob("*.c"))


def test_vector_sources_get_their_instructions() -> None:
    meson = (DEVICE / "qemu" / "meson.build").read_text()
    for path in ("avx2", "avx512", "amx"):
        block = meson[meson.index(f"'{path}': [") :]
        named = re.findall(r"'core/(\w+)\.c'", block[: block.index(f"vtpu_{path},")])
        assert named and all(name.endswith(f"_{path}") for name in named)
        expected = {file.stem for file in (DEVICE / "core").glob(f"*_{path}.c")}
        assert set(named) == expected
