# SPDX-License-Identifier: MIT
"""Weight packing against the tile's definition, byte by byte."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from isa_machine import tiles
from vtpu_compiler import CompileError, Dim, Graph, compile_graph, pack_weights
from vtpu_compiler.layout import BLOCK_BYTES, dequantise, pack_matrix, tensor_bytes, unpack_matrix
from vtpu_compiler.ops import tile_format


def random_rows(dtype: str, shape: tuple[int, int]) -> bytes:
    rng = np.random.default_rng(5)
    if dtype == "i8":
        scales = rng.uniform(-1, 1, shape[0]).astype(np.float32)
        return rng.integers(-128, 128, shape, dtype=np.int8).tobytes() + scales.tobytes()
    if dtype == "bf16":
        return rng.integers(0, 0x7F80, shape, dtype=np.uint16).tobytes()
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // 32, BLOCK_BYTES[dtype]), dtype=np.uint8)
    scales = 2 if dtype == "q4_1" else 1
    halves = rng.uniform(-1, 1, (len(blocks), scales)).astype(np.float16)
    blocks[:, : 2 * scales] = halves.view(np.uint8)
    return blocks.tobytes()


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_1", "i8", "bf16"])
def test_tiles_mean_what_the_rows_mean(dtype: str) -> None:
    shape = (48, 192)
    raw = random_rows(dtype, shape)
    out = np.zeros(tensor_bytes(dtype, shape), np.uint8)
    pack_matrix(dtype, shape, raw, out)
    values = tiles(tile_format(dtype), out, *shape)
    np.testing.assert_array_equal(values, dequantise(dtype, shape, raw))
    assert unpack_matrix(dtype, shape, out) == raw


def test_one_q4_1_value_by_hand() -> None:
    """Row 3, column 37 of 16x64: the second block's element 5."""
    raw = bytearray(16 * 2 * 20)
    block = (3 * 2 + 1) * 20
    raw[block : block + 2] = np.float16(0.5).tobytes()
    raw[block + 2 : block + 4] = np.float16(-1.25).tobytes()
    raw[block + 4 + 5] = 0xB7
    out = np.zeros(2 * 320, np.uint8)
    pack_matrix("q4_1", (16, 64), bytes(raw), out)
    tile = out[320:]
    assert tile[1 * 64 + 4 * 3 + 1] == 0xB7  # group 1 holds columns 4..7 and 20..23
    assert tile[256 + 2 * 3 : 258 + 2 * 3].view(np.float16)[0] == 0.5
    assert tile[288 + 2 * 3 : 290 + 2 * 3].view(np.float16)[0] == -1.25
    values = dequantise("q4_1", (16, 64), bytes(raw))
    assert values[3, 32 + 5] == 7 * 0.5 - 1.25 and values[3, 32 + 21] == 11 * 0.5 - 1.25


def test_one_i8_value_by_hand() -> None:
    """Row 19, column 70 of 32x128: the second row of tiles, its second tile."""
    raw = bytearray(32 * 128 + 32 * 4)
    raw[19 * 128 + 70] = 0x85  # -123
    at = 32 * 128 + 19 * 4
    raw[at : at + 4] = np.float32(0.25).tobytes()
    out = np.zeros(tensor_bytes("i8", (32, 128)), np.uint8)
    pack_matrix("i8", (32, 128), bytes(raw), out)
    tile_row = out[2 * 1024 + 64 :]
    assert tile_row[1024 + 1 * 64 + 4 * 3 + 2] == 0x85  # group 1: columns 68 to 71
    assert tile_row[2048 + 4 * 3 :][:4].view(np.float32)[0] == 0.25
    assert dequantise("i8", (32, 128), bytes(raw))[19, 70] == -123 * 0.25


@pytest.mark.parametrize("multiplied", [True, False])
def test_bf16_is_tiled_where_it_is_multiplied(multiplied: bool) -> None:
    """A table that is only gathered from stays as the file has it."""
    raw = random_rows("bf16", (32, 64))
    g = Graph("g")
    table = g.param("t", (32, 64), "bf16")
    x = g.gather_rows(table, g.input("i", (Dim("T", 4),), "i32"))
    g.output("y", g.matmul(x, table) if multiplied else x)
    metadata = compile_graph(g).metadata
    (entry,) = metadata["weights"]["entries"]
    assert (entry["dtype"], entry["format"]) == ("bf16", "BF16_TILES" if multiplied else "BF16")
    image = np.zeros(metadata["weights"]["bytes"], np.uint8)
    pack_weights(metadata, lambda _: ("bf16", (32, 64), raw), image)
    lies = image[entry["offset"] :][: entry["bytes"]]
    assert (unpack_matrix("bf16", (32, 64), lies) if multiplied else lies.tobytes()) == raw


def test_packing_is_fast() -> None:
    shape = (8192, 1536)
    raw = random_rows("q4_1", shape)
    out = np.zeros(tensor_bytes("q4_1", shape), np.uint8)
    best = min(_timed(lambda: pack_matrix("q4_1", shape, raw, out)) for _ in range(3))
    assert len(raw) / best > 50e6  # bytes a second; 98 MB in well under two seconds, even busy


def _timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@pytest.fixture
def program():
    g = Graph("g")
    x = g.gather_rows(g.param("t", (32, 64), "f32"), g.input("i", (Dim("T", 4),), "i32"))
    x = g.rms_norm(x, g.param("n", (64,), "f32"), 1e-5)
    a = g.matmul(x, g.param("a", (32, 64), "q4_1"))
    b = g.matmul(x, g.param("b", (32, 64), "q4_1"))
    g.output("y", g.add(a, b))
    rng = np.random.default_rng(1)
    raw = {
        "t": ("f32", (32, 64), rng.normal(size=(32, 64)).astype(np.float32).tobytes()),
        "n": ("f32", (64,), rng.normal(size=64).astype(np.float32).tobytes()),
        "a": ("q4_1", (32, 64), random_rows("q4_1", (32, 64))),
        "b": ("q4_1", (32, 64), random_rows("q4_1", (32, 64))[::-1]),
    }
    return compile_graph(g).metadata, raw


def test_image_has_every_param_where_the_executable_says(program) -> None:
    metadata, raw = program
    image = np.full(metadata["weights"]["bytes"], 0xCC, np.uint8)
    pack_weights(metadata, raw.__getitem__, image)
    entries = {entry["name"]: entry for entry in metadata["weights"]["entries"]}
    assert set(entries) == {"t", "n", "a+b"}
    for name in "tn":
        at = entries[name]["offset"]
        assert image[at : at + len(raw[name][2])].tobytes() == raw[name][2]
    fused = entries["a+b"]
    tiles_ = image[fused["offset"] :][: fused["bytes"]]
    assert unpack_matrix("q4_1", (64, 64), tiles_) == raw["a"][2] + raw["b"][2]

    file = io.BytesIO()
    pack_weights(metadata, raw.__getitem__, file)
    padded = np.frombuffer(file.getvalue(), np.uint8)
    assert padded.size == image.size
    for entry in entries.values():
        piece = slice(entry["offset"], entry["offset"] + entry["bytes"])
        assert (padded[piece] == image[piece]).all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", ("f16", (64,), bytes(128)), "weight n is f16 64"),
        ("a", ("q4_1", (32, 32), bytes(640)), "weight a is q4_1 32x32"),
        ("a", ("q4_1", (32, 64), bytes(10)), "has 10 bytes, not 1280"),
        ("b", ("q4_1", (16, 64), bytes(640)), "has 48 rows, the executable needs 64"),
        ("b", ("q4_1", (64, 64), bytes(2560)), "has 96 rows, the executable needs 64"),
    ],
)
def test_a_wrong_weight_is_named(program, name: str, value, message: str) -> None:
    metadata, raw = program
    raw[name] = value
    with pytest.raises(CompileError, match=message):
        pack_weights(metadata, raw.__getitem__, np.zeros(metadata["weights"]["bytes"], np.uint8))


def test_a_small_or_read_only_buffer_is_named(program) -> None:
    metadata, raw = program
    with pytest.raises(CompileError, match="the buffer has 10"):
        pack_weights(metadata, raw.__getitem__, bytearray(10))
    with pytest.raises(CompileError, match="read-only"):
        pack_weights(metadata, raw.__getitem__, bytes(metadata["weights"]["bytes"]))
