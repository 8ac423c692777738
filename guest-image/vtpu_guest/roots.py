# SPDX-License-Identifier: MIT
"""The two Debian 13 roots: one that builds, one that the guest boots."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from . import debian
from .cache import GUEST_IMAGE, cache_dir, fresh, key, log_dir, need_space, prune, remove
from .privileged import run_isolated
from .stage import Stage, StageError

# Changed by hand when a root has to be rebuilt although its package list is
# the same.
_RECIPE = "1"
_HINT = f"packages are taken from the mirror in /etc/apt, suite {debian.SUITE}"

_KEEP_SOURCES = r"""
grep -rqs '^\(Types:.*\)\?deb-src' "$1/etc/apt/sources.list" "$1/etc/apt/sources.list.d" ||
    sed -n 's/^deb /deb-src /p' "$1/etc/apt/sources.list" >"$1/etc/apt/sources.list.d/src.list"
chroot "$1" sh -c 'cd /usr/src && apt-get update && apt-get source --download-only qemu'
"""
# The initramfs is our own, so Debian's is never generated. Everything else
# stays as Debian made it.
_NO_INITRAMFS = r"""
mkdir -p "$1/etc/initramfs-tools"
echo update_initramfs=no >"$1/etc/initramfs-tools/update-initramfs.conf"
"""


def packages(name: str) -> list[str]:
    lines = (GUEST_IMAGE / name).read_text().splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def _make(title: str, target: Path, package_list: str, extra: list[str], source: bool) -> None:
    with Stage(title) as stage:
        need_space(cache_dir(), 3000, title)
        with fresh(target) as work:
            options = [
                "--mode=root",
                "--variant=apt" if source else "--variant=minbase",
                "--format=directory",
                '--aptopt=Apt::Install-Recommends "false"',
                "--aptopt=Acquire::Retries 3",
                # Keeps a configuration file that a hook wrote, without asking.
                "--dpkgopt=force-confold",
                "--verbose",
                *(f"--dpkgopt=path-exclude=/usr/share/{junk}/*" for junk in ("man", "doc", "locale", "info")),
                *debian.proxy_options(),
                f"--include={','.join(packages(package_list))}",
                *extra,
            ]
            sources = debian.mmdebstrap_sources(source)
            command = ["mmdebstrap", *options, debian.SUITE, str(work), *sources]
            run_isolated(stage, command, log_dir() / f"{target.name.rsplit('-', 1)[0]}.log", hint=_HINT)
            record_versions(work, package_list.replace(".txt", ".lock"))


def build_root() -> Path:
    """The root with compilers and QEMU's source package."""
    target = cache_dir() / f"build-root-{key(_RECIPE, GUEST_IMAGE / 'packages-build.txt')}"
    if not target.is_dir():
        hooks = ["--skip=cleanup/apt", f"--customize-hook={_KEEP_SOURCES}"]
        _make("Debian 13 build root", target, "packages-build.txt", hooks, source=True)
        prune("build-root-*", [target], count=1)
    return target


def guest_root() -> Path:
    """The guest's files, whose kernel is the one that the build root has headers for."""
    target = cache_dir() / f"guest-root-{key(_RECIPE, GUEST_IMAGE / 'packages-guest.txt')}"
    build = build_root()
    for attempt in range(2):
        if not target.is_dir():
            hooks = [f"--essential-hook={_NO_INITRAMFS}"]
            _make("Debian 13 guest root", target, "packages-guest.txt", hooks, source=False)
            prune("guest-root-*", [target], count=1)
        if kernel_release(build) == kernel_release(target):
            return target
        # A point release came out between the two: make the older one anew.
        older = min(build, target, key=lambda root: root.stat().st_mtime)
        if attempt == 0:
            remove(older)
            build = build_root()
    raise StageError(
        f"the guest's kernel {kernel_release(target)} has no headers in the build root, "
        f"which has {kernel_release(build)}; the mirror is between two releases, try later"
    )


def kernel_release(root: Path) -> str:
    """The one kernel of a root, guest (its image) or build (its headers)."""
    names = sorted(path.name for path in (root / "usr/lib/modules").iterdir())
    if len(names) != 1:
        raise StageError(f"expected one kernel in {root}, found {names or 'none'}")
    return names[0]


def qemu_source(root: Path) -> Path:
    found = sorted((root / "usr/src").glob("qemu_*.dsc"))
    if not found:
        raise StageError(f"no QEMU source package in {root}/usr/src")
    return found[-1]


def record_versions(root: Path, lock_name: str) -> None:
    """Says where a root differs from the versions that were last tested."""
    show = ["dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f=${Package} ${Version}\\n"]
    result = subprocess.run(show, capture_output=True, text=True, check=True)
    now = dict(line.split() for line in result.stdout.splitlines())
    used = cache_dir() / lock_name
    used.write_text("".join(f"{name} {version}\n" for name, version in sorted(now.items())))
    lock = GUEST_IMAGE / lock_name
    if lock.is_file():
        tested = dict(line.split() for line in lock.read_text().splitlines())
        changed = sorted(name for name in now.keys() & tested.keys() if now[name] != tested[name])
        if changed:
            (log_dir() / f"{lock_name}.differences.json").write_text(
                json.dumps({name: [tested[name], now[name]] for name in changed}, indent=1)
            )
