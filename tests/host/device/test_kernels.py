# SPDX-License-Identifier: MIT
"""The kernels' arithmetic: the scalar path against numpy, the vector paths against the scalar
one, bit for bit. A path that the host lacks is skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import numerics_reference as reference
from kernels_lib import (
    BF16,
    BF16_TILES,
    F16,
    F32,
    I8,
    Q4_0,
    Q4_1,
    Q8_0,
    SAMPLE_PARAMS,
    Kernels,
)

FORMATS = [Q8_0, Q4_0, Q4_1]
FLOATS = [F32, F16, BF16]
SPECIALS = np.array(
    [
        *(np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-40, 2.0**-100, 2.0**-101),
        *(3.4e38, -3.4e38, 1e30, 65504, 65519, 65520, -7e4, 6e-8, 2.98e-8, 88.7, -87.4),
    ],
    np.float32,
)
some = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="session")
def scalar(library):
    return Kernels.get(library, "scalar")


@pytest.fixture(scope="session", params=["avx2", "avx512", "amx"])
def vector(library, request):
    kernels = Kernels.get(library, request.param)
    if kernels is None:
        pytest.skip(f"this processor lacks the instructions of the {request.param} path")
    return kernels


def same(got, want):
    """Bit for bit, one NaN like another."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    if got.dtype.kind == "f":
        assert np.array_equal(np.isnan(got), np.isnan(want))
        got, want = (np.where(np.isnan(a), np.float32(0), a).view(np.uint32) for a in (got, want))
    assert np.array_equal(got, want), np.argwhere(got != want)[:5]


def numbers(rng, shape, special=0.0):
    """Normal numbers of varied magnitude, some of them replaced by special values."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    x = x.astype(np.float32)
    where = rng.random(shape) < special
    return np.where(where, rng.choice(SPECIALS, shape), x)


def weights(rng, n, k, fmt, special=False):
    q = rng.integers(-128, 128, (n, k)) if fmt == Q8_0 else rng.integers(0, 16, (n, k))
    d, m = (rng.standard_normal((n, k // 32)).astype(np.float16) for _ in range(2))
    if special:
        extremes = np.array([np.inf, np.nan, 6e-8, -0.0, 65504], np.float16)
        d = np.where(rng.random(d.shape) < 0.05, rng.choice(extremes, d.shape), d)
        m = np.where(rng.random(m.shape) < 0.05, rng.choice(extremes, m.shape), m)
    return q, d, m


def store(x, fmt):
    """f32 -> the storage of a float format, as numpy rounds it."""
    if fmt == F32:
        return x
    if fmt == F16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def widen(stored, fmt):
    if fmt == F32:
        return stored
    if fmt == F16:
        return stored.view(np.float16).astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)


# --- MATMUL


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("special", [False, True])
def test_matmul_is_as_specified(scalar, fmt, special):
    rng = np.random.default_rng(fmt)
    q, d, m = weights(rng, 48, 96, fmt, special)
    x = numbers(rng, (5, 96), 0.01 if special else 0)
    tiles = reference.make_tiles(q, d, m, fmt)
    same(scalar.matmul(x, tiles, 48, fmt), reference.matmul(x, q, d, m, fmt))
    before = numbers(rng, (5, 48))
    same(scalar.matmul(x, tiles, 48, fmt, before), reference.matmul(x, q, d, m, fmt, before))


@pytest.mark.parametrize("fmt", FORMATS)
@some
@given(
    seed=seeds,
    m=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 12, 17, 47, 48, 49, 63, 64, 65, 80, 131]),
    tile_rows=st.integers(1, 5),
    blocks=st.integers(1, 7),
    accumulate=st.booleans(),
    special=st.sampled_from([0.0, 0.002, 0.2]),
    pad=st.sampled_from([0, 1, 16]),
)
def test_matmul_paths_agree(
    scalar, vector, fmt, seed, m, tile_rows, blocks, accumulate, special, pad
):
    rng = np.random.default_rng(seed)
    n, k = 16 * tile_rows, 32 * blocks
    tiles = reference.make_tiles(*weights(rng, n, k, fmt, special > 0), fmt)
    x = numbers(rng, (m, k), special)
    before = numbers(rng, (m, n), special) if accumulate else None
    split = int(rng.integers(0, tile_rows + 1))
    want = scalar.matmul(x, tiles, n, fmt, before, pad)
    same(vector.matmul(x, tiles, n, fmt, before, pad, split), want)


@pytest.mark.parametrize("rows", [9, 57])
@pytest.mark.parametrize("fmt", FORMATS)
def test_matmul_extremes_stay_exact(scalar, vector, fmt, rows):
    """Every integer at its limit: no saturation on the way."""
    for q_value in (-128, 127) if fmt == Q8_0 else (0, 15):
        q = np.full((16, 64), q_value)
        ones = np.ones((16, 2), np.float16)
        tiles = reference.make_tiles(q, ones, ones, fmt)
        for x_value in (1.0, -1.0):
            x = np.full((rows, 64), np.float32(x_value))
            want = reference.matmul(x, q, ones, ones, fmt)
            same(scalar.matmul(x, tiles, 16, fmt), want)
            same(vector.matmul(x, tiles, 16, fmt), want)


@pytest.mark.parametrize("rows", [1, 5, 49])
def test_byte_products_stay_exact(scalar, vector, rows):
    """Neighbours at their limits, with every pair of signs: no saturation of pairs."""
    extremes = np.array([-128, -127, 127, -128, 0, 127, -1, 1], np.int8)
    rng = np.random.default_rng(rows)
    w = rng.choice(extremes, (16, 128))
    w[:8] = np.repeat(extremes, 128).reshape(8, 128)
    x = rng.choice(np.array([-1, 1], np.float32), (rows, 128))
    x[0] = 1
    d = np.ones(16, np.float32)
    tiles = reference.make_wide_tiles(w, d, I8)
    want = reference.matmul_i8(x, w, d)
    same(scalar.matmul(x, tiles, 16, I8), want)
    same(vector.matmul(x, tiles, 16, I8), want)


@pytest.mark.parametrize("fmt", [I8, BF16_TILES])
@pytest.mark.parametrize("accumulate", [False, True])
def test_cut_products_agree(scalar, vector, fmt, accumulate):
    """Past the blocks of rows, columns and tile rows that a path cuts a product into, and
    what is left of them."""
    few = ((rows, 32, 576) for rows in range(1, 18))
    for rows, n, k in ((131, 48, 1088), (98, 16 * 19, 576), (260, 16, 64), *few):
        rng = np.random.default_rng(rows)
        w = rng.integers(-128, 128, (n, k), np.int8)
        if fmt == BF16_TILES:
            w = reference.to_bf16(numbers(rng, (n, k), 0.001))
        tiles = reference.make_wide_tiles(w, numbers(rng, n), fmt)
        x = numbers(rng, (rows, k), 0.0001)
        before = numbers(rng, (rows, n)) if accumulate else None
        want = scalar.matmul(x, tiles, n, fmt, before)
        same(vector.matmul(x, tiles, n, fmt, before, 16, n // 32), want)


def test_a_row_does_not_depend_on_the_others(vector):
    rng = np.random.default_rng(3)
    tiles = reference.make_tiles(*weights(rng, 64, 128, Q4_1), Q4_1)
    x = numbers(rng, (77, 128))
    together = vector.matmul(x, tiles, 64, Q4_1)
    for row in (0, 8, 63, 64, 76):
        same(vector.matmul(x[row : row + 1], tiles, 64, Q4_1)[0], together[row])


@some
@given(seed=seeds, rows=st.integers(1, 4), blocks=st.integers(1, 9), special=st.floats(0, 0.3))
def test_quantised_activations_agree(scalar, vector, seed, rows, blocks, special):
    x = numbers(np.random.default_rng(seed), (rows, 32 * blocks), special)
    size = scalar.table.blocks.quantise_bytes(32 * blocks, rows)
    room = vector.table.blocks.quantise_bytes(32 * blocks, rows)
    assert room >= size and room % 64 == 0 and size % 64 == 0
    want = scalar.quantise(x, Q8_0)  # few rows: "amx" has a layout of its own for many
    same(vector.quantise(x, Q8_0)[: want.size], want)


# --- element-wise


@pytest.mark.parametrize("special", [0.0, 0.05])
def test_elementwise_is_as_specified(scalar, special):
    rng = np.random.default_rng(1)
    a, b = numbers(rng, (3, 112), special), numbers(rng, (3, 112), special)
    with np.errstate(all="ignore"):
        same(scalar.binary("add", a, b), a + b)
        same(scalar.binary("mul", a, b), a * b)
    same(scalar.binary("silu_mul", a, b), reference.silu_mul(a, b))
    same(scalar.rmsnorm(a, b[0], 1e-5), reference.rmsnorm(a, b[0], 1e-5))
    for halves in (False, True):
        cos_sin = numbers(rng, (3, 16), special)
        same(scalar.rope(a, cos_sin, 7, halves), reference.rope(a, cos_sin, 7, halves))


@pytest.mark.parametrize("operation", ["add", "mul", "silu_mul"])
@some
@given(seed=seeds, rows=st.integers(1, 3), width=st.integers(1, 100), pad=st.integers(0, 3))
def test_binary_paths_agree(scalar, vector, operation, seed, rows, width, pad):
    rng = np.random.default_rng(seed)
    a, b = numbers(rng, (rows, width), 0.1), numbers(rng, (rows, width), 0.1)
    want = scalar.binary(operation, a, b, pad)
    same(vector.binary(operation, a, b, pad), want)


@some
@given(seed=seeds, width=st.integers(1, 40), special=st.sampled_from([0.0, 0.01]))
def test_rmsnorm_paths_agree(scalar, vector, seed, width, special):
    rng = np.random.default_rng(seed)
    x, weight = numbers(rng, (3, 16 * width), special), numbers(rng, 16 * width)
    same(vector.rmsnorm(x, weight, 1e-5), scalar.rmsnorm(x, weight, 1e-5))


@some
@given(
    seed=seeds,
    heads=st.integers(1, 5),
    dim=st.sampled_from([16, 32, 48, 64, 80, 128, 256]),
    halves=st.booleans(),
    in_place=st.booleans(),
    special=st.sampled_from([0.0, 0.05]),
)
def test_rope_paths_agree(scalar, vector, seed, heads, dim, halves, in_place, special):
    rng = np.random.default_rng(seed)
    x, cos_sin = numbers(rng, (3, heads * dim), special), numbers(rng, (3, dim))
    want = scalar.rope(x, cos_sin, heads, halves)
    same(vector.rope(x, cos_sin, heads, halves, in_place), want)


def exp_through_silu(kernels, x):
    """1 / (1 + exp(x)), the only way to exp by itself."""
    return kernels.binary("silu_mul", -x[None], np.ones_like(x)[None])[0]


def test_exp_over_its_range(scalar, vector):
    x = np.linspace(-110, 110, 200001, dtype=np.float32)
    x = np.concatenate([x, np.float32([88.72283, 88.72284, -87.33654, -87.33655]), SPECIALS])
    want = exp_through_silu(scalar, x)
    same(exp_through_silu(vector, x), want)
    same(want, reference.silu_mul(-x, np.ones_like(x)))


def test_exp_and_log_are_accurate():
    x = np.linspace(-87, 88, 100001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(reference.exp(x) / exact - 1).max() < 1.5e-7
    u = np.concatenate([np.linspace(1e-6, 40, 100001), 2.0 ** np.arange(-24, 20)])
    u = u.astype(np.float32)
    exact = np.log(u.astype(np.float64))
    assert (np.abs(reference.log(u) - exact) <= 1.5e-7 * np.maximum(np.abs(exact), 1e-3)).all()


# --- tables


@pytest.mark.parametrize("fmt", [*FORMATS, *FLOATS])
def test_gather_row(scalar, vector, fmt):
    rng = np.random.default_rng(fmt)
    if fmt in FORMATS:
        q, d, m = weights(rng, 32, 96, fmt, special=True)
        tiles = reference.make_tiles(q, d, m, fmt)
        want = reference.dequantise(q, d, m, fmt)
        for row in (0, 15, 16, 31):
            same(scalar.gather_row(tiles, row, 96, fmt), want[row])
            same(vector.gather_row(tiles, row, 96, fmt), want[row])
        return
    for width in (1, 15, 16, 65):
        stored = store(numbers(rng, width, 0.2), fmt)
        same(scalar.gather_row(stored, 0, width, fmt), widen(stored, fmt))
        same(vector.gather_row(stored, 0, width, fmt), widen(stored, fmt))


@pytest.mark.parametrize("fmt", [F16, BF16])
def test_every_half_widens_and_rounds_back(scalar, vector, fmt):
    stored = np.arange(65536, dtype=np.uint16)
    wide = widen(stored, fmt)
    same(scalar.gather_row(stored, 0, 65536, fmt), wide)
    same(vector.gather_row(stored, 0, 65536, fmt), wide)
    want = np.where(np.isnan(wide), 0x7E00 if fmt == F16 else 0x7FC0, stored).astype(np.uint16)
    if fmt == F16:
        want[want == 0x7C00], want[want == 0xFC00] = 0x7BFF, 0xFBFF
    same(scalar.scatter_row(wide, fmt), want)
    same(vector.scatter_row(wide, fmt), want)


@pytest.mark.parametrize("fmt", FLOATS)
def test_scatter_row(scalar, vector, fmt):
    """Random bits: every exponent, both signs, ties, denormals, NaN."""
    rng = np.random.default_rng(fmt)
    bits = rng.integers(0, 2**32, 100_003, dtype=np.uint32)
    ties = (rng.integers(0, 2**16, 20_000, dtype=np.uint32) << 16) | 0x8000
    halves = (rng.integers(0x33000, 0x48000, 20_000, dtype=np.uint32) << 12) | 0x1000
    x = np.concatenate([bits, ties, halves, SPECIALS.view(np.uint32)]).view(np.float32)
    got = scalar.scatter_row(x, fmt)
    same(vector.scatter_row(x, fmt), got)
    if fmt == F32:
        same(got, x.view(np.uint32))
        return
    bits = x.view(np.uint32).astype(np.uint64)
    if fmt == BF16:
        want = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    else:
        with np.errstate(all="ignore"):
            want = np.clip(x, -65504, 65504).astype(np.float16).view(np.uint16)
    same(got, np.where(np.isnan(x), 0x7E00 if fmt == F16 else 0x7FC0, want).astype(np.uint16))


# --- V_ATTN


def attention_case(rng, fmt, special, rows, group, kv_heads, dim, block_size, most_keys, sequences):
    max_blocks = -(-most_keys // block_size)
    slots = (max_blocks * sequences + 2) * block_size
    blocks = rng.permutation(slots // block_size)[: max_blocks * sequences]
    tables = blocks.reshape(sequences, max_blocks).astype(np.uint32)
    k_cache, v_cache = (store(numbers(rng, (slots, kv_heads, dim), special), fmt) for _ in range(2))
    q = numbers(rng, (rows, group * kv_heads, dim), special)
    table_of = np.sort(rng.integers(0, sequences, rows))
    info = np.stack([rng.integers(0, most_keys + 1, rows), table_of], axis=1).astype(np.uint32)
    return q, k_cache, v_cache, info, tables, block_size, fmt, 0.125


@pytest.mark.parametrize("fmt", FLOATS)
@pytest.mark.parametrize("special", [0.0, 0.003])
def test_attention_is_as_specified(scalar, fmt, special):
    rng = np.random.default_rng(fmt)
    case = attention_case(rng, fmt, special, 6, 3, 2, 48, 16, 40, 2)
    q, k_cache, v_cache, info, tables, block_size, _, scale = case
    got = scalar.attn(*case)
    for row, (keys, table) in enumerate(info):
        slots = [tables[table][j // block_size] * block_size + j % block_size for j in range(keys)]
        for head in range(6):
            k, v = (widen(cache[slots, head // 3], fmt) for cache in (k_cache, v_cache))
            same(got[row, head], reference.attention(q[row, head], k, v, scale))


@pytest.mark.parametrize("fmt", FLOATS)
@some
@given(
    seed=seeds,
    special=st.sampled_from([0.0, 0.001]),
    parts=st.integers(1, 7),
    shape=st.fixed_dictionaries(
        {
            "rows": st.integers(1, 40),
            "group": st.sampled_from([1, 2, 3, 4, 5, 8]),
            "kv_heads": st.integers(1, 3),
            "dim": st.sampled_from([16, 32, 64, 80, 128, 256]),
            "block_size": st.sampled_from([1, 5, 16, 32]),
            "most_keys": st.integers(1, 90),
            "sequences": st.integers(1, 3),
        }
    ),
)
def test_attention_paths_agree(scalar, vector, fmt, seed, special, parts, shape):
    case = attention_case(np.random.default_rng(seed), fmt, special, **shape)
    same(vector.attn(*case, parts=parts), scalar.attn(*case))


def test_attention_does_not_depend_on_chunks(vector):
    """A prompt at once, in pieces and token by token."""
    rng = np.random.default_rng(5)
    q, k_cache, v_cache, info, tables, *rest = attention_case(rng, F16, 0, 50, 3, 3, 64, 16, 50, 1)
    info[:, 0] = np.arange(1, 51)
    whole = vector.attn(q, k_cache, v_cache, info, tables, *rest)
    for step in (1, 7, 32):
        parts = [
            vector.attn(q[i : i + step], k_cache, v_cache, info[i : i + step], tables, *rest)
            for i in range(0, 50, step)
        ]
        same(np.concatenate(parts), whole)


# --- V_SAMPLE


def sampled(kernels, logits, **values):
    logits = np.atleast_2d(logits)
    params = np.zeros(len(logits), SAMPLE_PARAMS)
    params["top_p"] = 1
    for name, value in values.items():
        params[name] = value
    return kernels.sample(logits, params)


sampling = {
    "temperature": st.sampled_from([0.0, 2.0**-14, 0.3, 1.0, 5.0, 1e30]),
    "top_k": st.sampled_from([0, 1, 2, 40, 64, 65, 300, 5000]),
    "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    "num_logprobs": st.sampled_from([0, 1, 5, 20]),
    "seed": st.integers(0, 2**64 - 1),
    "position": st.integers(0, 2**32 - 1),
}


def logits_of(rng, vocab, kind):
    x = (rng.standard_normal(vocab) * 4).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    elif kind == "flat":
        x = np.full(vocab, np.float32(-3))
    elif kind == "masked":
        x[rng.random(vocab) < 0.9] = -np.inf
        x[rng.integers(vocab)] = 1
    elif kind == "huge":
        x *= np.float32(1e37)
    elif kind == "zeros":
        x = np.where(x > 0, np.float32(0), np.float32(-0.0))
    elif kind == "special":
        x[rng.integers(0, vocab, 1 + vocab // 50)] = rng.choice([np.nan, np.inf, -np.inf])
    elif kind == "none":
        x[:] = rng.choice([np.nan, -np.inf])
    return x


kinds = st.sampled_from(["normal", "ties", "flat", "masked", "huge", "zeros", "special", "none"])


@some
@given(data_seed=seeds, vocab=st.integers(1, 400), kind=kinds, **sampling)
def test_sampling_is_as_specified(scalar, data_seed, vocab, kind, **values):
    x = logits_of(np.random.default_rng(data_seed), vocab, kind)
    got = sampled(scalar, x, **values)[0]
    token, logprob, top = reference.sample(x, **values)
    assert got["token"] == token
    same(got["logprob"], logprob)
    assert got["num_logprobs"] == len(top)
    assert list(got["ids"][: len(top)]) == [i for i, _ in top]
    same(got["logprobs"][: len(top)], np.array([v for _, v in top], np.float32))
    assert not got["ids"][len(top) :].any()


@settings(some, max_examples=150)
@given(
    data_seed=seeds,
    vocab=st.one_of(st.integers(1, 400), st.sampled_from([5000, 49152])),
    kind=kinds,
    **sampling,
)
def test_sampling_paths_agree(scalar, vector, data_seed, vocab, kind, **values):
    x = logits_of(np.random.default_rng(data_seed), vocab, kind)
    got, want = sampled(vector, x, **values), sampled(scalar, x, **values)
    for name in ("token", "num_logprobs", "ids", "logprob", "logprobs"):
        same(got[name], want[name])


def test_philox_known_answers():
    """The vectors that the authors publish with Random123."""
    assert reference.philox((0, 0, 0, 0), 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert reference.philox((ones,) * 4, 2**64 - 1) == [
        *(0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ]


def test_samples_follow_the_distribution(scalar):
    """20,000 draws of 5 tokens: each count within 5 standard deviations."""
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5], np.float32)
    draws = np.tile(logits, (20_000, 1))
    tokens = sampled(scalar, draws, temperature=1.3, seed=42, position=np.arange(20_000))["token"]
    p = np.exp(logits / 1.3) / np.exp(logits / 1.3).sum()
    counts = np.bincount(tokens, minlength=5)
    assert (np.abs(counts - 20_000 * p) < 5 * np.sqrt(20_000 * p * (1 - p))).all()
