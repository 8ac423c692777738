# SPDX-License-Identifier: MIT
"""What changes often: the driver, the runtime, the Python code, the compiled model.

A small image of its own, mounted at /opt/vtpu, so that an edit costs seconds.
Parts that do not exist in the checkout are left out.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from .cache import GUEST_IMAGE, REPO, cache_dir, fresh, key, log_dir, prune, remove, sync_tree
from .kernel import Modules, make_image
from .privileged import run_in_root
from .roots import identity, kernel_release
from .stage import Stage, StageError, run_logged
from .venv import venv_python

_REQUIREMENTS = GUEST_IMAGE / "requirements-guest.txt"
_PYTHON = [REPO / "python/vtpu", REPO / "compiler/vtpu_compiler"]
_NATIVE = ["kmod", "libtpurt", "qemu-device/include", "qemu-device/core", "python/vtpu/runtime"]
# Paths inside the guest, and what every process there finds in its environment.
_ENVIRONMENT = """\
PYTHONPATH=/opt/vtpu/python:/opt/vtpu/native:/opt/vtpu/site
PYTHONDONTWRITEBYTECODE=1
PYTHONUNBUFFERED=1
LD_LIBRARY_PATH=/opt/vtpu/lib
VTPU_AOT_DIR=/opt/vtpu/aot
"""
# What modpost writes into a module about the modules that it needs.
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
_COMPILE_PYTHON = "python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash"


@dataclass(frozen=True)
class Roots:
    build: Path
    guest: Path


def build(roots: Roots, compiled: Path | None) -> Path:
    site = _site_packages(roots.build)
    native = _native(roots)
    name = compiled.name if compiled else "none"
    recipe = [site.name, native.name, name, identity(roots.guest), _ENVIRONMENT]
    target = cache_dir() / f"payload-{key(*recipe, *_PYTHON)}.erofs"
    if not target.is_file():
        with Stage("payload image") as stage:
            folder = target.with_suffix(".files")
            remove(folder)
            try:
                _collect(stage, roots, folder, site, native, compiled)
                make_image(stage, roots.build, folder, target)
            finally:
                remove(folder)
    prune("payload-*.erofs", target)
    return target


def _collect(
    stage: Stage, roots: Roots, folder: Path, site: Path, native: Path, compiled: Path | None
) -> None:
    shutil.copytree(native, folder, symlinks=True)
    shutil.copytree(site, folder / "site", copy_function=_link)
    for tree in _PYTHON:
        if tree.is_dir():
            sync_tree(tree, folder / "python" / tree.name)
    (folder / "python").mkdir(exist_ok=True)
    if compiled:
        shutil.copytree(compiled, folder / "aot", copy_function=_link)
    (folder / "environment").write_text(_ENVIRONMENT)
    _order_modules(roots, folder / "modules")
    run_in_root(
        stage,
        roots.build,
        ["sh", "-c", f"{_COMPILE_PYTHON} /payload/python"],
        log_dir() / "payload.log",
        write={folder: "/payload"},
    )


def _link(source: str | Path, target: str | Path) -> None:
    """Large inputs are read-only here, so that an image needs no second copy."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _order_modules(roots: Roots, folder: Path) -> None:
    """Puts what the driver needs beside it, in the order to load."""
    own = sorted(folder.glob("*.ko")) if folder.is_dir() else []
    if not own:
        return
    modules = Modules(roots.guest)
    needs: list[str] = []
    for path in own:
        found = _DEPENDS.search(path.read_bytes())
        needs += [need for need in found[1].decode().split(",") if need] if found else []
    needed = modules.order(need for need in needs if need not in {p.stem for p in own})
    for name in needed:
        (folder / f"{name}.ko").write_bytes(modules.read(name))
    order = [*needed, *(path.stem for path in own)]
    (folder / "order").write_text("".join(f"{name}.ko\n" for name in order))


def _site_packages(build: Path) -> Path:
    """The guest's wheels, unpacked and compiled to bytecode."""
    target = cache_dir() / f"site-{key(identity(build), _REQUIREMENTS)}"
    if not target.is_dir():
        python = venv_python()
        with Stage("Python packages for the guest") as stage, fresh(target) as work:
            platforms = ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]
            run_logged(
                stage,
                [
                    *python,
                    *("-m", "pip", "install", "--no-deps", "--only-binary=:all:"),
                    *("--python-version", "3.13", "--progress-bar=off", "--no-compile"),
                    *(word for name in platforms for word in ("--platform", name)),
                    *("--target", str(work), "-r", str(_REQUIREMENTS)),
                ],
                log_dir() / "site.log",
                hint="packages are taken from the index that pip is configured with",
            )
            run_in_root(
                stage,
                build,
                ["sh", "-c", f"{_COMPILE_PYTHON} /site"],
                log_dir() / "site.log",
                write={work: "/site"},
                append=True,
            )
    prune("site-*", target)
    return target


def _native(roots: Roots) -> Path:
    """The driver, the runtime and its Python binding, compiled in the build root."""
    sources = [REPO / name for name in _NATIVE]
    script = GUEST_IMAGE / "build-native"
    target = cache_dir() / f"native-{key(identity(roots.build), script, *sources)}"
    if not target.is_dir():
        with Stage("driver and runtime") as stage:
            checkout = hashlib.sha256(str(REPO).encode()).hexdigest()[:8]
            work_tree = cache_dir() / f"native-tree-{checkout}"
            for name in _NATIVE:
                if (REPO / name).is_dir():
                    sync_tree(REPO / name, work_tree / name)
            with fresh(target) as work:
                work.mkdir()
                release = kernel_release(roots.build)
                run_in_root(
                    stage,
                    roots.build,
                    ["sh", "/script/build-native", "/tree", "/out", release],
                    log_dir() / "native.log",
                    read={script.parent: "/script"},
                    write={work_tree: "/tree", work: "/out"},
                )
    prune("native-????????????????", target)
    return target


def build_model_image(roots: Roots, model: Path) -> Path:
    """The model file alone: large, and never changed by an edit."""
    stat = model.stat()
    identity = f"{model.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    target = cache_dir() / f"model-{key(identity)}.erofs"
    if not target.is_file():
        with Stage("model image") as stage:
            if not model.is_file():
                raise StageError(f"no model file {model}")
            folder = target.with_suffix(".files")
            remove(folder)
            folder.mkdir()
            try:
                _link(model, folder / model.name)
                make_image(stage, roots.build, folder, target)
            finally:
                remove(folder)
    prune("model-*.erofs", target)
    return target
