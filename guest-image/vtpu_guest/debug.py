# SPDX-License-Identifier: MIT
"""make debug: gdb on a running guest's kernel and driver, or on its QEMU."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path

from .attach import Attached
from .cache import REPO, build_lock, cache_dir
from .link import GuestError
from .symbols import parse_kallsyms, placed, symbol_elf
from .venv import install_host_programs

_SECTIONS = """
cd /sys/module/vtpu/sections 2>/dev/null || exit 0
for name in .[!.]* *; do [ -f "$name" ] && echo "$name:$(cat "$name")"; done
"""
_BUILD_ID = "/sys/module/vtpu/notes/.note.gnu.build-id"
# Freed after initialisation, or not a part of the program.
_NOT_LOADED = (".init", ".discard", ".modinfo", ".symtab", ".strtab")


def debug(folder: Path, what: str, commands: str, timeout: float | None = None) -> int:
    """gdb on this terminal, or with the commands (separated by semicolons) in batch mode.

    The folder is that of the guest's run. The guest stands still while gdb has it, and
    goes on when gdb ends: after timeout seconds at the latest, by TimeoutExpired.
    """
    with build_lock():
        install_host_programs({"gdb": "gdb"})
    with tempfile.TemporaryDirectory() as scratch:
        if what == "qemu":
            with Attached(folder, agent=False) as guest:
                script = _qemu_script(guest.pid)
            return _gdb(script, commands, Path(scratch), timeout)
        with Attached(folder) as guest:
            script = _kernel_script(guest, Path(scratch))
        # The agent is free again: nothing waits for a guest that stands still.
        with Attached(folder, agent=False) as guest:
            socket = Path(scratch) / "gdb"
            _monitor(guest, f"gdbserver unix:{socket},server=on,wait=off")
            try:
                return _gdb([*script, f"target remote {socket}"], commands, Path(scratch), timeout)
            finally:
                _monitor(guest, "gdbserver none")


def _monitor(guest: Attached, line: str) -> None:
    said = guest.qmp("human-monitor-command", command_line=line).strip()
    if "rror" in said or "ailed" in said:
        raise GuestError(f"QEMU: {said}")


def _gdb(script: list[str], commands: str, scratch: Path, timeout: float | None) -> int:
    path = scratch / "commands.gdb"
    path.write_text("\n".join(["set confirm off", *script]) + "\n")
    words = ["gdb", "-q", "-nx", "-x", str(path)]
    if commands:
        words.insert(1, "-batch")
        for command in commands.split(";"):
            words += ["-ex", command.strip()]
    return subprocess.run(words, check=False, timeout=timeout).returncode


def _kernel_script(guest: Attached, scratch: Path) -> list[str]:
    symbols = scratch / "kernel"
    # More than the agent hands over as a command's output.
    guest.run("cat /proc/kallsyms >/run/vtpu-kallsyms").check()
    symbols.write_bytes(symbol_elf(parse_kallsyms(guest.get("/run/vtpu-kallsyms").decode())))
    script = ["set architecture i386:x86-64", f"symbol-file {symbols}"]
    script.append(f"source {Path(__file__).with_name('gdb_orc.py')}")
    sections = dict(
        line.split(":", 1) for line in guest.run(_SECTIONS).text.splitlines() if ":" in line
    )
    if not sections:
        return [*script, "echo The driver is not loaded: only the kernel's names are known.\\n"]
    module = scratch / "vtpu.ko"
    places = {
        name: int(address, 0)
        for name, address in sections.items()
        if not name.startswith(_NOT_LOADED)
    }
    module.write_bytes(placed(_module_with(guest.get(_BUILD_ID)).read_bytes(), places))
    script.append(f"add-symbol-file {module}")
    # Where the compiler found the sources.
    script.append(f"set substitute-path /tree {REPO}")
    return script


def _module_with(build_id: bytes) -> Path:
    """The compiled driver with debug information that the guest has loaded."""
    for path in cache_dir().glob("driver-tree-*/kmod/vtpu.ko"):
        if build_id in path.read_bytes():
            return path
    raise GuestError(
        "the guest's driver is of an older build, its debug information is gone; "
        "make kmod-dev puts in the current one"
    )


def _qemu_script(pid: int) -> list[str]:
    """QEMU runs through the build root's loader, so gdb is told what lies where."""
    script = ["set auto-load safe-path /", "handle SIGUSR1 nostop noprint pass", f"attach {pid}"]
    bases: dict[str, str] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) < 6 or not words[5].startswith("/"):
            continue
        base = bases.setdefault(words[5], words[0].split("-")[0])
        if "x" in words[1]:
            script.append(f"add-symbol-file {shlex.quote(words[5])} -o 0x{base}")
    script.append(f"set substitute-path ../src/hw/misc/vtpu/core {REPO}/qemu-device/core")
    script.append(f"set substitute-path ../src/hw/misc/vtpu {REPO}/qemu-device/qemu")
    return script
