# SPDX-License-Identifier: MIT
"""The host's Python tools, in an environment of their own in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from .cache import REPO, cache_dir, key, log_dir, need_space, prune
from .privileged import sudo
from .stage import Stage, StageError, run_logged

REQUIREMENTS = REPO / "requirements-dev.txt"
PYTHONPATH = [REPO / "python", REPO / "compiler", REPO / "guest-image"]

# What has to be on the host itself: a program to look for, and its package.
_HOST_PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "setpriv": "util-linux",
    "zstd": "zstd",
    "gcc": "gcc",
    "make": "make",
}
# A header to look for, and its package: gcc only recommends the C library's, and
# the runtime's binding is compiled for the host's Python too.
_HOST_HEADERS = {
    Path("/usr/include/stdio.h"): "libc6-dev",
    Path(sysconfig.get_path("include")) / "Python.h": "python3-dev",
}


def install_host_packages() -> None:
    """Installs what is missing, or says which command would."""
    missing = [package for program, package in _HOST_PROGRAMS.items() if not shutil.which(program)]
    missing += [package for header, package in _HOST_HEADERS.items() if not header.is_file()]
    probe = [sys.executable, "-c", "import venv, ensurepip"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        missing.append("python3-venv")
    _install(missing)


def install_host_programs(packages: Mapping[str, str]) -> None:
    """Program -> Debian package: installs those that one command alone needs."""
    _install([package for program, package in packages.items() if not shutil.which(program)])


def _install(missing: list[str]) -> None:
    if not missing:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    with Stage(f"install {' '.join(missing)}") as stage:
        if not shutil.which("apt-get"):
            raise StageError(f"these programs are missing here: {' '.join(missing)}")
        try:
            prefix = sudo()
        except StageError:
            raise StageError(f"run as root: {' '.join(command)}") from None
        log = log_dir() / "host-packages.log"
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        hint = "could not download; looked in the mirrors of /etc/apt"
        run_logged(stage, [*prefix, "apt-get", "update"], log, env=environment, hint=hint)
        run_logged(stage, [*prefix, *command], log, env=environment, append=True, hint=hint)


def venv_python() -> list[str]:
    """The interpreter that has the development requirements."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    target = cache_dir() / f"venv-{key(version, sys.base_prefix, REQUIREMENTS)}"
    if not (target / "complete").is_file():
        with Stage("host Python environment") as stage:
            need_space(cache_dir(), 1500, "the Python environment")
            # Built in place, since an environment knows its own path; the mark
            # says that it is whole.
            shutil.rmtree(target, ignore_errors=True)
            log = log_dir() / "venv.log"
            run_logged(stage, [sys.executable, "-m", "venv", str(target)], log)
            pip = [str(target / "bin/python"), "-m", "pip", "install", "--progress-bar=off"]
            run_logged(
                stage,
                [*pip, "-r", str(REQUIREMENTS)],
                log,
                append=True,
                hint="packages are taken from the index that pip is configured with",
            )
            (target / "complete").touch()
    prune("venv-????????????????", target)
    return [str(target / "bin/python")]


def venv_environment() -> dict[str, str]:
    path = os.pathsep.join(str(folder) for folder in PYTHONPATH)
    return {**os.environ, "PYTHONPATH": path}
