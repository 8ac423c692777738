# SPDX-License-Identifier: MIT
"""Fixtures: the real model file's tokeniser, and servers on free ports."""

from __future__ import annotations

import sys
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
