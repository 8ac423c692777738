# SPDX-License-Identifier: MIT
"""Every instruction that computes, on every path that the host has, against docs/numerics.md
in numpy, bit for bit, and with all of VMEM around its result as it was.

Hypothesis draws shapes, strides, formats and kinds of numbers. A run of the suite takes the
same few examples each time; VTPU_EXAMPLES=1000 takes so many, new ones.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import numerics_reference as reference
from asm import ins, vmem_program
from kernels_lib import SAMPLE_PARAMS, SAMPLE_RESULT
from machine import Machine, Queue
from vtpu_compiler import hw

PATHS = ("scalar", "avx2", "avx512", "amx")
DATA = 16 << 20  # in HBM: tables, weights, caches
ROOM = 1 << 20
_wanted = os.environ.get("VTPU_EXAMPLES")
property_of = settings(
    max_examples=int(_wanted or 20),
    derandomize=_wanted is None,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# --- what is computed with


SPECIAL = np.array(
    [
        *(0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF),  # NaN, quiet and signalling
        *(0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF),  # infinities, the greatest
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF),  # to 2^-126
        *(0x00800000, 0x80800000, 0x3F800000, 0xBF800000),
        *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x387FC000),  # of f16
        *(0x3F808000, 0x3F818000, 0x7F7F8000, 0x00008000),  # ties of bf16
        *(0x0D800000, 0x0D7FFFFF, 0x42B17218, 0xC2AEAC50),  # 2^-100, limits of exp
    ],
    np.uint32,
).view(np.float32)

KINDS = ("plain", "lone", "few special", "special", "bits", "tiny", "huge", "mixed", "zeros")


def numbers(rng: np.random.Generator, shape, kind: str | None) -> np.ndarray:
    """kind None: each row of a kind of its own."""
    if kind is None:
        rows, *rest = np.atleast_1d(shape)
        first = int(rng.integers(len(KINDS)))
        each = [numbers(rng, rest, KINDS[(first + i) % len(KINDS)]) for i in range(rows)]
        return np.array(each, np.float32).reshape(shape)
    plain = rng.standard_normal(shape).astype(np.float32)
    with np.errstate(all="ignore"):
        tiny = np.ldexp(plain, rng.integers(-150, -110, shape)).astype(np.float32)
        huge = np.ldexp(plain, rng.integers(90, 127, shape)).astype(np.float32)
    special = rng.choice(SPECIAL, shape)
    if kind == "few special":
        return np.where(rng.random(shape) < 0.004, special, plain)
    if kind == "special":
        return np.where(rng.random(shape) < 0.3, special, plain)
    if kind == "bits":
        return rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    if kind == "mixed":
        return np.choose(rng.integers(0, 3, shape), [plain, tiny, huge]).astype(np.float32)
    if kind == "lone":  # sums of a single product are as small as the product
        x = np.ldexp(plain, rng.integers(-80, -40, shape)).astype(np.float32)
        return np.where(rng.random(shape) < 0.03, x, np.float32(0))
    if kind == "zeros":
        return np.where(plain > 0, np.float32(0), np.float32(-0.0))
    return {"plain": plain, "tiny": tiny, "huge": huge}[kind]


def stored(x: np.ndarray, fmt: str) -> np.ndarray:
    """As DMA_SCATTER stores it."""
    if fmt == "F32":
        return x
    if fmt == "BF16":
        return reference.to_bf16(x)
    with np.errstate(over="ignore", invalid="ignore"):
        half = np.clip(x, -65504, 65504).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7E00), half)


def widened(x: np.ndarray, fmt: str) -> np.ndarray:
    if fmt == "F32":
        return x
    return reference.from_bf16(x) if fmt == "BF16" else x.view(np.float16).astype(np.float32)


kinds = st.one_of(st.none(), st.sampled_from(KINDS))
seeds = st.integers(0, 2**32 - 1)
pads = st.sampled_from([0, 1, 5, 16])


# --- where


@dataclass
class Case:
    """VMEM, and HBM at DATA, before and as they should be afterwards."""

    before: bytearray = field(default_factory=bytearray)
    after: bytearray = field(default_factory=bytearray)
    data: bytes = b""
    data_after: bytes | None = None

    def put(self, rows: np.ndarray, pad: int = 0) -> tuple[int, int]:
        """Address and stride of rows of words, `pad` of others after each."""
        rows = np.atleast_2d(rows)
        words = rows.view(np.uint32)
        padded = np.full((words.shape[0], words.shape[1] + pad), 0xABABABAB, np.uint32)
        padded[:, : words.shape[1]] = words
        at = len(self.before)
        for image in (self.before, self.after):
            image += padded.tobytes()
            image += b"\xcd" * (64 + -len(image) % 64)
        return at, 4 * padded.shape[1]

    def space(self, rows: int, width: int, pad: int = 0) -> tuple[int, int]:
        return self.put(np.full((rows, width), 0xA5A5A5A5, np.uint32), pad)

    def expect(self, at: int, stride: int, rows: np.ndarray) -> None:
        for i, row in enumerate(np.atleast_2d(rows)):
            begin = at + i * stride
            self.after[begin : begin + row.nbytes] = np.ascontiguousarray(row).tobytes()


Machines = dict[str, tuple[Machine, Queue]]


@pytest.fixture(scope="module")
def machines(library) -> Iterator[Machines]:
    """One machine a path, and one whose engines take turns in random order."""
    opened: Machines = {}
    with ExitStack() as stack:
        for path in PATHS:
            try:
                machine = stack.enter_context(Machine(library, isa=path, threads=2))
            except ValueError:
                continue  # the processor lacks it
            machine.identity()
            machine.enable()
            opened[path] = machine, Queue(machine)
        yield opened


def check(machines: Machines, case: Case, instruction: bytes) -> None:
    size = len(case.before)
    assert size <= ROOM
    code = vmem_program([(0, DATA - 2 * ROOM, size)], [instruction], [(DATA - ROOM, 0, size)])
    for path, (machine, queue) in machines.items():
        machine.put(DATA - 2 * ROOM, bytes(case.before))
        machine.put(DATA, case.data)
        machine.release()
        queue.run(code)
        same(path, machine.get(DATA - ROOM, size), case.after)
        if case.data_after is not None:
            assert machine.get(DATA, len(case.data)) == case.data_after, path


def same(path: str, got: bytes, want: bytes) -> None:
    """Bit for bit, one NaN like another."""
    a, b = (np.frombuffer(image, np.uint32) for image in (got, want))
    nan = np.isnan(a.view(np.float32)) & np.isnan(b.view(np.float32))
    wrong = np.argwhere((a != b) & ~nan)[:, 0]
    assert not wrong.size, (
        f"{path}: {wrong.size} of {a.size} words, first at 0x{4 * wrong[0]:x}: "
        f"{a[wrong[0]]:08x} should be {b[wrong[0]]:08x}"
    )


# --- MATMUL


def weight_matrix(rng: np.random.Generator, n: int, k: int, fmt: str, kind: str | None):
    """Bytes of the tiles; x -> its product, before -> the sum; rows -> their values."""
    code = hw.FMT[fmt]
    if fmt == "BF16_TILES":
        bits = reference.to_bf16(numbers(rng, (n, k), kind))
        return (
            reference.make_wide_tiles(bits, None, code),
            lambda x, before: reference.matmul_bf16(x, bits, before),
            reference.from_bf16(bits),
        )
    if fmt == "I8":
        q, d = rng.integers(-128, 128, (n, k), dtype=np.int8), numbers(rng, n, kind)
        with np.errstate(all="ignore"):
            return (
                reference.make_wide_tiles(q, d, code),
                lambda x, before: reference.matmul_i8(x, q, d, before),
                q.astype(np.float32) * d[:, None],
            )
    q = rng.integers(-128, 128, (n, k)) if fmt == "Q8_0" else rng.integers(0, 16, (n, k))
    d, m = (stored(numbers(rng, (n, k // 32), kind), "F16").view(np.float16) for _ in range(2))
    return (
        reference.make_tiles(q, d, m, code),
        lambda x, before: reference.matmul(x, q, d, m, code, before),
        reference.dequantise(q, d, m, code),
    )


@pytest.mark.parametrize("fmt", hw.OPS["MATMUL"].fmt_a)
@property_of
@given(
    seed=seeds,
    m=st.one_of(st.integers(0, 70), st.sampled_from([1, 15, 16, 17, 32, 33, 48, 49])),
    tile_rows=st.integers(1, 6),
    tiles=st.integers(1, 3),
    kind=kinds,
    weight_kind=kinds,
    pad=pads,
    dst_pad=pads,
    broadcast=st.booleans(),
    accumulate=st.booleans(),
)
def test_matmul(
    machines, fmt, seed, m, tile_rows, tiles, kind, weight_kind, pad, dst_pad, broadcast, accumulate
):
    rng = np.random.default_rng(seed)
    n, k = 16 * tile_rows, hw.TILE_COLS[fmt] * tiles
    weight, product, _ = weight_matrix(rng, n, k, fmt, weight_kind)
    x = numbers(rng, (1 if broadcast else m, k), kind)
    case = Case(data=weight.tobytes())
    src, src_stride = case.put(x, pad) if x.size else case.space(1, k)
    before = numbers(rng, (m, n), kind)
    dst, dst_stride = case.put(before, dst_pad) if m else case.space(1, n)
    if m:
        x = np.repeat(x, m, axis=0) if broadcast else x
        case.expect(dst, dst_stride, product(x, before if accumulate else None))
    check(
        machines,
        case,
        ins(
            "MATMUL",
            fmt=fmt,
            flags=("ACCUMULATE",) if accumulate else (),
            **dict(dst=dst, src=src, weight=DATA, m=m, n=n, k=k),
            **dict(dst_stride=dst_stride, src_stride=0 if broadcast else src_stride),
        ),
    )


# --- tables


@pytest.mark.parametrize("fmt", hw.OPS["DMA_GATHER"].fmt_a)
@property_of
@given(seed=seeds, count=st.integers(1, 20), units=st.integers(1, 5), kind=kinds, pad=pads)
def test_gather(machines, fmt, seed, count, units, kind, pad):
    rng = np.random.default_rng(seed)
    if fmt in hw.TILE_COLS:
        rows, width = 48, hw.TILE_COLS[fmt] * units
        table, _, values = weight_matrix(rng, rows, width, fmt, kind)
    else:
        rows, width = 37, int(rng.integers(1, 30 * units))
        table = stored(numbers(rng, (rows, width), kind), fmt)
        values = widened(table, fmt)
    index = rng.integers(0, rows, count, dtype=np.uint32)
    case = Case(data=table.tobytes())
    at, _ = case.put(index)
    dst, stride = case.space(count, width, pad)
    case.expect(dst, stride, values[index])
    operands = dict(dst=dst, table=DATA, index=at, count=count, width=width, table_rows=rows)
    check(machines, case, ins("DMA_GATHER", fmt=fmt, dst_stride=stride, **operands))


@pytest.mark.parametrize("fmt", hw.OPS["DMA_SCATTER"].fmt_a)
@property_of
@given(seed=seeds, count=st.integers(1, 20), width=st.integers(1, 70), kind=kinds, pad=pads)
def test_scatter(machines, fmt, seed, count, width, kind, pad):
    rng = np.random.default_rng(seed)
    x = numbers(rng, (count, width), kind)
    table = stored(numbers(rng, (11, width), "plain"), fmt)
    index = rng.integers(0, 11, count, dtype=np.uint32)
    index[rng.random(count) < 0.2] = 0xFFFFFFFF
    case = Case(data=table.tobytes())
    at, _ = case.put(index)
    src, stride = case.put(x, pad)
    for i, row in zip(index, stored(x, fmt), strict=True):
        if i != 0xFFFFFFFF:
            table[i] = row
    case.data_after = table.tobytes()
    operands = dict(table=DATA, src=src, index=at, count=count, width=width, table_rows=11)
    check(machines, case, ins("DMA_SCATTER", fmt=fmt, src_stride=stride, **operands))


# --- elements


@pytest.mark.parametrize("name", ["V_ADD", "V_MUL", "V_SILU_MUL"])
@property_of
@given(
    seed=seeds,
    rows=st.integers(1, 9),
    width=st.integers(1, 100),
    one=kinds,
    other=kinds,
    pad=pads,
    form=st.sampled_from(["apart", "in place", "broadcast"]),
)
def test_two_operands(machines, name, seed, rows, width, one, other, pad, form):
    rng = np.random.default_rng(seed)
    a = numbers(rng, (rows, width), one)
    b = numbers(rng, (1 if form == "broadcast" else rows, width), other)
    case = Case()
    a_at, a_stride = case.put(a, pad)
    b_at, b_stride = case.put(b)
    dst, stride = (a_at, a_stride) if form == "in place" else case.space(rows, width, pad)
    with np.errstate(all="ignore"):
        result = {"V_ADD": np.add, "V_MUL": np.multiply, "V_SILU_MUL": reference.silu_mul}[name]
        case.expect(dst, stride, result(a, b))
    first, second = (operand for operand, _ in hw.OPS[name].operands[1:3])
    check(
        machines,
        case,
        ins(
            name,
            **{"dst": dst, first: a_at, second: b_at, "rows": rows, "width": width},
            **{"dst_stride": stride, f"{first}_stride": a_stride},
            **{f"{second}_stride": 0 if form == "broadcast" else b_stride},
        ),
    )


@property_of
@given(
    seed=seeds,
    rows=st.integers(1, 9),
    blocks=st.integers(1, 9),
    kind=kinds,
    weight_kind=kinds,
    epsilon=st.sampled_from([1e-5, 0.0, 1e-45, -1.0, float("inf"), float("nan")]),
    pad=pads,
    in_place=st.booleans(),
)
def test_rmsnorm(machines, seed, rows, blocks, kind, weight_kind, epsilon, pad, in_place):
    rng = np.random.default_rng(seed)
    width = 16 * blocks
    x, weight = numbers(rng, (rows, width), kind), numbers(rng, width, weight_kind)
    case = Case()
    src, src_stride = case.put(x, pad)
    at, _ = case.put(weight)
    dst, stride = (src, src_stride) if in_place else case.space(rows, width)
    case.expect(dst, stride, reference.rmsnorm(x, weight, epsilon))
    operands = dict(dst=dst, src=src, weight=at, rows=rows, width=width)
    strides = dict(dst_stride=stride, src_stride=src_stride)
    check(machines, case, ins("V_RMSNORM", aux=epsilon, **operands, **strides))


@property_of
@given(seed=seeds, rows=st.integers(1, 9), width=st.integers(1, 70), kind=kinds, pad=pads)
def test_take(machines, seed, rows, width, kind, pad):
    rng = np.random.default_rng(seed)
    x, index = numbers(rng, (13, width), kind), rng.integers(0, 13, rows, dtype=np.uint32)
    case = Case()
    src, src_stride = case.put(x, pad)
    at, _ = case.put(index)
    dst, stride = case.space(rows, width, pad)
    case.expect(dst, stride, x[index])
    operands = dict(dst=dst, src=src, index=at, rows=rows, width=width, src_rows=13)
    check(machines, case, ins("V_TAKE", dst_stride=stride, src_stride=src_stride, **operands))


@property_of
@given(
    seed=seeds,
    rows=st.integers(1, 5),
    heads=st.integers(1, 4),
    dim=st.sampled_from([16, 32, 48, 80, 128]),
    kind=kinds,
    angle_kind=kinds,
    mode=st.sampled_from(["PAIRS", "HALVES"]),
    pad=pads,
    in_place=st.booleans(),
)
def test_rope(machines, seed, rows, heads, dim, kind, angle_kind, mode, pad, in_place):
    rng = np.random.default_rng(seed)
    x, angles = numbers(rng, (rows, heads * dim), kind), numbers(rng, (rows, dim), angle_kind)
    case = Case()
    src, src_stride = case.put(x, pad)
    at, _ = case.put(angles)
    dst, stride = (src, src_stride) if in_place else case.space(rows, heads * dim)
    case.expect(dst, stride, reference.rope(x, angles, heads, mode == "HALVES"))
    operands = dict(dst=dst, src=src, cos_sin=at, rows=rows, heads=heads, head_dim=dim)
    strides = dict(dst_stride=stride, src_stride=src_stride)
    check(machines, case, ins("V_ROPE", mode=mode, **operands, **strides))


# --- attention and sampling


@pytest.mark.parametrize("fmt", hw.OPS["V_ATTN"].fmt_a)
@property_of
@given(
    seed=seeds,
    rows=st.integers(1, 18),
    group=st.sampled_from([1, 2, 3, 4]),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([16, 32, 64, 80]),
    block_size=st.sampled_from([1, 3, 16]),
    most=st.integers(1, 40),
    kind=kinds,
    cache_kind=st.sampled_from(["plain", "few special", "tiny", "huge", "zeros"]),
    scale=st.sampled_from([0.125, 1.0, 0.0, -1.0, 3e38]),
)
def test_attention(
    machines, fmt, seed, rows, group, kv_heads, dim, block_size, most, kind, cache_kind, scale
):
    rng = np.random.default_rng(seed)
    heads, blocks = group * kv_heads, -(-most // block_size)
    slots = 2 * blocks * block_size
    k, v = (stored(numbers(rng, (slots, kv_heads, dim), cache_kind), fmt) for _ in range(2))
    tables = rng.permutation(2 * blocks).astype(np.uint32).reshape(2, blocks)
    info = np.stack([rng.integers(0, most + 1, rows), rng.integers(0, 2, rows)], axis=1)
    q = numbers(rng, (rows, heads, dim), kind)
    case = Case(data=k.tobytes() + v.tobytes())
    q_at, _ = case.put(q.reshape(rows, -1))
    info_at, _ = case.put(info.astype(np.uint32))
    tables_at, _ = case.put(tables)
    dst, stride = case.space(rows, heads * dim)
    result = np.empty_like(q)
    for row, (keys, table) in enumerate(info):
        j = np.arange(keys)
        used = tables[table][j // block_size].astype(int) * block_size + j % block_size
        for head in range(heads):
            k_row, v_row = (widened(cache[used, head // group], fmt) for cache in (k, v))
            result[row, head] = reference.attention(q[row, head], k_row, v_row, scale)
    case.expect(dst, stride, result.reshape(rows, -1))
    check(
        machines,
        case,
        ins(
            "V_ATTN",
            fmt=fmt,
            aux=scale,
            **dict(dst=dst, q=q_at, k_cache=DATA, v_cache=DATA + k.nbytes, rows=rows),
            **dict(row_info=info_at, block_tables=tables_at, num_slots=slots),
            **dict(heads=heads, kv_heads=kv_heads, head_dim=dim),
            **dict(block_size=block_size, max_blocks=blocks),
        ),
    )


@property_of
@given(
    seed=seeds,
    rows=st.integers(1, 3),
    vocab=st.integers(1, 300),
    kind=kinds,
    ties=st.booleans(),
    pad=pads,
    temperature=st.sampled_from([0.0, 2.0**-14, 0.7, 1.0, 1e30]),
    top_k=st.sampled_from([0, 1, 2, 40, 5000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.9, 0.999999, 1.0]),
    num_logprobs=st.sampled_from([0, 1, 20]),
)
def test_sample(
    machines, seed, rows, vocab, kind, ties, pad, temperature, top_k, top_p, num_logprobs
):
    rng = np.random.default_rng(seed)
    logits = numbers(rng, (rows, vocab), kind)
    if ties:
        with np.errstate(all="ignore"):
            logits = np.rint(logits)
    params = np.zeros(rows, SAMPLE_PARAMS)
    results = np.zeros(rows, SAMPLE_RESULT)
    for row in range(rows):
        params[row] = (
            *(temperature, top_k, top_p, num_logprobs),
            *(rng.integers(1 << 64, dtype=np.uint64), rng.integers(1 << 32), 0),
        )
        values = {name: params[row][name].item() for name in SAMPLE_PARAMS.names[:-1]}
        token, logprob, top = reference.sample(logits[row], **values)
        results[row]["token"], results[row]["logprob"] = token, logprob
        results[row]["num_logprobs"] = len(top)
        results[row]["ids"][: len(top)] = [i for i, _ in top]
        results[row]["logprobs"][: len(top)] = [value for _, value in top]
    case = Case()
    at, stride = case.put(logits, pad)
    params_at, _ = case.put(params.view(np.uint32).reshape(rows, 8))
    dst, dst_stride = case.space(rows, hw.SAMPLE_RESULT_BYTES // 4)
    case.expect(dst, dst_stride, results.view(np.uint32).reshape(rows, -1))
    operands = dict(dst=dst, logits=at, params=params_at, rows=rows, vocab=vocab)
    check(machines, case, ins("V_SAMPLE", logits_stride=stride, **operands))


# --- of the tests themselves


def test_every_computing_instruction_is_here() -> None:
    tested = {"MATMUL", "DMA_GATHER", "DMA_SCATTER", "V_ADD", "V_MUL", "V_SILU_MUL", "V_RMSNORM"}
    tested |= {"V_TAKE", "V_ROPE", "V_ATTN", "V_SAMPLE"}
    moves = {"DMA_LOAD", "DMA_STORE"}
    computing = {n for n, op in hw.OPS.items() if op.engine in ("DMA", "MXU", "VPU")} - moves
    assert tested == {name for name in computing if not name.startswith("LINK")}


def test_a_chain_is_flushed_after_rounding(machines) -> None:
    """2^-126 less a little, by AMX's rule: half a unit of 24 bits less is still 2^-126."""
    for x, want in (
        (2.0**-75, 0x00800000),  # - 2^-151
        (1.0078125 * 2.0**-75, 0x00000000),
        (-(2.0**-75), 0x00800000),  # + 2^-151
    ):
        src = np.zeros((1, 32), np.float32)
        weights = np.zeros((16, 32), np.float32)
        src[0, [0, 2]] = 2.0**-63, x
        weights[:, [0, 2]] = 2.0**-63, -(2.0**-76)
        case = Case(data=reference.make_wide_tiles(reference.to_bf16(weights), None, 12).tobytes())
        at, src_stride = case.put(src)
        dst, stride = case.space(1, 16)
        case.expect(dst, stride, np.full((1, 16), want, np.uint32))
        operands = dict(dst=dst, src=at, weight=DATA, m=1, n=16, k=32)
        strides = dict(dst_stride=stride, src_stride=src_stride)
        check(machines, case, ins("MATMUL", fmt="BF16_TILES", **operands, **strides))


def test_packed_struct_of_params_is_the_tables() -> None:
    assert SAMPLE_PARAMS.itemsize == hw.SAMPLE_PARAMS_BYTES == struct.calcsize("<fIfIQII")
