# SPDX-License-Identifier: MIT
"""Llama steps as graphs, of any size, for the compiler's tests."""

from __future__ import annotations

from dataclasses import dataclass

from vtpu_compiler import Dim, Graph


@dataclass(frozen=True)
class Config:
    """The defaults are small enough for the tests' machine."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    vocab: int = 96
    max_tokens: int = 24
    max_rows: int = 5
    max_seqs: int = 4
    max_blocks: int = 8
    block_size: int = 4
    max_position: int = 64
    max_slots: int = 1 << 20
    dtype: str = "q4_1"
    head_dtype: str = "q8_0"
    state: str = "f16"
    rope: str = "pairs"


SMOLLM2 = Config(
    layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152,
    max_tokens=512, max_rows=32, max_seqs=32, max_blocks=512, block_size=16, max_position=8192,
)  # fmt: skip


def llama(config: Config = Config()) -> Graph:
    """One step: tokens in, samples (and logits, when wanted) out."""
    c = config
    g = Graph("step")
    tokens, rows, seqs = Dim("T", c.max_tokens), Dim("R", c.max_rows), Dim("S", c.max_seqs)
    slots_dim = Dim("num_slots", c.max_slots)
    kv_width = c.kv_heads * c.head_dim
    ids = g.input("ids", (tokens,), "i32")
    positions = g.input("positions", (tokens,), "i32")
    slots = g.input("slots", (tokens,), "i32")
    row_info = g.input("row_info", (tokens, 2), "i32")
    tables = g.input("block_tables", (seqs, c.max_blocks), "i32")
    logit_rows = g.input("logit_rows", (rows,), "i32")
    sample_params = g.input("sample_params", (rows, 8), "i32")

    embed = g.param("model.embed", (c.vocab, c.hidden), c.head_dtype)
    cos_sin = g.param("rope.cos_sin", (c.max_position, c.head_dim), "f32")
    with g.location("model.py", 10, "model.embed"):
        x = g.gather_rows(embed, ids)
        angles = g.gather_rows(cos_sin, positions)
    for layer in range(c.layers):
        name = f"model.layers.{layer}"

        def weight(part: str, rows: int, columns: int, name: str = name) -> object:
            return g.param(f"{name}.{part}", (rows, columns), c.dtype)

        with g.location("model.py", 20, f"{name}.attn_norm"):
            h = g.rms_norm(x, g.param(f"{name}.attn_norm", (c.hidden,), "f32"), 1e-5)
        with g.location("model.py", 21, f"{name}.qkv"):
            q = g.matmul(h, weight("q", c.heads * c.head_dim, c.hidden))
            k = g.matmul(h, weight("k", kv_width, c.hidden))
            v = g.matmul(h, weight("v", kv_width, c.hidden))
        with g.location("model.py", 24, f"{name}.rope"):
            q = g.rope(q, angles, c.head_dim, c.rope)
            k = g.rope(k, angles, c.head_dim, c.rope)
        with g.location("model.py", 26, f"{name}.attention"):
            keys = g.state(f"{name}.k", (slots_dim, kv_width), c.state)
            values = g.state(f"{name}.v", (slots_dim, kv_width), c.state)
            keys = g.scatter_rows(keys, k, slots)
            values = g.scatter_rows(values, v, slots)
            a = g.paged_attention(
                q, keys, values, row_info, tables,
                heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim,
                block_size=c.block_size, scale=c.head_dim**-0.5,
            )  # fmt: skip
        with g.location("model.py", 33, f"{name}.o"):
            x = g.add(x, g.matmul(a, weight("o", c.hidden, c.heads * c.head_dim)))
        with g.location("model.py", 34, f"{name}.ffn_norm"):
            h = g.rms_norm(x, g.param(f"{name}.ffn_norm", (c.hidden,), "f32"), 1e-5)
        with g.location("model.py", 35, f"{name}.mlp"):
            gate = g.matmul(h, weight("gate", c.ffn, c.hidden))
            up = g.matmul(h, weight("up", c.ffn, c.hidden))
            h = g.mul(g.silu(gate), up)
        with g.location("model.py", 38, f"{name}.down"):
            x = g.add(x, g.matmul(h, weight("down", c.hidden, c.ffn)))
    with g.location("model.py", 40, "model.head"):
        x = g.take_rows(x, logit_rows)
        x = g.rms_norm(x, g.param("model.norm", (c.hidden,), "f32"), 1e-5)
        logits = g.matmul(x, embed)
    with g.location("model.py", 43, "model.sample"):
        samples = g.sample(logits, sample_params)
    g.output("samples", samples)
    g.output("logits", logits, indirect=True)
    return g
