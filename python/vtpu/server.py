# SPDX-License-Identifier: MIT
"""The server process: `python3 -m vtpu.server --model MODEL.gguf`.

It listens at once and answers /health with 503 while the model loads. SIGTERM and
SIGINT end open requests with an error, close the device and exit with 0. A model
that cannot be loaded or a port that cannot be had is one line on stderr and exit
code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtpu.serving.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from vtpu.serving.chat_template import ChatTemplate
    from vtpu.serving.step_plan import ModelRunner
    from vtpu.tokenizer import Tokenizer

log = logging.getLogger("vtpu.server")

# Seconds after which a thread must hand over the interpreter to one that waits.
# With Python's own 5 ms, the engine thread would wait that long after a step before
# it could submit the next, whenever the event loop is busy sending tokens.
_SWITCH_INTERVAL = 0.0005

# Seconds that open connections and the step in flight get to end on shutdown.
_GRACE = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal; returns the process's exit code."""
    options = _parse(arguments)
    logging.basicConfig(
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        listener = _listen(options.host, options.port)
    except OSError as error:
        reason = error.strerror or error
        print(
            f"vtpu.server: cannot listen on {options.host}:{options.port}: {reason}",
            file=sys.stderr,
        )
        return 1
    return asyncio.run(_serve(options, listener))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vtpu.server", description="OpenAI-compatible server on the virtual TPU."
    )
    add = parser.add_argument
    add("--model", required=True, metavar="FILE", help="GGUF model file")
    add("--served-model-name", metavar="NAME", help="default: the file's stem")
    add("--host", default="127.0.0.1")
    add("--port", type=_at_least(0), default=8000, help="0 takes a free one")
    add("--max-num-seqs", type=_at_least(1), default=16, help="running requests")
    add(
        "--max-num-batched-tokens",
        type=_at_least(1),
        default=512,
        help="token budget of a step",
    )
    add("--max-model-len", type=_at_least(1), default=8192, help="tokens a request")
    add("--block-size", type=_at_least(1), default=16, help="tokens a KV block")
    add("--num-blocks", type=_at_least(2), help="KV blocks; default: the runner's")
    add(
        "--max-waiting",
        type=_at_least(1),
        default=256,
        help="queued requests before 429",
    )
    add(
        "--max-body-bytes",
        type=_at_least(1),
        default=4 << 20,
        help="request body before 413",
    )
    add("--backend", help="runtime back end; default: the runner's")
    add(
        "--runner",
        default="vtpu.runner:ModelRunner",
        metavar="MODULE:CLASS",
        help="another model runner (default: %(default)s)",
    )
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser.parse_args(arguments)


def _at_least(low: int) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is less than {low}")
        return value

    parse.__name__ = "integer"  # argparse names it in its error message.
    return parse


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Binding comes first, so that a busy port costs no time."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


@dataclass(slots=True)
class _TextModel:
    tokenizer: Tokenizer
    template: ChatTemplate | None


def _load_text(path: str) -> _TextModel:
    # Imported here, on the helper thread: /health must not wait for them.
    from vtpu.gguf import GGUFFile
    from vtpu.serving.chat_template import ChatTemplate
    from vtpu.tokenizer import Tokenizer

    tokenizer = Tokenizer(GGUFFile(path).metadata)
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.bos, tokenizer.eos)
    return _TextModel(tokenizer, template)


def _make_runner(options: argparse.Namespace) -> ModelRunner:
    module, _, name = options.runner.partition(":")
    make = getattr(importlib.import_module(module), name)
    wanted = {
        "num_blocks": options.num_blocks,
        "block_size": options.block_size,
        "max_num_seqs": options.max_num_seqs,
        "backend": options.backend,
    }
    given = {key: value for key, value in wanted.items() if value is not None}
    runner: ModelRunner = make(options.model, **given)
    return runner


async def _serve(options: argparse.Namespace, listener: socket.socket) -> int:
    import uvicorn

    from vtpu.serving.api import API
    from vtpu.serving.frontend import Frontend

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            # Its own handlers would raise the signal again after the shutdown.
            yield

    failure: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failure.append(error)
        stop()

    def stop() -> None:
        frontend.close()
        server.should_exit = True

    frontend = Frontend(
        options.served_model_name or Path(options.model).stem,
        lambda: _load_text(options.model),
        lambda: _make_runner(options),
        SchedulerConfig(options.max_num_seqs, options.max_num_batched_tokens),
        fail,
        options.max_model_len,
        options.max_waiting,
    )
    config = uvicorn.Config(
        API(frontend, options.max_body_bytes).app,
        loop="asyncio",
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE,
    )
    server = Server(config)
    loop = asyncio.get_running_loop()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d", host, port)
    loading = asyncio.create_task(_load(frontend))
    await server.serve([listener])
    frontend.close()
    loading.cancel()
    if not await asyncio.to_thread(frontend.engine.join, _GRACE):
        log.warning("the step in flight did not end in %d s", _GRACE)
    if failure:
        error = failure[0]
        print(
            f"vtpu.server: cannot load {options.model}: {_describe(error)}",
            file=sys.stderr,
        )
        return 1
    return 0


async def _load(frontend: Any) -> None:
    started = time.monotonic()
    # A vocabulary is 100,000 objects that all stay: looking for garbage among them
    # while they are made, or ever after, is time for nothing.
    gc.disable()
    await frontend.load()
    gc.freeze()
    gc.enable()
    log.info("tokeniser ready after %.1f s", time.monotonic() - started)


def _describe(error: BaseException) -> str:
    """ValueError's messages stand for themselves; others need their type."""
    if isinstance(error, ValueError):
        return str(error)
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
