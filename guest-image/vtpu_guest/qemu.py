# SPDX-License-Identifier: MIT
"""Builds QEMU with the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .cache import REPO, cache_dir, fresh, key, log_dir, need_space, prune, remove
from .privileged import run_in_root
from .roots import identity, qemu_source
from .stage import Stage

DEVICE = REPO / "qemu-device"
_OVERLAY = [DEVICE / name for name in ("qemu", "core", "include", "patches")]


@dataclass(frozen=True)
class Qemu:
    """A QEMU that runs on the host through the build root's own libraries."""

    root: Path
    binary: Path

    @property
    def command(self) -> list[str]:
        usr = self.root / "usr"
        return [
            str(usr / "lib64/ld-linux-x86-64.so.2"),
            "--library-path",
            str(usr / "lib/x86_64-linux-gnu"),
            str(self.binary),
            *("-L", str(usr / "share/seabios"), "-L", str(usr / "share/qemu")),
        ]


def tree_of(root: Path) -> Path:
    """Where the unpacked source and what is compiled of it are kept."""
    return cache_dir() / f"qemu-tree-{key(identity(root), qemu_source(root).name)}"


def build(root: Path) -> Qemu:
    """Compiles what changed; the tree is kept, so an edit costs seconds."""
    script = DEVICE / "build-qemu"
    source = qemu_source(root)
    tree = tree_of(root)
    out = cache_dir() / f"qemu-{key(tree.name, script, *_OVERLAY)}"
    qemu = Qemu(root, out / "qemu-system-x86_64.bin")
    if not out.is_dir():
        with Stage("QEMU with the vTPU device") as stage:
            _take_over(tree, source.stem)
            need_space(cache_dir(), 200 if tree.is_dir() else 2000, "QEMU")
            with fresh(out) as work:
                work.mkdir()
                run_in_root(
                    stage,
                    root,
                    [
                        "sh",
                        "/device/build-qemu",
                        f"/usr/src/{source.name}",
                        "/device",
                        "/tree",
                        "/out",
                    ],
                    log_dir() / "qemu.log",
                    read={DEVICE: "/device"},
                    write={tree: "/tree", work: "/out"},
                )
                _write_wrapper(work, qemu)
        for old in cache_dir().glob("qemu-tree-*"):
            if old != tree:
                remove(old)
    prune("qemu-????????????????", out)
    return qemu


def _take_over(tree: Path, source: str) -> None:
    """Trees were once named by their script, too: one of the same source is brought up to date."""
    _, _, version = source.partition("_")
    for old in cache_dir().glob("qemu-tree-*"):
        log = old / "src/debian/changelog"
        if not tree.exists() and log.is_file() and f":{version})" in log.read_text()[:200]:
            old.rename(tree)


def _write_wrapper(folder: Path, qemu: Qemu) -> None:
    """For a person, or a test that wants QEMU itself."""
    wrapper = folder / "qemu-system-x86_64"
    words = " \\\n    ".join(f"'{word}'" for word in qemu.command)
    wrapper.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    wrapper.chmod(0o755)
