# SPDX-License-Identifier: MIT
"""`make bench`: the guest against llama.cpp on the bare host, in one run.

Rounds alternate between the two, so that a drift of the host's speed meets
both; a ratio is the median of the rounds' ratios. JSON goes to stdout, what is
going on to stderr.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vtpu_guest import accel, checks
from vtpu_guest.build import build
from vtpu_guest.guest import Guest
from vtpu_guest.machine import GUEST_HTTP_PORT, Machine
from vtpu_guest.model import fetch

from . import host, latency, llama_build, workload
from .counters import BusyShare, Counters

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
_READY_TIMEOUT = 300
OURS: dict[str, Callable[[int], float]] = {
    "decode_b1": lambda port: workload.decode_rate(port, 1),
    "decode_b8": lambda port: workload.decode_rate(port, 8),
    "ttft_512": lambda port: workload.first_token_time(port, 512),
}


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def llama(python: Path, model: Path) -> dict[str, float]:
    """One repetition of every baseline workload."""
    script = Path(__file__).with_name("llama_baseline.py")
    command = [str(python), str(script), str(model), "--repeat", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"bench: llama.cpp failed: {result.stderr.strip()[-500:]}")
    return {key: values[0] for key, values in json.loads(result.stdout).items()}


def wait_ready(guest: Guest, port: int) -> None:
    from vtpu_guest import chat

    deadline = time.monotonic() + _READY_TIMEOUT
    while not chat.is_healthy(port):
        guest.check_running()
        if time.monotonic() > deadline:
            raise SystemExit(f"bench: the server was not ready in {_READY_TIMEOUT} s")
        time.sleep(0.02)


def main() -> None:
    with latency.disk() as arguments:
        print(json.dumps(run(arguments), indent=2))


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Everything, in a guest with these arguments more."""
    python = llama_build.build()
    images = build()
    program = latency.build(images.qemu.root)
    model = fetch()
    port = checks.free_port()
    machine = Machine(
        images=images,
        accelerator=accel.choose(),
        forward={port: GUEST_HTTP_PORT},
        start=["python3", "-m", "vtpu.server", "--model", f"/opt/model/{model.name}",
               "--host", "0.0.0.0", "--port", str(GUEST_HTTP_PORT)],
        extra_arguments=arguments,
    )  # fmt: skip
    ours: dict[str, list[float]] = {key: [] for key in OURS}
    theirs: dict[str, list[float]] = {key: [] for key in OURS}
    busy: dict[str, list[float]] = {key: [] for key in OURS}
    say("booting the guest")
    started = time.monotonic()
    guest = Guest(machine)
    try:
        guest.start(wait=False)
        wait_ready(guest, port)
        workload.complete(port, workload.prompt(0, workload.PROMPT_TOKENS), 1)
        boot = time.monotonic() - started
        say(f"first token {boot:.1f} s after QEMU's start")
        guest.wait_agent()
        counters = Counters(guest)
        workload.decode_rate(port, 8)  # warm-up
        for number in range(ROUNDS):
            for key, value in llama(python, model).items():
                theirs[key].append(value)
            for key, measure in OURS.items():
                with BusyShare(counters) as share:
                    ours[key].append(measure(port))
                busy[key].append(share.value)
            now = ", ".join(f"{k} {ours[k][-1]:.2f} to {theirs[k][-1]:.2f}" for k in ours)
            say(f"round {number + 1} of {ROUNDS}: {now}")
        roundtrips = latency.measure(guest, program)
        guest.shutdown()
    finally:
        guest.kill()

    def ratio(key: str) -> float:
        pairs = zip(ours[key], theirs[key], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    return {
        "decode_b1_ratio": ratio("decode_b1"),
        "decode_b8_ratio": ratio("decode_b8"),
        "ttft_512_ratio": ratio("ttft_512"),
        "boot_to_first_token_s": round(boot, 2),
        **latency.figures(roundtrips),
        "device_busy_share": {key: round(statistics.median(busy[key]), 3) for key in OURS},
        "host": {**host.describe(), "accelerator": accel.choose().name},
        "raw": {
            "vtpu": ours,
            "llama_cpp": theirs,
            "roundtrips_us": roundtrips,
            "units": {"decode_b1": "tokens/s", "decode_b8": "tokens/s", "ttft_512": "s"},
        },
    }


if __name__ == "__main__":
    main()
