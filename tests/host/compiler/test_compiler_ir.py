# SPDX-License-Identifier: MIT
"""The graph IR: building, checking, text."""

from __future__ import annotations

import importlib.util

import pytest
from llama_graph import SMOLLM2, llama
from vtpu_compiler import CompileError, Dim, Graph
from vtpu_compiler.ir import Type, Value
from vtpu_compiler.parser import parse_graph
from vtpu_compiler.passes.canonicalise import Canonicalise
from vtpu_compiler.passes.fuse import Fuse
from vtpu_compiler.passes.narrow import Narrow
from vtpu_compiler.printer import format_graph
from vtpu_compiler.verify import verify

T = Dim("T", 8)


def names(graph) -> list[str]:
    return [op.name for op in graph.ops if op.name not in ("param", "input", "state")]


def x_and_graph(width: int = 64) -> tuple[Graph, Value]:
    g = Graph("g")
    return g, g.input("x", (T, width), "f32")


def test_types_are_inferred() -> None:
    g, x = x_and_graph()
    y = g.matmul(x, g.param("w", (96, 64), "q4_1"))
    assert y.type == Type((T, 96), "f32")
    assert g.slice(y, 32, 16).type == Type((T, 16), "f32")
    assert g.gather_rows(g.param("t", (7, 5), "f16"), g.input("i", (T,), "i32")).width() == 5


def test_leaves_are_unique() -> None:
    g, x = x_and_graph()
    assert g.input("x", (T, 64), "f32") is x
    with pytest.raises(CompileError, match=r"input x is .* and also"):
        g.input("x", (T, 32), "f32")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g, x: g.matmul(x, g.param("w", (96, 32), "q4_1")), "64 columns, the weight 32"),
        (lambda g, x: g.matmul(x, g.param("w", (90, 64), "q4_1")), "not a multiple of 16"),
        (lambda g, x: g.matmul(x, g.param("w", (96, 64), "f32")), "q8_0 or q4_0"),
        (lambda g, x: g.slice(x, 60, 16), "60 to 76 are not inside 64"),
        (lambda g, x: g.add(x, g.slice(x, 0, 32)), "operands differ"),
        (lambda g, x: g.rms_norm(x, g.param("n", (32,), "f32"), 1e-5), "weight must be 64"),
        (lambda g, x: g.rope(x, x, 24, "pairs"), "head_dim 24"),
        (lambda g, x: g.rope(x, x, 64, "spiral"), "spiral"),
        (lambda g, x: g.param("w", (4,), "q5_1"), "no element type"),
        (lambda g, x: g.add_op("tan", (x,)), "no operation 'tan'"),
        (lambda g, x: g.add_op("silu", (x, x)), "has 2 operands"),
        (lambda g, x: g.add_op("slice", (x,), start=0), "lacks the attribute size"),
        (lambda g, x: g.sample(x, x), "params must be"),
    ],
)
def test_wrong_operations_name_the_reason_and_the_place(build, message: str) -> None:
    g, x = x_and_graph()
    with (
        pytest.raises(CompileError, match=message) as caught,
        g.location("net.py", 12, "a.b"),
    ):
        build(g, x)
    if "element type" not in message:
        assert "net.py:12, module a.b" in str(caught.value)


def test_verify_finds_use_before_definition() -> None:
    g, x = x_and_graph()
    y = g.silu(x)
    g.output("y", y)
    verify(g)
    g.ops[1], g.ops[2] = g.ops[2], g.ops[1]
    with pytest.raises(CompileError, match="not defined before"):
        verify(g)


def test_verify_finds_a_wrong_type() -> None:
    g, x = x_and_graph()
    g.silu(x).type = Type((T, 32), "f32")
    with pytest.raises(CompileError, match="the graph says"):
        verify(g)


def test_text_round_trip_of_a_whole_model() -> None:
    graph = llama(SMOLLM2)
    text = format_graph(graph)
    assert format_graph(parse_graph(text)) == text
    fused = format_graph(Fuse().run(Canonicalise().run(graph)))
    assert format_graph(parse_graph(fused)) == fused


def test_text_escapes() -> None:
    g = Graph('a "b" \\ é')
    with g.location("dir with (paren)/ü.py", 3, 'm"x'):
        x = g.input("x\n}", (T, 16), "f32")
        g.output("y", g.silu(x))
    text = format_graph(g)
    assert format_graph(parse_graph(text)) == text
    assert parse_graph(text).ops[0].loc.file == "dir with (paren)/ü.py"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace("vtpu.silu", "vtpu.tan"), "no operation 'tan'"),
        (lambda t: t.replace("(%0)", "(%9)"), "line 3: %9 is not defined"),
        (lambda t: t.replace("tensor<?x16xf32", "tensor<?x16xf99", 1), "line 2"),
        (lambda t: t[: t.index("})")], "not closed"),
        (lambda t: t.replace("f32, [", "f32, [[", 1), "line 2"),
        (lambda t: "", "line 1"),
    ],
)
def test_bad_text_names_the_line(change, message: str) -> None:
    g = Graph("g")
    g.output("y", g.silu(g.input("x", (T, 16), "f32")))
    with pytest.raises(CompileError, match=message):
        parse_graph(change(format_graph(g)))


@pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="needs jaxlib's MLIR")
def test_stock_mlir_reads_the_text() -> None:
    from jaxlib.mlir import ir

    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        text = format_graph(Fuse().run(Canonicalise().run(llama())))
        module = ir.Module.parse(text)
        assert module.operation.verify()


# Passes ------------------------------------------------------------------------
def test_dead_code_goes_but_state_updates_stay() -> None:
    g, x = x_and_graph()
    g.silu(x)
    state = g.state("s", (32, 64), "f16")
    g.scatter_rows(state, x, g.input("i", (T,), "i32"))
    assert names(Canonicalise().run(g)) == ["scatter_rows"]


def test_slices_fold_and_equal_operations_merge() -> None:
    g, x = x_and_graph()
    whole = g.slice(x, 0, 64)
    a = g.slice(g.slice(whole, 16, 48), 16, 16)
    b = g.slice(x, 32, 16)
    g.output("y", g.add(a, b))
    graph = Canonicalise().run(g)
    assert names(graph) == ["slice", "add", "output"]
    assert graph.ops[1].attrs == {"start": 32, "size": 16}


def test_the_last_layer_computes_only_the_rows_to_sample() -> None:
    graph = Narrow().run(Canonicalise().run(llama()))
    verify(graph)
    rows = {
        op.name: op.value.shape[0].name
        for op in graph.ops
        if op.loc.module.startswith("model.layers.1.") and op.name not in ("param", "state")
    }
    assert {name for name, length in rows.items() if length == "R"} == {
        "take_rows", "matmul", "add", "rms_norm", "silu_mul",
    }  # fmt: skip
    assert rows["paged_attention"] == rows["rope"] == "T"
    first = [op for op in graph.ops if op.loc.module.startswith("model.layers.0.")]
    assert all(op.value.shape[0] != Dim("R", 5) for op in first)
    assert names(graph).count("take_rows") == 2


def test_rows_that_something_else_needs_are_all_computed() -> None:
    g, x = x_and_graph()
    y = g.mul(x, x)
    g.output("some", g.take_rows(y, g.input("i", (Dim("R", 4),), "i32")))
    g.output("all", y)
    graph = Narrow().run(g)
    assert names(graph) == names(g)


def test_rows_taken_by_two_indices_are_all_computed() -> None:
    g, x = x_and_graph()
    i, j = (g.input(name, (Dim("R", 4),), "i32") for name in "ij")
    y = g.mul(x, x)
    g.output("a", g.take_rows(y, i))
    g.output("b", g.take_rows(y, j))
    assert names(Narrow().run(g)) == names(g)


def test_fusion_of_a_llama_layer() -> None:
    graph = Fuse().run(Canonicalise().run(llama()))
    verify(graph)
    layer = [op.name for op in graph.ops if op.loc.module.startswith("model.layers.1")]
    layer = [name for name in layer if name not in ("param", "state")]
    assert layer == [
        "rms_norm", "matmul", "slice", "slice", "slice", "rope", "rope",
        "scatter_rows", "scatter_rows", "paged_attention", "matmul_add",
        "rms_norm", "matmul", "slice", "slice", "silu_mul", "matmul_add",
    ]  # fmt: skip
    parts = [op.attrs["parts"] for op in graph.ops if "parts" in op.attrs]
    assert ("model.layers.1.q", "model.layers.1.k", "model.layers.1.v") in parts


def test_no_accumulation_onto_what_is_still_needed() -> None:
    g, x = x_and_graph()
    w = g.param("w", (64, 64), "q4_1")
    h = g.silu(x)
    g.output("sum", g.add(h, g.matmul(x, w)))
    g.output("h", h)
    assert "matmul_add" not in names(Fuse().run(g))


def test_no_accumulation_onto_a_slice_or_an_input() -> None:
    g, x = x_and_graph()
    w = g.param("w", (64, 64), "q4_1")
    g.output("sum", g.add(x, g.matmul(x, w)))
    assert "matmul_add" not in names(Fuse().run(g))


def test_no_accumulation_onto_what_is_stored_in_the_end() -> None:
    g, x = x_and_graph()
    h = g.mul(x, x)
    product = g.matmul(x, g.param("w", (64, 64), "q4_1"))
    g.output("h", h, indirect=True)
    g.output("sum", g.add(h, product))
    assert "matmul_add" not in names(Fuse().run(g))


def test_tied_weights_are_not_copied() -> None:
    g, x = x_and_graph()
    shared, other = g.param("shared", (64, 64), "q4_1"), g.param("other", (64, 64), "q4_1")
    g.output("a", g.matmul(x, shared))
    g.output("b", g.matmul(x, other))
    g.output("c", g.gather_rows(shared, g.input("i", (T,), "i32")))
    graph = Fuse().run(g)
    assert names(graph).count("matmul") == 2
