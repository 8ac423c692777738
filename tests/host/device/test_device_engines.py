# SPDX-License-Identifier: MIT
"""The engines through whole programs: what they compute against numpy, on memory in one piece
and in many, and what they refuse."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numerics_reference as ref
import numpy as np
import pytest
from asm import R, ins, program, vmem_program
from machine import READ, SYSTEM_BASE, WRITE, Machine, Queue
from vtpu_compiler import hw

FMT = hw.FMT
VA = 0x6000_0000
f32 = np.float32


@pytest.fixture(params=["one piece", "many pieces", "system memory"])
def place(machine: Machine, request: pytest.FixtureRequest) -> Callable[[bytes], int]:
    """Puts bytes at a virtual address whose pages lie as the parameter says."""
    state = {"va": VA, "system": 1 << 20}

    def put(data: bytes) -> int:
        pages = (len(data) + 4095) // 4096
        va = state["va"]
        state["va"] += (pages + 1) * 4096
        if request.param == "one piece":
            machine.map(0, va, machine.place(data), pages * 4096)
        elif request.param == "system memory":
            at = state["system"]
            state["system"] += pages * 4096
            machine.system[at : at + len(data)] = data
            machine.map(0, va, SYSTEM_BASE + at, pages * 4096, READ | WRITE, hbm=False)
        else:
            homes = [machine.alloc(4096) for _ in range(pages)]
            random.Random(pages).shuffle(homes)
            for index, home in enumerate(homes):
                machine.put(home, data[index * 4096 :][:4096])
                machine.map(0, va + index * 4096, home, 4096)
        return va

    return put


def _read(machine: Machine, queue: Queue, va: int, size: int) -> bytes:
    """What the device sees at an address."""
    out = machine.alloc(size)
    queue.do("COPY", struct.pack("<QQQ", out, va, size))
    return machine.get(out, size)


def _normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(f32)


class Vmem:
    """Lays arrays out in VMEM and writes the program around an instruction."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.at = machine, 0
        self.loads: list[tuple[int, int, int]] = []

    def space(self, size: int) -> int:
        at = self.at
        self.at += (size + 63) & ~63
        return at

    def put(self, array: Any) -> int:
        data = np.ascontiguousarray(array).tobytes()
        at = self.space(len(data))
        self.loads.append((at, self.machine.place(data), len(data)))
        return at

    def run(self, queue: Queue, instruction: bytes, result: int, size: int) -> bytes:
        out = self.machine.alloc(size)
        queue.run(vmem_program(self.loads, [instruction], [(out, result, size)]))
        return self.machine.get(out, size)


def test_dma_moves_rows_with_strides(
    machine: Machine, queue: Queue, place: Callable[[bytes], int]
) -> None:
    data = np.random.default_rng(0).integers(0, 256, (50, 1000), dtype=np.uint8)
    src, dst = place(data.tobytes()), place(bytes(50 * 600))
    queue.run(
        vmem_program(
            [],
            [
                ins(
                    "DMA_LOAD",
                    dst=4,
                    src=src + 7,
                    rows=50,
                    row_bytes=500,
                    dst_stride=700,
                    src_stride=1000,
                ),
                ins(
                    "DMA_STORE",
                    dst=dst + 1,
                    src=4,
                    rows=50,
                    row_bytes=500,
                    dst_stride=600,
                    src_stride=700,
                ),
            ],
            [],
        )
    )
    got = np.frombuffer(_read(machine, queue, dst, 50 * 600), np.uint8)
    expected = np.zeros((50, 600), np.uint8)
    expected[:, 1:501] = data[:, 7:507]
    assert np.array_equal(got.reshape(50, 600), expected)


@pytest.mark.parametrize("fmt", ["F32", "BF16", "F16"])
def test_gather_and_scatter_of_rows(
    machine: Machine, queue: Queue, place: Callable[[bytes], int], fmt: str
) -> None:
    rows, width, count = 300, 48, 70
    table = _normal(1, rows, width)
    if fmt == "BF16":
        stored = (table.view(np.uint32) >> 16).astype(np.uint16)
        exact = (stored.astype(np.uint32) << 16).view(f32)
    else:
        stored = table.astype({"F32": f32, "F16": np.float16}[fmt])
        exact = stored.astype(f32)
    index = np.random.default_rng(2).permutation(rows)[:count].astype(np.uint32)
    va = place(stored.tobytes())
    vmem = Vmem(machine)
    at, out = vmem.put(index), vmem.space(count * width * 4)
    got = vmem.run(
        queue,
        ins(
            "DMA_GATHER",
            fmt=fmt,
            dst=out,
            table=va,
            index=at,
            count=count,
            width=width,
            table_rows=rows,
            dst_stride=width * 4,
        ),
        out,
        count * width * 4,
    )
    assert np.array_equal(np.frombuffer(got, f32).reshape(count, width), exact[index])

    skipped = index.copy()
    skipped[::3] = 0xFFFFFFFF
    vmem = Vmem(machine)
    at, src = vmem.put(skipped), vmem.put(-exact[index])
    vmem.run(
        queue,
        ins(
            "DMA_SCATTER",
            fmt=fmt,
            table=va,
            src=src,
            index=at,
            count=count,
            width=width,
            table_rows=rows,
            src_stride=width * 4,
        ),
        src,
        64,
    )
    after = np.frombuffer(_read(machine, queue, va, stored.nbytes), stored.dtype)
    sign = np.array(0x8000, np.uint16)
    expected = stored.copy()
    for i in skipped[skipped != 0xFFFFFFFF]:
        expected[i] = stored[i] ^ sign if fmt == "BF16" else -stored[i]
    assert np.array_equal(after.reshape(expected.shape), expected)


def test_scatter_of_the_same_row_keeps_the_last(machine: Machine, queue: Queue) -> None:
    table = machine.place(bytes(4096))
    vmem = Vmem(machine)
    rows = np.repeat(np.arange(1, 6, dtype=f32)[:, None], 16, 1)
    index, src = vmem.put(np.full(5, 2, np.uint32)), vmem.put(rows)
    vmem.run(
        queue,
        ins(
            "DMA_SCATTER",
            fmt="F32",
            table=table,
            src=src,
            index=index,
            count=5,
            width=16,
            table_rows=64,
            src_stride=64,
        ),
        src,
        64,
    )
    assert np.array_equal(np.frombuffer(machine.get(table + 128, 64), f32), rows[4])


@dataclass(frozen=True)
class Matrix:
    """Weights: bytes of the tiles, values, and the product that numerics.md defines."""

    tiles: bytes
    values: Any
    product: Callable[..., Any]  # x, before


def _matrix(fmt: str, n: int, k: int) -> Matrix:
    rng = np.random.default_rng(n * k)
    code = FMT[fmt]
    if fmt == "I8":
        w = rng.integers(-128, 128, (n, k), dtype=np.int8)
        scale = rng.standard_normal(n).astype(f32)
        tiles = ref.make_wide_tiles(w, scale, code)
        values = w.astype(f32) * scale[:, None]
        return Matrix(tiles.tobytes(), values, lambda x, b=None: ref.matmul_i8(x, w, scale, b))
    if fmt == "BF16_TILES":
        bits = ref.to_bf16(rng.standard_normal((n, k)).astype(f32))
        tiles = ref.make_wide_tiles(bits, None, code)
        values = ref.from_bf16(bits)
        return Matrix(tiles.tobytes(), values, lambda x, b=None: ref.matmul_bf16(x, bits, b))
    low, high = (-128, 128) if fmt == "Q8_0" else (0, 16)
    q = rng.integers(low, high, (n, k)).astype(np.int64)
    d, m = ((rng.standard_normal((n, k // 32)) * 0.01).astype(np.float16) for _ in range(2))
    tiles = ref.make_tiles(q, d, m, code)
    values = ref.dequantise(q, d, m, code)
    return Matrix(tiles.tobytes(), values, lambda x, b=None: ref.matmul(x, q, d, m, code, b))


@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_0", "Q4_1", "I8", "BF16_TILES"])
@pytest.mark.parametrize(("rows", "accumulate"), [(1, False), (13, True)])
def test_matmul(
    machine: Machine,
    queue: Queue,
    place: Callable[[bytes], int],
    fmt: str,
    rows: int,
    accumulate: bool,
) -> None:
    n, k = 208, 448
    matrix = _matrix(fmt, n, k)
    x, before = _normal(3, rows, k), _normal(4, rows, n)
    va = place(matrix.tiles)
    vmem = Vmem(machine)
    src, dst = vmem.put(x), vmem.put(before)
    got = vmem.run(
        queue,
        ins(
            "MATMUL",
            fmt=fmt,
            dst=dst,
            src=src,
            weight=va,
            m=rows,
            n=n,
            k=k,
            dst_stride=n * 4,
            src_stride=k * 4,
            flags=("ACCUMULATE",) if accumulate else (),
        ),
        dst,
        rows * n * 4,
    )
    expected = matrix.product(x, before if accumulate else None)
    assert np.array_equal(np.frombuffer(got, f32).reshape(rows, n), expected)


@pytest.mark.parametrize(("fmt", "k"), [("Q4_1", 2016), ("I8", 4032), ("BF16_TILES", 4032)])
def test_more_activations_than_a_pass_holds(
    machine: Machine, queue: Queue, fmt: str, k: int
) -> None:
    """A row broadcast by a zero stride, often enough for several passes over the weights."""
    rows, n = 12000, 16
    matrix = _matrix(fmt, n, k)
    weight = machine.place(matrix.tiles)
    x = _normal(5, 1, k)
    vmem = Vmem(machine)
    src, dst = vmem.put(x), vmem.space(rows * n * 4)
    got = vmem.run(
        queue,
        ins(
            "MATMUL",
            fmt=fmt,
            dst=dst,
            src=src,
            weight=weight,
            m=rows,
            n=n,
            k=k,
            dst_stride=n * 4,
            src_stride=0,
        ),
        dst,
        rows * n * 4,
    )
    expected = matrix.product(x)
    assert np.array_equal(np.frombuffer(got, f32).reshape(rows, n), np.tile(expected, (rows, 1)))
    assert machine.reg("STAT_HBM_BYTES", 8) >= 2 * len(matrix.tiles)


@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_1", "I8", "BF16_TILES"])
def test_gather_from_a_tiled_matrix(
    machine: Machine, queue: Queue, place: Callable[[bytes], int], fmt: str
) -> None:
    n, k = 160, 128
    matrix = _matrix(fmt, n, k)
    va = place(matrix.tiles)
    index = np.array([0, 159, 16, 15, 77, 77], np.uint32)
    vmem = Vmem(machine)
    at, out = vmem.put(index), vmem.space(6 * 512)
    got = vmem.run(
        queue,
        ins(
            "DMA_GATHER",
            fmt=fmt,
            dst=out,
            table=va,
            index=at,
            count=6,
            width=k,
            table_rows=n,
            dst_stride=512,
        ),
        out,
        6 * 512,
    )
    rows = np.frombuffer(got, f32).reshape(6, 128)[:, :k]
    assert np.array_equal(rows, matrix.values[index])


def _strided(x: Any, pad: int) -> Any:
    return np.concatenate([x, np.full((len(x), pad), 9e9, f32)], axis=1)


def test_vector_operations(machine: Machine, queue: Queue) -> None:
    rows, width = 33, 1040
    a, b = _normal(6, rows, width), _normal(7, rows, width)
    cases = [
        ("V_ADD", {"a": a, "b": b}, a + b),
        ("V_MUL", {"a": a, "b": b}, a * b),
        ("V_SILU_MUL", {"gate": a, "up": b}, ref.silu_mul(a, b)),
    ]
    for name, sources, expected in cases:
        vmem = Vmem(machine)
        operands: dict[str, int] = {}
        for operand, array in sources.items():
            operands[operand] = vmem.put(_strided(array, 3))
            operands[f"{operand}_stride"] = (width + 3) * 4
        out = vmem.space(rows * width * 4)
        got = vmem.run(
            queue,
            ins(name, dst=out, rows=rows, width=width, dst_stride=width * 4, **operands),
            out,
            rows * width * 4,
        )
        assert np.array_equal(np.frombuffer(got, f32).reshape(rows, width), expected), name


def test_one_row_is_broadcast_by_a_zero_stride(machine: Machine, queue: Queue) -> None:
    a, b = _normal(8, 5, 32), _normal(9, 1, 32)
    vmem = Vmem(machine)
    at, bt = vmem.put(a), vmem.put(b)
    got = vmem.run(
        queue,
        ins(
            "V_ADD", dst=at, a=at, b=bt, rows=5, width=32, dst_stride=128, a_stride=128, b_stride=0
        ),
        at,
        5 * 128,
    )
    assert np.array_equal(np.frombuffer(got, f32).reshape(5, 32), a + b)


def test_rmsnorm_and_rope(machine: Machine, queue: Queue) -> None:
    rows, heads, dim = 70, 3, 64
    width = heads * dim
    x, weight, cos_sin = _normal(10, rows, width), _normal(11, width), _normal(12, rows, dim)
    vmem = Vmem(machine)
    src, w, out = vmem.put(x), vmem.put(weight), vmem.space(rows * width * 4)
    got = vmem.run(
        queue,
        ins(
            "V_RMSNORM",
            dst=out,
            src=src,
            weight=w,
            rows=rows,
            width=width,
            aux=1e-5,
            dst_stride=width * 4,
            src_stride=width * 4,
        ),
        out,
        rows * width * 4,
    )
    expected = ref.rmsnorm(x, weight, 1e-5)
    assert np.array_equal(np.frombuffer(got, f32).reshape(rows, width), expected)
    for mode in ("PAIRS", "HALVES"):
        vmem = Vmem(machine)
        src, angles = vmem.put(x), vmem.put(cos_sin)
        got = vmem.run(
            queue,
            ins(
                "V_ROPE",
                mode=mode,
                dst=src,
                src=src,
                cos_sin=angles,
                rows=rows,
                heads=heads,
                head_dim=dim,
                dst_stride=width * 4,
                src_stride=width * 4,
            ),
            src,
            rows * width * 4,
        )
        expected = ref.rope(x, cos_sin, heads, mode == "HALVES")
        assert np.array_equal(np.frombuffer(got, f32).reshape(rows, width), expected)


def test_take(machine: Machine, queue: Queue) -> None:
    x = _normal(13, 40, 24)
    index = np.array([39, 0, 7, 7], np.uint32)
    vmem = Vmem(machine)
    src, at, out = vmem.put(x), vmem.put(index), vmem.space(4 * 96)
    got = vmem.run(
        queue,
        ins(
            "V_TAKE",
            dst=out,
            src=src,
            index=at,
            rows=4,
            width=24,
            src_rows=40,
            dst_stride=96,
            src_stride=96,
        ),
        out,
        4 * 96,
    )
    assert np.array_equal(np.frombuffer(got, f32).reshape(4, 24), x[index])


ATTN = {"heads": 6, "kv_heads": 2, "head_dim": 32, "block_size": 4, "max_blocks": 8}
SLOTS = 200


def _attention(
    machine: Machine,
    queue: Queue,
    place: Callable[[bytes], int],
    info: Any,
    tables: Any,
    **more: Any,
) -> tuple[Any, bytes, tuple[Any, Any, Any]]:
    rows = len(info)
    q = _normal(14, rows, 6, 32)
    k, v = (_normal(s, SLOTS, 2, 32).astype(np.float16) for s in (15, 16))
    vmem = Vmem(machine)
    qa, ia, ta = vmem.put(q), vmem.put(info), vmem.put(tables)
    out = more.pop("dst", None)
    out = vmem.space(q.nbytes) if out is None else out
    code = ins(
        "V_ATTN",
        fmt="F16",
        aux=0.125,
        dst=out,
        q=qa,
        k_cache=place(k.tobytes()),
        v_cache=place(v.tobytes()),
        rows=rows,
        row_info=ia,
        block_tables=ta,
        num_slots=SLOTS,
        **(ATTN | more),
    )
    return vmem, code, (q, k, v)


def test_paged_attention(machine: Machine, queue: Queue, place: Callable[[bytes], int]) -> None:
    info = np.array([[1, 0], [31, 0], [32, 0], [0, 1], [17, 1], [6, 2]], np.uint32)
    chooser = random.Random(3)
    tables = np.array([chooser.sample(range(SLOTS // 4), 8) for _ in range(3)], np.uint32)
    vmem, code, (q, k, v) = _attention(machine, queue, place, info, tables)
    out = vmem.at - q.nbytes
    got = np.frombuffer(vmem.run(queue, code, out, q.nbytes), f32).reshape(q.shape)
    for row, (keys, table) in enumerate(info):
        slots = [int(tables[table][j // 4]) * 4 + j % 4 for j in range(keys)]
        for head in range(6):
            expected = ref.attention(
                q[row, head],
                k[slots, head // 3].astype(f32),
                v[slots, head // 3].astype(f32),
                0.125,
            )
            assert np.array_equal(got[row, head], expected), (row, head)


def _sampling(machine: Machine, rows: list[tuple[Any, ...]], vocab: int) -> tuple[Vmem, bytes, Any]:
    logits = _normal(17, len(rows), vocab) * f32(3)
    params = b"".join(struct.pack("<fIfIQII", *row) for row in rows)
    vmem = Vmem(machine)
    la, pa = vmem.put(logits), vmem.put(np.frombuffer(params, np.uint8))
    out = vmem.space(192 * len(rows))
    code = ins(
        "V_SAMPLE",
        dst=out,
        logits=la,
        params=pa,
        rows=len(rows),
        vocab=vocab,
        logits_stride=vocab * 4,
    )
    return vmem, code, logits


def test_sampling(machine: Machine, queue: Queue) -> None:
    rows = [
        (0.0, 0, 1.0, 5, 1, 2, 0),
        (1.0, 0, 1.0, 20, 3, 4, 0),
        (0.7, 40, 0.9, 0, 5, 6, 0),
    ]
    vmem, code, logits = _sampling(machine, rows, 777)
    got = vmem.run(queue, code, vmem.at - 192 * 3, 192 * 3)
    for index, (temperature, top_k, top_p, count, seed, position, _) in enumerate(rows):
        token, logprob, top = ref.sample(
            logits[index], temperature, top_k, top_p, count, seed, position
        )
        result = got[192 * index :][:192]
        assert struct.unpack_from("<IfI", result) == (token, logprob, count)
        assert list(struct.unpack_from(f"<{count}I", result, 16)) == [i for i, _ in top]
        assert list(struct.unpack_from(f"<{count}f", result, 96)) == [p for _, p in top]


@pytest.mark.parametrize(
    "bad",
    [
        (-1.0, 0, 1.0, 0, 0, 0, 0),
        (2.0**-15, 0, 1.0, 0, 0, 0, 0),
        (float("inf"), 0, 1.0, 0, 0, 0, 0),
        (float("nan"), 0, 1.0, 0, 0, 0, 0),
        (1.0, 0, 0.0, 0, 0, 0, 0),
        (1.0, 0, 1.5, 0, 0, 0, 0),
        (1.0, 0, float("nan"), 0, 0, 0, 0),
        (1.0, 0, 1.0, 21, 0, 0, 0),
        (1.0, 0, 1.0, 0, 0, 0, 1),
    ],
)
def test_bad_sampling_parameters(machine: Machine, queue: Queue, bad: tuple[Any, ...]) -> None:
    vmem, code, _ = _sampling(machine, [(0.0, 0, 1.0, 0, 0, 0, 0), bad], 64)
    fault = queue.run_fault(vmem_program(vmem.loads, [code], []))
    assert fault["cause"] == "BAD_OPERAND"
    assert fault["addr"] == vmem.loads[1][0] + 32


END = hw.VMEM_BYTES
ROWS = {"dst_stride": 64, "a_stride": 64, "b_stride": 64}


@pytest.mark.parametrize(
    ("instruction", "cause"),
    [
        # one byte past VMEM, in each operand; by the last row; by wrapping
        (ins("V_ADD", dst=END - 64, a=0, b=0, rows=2, width=16, **ROWS), "VMEM_RANGE"),
        (ins("V_ADD", dst=0, a=END - 64, b=0, rows=1, width=17, **ROWS), "VMEM_RANGE"),
        (ins("V_ADD", dst=0, a=0, b=END, rows=1, width=1, **ROWS), "VMEM_RANGE"),
        (
            ins(
                "V_ADD",
                dst=0,
                a=0,
                b=0,
                rows=1 << 20,
                width=16,
                dst_stride=64,
                a_stride=(1 << 31) - 4,
                b_stride=64,
            ),
            "VMEM_RANGE",
        ),
        (ins("V_ADD", dst=R(1), a=0, b=0, rows=1, width=16, **ROWS), "VMEM_RANGE"),
        (ins("V_ADD", dst=32, a=0, b=0, rows=1, width=16, **ROWS), "VMEM_RANGE"),
        (ins("LDV", rd=2, addr=END), "VMEM_RANGE"),
        (ins("LDV", rd=2, addr=2), "VMEM_RANGE"),
        # rows that would be written by two threads
        (ins("V_ADD", dst=0, a=0, b=0, rows=2, width=32, **ROWS), "BAD_OPERAND"),
        # shapes
        (
            ins("V_RMSNORM", dst=0, src=0, weight=0, rows=1, width=24, dst_stride=0, src_stride=0),
            "BAD_OPERAND",
        ),
        (
            ins(
                "V_ROPE",
                dst=0,
                src=0,
                cos_sin=0,
                rows=1,
                heads=1,
                head_dim=8,
                dst_stride=0,
                src_stride=0,
            ),
            "BAD_OPERAND",
        ),
        (
            ins(
                "MATMUL",
                fmt="Q8_0",
                dst=0,
                src=0,
                weight=0,
                m=1,
                n=8,
                k=32,
                dst_stride=0,
                src_stride=0,
            ),
            "BAD_OPERAND",
        ),
        (
            ins(
                "MATMUL",
                fmt="Q8_0",
                dst=0,
                src=0,
                weight=0,
                m=1,
                n=16,
                k=48,
                dst_stride=0,
                src_stride=0,
            ),
            "BAD_OPERAND",
        ),
        (
            ins(
                "MATMUL",
                fmt="Q8_0",
                dst=0,
                src=0,
                weight=0,
                m=1,
                n=16,
                k=0,
                dst_stride=0,
                src_stride=0,
            ),
            "BAD_OPERAND",
        ),
        *(
            (
                ins(
                    "MATMUL",
                    fmt=fmt,
                    dst=0,
                    src=0,
                    weight=0,
                    m=0,
                    n=16,
                    k=k,
                    dst_stride=0,
                    src_stride=0,
                ),
                "BAD_OPERAND",
            )
            for fmt, k in [("I8", 32), ("I8", (1 << 17) + 64), ("BF16_TILES", 48)]
        ),
        *(
            (
                ins(
                    "DMA_GATHER",
                    fmt=fmt,
                    dst=0,
                    table=0,
                    index=64,
                    count=0,
                    width=width,
                    table_rows=rows,
                    dst_stride=64,
                ),
                "BAD_OPERAND",
            )
            for fmt, width, rows in [("I8", 32, 16), ("I8", 64, 8), ("BF16_TILES", 16, 16)]
        ),
        (
            ins(
                "MATMUL",
                fmt="Q8_0",
                dst=0,
                src=0,
                weight=1 << 31,
                m=1,
                n=16,
                k=32,
                dst_stride=0,
                src_stride=0,
            ),
            "UNMAPPED",
        ),
        (
            ins("DMA_LOAD", dst=0, src=0, rows=1, row_bytes=6, dst_stride=0, src_stride=0),
            "BAD_OPERAND",
        ),
        (
            ins("DMA_LOAD", dst=2, src=0, rows=1, row_bytes=4, dst_stride=0, src_stride=0),
            "VMEM_RANGE",
        ),
        (
            ins("DMA_LOAD", dst=0, src=1 << 31, rows=1, row_bytes=4, dst_stride=0, src_stride=0),
            "UNMAPPED",
        ),
        (
            ins(
                "DMA_GATHER",
                fmt="Q8_0",
                dst=0,
                table=0,
                index=0,
                count=0,
                width=48,
                table_rows=16,
                dst_stride=0,
            ),
            "BAD_OPERAND",
        ),
        (
            ins(
                "DMA_GATHER",
                fmt="Q8_0",
                dst=0,
                table=0,
                index=0,
                count=0,
                width=32,
                table_rows=24,
                dst_stride=0,
            ),
            "BAD_OPERAND",
        ),
        # an index list that its own result would overwrite
        (
            ins(
                "DMA_GATHER",
                fmt="F32",
                dst=0,
                table=0,
                index=60,
                count=2,
                width=16,
                table_rows=9,
                dst_stride=64,
            ),
            "BAD_OPERAND",
        ),
        (
            ins(
                "V_TAKE",
                dst=0,
                src=4096,
                index=4,
                rows=2,
                width=16,
                src_rows=9,
                dst_stride=64,
                src_stride=64,
            ),
            "BAD_OPERAND",
        ),
        (
            ins(
                "DMA_GATHER",
                fmt="F32",
                dst=0,
                table=0,
                index=4096,
                count=1,
                width=16,
                table_rows=0,
                dst_stride=64,
            ),
            "INDEX_RANGE",
        ),
        (
            ins(
                "V_TAKE",
                dst=0,
                src=4096,
                index=8192,
                rows=1,
                width=16,
                src_rows=0,
                dst_stride=64,
                src_stride=64,
            ),
            "INDEX_RANGE",
        ),
    ],
)
def test_refused_operands(queue: Queue, instruction: bytes, cause: str) -> None:
    code = program(ins("LI", rd=1, value=(1 << 64) - 64), instruction)
    fault = queue.run_fault(code)
    assert (fault["cause"], fault["pc"]) == (cause, 64)


def test_zero_rows_do_nothing(queue: Queue) -> None:
    queue.run(
        vmem_program(
            [],
            [
                ins("V_ADD", dst=0, a=0, b=0, rows=0, width=1 << 20, **ROWS),
                ins(
                    "MATMUL",
                    fmt="Q4_1",
                    dst=0,
                    src=0,
                    weight=1 << 31,
                    m=0,
                    n=16,
                    k=32,
                    dst_stride=0,
                    src_stride=0,
                ),
                ins(
                    "DMA_LOAD", dst=0, src=1 << 31, rows=0, row_bytes=64, dst_stride=0, src_stride=0
                ),
                ins(
                    "DMA_GATHER",
                    fmt="F16",
                    dst=0,
                    table=1 << 31,
                    index=64,
                    count=0,
                    width=16,
                    table_rows=0,
                    dst_stride=64,
                ),
                ins("V_SAMPLE", dst=0, logits=64, params=128, rows=0, vocab=0, logits_stride=0),
            ],
            [],
        )
    )


@pytest.mark.parametrize(
    ("info", "table", "change", "cause"),
    [
        ([33, 0], [0] * 8, {}, "BAD_OPERAND"),  # more keys than a table names
        ([9, 0], [0, 0, 50] + [0] * 5, {}, "INDEX_RANGE"),  # slot 200 of 200
        ([9, 0], [0, 0, 0xFFFFFFFF] + [0] * 5, {}, "INDEX_RANGE"),
        ([9, 0xFFFFFFFF], [0] * 8, {}, "VMEM_RANGE"),  # a table outside VMEM
        ([9, 0], [0] * 8, {"heads": 5}, "BAD_OPERAND"),
        ([9, 0], [0] * 8, {"kv_heads": 0}, "BAD_OPERAND"),
        ([9, 0], [0] * 8, {"head_dim": 24}, "BAD_OPERAND"),
        ([9, 0], [0] * 8, {"head_dim": 272}, "BAD_OPERAND"),
        ([9, 0], [0] * 8, {"block_size": 0}, "BAD_OPERAND"),
        ([9, 0], [0] * 8, {"block_size": 65535, "max_blocks": 65535}, "BAD_OPERAND"),
        ([9, 0], [0] * 8, {"dst": 6 * 32 * 4}, "BAD_OPERAND"),  # onto row_info
        ([9, 0], [0] * 8, {"dst": 6 * 32 * 4 + 64}, "BAD_OPERAND"),  # onto the table
    ],
)
def test_refused_attention(
    machine: Machine,
    queue: Queue,
    info: list[int],
    table: list[int],
    change: dict[str, int],
    cause: str,
) -> None:
    vmem, code, _ = _attention(
        machine,
        queue,
        machine.place,
        np.array([info], np.uint32),
        np.array([table], np.uint32),
        **change,
    )
    assert queue.run_fault(vmem_program(vmem.loads, [code], []))["cause"] == cause


def test_a_slot_used_by_the_last_keys_alone(machine: Machine, queue: Queue) -> None:
    """Of a block that reaches beyond the cache, the slots inside may be used."""
    table = np.array([[0, 0, 49] + [0] * 5], np.uint32)
    vmem, code, _ = _attention(machine, queue, machine.place, np.array([[12, 0]], np.uint32), table)
    queue.run(vmem_program(vmem.loads, [code], []))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_do_not_depend_on_threads(
    open_machine: Callable[..., Machine], threads: int
) -> None:
    machine = open_machine(threads=threads)
    machine.identity()
    machine.enable()
    queue = Queue(machine)
    matrix = _matrix("Q4_1", 1536, 576)
    x = _normal(18, 3, 576)
    weight = machine.place(matrix.tiles)
    vmem = Vmem(machine)
    src, dst = vmem.put(x), vmem.space(3 * 1536 * 4)
    for _ in range(20):
        got = vmem.run(
            queue,
            ins(
                "MATMUL",
                fmt="Q4_1",
                dst=dst,
                src=src,
                weight=weight,
                m=3,
                n=1536,
                k=576,
                dst_stride=1536 * 4,
                src_stride=576 * 4,
            ),
            dst,
            3 * 1536 * 4,
        )
        assert np.array_equal(np.frombuffer(got, f32).reshape(3, 1536), matrix.product(x))
