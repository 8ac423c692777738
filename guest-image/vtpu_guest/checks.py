# SPDX-License-Identifier: MIT
"""What has to be true before a guest starts, each with a message that says what to do."""

from __future__ import annotations

import socket
from pathlib import Path

from .stage import StageError


def available_memory_mb() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


def need_memory(megabytes: int) -> None:
    have = available_memory_mb()
    if have < megabytes:
        raise StageError(f"the guest needs {megabytes} MB of memory, {have} MB are available")


def need_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise StageError(f"port {port} is not between 1 and 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise StageError(f"port 127.0.0.1:{port} cannot be used: {error.strerror}") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
