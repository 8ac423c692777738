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

import random
import struct

import pytest
from asm import R, ins, program
from machine import Queue
from profiles import read_profile, run_profiled, with_profile
from timing_programs import (
    Opener,
    add,
    code_of,
    load,
    matmul,
    open_timed,
    random_steps,
    span,
    store,
)
from timing_reference import CHIPS, simulate


@pytest.fixture(params=["v5e", "edge"])
def chip(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def timed(open_machine: Opener, chip: str) -> Queue:
    return open_timed(open_machine, timing=chip)


# --- by hand ---


def test_an_empty_program(timed: Queue) -> None:
    profile = run_profiled(timed, program())
    # HALT alone: one issue.
    assert profile.header["cycles"] == 4
    assert [span(r) for r in profile.records] == [(0, 0, 4)]


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
        load(dst=0, src=1 << 20, signal=1),
        load(dst=64, src=2 << 20, signal=1),
        add(wait=(1, 2), signal=2),
        store(wait=(2, 1)),
    )
    profile = run_profiled(timed, code)
    first, second = profile.of("DMA_LOAD")
    (total,), (stored,) = profile.of("V_ADD"), profile.of("DMA_STORE")
    if chip == "v5e":
        # Issued at 4, 8, 12, 16. A transfer: 100 + 500 + 1 (64 bytes at 546 a cycle) = 601.
        assert span(first) == (4, 4, 605)
        assert span(second) == (8, 605, 1206)
        # The sum: 20 + 1 (16 elements in 1024 lanes); it waited 1206 - 12.
        assert span(total) == (12, 1206, 1227)
        assert (total["stall"], total["stall_cause"], total["stall_engine"]) == (1194, 1, 1)
        # The store was next of the DMA engine from 1206, and waited for the sum.
        assert span(stored) == (16, 1227, 1828)
        assert (stored["stall"], stored["stall_cause"], stored["stall_engine"]) == (21, 1, 3)
        end, dma, vpu = 1828, 3 * 601, 21
    else:
        # A transfer: 50 + 100 + 2 (64 bytes at 34 a cycle) = 152. The sum: 10 + 1.
        assert span(first) == (4, 4, 156)
        assert span(second) == (8, 156, 308)
        assert span(total) == (12, 308, 319)
        assert span(stored) == (16, 319, 471)
        assert (total["stall"], stored["stall"]) == (296, 11)
        end, dma, vpu = 471, 3 * 152, 11
    # HALT waited from 16 on, for the store; then its own 4.
    (halt,) = profile.of("HALT")
    assert span(halt) == (16, end, end + 4)
    assert (halt["stall_cause"], halt["stall_engine"]) == (2, 1)
    assert profile.header["cycles"] == end + 4
    assert profile.header["sync"] == halt["stall"] == end - 16
    assert profile.waited("VPU", "DMA") == total["stall"]
    assert profile.waited("DMA", "VPU") == stored["stall"]
    assert profile.engine("busy", "DMA") == dma and profile.engine("busy", "VPU") == vpu
    assert profile.engine("busy", "SEQ") == 5 * 4
    assert (profile.header["hbm_read"], profile.header["hbm_written"]) == (128, 64)
    # VMEM: each transfer 64; the sum reads two rows and writes one.
    assert profile.header["vmem_bytes"] == 3 * 64 + 3 * 64
    assert profile.header["ops"] == 16


def test_one_tile(timed: Queue, chip: str) -> None:
    profile = run_profiled(timed, program(matmul(1, 16, 32)))
    (record,) = profile.of("MATMUL")
    if chip == "v5e":
        # Issued at 4; memory answers at 504; loading 128 / 2 = 64, one row 1, until 569;
        # 544 bytes are 9 bursts, 576 bytes, 2 cycles, long over; draining 128 + 128 - 2 = 254.
        assert span(record) == (4, 4, 823)
        assert record["hbm_read"] == 576
    else:
        # Memory answers at 104; loading 64, one row 2, until 170; 544 bytes are 17 bursts,
        # 16 cycles; draining 64 + 64 - 2 = 126.
        assert span(record) == (4, 4, 296)
        assert record["hbm_read"] == 544
    assert record["hbm_stall"] == 0
    assert record["ops"] == 2 * 16 * 32


@pytest.mark.parametrize("fmt", ["Q8_0", "I8", "BF16_TILES"])
def test_the_rate_of_a_format(timed: Queue, chip: str, fmt: str) -> None:
    """512 rows by 128 x 256 weights: 2 tiles of 128 x 128, or 8 of 64 x 64."""
    (record,) = run_profiled(timed, program(matmul(512, 128, 256, fmt))).of("MATMUL")
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
    queue = open_timed(open_machine)
    profile = run_profiled(queue, program(matmul(1, 1024, 1024), load(1 << 20, dst=8192)))
    (product,), (brought,) = profile.of("MATMUL"), profile.of("DMA_LOAD")
    # Weights: 64 * 32 tiles of 544 = 1114112 bytes, streaming from 4 + 500 = 504, for 104
    # cycles alone: 56784 bytes, 1057328 are left when the load begins at 8 + 600 = 608.
    # Then 273 a cycle each. The load: 1048576 / 273 = 3840.9, over at 608 + 3841 = 4449.
    # The weights' last 1057328 - 273 * 3841 = 8735 bytes alone: 16 cycles, until 4465.
    assert span(brought) == (8, 8, 4449)
    # The load alone would have taken 1048576 / 546 = 1920.5: until 608 + 1921 = 2529.
    assert brought["hbm_stall"] == 4449 - 2529
    # 64 tiles in 16 rounds of 64 cycles of loading, and one row: 504 + 64 + 15 * 64 + 1 = 1529.
    assert product["hbm_stall"] == 4465 - 1529
    assert span(product) == (4, 4, 4465 + 254)
    assert profile.header["cycles"] == 4719 + 4
    assert profile.engine("hbm_stall", "MXU") == 2936
    assert profile.engine("hbm_stall", "DMA") == 1920


def test_a_full_queue_holds_up_the_sequencer(open_machine: Opener) -> None:
    queue = open_timed(open_machine)
    profile = run_profiled(queue, program(*[add()] * 20))
    # A sum takes 21 cycles from 4 on, an issue 4: at 76 the 19th has been issued and 3 are
    # over (at 25, 46, 67): 16 in the queue. The fourth ends at 88; the 20th is issued at 92.
    records = profile.of("V_ADD")
    assert [r["issue"] for r in records] == [*range(4, 77, 4), 92]
    assert [r["full"] for r in records] == [0] * 19 + [12]
    assert profile.engine("full", "VPU") == 12
    assert profile.header["cycles"] == 4 + 20 * 21 + 4


def test_the_value_of_a_counter_is_reached_by_the_first_signals(open_machine: Opener) -> None:
    """Two engines signal one counter: the nearer one satisfies the wait."""
    queue = open_timed(open_machine)
    code = program(
        load(1 << 20, dst=8192, signal=1),  # 4 to 4 + 600 + 1921 = 2525
        add(signal=1),  # 8 to 29
        ins("NOP", wait=(1, 1)),
        ins("NOP", wait=(1, 2)),
    )
    profile = run_profiled(queue, code)
    first, second = profile.of("NOP")
    assert span(first) == (8, 29, 33) and first["stall_engine"] == 3
    assert span(second) == (33, 2525, 2529) and second["stall_engine"] == 1
    assert profile.waited("SEQ", "VPU") == 29 - 8
    assert profile.waited("SEQ", "DMA") == 2525 - 33


def test_sync_waits_for_all_engines(open_machine: Opener) -> None:
    queue = open_timed(open_machine)
    profile = run_profiled(queue, program(load(), ins("SYNC"), add()))
    # The load: 4 to 605. SYNC until 609; the sum is issued at 613 and takes 21; HALT.
    assert span(profile.of("V_ADD")[0]) == (613, 613, 634)
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
    (record,) = run_profiled(timed, program(load(16, src=4 << 20), ins("SYNC"), gather)).of(
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
    (record,) = run_profiled(timed, program(load(56, src=4 << 20), ins("SYNC"), attend)).of(
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
    profile = run_profiled(timed, program(matmul(1, 4096, 4096, "Q4_0")))
    limit = 256 * 128 * 288 / {"v5e": 546, "edge": 34}[chip]
    assert limit <= profile.header["cycles"] <= 1.05 * limit
    assert profile.engine("hbm_stall", "MXU") > 0


def test_a_large_product_reaches_the_arrays_peak(timed: Queue, chip: str) -> None:
    m, n, k = 256, 1024, 1024
    profile = run_profiled(timed, program(matmul(m, n, k)))
    # Products in a cycle: 4 * 128 * 128 on v5e, 64 * 64 / 2 on edge.
    peak = m * n * k // {"v5e": 65536, "edge": 2048}[chip]
    # Two issues; the first answer; the first load; the drain. Nothing else.
    extra = {"v5e": 8 + 500 + 64 + 254, "edge": 8 + 100 + 64 + 126}[chip]
    assert profile.header["cycles"] == peak + extra
    assert profile.engine("hbm_stall", "MXU") == 0


def test_a_copy_is_bound_by_memory(timed: Queue, chip: str) -> None:
    profile = run_profiled(timed, program(*[load(1 << 20, dst=8192)] * 8))
    rate, overhead = {"v5e": (546, 600), "edge": (34, 150)}[chip]
    each = overhead + -(-(1 << 20) // rate)
    assert profile.header["cycles"] == 8 + 8 * each
    assert profile.header["cycles"] > (8 << 20) / rate


# --- against a simulation that takes one cycle at a time ---


def test_random_programs_against_a_simulation_by_the_cycle(timed: Queue, chip: str) -> None:
    chance = random.Random(chip)
    for _ in range(25):
        steps = random_steps(chance, 40)
        profile = run_profiled(timed, code_of(steps))
        wanted = simulate(CHIPS[chip], steps)
        found = {r["pc"] // 64: (r["start"], r["end"]) for r in profile.records}
        assert found == dict(enumerate(wanted))


def test_neither_order_nor_path_nor_threads_nor_history_change_a_byte(
    open_machine: Opener,
) -> None:
    """Whole profiles, under 50 seeds and on every path that the host has."""
    chance = random.Random(7)
    programs = [code_of(random_steps(chance, 60)) for _ in range(4)]

    def profiles(**options: object) -> list[bytes]:
        queue = open_timed(open_machine, **options)
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


def test_being_set_aside_takes_no_modelled_time(open_machine: Opener) -> None:
    """Two queues' programs take turns at random instructions: each profile is as if alone."""
    chance = random.Random(9)
    codes = [code_of(random_steps(chance, 80)) for _ in range(2)]
    wanted = [run_profiled(open_timed(open_machine), code).raw for code in codes]
    preemptions = 0
    for seed in range(1, 7):
        first = open_timed(open_machine, seed=seed)
        machine = first.machine
        queues, places = (first, Queue(machine, 1)), []
        size = len(wanted[0])
        for queue, code in zip(queues, codes, strict=True):
            places.append(machine.alloc(size))
            queue.push("RUN", with_profile(queue.run_payload(code), places[-1], size))
        for queue in queues:
            queue.ring_doorbell()
        for queue in queues:
            queue.wait(1)
        preemptions += sum(queue.reg("PREEMPTIONS") for queue in queues)
        assert [read_profile(machine, va).raw for va in places] == wanted, f"seed {seed}"
    assert preemptions, "no program was ever set aside"


def test_far_behind_the_machine_the_model_still_finds_its_way(open_machine: Opener) -> None:
    """A random order may leave one engine far behind: results are the same."""
    held = [add(wait=(1, 400)), *[load(signal=1)] * 400, *[add()] * 40]
    runs = {
        run_profiled(open_timed(open_machine, seed=seed), program(*held)).raw for seed in range(12)
    }
    assert len(runs) == 1
