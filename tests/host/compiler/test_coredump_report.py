# SPDX-License-Identifier: MIT
"""What the report of a core dump says, of dumps written here as the driver writes them."""

from __future__ import annotations

import re
import struct

import pytest
from llama_graph import llama
from vtpu_compiler import compile_graph
from vtpu_compiler.cli import main
from vtpu_compiler.coredump import CoredumpError, read_coredump, report
from vtpu_compiler.objdump import objdump

WEIGHTS, LAUNCH, CODE = 0x1_0000_0000, 0x2_0000_0000, 0x3_0000_0000


@pytest.fixture(scope="module")
def step():
    return compile_graph(llama())


def ascii85(data: bytes) -> str:
    """As the kernel's: each little-endian word, most significant digit first, z for zero."""
    text = ""
    for (word,) in struct.iter_unpack("<I", data):
        digits = [chr(33 + word // 85**power % 85) for power in (4, 3, 2, 1, 0)]
        text += "".join(digits) if word else "z"
    return "\n".join(text[at : at + 100] for at in range(0, len(text), 100))


def code_of(elf: bytes, metadata: dict) -> bytes:
    """Where .text lies by the section table, the kernel where its symbol is: at its start."""
    (table,), (count, names) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HH", elf, 60)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + 64 * i) for i in range(count)]
    [offset] = [s[4] for s in sections if elf[sections[names][4] + s[0] :].startswith(b".text\0")]
    return elf[offset : offset + metadata["kernels"]["step"]["code_bytes"]]


def dump(code: bytes, pc: int, reason: str = "fault", cause: int = 3, address: int = 0) -> str:
    launch = bytearray(4096)
    arguments = [WEIGHTS, LAUNCH]
    registers = {
        "Q_FAULT_CAUSE": cause,
        "Q_FAULT_ACCESS": 1 if address else 0,
        "Q_FAULT_ADDR": address,
        "Q_FAULT_PC": pc if reason == "fault" else 0,
        "Q_PC": pc if reason == "hang" else 0xFFFF_FFFF,
        "Q_COMMAND_NS": 1_500_000_000,
    }
    return "\n".join(
        [
            "vtpu coredump, version 1",
            f"reason: {reason}",
            "time: 12.000000000",
            "kernel: 6.12.0",
            "device: 0000:01:00.0",
            "process: 123 python3",
            "queue: 4",
            "fence: 6 of 8",
            "entry: 17",
            "[device]",
            "ID: 0x55505456",
            "[queue]",
            *(f"{name}: {value:#x}" for name, value in registers.items()),
            "[ring]",
            f"17: RUN cookie=0x2a fence=7 irq code={CODE:#x}/{len(code):#x}",
            "18: NOP cookie=0x2b fence=8 irq",
            "[walk]",
            "[mappings]",
            f"{WEIGHTS:#x}-{WEIGHTS + 4096:#x} r-- 4K hbm 0x200000",
            f"[memory code va={CODE:#x} bytes={len(code)}]",
            ascii85(code),
            "[arguments]",
            *(f"{n}: {value:#x}" for n, value in enumerate(arguments)),
            f"[memory argument0 va={WEIGHTS:#x} bytes=8]",
            ascii85(bytes(8)),
            f"[memory argument1 va={LAUNCH:#x} bytes={len(launch)}]",
            ascii85(bytes(launch)),
            "[end]",
            "",
        ]
    )


def test_the_program_the_line_and_the_operation(step, tmp_path, capsys) -> None:
    """Found by the bytes of the program, in a folder with another executable."""
    code = code_of(step.elf, step.metadata)
    listing = next(x for x in objdump(step.elf).splitlines() if "MATMUL.Q4_1 ACCUMULATE" in x)
    pc = int(listing.split(":")[0], 16)
    assert pc > 0
    (tmp_path / "other.elf").write_bytes(compile_graph(llama(), None).elf[:100])
    (tmp_path / "step.elf").write_bytes(step.elf)
    (tmp_path / "dump").write_text(dump(code, pc, address=WEIGHTS + 4096 + 64))
    assert main(["coredump", str(tmp_path / "dump"), str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"fault: UNMAPPED, read of {WEIGHTS + 4160:#x} at pc {pc:#x}\n")
    assert "process 123 python3, queue 4, entry 17, job 7 of 8" in text
    assert f"program step of {tmp_path / 'step.elf'}" in text
    assert f"address {WEIGHTS + 4160:#x} is not mapped" in text
    assert "  17: RUN cookie=0x2a" in text
    [marked] = [line for line in text.splitlines() if line.startswith("=>")]
    # The listing's own line, with the operation, its module and the line of the model.
    assert marked == "=>" + listing
    around = [line for line in text.splitlines() if re.match(r"(=>|  )\s+[0-9a-f]+: ", line)]
    assert around[8] == marked and len(around) == 17


def test_a_hang_without_the_executable(step) -> None:
    code = code_of(step.elf, step.metadata)
    text = report(read_coredump(dump(code, 128, "hang")))
    assert text.startswith("hang: a command that has executed for 1.500 s at pc 0x80\n")
    assert "no executable given" in text and step.metadata["code_sha256"] in text
    assert any(line.startswith("=>     80: ") for line in text.splitlines())


def test_the_address_in_words(step, tmp_path) -> None:
    """An address behind an argument is named as the disassembly names it."""
    entry = step.metadata["weights"]["entries"][1]
    path = tmp_path / "step.elf"
    path.write_bytes(step.elf)
    code = code_of(step.elf, step.metadata)
    found = dump(code, 0, address=WEIGHTS + entry["offset"] + 8)
    assert f"weights[{entry['name']}+8]" in report(read_coredump(found), [path])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[1:], "not a vtpu core dump"),
        (lambda text: text.replace("version 1", "version 2"), "version 2"),
        (lambda text: text[: len(text) // 2], "cut off"),
        (lambda text: text.replace("Q_PC: 0x", "Q_PC: what"), "corrupt"),
        (lambda text: text.replace("bytes=8]", "bytes=9]"), "8 bytes of memory instead of 9"),
    ],
)
def test_what_is_no_dump_is_refused(change, message) -> None:
    with pytest.raises(CoredumpError, match=message):
        read_coredump(change(dump(bytes(128), 0)))
