# SPDX-License-Identifier: MIT
"""make lint-driver: what the kernel's own tools say of the driver's source."""

from __future__ import annotations

import sys
from pathlib import Path

from . import roots
from .cache import GUEST_IMAGE, REPO, cache_dir, fresh, key, log_dir, prune, sync_tree
from .privileged import run_in_root
from .roots import identity
from .stage import Stage, StageError

_SCRIPT = GUEST_IMAGE / "check-driver"
_SOURCES = ("kmod", "qemu-device/include")
_UNPACK = (
    "tar -C /out --strip-components=2 --wildcards -xf /usr/src/linux-source-*.tar.xz"
    " '*/scripts/checkpatch.pl' '*/scripts/spelling.txt' '*/scripts/const_structs.checkpatch'"
    " '*/scripts/coccinelle'"
)


def lint_driver() -> None:
    """Prints what is found, and raises StageError then. Needs the build lock."""
    root = roots.kernel_root()
    scripts = _kernel_scripts(root)
    tree = cache_dir() / f"lint-tree-{key(identity(root), str(REPO))}"
    for source in _SOURCES:
        sync_tree(REPO / source, tree / source)
    log = log_dir() / "lint-driver.log"
    read = {_SCRIPT.parent: "/script", scripts: "/scripts"}
    command = ["env", "VTPU_HW_INCLUDE=/tree/qemu-device/include"]
    command += ["sh", f"/script/{_SCRIPT.name}", "/scripts", "/tree"]
    with Stage("lint driver") as stage:
        try:
            run_in_root(stage, root, command, log, read=read, write={tree: "/tree"})
        except StageError:
            said = log.read_text(errors="replace").replace("/tree/", "")
            lines = [line for line in said.splitlines() if not line.startswith("check-driver:")]
            sys.stdout.write("\n".join([*lines, ""]))
            raise StageError("the kernel's tools found something", log) from None


def _kernel_scripts(root: Path) -> Path:
    """The part of the kernel's source that Debian's headers leave out."""
    target = cache_dir() / f"kernel-scripts-{key(identity(root), _UNPACK)}"
    if not target.is_dir():
        with Stage("kernel's scripts") as stage, fresh(target) as work:
            work.mkdir()
            log = log_dir() / "kernel-scripts.log"
            run_in_root(stage, root, ["sh", "-c", _UNPACK], log, write={work: "/out"})
    prune("kernel-scripts-*", target)
    return target
