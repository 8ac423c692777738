# SPDX-License-Identifier: MIT
"""The leak check: what it takes for an answer, and what it does not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vtpu_guest import GuestError, kmemleak
from vtpu_guest.link import Completed


class Here:
    """A guest whose commands run here, and wait for nothing."""

    def __init__(self, folder: Path) -> None:
        (folder / "sleep").symlink_to("/bin/true")
        self._path = f"{folder}:{os.environ['PATH']}"

    def run(self, command: list[str], timeout: float) -> Completed:
        done = subprocess.run(command, capture_output=True, env={"PATH": self._path})
        return Completed(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def guest(tmp_path: Path) -> Any:
    return Here(tmp_path)


def at(monkeypatch: pytest.MonkeyPatch, path: object) -> None:
    look = kmemleak._LOOK.replace(kmemleak.FILE, str(path))
    monkeypatch.setattr(kmemleak, "_LOOK", look)


def test_what_is_found_is_told_once(
    guest: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kmemleak"  # an ordinary one holds what was written last
    file.touch()
    at(monkeypatch, file)
    assert kmemleak.memory_leaks(guest) == "scan\n"
    assert file.read_text() == "clear\n"


def test_a_scan_that_is_refused_is_no_good_news(
    guest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, "/dev/full")  # takes no writes
    with pytest.raises(GuestError, match="kmemleak is off"):
        kmemleak.memory_leaks(guest)


def test_only_a_kernel_that_never_could_may_be_without(
    guest: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at(monkeypatch, tmp_path / "absent")
    monkeypatch.setenv("VTPU_KERNEL", "default")
    assert kmemleak.memory_leaks(guest) == ""
    monkeypatch.setenv("VTPU_KERNEL", "debug")
    with pytest.raises(GuestError, match="there is no kmemleak"):
        kmemleak.memory_leaks(guest)
