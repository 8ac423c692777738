# SPDX-License-Identifier: MIT
"""A running guest, for the commands and for tests.

    with Guest() as guest:
        print(guest.run(["uname", "-r"]).stdout)

Start and stop it from the same thread: the kernel ends QEMU when the thread
that started it ends.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from . import accel
from .backlog import widen
from .cache import log_dir
from .channels import Agent, ChannelError, Qmp
from .kernels import patience
from .link import GuestError, Link
from .machine import Images, Machine

_KEPT_LOGS = 20
FOLDER_PREFIX = "vtpu-run-"


class Guest(Link):
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
        self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
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
            agent.wait_ready(timeout * patience(), self.check_running)
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

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

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
                self._process.wait(timeout * patience())
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
        self.close_channels()
        self._process = None
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

    @property
    def folder(self) -> Path:
        """Where the run's sockets are, for who attaches to it."""
        return self._need_folder()

    def release_agent(self) -> None:
        """Lets others attach. The agent is then no longer this object's."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid


def _remove_stale_folders() -> None:
    """What a killed process could not remove: its folder has its number."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def _built_images() -> Images:
    """Builds what is missing; a test that asks for a guest gets a current one."""
    from .build import build

    return build()
