# SPDX-License-Identifier: MIT
"""What a test did beside what it was to do: the kernel's messages, resets, what did not come back.

A test that may cause a message or a reset says so: `@expects(...)` on a case,
`@pytest.mark.expects(...)` on a test. Runs in the guest as root, standard library only; for tests
that drive the guest from outside it is a program:

    python3 watch.py            begins to watch
    python3 watch.py EXPECTED   prints the problems since it was last asked, as JSON

What it saw last is noted in the guest, so that whoever asks next, a case or a test, goes on from
there: nothing falls in between.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path

NOTE = Path(__file__).with_name("watched.json")
DRIVER = Path("/sys/bus/pci/drivers/vtpu")
DEBUGFS = Path("/sys/kernel/debug/accel")
REFERENCES = Path("/sys/module/vtpu/refcnt")
WARNING = 4  # the kernel's level; what is below is worse
SHOWN_LINES = 50
SETTLE_SECONDS = 5 * int(os.environ.get("VTPU_PATIENCE", "1"))

# What tests expect the driver to say, for expects().
HANG = r"vtpu .*queue \d+ (is over its time limit|makes no progress|waits without end)"
NOT_SERVED = r"vtpu .*queue \d+ is not served"
HELD_UP = r"vtpu .*queue \d+ holds up the device"
STUCK_QUEUE = r"vtpu .*queue \d+ does not stop, resetting the engines"
STUCK_ENGINES = r"vtpu .*the engines do not stop, resetting the device"
STUCK_RESET = r"vtpu .*device reset did not finish"
PROBE_FAILED = r"vtpu .*probe with driver vtpu failed with error"
LOST = r"vtpu .*the device is lost"
LOST_TO_SLEEP = r"vtpu .*jobs are lost: the machine is about to sleep"

# Said of any module that is not Debian's, and of a machine that is emulated and slow.
HARMLESS = (
    r"vtpu: (loading out-of-tree module|module verification failed)",
    r"hogged CPU for|interrupt took|clocksource",
)

# Unplugging takes two locks of the PCI core in both orders, as lockdep says once, and then
# watches no more: who unplugs comes last in a guest (harness.about_to_unplug).
LOCKDEP = "possible circular locking dependency"
PCIEHP = ("ctrl->reset_lock", "pci_rescan_remove_lock")
REPORT_END = "</TASK>"

# A warning's report: the line that says what of is within.
CUT = "[ cut here ]"
CUT_END = "[ end trace"


@dataclass(frozen=True)
class Expected:
    messages: Sequence[str] = ()
    """Regular expressions, of warnings and worse that the kernel may print."""
    resets: bool = False
    """Whether the device, or its engines, may be reset."""


def expects(*messages: str, resets: bool = False) -> Callable[[Callable], Callable]:
    def mark(function: Callable) -> Callable:
        function.expected = Expected(messages, resets)  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True)
class Device:
    """A function that the driver is bound to."""

    binding: int
    """Another one each time that it is bound; the count of resets begins anew then."""
    resets: int
    hbm: int
    """Bytes that buffers have in HBM, or had until they were evicted."""
    buffers: int
    """Of system memory, mapped for DMA."""
    awake: int
    """How many keep it awake: its references of runtime power management."""


@dataclass(frozen=True)
class State:
    sequence: int
    """Of the last message in the kernel's log."""
    references: int
    """To the module: files, mappings, buffers that others have."""
    lost: int = 0
    """Messages that the log had to drop before they were read."""
    devices: dict[str, Device] = field(default_factory=dict)
    silent: Sequence[str] = ()
    """Devices that have the driver but do not tell of themselves, and why."""


@dataclass(frozen=True)
class Message:
    sequence: int
    level: int
    text: str


def judge(before: State, now: State, said: Sequence[Message], expected: Expected) -> list[str]:
    """What was not expected, as lines of text."""
    found = _complaint(said, expected) + _lost(before, now) + _kept(before, now)
    return found if expected.resets else found + _resets(before, now)


def _complaint(said: Sequence[Message], expected: Expected) -> list[str]:
    """The first message that nobody expected, and what follows it."""
    known = re.compile("|".join((*HARMLESS, *expected.messages)))
    said = _without_pciehp(_without_warnings(said, known))
    for at, message in enumerate(said):
        if message.level <= WARNING and not known.search(message.text):
            return ["kernel:", *(m.text for m in said[at : at + SHOWN_LINES])]
    return []


def _without_warnings(said: Sequence[Message], known: re.Pattern[str]) -> Sequence[Message]:
    """One whose line that names it is known goes with all of its report."""
    left: list[Message] = []
    at = 0
    while at < len(said):
        if CUT in said[at].text:
            report = list(takewhile(lambda m: CUT_END not in m.text, said[at:]))
            if any("WARNING: " in m.text and known.search(m.text) for m in report):
                at += len(report) + 1
                continue
        left.append(said[at])
        at += 1
    return left


def _without_pciehp(said: Sequence[Message]) -> Sequence[Message]:
    for at, message in enumerate(said):
        if LOCKDEP in message.text:
            end = next((i for i, m in enumerate(said) if i > at and REPORT_END in m.text), at)
            report = said[max(at - 2, 0) : end + 1]  # from its rule on, before which is a blank
            taken = "".join(m.text for m in report[:10])
            if all(lock in taken for lock in PCIEHP):
                return [*said[: max(at - 2, 0)], *said[end + 1 :]]
    return said


def _lost(before: State, now: State) -> list[str]:
    """What nobody has read may have been anything."""
    count = now.lost - before.lost
    return [f"the kernel's log overran: {count} messages were not seen"] if count else []


def _kept(before: State, now: State) -> list[str]:
    found = [*now.silent]
    if now.references > before.references:
        found.append(f"references to the module: {before.references}, now {now.references}")
    for name, device in now.devices.items():
        old = before.devices.get(name, Device(0, 0, 0, 0, 0))
        if device.hbm > old.hbm:
            found.append(f"{name}: {old.hbm} bytes of HBM in use or evicted, now {device.hbm}")
        if device.buffers > old.buffers:
            found.append(f"{name}: {old.buffers} buffers mapped for DMA, now {device.buffers}")
        if device.awake > old.awake:
            found.append(f"{name}: {old.awake} keep it awake, now {device.awake}")
    return found


def _resets(before: State, now: State) -> list[str]:
    found = []
    for name, device in now.devices.items():
        old = before.devices.get(name)
        count = device.resets
        if old and old.binding == device.binding:
            count -= old.resets
        if count:
            found.append(f"{name}: {count} resets of the device or its engines")
    return found


class Watch:
    """Compares what is with what was noted, or is now."""

    def __init__(self) -> None:
        self._kmsg = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        noted = _noted()
        self._sequence = noted.sequence if noted else -1
        self._lost = noted.lost if noted else 0
        said = self._messages()
        self._said = said if noted else []
        self._before = noted or self._state()

    def problems(self, expected: Expected) -> list[str]:
        """Since the last time. What is freed a little later has some seconds for it."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            self._said += self._messages()
            now = self._state()
            if not _kept(self._before, now) or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        found = judge(self._before, now, self._said, expected)
        self._said, self._before = [], now
        self.note()
        return found

    def note(self) -> None:
        NOTE.write_text(json.dumps(asdict(self._before)))

    def _messages(self) -> list[Message]:
        """The new ones of the kernel itself. A gap in the numbers is what the log has dropped."""
        found: list[Message] = []
        while True:
            try:
                record = os.read(self._kmsg, 8192).decode(errors="replace")
            except BlockingIOError:
                return found
            except BrokenPipeError:  # the next one was dropped; those after it follow
                continue
            head, _, text = record.partition(";")
            priority, sequence = map(int, head.split(",")[:2])
            if sequence <= self._sequence:
                continue
            self._lost += sequence - self._sequence - 1
            self._sequence = sequence
            if priority < 8:
                found.append(Message(sequence, priority, text.splitlines()[0]))

    def _state(self) -> State:
        references = int(REFERENCES.read_text()) if REFERENCES.exists() else 0
        devices, silent = _devices()
        return State(self._sequence, references, self._lost, devices, silent)


def _devices() -> tuple[dict[str, Device], list[str]]:
    """Those that the driver is bound to, and what keeps others from telling."""
    found = {}
    silent = []
    for path in DRIVER.glob("*:*"):

        def number(name: str, folder: Path = path, word: int = 0) -> int:
            return int((folder / name).read_text().split()[word])

        try:
            found[path.name] = Device(
                (path / "device_resets").stat().st_ino,
                number("device_resets") + number("engine_resets"),
                number("hbm", DEBUGFS / path.name) + number("hbm", DEBUGFS / path.name, 5),
                number("dma", DEBUGFS / path.name),
                number("power/runtime_usage") - _keeps_functions(path),
            )
        except OSError as error:
            if path.exists():  # else it went just now
                silent.append(f"{path.name}: {error}")
    return found, silent


def _keeps_functions(path: Path) -> bool:
    """Virtual ones, for which it has to stay awake."""
    count = path / "sriov_numvfs"
    return count.exists() and count.read_text().strip() != "0"


def _noted() -> State | None:
    if not NOTE.exists():
        return None
    fields = json.loads(NOTE.read_text())
    devices = {name: Device(**device) for name, device in fields.pop("devices").items()}
    return State(devices=devices, **fields)


def main(arguments: list[str]) -> None:
    if arguments:
        print(json.dumps(Watch().problems(Expected(**json.loads(arguments[0])))))
    else:
        NOTE.unlink(missing_ok=True)
        Watch().note()


if __name__ == "__main__":
    main(sys.argv[1:])
