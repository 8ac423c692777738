# SPDX-License-Identifier: MIT
"""Random graphs: whatever the passes do to them, the results stay."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from isa_machine import ARGUMENT_SPACE, Machine
from stepping import random_weights
from vtpu_compiler import Dim, Graph, Options, Value, compile_graph, pack_weights
from vtpu_compiler.interp import interpret
from vtpu_compiler.layout import dequantise
from vtpu_compiler.parser import parse_graph
from vtpu_compiler.passes.canonicalise import Canonicalise
from vtpu_compiler.passes.fuse import Fuse
from vtpu_compiler.passes.narrow import Narrow
from vtpu_compiler.printer import format_graph
from vtpu_compiler.verify import verify

WIDTHS = (32, 64, 96)
TOKENS, ROWS, SLOTS = Dim("T", 7), Dim("R", 3), Dim("N", 64)


def random_graph(seed: int) -> Graph:
    """Operations on whatever came before, with results that some outputs need."""
    chance = random.Random(seed)
    g = Graph(f"random{seed}")
    index = g.input("index", (TOKENS,), "i32")
    rows = g.input("rows", (ROWS,), "i32")
    slots = g.input("slots", (TOKENS,), "i32")
    info, tables = g.input("info", (TOKENS, 2), "i32"), g.input("tables", (2, 4), "i32")
    angles = g.gather_rows(g.param("rope.cos_sin", (16, 32), "f32"), index)
    values = [g.input("x", (TOKENS, 64), "f32"), angles]
    values.append(g.gather_rows(g.param("table", (16, 96), "q8_0"), index))
    latest = {name: g.state(name, (SLOTS, width), "f32") for name, width in (("k", 32), ("v", 32))}

    def pick(width: int | None = None) -> Value:
        """The newer, the likelier."""
        fitting = [v for v in values if width is None or v.width() == width]
        return fitting[-1 - min(int(chance.expovariate(0.4)), len(fitting) - 1)]

    for number in range(chance.randint(3, 25)):
        kind = chance.choice(
            ["matmul", "matmul", "residual", "add", "swiglu", "norm", "slice", "rope", "attention"]
        )
        x = pick()
        width = x.width()
        if kind in ("matmul", "residual"):
            out = width if kind == "residual" else chance.choice(WIDTHS)
            dtype = chance.choice(["q4_1", "q4_1", "q4_0"])
            product = g.matmul(x, g.param(f"w{number}", (out, width), dtype))
            y = g.add(pick(out), product) if kind == "residual" else product
        elif kind == "add":
            y = g.add(x, pick(width))
        elif kind == "swiglu":
            y = g.mul(g.silu(x), pick(width))
        elif kind == "norm":
            y = g.rms_norm(x, g.param(f"n{width}", (width,), "f32"), 1e-5)
        elif kind == "slice":
            start = 16 * chance.randint(0, width // 16 - 2)
            y = g.slice(x, start, 32)
        elif kind == "rope":
            y = g.rope(x, angles, 32, chance.choice(["pairs", "halves"]))
        else:
            for name in latest:
                latest[name] = g.scatter_rows(latest[name], pick(32), slots)
            q = g.rope(x, angles, 32, "pairs")  # which is dense
            y = g.paged_attention(
                q, latest["k"], latest["v"], info, tables,
                heads=width // 32, kv_heads=1, head_dim=32, block_size=16, scale=0.1,
            )  # fmt: skip
        # Norms keep magnitudes near one, whatever is chained.
        values.append(
            g.rms_norm(y, g.param(f"n{y.width()}", (y.width(),), "f32"), 1e-5)
            if chance.random() < 0.4
            else y
        )
    for number in range(chance.randint(1, 3)):
        value = pick()
        if value.op.name == "input":
            continue
        if chance.random() < 0.5:
            value = g.take_rows(value, rows)
        g.output(f"y{number}", value, indirect=chance.random() < 0.3)
    g.output("last", g.mul(angles, angles))
    return g


def inputs(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(1, TOKENS.max + 1))
    rows = int(rng.integers(0, ROWS.max + 1))
    info = np.stack([rng.integers(0, 65, tokens), rng.integers(0, 2, tokens)], axis=1)
    slots = rng.permutation(SLOTS.max)[:tokens].astype(np.uint32)
    slots[rng.random(tokens) < 0.2] = 0xFFFFFFFF
    return {
        "index": rng.integers(0, 16, tokens).astype(np.uint32),
        "rows": rng.integers(0, tokens, rows).astype(np.uint32),
        "slots": slots,
        "info": info.astype(np.uint32),
        "tables": np.stack([rng.permutation(4) for _ in range(2)]).astype(np.uint32),
        "x": rng.normal(size=(tokens, 64)).astype(np.float32),
    }


def run(elf_options: Options, graph: Graph, given: dict[str, np.ndarray], seed: int):
    """Outputs and the final states, from the simulated machine."""
    executable = compile_graph(graph, elf_options)
    metadata = executable.metadata
    raw = random_weights(graph)
    weights = np.zeros(metadata["weights"]["bytes"], np.uint8)
    pack_weights(metadata, raw.__getitem__, weights)
    launch = np.full(metadata["launch"]["bytes"], 0xA5, np.uint8)
    # Sequence rows: state, then what indirect outputs point to.
    lengths = {"T": len(given["index"]), "R": len(given["rows"]), "N": SLOTS.max}
    memory = [
        weights,
        launch,
        *(np.zeros(s["slot_bytes"] * 64, np.uint8) for s in metadata["states"]),
    ]
    places = {}
    for place in metadata["launch"]["fields"]:
        at, name = place["offset"], place["name"]
        if place["kind"] == "length":
            data = np.array([lengths[name]], np.uint32)
        elif place["kind"] == "pointer":
            memory.append(np.zeros(place["max_shape"][0] * place["max_shape"][1] * 4, np.uint8))
            data = np.array([len(memory) * ARGUMENT_SPACE], np.uint64)
            places[name.removesuffix("_va")] = (memory[-1], 0, place)
        elif place["kind"] == "input":
            data = given[name]
        else:
            places[name] = (launch, at, place)
            continue
        bytes_ = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        launch[at : at + bytes_.size] = bytes_
    machine = Machine(memory, seed)
    machine.run(executable.elf)
    outputs = {}
    for name, (source, at, place) in places.items():
        count = lengths[place["shape"][0]]
        width = place["shape"][1]
        outputs[name] = source[at : at + 4 * count * width].view(np.float32).reshape(count, width)
    return outputs, [np.asarray(m) for m in memory[2 : 2 + len(metadata["states"])]]


@pytest.mark.parametrize("seed", range(int(os.environ.get("VTPU_FUZZ", "40"))))
def test_random_graph(seed: int) -> None:
    graph = random_graph(seed)
    verify(graph)
    assert format_graph(parse_graph(format_graph(graph))) == format_graph(graph)
    given = inputs(seed)
    raw = random_weights(graph)

    def param(name: str) -> np.ndarray:
        dtype, shape, data = raw[name]
        return dequantise(dtype, shape, data)

    def reference(stage: Graph) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        states = {name: np.zeros((SLOTS.max, 32), np.float32) for name in "kv"}
        return interpret(stage, param, given, states), states

    wanted, wanted_states = reference(graph)
    stage = graph
    for compiler_pass in (Canonicalise(), Narrow(), Fuse()):
        stage = compiler_pass.run(stage)
        verify(stage)
        found, _ = reference(stage)
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-3, atol=1e-3)
    found, states = run(Options(), graph, given, seed)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=5e-3, atol=5e-3)
    if states:
        both = states[0].view(np.float32).reshape(-1, SLOTS.max, 32)
        names = [op.attrs["name"] for op in stage.ops if op.name == "state"]
        for name, values in zip(names, both, strict=True):
            np.testing.assert_allclose(values, wanted_states[name], rtol=5e-3, atol=5e-3)
