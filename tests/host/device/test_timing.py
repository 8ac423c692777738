# SPDX-License-Identifier: MIT
"""The timing model: cycles worked out by hand, limits in closed form, and no trace of the host.

The chips' figures are written out here, apart from timing.toml, so that the
arithmetic in the comments can be followed:

         issue  HBM bytes/cycle  latency  burst  DMA set-up  arrays     loads rows  lanes  VPU
  v5e    4      546              500      64     100         4 128x128  2           1024   20
  edge   4      34               100      32     50          1 64x64    1           128    10

MATMUL of Q formats takes a row a cycle on v5e and one in two cycles on edge.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from asm import R, ins, program
from machine import D, Machine, Queue
from profiles import read_profile, run_profiled, with_profile
from timing_reference import CHIPS, Step, simulate
from vtpu_compiler import hw

Opener = Callable[..., Machine]
ROW = {"rows": 1, "dst_stride": 0, "src_stride": 0}


def _open(open_machine: Opener, **options: object) -> Queue:
    # Most programs here are about time, and race.
    settings = {"timing": "v5e", "hbm_bytes": 32 << 20, "check_races": False}
    machine = open_machine(**settings | options)
    machine.identity()
    machine.enable()
    return Queue(machine)


@pytest.fixture(params=["v5e", "edge"])
def chip(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def timed(open_machine: Opener, chip: str) -> Queue:
    return _open(open_machine, timing=chip)


def _load(size: int = 64, dst: int = 0, src: int = 0, **more: object) -> bytes:
    return ins("DMA_LOAD", dst=dst, src=src, row_bytes=size, **ROW, **more)  # type: ignore[arg-type]


def _store(size: int = 64, **more: object) -> bytes:
    return ins("DMA_STORE", dst=8 << 20, src=128, row_bytes=size, **ROW, **more)  # type: ignore[arg-type]


def _add(rows: int = 1, width: int = 16, **more: object) -> bytes:
    strides = {name: width * 4 for name in ("dst_stride", "a_stride", "b_stride")}
    return ins("V_ADD", dst=1 << 20, a=0, b=0, rows=rows, width=width, **strides, **more)  # type: ignore[arg-type]


def _matmul(m: int, n: int, k: int, fmt: str = "Q8_0", **more: object) -> bytes:
    return ins(
        "MATMUL", dst=16 << 20, src=0, weight=1 << 20, m=m, n=n, k=k, dst_stride=4 * n,
        src_stride=4 * k, fmt=fmt, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def _span(record: dict[str, int]) -> tuple[int, int, int]:
    return record["issue"], record["start"], record["end"]


# --- by hand ---


def test_an_empty_program(timed: Queue) -> None:
    profile = run_profiled(timed, program())
    # HALT alone: one issue.
    assert profile.header["cycles"] == 4
    assert [_span(r) for r in profile.records] == [(0, 0, 4)]


def test_scalar_instructions(timed: Queue, chip: str) -> None:
    code = program(
        ins("LI", rd=1, value=1 << 20),
        ins("LD", rd=2, addr=R(1), mode="U64"),
        ins("ST", addr=R(1), value=R(2), mode="U64"),
        ins("LDV", rd=3, addr=0),
    )
    profile = run_profiled(timed, code)
    # v5e:  LI 4; LD 4 + 500 + 1 (a burst of 64 at 546 a cycle); ST 4 + 1; LDV 4 + 20; HALT 4
    # edge: LI 4; LD 4 + 100 + 1 (a burst of 32 at 34 a cycle);  ST 4 + 1; LDV 4 + 8;  HALT 4
    spans = {
        "v5e": [4, 505, 5, 24, 4],
        "edge": [4, 105, 5, 12, 4],
    }[chip]
    assert [r["end"] - r["start"] for r in profile.records] == spans
    assert profile.header["cycles"] == sum(spans) == profile.engine("busy", "SEQ")
    burst = {"v5e": 64, "edge": 32}[chip]
    assert profile.header["hbm_read"] == profile.header["hbm_written"] == burst


def test_the_example_of_the_instruction_set(timed: Queue, chip: str) -> None:
    """Two loads, a sum that waits for both, a store that waits for the sum."""
    code = program(
        _load(dst=0, src=1 << 20, signal=1),
        _load(dst=64, src=2 << 20, signal=1),
        _add(wait=(1, 2), signal=2),
        _store(wait=(2, 1)),
    )
    profile = run_profiled(timed, code)
    first, second = profile.of("DMA_LOAD")
    (add,), (store,) = profile.of("V_ADD"), profile.of("DMA_STORE")
    if chip == "v5e":
        # Issued at 4, 8, 12, 16. A transfer: 100 + 500 + 1 (64 bytes at 546 a cycle) = 601.
        assert _span(first) == (4, 4, 605)
        assert _span(second) == (8, 605, 1206)
        # The sum: 20 + 1 (16 elements in 1024 lanes); it waited 1206 - 12.
        assert _span(add) == (12, 1206, 1227)
        assert (add["stall"], add["stall_cause"], add["stall_engine"]) == (1194, 1, 1)
        # The store was next of the DMA engine from 1206, and waited for the sum.
        assert _span(store) == (16, 1227, 1828)
        assert (store["stall"], store["stall_cause"], store["stall_engine"]) == (21, 1, 3)
        end, dma, vpu = 1828, 3 * 601, 21
    else:
        # A transfer: 50 + 100 + 2 (64 bytes at 34 a cycle) = 152. The sum: 10 + 1.
        assert _span(first) == (4, 4, 156)
        assert _span(second) == (8, 156, 308)
        assert _span(add) == (12, 308, 319)
        assert _span(store) == (16, 319, 471)
        assert (add["stall"], store["stall"]) == (296, 11)
        end, dma, vpu = 471, 3 * 152, 11
    # HALT waited from 16 on, for the store; then its own 4.
    (halt,) = profile.of("HALT")
    assert _span(halt) == (16, end, end + 4)
    assert (halt["stall_cause"], halt["stall_engine"]) == (2, 1)
    assert profile.header["cycles"] == end + 4
    assert profile.header["sync"] == halt["stall"] == end - 16
    assert profile.waited("VPU", "DMA") == add["stall"]
    assert profile.waited("DMA", "VPU") == store["stall"]
    assert profile.engine("busy", "DMA") == dma and profile.engine("busy", "VPU") == vpu
    assert profile.engine("busy", "SEQ") == 5 * 4
    assert (profile.header["hbm_read"], profile.header["hbm_written"]) == (128, 64)
    # VMEM: each transfer 64; the sum reads two rows and writes one.
    assert profile.header["vmem_bytes"] == 3 * 64 + 3 * 64
    assert profile.header["ops"] == 16


def test_one_tile(timed: Queue, chip: str) -> None:
    profile = run_profiled(timed, program(_matmul(1, 16, 32)))
    (record,) = profile.of("MATMUL")
    if chip == "v5e":
        # Issued at 4; memory answers at 504; loading 128 / 2 = 64, one row 1, until 569;
        # 544 bytes are 9 bursts, 576 bytes, 2 cycles, long over; draining 128 + 128 - 2 = 254.
        assert _span(record) == (4, 4, 823)
        assert record["hbm_read"] == 576
    else:
        # Memory answers at 104; loading 64, one row 2, until 170; 544 bytes are 17 bursts,
        # 16 cycles; draining 64 + 64 - 2 = 126.
        assert _span(record) == (4, 4, 296)
        assert record["hbm_read"] == 544
    assert record["hbm_stall"] == 0
    assert record["ops"] == 2 * 16 * 32


@pytest.mark.parametrize("fmt", ["Q8_0", "I8", "BF16_TILES"])
def test_the_rate_of_a_format(timed: Queue, chip: str, fmt: str) -> None:
    """512 rows by 128 x 256 weights: 2 tiles of 128 x 128, or 8 of 64 x 64."""
    (record,) = run_profiled(timed, program(_matmul(512, 128, 256, fmt))).of("MATMUL")
    if chip == "v5e":
        # One round: loading 64, and 512 rows at 1, 2 and 1 a cycle; 500 before, 254 behind.
        wanted = 500 + 64 + {"Q8_0": 512, "I8": 256, "BF16_TILES": 512}[fmt] + 254
    else:
        # 8 rounds: loading 64 once, 8 * 512 rows at 0.5, 1 and 0.25 a cycle; 100, 126.
        wanted = 100 + 64 + 8 * {"Q8_0": 1024, "I8": 512, "BF16_TILES": 2048}[fmt] + 126
    assert record["end"] - record["start"] == wanted
    # 8 rows of tiles: 8 tiles of 544; 4 of 1024 and 16 scales; 8 of 1024.
    size = 8 * {"Q8_0": 8 * 544, "I8": 4 * 1024 + 64, "BF16_TILES": 8 * 1024}[fmt]
    assert record["hbm_read"] == size  # whole bursts, on either chip


def test_engines_that_stream_at_once_share_the_bandwidth(open_machine: Opener) -> None:
    queue = _open(open_machine)
    profile = run_profiled(queue, program(_matmul(1, 1024, 1024), _load(1 << 20, dst=8192)))
    (product,), (load,) = profile.of("MATMUL"), profile.of("DMA_LOAD")
    # Weights: 64 * 32 tiles of 544 = 1114112 bytes, streaming from 4 + 500 = 504, for 104
    # cycles alone: 56784 bytes, 1057328 are left when the load begins at 8 + 600 = 608.
    # Then 273 a cycle each. The load: 1048576 / 273 = 3840.9, over at 608 + 3841 = 4449.
    # The weights' last 1057328 - 273 * 3841 = 8735 bytes alone: 16 cycles, until 4465.
    assert _span(load) == (8, 8, 4449)
    # The load alone would have taken 1048576 / 546 = 1920.5: until 608 + 1921 = 2529.
    assert load["hbm_stall"] == 4449 - 2529
    # 64 tiles in 16 rounds of 64 cycles of loading, and one row: 504 + 64 + 15 * 64 + 1 = 1529.
    assert product["hbm_stall"] == 4465 - 1529
    assert _span(product) == (4, 4, 4465 + 254)
    assert profile.header["cycles"] == 4719 + 4
    assert profile.engine("hbm_stall", "MXU") == 2936
    assert profile.engine("hbm_stall", "DMA") == 1920


def test_a_full_queue_holds_up_the_sequencer(open_machine: Opener) -> None:
    queue = _open(open_machine)
    profile = run_profiled(queue, program(*[_add()] * 20))
    # A sum takes 21 cycles from 4 on, an issue 4: at 76 the 19th has been issued and 3 are
    # over (at 25, 46, 67): 16 in the queue. The fourth ends at 88; the 20th is issued at 92.
    records = profile.of("V_ADD")
    assert [r["issue"] for r in records] == [*range(4, 77, 4), 92]
    assert [r["full"] for r in records] == [0] * 19 + [12]
    assert profile.engine("full", "VPU") == 12
    assert profile.header["cycles"] == 4 + 20 * 21 + 4


def test_the_value_of_a_counter_is_reached_by_the_first_signals(open_machine: Opener) -> None:
    """Two engines signal one counter: the nearer one satisfies the wait."""
    queue = _open(open_machine)
    code = program(
        _load(1 << 20, dst=8192, signal=1),  # 4 to 4 + 600 + 1921 = 2525
        _add(signal=1),  # 8 to 29
        ins("NOP", wait=(1, 1)),
        ins("NOP", wait=(1, 2)),
    )
    profile = run_profiled(queue, code)
    first, second = profile.of("NOP")
    assert _span(first) == (8, 29, 33) and first["stall_engine"] == 3
    assert _span(second) == (33, 2525, 2529) and second["stall_engine"] == 1
    assert profile.waited("SEQ", "VPU") == 29 - 8
    assert profile.waited("SEQ", "DMA") == 2525 - 33


def test_sync_waits_for_all_engines(open_machine: Opener) -> None:
    queue = _open(open_machine)
    profile = run_profiled(queue, program(_load(), ins("SYNC"), _add()))
    # The load: 4 to 605. SYNC until 609; the sum is issued at 613 and takes 21; HALT.
    assert _span(profile.of("V_ADD")[0]) == (613, 613, 634)
    assert profile.header["cycles"] == 638
    assert profile.header["sync"] == (605 - 4) + (634 - 613)


def test_gathered_rows_come_in_bursts(timed: Queue, chip: str) -> None:
    """Rows that lie apart are pieces of their own; neighbours are one."""
    machine = timed.machine
    machine.put(4 << 20, struct.pack("<4I", 3, 9, 10, 2))
    gather = ins(
        "DMA_GATHER", dst=1 << 16, table=1 << 20, index=0, count=4, width=10, table_rows=16,
        dst_stride=64, fmt="F16",
    )  # fmt: skip
    (record,) = run_profiled(timed, program(_load(16, src=4 << 20), ins("SYNC"), gather)).of(
        "DMA_GATHER"
    )
    # Pieces of 20, 40 and 20 bytes.
    burst, rate, lead = {"v5e": (64, 546, 600), "edge": (32, 34, 150)}[chip]
    wanted = sum(-(-size // burst) * burst for size in (20, 40, 20))
    assert record["hbm_read"] == wanted
    assert record["end"] - record["start"] == lead + -(-wanted // rate)
    assert record["vmem_bytes"] == 4 * 4 + 4 * 40


def test_attention_reads_the_keys_of_a_sequence_once(timed: Queue, chip: str) -> None:
    """Three rows: two of one sequence with 5 and 6 keys, one of another with 4."""
    machine = timed.machine
    tables = struct.pack("<8I", 7, 2, 0, 0, 4, 0, 0, 0)
    info = struct.pack("<6I", 5, 0, 6, 0, 4, 1)
    machine.put(4 << 20, tables + info)
    attend = ins(
        "V_ATTN", dst=1 << 16, q=1 << 17, k_cache=1 << 20, v_cache=2 << 20, rows=3,
        row_info=32, block_tables=0, num_slots=64, fmt="F16", aux=1.0, heads=4, kv_heads=2,
        head_dim=16, block_size=4, max_blocks=4,
    )  # fmt: skip
    (record,) = run_profiled(timed, program(_load(56, src=4 << 20), ins("SYNC"), attend)).of(
        "V_ATTN"
    )
    # A slot is 2 * 16 * 2 = 64 bytes. First: blocks 7 (4 slots) and 2 (2 slots), 256 and 128
    # bytes; second: block 4, 256 bytes; for keys and for values.
    assert record["hbm_read"] == 2 * (256 + 128 + 256)
    # Scores: (5 + 6 + 4) * 4 heads = 60; products: 60 * 16 for scores, as many for values.
    assert record["ops"] == 60 * 14 + 2 * 2 * 60 * 16
    if chip == "v5e":
        # 20 + 500 until memory answers; 14 * 1 + ceil(1920 / 1024) = 16; 1280 bytes take 3.
        assert record["end"] - record["start"] == 520 + 16
    else:
        # 10 + 100; 14 * 1 + 1920 / 128 = 29; 1280 bytes take 38: 9 longer than the work.
        assert record["end"] - record["start"] == 110 + 38
        assert record["hbm_stall"] == 9
    # Lists: 3 * 8, and table entries 2 * 4 and 4; q and dst: 3 * 4 * 16 * 4 each.
    assert record["vmem_bytes"] == 24 + 12 + 2 * 768


# --- limits in closed form ---


def test_a_product_of_one_row_is_bound_by_memory(timed: Queue, chip: str) -> None:
    """4096 x 4096 of 4 bits: within 5% of bytes / bandwidth, and never under it."""
    profile = run_profiled(timed, program(_matmul(1, 4096, 4096, "Q4_0")))
    limit = 256 * 128 * 288 / {"v5e": 546, "edge": 34}[chip]
    assert limit <= profile.header["cycles"] <= 1.05 * limit
    assert profile.engine("hbm_stall", "MXU") > 0


def test_a_large_product_reaches_the_arrays_peak(timed: Queue, chip: str) -> None:
    m, n, k = 256, 1024, 1024
    profile = run_profiled(timed, program(_matmul(m, n, k)))
    # Products in a cycle: 4 * 128 * 128 on v5e, 64 * 64 / 2 on edge.
    peak = m * n * k // {"v5e": 65536, "edge": 2048}[chip]
    # Two issues; the first answer; the first load; the drain. Nothing else.
    extra = {"v5e": 8 + 500 + 64 + 254, "edge": 8 + 100 + 64 + 126}[chip]
    assert profile.header["cycles"] == peak + extra
    assert profile.engine("hbm_stall", "MXU") == 0


def test_a_copy_is_bound_by_memory(timed: Queue, chip: str) -> None:
    profile = run_profiled(timed, program(*[_load(1 << 20, dst=8192)] * 8))
    rate, overhead = {"v5e": (546, 600), "edge": (34, 150)}[chip]
    each = overhead + -(-(1 << 20) // rate)
    assert profile.header["cycles"] == 8 + 8 * each
    assert profile.header["cycles"] > (8 << 20) / rate


# --- against a simulation that takes one cycle at a time ---


def _random_steps(chance: random.Random, length: int) -> list[Step]:
    """Instructions whose waits earlier ones satisfy; counters are shared at random."""
    steps: list[Step] = []
    signals = [0] * 5
    for _ in range(length):
        kind = chance.choice(["LOAD", "LOAD", "ADD", "ADD", "MATMUL", "NOP", "NOP", "SYNC"])
        wait, value = chance.randrange(5), 0
        if wait:
            value = chance.randint(0, signals[wait])
        signal = chance.randrange(5)
        signals[signal] += signal != 0
        steps.append(Step(kind, chance.choice([1, 3, 17]), signal, wait, value))
    return steps


def _code(steps: list[Step]) -> bytes:
    made = []
    for step in steps:
        sync = {"signal": step.signal, "wait": (step.wait, step.value) if step.wait else None}
        if step.kind == "LOAD":
            made.append(_load(step.size * 4096, dst=0, src=1 << 20, **sync))
        elif step.kind == "ADD":
            made.append(_add(step.size, 256, **sync))
        elif step.kind == "MATMUL":
            made.append(_matmul(step.size, 64, 32 * step.size, **sync))
        else:
            made.append(ins(step.kind, **sync))  # type: ignore[arg-type]
    return program(*made)


def test_random_programs_against_a_simulation_by_the_cycle(timed: Queue, chip: str) -> None:
    chance = random.Random(chip)
    for _ in range(25):
        steps = _random_steps(chance, 40)
        profile = run_profiled(timed, _code(steps))
        wanted = simulate(CHIPS[chip], steps)
        found = {r["pc"] // 64: (r["start"], r["end"]) for r in profile.records}
        assert found == dict(enumerate(wanted))


def test_neither_order_nor_path_nor_threads_nor_history_change_a_byte(
    open_machine: Opener,
) -> None:
    """Whole profiles, under 50 seeds and on every path that the host has."""
    chance = random.Random(7)
    programs = [_code(_random_steps(chance, 60)) for _ in range(4)]

    def profiles(**options: object) -> list[bytes]:
        queue = _open(open_machine, **options)
        return [run_profiled(queue, code).raw for code in programs]

    wanted = profiles()
    assert len(set(wanted)) == len(programs)
    for seed in range(1, 51):
        assert profiles(seed=seed, threads=1) == wanted, f"seed {seed}"
    paths = []
    for isa in ("scalar", "avx2", "avx512", "amx"):
        try:
            found = profiles(isa=isa)
        except ValueError:
            continue
        paths.append(isa)
        assert found == wanted, isa
    assert "scalar" in paths
    for threads in (1, 3):
        assert profiles(threads=threads) == wanted


def test_far_behind_the_machine_the_model_still_finds_its_way(open_machine: Opener) -> None:
    """A random order may leave one engine far behind: results are the same."""
    held = [_add(wait=(1, 400)), *[_load(signal=1)] * 400, *[_add()] * 40]
    runs = {run_profiled(_open(open_machine, seed=seed), program(*held)).raw for seed in range(12)}
    assert len(runs) == 1


# --- what is seen of it ---


def test_without_a_model_there_is_none(machine: Machine, queue: Queue) -> None:
    queue.run(program(_add()))
    assert machine.reg("CAPS") & D["CAPS_TIMING"] == 0
    assert machine.reg("MODEL_MHZ") == 0
    assert machine.reg("STAT_MODEL_CYCLES", 8) == 0
    payload = with_profile(queue.run_payload(program()), machine.alloc(4096), 4096)
    assert queue.expect_fault("RUN", payload)["cause"] == "BAD_COMMAND"


def test_registers_sum_up_programs(open_machine: Opener) -> None:
    queue = _open(open_machine)
    machine = queue.machine
    assert machine.reg("CAPS") & D["CAPS_TIMING"]
    assert machine.reg("MODEL_MHZ") == 1500
    code = program(_load(signal=1), _add(wait=(1, 1)), _matmul(1, 64, 64), *[_add()] * 30)
    profile = run_profiled(queue, code)
    queue.run(code)  # unprofiled, and timed all the same
    header = profile.header
    wanted = {
        "CYCLES": header["cycles"],
        "HBM_READ": header["hbm_read"],
        "HBM_WRITTEN": header["hbm_written"],
        "VMEM_BYTES": header["vmem_bytes"],
        "OPS": header["ops"],
        "BUSY_SEQ": profile.engine("busy", "SEQ"),
        "BUSY_DMA": profile.engine("busy", "DMA"),
        "BUSY_MXU": profile.engine("busy", "MXU"),
        "BUSY_VPU": profile.engine("busy", "VPU"),
        "WAIT": sum(header["wait"]),
        "FULL": sum(header["full"]),
        "SYNC": header["sync"],
        "HBM_STALL": sum(header["hbm_stall"]),
        "BUSY_LINK": 0,
    }
    assert {name: machine.reg(f"STAT_MODEL_{name}", 8) for name in wanted} == {
        name: 2 * value for name, value in wanted.items()
    }
    assert [event for event in machine.events if event[0] == "TIMED"] == [
        ("TIMED", 0, header["cycles"], header["instructions"])
    ] * 2
    machine.reset()
    machine.wait_for(lambda: machine.reg("STAT_MODEL_CYCLES", 8) == 0, "reset")


def test_records_add_up_to_the_totals(open_machine: Opener) -> None:
    queue = _open(open_machine, timing="edge")
    profile = run_profiled(queue, _code(_random_steps(random.Random(3), 200)))
    header, records = profile.header, profile.records
    assert header["instructions"] == header["records"] == len(records) == 201
    assert header["flags"] == 0 and header["clock_mhz"] == 500
    for name in ("hbm_read", "hbm_written", "vmem_bytes", "ops"):
        assert header[name] == sum(r[name] for r in records)
    for number, engine in enumerate(("SEQ", "DMA", "MXU", "VPU")):
        mine = [r for r in records if r["engine"] == number]
        busy = sum(r["end"] - r["start"] for r in mine)
        issues = 4 * sum(r["engine"] != 0 for r in records) if engine == "SEQ" else 0
        assert profile.engine("busy", engine) == busy + issues
        assert profile.engine("hbm_stall", engine) == sum(r["hbm_stall"] for r in mine)
        assert profile.engine("full", engine) == sum(r["full"] for r in mine)
    assert sum(header["wait"]) + header["sync"] == sum(r["stall"] for r in records)
    assert [r["end"] for r in records] == sorted(r["end"] for r in records)
    assert header["cycles"] == records[-1]["end"]


def test_a_buffer_that_is_too_small_keeps_the_first_records(open_machine: Opener) -> None:
    queue = _open(open_machine)
    code = program(*[_add()] * 10)
    whole = run_profiled(queue, code)
    size = hw.PROFILE_HEADER_BYTES + 3 * hw.PROFILE_RECORD_BYTES + 40
    va = queue.machine.place(b"\xee" * 4096)
    queue.do("RUN", with_profile(queue.run_payload(code), va, size))
    part = read_profile(queue.machine, va)
    assert part.records == whole.records[:3]
    assert part.header == whole.header | {"records": 3}
    rest = hw.PROFILE_HEADER_BYTES + 3 * hw.PROFILE_RECORD_BYTES
    assert queue.machine.get(va + rest, 4096 - rest) == b"\xee" * (4096 - rest)


@pytest.mark.parametrize(
    ("va", "size"),
    [(0, 1024), (4100, 1024), (4096, hw.PROFILE_HEADER_BYTES - 1), (4096, 0)],
)
def test_profile_buffers_that_are_refused(open_machine: Opener, va: int, size: int) -> None:
    queue = _open(open_machine)
    payload = with_profile(queue.run_payload(program()), va, size)
    assert queue.expect_fault("RUN", payload)["cause"] == "BAD_COMMAND"


def test_a_profile_buffer_that_is_not_mapped(open_machine: Opener) -> None:
    """At once for the header, later for a record; the program's own memory is unharmed."""
    queue = _open(open_machine)
    machine = queue.machine
    payload = with_profile(queue.run_payload(program()), 1 << 40, 4096)
    fault = queue.expect_fault("RUN", payload)
    assert (fault["cause"], fault["addr"], fault["pc"]) == ("UNMAPPED", 1 << 40, 0xFFFFFFFF)
    queue.restart()
    machine.map(0, 1 << 40, machine.alloc(4096), 4096)
    payload = with_profile(queue.run_payload(program(*[_add()] * 60)), 1 << 40, 8192)
    fault = queue.expect_fault("RUN", payload)
    assert (fault["cause"], fault["access"], fault["pc"]) == ("UNMAPPED", 2, 0xFFFFFFFF)
    # 3312 bytes after the header are 37 whole records: the 38th does not fit.
    assert fault["addr"] == (1 << 40) + 4096


def test_a_program_that_faults_has_no_cycles(open_machine: Opener) -> None:
    queue = _open(open_machine)
    va = queue.machine.place(b"\xee" * 4096)
    code = program(_add(), ins("SYNC"), ins("TRAP", code=1))
    payload = with_profile(queue.run_payload(code), va, 4096)
    assert queue.expect_fault("RUN", payload)["cause"] == "TRAP"
    assert read_profile(queue.machine, va).header["cycles"] == 0
    assert queue.machine.reg("STAT_MODEL_CYCLES", 8) == 0


# --- chips ---


def test_a_file_changes_a_chip(open_machine: Opener, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("# faster issue\nissue_cycles = 1\n\n  vpu_lanes=8 # narrow\n")
    queue = _open(open_machine, timing="edge", timing_file=file)
    profile = run_profiled(queue, program(_add()))
    # Issued at 1; 10 + 16 / 8 = 12; HALT 1.
    assert profile.header["cycles"] == 1 + 12 + 1
    alone = _open(open_machine, timing=None, timing_file=file)
    # The first of the chips, v5e, changed: 1 + 20 + 2 + 1.
    assert run_profiled(alone, program(_add())).header["cycles"] == 24


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("issue_cycles = 0", "line 2: issue_cycles must be a whole number from 1 to 1000000"),
        ("issue_cycles = 4.5", "line 2: issue_cycles must be a whole number from 1 to 1000000"),
        ("issue_cycles = -1", "line 2: issue_cycles must be a whole number from 1 to 1000000"),
        ("issue_cycles =", "line 2: issue_cycles must be a whole number from 1 to 1000000"),
        ("mxu_count = 99999999999999999999", "line 2: mxu_count must be a whole number from 1"),
        ("speed = 4", "line 2: there is no parameter 'speed'"),
        ("fast", "line 2: is no 'parameter = number'"),
    ],
)
def test_bad_files_are_named_with_their_line(
    open_machine: Opener, tmp_path: Path, line: str, message: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"clock_mhz = 100\n{line}\n")
    with pytest.raises(ValueError, match=f"timing-file .*mine.toml: {message}"):
        open_machine(timing_file=file)


def test_chips_and_files_that_are_not_there(open_machine: Opener, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"timing: no chip 'v6' \(there are v5e, edge\)"):
        open_machine(timing="v6")
    with pytest.raises(ValueError, match=r"timing-file .*nothing: No such file"):
        open_machine(timing_file=tmp_path / "nothing")
    with pytest.raises(ValueError, match="timing-trace needs a timing model"):
        open_machine(timing_trace=tmp_path / "trace")
    with pytest.raises(ValueError, match=r"timing-trace .*: Is a directory"):
        open_machine(timing="v5e", timing_trace=tmp_path)


def test_the_chrome_trace(open_machine: Opener, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    queue = _open(open_machine, timing="edge", timing_trace=file)
    code = program(_load(signal=1), _add(wait=(1, 1)))
    profile = run_profiled(queue, code)
    queue.run(code)
    queue.machine.__exit__(None, None, None)
    queue.machine._core = None
    events = [event for event in json.loads(file.read_text()) if event.get("ph") == "X"]
    assert [event["name"] for event in events] == ["DMA_LOAD", "V_ADD", "HALT"] * 2
    for number, event in enumerate(events):
        record = profile.records[number % 3]
        start = record["start"] + (profile.header["cycles"] if number >= 3 else 0)
        assert event["ts"] == pytest.approx(start / 500, abs=1e-4)
        assert event["dur"] == pytest.approx((record["end"] - record["start"]) / 500, abs=1e-4)
        assert event["tid"] == record["engine"]
