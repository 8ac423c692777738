# SPDX-License-Identifier: MIT
"""`make bench-device`: the device on this host, without QEMU, against what the host can do.

`bench_device` (C) prints the figures of a round, in which the machine and plain loops take
turns; a ratio is the median of the rounds' ratios. JSON goes to stdout.
"""

from __future__ import annotations

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


def rounds(threads: int) -> list[dict[str, Any]]:
    subprocess.run(["make", "-s", "-C", str(CORE), "bench"], check=True, stdout=sys.stderr)
    command = [str(CORE / "build" / "bench_device"), str(ROUNDS), str(threads)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def main() -> None:
    threads = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    raw = rounds(threads)
    path, unit = raw[0].pop("path"), raw[0].pop("unit")
    for each in raw[1:]:
        del each["path"], each["unit"]

    def ratio(ours: str, best: str) -> float | None:
        """None where this host has no unit to compare with."""
        if not raw[0][best]:
            return None
        return round(statistics.median(each[ours] / each[best] for each in raw), 3)

    result = {
        "weight_stream_ratio": ratio("weight_stream_gb_s", "read_loop_gb_s"),
        "batch16_int8_ratio": ratio("batch16_gops", "unit_gops"),
        "prefill_int8_ratio": ratio("prefill_gops", "unit_gops"),
        "prefill_bf16_ratio": None,
        "copy_ratio": ratio("copy_gb_s", "memcpy_gb_s"),
        "dispatch_ns": round(statistics.median(each["dispatch_ns"] for each in raw), 1),
        "reasons": {"prefill_bf16_ratio": "the device has no product of bf16 weights"},
        "host": {**host.describe(), "threads": threads, "load_before": round(load, 2)},
        "path": path,
        "integer_unit": unit or None,
        "raw": {
            "rounds": raw,
            "units": {
                "gops": "1e9 products of bytes a second; two a weight, activations have 16 bits",
                "gb_s": "1e9 bytes a second",
            },
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
