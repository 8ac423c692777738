# SPDX-License-Identifier: MIT
"""The few steps that need root: building and entering Debian roots."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .stage import Stage, StageError, kill_group, run_logged

# A private mount and process namespace: the mounts and every process in it end
# with the first one, whatever ends it.
_NAMESPACE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]

_ENTER = r"""
set -e
root=$1; shift
mount --make-rprivate /
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    [ "$3" = rw ] || mount -o remount,bind,ro "$root$2"
    shift 3
done
shift
exec chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin HOME=/root LC_ALL=C.UTF-8 "$@"
"""


def sudo() -> list[str]:
    """The prefix that makes a command root's: nothing, or sudo without a password."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo"):
        # As the stages run it: a password typed on this terminal does not count there.
        test = subprocess.run(
            ["sudo", "-n", "true"], capture_output=True, check=False, start_new_session=True
        )
        if test.returncode == 0:
            return ["sudo", "-n"]
    goals = os.environ.get("VTPU_GOALS") or "run"
    raise StageError(f"root is needed, or sudo without a password; run: sudo make {goals}")


def run_privileged(command: Sequence[str]) -> None:
    done = subprocess.run(
        [*sudo(), *command],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise StageError(f"{command[0]}: {said[-1]}")


def run_isolated(
    stage: Stage, command: Sequence[str], log: Path, *, append: bool = False, hint: str = ""
) -> None:
    """Runs a command as root in its own namespaces."""
    prefix = sudo()

    def kill(process: subprocess.Popen[bytes]) -> None:
        if prefix:
            group = ["kill", "-KILL", "--", f"-{process.pid}"]
            subprocess.run([*prefix, *group], check=False, capture_output=True)
        kill_group(process)

    # After sudo, the death signal has to be set again: exec of a setuid
    # program clears it.
    again = ["setpriv", "--pdeathsig", "KILL"] if prefix else []
    run_logged(
        stage,
        [*prefix, *again, *_NAMESPACE, *command],
        log,
        append=append,
        kill=kill,
        hint=hint,
    )


def run_in_root(
    stage: Stage,
    root: Path,
    command: Sequence[str],
    log: Path,
    *,
    read: Mapping[Path, str] | None = None,
    write: Mapping[Path, str] | None = None,
    append: bool = False,
) -> None:
    """Runs a command in a Debian root, with folders of the host bound into it."""
    binds: list[str] = []
    for source, target in (read or {}).items():
        binds += [str(source), target, "ro"]
    for source, target in (write or {}).items():
        source.mkdir(parents=True, exist_ok=True)
        binds += [str(source), target, "rw"]
    inside = ["sh", "-c", _ENTER, "enter", str(root), *binds, "--", *command]
    run_isolated(stage, inside, log, append=append)
