# SPDX-License-Identifier: MIT
"""Fuzzing of the device: builds the targets with clang, runs them, keeps what they find.

The targets and what they look for: qemu-device/fuzz/README.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import qemu, roots
from .cache import build_lock, cache_dir, fresh, key, log_dir, need_space, prune, remove
from .privileged import run_in_root
from .qemu import DEVICE
from .stage import Stage, StageError

HERE = DEVICE / "fuzz"
CORPUS = HERE / "corpus"
FINDINGS = HERE / "findings"
TARGETS = ("mmio", "ring", "walk", "program", "link", "state")
QEMU = "qemu"
_SOURCES = [DEVICE / name for name in ("core", "include", "fuzz/Makefile")]
# One input: what takes longer is a hang. Generous, for hosts that do other work.
_HANG_SECONDS = 60
_MEMORY_MB = 3072


@dataclass(frozen=True)
class Fuzzer:
    """A target that can be run on the host."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]

    @property
    def corpus(self) -> Path:
        return CORPUS / self.name


def build_core() -> list[Fuzzer]:
    """The targets on the machine alone."""
    root = roots.fuzz_root()
    tree = cache_dir() / f"fuzz-tree-{key(roots.identity(root))}"
    out = cache_dir() / f"fuzz-{key(tree.name, *_SOURCES, *sorted(HERE.glob('*.[ch]')))}"
    if not out.is_dir():
        with Stage("fuzz targets") as stage:
            need_space(cache_dir(), 300, "the fuzz targets")
            with fresh(out) as work:
                work.mkdir()
                run_in_root(
                    stage,
                    root,
                    [
                        "make",
                        f"-j{os.cpu_count() or 1}",
                        "-C",
                        "/device/fuzz",
                        "BUILD=/tree",
                        f"ROOT={root}",
                        f"TARGETS={' '.join(TARGETS)}",
                        "OUT=/out",
                        "install",
                    ],
                    log_dir() / "fuzz.log",
                    read={DEVICE: "/device"},
                    write={tree: "/tree", work: "/out"},
                )
        for old in cache_dir().glob("fuzz-tree-*"):
            if old != tree:
                remove(old)
    prune("fuzz-????????????????", out)
    environment = _environment(root)
    return [Fuzzer(name, (str(out / f"fuzz_{name}"),), environment) for name in TARGETS]


def build_qemu(hbm: Path) -> Fuzzer:
    """QEMU's generic fuzzer with the device, from the source tree of the emulator.

    hbm: what HBM holds at first.
    """
    root, build_root = roots.fuzz_root(), roots.build_root()
    emulator = qemu.build(build_root)
    source = qemu.tree_of(build_root) / "src"
    script = HERE / "build-qemu-fuzz"
    tree = cache_dir() / f"qemu-fuzz-tree-{key(roots.identity(root), script, source.parent.name)}"
    out = cache_dir() / f"qemu-fuzz-{key(tree.name, emulator.binary.parent.name)}"
    if not out.is_dir():
        with Stage("QEMU's fuzzer with the vTPU device") as stage:
            need_space(cache_dir(), 200 if tree.is_dir() else 3000, "QEMU's fuzzer")
            with fresh(out) as work:
                work.mkdir()
                run_in_root(
                    stage,
                    root,
                    ["sh", "/fuzz/build-qemu-fuzz", "/tree/src", "/build", "/out", str(root)],
                    log_dir() / "qemu-fuzz.log",
                    read={source: "/tree/src", HERE: "/fuzz"},
                    write={tree: "/build", work: "/out"},
                )
        for old in cache_dir().glob("qemu-fuzz-tree-*"):
            if old != tree:
                remove(old)
    prune("qemu-fuzz-????????????????", out)
    share = root / "usr/share"
    machine = (
        f"-machine q35 -nodefaults -L {share}/seabios -L {share}/qemu "
        f"-object memory-backend-file,id=hbm,mem-path={hbm},size=16M,share=off "
        "-device vtpu,hbm-memdev=hbm,x-stepped=on"
    )
    environment = _environment(root) | {"QEMU_FUZZ_ARGS": machine, "QEMU_FUZZ_OBJECTS": "vtpu*"}
    # QEMU keeps what its main loop has allocated: no leak of an input's.
    environment["ASAN_OPTIONS"] += ":detect_leaks=0"
    return Fuzzer(QEMU, (str(out / "qemu-fuzz-x86_64"), "--fuzz-target=generic-fuzz"), environment)


def build_all() -> list[Fuzzer]:
    """Every target; the one in QEMU takes as long as QEMU itself, once."""
    core = build_core()
    return [*core, build_qemu(Path(core[0].command[0]).with_name("hbm"))]


def _environment(root: Path) -> dict[str, str]:
    """Where the sanitisers find what names addresses: llvm-symbolizer in the root."""
    usr = root / "usr"
    script = cache_dir() / "llvm-symbolizer"
    script.write_text(
        f"#!/bin/sh\nexec '{usr}/lib64/ld-linux-x86-64.so.2' --library-path "
        f"'{usr}/lib/x86_64-linux-gnu:{usr}/lib/llvm-19/lib' "
        f"'{usr}/lib/llvm-19/bin/llvm-symbolizer' \"$@\"\n"
    )
    script.chmod(0o755)
    options = f"external_symbolizer_path={script}"
    return {"ASAN_OPTIONS": options, "UBSAN_OPTIONS": f"{options}:print_stacktrace=1"}


def run(fuzzer: Fuzzer, corpus: Path, log: Path, limit: Sequence[str]) -> list[Path]:
    """Runs a target until the limit, from `corpus`, which receives new inputs of interest,
    and from the tree's own; returns the inputs that broke something.
    """
    corpus.mkdir(parents=True, exist_ok=True)
    FINDINGS.mkdir(exist_ok=True)
    before = set(FINDINGS.iterdir())
    command = [
        *fuzzer.command,
        str(corpus),
        *([str(fuzzer.corpus)] if fuzzer.corpus.is_dir() else []),
        f"-timeout={_HANG_SECONDS}",
        f"-report_slow_units={_HANG_SECONDS}",
        f"-rss_limit_mb={_MEMORY_MB}",
        f"-artifact_prefix={FINDINGS}/{fuzzer.name}-",
        "-max_len=4096",
        "-len_control=30",
        "-reload=0",
        *limit,
    ]
    with open(log, "wb") as sink:
        done = subprocess.run(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **fuzzer.environment},
            check=False,
        )
    found = [
        path
        for path in sorted(set(FINDINGS.iterdir()) - before)
        if path.name.startswith(f"{fuzzer.name}-")
    ]
    if done.returncode and not found:
        raise StageError(f"fuzz target {fuzzer.name} did not run: status {done.returncode}", log)
    return found


def _fuzz(fuzzer: Fuzzer, seconds: int) -> tuple[list[Path], Path]:
    log = log_dir() / f"fuzz-{fuzzer.name}.log"
    corpus = cache_dir() / "fuzz-corpus" / fuzzer.name
    return run(fuzzer, corpus, log, [f"-max_total_time={seconds}"]), log


def _said(log: Path) -> str:
    """What a run says of itself in its last lines."""
    lines = log.read_text(errors="replace").splitlines()
    last = [line for line in lines if line.startswith("#") and " cov: " in line]
    return " ".join(last[-1].split()) if last else ""


def fuzz_all(seconds: int) -> int:
    """Runs every target for its part of the time, as many at once as there are processors."""
    with build_lock():
        fuzzers = build_all()
    workers = min(os.cpu_count() or 1, len(fuzzers))
    each = max(1, seconds * workers // len(fuzzers))
    found: list[Path] = []
    with ThreadPoolExecutor(workers) as pool:
        futures = {fuzzer.name: pool.submit(_fuzz, fuzzer, each) for fuzzer in fuzzers}
        for name, future in futures.items():
            inputs, log = future.result()
            found += inputs
            print(f"{name}: {len(inputs)} findings in {each} s; {_said(log)}", file=sys.stderr)
            for path in inputs:
                print(
                    f"  {path}\n  log: {log}\n  again: make fuzz-device REPLAY={path}",
                    file=sys.stderr,
                )
    return 1 if found else 0


def replay(path: Path) -> int:
    """Runs one input, whose name begins with its target's."""
    with build_lock():
        fuzzers = build_all()
    name = path.name.split("-")[0]
    if path.parent.parent == CORPUS:
        name = path.parent.name
    for fuzzer in fuzzers:
        if fuzzer.name == name:
            return subprocess.run(
                [*fuzzer.command, str(path)],
                env={**os.environ, **fuzzer.environment},
                check=False,
            ).returncode
    raise StageError(f"{path.name} names no fuzz target; there are {', '.join((*TARGETS, QEMU))}")
