# SPDX-License-Identifier: MIT
"""One guest that serves, for every end-to-end test."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest
from vtpu_guest import Guest, chat, checks
from vtpu_guest.machine import GUEST_HTTP_PORT
from vtpu_guest.model import fetch

_READY_TIMEOUT = 300
DEVICE = "/machine/peripheral/vtpu0"


@dataclass
class Served:
    """The running guest and its API."""

    guest: Guest
    port: int
    client: openai.OpenAI
    model: str

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, e.g. "vllm:num_requests_running"."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as page:
            text = page.read().decode()
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def settle(self, timeout: float = 60) -> None:
        """Waits until no request runs; fails when that does not come about."""
        deadline = time.monotonic() + timeout
        while self.metric("vllm:num_requests_running") or self.metric("vllm:kv_cache_usage_perc"):
            assert time.monotonic() < deadline, "requests or KV blocks remained"
            time.sleep(0.05)

    def inject(self, fault: str, value: object) -> None:
        """Sets a fault-injection property of the device through QEMU's monitor."""
        self.guest.qmp("qom-set", path=DEVICE, property=fault, value=value)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    port = checks.free_port()
    model = f"/opt/model/{fetch().name}"
    server = ["python3", "-m", "vtpu.server", "--model", model, "--host", "0.0.0.0"]
    guest = Guest(forward={port: GUEST_HTTP_PORT}, start=[*server, "--port", str(GUEST_HTTP_PORT)])
    try:
        guest.start(wait=False)
        deadline = time.monotonic() + _READY_TIMEOUT
        while not chat.is_healthy(port):
            guest.check_running()
            assert time.monotonic() < deadline, f"not ready; console: {guest.console_log}"
            time.sleep(0.05)
        guest.wait_agent()
        base = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=base, api_key="none", timeout=300, max_retries=0) as client:
            yield Served(guest, port, client, client.models.list().data[0].id)
        guest.shutdown()
    finally:
        guest.kill()


@pytest.fixture(autouse=True)
def nothing_left(served: Served) -> Iterator[None]:
    """Every test leaves no request, no KV block and a healthy server behind."""
    yield
    served.settle()
    assert chat.is_healthy(served.port)
