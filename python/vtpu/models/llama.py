# SPDX-License-Identifier: MIT
"""Llama, from the metadata and the tensor names of a GGUF file."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from vtpu import ops
from vtpu.gguf import GGUFError, GGUFFile
from vtpu.nn import Embedding, Linear, Module, ModuleList, RMSNorm
from vtpu.tensor import Parameter, Tensor, TracedState

ROPE_TABLE = "rope.cos_sin"

# What the device's matrix unit multiplies with; norms stay in f32.
_MATRIX_DTYPES = ("q8_0", "q4_0", "q4_1", "bf16")

_LAYER_TENSORS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
    "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Hyperparameters. context is the most positions that the model was made for."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    rope_base: float
    epsilon: float

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> LlamaConfig:
        """Raises GGUFError when the file is of another architecture or lacks a key."""
        found = file.metadata.get("general.architecture")
        if found != "llama":
            raise GGUFError(f"{file.path}: architecture {found!r}, supported: 'llama'")
        heads = _positive(file, "attention.head_count")
        hidden = _positive(file, "embedding_length")
        head_dim = _positive(file, "attention.key_length", hidden // heads)
        rotated = _positive(file, "rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise GGUFError(
                f"{file.path}: llama.rope.dimension_count is {rotated}, supported is "
                f"the whole head of {head_dim}"
            )
        scaling = file.metadata.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise GGUFError(f"{file.path}: llama.rope.scaling.type is {scaling!r}, supported: none")
        tokens = file.metadata.get("tokenizer.ggml.tokens", ())
        return cls(
            layers=_positive(file, "block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=_positive(file, "attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=_positive(file, "feed_forward_length"),
            vocab=_positive(file, "vocab_size", len(tokens)),
            context=_positive(file, "context_length"),
            rope_base=_number(file, "rope.freq_base", 10000.0),
            epsilon=_number(file, "attention.layer_norm_rms_epsilon"),
        )


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of one step over a ragged batch of sequences.

    token_ids, positions, slots: [T], a token, its position, and the row of the
        caches that its key and value go to.
    row_info: [T, 2], block_tables: [S, B]: see ops.paged_attention.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    row_info: Tensor
    block_tables: Tensor
    block_size: int


class Attention(Module):
    """Grouped-query attention over a paged cache."""

    def __init__(self, config: LlamaConfig, file: GGUFFile, layer: int) -> None:
        self.config = config
        q_width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        name = f"blk.{layer}.attn_"
        self.q_proj = _linear(file, name + "q", q_width, config.hidden)
        self.k_proj = _linear(file, name + "k", kv_width, config.hidden)
        self.v_proj = _linear(file, name + "v", kv_width, config.hidden)
        self.o_proj = _linear(file, name + "output", config.hidden, q_width)

    def forward(
        self,
        x: Tensor,
        cos_sin: Tensor,
        keys: TracedState,
        values: TracedState,
        batch: StepBatch,
    ) -> Tensor:
        c = self.config
        # GGUF's converter has interleaved the halves of each head's rotation.
        q = ops.rope(self.q_proj(x), cos_sin, c.head_dim, pairs=True)
        k = ops.rope(self.k_proj(x), cos_sin, c.head_dim, pairs=True)
        keys = ops.scatter_rows(keys, k, batch.slots)
        values = ops.scatter_rows(values, self.v_proj(x), batch.slots)
        attended = ops.paged_attention(
            q,
            keys,
            values,
            batch.row_info,
            batch.block_tables,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            block_size=batch.block_size,
        )
        out: Tensor = self.o_proj(attended)
        return out


class MLP(Module):
    """Gated feed-forward network."""

    def __init__(self, config: LlamaConfig, file: GGUFFile, layer: int) -> None:
        name = f"blk.{layer}.ffn_"
        wide, narrow = config.intermediate, config.hidden
        self.gate_proj = _linear(file, name + "gate", wide, narrow)
        self.up_proj = _linear(file, name + "up", wide, narrow)
        self.down_proj = _linear(file, name + "down", narrow, wide)

    def forward(self, x: Tensor) -> Tensor:
        hidden = ops.silu(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(hidden)
        return out


class DecoderLayer(Module):
    def __init__(self, config: LlamaConfig, file: GGUFFile, layer: int) -> None:
        self.input_layernorm = _norm(file, f"blk.{layer}.attn_norm", config)
        self.self_attn = Attention(config, file, layer)
        self.post_attention_layernorm = _norm(file, f"blk.{layer}.ffn_norm", config)
        self.mlp = MLP(config, file, layer)

    def forward(
        self,
        x: Tensor,
        cos_sin: Tensor,
        keys: TracedState,
        values: TracedState,
        batch: StepBatch,
    ) -> Tensor:
        attended: Tensor = self.self_attn(self.input_layernorm(x), cos_sin, keys, values, batch)
        x = x + attended
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(Module):
    """The whole model. Holds no weight data: see weight()."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises GGUFError when the file is not a Llama that the device can run."""
        config = LlamaConfig.from_gguf(file)
        self.config = config
        self._file = file
        embedding = _matrix(file, "token_embd", config.vocab, config.hidden)
        self.embed_tokens = Embedding(embedding)
        table = (config.context, config.head_dim)
        self.rotary = Embedding(Parameter(table, "f32", "weights", ROPE_TABLE))
        self.layers = ModuleList([DecoderLayer(config, file, i) for i in range(config.layers)])
        self.norm = _norm(file, "output_norm", config)
        tied = "output.weight" not in file.tensors
        self.lm_head = Linear(
            embedding if tied else _matrix(file, "output", config.vocab, config.hidden)
        )
        _refuse_strangers(file, config.layers, tied)

    def forward(
        self,
        batch: StepBatch,
        caches: Sequence[tuple[TracedState, TracedState]],
        rows: Tensor,
    ) -> Tensor:
        """Logits [R, vocab] after the tokens that rows [R] points to.

        caches: each layer's keys and values, [slots, kv_heads * head_dim].
        """
        x = self.embed_tokens(batch.token_ids)
        cos_sin = self.rotary(batch.positions)
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            x = layer(x, cos_sin, keys, values, batch)
        logits: Tensor = self.lm_head(self.norm(ops.take_rows(x, rows)))
        return logits

    def weight(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        """Element type, shape and bytes (as the file stores them) of a parameter."""
        if name == ROPE_TABLE:
            c = self.config
            table = rope_table(c.context, c.head_dim, c.rope_base)
            return "f32", (c.context, c.head_dim), memoryview(table).cast("B")
        entry = self._file.tensors[name]
        return entry.dtype, entry.shape, self._file.raw(name)


def rope_table(context: int, head_dim: int, base: float) -> array[float]:
    """f32 [context, head_dim]: a position's cosines, then its sines."""
    import numpy as np

    half = head_dim // 2
    frequency = base ** (-np.arange(half, dtype=np.float64) / half)
    angle = np.arange(context, dtype=np.float64)[:, None] * frequency
    table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    return array("f", table.astype(np.float32).tobytes())


def _key(file: GGUFFile, key: str, default: object) -> object:
    value = file.metadata.get("llama." + key, default)
    if value is None:
        raise GGUFError(f"{file.path}: the key llama.{key} is missing")
    return value


def _positive(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = _key(file, key, default)
    if not isinstance(value, int) or value <= 0:
        raise GGUFError(f"{file.path}: llama.{key} is {value!r}, not a positive number")
    return value


def _number(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = _key(file, key, default)
    if not isinstance(value, (int, float)) or not 0 < value < 1e12:
        raise GGUFError(f"{file.path}: llama.{key} is {value!r}, not a positive number")
    return float(value)


def _parameter(
    file: GGUFFile, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> Parameter:
    name += ".weight"
    entry = file.tensors.get(name)
    if entry is None:
        raise GGUFError(f"{file.path}: the tensor {name} is missing")
    if entry.shape != shape:
        raise GGUFError(f"{file.path}: {name} is {entry.shape}, expected {shape}")
    if entry.dtype not in dtypes:
        raise GGUFError(f"{file.path}: {name} is {entry.dtype}, supported: {', '.join(dtypes)}")
    return Parameter(shape, entry.dtype, "weights", name)


def _matrix(file: GGUFFile, name: str, outputs: int, inputs: int) -> Parameter:
    return _parameter(file, name, (outputs, inputs), _MATRIX_DTYPES)


def _linear(file: GGUFFile, name: str, outputs: int, inputs: int) -> Linear:
    return Linear(_matrix(file, name, outputs, inputs))


def _norm(file: GGUFFile, name: str, config: LlamaConfig) -> RMSNorm:
    weight = _parameter(file, name, (config.hidden,), ("f32",))
    return RMSNorm(weight, config.epsilon)


def _refuse_strangers(file: GGUFFile, layers: int, tied: bool) -> None:
    """A tensor that is not used (a bias, say) means that the answer would be wrong."""
    known = {f"blk.{i}.{part}.weight" for i in range(layers) for part in _LAYER_TENSORS}
    known |= {"token_embd.weight", "output_norm.weight"}
    known |= set() if tied else {"output.weight"}
    strangers = [name for name in file.tensors if name not in known]
    if strangers:
        raise GGUFError(
            f"{file.path}: {len(strangers)} tensors are not Llama's, the first is {strangers[0]}"
        )
