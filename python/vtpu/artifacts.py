# SPDX-License-Identifier: MIT
"""What compiling a model ahead of time leaves: a folder, and what it is valid for.

    manifest.json   written last: without it the folder is not used
    step.elf        the step program
    weights.bin     the weights in the device's layout

Read at every start of the server, so this module imports neither the compiler nor
numpy.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST, EXECUTABLE, WEIGHTS = "manifest.json", "step.elf", "weights.bin"

_SAMPLES, _SAMPLE_BYTES = 256, 4096


class ArtifactsError(ValueError):
    """The folder cannot be used for this model; the message says why."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is fixed when a step program is compiled.

    max_tokens: most tokens of one step, over all its sequences.
    max_seqs: most sequences in a step, and most rows sampled.
    block_size: positions a KV block.
    context: most positions of one sequence; 0 for the model's own.
    kv_dtype: element type of the cache: f16, bf16, f32.
    """

    max_tokens: int = 512
    max_seqs: int = 32
    block_size: int = 16
    context: int = 0
    kv_dtype: str = "f16"

    @property
    def max_blocks(self) -> int:
        """Entries a row of the block tables."""
        return -(-self.context // self.block_size)

    def serves(self, wanted: StepShape) -> bool:
        """Whether a program of this shape can do what one of `wanted` could."""
        return (
            self.max_tokens >= wanted.max_tokens
            and self.max_seqs >= wanted.max_seqs
            and self.block_size == wanted.block_size
            and self.context >= wanted.context
            and self.kv_dtype == wanted.kv_dtype
        )


@dataclass(frozen=True, slots=True)
class Artifacts:
    """A complete folder."""

    folder: Path
    shape: StepShape
    vocab_size: int
    manifest: dict[str, Any]

    @property
    def executable(self) -> Path:
        return self.folder / EXECUTABLE

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


def read(folder: Path) -> Artifacts:
    """Reads a folder's manifest and checks that the files are as it says.

    Raises ArtifactsError when the folder is absent, incomplete or of another format.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
        if manifest["format"] != FORMAT:
            raise ArtifactsError(f"{path}: format {manifest['format']}, expected {FORMAT}")
        for name, nbytes in manifest["files"].items():
            found = (folder / name).stat().st_size
            if found != nbytes:
                raise ArtifactsError(f"{folder / name}: {found} bytes, expected {nbytes}")
        shape = StepShape(**manifest["shape"])
        return Artifacts(folder, shape, int(manifest["vocab_size"]), manifest)
    except OSError as error:
        raise ArtifactsError(f"{error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ArtifactsError):
            raise
        raise ArtifactsError(f"{path}: not a manifest: {error!r}") from error


def read_for(folder: Path, model: Path, wanted: StepShape) -> Artifacts:
    """read(), and checks that the folder was made from this model for such steps."""
    artifacts = read(folder)
    if artifacts.manifest["model"]["fingerprint"] != fingerprint(model):
        raise ArtifactsError(f"{folder} was compiled from another file than {model}")
    if not artifacts.shape.serves(wanted):
        raise ArtifactsError(f"{folder} was compiled for {artifacts.shape}, not {wanted}")
    return artifacts


def write_manifest(folder: Path, fields: dict[str, Any], shape: StepShape) -> None:
    """The last step of making a folder: from here on it is valid."""
    sizes = {name: (folder / name).stat().st_size for name in (EXECUTABLE, WEIGHTS)}
    manifest = {"format": FORMAT, **fields, "shape": asdict(shape), "files": sizes}
    partial = folder / f"{MANIFEST}.{os.getpid()}.part"
    partial.write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    partial.replace(folder / MANIFEST)


def fingerprint(model: Path) -> str:
    """Tells model files apart in milliseconds: the size, and a MiB of samples.

    A full hash of a large model would be seconds of the emulated guest's start.
    Raises ArtifactsError when the file cannot be read.
    """
    try:
        with model.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(size.to_bytes(8, "little"))
            stride = max(size // _SAMPLES, _SAMPLE_BYTES)
            for at in range(0, size, stride):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, at))
            return digest.hexdigest()
    except OSError as error:
        raise ArtifactsError(f"{model}: {error.strerror}") from error
