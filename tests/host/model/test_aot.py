# SPDX-License-Identifier: MIT
"""Ahead-of-time compilation, and the models it refuses; no device is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import tiny_llama
from vtpu.aot import build, main
from vtpu.artifacts import ArtifactsError, StepShape, read, read_for
from vtpu.gguf import GGUFError, GGUFFile
from vtpu.models.llama import Llama
from vtpu.step import trace_step


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_llama())
    return path


def test_makes_a_folder_once(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    made = build(model, folder)
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        "step.elf",
        "weights.bin",
    }
    assert made.shape.context == 128
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    lines: list[str] = []
    assert build(model, folder, progress=lines.append) == made
    assert lines == ["up to date"]
    assert times == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_the_same_input_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    build(model, tmp_path / "a")
    build(model, tmp_path / "b")
    for name in ("step.elf", "weights.bin", "manifest.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_another_model_or_shape_is_made_again(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "aot"
    build(model, folder)
    model.write_bytes(tiny_llama(seed=2))
    with pytest.raises(ArtifactsError, match="compiled from another file"):
        read_for(folder, model, StepShape())
    build(model, folder)
    with pytest.raises(ArtifactsError, match=r"compiled for .*block_size=16.* not"):
        read_for(folder, model, StepShape(block_size=32))
    build(model, folder, StepShape(block_size=32))
    read_for(folder, model, StepShape(block_size=32))


def test_a_failure_leaves_no_valid_folder_and_no_litter(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device", "weights.bin")

    folder = tmp_path / "aot"
    build(model, folder)
    before = sorted(path.name for path in folder.iterdir())
    monkeypatch.setattr("vtpu.aot._pack", fail)
    with pytest.raises(OSError, match="No space left"):
        build(model, folder, StepShape(block_size=32))
    assert sorted(path.name for path in folder.iterdir()) == before
    read_for(folder, model, StepShape())  # what was there is still valid


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("[]", "not a manifest"),
        ('{"format": 99}', "format 99, expected 1"),
        ('{"format": 1}', "not a manifest"),
    ],
)
def test_manifests_that_are_none(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ArtifactsError, match=message):
        read(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactsError, match=r"absent/manifest\.json: No such file"):
        read(tmp_path / "absent")


def test_command_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "aot"
    assert main([str(model), str(folder), "--kv-dtype", "f32"]) == 0
    assert json.loads((folder / "manifest.json").read_text())["shape"]["kv_dtype"] == "f32"
    assert "compiled the step" in capsys.readouterr().err
    model.write_bytes(model.read_bytes()[:5000])
    assert main([str(model), str(folder)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "tiny.gguf: truncated" in error


def test_vtpu_command(model: Path, tmp_path: Path) -> None:
    def vtpu(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vtpu", *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    done = vtpu("compile", str(model), str(tmp_path / "aot"))
    assert done.returncode == 0, done.stderr
    listing = vtpu("objdump", str(tmp_path / "aot" / "step.elf"))
    assert listing.returncode == 0, listing.stderr
    assert "MATMUL" in listing.stdout
    assert "model.layers.1.mlp.down_proj" in listing.stdout
    assert vtpu("--help").returncode == 0
    unknown = vtpu("frobnicate")
    assert unknown.returncode == 2
    assert "usage: vtpu COMMAND" in unknown.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gpt2"}, "architecture 'gpt2', supported: 'llama'"),
        ({"general.architecture": None}, "architecture None, supported: 'llama'"),
        ({"llama.block_count": None}, "the key llama.block_count is missing"),
        ({"llama.block_count": 0}, "llama.block_count is 0, not a positive"),
        ({"llama.block_count": 3}, r"the tensor blk\.2\.attn_norm\.weight is missing"),
        ({"llama.block_count": 1}, r"not Llama's, the first is blk\.1"),
        ({"llama.embedding_length": 96}, r"token_embd\.weight is .*, expected"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, supported"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn', supported"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon is -1.0, not a"),
    ],
)
def test_models_that_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(tiny_llama(changes=changes))
    with pytest.raises(GGUFError, match=message) as caught:
        Llama(GGUFFile(path))
    assert "odd.gguf" in str(caught.value)


def test_matrices_must_be_quantised(tmp_path: Path) -> None:
    path = tmp_path / "f16.gguf"
    path.write_bytes(tiny_llama(matrix_type=1))
    with pytest.raises(GGUFError, match="is f16, supported: q8_0, q4_0, q4_1"):
        Llama(GGUFFile(path))


def test_locations_lead_to_the_model(model: Path) -> None:
    """Every operation of the graph knows its module and its line in the model's file."""
    graph = trace_step(Llama(GGUFFile(model)), StepShape(context=128))
    source = Path("python/vtpu/models/llama.py")
    lines = (Path(__file__).resolve().parents[3] / source).read_text().splitlines()
    seen = set()
    for op in graph.ops:
        if op.name == "matmul":
            assert op.loc.file == "vtpu/models/llama.py"
            name = op.loc.module.rpartition(".")[2]
            seen.add(op.loc.module)
            assert name in lines[op.loc.line - 1], (name, lines[op.loc.line - 1])
    assert "model.layers.1.mlp.down_proj" in seen
    assert "model.layers.0.self_attn.q_proj" in seen
    assert "model.lm_head" in seen
    assert len(seen) == 2 * 7 + 1
