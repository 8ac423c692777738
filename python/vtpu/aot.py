# SPDX-License-Identifier: MIT
"""Compiles a model ahead of time: `python3 -m vtpu.aot MODEL.gguf FOLDER`.

The folder is described in artifacts.py. Doing it again changes nothing as long as
the model and the compiler are the same. What was there stays valid until the new
files are complete.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vtpu import artifacts
from vtpu.artifacts import Artifacts, ArtifactsError, StepShape

if TYPE_CHECKING:
    from vtpu.models.llama import Llama

Progress = Callable[[str], None]

_HASH_CHUNK = 1 << 22


def build(
    model: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    shape: StepShape | None = None,
    progress: Progress = lambda line: None,
) -> Artifacts:
    """Makes a folder's files, or finds them made.

    progress: told a line at each stage.
    Raises GGUFError for a model that cannot be read or is not supported,
    CompileError when the step does not fit the device, OSError for a folder that
    cannot be written. A failure leaves the folder as it was, or without a manifest.
    """
    from vtpu.gguf import GGUFFile
    from vtpu.models.llama import Llama

    path, target = Path(model), Path(folder)
    llama = Llama(GGUFFile(path))
    wanted = shape or StepShape()
    if not wanted.context:
        wanted = replace(wanted, context=llama.config.context)
    compiler = compiler_key()
    try:
        found = artifacts.read_for(target, path, wanted)
    except ArtifactsError:
        pass
    else:
        if found.manifest["compiler"] == compiler and found.shape == wanted:
            progress("up to date")
            return found
    target.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    elf, metadata = _compile(llama, wanted)
    progress(f"compiled the step: {len(elf)} bytes, {time.monotonic() - started:.1f} s")
    with (
        _replacing(target / artifacts.EXECUTABLE) as executable,
        _replacing(target / artifacts.WEIGHTS) as weights,
    ):
        executable.write(elf)
        _pack(llama, metadata, weights)
        (target / artifacts.MANIFEST).unlink(missing_ok=True)
    progress(f"packed the weights: {metadata['weights']['bytes']} bytes")
    fields = {
        "model": {
            "file": path.name,
            "sha256": _sha256(path),
            "fingerprint": artifacts.fingerprint(path),
        },
        "compiler": compiler,
        "vocab_size": llama.config.vocab,
    }
    artifacts.write_manifest(target, fields, wanted)
    return artifacts.read(target)


def compiler_key() -> str:
    """Changes with whatever the files depend on but the model and the shape."""
    from vtpu_compiler.compile import compiler_digest

    here = Path(__file__).parent
    sources = [here / name for name in ("aot.py", "ops.py", "step.py", "tensor.py")]
    for folder in (here / "nn", here / "models"):
        sources += sorted(folder.rglob("*.py"))
    digest = hashlib.sha256(compiler_digest().encode())
    for source in sources:
        data = source.read_bytes()
        digest.update(f"{source.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _compile(model: Llama, shape: StepShape) -> tuple[bytes, dict[str, Any]]:
    from vtpu_compiler import compile_graph

    from vtpu.step import trace_step

    executable = compile_graph(trace_step(model, shape))
    return executable.elf, executable.metadata


def _pack(model: Llama, metadata: dict[str, Any], file: IO[bytes]) -> None:
    from vtpu_compiler import pack_weights

    pack_weights(metadata, model.weight, file)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when it is complete, or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the process's exit code; an error is one line on stderr."""
    from vtpu_compiler import CompileError

    from vtpu.gguf import GGUFError

    parser = argparse.ArgumentParser(
        prog="vtpu.aot", description="Compile a GGUF model for the virtual TPU."
    )
    default = StepShape()
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("folder", metavar="FOLDER", help="made if it does not exist")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens, help="a step")
    parser.add_argument("--max-seqs", type=int, default=default.max_seqs, help="a step")
    parser.add_argument("--block-size", type=int, default=default.block_size)
    parser.add_argument("--kv-dtype", choices=("f16", "bf16", "f32"), default=default.kv_dtype)
    options = parser.parse_args(arguments)
    shape = StepShape(
        max_tokens=options.max_tokens,
        max_seqs=options.max_seqs,
        block_size=options.block_size,
        kv_dtype=options.kv_dtype,
    )
    try:
        build(options.model, options.folder, shape, _to_stderr)
    except (GGUFError, CompileError, ArtifactsError) as error:
        print(f"vtpu.aot: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"vtpu.aot: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _to_stderr(line: str) -> None:
    print(f"vtpu.aot: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
