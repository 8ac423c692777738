# SPDX-License-Identifier: MIT
"""Decoding many tokens in one launch: the device feeds each token back by itself, as
serving will once loops replace launches. Every token is drawn at random, so one wrong
bit on the way changes all that follow."""

from __future__ import annotations

import struct

import numerics_reference as ref
import numpy as np
import pytest
from asm import R, ins, pc, program
from kernels_lib import Q8_0
from machine import D, Machine, Queue

TOKENS, VOCAB, WIDTH, SEED = 1000, 256, 64, 7
TEMPERATURE, TOP_K = 0.9, 16
STEP, OUT, NEXT = R(20), R(21), R(22)  # registers: the step, where its token lies, step + 1
X, P, LOGITS, PARAMS, RESULT, TOKEN, POSITION = (n * 4096 for n in range(7))  # VMEM


class Model:
    """An embedding of the token and one of the position, added, times a matrix."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.embedding = rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
        self.positions = rng.standard_normal((TOKENS, WIDTH)).astype(np.float32)
        self.q = rng.integers(-128, 128, (VOCAB, WIDTH))
        self.d = (rng.random((VOCAB, WIDTH // 32)) * 0.004).astype(np.float16)

    def decode(self, first: int) -> list[int]:
        """In numpy, a step at a time."""
        tokens = [first]
        for step in range(TOKENS):
            x = self.embedding[tokens[-1]] + self.positions[step]
            logits = ref.matmul(x[None], self.q, self.d, self.d, Q8_0)[0]
            tokens.append(ref.sample(logits, TEMPERATURE, TOP_K, 1.0, 0, SEED, step)[0])
        return tokens


def _row(name: str, dst: int | R, src: int | R, size: int, **more: object) -> bytes:
    return ins(name, dst=dst, src=src, rows=1, row_bytes=size, dst_stride=0, src_stride=0, **more)


def _gather(dst: int, table: int, index: int, rows: int, **more: object) -> bytes:
    return ins(
        "DMA_GATHER", dst=dst, table=table, index=index, count=1, width=WIDTH, table_rows=rows,
        dst_stride=4 * WIDTH, fmt="F32", **more,
    )  # fmt: skip


def _program(machine: Machine, model: Model, out: int) -> bytes:
    embedding = machine.place(model.embedding.tobytes())
    positions = machine.place(model.positions.tobytes())
    weight = machine.place(ref.make_tiles(model.q, model.d, model.d, Q8_0).tobytes())
    params = machine.place(struct.pack("<fIfIQII", TEMPERATURE, TOP_K, 1.0, 0, SEED, 0, 0))
    loop = [
        ins("ST", addr=params + 24, value=STEP, mode="U32"),
        ins("ADD", rd=NEXT, a=STEP, b=1),
        _row("DMA_LOAD", PARAMS, params, 32),
        _row("DMA_LOAD", POSITION, params + 24, 4),
        _row("DMA_LOAD", TOKEN, OUT, 4),
        _gather(X, embedding, TOKEN, VOCAB),
        _gather(P, positions, POSITION, TOKENS, signal=1),
        ins("V_ADD", dst=X, a=X, b=P, rows=1, width=WIDTH, dst_stride=0, a_stride=0, b_stride=0,
            wait=(1, NEXT), signal=2),
        ins("MATMUL", dst=LOGITS, src=X, weight=weight, m=1, n=VOCAB, k=WIDTH,
            dst_stride=4 * VOCAB, src_stride=4 * WIDTH, fmt="Q8_0", wait=(2, NEXT), signal=3),
        ins("V_SAMPLE", dst=RESULT, logits=LOGITS, params=PARAMS, rows=1, vocab=VOCAB,
            logits_stride=4 * VOCAB, wait=(3, NEXT), signal=4),
        _row("DMA_STORE", OUT + 4, RESULT, 4, wait=(4, NEXT)),
        ins("SYNC"),
        ins("ADD", rd=OUT, a=OUT, b=4),
        ins("ADD", rd=STEP, a=STEP, b=1),
        ins("BLT", a=STEP, b=TOKENS, target=pc(1)),
    ]  # fmt: skip
    return program(ins("LI", rd=OUT, value=out), *loop)


@pytest.fixture(scope="module")
def expected() -> tuple[Model, list[int]]:
    model = Model(np.random.default_rng(SEED))
    return model, model.decode(3)


@pytest.mark.parametrize("alone", [True, False])
def test_a_launch_decodes_a_thousand_tokens(
    machine: Machine, expected: tuple[Model, list[int]], alone: bool
) -> None:
    """Alone, and in turns with a program of another context that fills VMEM."""
    model, tokens = expected
    assert len(set(tokens)) > VOCAB // 2  # no short cycle
    out = machine.alloc(4 * (TOKENS + 1))
    machine.put(out, struct.pack("<I", tokens[0]))
    decoder = Queue(machine, 0)
    if not alone:
        machine.identity(1)
        machine.write(D["REG_SLICE_US"], 200)
        other = Queue(machine, 1, context=1)
        noise = machine.place(b"\xee" * 32768)
        other.push("RUN", other.run_payload(program(
            ins("DMA_LOAD", dst=0, src=noise, rows=8, row_bytes=4096, dst_stride=4096,
                src_stride=4096),
            ins("JMP", target=0),
        )))  # fmt: skip
        other.ring_doorbell()
        machine.wait_for(lambda: other.reg("INSTRUCTIONS", 8) > 0, "the other runs")
    decoder.run(_program(machine, model, out))
    assert list(struct.unpack(f"<{TOKENS + 1}I", machine.get(out, 4 * (TOKENS + 1)))) == tokens
    assert decoder.reg("HEAD") == 1 and (alone or decoder.reg("PREEMPTIONS") > 0)
