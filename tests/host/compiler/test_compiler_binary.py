# SPDX-License-Identifier: MIT
"""Instructions, executables, and the verifier of finished binaries."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shutil
import subprocess
import time
from dataclasses import replace

import numpy as np
import pytest
from damage import remake, rewrite, strip_waits
from llama_graph import SMOLLM2, Config, llama
from vtpu_compiler import (
    CompileError,
    Dim,
    ExecutableError,
    Graph,
    Options,
    compile_graph,
    hw,
    read_elf,
    read_metadata,
)
from vtpu_compiler.asm import Instr, decode, encode
from vtpu_compiler.cache import Cache
from vtpu_compiler.check import CheckError, check_executable
from vtpu_compiler.cli import main
from vtpu_compiler.objdump import objdump
from vtpu_compiler.passes.plan import Plan
from vtpu_compiler.passes.schedule import Schedule
from vtpu_compiler.printer import format_graph


@pytest.fixture(scope="module")
def small():
    return compile_graph(llama())


@pytest.fixture(scope="module")
def full():
    return compile_graph(llama(SMOLLM2))


# Instructions -------------------------------------------------------------------
def test_encoding_is_the_documented_one() -> None:
    data = encode(
        Instr("MATMUL", ((0, 64), (0, 128), (8, 0xF00), (24, 0), (0, 960), (0, 576), (0, 3840),
                         (0, 2304)), fmt="Q4_1", flags=1, signal=2, wait=3, wait_imm=7)
    )  # fmt: skip
    assert data[:8] == bytes([0x30, 1, 2, 3, 0, 10, 0, 0])
    assert data[8:16] == b"\x07\0\0\0\0\0\0\0"
    assert data[16:24] == bytes([0, 0, 8, 24, 0, 0, 0, 0])
    assert np.frombuffer(data[24:56], np.uint32).tolist() == [
        64, 128, 0xF00, 0, 960, 576, 3840, 2304,
    ]  # fmt: skip
    assert decode(data).operands[2] == (8, 0xF00)


@pytest.mark.parametrize(
    ("instr", "message"),
    [
        (Instr("LI", ((0, 0),)), "destination"),
        (Instr("LI", ((64, 0),)), "register"),
        (Instr("JMP", ((0, 32),)), "target"),
        (Instr("NOP", signal=32), "signal"),
        (Instr("NOP", wait=32), "wait"),
        (Instr("NOP", wait_imm=1), "wait_imm"),
        (Instr("NOP", aux=1), "aux"),
        (Instr("NOP", imm64=1), "imm64"),
        (Instr("NOP", flags=1), "flags"),
        (Instr("NOP", mode=1), "mode"),
        (Instr("NOP", fmt="F32"), "format"),
        (Instr("NOP", ((0, 0),)), "operands"),
        (Instr("LDV", ((1, 0), (0, 2))), "addr"),
        (Instr("LDV", ((1, 0), (0, hw.VMEM_BYTES))), "addr"),
        (Instr("DMA_LOAD", ((0, 0), (8, 0), (0, (1 << 20) + 1), (0, 4), (0, 4), (0, 4))), "rows"),
    ],
)
def test_fields_out_of_range_are_refused(instr: Instr, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        encode(instr)


def test_decoding_refuses_reserved_bits() -> None:
    good = bytearray(encode(Instr("NOP")))
    for at in range(64):
        bad = bytearray(good)
        bad[at] = 0xFF
        with pytest.raises(CompileError):
            decode(bytes(bad))


# The executable -------------------------------------------------------------------
def test_the_whole_model(full) -> None:
    kernel = full.metadata["kernels"]["step"]
    assert kernel["instructions"] <= 30 * 14 + 40
    assert kernel["vmem_bytes"] <= hw.VMEM_BYTES
    sizes = {entry["name"]: entry["bytes"] for entry in full.metadata["weights"]["entries"]}
    assert sizes["model.embed"] == 49152 * 576 // 32 * 34
    assert full.metadata["weights"]["bytes"] == pytest.approx(sum(sizes.values()), rel=1e-4)
    state = full.metadata["states"][0]
    assert state["slot_bytes"] == 30 * 2 * 192 * 2


def test_it_compiles_in_well_under_a_second() -> None:
    graph = llama(SMOLLM2)
    best = min(_timed(lambda: compile_graph(graph)) for _ in range(3))
    assert best < 1.0


def _timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def test_compiling_leaves_the_graph_alone_and_is_deterministic() -> None:
    graph = llama()
    before = format_graph(graph)
    one, two = compile_graph(graph), compile_graph(graph)
    assert format_graph(graph) == before
    assert one.elf == two.elf


def test_the_launch_block_has_no_overlaps(full) -> None:
    fields = sorted(full.metadata["launch"]["fields"], key=lambda place: place["offset"])
    for one, two in itertools.pairwise(fields):
        assert one["offset"] + one["bytes"] <= two["offset"]
    assert fields[-1]["offset"] + fields[-1]["bytes"] <= full.metadata["launch"]["bytes"]
    kinds = {place["name"]: place["kind"] for place in fields}
    assert kinds["T"] == "length" and kinds["ids"] == "input"
    assert kinds["samples"] == "output" and kinds["logits_va"] == "pointer"


def test_pyelftools_reads_it(full) -> None:
    elffile = pytest.importorskip("elftools.elf.elffile")
    elf = elffile.ELFFile(io.BytesIO(full.elf))
    assert elf["e_machine"] == 0x5450
    assert elf["e_type"] == "ET_DYN"
    symbols = elf.get_section_by_name(".symtab")
    (kernel,) = symbols.get_symbol_by_name("step")
    text = elf.get_section_by_name(".text")
    assert kernel["st_info"]["type"] == "STT_FUNC"
    assert kernel["st_value"] == text["sh_addr"] and kernel["st_value"] % 256 == 0
    (descriptor,) = symbols.get_symbol_by_name("step.kd")
    rodata = elf.get_section_by_name(".rodata")
    assert descriptor["st_value"] == rodata["sh_addr"]
    words = np.frombuffer(rodata.data(), np.uint32).tolist()
    assert words == [0x444B5054, 1, 0, text["sh_size"], 3, 0, 0, 0]
    notes = list(elf.get_section_by_name(".note.tpu").iter_notes())
    assert [note["n_name"] for note in notes] == ["TPU", "TPU", "TPU"]
    assert elf.get_section_by_name(".tpu.weights")["sh_type"] == "SHT_NOBITS"


def test_dwarf_leads_to_the_source_line(full) -> None:
    elffile = pytest.importorskip("elftools.elf.elffile")
    elf = elffile.ELFFile(io.BytesIO(full.elf))
    base = elf.get_section_by_name(".text")["sh_addr"]
    dwarf = elf.get_dwarf_info()
    (unit,) = dwarf.iter_CUs()
    assert [die.tag for die in unit.iter_DIEs()][:2] == ["DW_TAG_compile_unit", "DW_TAG_subprogram"]
    program = dwarf.line_program_for_CU(unit)
    rows = {
        entry.state.address - base: entry.state.line
        for entry in program.get_entries()
        if entry.state is not None and not entry.state.end_sequence
    }
    code = read_elf(full.elf)
    for at in range(0, len(code.code), 64):
        operation, module = code.origin(at)
        if operation == "paged_attention":
            assert rows[at] == 26 and re.fullmatch(r"model\.layers\.\d+\.attention", module)
    assert len(rows) == full.metadata["kernels"]["step"]["instructions"]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs binutils")
def test_readelf_reads_it_without_complaint(full, tmp_path) -> None:
    path = tmp_path / "step.elf"
    path.write_bytes(full.elf)
    for options in ("-aW", "--debug-dump=decodedline,info,abbrev"):
        done = subprocess.run(
            ["readelf", options, path], capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        assert "readelf: " not in done.stdout


def test_objdump_names_weights_lengths_and_modules(small) -> None:
    text = objdump(small.elf)
    line = next(line for line in text.splitlines() if "MATMUL.Q4_1 ACCUMULATE" in line)
    assert "weights[model.layers.0.o]" in line and "m=T" in line
    assert "matmul_add model.layers.0.o model.py:33" in line
    instructions = sum(1 for line in text.splitlines() if re.match(r"\s+[0-9a-f]+: [A-Z]", line))
    assert instructions == small.metadata["kernels"]["step"]["instructions"]


def test_every_stage_prints(small) -> None:
    assert list(small.stages) == [
        "graph", "canonical", "narrow", "fused", "lowered", "planned", "scheduled", "machine",
    ]  # fmt: skip
    assert "wait c" in small.stages["scheduled"] and "wait c" not in small.stages["planned"]
    assert " at 0x" in small.stages["planned"] and " at 0x" not in small.stages["lowered"]


def test_damaged_files_give_clear_errors(small) -> None:
    elf = small.elf
    for length in [0, 3, 63, 64, 200, 5000, len(elf) // 2, len(elf) - 1]:
        with pytest.raises(ExecutableError):
            read_metadata(elf[:length])
    with pytest.raises(ExecutableError, match="not an ELF"):
        read_metadata(b"MZ" + elf[2:])
    with pytest.raises(ExecutableError, match="machine 0x3e"):
        read_metadata(elf[:18] + b"\x3e\0" + elf[20:])
    code = read_elf(elf).code
    at = elf.index(code)
    with pytest.raises(ExecutableError, match="checksum"):
        read_metadata(elf[: at + 100] + b"\xff" + elf[at + 101 :])
    with pytest.raises(ExecutableError, match="ISA version 9"):
        read_metadata(remake(small, {b'"isa_version":1': b'"isa_version":9'}))


def test_every_damaged_byte_of_code_and_metadata_is_found(small) -> None:
    elf = small.elf
    rng = np.random.default_rng(3)
    start = elf.index(b"TPU\0") - 12
    end = elf.index(small.key) + len(small.key)
    text = elf.index(read_elf(elf).code)
    places = [*rng.integers(start, end, 400), *rng.integers(text, text + 500, 100)]
    descriptor = elf.index(np.array([0x444B5054], "<u4").tobytes())
    for at in [*places, *range(descriptor, descriptor + 16)]:
        data = bytearray(elf)
        data[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(ExecutableError):
            read_metadata(bytes(data))


def test_no_damaged_byte_anywhere_breaks_the_reader(small) -> None:
    rng = np.random.default_rng(4)
    headers = len(small.elf) - 64 * 16
    for at in [
        *range(64),
        *rng.integers(0, len(small.elf), 200),
        *range(headers, len(small.elf), 5),
    ]:
        data = bytearray(small.elf)
        data[at] ^= 1 << int(rng.integers(8))
        with contextlib.suppress(ExecutableError):  # any other error fails
            read_metadata(bytes(data))


# The verifier ------------------------------------------------------------------------
def test_every_wait_is_needed_and_missed(small) -> None:
    """Taking away any one wait is found: none is superfluous, none overlooked."""
    code = read_elf(small.elf).code
    waits = [at // 64 for at in range(0, len(code), 64) if code[at + 3]]
    assert len(waits) > 10
    for which in waits:

        def drop(index: int, instr: Instr, which: int = which) -> Instr:
            return replace(instr, wait=0, wait_imm=0) if index == which else instr

        with pytest.raises(CheckError, match="does not wait for"):
            check_executable(rewrite(small, drop))


def test_a_wait_one_too_low_is_found(small) -> None:
    def lower(_: int, instr: Instr) -> Instr:
        return replace(instr, wait_imm=instr.wait_imm - 1) if instr.wait_imm else instr

    with pytest.raises(CheckError, match="does not wait for"):
        check_executable(rewrite(small, lower))


def test_a_wait_that_cannot_end_is_found(small) -> None:
    def raise_(_: int, instr: Instr) -> Instr:
        return replace(instr, wait_imm=instr.wait_imm + 1) if instr.wait_imm else instr

    with pytest.raises(CheckError, match=r"only .* signals come before"):
        check_executable(rewrite(small, raise_))


def test_operands_outside_vmem_are_found(small) -> None:
    def move(_: int, instr: Instr) -> Instr:
        if instr.op != "V_RMSNORM":
            return instr
        return replace(instr, operands=((0, hw.VMEM_BYTES - 64), *instr.operands[1:]))

    with pytest.raises(CheckError, match="outside VMEM"):
        check_executable(rewrite(small, move))


def test_a_program_without_an_end_is_found(small) -> None:
    def endless(_: int, instr: Instr) -> Instr:
        return Instr("NOP") if instr.op == "HALT" else instr

    with pytest.raises(CheckError, match="past its end"):
        check_executable(rewrite(small, endless))


def test_backward_and_wild_branches_are_found(small) -> None:
    for target in (0, 1 << 19):

        def jump(_: int, instr: Instr, target: int = target) -> Instr:
            if instr.op != "BEQ":
                return instr
            return replace(instr, operands=(*instr.operands[:2], (0, target)))

        with pytest.raises(CheckError, match="jump"):
            check_executable(rewrite(small, jump))


def test_no_waits_at_all_is_found(small) -> None:
    with pytest.raises(CheckError):
        check_executable(strip_waits(small))


# Limits --------------------------------------------------------------------------------
def test_too_little_vmem_names_the_peak_and_the_limit() -> None:
    with pytest.raises(CompileError, match=r"needs \d+ bytes .* limit is 1000000"):
        compile_graph(llama(SMOLLM2), Options(plan=Plan(limit=1_000_000)))
    with pytest.raises(CompileError, match="Lower max_tokens"):
        compile_graph(llama(replace(SMOLLM2, max_tokens=4096)))


def test_buffers_alive_at_once_never_overlap() -> None:
    from vtpu_compiler.passes.canonicalise import Canonicalise
    from vtpu_compiler.passes.fuse import Fuse
    from vtpu_compiler.passes.lower import Lower

    program = Plan().run(Lower().run(Fuse().run(Canonicalise().run(llama()))))
    lives: dict = {}
    for index, op in enumerate(program.ops):
        for view, _ in op.accesses():
            lives.setdefault(view.buffer, []).append(index)
    buffers = list(lives)
    assert len(buffers) > 10
    for i, a in enumerate(buffers):
        assert a.offset % 64 == 0 and a.offset + a.bytes <= program.peak
        for b in buffers[i + 1 :]:
            together = lives[a][0] <= lives[b][-1] and lives[b][0] <= lives[a][-1]
            apart = a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
            assert apart or not together


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g, x: g.silu(x), "silu only as"),
        (lambda g, x: g.add(g.slice(x, 8, 16), g.slice(x, 8, 16)), "multiple of 16"),
        (lambda g, x: g.matmul(x, g.input("w", (64, 64), "q8_0")), "input w cannot be q8_0"),
        (lambda g, x: x, "is an input"),
    ],
)
def test_what_the_device_cannot_do_is_named(build, message: str) -> None:
    g = Graph("g")
    x = g.input("x", (Dim("T", 8), 64), "f32")
    with pytest.raises(CompileError, match=message):
        g.output("y", build(g, x))
        compile_graph(g)


@pytest.mark.parametrize("second", ["scatter", "attend"])
def test_a_state_that_was_updated_cannot_be_used(second: str) -> None:
    g = Graph("g")
    rows = Dim("T", 8)
    x, index = g.input("x", (rows, 64), "f32"), g.input("i", (rows,), "i32")
    old = g.state("s", (Dim("N", 64), 64), "f16")
    new = g.scatter_rows(old, x, index)
    if second == "scatter":
        g.scatter_rows(old, x, index)
    else:
        info, tables = g.input("info", (rows, 2), "i32"), g.input("b", (4, 4), "i32")
        shape = {"heads": 1, "kv_heads": 1, "head_dim": 64, "block_size": 4, "scale": 1.0}
        g.output("y", g.paged_attention(x, new, old, info, tables, **shape))
    with pytest.raises(CompileError, match="already updated"):
        compile_graph(g)


def test_two_waits_become_a_wait_of_the_sequencer() -> None:
    """An addition that needs a fresh load and a fresh product."""
    g = Graph("g")
    rows = Dim("T", 8)
    x = g.input("x", (rows, 64), "f32")
    w = g.param("w", (64, 64), "q8_0")
    table = g.param("t", (16, 64), "f32")
    index = g.input("i", (rows,), "i32")
    product = g.matmul(x, w)
    g.output("y", g.mul(product, g.gather_rows(table, index)))
    executable = compile_graph(g)
    assert "NOP" in executable.stages["scheduled"]


def test_serial_schedule_is_correct_too() -> None:
    check_executable(compile_graph(llama(), Options(schedule=Schedule(hazards=False))).elf)


# Cache and commands ----------------------------------------------------------------------
def test_cache_hits_misses_and_repairs(tmp_path) -> None:
    cache = Cache(tmp_path / "cache", limit=2)
    graph = llama(Config(layers=1))
    first = cache.compile(graph)
    assert first.stages
    again = cache.compile(graph)
    assert again.elf == first.elf and not again.stages
    assert again.metadata == read_metadata(first.elf)
    (path,) = (tmp_path / "cache").glob("*.elf")
    path.write_bytes(first.elf[:1000])
    assert cache.compile(graph).elf == first.elf
    assert path.read_bytes() == first.elf
    other = cache.compile(graph, Options(schedule=Schedule(hazards=False)))
    assert other.key != first.key
    cache.compile(llama(Config(layers=2)))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_commands(tmp_path, capsys) -> None:
    graph, output = tmp_path / "g.mlir", tmp_path / "g.elf"
    graph.write_text(format_graph(llama(Config(layers=1))))
    assert main(["compile", str(graph), "-o", str(output), "--print-after=fused,machine"]) == 0
    printed = capsys.readouterr().out
    assert "// ----- fused" in printed and "HALT" in printed and "lowered" not in printed
    assert main(["objdump", str(output)]) == 0
    assert "V_ATTN" in capsys.readouterr().out
    assert main(["objdump", str(output), "--section", ".tpu.ir.fused"]) == 0
    assert "vtpu.matmul_add" in capsys.readouterr().out
    assert main(["compile", str(graph), "--set", "fuse.epilogue=false", "--print-after=fused"]) == 0
    assert "matmul_add" not in capsys.readouterr().out


def test_commands_report_errors(tmp_path, capsys) -> None:
    bad = tmp_path / "bad"
    bad.write_text("nonsense")
    assert main(["compile", str(bad)]) == 1
    assert "bad: line 1" in capsys.readouterr().err
    assert main(["objdump", str(bad)]) == 1
    assert "not an ELF file" in capsys.readouterr().err
    assert main(["objdump", str(tmp_path / "missing")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["compile", str(bad), "--set", "fuse.speed=9"]) == 1
    assert "no such option" in capsys.readouterr().err
