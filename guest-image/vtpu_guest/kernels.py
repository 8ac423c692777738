# SPDX-License-Identifier: MIT
"""The kernels that a guest can boot; KERNEL=name chooses one, and all else stays the same."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from . import roots
from .roots import identity, kernel_release
from .stage import StageError

NAMES = ("default", "backports")


@dataclass(frozen=True)
class Kernel:
    """A kernel, its modules, and what modules for it are compiled with."""

    identity: str
    """For the keys of what is made from it."""
    release: str
    image: Path
    """The ELF file, or Debian's compressed one."""
    modules: Path
    """The guest's /usr/lib/modules."""
    root: Path
    """The root with the compiler that modules are to be compiled by."""
    headers: Path | None = None
    """What they are compiled against; None for the root's own."""


def chosen_name() -> str:
    name = os.environ.get("VTPU_KERNEL") or NAMES[0]
    if name not in NAMES:
        raise StageError(f"KERNEL is {name!r}; it can be {', '.join(NAMES)}")
    return name


def chosen(build_root: Path, guest_root: Path) -> Kernel:
    """The kernel that KERNEL asks for, built or fetched when it is not there."""
    name = chosen_name()
    if name == "backports":
        backports = roots.backports_root()
        return _packaged(backports, backports)
    return _packaged(guest_root, build_root)


def _packaged(root: Path, build_root: Path) -> Kernel:
    """Debian's own, from one root's image and another's headers."""
    release = kernel_release(root)
    image = root / f"boot/vmlinuz-{release}"
    return Kernel(identity(root), release, image, root / "usr/lib/modules", build_root)
