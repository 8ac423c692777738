# SPDX-License-Identifier: MIT
"""The timing model from outside: registers, profiles, events, the trace; chips and bad ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from asm import ins, program
from machine import D, Machine, Queue
from profiles import read_profile, run_profiled, with_profile
from timing_programs import Opener, add, code_of, load, matmul, open_timed, random_steps
from vtpu_compiler import hw


def test_without_a_model_there_is_none(machine: Machine, queue: Queue) -> None:
    queue.run(program(add()))
    assert machine.reg("CAPS") & D["CAPS_TIMING"] == 0
    assert machine.reg("MODEL_MHZ") == 0
    assert machine.reg("STAT_MODEL_CYCLES", 8) == 0
    payload = with_profile(queue.run_payload(program()), machine.alloc(4096), 4096)
    assert queue.expect_fault("RUN", payload)["cause"] == "BAD_COMMAND"


def test_registers_sum_up_programs(open_machine: Opener) -> None:
    queue = open_timed(open_machine)
    machine = queue.machine
    assert machine.reg("CAPS") & D["CAPS_TIMING"]
    assert machine.reg("MODEL_MHZ") == 1500
    code = program(load(signal=1), add(wait=(1, 1)), matmul(1, 64, 64), *[add()] * 30)
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
    queue = open_timed(open_machine, timing="edge")
    profile = run_profiled(queue, code_of(random_steps(random.Random(3), 200)))
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
    queue = open_timed(open_machine)
    code = program(*[add()] * 10)
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
    queue = open_timed(open_machine)
    payload = with_profile(queue.run_payload(program()), va, size)
    assert queue.expect_fault("RUN", payload)["cause"] == "BAD_COMMAND"


def test_a_profile_buffer_that_is_not_mapped(open_machine: Opener) -> None:
    """At once for the header, later for a record; the program's own memory is unharmed."""
    queue = open_timed(open_machine)
    machine = queue.machine
    payload = with_profile(queue.run_payload(program()), 1 << 40, 4096)
    fault = queue.expect_fault("RUN", payload)
    assert (fault["cause"], fault["addr"], fault["pc"]) == ("UNMAPPED", 1 << 40, 0xFFFFFFFF)
    queue.restart()
    machine.map(0, 1 << 40, machine.alloc(4096), 4096)
    payload = with_profile(queue.run_payload(program(*[add()] * 60)), 1 << 40, 8192)
    fault = queue.expect_fault("RUN", payload)
    assert (fault["cause"], fault["access"], fault["pc"]) == ("UNMAPPED", 2, 0xFFFFFFFF)
    # 3312 bytes after the header are 37 whole records: the 38th does not fit.
    assert fault["addr"] == (1 << 40) + 4096


def test_a_program_that_faults_has_no_cycles(open_machine: Opener) -> None:
    queue = open_timed(open_machine)
    va = queue.machine.place(b"\xee" * 4096)
    code = program(add(), ins("SYNC"), ins("TRAP", code=1))
    payload = with_profile(queue.run_payload(code), va, 4096)
    assert queue.expect_fault("RUN", payload)["cause"] == "TRAP"
    assert read_profile(queue.machine, va).header["cycles"] == 0
    assert queue.machine.reg("STAT_MODEL_CYCLES", 8) == 0


# --- chips ---


def test_a_file_changes_a_chip(open_machine: Opener, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("# faster issue\nissue_cycles = 1\n\n  vpu_lanes=8 # narrow\n")
    queue = open_timed(open_machine, timing="edge", timing_file=file)
    profile = run_profiled(queue, program(add()))
    # Issued at 1; 10 + 16 / 8 = 12; HALT 1.
    assert profile.header["cycles"] == 1 + 12 + 1
    alone = open_timed(open_machine, timing=None, timing_file=file)
    # The first of the chips, v5e, changed: 1 + 20 + 2 + 1.
    assert run_profiled(alone, program(add())).header["cycles"] == 24


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
        ("\0speed = 4", "line 2: is no text of at most 254 characters"),
        ("#" * 255, "line 2: is no text of at most 254 characters"),
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
    queue = open_timed(open_machine, timing="edge", timing_trace=file)
    code = program(load(signal=1), add(wait=(1, 1)))
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
