# SPDX-License-Identifier: MIT
"""Executables on the device's core, its engines in random legal orders."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from damage import rewrite
from llama_graph import Config, llama
from stepping import Sequence, Stepper, random_weights
from test_compiler_execution import compare as compare_exactly
from test_compiler_execution import sequences
from vtpu_compiler import Dim, Graph, Options, compile_graph, pack_weights, read_elf
from vtpu_compiler.asm import Instr, decode
from vtpu_compiler.check import CheckError, check_executable
from vtpu_compiler.layout import dequantise
from vtpu_compiler.passes.fuse import Fuse
from vtpu_compiler.passes.narrow import Narrow
from vtpu_compiler.passes.schedule import Schedule

REPO = Path(__file__).parents[3]
sys.path.append(str(REPO / "tests" / "host" / "device"))


def compare(found, wanted, logits: bool = True) -> None:
    """The device rounds activations to 16 bits, the reference does not."""
    compare_exactly(found, wanted, logits=logits, tolerance=2e-3)


@pytest.fixture(scope="module")
def core():
    """The module that drives libvtpucore.so, and the library, built if need be."""
    if not (REPO / "qemu-device" / "core" / "Makefile").exists():
        pytest.skip("the device's core is not in this tree")
    import machine

    source = REPO / "qemu-device" / "core"
    build = os.environ.get("VTPU_CORE_BUILD", str(source / "build"))
    done = subprocess.run(
        ["make", "-s", "-C", source, f"BUILD={build}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return machine, machine.load_library(Path(build) / "libvtpucore.so")


class Device:
    """Runs a stepper's executable; keeps weights and states in HBM between steps."""

    def __init__(
        self,
        core,
        config: Config,
        seed: int,
        options: Options | None,
        check_races: bool = False,
    ) -> None:
        harness, library = core
        self.machine = harness.Machine(
            library, hbm_bytes=64 << 20, seed=seed, check_races=check_races
        )
        self.machine.identity()
        self.machine.enable()
        self.queue = harness.Queue(self.machine)
        graph = llama(config)
        self.executable = compile_graph(graph, options)
        self.elf = read_elf(self.executable.elf)
        self.stepper = Stepper(config, graph, self.executable, self.run)
        self.places = [
            self.machine.place(bytes(memory))
            for memory in (
                self.stepper.weights,
                np.zeros(self.executable.metadata["launch"]["bytes"], np.uint8),
                self.stepper.state,
                self.stepper.logits,
            )
        ]
        self.code = self.machine.place(self.elf.code)
        self.args = self.machine.place(struct.pack("<3Q", *self.places[:3]))

    def run(self, memory: list[np.ndarray]) -> None:
        """Arguments are weights, launch block, states; then the logits' memory."""
        for place, data in zip(self.places[1:], memory[1:], strict=True):
            self.machine.put(place, data.tobytes())
        payload = struct.pack("<QIIQI", self.code, len(self.elf.code), 0, self.args, 3)
        self.queue.do("RUN", payload)
        for place, data in zip(self.places[1:], memory[1:], strict=True):
            data[:] = np.frombuffer(self.machine.get(place, data.size), np.uint8)

    def step(self, work: list[tuple[Sequence, int]], **options: object):
        return self.stepper.step(work, logits_va=self.places[3], **options)


@pytest.fixture
def open_device(core) -> Iterator:
    opened: list[Device] = []

    def make(
        config: Config, seed: int = 0, options: Options | None = None, check_races: bool = False
    ) -> Device:
        opened.append(Device(core, config, seed, options, check_races))
        return opened[-1]

    yield make
    for device in opened:
        device.machine.__exit__(None, None, None)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
def test_mixed_prefill_and_decode(open_device, seed: int) -> None:
    device = open_device(Config(), seed)
    first, second = sequences(Config(), [13, 16])
    compare(*device.step([(first, 12)]))
    compare(*device.step([(first, 1), (second, 7)]))
    compare(*device.step([(second, 9)]))


@pytest.mark.parametrize(
    "config",
    [
        Config(dtype="q4_0", rope="halves", state="f32"),
        Config(dtype="q8_0", head_dtype="q4_0", heads=2, kv_heads=1, head_dim=32),
        Config(layers=40),
        Config(state="bf16"),
    ],
    ids=["q4_0-halves-f32", "q8_0-q4_0-head", "more-layers-than-registers", "bf16-state"],
)
def test_other_models(open_device, config: Config) -> None:
    device = open_device(config)
    a, b = sequences(config, [3, 5])
    compare(*device.step([(a, 3), (b, 4)]))


def test_results_are_the_same_bits_in_any_batch_chunking_and_order(open_device) -> None:
    """The promise that serving builds on."""
    config = Config()
    wanted = None
    for seed, chunks, others in [
        (0, [11], 0),
        (1, [4, 4, 3], 0),
        (2, [10, 1], 2),
        (3, [1] * 11, 1),
    ]:
        device = open_device(config, seed)
        target, *company = sequences(config, [11, 7, 9])
        for number, chunk in enumerate(chunks):
            work = [(other, 1) for other in company[:others] if number < 7]
            found, _ = device.step([*work, (target, chunk)])
        row = found["logits"][-1].tobytes(), found["samples"][-1].tobytes()
        wanted = wanted or row
        assert row == wanted


def test_narrowing_and_fusion_change_no_bit(open_device) -> None:
    plain = Options(narrow=Narrow(rows=False), fuse=Fuse(siblings=False, epilogue=False))
    results = []
    for options in (plain, Options(narrow=Narrow(rows=False)), Options()):
        device = open_device(Config(), options=options)
        first, second = sequences(Config(), [13, 6])
        found, _ = device.step([(first, 13), (second, 5)])
        results.append((found["logits"].tobytes(), found["samples"].tobytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("dtype", ["i8", "bf16"])
def test_whole_row_formats_bit_for_bit(core, dtype: str) -> None:
    """Tied to a table, fused with a sibling and with what it is added to."""
    harness, library = core
    import numerics_reference as reference

    tokens, shape = 5, (64, 128)
    g = Graph("g")
    ids = g.input("ids", (Dim("T", 8),), "i32")
    table = g.param("table", (48, 128), dtype)
    x = g.gather_rows(table, ids)
    a, b = (g.matmul(x, g.param(name, shape, dtype)) for name in "ab")
    y = g.matmul(g.gather_rows(g.param("f", (16, 128), "f32"), ids), table)
    g.output("sum", g.add(a, b))
    g.output("logits", y)
    executable = compile_graph(g)
    metadata = executable.metadata
    raw = random_weights(g)
    weights, launch = (np.zeros(metadata[k]["bytes"], np.uint8) for k in ("weights", "launch"))
    pack_weights(metadata, raw.__getitem__, weights)
    fields = {f["name"]: f for f in metadata["launch"]["fields"]}
    picked = np.arange(3, 3 + tokens, dtype=np.uint32)
    launch.view(np.uint32)[fields["T"]["offset"] // 4] = tokens
    launch.view(np.uint32)[fields["ids"]["offset"] // 4 :][:tokens] = picked
    with harness.Machine(library) as machine:
        machine.identity()
        machine.enable()
        places = [machine.place(piece.tobytes()) for piece in (weights, launch)]
        harness.Queue(machine).run(read_elf(executable.elf).code, tuple(places))
        launch[:] = np.frombuffer(machine.get(places[1], launch.size), np.uint8)

    def product(x: np.ndarray, name: str) -> np.ndarray:
        _, (rows, columns), data = raw[name]
        if dtype == "bf16":
            bits = np.frombuffer(data, np.uint16).reshape(rows, columns)
            return reference.matmul_bf16(x, bits)
        q = np.frombuffer(data[: rows * columns], np.int8).reshape(rows, columns)
        return reference.matmul_i8(x, q, np.frombuffer(data[q.size :], np.float32))

    def output(name: str, width: int) -> np.ndarray:
        at = fields[name]["offset"] // 4
        return launch.view(np.float32)[at : at + tokens * width].reshape(tokens, width)

    def rows(name: str) -> np.ndarray:
        return dequantise(*raw[name])[picked]

    wanted = product(rows("table"), "a") + product(rows("table"), "b")
    assert (output("sum", 64).view(np.uint32) == wanted.view(np.uint32)).all()
    wanted = product(rows("f"), "table")
    assert (output("logits", 48).view(np.uint32) == wanted.view(np.uint32)).all()


def test_unwanted_logits_are_not_stored(open_device) -> None:
    device = open_device(Config())
    (sequence,) = sequences(Config(), [5])
    found, wanted = device.step([(sequence, 5)], want_logits=False)
    compare(found, wanted, logits=False)
    assert (device.stepper.logits == 0xA5).all()


# --- the device's race checker on the compiler's programs ---


@pytest.mark.parametrize(
    "options", [None, Options(schedule=Schedule(hazards=False))], ids=["waits", "one by one"]
)
def test_compiled_programs_have_no_race(open_device, options: Options | None) -> None:
    """Prefill, mixed and decode steps; with every wait that could be, too."""
    device = open_device(Config(), options=options, check_races=True)
    first, second = sequences(Config(), [13, 16])
    for work in ([(first, 12)], [(first, 1), (second, 7)], [(second, 9)]):
        compare(*device.step(work))


def test_every_wait_is_needed_or_proven_not_to_be(open_device) -> None:
    """Each wait is taken out, alone: the device reports a race in one run in program order, or
    the compiler's own checker, which shares nothing with the device's, proves the order."""
    config = Config()
    device = open_device(config, check_races=True)
    whole, reported = device.elf.code, 0
    waiting = [n for n in range(len(whole) // 64) if decode(whole[64 * n : 64 * n + 64]).wait]
    assert len(waiting) > 20
    for victim in waiting:

        def drop(number: int, instr: Instr, victim: int = victim) -> Instr:
            return replace(instr, wait=0, wait_imm=0) if number == victim else instr

        damaged = rewrite(device.executable, drop)
        device.machine.put(device.code, read_elf(damaged).code)
        first, second = sequences(config, [config.max_tokens - 1, 5])
        try:
            device.step([(first, config.max_tokens - 5), (second, 5)])
        except AssertionError:
            fault = device.queue.fault()
            assert str(fault["cause"]).startswith("RACE_"), fault
            # Where the order is lost: the instruction itself, or one that relied on it.
            assert int(fault["pc"]) >= 64 * victim
            with pytest.raises(CheckError):
                check_executable(damaged)
            device.queue.restart()
            device.queue.fences = 0
            struct.pack_into("<Q", device.machine.system, device.queue.fence_at, 0)
            reported += 1
        else:
            check_executable(damaged)
    assert reported > len(waiting) // 2
