# SPDX-License-Identifier: MIT
"""Guests with the driver's cases in them, watched while tests run: see watch.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import FOLDER
from watch import Expected

HERE = Path(__file__).resolve().parent
MODULES = ("vtpu_raw.py", "watch.py", "fault_injection.py", "cases.py")
FILES = (*MODULES, *(path.name for path in HERE.glob("*_cases.py")))
LOCKDEP = "/proc/lockdep_stats"
WATCHED: list[Any] = []
"""The guests that there are; tests use the last one, those before it stand by."""
UNPLUGGED: list[Any] = []
"""The guests where lockdep may be off."""


@contextmanager
def booted(attach: Path | None = None, **machine: Any) -> Iterator[Any]:
    """A guest that is watched; arguments as Guest's."""
    from vtpu_guest import Attached, Guest

    with Attached(attach) if attach else Guest(**machine) as running:
        with watched(running):
            yield running
        ends_well(running)


@contextmanager
def watched(guest: Any) -> Iterator[None]:
    """The cases are in it, and what its tests do beside is seen."""
    begin_to_watch(guest)
    WATCHED.append(guest)
    try:
        yield
    finally:
        WATCHED.remove(guest)


def begin_to_watch(guest: Any) -> None:
    put_cases(guest)
    guest.run(["python3", f"{FOLDER}/watch.py"]).check()


def put_cases(guest: Any) -> None:
    guest.run(["mkdir", "-p", FOLDER]).check()
    for name in FILES:
        guest.put(HERE / name, f"{FOLDER}/{name}")


def unexpected(guest: Any, expected: Expected) -> list[str]:
    """What happened in the guest since one looked last."""
    # -S: a Python that starts in half the time.
    look = ["python3", "-S", f"{FOLDER}/watch.py", json.dumps(asdict(expected))]
    found: list[str] = json.loads(guest.run(look).check().text)
    return found


def ends_well(guest: Any) -> None:
    """What takes long to look at, or is seen at the end alone."""
    if guest not in UNPLUGGED:
        lockdep_watches(guest)
    no_memory_leaks(guest)


def about_to_unplug(guest: Any) -> None:
    """Lockdep watches no more afterwards, see watch.PCIEHP: so this is for the last tests of a
    guest, and all before them have been watched."""
    if guest not in UNPLUGGED:
        lockdep_watches(guest)
        UNPLUGGED.append(guest)


def lockdep_watches(guest: Any) -> None:
    """On a kernel that has it. It gives up at its first report, whoever's that is."""
    stats = guest.run(f"test ! -e {LOCKDEP} || grep debug_locks: {LOCKDEP}").check().text
    assert not stats or int(stats.split()[1]), "lockdep is off"


def no_memory_leaks(guest: Any) -> None:
    """On a kernel that can tell, which has to be able to."""
    from vtpu_guest.kmemleak import memory_leaks

    found = memory_leaks(guest)
    assert not found, found


def run_cases(guest: Any, file: str, names: Sequence[str] = (), seconds: float = 600) -> dict:
    """Runs a file's cases in the guest; what became of each, by name."""
    done = guest.run(["python3", f"{FOLDER}/{file}", *names], timeout=seconds)
    found = {record["case"]: record for record in map(json.loads, done.text.splitlines())}
    for record in found.values():
        if "ok" not in record:
            tail = done.stderr.decode(errors="replace")[-2000:]
            record |= {"ok": False, "error": f"the run ended here: {tail}"}
    return found


def wait_for(guest: Any, condition: str, log: str = "/dev/null", seconds: int = 20) -> None:
    """Until a shell condition holds in the guest; the log tells why it did not."""
    guest.run(
        f"for i in $(seq $(({10 * seconds} * ${{VTPU_PATIENCE:-1}}))); do "
        f"{condition} && exit 0; sleep 0.1; done; cat {log} >&2; exit 1",
        timeout=4 * seconds,  # the loop's own end has the log to tell
    ).check()
