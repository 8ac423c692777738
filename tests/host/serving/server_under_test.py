# SPDX-License-Identifier: MIT
"""The real server in a thread, on the fake runner."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from fake_runner import FakeRunner
from vtpu.serving.api import API
from vtpu.serving.chat_template import ChatTemplate
from vtpu.serving.frontend import Frontend
from vtpu.serving.scheduler import SchedulerConfig
from vtpu.tokenizer import Tokenizer


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that another thread brings about."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


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
        assert self.runner.closed
