# SPDX-License-Identifier: MIT
"""How long an empty submission takes in the guest, beside a read from an NVMe disk there."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vtpu_guest.cache import REPO, cache_dir, fresh, key, log_dir, prune
from vtpu_guest.link import Link
from vtpu_guest.privileged import run_in_root
from vtpu_guest.stage import Stage

_SOURCE = Path(__file__).with_name("guest_latency.c")
_HEADER = REPO / "kmod/include/uapi"
_DISK_BYTES = 4 << 20
_TARGET = "/tmp/guest_latency"


def build(root: Path) -> Path:
    """The program, compiled in the build root."""
    target = cache_dir() / f"latency-{key(_SOURCE, _HEADER)}"
    if not target.is_file():
        with Stage("latency benchmark") as stage, fresh(target) as work:
            run_in_root(
                stage,
                root,
                ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-I/uapi", "-I/usr/include/drm",
                 f"/bench/{_SOURCE.name}", "-o", f"/out/{work.name}"],
                log_dir() / "latency.log",
                read={_SOURCE.parent: "/bench", _HEADER: "/uapi"},
                write={target.parent: "/out"},
            )  # fmt: skip
    prune("latency-*", target)
    return target


@contextmanager
def disk() -> Iterator[list[str]]:
    """QEMU's arguments for an NVMe disk that lies in the host's page cache."""
    with tempfile.NamedTemporaryFile(prefix="vtpu-bench-") as file:
        file.write(bytes(range(256)) * (_DISK_BYTES // 256))
        file.flush()
        node = f"driver=file,node-name=nvme,filename={file.name},read-only=on,auto-read-only=off"
        yield ["-blockdev", node, "-device", "nvme,drive=nvme,serial=bench"]


def measure(
    guest: Link, program: Path, count: int = 11, trips: int = 500
) -> dict[str, list[float]]:
    """Microseconds, a median a round, of each of the program's three round trips."""
    guest.put(program, _TARGET, 0o755)
    guest.run("modprobe nvme; until test -b /dev/nvme0n1; do sleep 0.1; done").check()
    command = [_TARGET, "/dev/nvme0n1", str(count), str(trips)]
    done = guest.run(command, timeout=300).check()
    rounds: dict[str, list[float]] = json.loads(done.stdout)
    return rounds


def figures(rounds: dict[str, list[float]]) -> dict[str, float]:
    return {
        "submit_roundtrip_us": round(statistics.median(rounds["submit"]), 1),
        "submit_ratio_nvme": _ratio(rounds, "submit"),
        "user_queue_ratio_nvme": _ratio(rounds, "user_queue"),
    }


def _ratio(rounds: dict[str, list[float]], kind: str) -> float:
    """The median of the rounds' ratios to the disk."""
    pairs = zip(rounds[kind], rounds["nvme"], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3)
