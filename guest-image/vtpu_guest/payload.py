# SPDX-License-Identifier: MIT
"""What changes often: the driver, the runtime, the Python code, the compiled model.

A small image of its own, mounted at /opt/vtpu, so that an edit costs seconds.
Parts that do not exist in the checkout are left out.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from .cache import GUEST_IMAGE, REPO, cache_dir, fresh, key, log_dir, prune, remove, sync_tree
from .kernel import Modules, make_image
from .kernels import Kernel, patience
from .privileged import run_in_root
from .roots import identity
from .stage import Stage, StageError, run_logged
from .venv import venv_python

_REQUIREMENTS = GUEST_IMAGE / "requirements-guest.txt"
_PYTHON = [REPO / "python/vtpu", REPO / "compiler/vtpu_compiler"]
_DRIVER = ["kmod", "qemu-device/include"]
_NATIVE = [
    "libtpurt",
    "kmod/include",
    "qemu-device/include",
    "qemu-device/core",
    "python/vtpu/runtime",
]
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


def build(root: Path, kernel: Kernel, compiled: Path | None) -> Path:
    site = _site_packages(root)
    native = _native(root)
    driver = _driver(kernel)
    name = compiled.name if compiled else "none"
    environment = f"{_ENVIRONMENT}VTPU_PATIENCE={patience()}\n"
    recipe = [site.name, native.name, driver.name, name, kernel.identity, environment]
    target = cache_dir() / f"payload-{key(*recipe, *_PYTHON)}.erofs"
    if not target.is_file():
        with Stage("payload image") as stage:
            folder = target.with_suffix(".files")
            remove(folder)
            try:
                shutil.copytree(native, folder, symlinks=True)
                shutil.copytree(driver, folder / "modules")
                _order_modules(kernel, folder / "modules")
                _collect(stage, root, folder, site, compiled)
                (folder / "environment").write_text(environment)
                make_image(stage, root, folder, target)
            finally:
                remove(folder)
    prune("payload-*.erofs", target)
    return target


def _collect(stage: Stage, root: Path, folder: Path, site: Path, compiled: Path | None) -> None:
    shutil.copytree(site, folder / "site", copy_function=_link)
    for tree in _PYTHON:
        if tree.is_dir():
            sync_tree(tree, folder / "python" / tree.name)
    (folder / "python").mkdir(exist_ok=True)
    if compiled:
        shutil.copytree(compiled, folder / "aot", copy_function=_link)
    run_in_root(
        stage,
        root,
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


def _order_modules(kernel: Kernel, folder: Path) -> None:
    """Puts what the driver needs beside it, in the order to load."""
    own = sorted(folder.glob("*.ko"))
    modules = Modules(kernel)
    needed = needed_modules(own, modules)
    for name in needed:
        (folder / f"{name}.ko").write_bytes(modules.read(name))
    order = [*needed, *(path.stem for path in own)]
    (folder / "order").write_text("".join(f"{name}.ko\n" for name in order))


def needed_modules(own: Sequence[Path], modules: Modules) -> list[str]:
    """The kernel's modules that ours need, in the order to load."""
    needs: list[str] = []
    for path in own:
        found = _DEPENDS.search(path.read_bytes())
        needs += [need for need in found[1].decode().split(",") if need] if found else []
    return modules.order(need for need in needs if need not in {p.stem for p in own})


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


def _driver(kernel: Kernel) -> Path:
    """The driver, compiled for a kernel by that kernel's own compiler."""
    script = GUEST_IMAGE / "build-driver"
    sources = [REPO / name for name in _DRIVER]
    made_from = [kernel.identity, identity(kernel.root)]
    target = cache_dir() / f"driver-{key(*made_from, script, *sources)}"
    if not target.is_dir():
        with Stage("driver") as stage, fresh(target) as work:
            work.mkdir()
            tree = _work_tree(f"driver-tree-{key(*made_from)}", _DRIVER)
            read = {script.parent: "/script"}
            headers = f"/lib/modules/{kernel.release}/build"
            if kernel.headers:
                read[kernel.headers] = headers = "/headers"
            run_in_root(
                stage,
                kernel.root,
                ["sh", "/script/build-driver", headers, "/tree", "/out"],
                log_dir() / "driver.log",
                read=read,
                write={tree: "/tree", work: "/out"},
            )
    prune("driver-????????????????", target)
    return target


def _native(root: Path) -> Path:
    """The runtime and its Python binding, compiled in the build root."""
    script = GUEST_IMAGE / "build-native"
    sources = [REPO / name for name in _NATIVE]
    target = cache_dir() / f"native-{key(identity(root), script, *sources)}"
    if not target.is_dir():
        with Stage("runtime") as stage, fresh(target) as work:
            work.mkdir()
            run_in_root(
                stage,
                root,
                ["sh", "/script/build-native", "/tree", "/out"],
                log_dir() / "native.log",
                read={script.parent: "/script"},
                write={_work_tree("native-tree", _NATIVE): "/tree", work: "/out"},
            )
    prune("native-????????????????", target)
    return target


def _work_tree(name: str, sources: list[str]) -> Path:
    """A copy of the checkout's sources, where objects are kept for the next edit."""
    checkout = hashlib.sha256(str(REPO).encode()).hexdigest()[:8]
    tree = cache_dir() / f"{name}-{checkout}"
    for source in sources:
        if (REPO / source).is_dir():
            sync_tree(REPO / source, tree / source)
    return tree


def build_model_image(root: Path, model: Path) -> Path:
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
                make_image(stage, root, folder, target)
            finally:
                remove(folder)
    prune("model-*.erofs", target)
    return target
