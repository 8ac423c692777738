# SPDX-License-Identifier: MIT
"""The Debian 13 roots: one that builds, one that the guest boots, and those of other jobs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from . import debian
from .cache import GUEST_IMAGE, cache_dir, fresh, key, log_dir, need_space, prune, remove
from .privileged import run_isolated
from .stage import Stage, StageError

# Changed by hand when a root has to be rebuilt although its package list is
# the same.
_RECIPE = "1"
_LEFT_OUT = ["man", "doc", "locale", "info"]
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


def _make(
    title: str,
    target: Path,
    package_list: str,
    extra: list[str],
    *,
    source: bool = False,
    backports: bool = False,
) -> None:
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
                *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _LEFT_OUT),
                *debian.proxy_options(),
                f"--include={','.join(packages(package_list))}",
                *extra,
            ]
            sources = debian.mmdebstrap_sources(source, backports)
            command = ["mmdebstrap", *options, debian.SUITE, str(work), *sources]
            log = log_dir() / f"{package_list.removesuffix('.txt')}.log"
            run_isolated(stage, command, log, hint=_HINT)
            _record_versions(work, target, package_list.replace(".txt", ".lock"))


def build_root() -> Path:
    """The root with compilers and QEMU's source package."""
    target = cache_dir() / f"build-root-{key(_RECIPE, GUEST_IMAGE / 'packages-build.txt')}"
    if not target.is_dir():
        hooks = ["--skip=cleanup/apt", f"--customize-hook={_KEEP_SOURCES}"]
        _make("Debian 13 build root", target, "packages-build.txt", hooks, source=True)
    prune("build-root-*", target)
    return target


def guest_root() -> Path:
    """The guest's files, whose kernel is the one that the build root has headers for."""
    target = cache_dir() / f"guest-root-{key(_RECIPE, GUEST_IMAGE / 'packages-guest.txt')}"
    build = build_root()
    for attempt in range(2):
        if not target.is_dir():
            hooks = [f"--essential-hook={_NO_INITRAMFS}"]
            _make("Debian 13 guest root", target, "packages-guest.txt", hooks)
        prune("guest-root-*", target)
        if kernel_release(build) == kernel_release(target):
            return target
        # A point release came out between the two: make the older one anew.
        older = min(build, target, key=_kernel_version)
        if attempt == 0:
            remove(older)
            build = build_root()
    raise StageError(
        f"the guest's kernel {kernel_release(target)} has no headers in the build root, "
        f"which has {kernel_release(build)}; the mirror is between two releases, try later"
    )


def fuzz_root() -> Path:
    """The root with clang and its sanitisers; made by nothing but fuzzing."""
    return _extra_root("fuzz", [])


def backports_root() -> Path:
    """The root with the newest kernel and its headers; made when that kernel is asked for."""
    return _extra_root("backports", [f"--essential-hook={_NO_INITRAMFS}"], backports=True)


def kernel_root() -> Path:
    """The root with the source of the guest's kernel; made when one is built of it, or to lint."""
    return _extra_root("kernel", [])


def tools_root() -> Path:
    """The guest's files with perf, bpftrace and more; made when they are asked for."""
    lists = [GUEST_IMAGE / f"packages-{name}.txt" for name in ("guest", "tools")]
    target = cache_dir() / f"tools-root-{key(_RECIPE, *lists)}"
    if not target.is_dir():
        hooks = [f"--essential-hook={_NO_INITRAMFS}"]
        hooks.append(f"--include={','.join(packages('packages-guest.txt'))}")
        _make("Debian 13 guest root with tools", target, "packages-tools.txt", hooks)
    prune("tools-root-*", target)
    return target


def _extra_root(name: str, hooks: list[str], *, backports: bool = False) -> Path:
    package_list = f"packages-{name}.txt"
    target = cache_dir() / f"{name}-root-{key(_RECIPE, GUEST_IMAGE / package_list)}"
    if not target.is_dir():
        _make(f"Debian 13 {name} root", target, package_list, hooks, backports=backports)
    prune(f"{name}-root-*", target)
    return target


def kernel_release(root: Path) -> str:
    """The one kernel of a root, guest (its image) or build (its headers)."""
    names = sorted(path.name for path in (root / "usr/lib/modules").iterdir())
    if len(names) != 1:
        raise StageError(f"expected one kernel in {root}, found {names or 'none'}")
    return names[0]


def _kernel_version(root: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", kernel_release(root))]


def identity(root: Path) -> str:
    """What is in a root, for the keys of what is made from it."""
    return key(root.name, _versions_file(root))


def _versions_file(root: Path) -> Path:
    return cache_dir() / f"packages-{root.name}"


def qemu_source(root: Path) -> Path:
    found = sorted((root / "usr/src").glob("qemu_*.dsc"))
    if not found:
        raise StageError(f"no QEMU source package in {root}/usr/src")
    return found[-1]


def _record_versions(root: Path, target: Path, lock_name: str) -> None:
    """Keeps the versions that a root got, and says when they are not the tested ones."""
    show = ["dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f=${Package} ${Version}\\n"]
    result = subprocess.run(show, capture_output=True, text=True, check=True)
    _versions_file(target).write_text(result.stdout)
    lock = GUEST_IMAGE / lock_name
    tested = set(lock.read_text().splitlines()) if lock.is_file() else set()
    changed = len(set(result.stdout.splitlines()) - tested)
    if changed:
        print(f"vtpu: {changed} packages differ from {lock_name}", file=sys.stderr)
