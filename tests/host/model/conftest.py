# SPDX-License-Identifier: MIT
"""The model, the texts it is tested on, the reference's answers and a runner."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vtpu.runner import ModelRunner

HERE = Path(__file__).resolve().parent
REFERENCE = HERE.parents[1] / "reference"
sys.path.insert(0, str(HERE))


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vtpu"


@pytest.fixture(scope="session")
def documents(model_path: Path) -> dict[str, list[int]]:
    """Every text of the corpus, as token ids."""
    from vtpu.gguf import GGUFFile
    from vtpu.tokenizer import Tokenizer

    tokenizer = Tokenizer(GGUFFile(model_path).metadata)
    texts = sorted((REFERENCE / "corpus").glob("*.txt"))
    return {path.stem: tokenizer.encode(path.read_text("utf-8")) for path in texts}


@pytest.fixture(scope="session")
def reference_logits(model_path: Path, documents: dict[str, list[int]]) -> dict[str, Any]:
    """The reference's logits [T, vocab] for every document.

    They take half a minute, so they are kept; the key covers all they depend on.
    """
    import numpy as np

    sys.path.insert(0, str(REFERENCE))
    import llama_numpy

    source = hashlib.sha256((REFERENCE / "llama_numpy.py").read_bytes())
    with model_path.open("rb") as file:
        source.update(hashlib.file_digest(file, "sha256").digest())
    folder = cache_dir() / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    model, logits = None, {}
    for name, tokens in documents.items():
        key = source.copy()
        key.update(repr(tokens).encode())
        kept = folder / f"{name}-{key.hexdigest()[:20]}.npy"
        if not kept.exists():
            model = model or llama_numpy.load(model_path)
            partial = kept.with_name(f"{kept.stem}.{os.getpid()}.part.npy")
            np.save(partial, model.logits(tokens))
            partial.replace(kept)
        logits[name] = np.load(kept, mmap_mode="r")
    return logits


@pytest.fixture(scope="session")
def aot_dir(model_path: Path) -> Path:
    """The compiled step and the packed weights."""
    from vtpu.aot import build

    folder = cache_dir() / "aot-test"
    build(model_path, folder)
    return folder


@pytest.fixture(scope="session")
def machine() -> None:
    """Builds the runtime with the machine in this process, if it is not built."""
    library = HERE.parents[2] / "libtpurt"
    build = Path(os.environ.get("VTPU_RUNTIME_BUILD", library / "build"))
    command = ["make", "-s", "-C", str(library), "host", f"OUT={build}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.exit(f"the runtime does not build:\n{done.stdout}{done.stderr}", 2)
    sys.path.insert(0, str(build))


@pytest.fixture(scope="session")
def runner(model_path: Path, aot_dir: Path, machine: None) -> Iterator[ModelRunner]:
    """A runner on the machine in this process."""
    from vtpu.runner import ModelRunner

    with ModelRunner(
        model_path, aot_dir=aot_dir, backend="core", num_blocks=512, logits=True
    ) as runner:
        yield runner
