# SPDX-License-Identifier: MIT
"""A running guest, for the commands and for tests.

    with Guest() as guest:
        print(guest.run(["uname", "-r"]).stdout)

Start and stop it from the same thread: the kernel ends QEMU when the thread
that started it ends.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from . import accel
from .backlog import widen
from .cache import log_dir
from .channels import Agent, ChannelError, Qmp
from .machine import Images, Machine

_CHUNK = 1 << 20
_KEPT_LOGS = 20
_PREFIX = "vtpu-run-"
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


class Guest:
    """A QEMU process with the guest in it, and the ways to talk to it."""

    def __init__(self, machine: Machine | None = None, **changes: Any) -> None:
        """The default machine of the built images, or the one given; changes
        are fields of Machine."""
        if machine is None:
            machine = Machine(images=_built_images(), accelerator=accel.choose())
        self.machine = replace(machine, **changes)
        self.console_log = log_dir() / f"console-{os.getpid()}-{time.time_ns() // 1_000_000}.log"
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._qmp: Qmp | None = None
        self._agent: Agent | None = None

    # Life

    def __enter__(self) -> Guest:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.shutdown()
        else:
            self.kill()

    def start(self, wait: bool = True, timeout: float = 120) -> None:
        """Starts QEMU, and waits for the agent unless told not to."""
        _remove_stale_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        try:
            self._launch()
            if wait:
                self.wait_agent(timeout)
        except BaseException:
            self.kill()
            raise

    def _launch(self) -> None:
        folder = self._need_folder()
        for name in ("console.log", "guest.log"):
            (folder / name).touch()
        terminal = self.machine.terminal
        with open(folder / "qemu.log", "wb") as log:
            self._process = subprocess.Popen(
                # The death signal ends QEMU even when this process is killed.
                ["setpriv", "--pdeathsig", "KILL", *self.machine.command(folder)],
                stdin=None if terminal else subprocess.DEVNULL,
                stdout=None if terminal else log,
                stderr=log,
                # Ctrl-C is for this process alone, which ends QEMU in order; a
                # guest's terminal needs the foreground and so stays in it.
                start_new_session=not terminal,
            )
        deadline = time.monotonic() + 20
        while self._qmp is None:
            self.check_running()
            try:
                self._qmp = Qmp(folder / "qmp")
            except (FileNotFoundError, ConnectionRefusedError, ChannelError):
                # Not there yet, or gone because QEMU is about to say why.
                if time.monotonic() > deadline:
                    raise GuestError("QEMU did not open its monitor", self.console_log) from None
                time.sleep(0.01)
        if self.machine.forward:
            widen(self._process.pid, self.machine.forward)

    def wait_agent(self, timeout: float = 120) -> None:
        agent = Agent(self._need_folder() / "agent")
        try:
            agent.wait_ready(timeout, self.check_running)
        except (TimeoutError, ChannelError) as error:
            agent.close()
            self.check_running()
            raise GuestError(str(error), self.console_log) from None
        self._agent = agent

    def check_running(self) -> None:
        """Raises with the reason when QEMU or the guest has ended."""
        if self._process is None:
            raise GuestError("the guest is not running")
        code = self._process.poll()
        if code is not None:
            reason = self.failure() or f"QEMU exited with status {code}"
            self._save_logs()
            raise GuestError(reason, self.console_log)

    def failure(self) -> str | None:
        """What QEMU or init said went wrong, if anything."""
        folder = self._need_folder()
        for line in (folder / "qemu.log").read_text(errors="replace").splitlines():
            if line.strip() and "warning:" not in line:
                return f"QEMU: {line.split('.bin: ', 1)[-1]}"
        for line in self.console().splitlines():
            if line.startswith("vtpu-init: error: "):
                return f"guest: {line.removeprefix('vtpu-init: error: ')}"
            if line.startswith("vtpu-init: ") and re.search(r"command (exited|killed)", line):
                return f"guest: the {line.split(' ', 2)[2]}"
            if "Kernel panic" in line:
                return f"guest: {line}"
        return None

    def console(self) -> str:
        """What the kernel and init printed so far."""
        return (self._need_folder() / "console.log").read_text(errors="replace")

    def host_log(self) -> Path:
        """What QEMU says, trace events that are switched on among it."""
        return self._need_folder() / "qemu.log"

    def output(self) -> str:
        """What the started command printed so far."""
        return (self._need_folder() / "guest.log").read_text(errors="replace")

    def wait_exit(self, timeout: float | None = None) -> int:
        """Waits for the guest to power itself off."""
        assert self._process is not None
        code = self._process.wait(timeout)
        self._clean()
        return code

    def shutdown(self, timeout: float = 20) -> None:
        """Powers the guest off in order; kills it when that takes too long."""
        if self._process is None:
            return
        try:
            if self._agent is not None and self._process.poll() is None:
                self._agent.send_only("guest-shutdown", mode="powerdown")
                self._process.wait(timeout)
        except (subprocess.TimeoutExpired, ChannelError):
            pass
        self.kill()

    def kill(self) -> None:
        """Ends QEMU at once. The images are read-only: nothing is lost."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._clean()

    def _clean(self) -> None:
        for channel in (self._agent, self._qmp):
            if channel is not None:
                channel.close()
        self._agent = self._qmp = self._process = None
        if self._folder is not None:
            self._save_logs()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _save_logs(self) -> None:
        """The run's folder goes with the run; its logs stay, the newest few."""
        folder = self._need_folder()
        with open(self.console_log, "wb") as sink:
            for name in ("qemu.log", "console.log", "guest.log"):
                path = folder / name
                if path.is_file() and path.stat().st_size:
                    sink.write(f"==> {name} <==\n".encode() + path.read_bytes() + b"\n")
        for old in sorted(log_dir().glob("console-*.log"), key=os.path.getmtime)[:-_KEPT_LOGS]:
            old.unlink(missing_ok=True)

    def _need_folder(self) -> Path:
        if self._folder is None:
            raise GuestError("the guest is not running")
        return self._folder

    # Use

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def qmp(self, command: str, **arguments: Any) -> Any:
        """A monitor command, e.g. qmp("qom-set", path=..., property=..., value=...)."""
        if self._qmp is None:
            raise GuestError("the guest is not running")
        return self._qmp.command(command, **arguments)

    def agent(self, command: str, timeout: float = 30, **arguments: Any) -> Any:
        if self._agent is None:
            raise GuestError("the guest's agent is not connected")
        try:
            return self._agent.command(command, timeout, **arguments)
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

        After the timeout the command gets SIGTERM, two seconds later SIGKILL,
        and TimeoutError is raised.
        """
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


def _remove_stale_folders() -> None:
    """What a killed process could not remove: its folder has its number."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def _built_images() -> Images:
    """Builds what is missing; a test that asks for a guest gets a current one."""
    from .build import build

    return build()
