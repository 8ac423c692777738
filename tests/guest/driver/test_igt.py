# SPDX-License-Identifier: MIT
"""Generic tests of igt-gpu-tools, on the accel node. Which, and why not others:
docs/driver-development.md.

IGT=folder says where they are: the programs, and in lib/ the libraries that the guest has not.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.guest, pytest.mark.stress]

# What a subtest may miss and be skipped for, or "": nothing of the program may be skipped.
NO_MASTER = "igt_device_set_master"
NO_SW_SYNC = "kernel_has_sw_sync"
PROGRAMS = {
    "core_auth": NO_MASTER,
    "core_getclient": "",
    "core_getstats": "",
    "core_getversion": "",
    "syncobj_basic": "",
    "syncobj_eventfd": NO_SW_SYNC,
    "syncobj_timeline": NO_SW_SYNC,
    "syncobj_wait": NO_SW_SYNC,
}
# They give another thread 20 or 100 ms of real time; a slow or busy machine needs more.
HURRIED = re.compile(r"snapshot$|delayed-(signal|submit)$|complex$|^reset-during-wait")
FOLDER = "/tmp/igt"
NODE = "/dev/dri/card0"
SECONDS = 300
SKIPPED = 77  # a program's exit status when nothing of it ran

_RESULT = re.compile(r"^(?:Subtest (?P<name>\S+): )?(?P<word>[A-Z]+) \([\d.]+s\)$", re.M)
_MISSED = re.compile(r"^Test requirement: (.*)$", re.M)


@dataclass(frozen=True)
class Result:
    word: str
    """SUCCESS, SKIP, FAIL, CRASH."""
    missed: str
    """What was missed last before it; why it was skipped, if it was."""


def parse(output: str) -> dict[str, Result]:
    """The result of each subtest; of a program without any, under no name."""
    found = {}
    for match in _RESULT.finditer(output):
        missed = _MISSED.findall(output[: match.start()]) or ["nothing"]
        found[match["name"] or ""] = Result(match["word"], missed[-1])
    return found


Run = Callable[[str], tuple[int, str]]


@pytest.fixture(scope="module")
def igt(guest: Any) -> Iterator[Run]:
    """Runs a program with its arguments; its exit status, and what it prints."""
    if not os.environ.get("IGT"):
        pytest.skip("no IGT=folder with tests of igt-gpu-tools")
    folder = Path(os.environ["IGT"])
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1, dereference=True) as archive:
        for name in ("lib", *PROGRAMS):
            archive.add(folder / name, name)
    guest.put(packed.getvalue(), f"{FOLDER}.tgz")
    # IGT knows no accel nodes. It would open a link to one, and then not close it.
    node = f"mkdir -p {Path(NODE).parent} && cp -a /dev/accel/accel0 {NODE}"
    guest.run(f"mkdir {FOLDER} && tar -xzf {FOLDER}.tgz -C {FOLDER} && {node}").check()

    def run(command: str) -> tuple[int, str]:
        # Looking for another device, IGT would load the driver of every GPU it knows.
        environment = f"LD_LIBRARY_PATH={FOLDER}/lib IGT_FORCE_DRIVER=vtpu"
        done = guest.run(f"{environment} {FOLDER}/{command} 2>&1", timeout=SECONDS)
        return done.returncode, done.text

    yield run
    guest.run(f"rm -r {FOLDER} {FOLDER}.tgz {NODE}").check()


@pytest.mark.parametrize("program", PROGRAMS)
def test_igt(program: str, igt: Run, subtests: pytest.Subtests) -> None:
    _, listed = igt(f"{program} --list-subtests")
    status, output = igt(program)
    found = parse(output)
    assert list(found) == (listed.split() or [""]), output[-4000:]
    for name, result in found.items():
        with subtests.test(name or program):
            judge(name, result, PROGRAMS[program], output)
    # Without results that are bad the status may still be: of what comes after them.
    if {result.word for result in found.values()} <= {"SUCCESS", "SKIP"}:
        assert status in (0, SKIPPED), output[-4000:]


def judge(name: str, result: Result, may_miss: str, output: str) -> None:
    if result.word == "SKIP" and may_miss and may_miss in result.missed:
        pytest.skip(f"missed: {result.missed}")
    if result.word == "FAIL" and HURRIED.search(name):
        pytest.xfail("had less time than it takes here")
    if result.word != "SUCCESS":
        pytest.fail(f"{result.word} in\n{output[-4000:]}", pytrace=False)


def test_results_are_read_from_what_is_printed() -> None:
    output = (
        "Starting subtest: a\nSubtest a: SUCCESS (0.019s)\n"
        "Test requirement not met in function f, file f.c:1:\nTest requirement: has(it)\n"
        "Subtest b-c: SKIP (0.000s)\nSubtest d: FAIL (1.000s)\n"
    )
    found = parse(output)
    assert [(name, result.word) for name, result in found.items()] == [
        ("a", "SUCCESS"),
        ("b-c", "SKIP"),
        ("d", "FAIL"),
    ]
    assert found["b-c"].missed == "has(it)"
    assert parse("SUCCESS (0.058s)\n")[""].word == "SUCCESS"
    with pytest.raises(pytest.skip.Exception):
        judge("b-c", found["b-c"], "has(", output)
    with pytest.raises(pytest.xfail.Exception):
        judge("wait-all-snapshot", found["d"], "", output)
    for name, may_miss in (("b-c", ""), ("b-c", "another"), ("d", "has(")):
        with pytest.raises(pytest.fail.Exception):
            judge(name, found[name], may_miss, output)
