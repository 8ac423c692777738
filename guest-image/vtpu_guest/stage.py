# SPDX-License-Identifier: MIT
"""Stages: what is being done, for how long, how far, and why it failed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

_TICK = 0.1
_PLAIN_INTERVAL = 15.0
_NO_NETWORK = re.compile(
    r"resolv(e|ing) |name resolution|[Nn]etwork is unreachable|[Cc]onnection (refused|timed out)"
    r"|connection broken by|(Could not|Unable to) connect|Cannot initiate the connection"
)
# pip's retries: long lines that do not say what was wanted, which its last line does.
_RETRY = re.compile(r"Retrying .*connection broken by '(?P<kind>\w+)")
_CAUSE = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|Connection refused|timed out"
)
_TELLING = re.compile(r"\berror\b|^E: |cannot|No space|not found|failed", re.IGNORECASE)
# What tools say last, after the reason.
_EMPTY = re.compile(r"mmdebstrap failed to run|build stopped|setup failed|Error 1$")
_COUNTER = re.compile(rb"\[(\d+)/(\d+)\]|(\d+)%")


class StageError(Exception):
    """A reason that a user can act on; the log has the rest."""

    def __init__(self, reason: str, log: Path | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.log = log
        self.shown = False


class Stage:
    """Shows one stage on stderr: a moving line on a terminal, else plain lines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._start = time.monotonic()
        self._last = 0.0
        self._tty = sys.stderr.isatty()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def _line(self, text: str, end: str) -> None:
        lead = "\r\x1b[K" if self._tty else ""
        sys.stderr.write(f"{lead}[{self.elapsed:6.1f}s] {self.name}{text}{end}")
        sys.stderr.flush()

    def __enter__(self) -> Stage:
        self._start = time.monotonic()
        self._line(" ...", "" if self._tty else "\n")
        self._last = time.monotonic()
        return self

    def progress(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= (_TICK if self._tty else _PLAIN_INTERVAL):
            self._last = now
            self._line(f" ... {text}".rstrip(), "" if self._tty else "\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._line(" done", "\n")
        elif isinstance(error, StageError):
            error.shown = True
            self._line(f" FAILED: {error.reason}", "\n")
            if error.log is not None:
                sys.stderr.write(f"          log: {error.log}\n")
        else:
            self._line(" stopped", "\n")


def counter_of(text: bytes, lines: int) -> str:
    """The last [n/m] or n% that a tool printed, else how many lines it printed."""
    matches = list(_COUNTER.finditer(text))
    if not matches:
        return f"{lines} lines" if lines else ""
    found = matches[-1]
    if found[3]:
        return f"{int(found[3])}%"
    return f"{int(found[1])}/{int(found[2])}"


def run_logged(
    stage: Stage,
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    append: bool = False,
    kill: Callable[[subprocess.Popen[bytes]], None] | None = None,
    hint: str = "",
) -> None:
    """Runs a command into a log and shows how far it is.

    The command has its own session, so that Ctrl-C reaches this process alone,
    which then ends the whole group; setpriv ends it if this process is killed.
    """
    with open(log, "ab" if append else "wb") as sink, open(log, "rb") as reader:
        reader.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            start_new_session=True,
        )
        lines, tail = 0, b""
        try:
            while True:
                try:
                    code = process.wait(timeout=_TICK)
                    break
                except subprocess.TimeoutExpired:
                    new = reader.read()
                    lines += new.count(b"\n")
                    tail = (tail + new)[-4096:]
                    stage.progress(counter_of(tail, lines))
        except BaseException:
            (kill or kill_group)(process)
            raise
    if code != 0:
        raise StageError(_reason(code, log) + (f"; {hint}" if hint else ""), log)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(code: int, log: Path) -> str:
    """The line of the log most likely to say why, with the status."""
    text = log.read_text(errors="replace").splitlines()
    telling = [line for line in text if _TELLING.search(line) and not _EMPTY.search(line)]
    last = (telling or text or ["no output"])[-1].strip()[:300]
    for line in text:
        if retry := _RETRY.search(line):
            cause = _CAUSE.search(line)
            return f"could not download: {last} ({cause[0] if cause else retry['kind']})"
        if _NO_NETWORK.search(line):
            return f"could not download: {line.strip()[:200]}"
    return f"exit status {code}: {last}"
