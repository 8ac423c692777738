# SPDX-License-Identifier: MIT
"""What is slow to build lives outside the checkout, named by what it was made from."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .stage import StageError

REPO = Path(__file__).resolve().parents[2]
GUEST_IMAGE = REPO / "guest-image"

_IGNORED = {"__pycache__", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", "build"}
# Long enough for any test run or bench; another checkout may be at work.
_KEEP_SECONDS = 3 * 3600
_BUILD_PRODUCTS = {".o", ".ko", ".so", ".a", ".cmd", ".d", ".pyc"}


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(base) / "vtpu"
    path.mkdir(parents=True, exist_ok=True)
    return path


def log_dir() -> Path:
    path = cache_dir() / "logs"
    path.mkdir(exist_ok=True)
    return path


def source_files(*roots: Path) -> Iterator[Path]:
    """Files below the roots in a fixed order, without what builds leave behind."""
    for root in roots:
        if root.is_file():
            yield root
            continue
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - _IGNORED)
            for name in sorted(names):
                path = Path(folder) / name
                if path.suffix not in _BUILD_PRODUCTS and not name.startswith("."):
                    yield path


def key(*parts: str | Path) -> str:
    """A short digest of strings, files and trees; a missing path counts as such."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(b"s" + part.encode() + b"\0")
            continue
        for path in source_files(part):
            digest.update(b"f" + str(path.relative_to(part.parent)).encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


@contextmanager
def build_lock() -> Iterator[None]:
    """One build at a time. The kernel drops the lock with the process."""
    with open(cache_dir() / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            print(f"vtpu: waiting for the build of process {holder}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        _remove_leftovers()
        yield


def remove(path: Path) -> None:
    """Removes a tree whose files may belong to root.

    It loses its name first: a removal that is interrupted must not leave half a
    result that looks whole.
    """
    from .privileged import run_privileged

    if path.exists() or path.is_symlink():
        if not path.name.startswith("."):
            doomed = path.with_name(f".{path.name}.old")
            remove(doomed)
            path = path.rename(doomed)
        run_privileged(["rm", "-rf", "--one-file-system", str(path)])


def _remove_leftovers() -> None:
    """What a killed process was making or removing. Needs the build lock."""
    for pattern in (".*.new", ".*.old", "*.files"):
        for path in cache_dir().glob(pattern):
            remove(path)


@contextmanager
def fresh(target: Path) -> Iterator[Path]:
    """A path to build at, which becomes target when the block ends well."""
    work = target.with_name(f".{target.name}.new")
    remove(work)
    try:
        yield work
        os.rename(work, target)
    except BaseException:
        remove(work)
        raise


def prune(pattern: str, keep: Path) -> None:
    """Removes old results of a kind. One that was used lately may be in use."""
    with suppress(PermissionError):
        os.utime(keep)
    now = time.time()
    for path in cache_dir().glob(pattern):
        if path != keep and now - path.lstat().st_mtime > _KEEP_SECONDS:
            remove(path)


def sync_tree(source: Path, target: Path) -> None:
    """Copies what differs, so that make sees only real changes."""
    wanted = set()
    for path in source_files(source):
        copy = target / path.relative_to(source)
        wanted.add(copy)
        data = path.read_bytes()
        if not copy.is_file() or copy.read_bytes() != data:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
        copy.chmod(path.stat().st_mode & 0o755)
    if target.is_dir():
        for path in list(source_files(target)):
            if path not in wanted and not is_derived(path):
                path.unlink()


def is_derived(path: Path) -> bool:
    """kbuild's own files, which a copied tree gains and must keep."""
    return path.suffix in {".mod", ".order", ".symvers"} or path.name.endswith(".mod.c")


def need_space(path: Path, megabytes: int, what: str) -> None:
    stat = os.statvfs(path)
    have = stat.f_bavail * stat.f_frsize // 2**20
    if have < megabytes:
        raise StageError(f"{what} needs {megabytes} MB of disk in {path}, which has {have} MB free")
