# SPDX-License-Identifier: MIT
"""make kmod-dev: every save of the driver's source goes into the running guest."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import attach, kernels, roots
from .cache import build_lock, source_files
from .driver import HEADERS, compile_driver, exchange
from .guest import Guest
from .link import GuestError
from .machine import Machine
from .stage import Stage, StageError
from .venv import venv_environment, venv_python

_LOOK_SECONDS = 0.2


def _say(text: str) -> None:
    print(f"vtpu: {text}", file=sys.stderr, flush=True)


_Stamps = dict[Path, tuple[int, int]]


def _stamps(source: Path) -> _Stamps:
    """What tells whether a file was saved."""
    stamps = {}
    for path in source_files(source, HEADERS):
        try:
            stat = path.stat()
        except FileNotFoundError:  # an editor that renames
            continue
        stamps[path] = (stat.st_mtime_ns, stat.st_size)
    return stamps


def _wait_for_save(source: Path, before: _Stamps, check: Callable[[], None]) -> None:
    while _stamps(source) == before:
        check()
        time.sleep(_LOOK_SECONDS)
    # Several files are often saved at once.
    while (now := _stamps(source)) != before:
        before = now
        time.sleep(_LOOK_SECONDS / 2)


@contextmanager
def running_or_booted(machine: Callable[[], Machine]) -> Iterator[Path]:
    """The folder of the newest running guest, or of one that lives as long as this."""
    if folders := attach.running():
        _say(f"using the guest of {folders[0]}")
        yield folders[0]
        return
    built = machine()
    _say("no guest is running (make shell starts one with a shell): booting one")
    with Guest(built) as guest:
        guest.release_agent()
        yield guest.folder


def _once(folder: Path, source: Path, test: str) -> bool:
    """Builds, exchanges, tests. Whether all of it went well; what did not is said."""
    start = time.monotonic()
    try:
        with build_lock():
            kernel = kernels.chosen(roots.build_root(), roots.guest_root())
            module = compile_driver(kernel, source)
        with Stage("into the guest"), attach.Attached(folder) as guest:
            done = exchange(guest, module, kernel)
    except (StageError, GuestError, TimeoutError) as error:
        if not getattr(error, "shown", False):
            _say(str(error))
        return False
    sys.stderr.write(done.messages)
    _say(f"the new driver is in after {time.monotonic() - start:.1f} s")
    if not test:
        return True
    command = [*venv_python(), "-m", "pytest", *shlex.split(test)]
    environment = {**venv_environment(), "VTPU_ATTACH": str(folder)}
    return subprocess.run(command, env=environment, check=False).returncode == 0


def develop(machine: Callable[[], Machine], source: Path, test: str, once: bool) -> int:
    """Exchanges the driver now and, unless once, after each save until Ctrl-C.

    machine makes what to boot when no guest is running; source is the folder of
    the driver; test is for pytest and runs in the guest after each exchange.
    """
    with running_or_booted(machine) as folder:
        while True:
            before = _stamps(source)
            good = _once(folder, source, test)
            if once:
                return 0 if good else 1
            _say(f"waiting for a change in {os.path.relpath(source)}, Ctrl-C ends it")
            _wait_for_save(source, before, lambda: attach.Attached(folder).check_running())
