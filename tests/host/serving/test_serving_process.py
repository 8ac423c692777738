# SPDX-License-Identifier: MIT
"""The server as a process: command line, signals, start and failure."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(Path(__file__).parent)]),
}


def command(model: object, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "vtpu.server", "--model", str(model), "--port", "0",
        "--runner", "fake_runner:FakeRunner", *options,
    ]  # fmt: skip


@contextmanager
def running(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server process and its port, ready to answer."""
    process = subprocess.Popen(
        command(model, *options), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                port = int(match[1])
                break
        else:
            pytest.fail("the server ended before it listened")
        while get(port, "/health")[0] != 200:
            assert process.poll() is None
        yield process, port
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def get(port: int, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST" if body else "GET", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_and_ends_cleanly_on_a_signal(model_path: Path, number: signal.Signals) -> None:
    with running(model_path, "--max-model-len", "50") as (process, port):
        body = json.dumps({"prompt": "Hello", "max_tokens": 3}).encode()
        status, answer = get(port, "/v1/completions", body)
        assert status == 200
        assert json.loads(answer)["model"] == model_path.stem
        (model,) = json.loads(get(port, "/v1/models")[1])["data"]
        assert model["max_model_len"] == 50
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_signal_ends_an_open_stream(model_path: Path) -> None:
    with running(model_path, "--num-blocks", "513") as (process, port):
        request = {"prompt": "x", "stream": True, "max_tokens": 8000, "ignore_eos": True}
        body = json.dumps(request).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            raw.sendall(head % len(body) + body)
            assert raw.recv(15) == b"HTTP/1.1 200 OK"
            process.send_signal(signal.SIGTERM)
            rest = b""
            while part := raw.recv(65536):
                rest += part
        assert b"shutting down" in rest and b"[DONE]" in rest
        assert process.wait(60) == 0


def failing(model: object, *options: str) -> str:
    done = subprocess.run(
        command(model, *options),
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_a_busy_port_is_named(model_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = failing(model_path, "--port", str(port))
    assert f"127.0.0.1:{port}" in message and "in use" in message


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path, model_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    assert str(missing) in failing(missing)
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"PK\x03\x04 this is a zip file")
    assert str(foreign) in failing(foreign)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model_path.read_bytes()[:100_000])
    assert str(cut) in failing(cut)


def test_a_runner_that_cannot_be_made_is_named(model_path: Path) -> None:
    message = failing(model_path, "--runner", "fake_runner:Absent")
    assert "Absent" in message
    message = failing(model_path, "--max-num-seqs", "33")
    assert "max_num_seqs is 33" in message and "32" in message


def test_bad_options_are_refused(model_path: Path) -> None:
    done = subprocess.run(
        command(model_path, "--num-blocks", "1"),
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 2 and "1 is less than 2" in done.stderr


def test_start_imports_nothing_heavy(model_path: Path) -> None:
    """What the emulated guest would pay for at ten times the price."""
    code = (
        "import sys, vtpu.server, vtpu.serving.api, vtpu.serving.frontend, uvicorn, "
        "vtpu.tokenizer, vtpu.gguf; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=True,
    )
    loaded = set(done.stdout.split())
    heavy = {
        "numpy", "pydantic", "jinja2", "huggingface_hub", "requests", "gguf",
        "starlette", "fastapi", "aiohttp", "prometheus_client",
    }  # fmt: skip
    assert loaded & heavy == set()
