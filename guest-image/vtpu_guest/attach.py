# SPDX-License-Identifier: MIT
"""To a guest that another command runs, such as make shell.

    with Attached() as guest:
        print(guest.run(["uname", "-r"]).text)

The agent talks to one process at a time: one whose command holds it (tests,
serve) cannot be attached to, and who attaches lets go as soon as it can.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from .channels import Agent, ChannelError, Qmp
from .guest import FOLDER_PREFIX
from .link import GuestError, Link

_CONNECT_SECONDS = 10.0
_Channel = TypeVar("_Channel", Agent, Qmp)


def running() -> list[Path]:
    """The folders of this user's running guests, newest first."""
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if Path(f"/proc/{pid}").exists() and (folder / "qmp-attach").exists():
            found.append(folder)
    return sorted(found, key=lambda folder: folder.stat().st_mtime, reverse=True)


class Attached(Link):
    """A guest that another process runs, the newest one or that of a folder."""

    def __init__(self, folder: Path | None = None, *, agent: bool = True) -> None:
        """Without the agent, for what the monitor alone can do."""
        folders = [folder] if folder else running()
        if not folders:
            raise GuestError("no guest is running; start one with: make shell")
        self.folder = folders[0]
        self._with_agent = agent

    def __enter__(self) -> Attached:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close_channels()

    def connect(self) -> None:
        """Takes the channels; GuestError when another process has them."""
        try:
            self._qmp = _open(Qmp, self.folder / "qmp-attach")
            if not self._with_agent:
                return
            self._agent = _open(Agent, self.folder / "agent")
            self._agent.wait_ready(_CONNECT_SECONDS, self.check_running)
        except TimeoutError:
            self.close_channels()
            raise GuestError(
                "the guest is still booting, or another command talks to its agent"
            ) from None
        except BaseException:
            self.close_channels()
            raise

    def check_running(self) -> None:
        if not self.folder.exists():
            raise GuestError("the guest has ended")

    @property
    def pid(self) -> int:
        """QEMU's."""
        if self._qmp is None:
            raise GuestError("the guest is not attached to")
        return self._qmp.peer_pid


def _open(kind: Callable[[Path], _Channel], path: Path) -> _Channel:
    try:
        return kind(path)
    except (FileNotFoundError, ConnectionRefusedError, ChannelError):
        raise GuestError("the guest has ended") from None
