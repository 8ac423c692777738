# SPDX-License-Identifier: MIT
"""Executables on the simulated machine against the graph interpreter."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from damage import strip_waits
from isa_machine import ARGUMENT_SPACE, DeviceFaultError, Machine
from llama_graph import Config, llama
from stepping import Sequence, Stepper
from vtpu_compiler import Dim, Graph, Options, compile_graph, read_elf
from vtpu_compiler.asm import decode
from vtpu_compiler.passes.fuse import Fuse
from vtpu_compiler.passes.schedule import Schedule

LOGITS_VA = 4 * ARGUMENT_SPACE  # the fourth piece of memory


def make(config: Config, options: Options | None = None, seed: int = 0) -> Stepper:
    graph = llama(config)
    executable = compile_graph(graph, options)
    machine = Machine([], seed)

    def run(memory: list[np.ndarray]) -> None:
        Machine(memory, machine.seed).run(executable.elf)
        machine.seed += 1

    return Stepper(config, graph, executable, run)


def compare(
    found: dict[str, np.ndarray],
    wanted: dict[str, np.ndarray],
    *,
    logits: bool = True,
    tolerance: float = 2e-4,
) -> None:
    """tolerance: of the logits, whose standard deviation is about one."""
    if logits:
        np.testing.assert_allclose(
            found["logits"], wanted["logits"], rtol=tolerance, atol=tolerance
        )
    np.testing.assert_array_equal(found["samples"][:, 0], wanted["samples"][:, 0])
    np.testing.assert_array_equal(found["samples"][:, 4:24], wanted["samples"][:, 4:24])
    for at in (slice(1, 2), slice(24, 44)):
        np.testing.assert_allclose(
            found["samples"].view(np.float32)[:, at],
            wanted["samples"].astype(np.uint32).view(np.float32)[:, at],
            rtol=1e-2,
            atol=1e-2,
        )


def sequences(config: Config, lengths: list[int]) -> list[Sequence]:
    """Requests whose cache blocks are interleaved and in no order."""
    rng = np.random.default_rng(7)
    blocks = list(rng.permutation(np.arange(1, 16)))
    made = []
    for length in lengths:
        count = -(-length // config.block_size)
        made.append(
            Sequence(
                [int(t) for t in rng.integers(0, config.vocab, length)],
                [int(blocks.pop()) for _ in range(count)],
            )
        )
    return made


@pytest.mark.parametrize("seed", range(4))
def test_batch_of_prompts_in_any_engine_order(seed: int) -> None:
    config = Config()
    stepper = make(config, seed=100 * seed)
    a, b, c = sequences(config, [9, 1, 6])
    compare(*stepper.step([(a, 9), (b, 1), (c, 6)], logits_va=LOGITS_VA))


@pytest.mark.parametrize("chunks", [[11], [4, 4, 3], [1] * 11, [10, 1]])
def test_chunked_prefill_gives_the_same(chunks: list[int]) -> None:
    config = Config()
    stepper = make(config)
    (sequence,) = sequences(config, [11])
    for chunk in chunks:
        found, wanted = stepper.step([(sequence, chunk)], logits_va=LOGITS_VA)
        compare(found, wanted)
    assert len(found["samples"]) == 1


def test_mixed_prefill_and_decode_over_steps() -> None:
    config = Config()
    stepper = make(config)
    first, second = sequences(config, [13, 16])
    compare(*stepper.step([(first, 12)], logits_va=LOGITS_VA))
    compare(*stepper.step([(first, 1), (second, 7)], logits_va=LOGITS_VA))
    compare(*stepper.step([(second, 9)], logits_va=LOGITS_VA))


def test_logits_are_stored_only_when_wanted() -> None:
    config = Config()
    stepper = make(config)
    (sequence,) = sequences(config, [5])
    found, wanted = stepper.step([(sequence, 5)], want_logits=False)
    compare(found, wanted, logits=False)
    assert (stepper.logits == 0xA5).all()


def test_maximum_lengths() -> None:
    config = Config(max_tokens=18, max_rows=3, max_seqs=3)
    stepper = make(config)
    work = [(sequence, 6) for sequence in sequences(config, [6, 6, 6])]
    compare(*stepper.step(work, logits_va=LOGITS_VA))


@pytest.mark.parametrize(
    "config",
    [
        Config(dtype="q4_0", rope="halves", state="f32"),
        Config(dtype="q8_0", head_dtype="q4_0", heads=2, kv_heads=1, head_dim=32),
        Config(layers=40),
        Config(dtype="i8", head_dtype="bf16", ffn=128),
        Config(dtype="bf16", head_dtype="i8"),
    ],
    ids=[
        *("q4_0-halves-f32", "q8_0-q4_0-head", "more-layers-than-registers"),
        *("i8-bf16-head", "bf16-i8-head"),
    ],
)
def test_other_models(config: Config) -> None:
    stepper = make(config)
    a, b = sequences(config, [3, 5])
    compare(*stepper.step([(a, 3), (b, 4)], logits_va=LOGITS_VA))


def test_unfused_epilogue_and_siblings_give_the_same() -> None:
    config = Config()
    stepper = make(config, Options(fuse=Fuse(siblings=False, epilogue=False)))
    (sequence,) = sequences(config, [7])
    compare(*stepper.step([(sequence, 7)], logits_va=LOGITS_VA))


def test_a_bad_index_faults() -> None:
    config = Config()
    stepper = make(config)
    (sequence,) = sequences(config, [3])
    sequence.tokens[1] = config.vocab
    with pytest.raises(DeviceFaultError, match="gather"):
        stepper.step([(sequence, 3)], logits_va=LOGITS_VA)


def test_a_length_above_its_maximum_traps() -> None:
    config = Config()
    stepper = make(config)
    work = [(sequence, 7) for sequence in sequences(config, [7] * 4)]
    assert config.max_tokens < 4 * 7
    with pytest.raises(DeviceFaultError, match="trap") as caught:
        stepper.step(work, logits_va=LOGITS_VA)
    meaning = stepper.executable.metadata["traps"][str(caught.value).split()[-1]]
    assert meaning == "the launch block's length T is greater than 24"


def test_accumulation_never_lands_on_what_it_reads() -> None:
    """x + matmul(x): in place, the product would read what it overwrites."""
    g = Graph("g")
    x = g.gather_rows(g.param("t", (16, 64), "f32"), g.input("i", (Dim("T", 4),), "i32"))
    g.output("y", g.add(x, g.matmul(x, g.param("w", (64, 64), "q8_0"))))
    code = compile_graph(g).stages["machine"]
    assert "ACCUMULATE" not in code and "V_ADD" in code


def test_states_of_many_widths_in_any_order() -> None:
    """More addresses, and more distances between them, than registers."""
    chance = random.Random(5)
    g = Graph("g")
    rows, slots = Dim("T", 2), Dim("N", 8)
    index = g.input("i", (rows,), "i32")
    x = g.gather_rows(g.param("t", (4, 1024), "f32"), index)
    widths = [16 * chance.randint(1, 64) for _ in range(60)]
    states = [g.state(f"s{n}", (slots, width), "f32") for n, width in enumerate(widths)]
    order = list(range(60)) * 2
    chance.shuffle(order)
    starts = [min(16 * (n // 10), 1024 - width) for n, width in enumerate(widths)]
    for n in order:
        states[n] = g.scatter_rows(states[n], g.slice(x, starts[n], widths[n]), index)
    executable = compile_graph(g)
    metadata = executable.metadata
    table = np.arange(4 * 1024, dtype=np.float32).reshape(4, 1024)
    launch = np.zeros(metadata["launch"]["bytes"], np.uint8)
    for place in metadata["launch"]["fields"]:
        data = {"T": [2], "N": [8], "i": [3, 1]}[place["name"]]
        raw = np.array(data, np.uint32).view(np.uint8)
        launch[place["offset"] : place["offset"] + raw.size] = raw
    state = metadata["states"][0]
    memory = [table.reshape(-1).view(np.uint8), launch, np.zeros(8 * state["slot_bytes"], np.uint8)]
    Machine(memory, 3).run(executable.elf)
    for n, part in enumerate(state["parts"]):
        at = 8 * part["slot_offset"]
        found = memory[2][at : at + 8 * part["slot_bytes"]].view(np.float32).reshape(8, -1)
        columns = slice(starts[n], starts[n] + widths[n])
        np.testing.assert_array_equal(found[[3, 1]], table[[3, 1], columns])
        assert not found[[0, 2, 4, 5, 6, 7]].any()


def test_an_old_state_beside_a_new_one() -> None:
    """The old one's register must outlive the making of the new one's."""
    g = Graph("g")
    rows, slots = Dim("T", 2), Dim("N", 8)
    index = g.input("i", (rows,), "i32")
    info, tables = g.input("info", (rows, 2), "i32"), g.input("tables", (1, 1), "i32")
    q = g.gather_rows(g.param("t", (4, 16), "f32"), index)
    states = [g.state(f"s{n}", (slots, 16), "f32") for n in range(40)]
    g.scatter_rows(states[0], q, index)  # lies where the argument points: needs no register
    kept = g.scatter_rows(states[1], q, index)
    for n in range(2, 17):
        g.scatter_rows(states[n], q, index)
    shape = {"heads": 1, "kv_heads": 1, "head_dim": 16, "block_size": 8, "scale": 1.0}
    g.output("y", g.paged_attention(q, kept, states[39], info, tables, **shape))
    elf = read_elf(compile_graph(g).elf)
    code = [decode(elf.code[at : at + 64]) for at in range(0, len(elf.code), 64)]
    at = next(i for i, instr in enumerate(code) if instr.op == "V_ATTN")
    key = code[at].operands[2]
    scatter = [instr for instr in code if instr.op == "DMA_SCATTER"][1]
    assert key == scatter.operands[0]
    written = [instr.operands[0][0] for instr in code[:at] if instr.op in ("ADD", "MUL", "LD")]
    assert written.count(key[0]) == 1 and written[-1] != key[0]


def test_the_machine_exposes_missing_waits() -> None:
    """Without waits some order must go wrong, or these tests prove nothing."""
    config = Config()
    stepper = make(config)
    broken = strip_waits(stepper.executable)
    wrong = 0
    for seed in range(5):
        stepper.run = lambda memory, seed=seed: Machine(memory, seed).run(broken)
        (sequence,) = sequences(config, [9])
        try:
            compare(*stepper.step([(sequence, 9)], logits_va=LOGITS_VA))
        except (AssertionError, DeviceFaultError):
            wrong += 1
    assert wrong >= 4


def test_serial_schedule_agrees() -> None:
    config = dataclasses.replace(Config(), layers=1)
    stepper = make(config, Options(schedule=Schedule(hazards=False)))
    (sequence,) = sequences(config, [9])
    compare(*stepper.step([(sequence, 9)], logits_va=LOGITS_VA))
