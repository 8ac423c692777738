# SPDX-License-Identifier: MIT
"""docs/driver-uapi.md against the header that it describes: nothing is left out or invented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
HEADER = (REPO / "kmod/include/uapi/drm/vtpu_accel.h").read_text()
PAGE = (REPO / "docs/driver-uapi.md").read_text()
PROSE, _, EXAMPLE = PAGE.partition("## Example")

_STRUCT = re.compile(r"^struct (drm_vtpu_\w+) \{\n(.*?)^\};", re.M | re.S)
_FIELD = re.compile(r"^\t__[us]\d+ (\w+)(?:\[\d+\])?;(?:\t+/\* (.*))?$", re.M)


def structures() -> dict[str, dict[str, str]]:
    """Each structure's fields with the comment beside them."""
    return {name: dict(_FIELD.findall(body)) for name, body in _STRUCT.findall(HEADER)}


def described(name: str) -> dict[str, str]:
    """The first table after the structure's name: each field's direction."""
    assert f"`struct {name}`" in PROSE, name
    table = PROSE.partition(f"`struct {name}`")[2].partition("|---|---|---|\n")[2]
    rows = table.partition("\n\n")[0].splitlines()
    return {re.findall(r"`(\w+)`", row)[0]: row.split("|")[2].strip() for row in rows}


def test_the_header_is_understood() -> None:
    found = structures()
    assert len(found) == len(re.findall(r"^struct drm_vtpu_\w+ \{", HEADER, re.M))
    for body in (body for _, body in _STRUCT.findall(HEADER)):
        assert len(_FIELD.findall(body)) == len(re.findall(r"^\t__[us]\d+ ", body, re.M))


@pytest.mark.parametrize("name", structures())
def test_every_field_has_its_row(name: str) -> None:
    assert list(described(name)) == list(structures()[name])


@pytest.mark.parametrize("name", structures())
def test_directions_are_the_headers(name: str) -> None:
    for field, comment in structures()[name].items():
        both = [word for word in ("in", "out") if re.search(rf"\b{word}:|^{word}\b", comment)]
        # What a query answers says so by being one; padding is always read.
        wanted = both or (["in"] if field == "pad" else ["out"])
        assert described(name)[field] == ", ".join(wanted), field


def test_every_constant_is_named() -> None:
    defined = set(re.findall(r"^#define (DRM_(?:IOCTL_)?VTPU_\w+)", HEADER, re.M))
    defined |= set(re.findall(r"^\t(DRM_VTPU_\w+) =", HEADER, re.M))
    named = set(re.findall(r"\b(DRM_(?:IOCTL_)?VTPU_\w+)\b", PROSE))
    assert defined - named == set(), "not described"
    used = named | set(re.findall(r"\b(DRM_(?:IOCTL_)?VTPU_\w+)\b", EXAMPLE))
    assert used - defined == set(), "not in the header"


def test_every_enum_is_named() -> None:
    for name in re.findall(r"^enum (drm_vtpu_\w+) \{", HEADER, re.M):
        assert f"`enum {name}`" in PROSE, name
