# SPDX-License-Identifier: MIT
"""Files that are no executables: each a clear refusal, never a crash."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import programs
import pytest

if TYPE_CHECKING:
    from vtpu.runtime import Device

CODE = programs.add_one(0) + programs.HALT
GOOD = programs.executable({"main": CODE, "other": CODE}, ["word"])


def refusal(device: Device, image: bytes) -> str:
    from vtpu.runtime import TpuBadExecutableError

    with pytest.raises(TpuBadExecutableError) as info:
        device.load(image)
    return info.value.message


def patched(offset: int, layout: str, *values: Any) -> bytes:
    image = bytearray(GOOD)
    struct.pack_into(layout, image, offset, *values)
    return bytes(image)


def header_of(section: int) -> int:
    """Offset of a section's header."""
    return int(struct.unpack_from("<Q", GOOD, 40)[0]) + section * 64


def names_in_section_0() -> bytes:
    """Section 0 poses as a string table far outside the file."""
    image = bytearray(patched(62, "<H", 0))
    struct.pack_into("<IIQQQQ", image, header_of(0), 0, 3, 0, 0, 1 << 40, 1)
    return bytes(image)


def test_the_good_one_loads(device: Device) -> None:
    exe = device.load(GOOD)
    assert set(exe.kernels) == {"main", "other"}
    assert exe.kernels["other"].text_offset == 256
    assert exe.kernels["other"].code_bytes == len(CODE)
    assert exe.metadata["arguments"] == ["word"]
    assert exe.note(0x22) == bytes(32)
    assert exe.section(".text")[: len(CODE)] == CODE
    assert exe.operation_at(0, "main") == ("", "")


def test_a_path_is_named(device: Device, tmp_path: Path) -> None:
    from vtpu.runtime import TpuBadExecutableError

    path = tmp_path / "broken.elf"
    path.write_bytes(GOOD[:1000])
    with pytest.raises(TpuBadExecutableError, match=r"broken\.elf.*truncated"):
        device.load(path)
    with pytest.raises(FileNotFoundError):
        device.load(tmp_path / "absent.elf")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"", "truncated: 0 bytes"),
        (b"#!/bin/sh\n" + bytes(100), "no ELF file"),
        (GOOD[:63], "truncated: 63 bytes"),
        (GOOD[:200], "truncated: section headers"),
        (GOOD[:-1], "truncated: section headers"),
        (patched(4, "<B", 1), "not ELF64"),
        (patched(5, "<B", 2), "not ELF64"),
        (patched(16, "<H", 2), "ELF type 2"),
        (programs.executable({"m": CODE}, [], machine=62), "machine 0x3e, this device is 0x5450"),
        (programs.executable({"m": CODE}, [], isa_version=9), "ISA version 9"),
        (patched(58, "<H", 40), "section headers of 40 bytes"),
        (patched(60, "<H", 0), "0 sections"),
        (patched(60, "<H", 60000), "60000 sections"),
        (patched(62, "<H", 99), "section names in section 99"),
        (patched(40, "<Q", 1 << 63), "truncated"),
        (patched(header_of(1) + 24, "<Q", len(GOOD)), "section 1 "),
        (patched(header_of(2) + 32, "<Q", 2**64 - 1), "section 2 "),
        (names_in_section_0(), "section 0 "),
        (patched(header_of(1), "<I", 1 << 30), "section 1: its name"),
        (patched(header_of(5) + 40, "<I", 77), "names in section 77"),
        (patched(header_of(5) + 56, "<Q", 16), ".symtab"),
        (programs.executable({"m": CODE + b"x"}, []), "words of 64"),
        (programs.executable({"m": b""}, []), ".text has 0 bytes"),
        (programs.executable({}, []), ".text has 0 bytes"),
        (programs.executable({"m": CODE * 5000}, []), "the limit is 1048576"),
        (programs.executable({"m": CODE}, [f"a{i}" for i in range(17)]), "17 arguments"),
        (programs.executable({f"k{i}": CODE for i in range(65)}, []), "more than 64"),
        (programs.executable({"m": CODE}, [], key=b"short"), "cache key of 5 bytes"),
        (GOOD.replace(b"TPKD"[::1], b"XXXX", 1), "descriptor magic"),
        (GOOD.replace(b"main.kd", b"mainxkd", 1), 'no descriptor "main.kd"'),
        (GOOD.replace(b".note.tpu", b".note.xxx", 1), "no .note.tpu"),
        (GOOD.replace(b"TPU\0{", b"XXX\0{", 1), "no metadata"),
        (GOOD.replace(b'{"version"', b'["version"', 1), "no JSON"),
        (programs.executable({"m": CODE}, [], metadata={"version": 2}), "metadata version 2"),
        (programs.executable({"m": CODE}, [], metadata={"isa_version": 3}), "isa_version 3"),
        (programs.executable({"m": CODE}, [], metadata={"arguments": ["a"]}), "names 1"),
        (programs.executable({"m": CODE}, [], metadata={"arguments": 5}), "list of names"),
    ],
)
def test_each_refusal_names_its_reason(device: Device, image: bytes, message: str) -> None:
    assert message in refusal(device, image)


def test_nothing_stays_after_a_refusal(device: Device) -> None:
    before = device.memory().client_hbm
    for _ in range(20):
        refusal(device, programs.executable({"m": CODE}, [], metadata={"version": 2}))
    assert device.memory().client_hbm == before


def test_mutations_never_crash() -> None:
    from vtpu.runtime._native import ffi, lib

    rng = random.Random(1)
    accepted = 0
    for _ in range(3000):
        image = bytearray(GOOD)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(image))
            width = rng.choice((1, 2, 4, 8))
            value = rng.choice((0, 1, 0x7F, 0xFF, 0xFFFFFFFF, 2**63, rng.getrandbits(64)))
            image[at : at + width] = value.to_bytes(8, "little")[:width]
        if rng.random() < 0.2:
            del image[rng.randrange(len(image)) :]
        status = lib.tpurt_executable_check(ffi.from_buffer(image), len(image), b"mutant")
        assert status in (lib.TPURT_OK, lib.TPURT_ERROR_BAD_EXECUTABLE)
        accepted += status == lib.TPURT_OK
    assert 0 < accepted < 3000
