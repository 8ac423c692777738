# SPDX-License-Identifier: MIT
"""A file of bf16 matrices, tied embedding included, on the device against the f32 reference."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from plans import Generation, generate
from tiny_model import BF16, VOCAB, tiny_llama

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reference"))

import llama_numpy


@pytest.mark.parametrize("chunk", [40, 7, 1])
def test_logits_are_the_references(machine: None, tmp_path: Path, chunk: int) -> None:
    """A prompt at once, in chunks and token by token: the last logits, in the same bits."""
    from vtpu.aot import build
    from vtpu.runner import ModelRunner

    path = tmp_path / "bf16.gguf"
    path.write_bytes(tiny_llama(matrix_type=BF16, embedding_type=BF16))
    build(path, tmp_path / "aot")
    draw = random.Random(3)
    prompt = [draw.randrange(VOCAB) for _ in range(40)]
    found = []
    for size in (chunk, 40):
        with ModelRunner(
            path, aot_dir=tmp_path / "aot", backend="core", num_blocks=8, logits=True
        ) as runner:
            generate(runner, [Generation("a", prompt, range(1, 8), chunk=size)], 1)
            found.append(np.array(runner.last_logits(1))[0])
    wanted = llama_numpy.load(path).logits(prompt)[-1]
    assert (found[0].view(np.uint32) == found[1].view(np.uint32)).all()
    # Activations have 8 significant bits at each of nine products: 0.6% was seen.
    assert np.sqrt(np.mean((found[0] - wanted) ** 2)) < 0.015 * wanted.std()
    assert found[0].argmax() == wanted.argmax()
