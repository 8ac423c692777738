# SPDX-License-Identifier: MIT
"""syzkaller's description of the driver's interface has all that the header has."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[3]
HEADER = (REPO / "kmod/include/uapi/drm/vtpu_accel.h").read_text()
DESCRIPTION = (REPO / "kmod/fuzz/syzkaller/dev_vtpu.txt").read_text()
BYTES = {"__u8": 1, "__u16": 2, "__u32": 4, "__u64": 8, "__s64": 8}
# Filled in through a pointer of DEV_QUERY, so to syzkaller they are bytes; the last lies in a ring.
ANSWERS = {"drm_vtpu_info", "drm_vtpu_memory", "drm_vtpu_reset", "drm_vtpu_ring_entry"}

Layout = dict[str, list[tuple[str, int]]]


def header_structs() -> Layout:
    found = {}
    for name, body in re.findall(r"struct (\w+) \{\n(.*?)\n\};", HEADER, re.DOTALL):
        fields = re.findall(r"^\t(__[us]\d+) (\w+)(?:\[(\d+)\])?;", body, re.MULTILINE)
        found[name] = [(field, BYTES[kind] * int(count or 1)) for kind, field, count in fields]
    return found


def width(kind: str) -> int:
    """Of a field's type, as syzkaller lays it out."""
    if array := re.match(r"array\[(\w+), (\d+)\]", kind):
        return width(array[1]) * int(array[2])
    if (
        kind.startswith(("ptr64", "vma64", "vtpu_va", "vtpu_pages", "vtpu_offset"))
        or "int64" in kind
    ):
        return 8
    return 4


def described_structs() -> Layout:
    found = {}
    for name, body in re.findall(r"^(drm_vtpu_\w+) \{\n(.*?)\n\}", DESCRIPTION, re.DOTALL | re.M):
        fields = [line.split("\t")[1:3] for line in body.splitlines()]
        found[name] = [(field, width(kind)) for field, kind in fields]
    return found


def test_every_structure_has_the_same_fields() -> None:
    wanted = {name: fields for name, fields in header_structs().items() if name not in ANSWERS}
    assert described_structs() == wanted


def test_every_ioctl_is_described() -> None:
    wanted = set(re.findall(r"#define (DRM_IOCTL_VTPU_\w+)", HEADER))
    assert set(re.findall(r"const\[(DRM_IOCTL_VTPU_\w+)\]", DESCRIPTION)) == wanted


def test_every_constant_exists() -> None:
    used = set(re.findall(r"\bDRM_VTPU_\w+", DESCRIPTION))
    assert used
    for name in used:
        assert re.search(rf"\b{name}\b", HEADER), name
