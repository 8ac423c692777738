# SPDX-License-Identifier: MIT
"""The kernels that a guest can boot; KERNEL=name chooses one, and all else stays the same."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from . import roots
from .cache import GUEST_IMAGE, cache_dir, fresh, key, log_dir, need_space, prune
from .privileged import run_in_root
from .roots import identity, kernel_release
from .stage import Stage, StageError

NAMES = ("default", "backports", "debug")
_CONFIG = GUEST_IMAGE / "debug.config"
_SCRIPT = GUEST_IMAGE / "build-kernel"
# Its checkers look at every access to memory and at every lock.
_PATIENCE = {"debug": 6}


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


def patience() -> int:
    """How many times longer than the default kernel the chosen one may take for anything."""
    return _PATIENCE.get(chosen_name(), 1)


def chosen(build_root: Path, guest_root: Path) -> Kernel:
    """The kernel that KERNEL asks for, built or fetched when it is not there."""
    name = chosen_name()
    if name == "backports":
        backports = roots.backports_root()
        return _packaged(backports, backports)
    if name == "debug":
        return debug()
    return _packaged(guest_root, build_root)


def _packaged(root: Path, build_root: Path) -> Kernel:
    """Debian's own, from one root's image and another's headers."""
    release = kernel_release(root)
    image = root / f"boot/vmlinuz-{release}"
    return Kernel(identity(root), release, image, root / "usr/lib/modules", build_root)


def debug() -> Kernel:
    """The guest's kernel with every checker, built of Debian's source when it is not there."""
    root = roots.kernel_root()
    target = cache_dir() / f"kernel-{key(identity(root), _CONFIG, _SCRIPT)}"
    if not target.is_dir():
        with Stage("debug kernel") as stage, fresh(target) as work:
            need_space(cache_dir(), 6000, "the debug kernel")
            command = ["sh", "/script/build-kernel", "/script/debug.config", "/headers"]
            read, log = {_SCRIPT.parent: "/script"}, log_dir() / "kernel.log"
            run_in_root(stage, root, command, log, read=read, write={work: "/headers"})
    prune("kernel-????????????????", target)
    modules = target / "lib/modules"
    (release,) = (path.name for path in modules.iterdir())
    return Kernel(target.name, release, target / "boot/vmlinux", modules, root, target)
