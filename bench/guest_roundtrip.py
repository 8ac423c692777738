# SPDX-License-Identifier: MIT
"""Runs in the guest: how long an empty submission takes, ioctl to woken waiter."""

import json
import time

from vtpu.runtime import Device

WARM_UP, RUNS = 100, 1000


def main() -> None:
    with Device.open() as device, device.queue() as queue:
        times = []
        for _ in range(WARM_UP + RUNS):
            start = time.perf_counter_ns()
            queue.nop().wait()
            times.append(time.perf_counter_ns() - start)
        times = sorted(times[WARM_UP:])
        print(json.dumps({
            "median_us": times[RUNS // 2] / 1e3,
            "p10_us": times[RUNS // 10] / 1e3,
            "p90_us": times[RUNS * 9 // 10] / 1e3,
            "runs": RUNS,
        }))  # fmt: skip


main()
