# SPDX-License-Identifier: MIT
"""Drives a compiled step and its reference side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llama_graph import Config
from vtpu_compiler import Executable, pack_weights
from vtpu_compiler.interp import interpret
from vtpu_compiler.ir import Graph
from vtpu_compiler.layout import BLOCK_BYTES, dequantise


def random_weights(graph: Graph, seed: int = 1) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every param of the graph as a model file would store it."""
    rng = np.random.default_rng(seed)
    made = {}
    for op in graph.ops:
        if op.name != "param":
            continue
        dtype, shape = op.value.dtype, op.value.shape
        if dtype in BLOCK_BYTES:
            blocks = rng.integers(
                0, 256, (shape[0] * shape[1] // 32, BLOCK_BYTES[dtype]), dtype=np.uint8
            )
            count = 2 if dtype == "q4_1" else 1
            top = {"q8_0": 0.003, "q4_0": 0.03, "q4_1": 0.03}[dtype]
            scales = rng.uniform(top / 2, top, (len(blocks), count)).astype(np.float16)
            if dtype == "q4_1":
                scales[:, 1] = -8 * scales[:, 0]
            blocks[:, : 2 * count] = scales.view(np.uint8)
            raw = blocks.tobytes()
        elif dtype == "i8":
            scales = rng.uniform(0.0005, 0.003, shape[0]).astype(np.float32)
            raw = rng.integers(-127, 128, shape, dtype=np.int8).tobytes() + scales.tobytes()
        elif dtype == "bf16":
            values = rng.uniform(-0.3, 0.3, shape).astype(np.float32)
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        elif op.attrs["name"] == "rope.cos_sin":
            angles = np.outer(np.arange(shape[0]), 0.5 ** np.arange(shape[1] // 2))
            raw = np.hstack([np.cos(angles), np.sin(angles)]).astype(np.float32).tobytes()
        else:
            raw = rng.uniform(0.5, 1.5, shape).astype(np.float32).tobytes()
        made[str(op.attrs["name"])] = (dtype, tuple(shape), raw)
    return made


@dataclass
class Sequence:
    """One request: its tokens so far, and the blocks of its cache."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0


@dataclass
class Stepper:
    """run: runs the executable on [weights, launch block, states] in place."""

    config: Config
    graph: Graph
    executable: Executable
    run: Any
    num_slots: int = 64
    raw: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        metadata = self.executable.metadata
        self.raw = random_weights(self.graph)
        self.weights = np.zeros(metadata["weights"]["bytes"], np.uint8)
        pack_weights(metadata, lambda name: self.raw[name], self.weights)
        state = metadata["states"][0]
        self.state = np.zeros(state["slot_bytes"] * self.num_slots, np.uint8)
        self.logits = np.zeros(4 * self.config.max_rows * self.config.vocab, np.uint8)
        self.reference = {
            part["name"]: np.zeros((self.num_slots, part["width"]), np.float32)
            for part in state["parts"]
        }

    def inputs(self, work: list[tuple[Sequence, int]], logprobs: int) -> dict[str, np.ndarray]:
        """The next tokens of some sequences: (sequence, how many)."""
        c = self.config
        ids, positions, slots, info, rows = [], [], [], [], []
        tables = np.zeros((len(work), c.max_blocks), np.uint32)
        for number, (sequence, count) in enumerate(work):
            tables[number, : len(sequence.blocks)] = sequence.blocks
            for position in range(sequence.done, sequence.done + count):
                block, offset = divmod(position, c.block_size)
                ids.append(sequence.tokens[position])
                positions.append(position)
                slots.append(sequence.blocks[block] * c.block_size + offset)
                info.append((position + 1, number))
            sequence.done += count
            if sequence.done == len(sequence.tokens):
                rows.append(len(ids) - 1)
        params = np.zeros((len(rows), 8), np.uint32)
        params.view(np.float32)[:, 2] = 1  # top_p: all
        params[:, 3] = logprobs
        return {
            "ids": np.array(ids, np.uint32),
            "positions": np.array(positions, np.uint32),
            "slots": np.array(slots, np.uint32),
            "row_info": np.array(info, np.uint32).reshape(-1, 2),
            "block_tables": tables,
            "logit_rows": np.array(rows, np.uint32),
            "sample_params": params,
        }

    def step(
        self,
        work: list[tuple[Sequence, int]],
        *,
        want_logits: bool = True,
        logprobs: int = 5,
        logits_va: int = 0,
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns (the device's outputs, the reference's)."""
        inputs = self.inputs(work, logprobs)
        metadata = self.executable.metadata
        launch = np.full(metadata["launch"]["bytes"], 0xA5, np.uint8)  # stale bytes do no harm
        lengths = {
            "T": len(inputs["ids"]),
            "R": len(inputs["logit_rows"]),
            "S": len(work),
            "num_slots": self.num_slots,
        }
        fields = {place["name"]: place for place in metadata["launch"]["fields"]}
        for name, place in fields.items():
            if place["kind"] == "length":
                data = np.array([lengths[name]], np.uint32)
            elif place["kind"] == "pointer":
                data = np.array([logits_va if want_logits else 0], np.uint64)
            elif place["kind"] == "input":
                data = inputs[name]
            else:
                continue
            raw = data.reshape(-1).view(np.uint8)
            launch[place["offset"] : place["offset"] + raw.size] = raw
        self.logits[:] = 0xA5
        self.run([self.weights, launch, self.state, self.logits])
        samples = fields["samples"]
        count = lengths["R"]
        found = {
            "samples": launch[samples["offset"] :][: 192 * count].view(np.uint32).reshape(-1, 48),
            "logits": self.logits.view(np.float32)[: count * self.config.vocab].reshape(
                count, self.config.vocab
            ),
        }

        def param(name: str) -> np.ndarray:
            dtype, shape, raw = self.raw[name]
            return dequantise(dtype, shape, raw)

        return found, interpret(self.graph, param, inputs, self.reference)
