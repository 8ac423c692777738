# SPDX-License-Identifier: MIT
"""The step program: one graph that serves every prefill and decode step.

Batch size, lengths and block tables all come from the launch block, so nothing is
compiled again when they change. The names below are those of its fields.
"""

from __future__ import annotations

from vtpu_compiler import Dim, Graph

from vtpu import ops
from vtpu.artifacts import StepShape
from vtpu.models.llama import Llama, StepBatch
from vtpu.tensor import Trace

NAME = "step"


# The cache's rows are counted in an instruction field of this size.
_MAX_SLOTS = 1 << 20


def trace_step(model: Llama, shape: StepShape) -> Graph:
    """Records one step.

    shape.context is given. Launch inputs, all i32, for T tokens, R rows to sample and S sequences:
    token_ids, positions, slots [T], row_info [T, 2], block_tables [S, max_blocks],
    sample_rows [R], sample_params [R, 8]. Results: sampled [R, 48], and logits
    [R, vocab] where the pointer logits_va leads, if it is not null. The KV cache has
    N rows, N given at launch.
    """
    config = model.config
    tokens, rows = Dim("T", shape.max_tokens), Dim("R", shape.max_seqs)
    seqs, slots = Dim("S", shape.max_seqs), Dim("N", _MAX_SLOTS)
    trace = Trace(NAME)
    with trace.active():
        batch = StepBatch(
            token_ids=trace.input("token_ids", tokens),
            positions=trace.input("positions", tokens),
            slots=trace.input("slots", tokens),
            row_info=trace.input("row_info", tokens, 2),
            block_tables=trace.input("block_tables", seqs, shape.max_blocks),
            block_size=shape.block_size,
        )
        sample_rows = trace.input("sample_rows", rows)
        sample_params = trace.input("sample_params", rows, 8)
        width = config.kv_heads * config.head_dim
        caches = [
            (
                trace.state(f"keys.{i}", slots, width, shape.kv_dtype),
                trace.state(f"values.{i}", slots, width, shape.kv_dtype),
            )
            for i in range(config.layers)
        ]
        logits = model(batch, caches, sample_rows)
        trace.output("sampled", ops.sample(logits, sample_params))
        trace.output("logits", logits, indirect=True)
    return trace.graph
