# SPDX-License-Identifier: MIT
"""What one can do with a running guest: commands and files in it, its monitor."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .channels import Agent, ChannelError, Qmp
from .kernels import patience

_CHUNK = 1 << 20
_POLL_FIRST, _POLL_MOST = 0.005, 0.1


class GuestError(Exception):
    """The guest did not do what was asked; log is its console's."""

    def __init__(self, reason: str, log: Path | None = None) -> None:
        super().__init__(reason + (f" (console: {log})" if log else ""))
        self.reason = reason
        self.log = log


@dataclass(frozen=True)
class Completed:
    """What a command in the guest did."""

    returncode: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")

    def check(self) -> Completed:
        if self.returncode != 0:
            tail = self.stderr.decode(errors="replace").strip()[-2000:]
            raise GuestError(f"the command exited with status {self.returncode}: {tail}")
        return self


class Link:
    """The two channels to a guest, whoever runs it. Of one thread at a time."""

    _qmp: Qmp | None = None
    _agent: Agent | None = None

    def check_running(self) -> None:
        """Raises with the reason when QEMU or the guest has ended."""
        raise NotImplementedError

    def close_channels(self) -> None:
        for channel in (self._agent, self._qmp):
            if channel is not None:
                channel.close()
        self._agent = self._qmp = None

    def qmp(self, command: str, **arguments: Any) -> Any:
        """A monitor command, e.g. qmp("qom-set", path=..., property=..., value=...)."""
        if self._qmp is None:
            raise GuestError("the guest is not running")
        return self._qmp.command(command, **arguments)

    def agent(self, command: str, timeout: float = 30, **arguments: Any) -> Any:
        if self._agent is None:
            raise GuestError("the guest's agent is not connected")
        try:
            return self._agent.command(command, timeout * patience(), **arguments)
        except (TimeoutError, ChannelError):
            self.check_running()
            raise

    def run(
        self,
        command: Sequence[str] | str,
        *,
        input: bytes | str = b"",
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Runs a command (a string goes to sh) and waits for it.

        After the timeout (of the default kernel; slow ones are given more) the command
        gets SIGTERM, two seconds later SIGKILL, and TimeoutError is raised.
        """
        timeout *= patience()
        words = ["sh", "-c", command] if isinstance(command, str) else list(command)
        data = input.encode() if isinstance(input, str) else input
        arguments: dict[str, Any] = {
            "path": "timeout",
            "arg": ["--kill-after=2", str(timeout), *words],
            "capture-output": True,
        }
        if data:
            arguments["input-data"] = base64.b64encode(data).decode()
        if env:
            arguments["arg"] = [
                *arguments["arg"][:2],
                "env",
                *(f"{k}={v}" for k, v in env.items()),
                *words,
            ]
        pid = self.agent("guest-exec", **arguments)["pid"]
        deadline = time.monotonic() + timeout + 30
        pause = _POLL_FIRST
        while not (status := self.agent("guest-exec-status", pid=pid))["exited"]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{words[0]} did not end in {timeout:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_MOST)
        code = status.get("exitcode", -status.get("signal", 0))
        if code == 124:
            raise TimeoutError(f"{' '.join(words)[:200]} did not end in {timeout:g} s")
        return Completed(
            code,
            base64.b64decode(status.get("out-data", "")),
            base64.b64decode(status.get("err-data", "")),
        )

    def put(self, source: Path | bytes, target: str, mode: int = 0o644) -> None:
        """Writes a file in the guest."""
        data = source if isinstance(source, bytes) else source.read_bytes()
        handle = self.agent("guest-file-open", path=target, mode="w")
        try:
            for start in range(0, len(data), _CHUNK):
                part = base64.b64encode(data[start : start + _CHUNK]).decode()
                self.agent("guest-file-write", handle=handle, buf_b64=part)
        finally:
            self.agent("guest-file-close", handle=handle)
        if mode != 0o644:
            self.run(["chmod", f"{mode:o}", target]).check()

    def get(self, source: str) -> bytes:
        """Reads a file of the guest."""
        handle = self.agent("guest-file-open", path=source, mode="r")
        parts = []
        try:
            while True:
                answer = self.agent("guest-file-read", handle=handle, count=_CHUNK)
                parts.append(base64.b64decode(answer["buf-b64"]))
                if answer["eof"]:
                    return b"".join(parts)
        finally:
            self.agent("guest-file-close", handle=handle)
