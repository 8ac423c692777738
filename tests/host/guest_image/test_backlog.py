# SPDX-License-Identifier: MIT
"""A listener of another process gets room for a crowd."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack

from vtpu_guest import backlog

_NARROW = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0), backlog=1)
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_a_crowd_connects_to_a_listener_that_accepts_nobody() -> None:
    command = [sys.executable, "-c", _NARROW]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as narrow,
        ExitStack() as crowd,
    ):
        assert narrow.stdin and narrow.stdout
        crowd.callback(narrow.stdin.close)
        port = int(narrow.stdout.readline())
        assert backlog.widen(narrow.pid, [port + 1]) == 0
        assert backlog.widen(narrow.pid, [port]) == 1
        for _ in range(40):
            client = socket.create_connection(("127.0.0.1", port), timeout=30)
            crowd.enter_context(client)


def test_a_process_that_has_ended_is_left_alone() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        assert backlog.widen(ended.pid, [1]) == 0
