# SPDX-License-Identifier: MIT
"""The round trips that `make bench` reports can be measured; how long they take is asked there."""

from __future__ import annotations

import os
from typing import Any

import pytest

from bench import latency

pytestmark = pytest.mark.guest


@pytest.mark.skipif("VTPU_ATTACH" in os.environ, reason="the guest lacks the disk to compare with")
def test_each_round_trip_is_measured(guest: Any) -> None:
    from vtpu_guest.roots import build_root

    rounds = latency.measure(guest, latency.build(build_root()), count=3, trips=20)
    assert set(rounds) == {"submit", "user_queue", "nvme"}
    for times in rounds.values():
        assert len(times) == 3 and min(times) > 0, rounds
    figures = latency.figures(rounds)
    assert set(figures) == {"submit_roundtrip_us", "submit_ratio_nvme", "user_queue_ratio_nvme"}
    assert min(figures.values()) > 0, (figures, rounds)
