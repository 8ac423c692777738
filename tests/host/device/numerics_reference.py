# SPDX-License-Identifier: MIT
"""docs/numerics.md in numpy, written from the page and not from the C code."""

from __future__ import annotations

import numpy as np
from kernels_lib import I8, Q4_0, Q4_1, Q8_0

f32 = np.float32


def fma(a, b, c):
    """a * b + c rounded once to f32. The product is exact in f64; the sum is rounded to odd
    there, which makes the second rounding harmless (Boldo and Melquiond, "Emulation of a FMA
    and correctly rounded sums: proved algorithms using rounding to odd")."""
    with np.errstate(all="ignore"):
        p = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        c = np.asarray(c, np.float64)
        s = p + c
        t = s - p
        error = (p - (s - t)) + (c - t)
        inexact = np.isfinite(error) & (error != 0) & np.isfinite(s)
        even = (s.view(np.int64) & 1) == 0
        toward = np.where(error > 0, np.inf, -np.inf)
        s = np.where(inexact & even, np.nextafter(s, toward), s)
        return s.astype(f32)


def lanes16(parts, combine, start):
    """parts [..., n, ...]: combine(lane values, part) in ascending order for each lane."""
    lanes = [start] * 16
    for i, part in enumerate(parts):
        lanes[i % 16] = combine(lanes[i % 16], part)
    return tree(lanes)


def tree(lanes):
    lanes = list(lanes)
    for width in (8, 4, 2, 1):
        lanes = [(lanes[i] + lanes[i + width]).astype(f32) for i in range(width)]
    return lanes[0]


def exp(x):
    x = np.asarray(x, f32)
    with np.errstate(all="ignore"):
        safe = np.clip(np.nan_to_num(x, nan=0.0), -88, 89).astype(f32)
        n = np.rint(safe * f32(1.44269504))
        r = fma(n, f32(2.12194440e-4), fma(n, f32(-0.693359375), safe))
        p = np.full_like(r, 1.9875691500e-4)
        for c in (
            *(1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2),
            *(1.6666665459e-1, 5.0000001201e-1),
        ):
            p = fma(p, r, f32(c))
        y = fma(p, r * r, r) + f32(1)
        result = np.ldexp(y.astype(np.float64), n.astype(int)).astype(f32)
    result = np.where(x > f32(88.72283), f32(np.inf), result)
    result = np.where(x < f32(-87.33654), f32(0), result)
    return np.where(np.isnan(x), f32(np.nan), result)


def log(x):
    bits = np.asarray(x, f32).view(np.int32).astype(np.int64)
    shifted = bits - 0x3F3504F3
    e = (shifted >> 23).astype(f32)
    f = ((shifted & 0x7FFFFF) + 0x3F3504F3).astype(np.int32).view(f32) - f32(1)
    z = f * f
    p = np.full_like(f, 7.0376836292e-2)
    for c in (
        *(-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
        *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    ):
        p = fma(p, f, f32(c))
    y = fma(e, f32(-2.12194440e-4), f * z * p)
    y = fma(f32(-0.5), z, y)
    return fma(e, f32(0.693359375), f + y)


# --- weights


def make_tiles(q, d, m, fmt):
    """q [n, k] stored integers, d and m [n, k/32] f16 -> the matrix in device tiles."""
    n, k = q.shape
    groups = q.reshape(n // 16, 16, k // 32, 8, 4).transpose(0, 2, 3, 1, 4)
    groups = groups.astype(np.uint8).reshape(n // 16, k // 32, 8, 64)
    scales = d.reshape(n // 16, 16, k // 32).transpose(0, 2, 1)
    parts = [groups.reshape(n // 16, k // 32, 512)]
    if fmt != Q8_0:
        packed = groups[:, :, :4] | groups[:, :, 4:] << 4
        parts = [packed.reshape(n // 16, k // 32, 256)]
    parts.append(np.ascontiguousarray(scales).view(np.uint8))
    if fmt == Q4_1:
        minima = m.reshape(n // 16, 16, k // 32).transpose(0, 2, 1)
        parts.append(np.ascontiguousarray(minima).view(np.uint8))
    return np.ascontiguousarray(np.concatenate(parts, axis=2))


def dequantise(q, d, m, fmt):
    d, m = (np.repeat(part.astype(f32), 32, axis=1) for part in (d, m))
    with np.errstate(all="ignore"):
        if fmt == Q4_1:
            return fma(q.astype(f32), d, m)
        return (q - (8 if fmt == Q4_0 else 0)).astype(f32) * d


def quantise_rows(x):
    """-> integers [m, k/32, 32], scales [m, k/32]"""
    blocks = x.reshape(x.shape[0], -1, 32)
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(axis=2)
        finite = np.isfinite(blocks).all(axis=2)
        used = finite & (amax >= 2.0**-100)
        inverse = f32(32767) / np.where(used, amax, f32(1))
        q = np.rint(np.where(used[:, :, None], blocks, 0) * inverse[:, :, None]).astype(np.int64)
        scale = np.where(used, amax / f32(32767), f32(0))
    return q, np.where(finite, scale, f32(np.nan))


def matmul(x, q, d, m, fmt, before=None):
    xq, scale = quantise_rows(x)
    wq = q.reshape(q.shape[0], -1, 32).astype(np.int64)
    acc = np.zeros((x.shape[0], q.shape[0]), f32)
    with np.errstate(all="ignore"):
        for b in range(wq.shape[1]):
            dot = xq[:, b] @ wq[:, b].T
            total = xq[:, b].sum(axis=1)[:, None]
            db, mb = d[:, b].astype(f32)[None], m[:, b].astype(f32)[None]
            if fmt == Q8_0:
                t = dot.astype(f32) * db
            elif fmt == Q4_0:
                t = (dot - 8 * total).astype(f32) * db
            else:
                t = fma(dot.astype(f32), db, total.astype(f32) * mb)
            acc = fma(t, scale[:, b : b + 1], acc)
        return acc if before is None else before + acc


# --- weights in tiles of 64 bytes of a row: I8 and BF16_TILES


def make_wide_tiles(w, d, fmt):
    """w [n, k] int8, or the bits of bf16 in uint16; d [n] f32, for I8."""
    n = len(w)
    data = np.ascontiguousarray(w).view(np.uint8).reshape(n // 16, 16, -1, 16, 4)
    tiles = data.transpose(0, 2, 3, 1, 4).reshape(n // 16, -1)  # row of tiles, tile, group, row
    if fmt == I8:
        tiles = np.concatenate([tiles, d.reshape(n // 16, 16).view(np.uint8)], axis=1)
    return np.ascontiguousarray(tiles)


def quantise_wide(x):
    """-> int8 values [m, k], scales [m]"""
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(axis=1)
        finite = np.isfinite(x).all(axis=1)
        used = finite & (amax >= 2.0**-100)
        inverse = f32(127) / np.where(used, amax, f32(1))
        q = np.rint(np.where(used[:, None], x, f32(0)) * inverse[:, None]).astype(np.int64)
        scale = np.where(used, amax / f32(127), f32(0))
    return q, np.where(finite, scale, f32(np.nan))


def matmul_i8(x, w, d, before=None):
    q, scale = quantise_wide(x)
    with np.errstate(all="ignore"):
        product = ((q @ w.astype(np.int64).T).astype(f32) * d[None, :]) * scale[:, None]
        return product if before is None else before + product


def to_bf16(x):
    """f32 -> the bits of the nearest bf16, ties to even."""
    bits = np.asarray(x, f32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(f32)


def flush(x):
    return np.where(np.abs(x) < f32(2.0**-126), np.copysign(f32(0), x), x).astype(f32)


def flush_fma(a, b, c):
    """fma of numbers that are no denormals, rounded to 24 bits with no bound on the exponent;
    what is then below 2^-126 is a zero of its sign. Times 2^100, it is no denormal either."""
    with np.errstate(all="ignore"):
        scaled = fma(a * f32(2.0**50), b * f32(2.0**50), c * f32(2.0**100))
        tiny = np.abs(scaled) < f32(2.0**-26)
        return np.where(tiny, np.copysign(f32(0), scaled), fma(a, b, c))


def matmul_bf16(x, w, before=None):
    """w: the bits of bf16 [n, k]"""
    a, b = flush(from_bf16(to_bf16(x)))[:, None], flush(from_bf16(w))[None]
    acc = np.zeros((x.shape[0], w.shape[0]), f32)
    with np.errstate(all="ignore"):
        for begin in range(0, x.shape[1], 32):
            even, odd = np.zeros_like(acc), np.zeros_like(acc)
            for i in range(begin, begin + 32, 2):
                even = flush_fma(a[:, :, i], b[:, :, i], even)
                odd = flush_fma(a[:, :, i + 1], b[:, :, i + 1], odd)
            acc = flush(acc + flush(even + odd))
        return acc if before is None else before + acc


# --- element-wise


def rmsnorm(x, weight, epsilon):
    with np.errstate(all="ignore"):
        square_sum = lanes16(x.T, lambda lane, v: fma(v, v, lane), np.zeros(len(x), f32))
        r = f32(1) / np.sqrt(square_sum / f32(x.shape[1]) + f32(epsilon))
        return (x * r[:, None]) * weight


def silu_mul(gate, up):
    with np.errstate(all="ignore"):
        return (gate / (f32(1) + exp(-gate))) * up


def rope(x, cos_sin, heads, halves):
    rows, width = x.shape
    dim = width // heads
    v = x.reshape(rows, heads, dim)
    c, s = cos_sin[:, None, : dim // 2], cos_sin[:, None, dim // 2 :]
    first = np.s_[:, :, : dim // 2] if halves else np.s_[:, :, 0::2]
    second = np.s_[:, :, dim // 2 :] if halves else np.s_[:, :, 1::2]
    out = np.empty_like(v)
    with np.errstate(all="ignore"):
        a, b = v[first], v[second]
        out[first] = fma(a, c, -(b * s))
        out[second] = fma(a, s, b * c)
    return out.reshape(rows, width)


def attention(q, k, v, scale):
    """One query [dim] over keys and values [n, dim] in f32."""
    if len(k) == 0:
        return np.zeros_like(q)
    with np.errstate(all="ignore"):
        lane = np.zeros((16, len(k)), f32)
        for i in range(len(q)):
            lane[i % 16] = fma(q[i], k[:, i], lane[i % 16])
        scores = (tree(lane) * f32(scale)).astype(f32)
        finite = scores[~np.isnan(scores)]
        p = exp(scores - (finite.max() if len(finite) else f32(-np.inf)))
        total = lanes16(p, lambda a, b: f32(a + b), f32(0))
        out = np.zeros_like(q)
        for pj, vj in zip(p, v, strict=True):
            out = fma(pj, vj, out)
        return out / total


# --- sampling


def philox(counter, key):
    """Philox4x32-10 on Python integers."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def noise(seed, position, ids):
    words = np.array([philox((int(i) >> 2, position, 0, 0), seed)[int(i) & 3] for i in ids])
    u = ((words >> 9).astype(f32) + f32(0.5)) * f32(2.0**-23)
    return -log(-log(u))


def sample(x, temperature, top_k, top_p, num_logprobs, seed, position):
    """-> token, logprob, [(id, logprob)]"""
    order = sorted(range(len(x)), key=lambda i: (-np.inf if np.isnan(x[i]) else x[i], -i))[::-1]
    best = x[order[0]]
    if np.isnan(x).any() or np.isinf(best):
        return (0 if np.isnan(best) or best == -np.inf else order[0]), f32(np.nan), []
    with np.errstate(all="ignore"):
        total = lanes16(exp(x - best), lambda a, b: f32(a + b), f32(0))
        logprobs = (x - best) - log(total)
        top = [(i, logprobs[i]) for i in order[:num_logprobs]]
        token = order[0]
        if temperature != 0:
            value = (x - best) * (f32(1) / f32(temperature))
            kept = order[:top_k] if top_k else order
            if top_p < 1:
                weight = np.trunc(exp(value).astype(np.float64) * 2.0**30).astype(np.int64)
                target = np.ceil(float(f32(top_p)) * float(weight[kept].sum()))
                count = int(np.searchsorted(np.cumsum(weight[kept]), max(target, 1))) + 1
                kept = kept[:count]
            kept = np.array(sorted(kept))
            token = kept[np.argmax(value[kept] + noise(seed, position, kept))]
    return int(token), logprobs[token], top
