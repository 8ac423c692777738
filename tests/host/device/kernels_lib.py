# SPDX-License-Identifier: MIT
"""The device's kernels through ctypes: one Kernels object a vector path."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

import numpy as np

F32, BF16, F16, Q8_0, Q4_0, Q4_1, I8, BF16_TILES = 1, 2, 3, 8, 9, 10, 11, 12

_ptr, _size, _u32, _f32, _bool = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_uint32,
    ctypes.c_float,
    ctypes.c_bool,
)


def _function(result, *arguments):
    return ctypes.CFUNCTYPE(result, *arguments)


_binary = _function(None, _ptr, _size, _ptr, _size, _ptr, _size, _u32, _u32, _u32)


class Matmul(ctypes.Structure):
    _fields_ = [
        ("dst", _ptr),
        ("dst_stride", _size),
        ("quantised", _ptr),
        ("weight", _ptr),
        ("m", _u32),
        ("n", _u32),
        ("k", _u32),
        ("fmt", _u32),
        ("accumulate", _bool),
    ]


class Attn(ctypes.Structure):
    _fields_ = [
        *((name, _ptr) for name in ("dst", "q", "k_cache", "v_cache")),
        *((name, _ptr) for name in ("row_info", "block_tables")),
        *((name, _u32) for name in ("rows", "heads", "kv_heads", "head_dim")),
        *((name, _u32) for name in ("block_size", "max_blocks", "fmt")),
        ("scale", _f32),
        ("stop", _ptr),
    ]


class Product(ctypes.Structure):
    _fields_ = [
        ("quantise_bytes", _function(_size, _u32, _u32)),
        ("quantise", _function(None, _ptr, _ptr, _size, _u32, _u32, _u32, _u32)),
        ("matmul", _function(None, ctypes.POINTER(Matmul), _u32, _u32)),
        ("call", ctypes.c_uint64),
    ]


class Table(ctypes.Structure):
    """VtpuKernels of kernels.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        *((name, Product) for name in ("blocks", "i8", "bf16")),
        ("rmsnorm", _function(None, _ptr, _size, _ptr, _size, _ptr, _u32, _f32, _u32, _u32)),
        ("add", _binary),
        ("mul", _binary),
        ("silu_mul", _binary),
        ("rope", _function(None, _ptr, _size, _ptr, _size, _ptr, _u32, _u32, _bool, _u32, _u32)),
        ("attn_scratch_bytes", _function(_size, ctypes.POINTER(Attn))),
        ("attn", _function(None, ctypes.POINTER(Attn), _ptr, _u32, _u32)),
        ("sample_scratch_bytes", _function(_size, _u32)),
        ("sample", _function(None, _ptr, _ptr, _size, _ptr, _u32, _ptr, _u32, _u32)),
        ("gather_row", _function(None, _ptr, _ptr, _u32, _u32, _u32)),
        ("scatter_row", _function(None, _ptr, _ptr, _u32, _u32)),
    ]


SAMPLE_PARAMS = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_k", "<u4"),
        ("top_p", "<f4"),
        ("num_logprobs", "<u4"),
        ("seed", "<u8"),
        ("position", "<u4"),
        ("reserved", "<u4"),
    ]
)
SAMPLE_RESULT = np.dtype(
    {
        "names": ["token", "logprob", "num_logprobs", "ids", "logprobs"],
        "formats": ["<u4", "<f4", "<u4", ("<u4", 20), ("<f4", 20)],
        "offsets": [0, 4, 8, 16, 96],
        "itemsize": 192,
    }
)


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    return memory[offset : offset + size]


@dataclass(frozen=True)
class Kernels:
    """numpy in, numpy out. Matrices have C order; `pad` elements separate rows in memory."""

    name: str
    table: Table

    @staticmethod
    def get(library: ctypes.CDLL, name: str) -> Kernels | None:
        library.vtpu_kernels_get.restype = ctypes.POINTER(Table)
        library.vtpu_kernels_get.argtypes = [ctypes.c_char_p]
        found = library.vtpu_kernels_get(name.encode())
        return Kernels(name, found.contents) if found else None

    def product(self, fmt: int) -> Product:
        return {I8: self.table.i8, BF16_TILES: self.table.bf16}.get(fmt, self.table.blocks)

    def quantise(self, x: np.ndarray, fmt: int) -> np.ndarray:
        x = np.ascontiguousarray(x, np.float32)
        rows, k = x.shape
        product = self.product(fmt)
        out = _aligned(product.quantise_bytes(k, rows))
        out[:] = 0
        product.quantise(out.ctypes.data, x.ctypes.data, x.strides[0], k, rows, 0, rows)
        return out

    def matmul(self, x, weight, n, fmt, before=None, pad=0, split=None):
        """weight: bytes of the tiles. split: computes [0, split) and the rest apart."""
        m, k = x.shape
        quantised = self.quantise(x, fmt)
        dst = np.full((m, n + pad), np.float32(-7))
        if before is not None:
            dst[:, :n] = before
        op = Matmul(
            *(dst.ctypes.data, dst.strides[0], quantised.ctypes.data, weight.ctypes.data),
            *(m, n, k, fmt, before is not None),
        )
        split = n // 16 if split is None else split
        self.product(fmt).matmul(ctypes.byref(op), 0, split)
        self.product(fmt).matmul(ctypes.byref(op), split, n // 16)
        assert np.all(dst[:, n:] == -7)
        return dst[:, :n]

    def rmsnorm(self, x, weight, epsilon):
        dst = np.empty_like(x)
        self.table.rmsnorm(
            *(dst.ctypes.data, dst.strides[0], x.ctypes.data, x.strides[0]),
            *(weight.ctypes.data, x.shape[1], epsilon, 0, x.shape[0]),
        )
        return dst

    def binary(self, operation, a, b, pad=0):
        rows, width = a.shape
        dst = np.full((rows, width + pad), np.float32(-7))
        getattr(self.table, operation)(
            *(dst.ctypes.data, dst.strides[0], a.ctypes.data, a.strides[0]),
            *(b.ctypes.data, b.strides[0], width, 0, rows),
        )
        assert np.all(dst[:, width:] == -7)
        return dst[:, :width]

    def rope(self, x, cos_sin, heads, halves, in_place=False):
        dst = x.copy() if in_place else np.empty_like(x)
        source = dst if in_place else x
        self.table.rope(
            *(dst.ctypes.data, dst.strides[0], source.ctypes.data, source.strides[0]),
            *(cos_sin.ctypes.data, heads, x.shape[1] // heads, halves, 0, x.shape[0]),
        )
        return dst

    def attn(self, q, k_cache, v_cache, row_info, tables, block_size, fmt, scale, parts=1):
        """q [rows, heads, dim]; caches [slots, kv_heads, dim] in the format's storage type."""
        rows, heads, dim = q.shape
        dst = np.full_like(q, 99)
        op = Attn(
            *(array.ctypes.data for array in (dst, q, k_cache, v_cache, row_info, tables)),
            *(rows, heads, k_cache.shape[1], dim, block_size, tables.shape[1], fmt, scale),
        )
        scratch = _aligned(self.table.attn_scratch_bytes(ctypes.byref(op)))
        edges = np.linspace(0, rows * k_cache.shape[1], parts + 1).astype(int)
        for begin, end in itertools.pairwise(edges):
            self.table.attn(ctypes.byref(op), scratch.ctypes.data, int(begin), int(end))
        return dst

    def sample(self, logits, params):
        rows, vocab = logits.shape
        results = np.zeros(rows, SAMPLE_RESULT)
        scratch = _aligned(self.table.sample_scratch_bytes(vocab))
        self.table.sample(
            *(results.ctypes.data, logits.ctypes.data, logits.strides[0]),
            *(params.ctypes.data, vocab, scratch.ctypes.data, 0, rows),
        )
        return results

    def gather_row(self, table, row, width, fmt):
        dst = np.empty(width, np.float32)
        self.table.gather_row(dst.ctypes.data, table.ctypes.data, row, width, fmt)
        return dst

    def scatter_row(self, src, fmt):
        dst = np.zeros(len(src), np.uint32 if fmt == F32 else np.uint16)
        self.table.scatter_row(dst.ctypes.data, src.ctypes.data, len(src), fmt)
        return dst
