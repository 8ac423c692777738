# SPDX-License-Identifier: MIT
"""A GGUF Llama of a few hundred kilobytes, with random weights."""

from __future__ import annotations

import random
import struct

F32, F16, Q4_1, Q8_0, BF16 = 0, 1, 3, 8, 30
_SIZES = {F32: (1, 4), F16: (1, 2), Q4_1: (32, 20), Q8_0: (32, 34), BF16: (1, 2)}

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, CONTEXT = 2, 64, 4, 2, 96, 160, 128

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": CONTEXT,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.vocab_size": VOCAB,
}


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _pair(key: str, value: object) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", 8) + _text(value)
    if isinstance(value, int):
        return _text(key) + struct.pack("<II", 4, value)
    assert isinstance(value, float)
    return _text(key) + struct.pack("<If", 6, value)


def _data(draw: random.Random, kind: int, count: int) -> bytes:
    per_block, _ = _SIZES[kind]
    if kind == F32:
        return struct.pack(f"<{count}f", *(draw.uniform(0.5, 1.5) for _ in range(count)))
    if kind == F16:
        return bytes(2 * count)
    if kind == BF16:
        values = (struct.pack("<f", draw.gauss(0, 0.1)) for _ in range(count))
        return b"".join(value[2:] for value in values)
    blocks = []
    for _ in range(count // per_block):
        scale = draw.uniform(0.002, 0.02)
        if kind == Q4_1:
            blocks.append(struct.pack("<ee", scale, -8 * scale) + draw.randbytes(16))
        else:
            blocks.append(struct.pack("<e", scale / 8) + draw.randbytes(32))
    return b"".join(blocks)


def tiny_llama(
    seed: int = 1,
    matrix_type: int = Q4_1,
    changes: dict[str, object] | None = None,
    embedding_type: int = Q8_0,
) -> bytes:
    """The file's bytes. changes: metadata to set, or with None to leave out."""
    draw = random.Random(seed)
    kv_width = HIDDEN // HEADS * KV_HEADS
    shapes: list[tuple[str, tuple[int, ...], int]] = [
        ("token_embd", (VOCAB, HIDDEN), embedding_type),
        ("output_norm", (HIDDEN,), F32),
    ]
    for i in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv_width, HIDDEN),
            "attn_v": (kv_width, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():
            kind = matrix_type if len(shape) == 2 else F32
            shapes.append((f"blk.{i}.{name}", shape, kind))
    metadata = {k: v for k, v in {**METADATA, **(changes or {})}.items() if v is not None}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata))
    head += b"".join(_pair(key, value) for key, value in metadata.items())
    data = b""
    for name, shape, kind in shapes:
        count = 1
        for size in shape:
            count *= size
        head += _text(name + ".weight")
        head += struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", kind, len(data))
        data += _data(draw, kind, count)
        data += bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + data
