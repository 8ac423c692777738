# SPDX-License-Identifier: MIT
"""`make bench-device`: the device on this host, without QEMU, against what the host can do.

`bench_device` (C) prints the figures of a round, in which the machine and plain loops take
turns; a ratio is the median of the rounds' ratios. `best` has the ratios of the best rounds,
`processor_time` those of processor time, which are nearer to an idle host's on a busy one.
JSON goes to stdout.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import host

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "9"))
CORE = Path(__file__).parents[1] / "qemu-device" / "core"


def build(name: str, *variables: str) -> Path:
    command = ["make", "-s", "-C", str(CORE), f"BUILD={CORE / name}", *variables, "bench"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return CORE / name / "bench_device"


def rounds(program: Path, count: int, *arguments: str) -> list[dict[str, Any]]:
    command = [str(program), str(count), *arguments]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def timing_cost(program: Path, threads: int) -> dict[str, Any]:
    """What the timing model costs, off and on, over a machine without its hooks: time for time,
    in turn. The weight stream is what a decode step does, the dispatch the worst case."""
    without = build("build/unobserved", "EXTRA_CFLAGS=-DVTPU_UNOBSERVED")
    ratios: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        (base,) = rounds(without, 1, str(threads))
        for state, chip in (("off", ()), ("on", ("v5e",))):
            (found,) = rounds(program, 1, str(threads), *chip)
            stream = base["weight_stream_gb_s"] / found["weight_stream_gb_s"]
            ratios.setdefault(f"timing_{state}_ratio", []).append(stream)
            dispatch = found["dispatch_ns"] / base["dispatch_ns"]
            ratios.setdefault(f"timing_{state}_dispatch_ratio", []).append(dispatch)
    return {name: round(statistics.median(values), 3) for name, values in ratios.items()}


def ratios(raw: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds."""

    def ratio(ours: str, best: str) -> float:
        return round(statistics.median(each[ours] / each[best] for each in raw), 3)

    def roofline(name: str) -> float:
        """Over the lesser of the unit's peak and of what reading all its bytes allows."""
        unit = f"{'bf16' if 'bf16' in name else 'int8'}_unit_gops"
        values = [
            each[f"{name}_gops"]
            / min(each[unit], each[f"{name}_per_byte"] * each["read_loop_gb_s"])
            for each in raw
        ]
        return round(statistics.median(values), 3)

    return {
        "weight_stream_ratio": ratio("weight_stream_gb_s", "read_loop_gb_s"),
        **{
            f"{name}_ratio": ratio(f"{name}_gops", f"{kind}_unit_gops")
            for kind in ("int8", "bf16")
            for name in (f"prefill_{kind}", f"prefill_{kind}_k2048", f"batch16_{kind}")
        },
        "prefill_q4_ratio": ratio("prefill_q4_gops", "int8_unit_gops"),
        "batch16_q4_ratio": ratio("batch16_q4_gops", "int8_unit_gops"),
        "copy_ratio": ratio("copy_gb_s", "memcpy_gb_s"),
        "roofline": {
            name.removesuffix("_per_byte"): roofline(name.removesuffix("_per_byte"))
            for name in raw[0]
            if name.endswith("_per_byte")
        },
    }


def in_processor_time(figures: dict[str, Any]) -> dict[str, Any]:
    """The same names. What has no figure of its own keeps that of the time on the wall."""
    cpu = {name.replace("_cpu", ""): value for name, value in figures.items() if "_cpu" in name}
    return figures | cpu


def main() -> None:
    threads = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    program = build("build")
    raw = rounds(program, ROUNDS, str(threads))
    names = ("path", "int8_unit", "bf16_unit")
    facts = {name: raw[0][name] for name in names}
    for each, name in itertools.product(raw, names):
        del each[name]
    medians = ratios(raw)
    cpu = ratios([in_processor_time(each) for each in raw])
    best = ratios([{name: max(each[name] for each in raw) for name in raw[0]}])
    dispatch = [each["dispatch_ns"] for each in raw]

    result = {
        **medians,
        "dispatch_ns": round(statistics.median(dispatch), 1),
        "best": {**best, "dispatch_ns": round(min(dispatch), 1)},
        "processor_time": {
            **cpu,
            "dispatch_ns": round(statistics.median(each["dispatch_cpu_ns"] for each in raw), 1),
        },
        **timing_cost(program, threads),
        "host": {**host.describe(), "threads": threads, "load_before": round(load, 2)},
        **facts,
        "raw": {
            "rounds": raw,
            "units": {
                "gops": "1e9 products a second, of bytes or bf16; q4: two a weight, of bytes",
                "gb_s": "1e9 bytes a second",
            },
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
