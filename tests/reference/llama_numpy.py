# SPDX-License-Identifier: MIT
"""Llama in plain float32 numpy: the answer that the device is held to.

It shares no code with the project: the file is read and dequantised by the `gguf`
package, attention sees the whole sequence at once, and there is no cache, no batch
and no quantised activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True)
class LlamaReference:
    """A model, dequantised. Weights are [outputs, inputs]."""

    weights: dict[str, Array]
    layers: int
    heads: int
    kv_heads: int
    rope_base: float
    epsilon: float

    def logits(self, tokens: list[int]) -> Array:
        """The next-token logits after each prefix of one document: [T, vocab]."""
        w = self.weights
        x = w["token_embd"][tokens]
        cos, sin = self._rotation(len(tokens))
        for i in range(self.layers):
            layer = f"blk.{i}."
            h = self._norm(x, w[layer + "attn_norm"])
            q = self._heads(h @ w[layer + "attn_q"].T, self.heads)
            k = self._heads(h @ w[layer + "attn_k"].T, self.kv_heads)
            v = self._heads(h @ w[layer + "attn_v"].T, self.kv_heads)
            a = _attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
            x = x + a @ w[layer + "attn_output"].T
            h = self._norm(x, w[layer + "ffn_norm"])
            gate = h @ w[layer + "ffn_gate"].T
            gate = gate / (1 + np.exp(-gate))
            x = x + (gate * (h @ w[layer + "ffn_up"].T)) @ w[layer + "ffn_down"].T
        return self._norm(x, w["output_norm"]) @ w.get("output", w["token_embd"]).T

    def _norm(self, x: Array, weight: Array) -> Array:
        square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(square + np.float32(self.epsilon)) * weight

    @staticmethod
    def _heads(x: Array, heads: int) -> Array:
        """[T, heads * D] -> [heads, T, D]"""
        return x.reshape(len(x), heads, -1).transpose(1, 0, 2)

    def _rotation(self, length: int) -> tuple[Array, Array]:
        half = self.weights["token_embd"].shape[1] // self.heads // 2
        frequency = self.rope_base ** (-np.arange(half, dtype=np.float64) / half)
        angle = np.arange(length, dtype=np.float64)[:, None] * frequency
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """GGUF's llama files keep the two halves of a rotation side by side."""
    a, b = x[..., 0::2], x[..., 1::2]
    rotated = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return rotated.reshape(x.shape)


def _attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention over a whole sequence: [H, T, D] -> [T, H * D]"""
    group = len(q) // len(k)
    k, v = k.repeat(group, axis=0), v.repeat(group, axis=0)
    length, dim = q.shape[1:]
    scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(dim))
    scores += np.triu(np.full((length, length), -np.inf, np.float32), 1)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return (p @ v).transpose(1, 0, 2).reshape(length, -1)


def load(path: str | PathLike[str]) -> LlamaReference:
    """Reads and dequantises a whole model (a few times its size in memory)."""
    reader = GGUFReader(path)

    def value(key: str) -> Any:
        field = reader.get_field("llama." + key)
        assert field is not None, key
        return field.contents()

    weights = {
        t.name.removesuffix(".weight"): dequantize(t.data, t.tensor_type) for t in reader.tensors
    }
    return LlamaReference(
        weights,
        layers=value("block_count"),
        heads=value("attention.head_count"),
        kv_heads=value("attention.head_count_kv"),
        rope_base=value("rope.freq_base"),
        epsilon=value("attention.layer_norm_rms_epsilon"),
    )


def log_softmax(logits: Array) -> NDArray[np.float64]:
    """In double precision: the comparison itself must not add an error."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
