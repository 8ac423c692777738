# SPDX-License-Identifier: MIT
"""The interface's structures byte by byte, and a 32-bit process that uses them.

uapi-layout.txt is the promise: what is in it stays where it is. New structures, and fields
at the end of old ones, are added to it by hand, in the order of the header.
"""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE

HEADER = HERE.parents[2] / "kmod/include/uapi/drm/vtpu_accel.h"
TABLE = HERE / "uapi-layout.txt"
PAGE = HERE.parents[2] / "docs/driver-uapi.md"
INCLUDE = "-I/header -I/usr/include/drm"
EXAMPLE = """
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <drm/vtpu_accel.h>
#define ptr(p) ((__u64)(uintptr_t)(p))
int main(void)
{
@
return data[0];
}
"""
pytestmark = pytest.mark.guest

_MEMBER = re.compile(r"\b(\w+)(?:\[\d+\])?;\s+/\*\s+(\d+)\s+(\d+) \*/")
_SIZE = re.compile(r"/\* size: (\d+),")


def structures() -> list[str]:
    return re.findall(r"^struct (drm_vtpu_\w+) \{", HEADER.read_text(), re.M)


def example() -> str:
    """The one program in the page about the interface."""
    (code,) = re.findall(r"^```c\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return code


@pytest.fixture(scope="module")
def built() -> Iterator[Path]:
    """What pahole says of each kind of process, and compat.c."""
    from vtpu_guest.cache import log_dir
    from vtpu_guest.privileged import run_in_root
    from vtpu_guest.roots import build_root
    from vtpu_guest.stage import Stage

    names = structures()
    members = "".join(f"struct {name} x{number};\n" for number, name in enumerate(names))
    script = ["set -e"]
    for bits in (32, 64):
        script += [
            f"gcc -m{bits} -g -c {INCLUDE} -o /tmp/layout.o /out/layout.c",
            # It finds what it looks for, prints it, and returns an error all the same.
            f"for name in {' '.join(names)}; do "
            f"pahole -F dwarf -C $name /tmp/layout.o || :; done >/out/{bits} 2>/dev/null",
        ]
    script.append(
        "gcc -m32 -std=gnu11 -Wall -Wextra -Werror -O2 -static -nostdlib -ffreestanding "
        f"-fno-stack-protector -fno-pic -no-pie {INCLUDE} -o /out/compat /source/compat.c"
    )
    script.append(f"gcc -std=gnu11 -Wall -Werror -static {INCLUDE} -o /out/example /out/example.c")
    with tempfile.TemporaryDirectory(prefix="vtpu-layout-") as folder:
        out = Path(folder)
        (out / "layout.c").write_text(f"#include <drm/vtpu_accel.h>\n{members}")
        (out / "example.c").write_text(EXAMPLE.replace("@", example()))
        with Stage("layout of the interface") as stage:
            run_in_root(
                stage,
                build_root(),
                ["sh", "-c", "\n".join(script)],
                log_dir() / "layout.log",
                read={HEADER.parents[1]: "/header", HERE: "/source"},
                write={out: "/out"},
            )
        yield out


def described(text: str) -> str:
    """A line a structure or field: its name, where it begins, its bytes."""
    lines = []
    for block in re.split(r"^struct ", text, flags=re.M)[1:]:
        size = _SIZE.search(block)
        assert size, block
        lines.append(f"{block.split()[0]} {size[1]}")
        lines += [f"  {name} {offset} {bytes_}" for name, offset, bytes_ in _MEMBER.findall(block)]
    return "\n".join(lines) + "\n"


def test_the_layout_is_the_promised_one(built: Path) -> None:
    now, promised = described((built / "64").read_text()), TABLE.read_text()
    diff = difflib.unified_diff(promised.splitlines(), now.splitlines(), "promised", "now")
    assert now == promised, "\n".join(diff)
    assert [line.split()[0] for line in now.splitlines() if line[0] != " "] == structures()


def test_both_kinds_of_processes_see_the_same(built: Path) -> None:
    assert described((built / "32").read_text()) == described((built / "64").read_text())


def test_no_byte_is_without_a_name(built: Path) -> None:
    """No holes, no padding by the compiler, whole 64-bit words, aligned fields."""
    for bits in ("32", "64"):
        assert not re.findall(r".*(?:hole|padding).*", (built / bits).read_text())
    for line in described((built / "64").read_text()).splitlines():
        words = line.split()
        if line.startswith(" "):
            assert int(words[1]) % min(int(words[2]), 8) == 0, line
        else:
            assert int(words[1]) % 8 == 0, line


def test_the_pages_example(built: Path, guest: Any) -> None:
    guest.put(built / "example", "/tmp/example", 0o755)
    assert guest.run(["/tmp/example"]).returncode == 42


def test_a_32_bit_process(built: Path, guest: Any) -> None:
    """Every ioctl through the compat entry, with addresses that it cannot reach itself."""
    guest.put(built / "compat", "/tmp/compat", 0o755)
    done = guest.run(["/tmp/compat"])
    assert done.returncode == 0, f"check {done.returncode} of compat.c"
