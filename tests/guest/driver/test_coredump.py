# SPDX-License-Identifier: MIT
"""The device core dump that a fault or a hang leaves, read as a person would."""

from __future__ import annotations

import base64
import itertools
import re
import struct
from typing import Any

import pytest
from cases import FOLDER
from watch import HANG

pytestmark = pytest.mark.guest
DUMP = "/sys/class/devcoredump/devcd*/data"

PRELUDE = f"""
import sys, errno, glob
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup, until

def drop():
    for path in glob.glob({DUMP!r}):
        open(path, "w").write("0")

def dump():
    until(lambda: glob.glob({DUMP!r}), 20, "a core dump")
    [path] = glob.glob({DUMP!r})
    return open(path).read()

drop()
"""


def python(guest: Any, body: str) -> str:
    """Runs a program in the guest, and gives what it printed."""
    guest.put((PRELUDE + body).encode(), f"{FOLDER}/coredump.py")
    done = guest.run(["python3", f"{FOLDER}/coredump.py"], timeout=90)
    guest.run(f"for dump in {DUMP}; do test -e $dump && echo 0 >$dump; done; true").check()
    return done.check().text


def sections(text: str) -> dict[str, list[str]]:
    assert text.startswith("vtpu coredump, version 1\n")
    assert text.endswith("[end]\n"), "cut off"
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in text.splitlines()[1:]:
        if header := re.fullmatch(r"\[([^\]]*)\]", line):
            name = header[1]
            found[name] = []
        else:
            found[name].append(line)
    return found


def values(lines: list[str]) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in lines)


def memory(found: dict[str, list[str]], name: str) -> tuple[int, bytes]:
    """(address, bytes). Words of four characters and more are the processor's, low byte first."""
    [(header, lines)] = [item for item in found.items() if item[0].startswith(f"memory {name} ")]
    va, size = re.fullmatch(rf"memory {name} va=(\S+) bytes=(\d+)", header).groups()
    data = base64.a85decode("".join(lines))
    words = struct.unpack(f">{len(data) // 4}I", data)
    data = struct.pack(f"<{len(words)}I", *words)
    assert len(data) == int(size)
    return int(va, 0), data


def test_a_trap(guest: Any) -> None:
    """Who, what, where: registers, ring, program and what its arguments point to."""
    text = python(
        guest,
        """
with Setup() as dev:
    dev.program(raw.HALT * 3 + raw.trap(77))
    dev.hbm_map[:8] = b"launched"
    dev.host_map[:16] = dev.hbm_va.to_bytes(8, "little") + (5).to_bytes(8, "little")
    run = raw.run(dev.code_va, 256, entry=192, args=dev.host_va, num=2, cookie=0x1234)
    assert dev.finish(dev.queue_id, [raw.nop(), run, raw.nop(9)]) == -errno.EFAULT
    print(dump(), end="")
""",
    )
    found = sections(text)
    head, queue = values(found[""]), values(found["queue"])
    assert head["reason"] == "fault"
    assert head["process"].endswith(" python3")
    assert int(queue["Q_FAULT_CAUSE"], 0) == 8  # TRAP
    assert int(queue["Q_FAULT_ADDR"], 0) == 77
    assert int(queue["Q_FAULT_PC"], 0) == 192
    assert int(values(found["device"])["ID"], 0) == 0x55505456
    guilty, behind = found["ring"]
    assert guilty.startswith(f"{head['entry']}: RUN cookie=0x1234 ")
    assert "NOP cookie=0x9 " in behind
    va, code = memory(found, "code")
    assert f"code={va:#x}/0x100 entry=0xc0" in guilty
    halt, trap = b"\x01".ljust(64, b"\0"), b"\x02".ljust(24, b"\0") + struct.pack("<I36x", 77)
    assert code == halt * 3 + trap
    launch, data = memory(found, "argument0")
    assert values(found["arguments"]) == {"0": f"{launch:#x}", "1": "0x5"}
    assert data[:8] == b"launched"
    assert memory(found, "argument1") == (5, b"")
    # Each of the three buffers, with its rights and where it is.
    ranges = [line.split()[:4] for line in found["mappings"]]
    assert [kind for _, *kind in ranges] == [
        ["rw-", "4K", "system"],
        ["rw-", "4K", "hbm"],
        ["r-x", "4K", "system"],
    ]
    assert ranges[2][0] == f"{va:#x}-{va + 4096:#x}"


def test_an_address_that_is_not_mapped(guest: Any) -> None:
    """The walk ends where the device's did, and the dump is bounded."""
    text = python(
        guest,
        """
with Setup() as dev:
    fill = raw.fill(dev.hbm_va + dev.size, 4, 1)
    assert dev.finish(dev.queue_id, [fill]) == -errno.EFAULT
    print(dump(), end="")
""",
    )
    found = sections(text)
    walk = [re.fullmatch(r"level (\d): table (\S+) entry (\S+)", line) for line in found["walk"]]
    levels = [(int(m[1]), int(m[2], 0), int(m[3], 0)) for m in walk if m]
    assert [level for level, _, _ in levels] == [3, 2, 1, 0]
    root = int(values(found["queue"])["CTX_ROOT"], 0)
    assert root & 1 and levels[0][1] == root - 1
    for above, below in itertools.pairwise(levels):
        assert above[2] == below[1] | 1  # VALID
    assert levels[3][2] == 0
    assert "FILL" in found["ring"][0]


@pytest.mark.expects(HANG)
def test_a_hang(guest: Any) -> None:
    """Of a program that never ends, taken before its queue is stopped."""
    text = python(
        guest,
        """
with Setup(timeout_ms=1000) as dev:
    assert dev.finish(dev.queue_id, [dev.run(raw.LOOP)]) == -errno.ETIMEDOUT
    print(dump(), end="")
""",
    )
    found = sections(text)
    assert values(found[""])["reason"] == "hang"
    queue = values(found["queue"])
    assert int(queue["Q_QSTATUS"], 0) in (2, 5)  # RUNNING, PREEMPTED
    assert int(queue["Q_PC"], 0) == 0
    # By the device's own clock: the time that its queue has, not what others have by default.
    assert 875_000_000 <= int(queue["Q_COMMAND_NS"], 0) <= 10_000_000_000
    assert memory(found, "code")[1][:1] == b"\x14"


def test_faults_in_numbers_leak_nothing(guest: Any) -> None:
    """One dump at a time; what a file had is given back, though its dump is being written."""
    python(
        guest,
        """
with Setup() as dev:
    before = dev.memory().hbm_used
    for _ in range(30):
        with Setup() as other:
            assert other.finish(other.queue_id, [other.run(raw.trap(1))]) == -errno.EFAULT
        until(lambda: dev.memory().hbm_used == before, 20, "its memory is given back")
    dump()
""",
    )
