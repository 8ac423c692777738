# SPDX-License-Identifier: MIT
"""QEMU's two JSON sockets: its monitor (QMP) and the agent inside the guest."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ChannelError(Exception):
    """The other side answered with an error, or not at all."""


class JsonSocket:
    """Lines of JSON over a unix socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._pending = b""

    def close(self) -> None:
        self._socket.close()

    @property
    def peer_pid(self) -> int:
        """The process that listens on the socket."""
        size = struct.calcsize("3i")
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid: int = struct.unpack("3i", credentials)[0]
        return pid

    def send(self, message: dict[str, Any]) -> None:
        self._socket.settimeout(None)
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError as error:
            raise ChannelError(f"the connection was closed: {error.strerror}") from None

    def receive(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {timeout:g} s")
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError:
                raise TimeoutError(f"no answer within {timeout:g} s") from None
            except ConnectionError:
                data = b""
            if not data:
                raise ChannelError("the connection was closed")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        # The agent marks the start of a fresh conversation with 0xFF.
        message: dict[str, Any] = json.loads(line.lstrip(b"\xff"))
        return message


class Qmp:
    """QEMU's monitor. Events are kept in the order they come."""

    def __init__(self, path: Path) -> None:
        self._json = JsonSocket(path)
        self.events: list[dict[str, Any]] = []
        try:
            self._json.receive(timeout=10)
            self.command("qmp_capabilities")
        except BaseException:
            self._json.close()
            raise

    def close(self) -> None:
        self._json.close()

    @property
    def peer_pid(self) -> int:
        return self._json.peer_pid

    def command(self, name: str, timeout: float = 30, **arguments: Any) -> Any:
        named = {key.replace("_", "-"): value for key, value in arguments.items()}
        self._json.send({"execute": name, "arguments": named})
        while True:
            message = self._json.receive(timeout)
            if "event" in message:
                self.events.append(message)
            elif "error" in message:
                raise ChannelError(f"{name}: {message['error'].get('desc')}")
            else:
                return message["return"]

    def wait_event(self, name: str, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while True:
            for index, event in enumerate(self.events):
                if event["event"] == name:
                    return self.events.pop(index)
            message = self._json.receive(max(deadline - time.monotonic(), 0.001))
            if "event" in message:
                self.events.append(message)


class Agent:
    """The QEMU guest agent."""

    def __init__(self, path: Path) -> None:
        self._json = JsonSocket(path)

    def close(self) -> None:
        self._json.close()

    def wait_ready(self, timeout: float, check: Callable[[], None]) -> None:
        """Waits for the agent to start; check raises when there is no hope."""
        token = int.from_bytes(os.urandom(4), "big")
        self._json.send({"execute": "guest-sync", "arguments": {"id": token}})
        deadline = time.monotonic() + timeout
        while True:
            check()
            try:
                if self._json.receive(0.1).get("return") == token:
                    return
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the guest's agent did not start in {timeout:g} s"
                    ) from None

    def command(self, name: str, timeout: float = 30, **arguments: Any) -> Any:
        named = {key.replace("_", "-"): value for key, value in arguments.items()}
        self._json.send({"execute": name, "arguments": named})
        message = self._json.receive(timeout)
        if "error" in message:
            raise ChannelError(f"{name}: {message['error'].get('desc')}")
        return message["return"]

    def send_only(self, name: str, **arguments: Any) -> None:
        """For a command after which the guest is gone."""
        self._json.send({"execute": name, "arguments": arguments})
