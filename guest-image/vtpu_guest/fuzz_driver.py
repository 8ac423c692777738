# SPDX-License-Identifier: MIT
"""Fuzzing of the driver: vtpu-fuzz in a guest, its inputs and the kernel's words outside.

What runs in the guest and the form of an input: kmod/fuzz/README.md.
"""

from __future__ import annotations

import hashlib
import re
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import roots
from .cache import REPO, build_lock, cache_dir, fresh, key, log_dir, prune
from .guest import Guest
from .kernels import chosen_name
from .kmemleak import memory_leaks
from .link import GuestError
from .machine import Machine
from .privileged import run_in_root
from .stage import Stage, StageError

HERE = REPO / "kmod/fuzz"
CORPUS = HERE / "corpus"
FINDINGS = HERE / "findings"
_UAPI = REPO / "kmod/include"
_PORT = "vtpu.fuzz"
_IN_GUEST = "/run/vtpu-fuzz"
# The inputs before a finding that are kept with it: what broke may have been
# done some time before it showed.
_KEPT = 64
_STALL_SECONDS = 180.0
# What a kernel says when something is wrong. The driver's own complaints about a
# job or a queue are what inputs are for.
_COMPLAINT = re.compile(
    r"BUG:|WARNING:|KASAN|UBSAN|Kernel panic|Oops|general protection fault|refcount_t"
    r"|INFO: (task|rcu_|possible)|possible (circular|recursive) locking|inconsistent lock"
    r"|DEBUG_LOCKS_WARN|unreferenced object|soft lockup|hung_task|Call Trace"
    r"|the device is lost"
)
# loglevel: warnings reach the console, which is read here. A guest that panics stands
# still, so that all it said is there.
_KERNEL_ARGUMENTS = "loglevel=5 panic=0"
_CALL = re.compile(r'^\t\{ "(\w+)", \w+ \},$', re.MULTILINE)
_FLAGS = {"parallel": 1, "killed": 2}
# A call of the corpus with its arguments, which are fewer bytes.
CALL_BYTES = 24
_COMPILE = (
    "gcc -O2 -g0 -std=gnu11 -Wall -Wextra -Werror -static -pthread"
    " -I/kmod/include/uapi -I/usr/include/drm -o /out/vtpu-fuzz /kmod/fuzz/*.c"
)


def build() -> Path:
    """The program that runs in the guest. Needs the build lock."""
    root = roots.build_root()
    target = cache_dir() / f"driver-fuzzer-{key(roots.identity(root), _COMPILE, HERE, _UAPI)}"
    if not target.is_dir():
        with Stage("driver fuzzer") as stage, fresh(target) as work:
            command = ["sh", "-c", _COMPILE]
            log = log_dir() / "driver-fuzzer.log"
            read = {REPO / "kmod": "/kmod"}
            run_in_root(stage, root, command, log, read=read, write={work: "/out"})
    prune("driver-fuzzer-*", target)
    return target / "vtpu-fuzz"


@dataclass
class Records:
    """What vtpu-fuzz says through its port: see kmod/fuzz/fuzz.c."""

    path: Path
    recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=_KEPT))
    new: list[bytes] = field(default_factory=list)
    said: str = ""
    error: str = ""
    last: float = field(default_factory=time.monotonic)
    ended: bool = False

    def read(self) -> None:
        """Until the other end closes; on a thread of its own."""
        with socket.socket(socket.AF_UNIX) as port:
            port.connect(str(self.path))
            stream = port.makefile("rb")
            while len(head := stream.read(3)) == 3:
                data = stream.read(head[1] | head[2] << 8)
                self.last = time.monotonic()
                if head[:1] == b"R":
                    self.recent.append(data)
                elif head[:1] == b"N" and self.recent:
                    self.new.append(self.recent[-1])
                elif head[:1] == b"S":
                    self.said = data.decode()
                    self.ended = self.said.endswith("end")
                elif head[:1] == b"E":
                    self.error = data.decode()


@dataclass(frozen=True)
class Outcome:
    complaint: str
    """What the kernel said, or "" when nothing was wrong."""
    recent: Sequence[bytes]
    """The last inputs, the newest last."""
    new: Sequence[bytes]
    """Inputs that reached something new."""
    said: str


def run(
    arguments: Sequence[str], inputs: Sequence[bytes], machine: Machine | None = None
) -> Outcome:
    """Boots a guest and runs vtpu-fuzz in it with the arguments and files of the inputs."""
    with build_lock():
        program = build()
    with tempfile.TemporaryDirectory(prefix="vtpu-fuzz-") as folder:
        path = Path(folder) / "port"
        devices = [
            *("-chardev", f"socket,id=fuzz,path={path},server=on,wait=off"),
            *("-device", f"virtserialport,chardev=fuzz,name={_PORT}"),
        ]
        with Guest(machine, extra_arguments=devices, kernel_arguments=_KERNEL_ARGUMENTS) as guest:
            records = Records(path)
            thread = threading.Thread(target=records.read, daemon=True)
            thread.start()
            try:
                complaint = _run(guest, program, arguments, inputs, records)
            finally:
                guest.kill()
            thread.join(10)
        return Outcome(complaint, list(records.recent), records.new, records.said)


def _run(
    guest: Guest, program: Path, arguments: Sequence[str], inputs: Sequence[bytes], records: Records
) -> str:
    guest.run(["mkdir", "-p", f"{_IN_GUEST}/in"]).check()
    guest.put(program, f"{_IN_GUEST}/vtpu-fuzz", mode=0o755)
    # One file holds them all: the agent takes a while for each.
    guest.put(pack(inputs), f"{_IN_GUEST}/inputs")
    unpack = (
        f"import sys; data = open('{_IN_GUEST}/inputs', 'rb').read(); at = n = 0\n"
        "while at < len(data):\n"
        "    size = int.from_bytes(data[at:at + 2], 'little')\n"
        f"    open(f'{_IN_GUEST}/in/{{n:05d}}', 'wb').write(data[at + 2:at + 2 + size])\n"
        "    at += 2 + size; n += 1\n"
    )
    guest.run(["python3", "-c", unpack]).check()
    port = guest.run(f"basename $(dirname $(grep -lx {_PORT} /sys/class/virtio-ports/*/name))")
    words = [f"/dev/{port.check().text.strip()}", *arguments]
    command = f"{_IN_GUEST}/vtpu-fuzz {' '.join(words)} $(find {_IN_GUEST}/in -type f | sort)"
    guest.run(f"{command} >{_IN_GUEST}/log 2>&1 &").check()
    records.last = time.monotonic()
    with Stage("fuzz") as stage:
        while not records.ended:
            time.sleep(0.5)
            stage.progress(records.said)
            if complaint_of(guest.console()):
                time.sleep(2)  # the rest of what it says
                return complaint_of(guest.console())
            if records.error and not records.recent:
                raise StageError(records.error)
            if records.error:  # an input has spoilt the device
                return records.error
            if time.monotonic() - records.last > _STALL_SECONDS:
                return f"nothing happened for {_STALL_SECONDS:g} s after the last input"
            try:
                guest.check_running()
            except GuestError as error:
                return f"the guest ended: {error.reason}"
        if chosen_name() == "debug" and "no kcov" in records.said:
            raise StageError("the debug kernel has no kcov: all inputs were random")
    return memory_leaks(guest) or complaint_of(guest.console())


def complaint_of(console: str) -> str:
    """The part of a console from the first complaint on, or ""."""
    lines = console.splitlines()
    for at, line in enumerate(lines):
        if _COMPLAINT.search(line):
            return "\n".join(lines[max(0, at - 2) : at + 80])
    return ""


def pack(inputs: Sequence[bytes]) -> bytes:
    """Inputs in one file, each after its length in two bytes, little endian."""
    return b"".join(len(data).to_bytes(2, "little") + data for data in inputs)


def unpack(data: bytes) -> list[bytes]:
    inputs = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 2], "little")
        inputs.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return inputs


def calls() -> list[str]:
    """The calls that an input is made of, each at its number."""
    return _CALL.findall((HERE / "calls.c").read_text())


def program(text: str) -> bytes:
    """A text of the corpus as an input: see kmod/fuzz/README.md."""
    names = calls()
    flags, data = 0, b""
    for line in text.splitlines():
        name, *arguments = line.partition("#")[0].split() or [""]
        if name in _FLAGS:
            flags |= _FLAGS[name]
        elif name:
            call = bytes([names.index(name), *map(int, arguments)])
            data += call.ljust(CALL_BYTES, b"\0")
    return bytes([flags]) + data


def tree_corpus() -> list[bytes]:
    """Where every run begins."""
    return [program(path.read_text()) for path in sorted(CORPUS.iterdir())]


def _corpus() -> list[bytes]:
    """The tree's inputs, and what earlier runs found interesting."""
    found = cache_dir() / "fuzz-corpus/driver"
    files = sorted(found.iterdir()) if found.is_dir() else []
    return [*tree_corpus(), *(path.read_bytes() for path in files)]


def _keep(outcome: Outcome) -> None:
    folder = cache_dir() / "fuzz-corpus/driver"
    folder.mkdir(parents=True, exist_ok=True)
    for data in outcome.new:
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def keep_finding(outcome: Outcome) -> Path:
    """The inputs that led to it, to be run again, with the kernel's words beside them."""
    FINDINGS.mkdir(exist_ok=True)
    data = pack(outcome.recent)
    path = FINDINGS / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(outcome.complaint + "\n")
    return path


def fuzz(seconds: int, seed: int) -> int:
    """Looks for so long; 1 when something was found."""
    outcome = run([str(seconds), str(1 << 40), str(seed)], _corpus())
    _keep(outcome)
    print(f"driver: {outcome.said}", file=sys.stderr)
    if not outcome.complaint:
        return 0
    path = keep_finding(outcome)
    print(
        f"driver: 1 finding\n{outcome.complaint}\n  {path}\n"
        f"  again: make fuzz-driver REPLAY={path}",
        file=sys.stderr,
    )
    return 1


def replay(path: Path, times: int = 20) -> int:
    """Runs a finding's inputs again, in their order; 1 when the kernel complains again."""
    try:
        inputs = unpack(path.read_bytes())
    except OSError as error:
        raise StageError(f"cannot read {path}: {error.strerror}") from None
    outcome = run(["replay", str(times)], inputs)
    print(
        outcome.complaint or f"driver: {len(inputs)} inputs, {times} times: nothing",
        file=sys.stderr,
    )
    return 1 if outcome.complaint else 0
