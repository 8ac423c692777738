# SPDX-License-Identifier: MIT
"""The specification: generated files are current, the pages complete, their examples true."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from asm import R, ins
from machine import D, Machine, Queue

REPO = Path(__file__).parents[3]
SPEC = REPO / "qemu-device" / "spec"
DRIVER_PAGE = REPO / "docs" / "hardware-programming.md"
ISA_PAGE = REPO / "docs" / "isa.md"


def _spec() -> dict[str, Any]:
    return tomllib.loads((SPEC / "vtpu.toml").read_text())


def _block(page: Path, language: str) -> list[str]:
    """The lines of the page's one code block of a language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.S | re.M)
    return str(text).splitlines()


def _assemble(line: str) -> bytes:
    """`NAME operand=4 operand=s8 wait=1>=2 signal=1`."""
    name, *words = line.split()
    operands: dict[str, Any] = {}
    for word in words:
        key, value = word.split("=", 1)
        if key == "wait":
            counter, target = value.split(">=")
            operands[key] = (int(counter), int(target))
        else:
            operands[key] = R(int(value[1:])) if value[0] == "s" else int(value)
    return ins(name, **operands)


def test_generated_files_are_current() -> None:
    done = subprocess.run(
        [sys.executable, SPEC / "generate.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("page", "names"),
    [
        (DRIVER_PAGE, "reg"),
        (DRIVER_PAGE, "queue reg"),
        (DRIVER_PAGE, "reg_array"),
        (DRIVER_PAGE, "command"),
        (DRIVER_PAGE, "fault"),
        (DRIVER_PAGE, "queue_state"),
        (DRIVER_PAGE, "pte"),
        (ISA_PAGE, "op"),
        (ISA_PAGE, "operand kinds"),
        (ISA_PAGE, "program faults"),
        (ISA_PAGE, "struct"),
        (ISA_PAGE, "word"),
    ],
)
def test_the_pages_mention_everything(page: Path, names: str) -> None:
    spec = _spec()
    kinds = {text.split(":")[1] for op in spec["op"] for text in op["operands"]}
    not_of_programs = {"NONE", "UNMAPPED", "PROTECTION", "BUS", "BAD_PAGE_TABLE", "BAD_CONTEXT"}
    not_of_programs |= {"BAD_COMMAND", "BAD_RING"}
    expected = {
        "reg": [reg["name"] for reg in spec["reg"]],
        "queue reg": [reg["name"] for reg in spec["queue"]["reg"]],
        "reg_array": [reg["name"] for reg in spec["reg_array"]],
        "command": [command["name"] for command in spec["ring"]["command"]],
        "fault": list(spec["enum"]["fault"]),
        "queue_state": list(spec["enum"]["queue_state"]),
        "pte": list(spec["pte"]["bits"]),
        "op": [op["name"] for op in spec["op"]],
        "operand kinds": sorted(kinds),
        "program faults": sorted(spec["enum"]["fault"].keys() - not_of_programs),
        "struct": [struct["name"] for struct in spec["struct"]],
        "word": ["signal", "wait", "wait_reg", "wait_imm", "fmt_a", "fmt_b", "mode", "aux"],
    }[names]
    words = set(re.findall(r"\w+", page.read_text()))
    assert expected
    assert not [name for name in expected if name not in words and f"Q_{name}" not in words]


def test_the_page_table_example(machine: Machine, queue: Queue) -> None:
    """Written as the page says, the tables translate as the page says."""
    for line in _block(DRIVER_PAGE, ""):
        value = int(line.split(":")[1].split()[0], 16)
        if line.startswith("HBM "):
            machine.put(int(line[4:].split(":")[0], 16), struct.pack("<Q", value))
        else:
            assert line.startswith("CTX_ROOT[0]:")
            machine.write(D["REG_CTX_ROOT"], value, 8)
    queue.do("SIGNAL", struct.pack("<QQ", 0x40000008, 0x1234))
    assert machine.word(0x200008) == 0x1234
    fault = queue.expect_fault("SIGNAL", struct.pack("<QQ", 0x40001000, 1))
    assert (fault["cause"], fault["addr"]) == ("UNMAPPED", 0x40001000)


def test_the_example_program(machine: Machine, queue: Queue) -> None:
    """The hex of the page is its listing, and computes what the page says."""
    code = bytes.fromhex("".join(line.split(":")[1] for line in _block(ISA_PAGE, "hex")))
    assert code == b"".join(_assemble(line) for line in _block(ISA_PAGE, "asm"))
    a = machine.place(struct.pack("<16f", *range(16)))
    b = machine.place(struct.pack("<16f", *[0.5] * 16))
    out = machine.alloc(64)
    queue.run(code, (a, b, out))
    got = struct.unpack("<16f", machine.get(out, 64))
    assert list(got) == [i + 0.5 for i in range(16)]
