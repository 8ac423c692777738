# SPDX-License-Identifier: MIT
"""What the ordinary machine has not: bounce buffers for all DMA, a device that models a chip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import FOLDER
from conftest import booted

pytestmark = pytest.mark.guest
NOT_SUPPORTED = "system memory only through bounce buffers: not supported"

REFUSED = f"""
import errno, sys
sys.path.insert(0, {FOLDER!r})
from cases import VA
from dmabuf_cases import import_, udmabuf
from userptr_cases import Memory, pinned
from vtpu_raw import HBM, PAGE, QUEUE_USER, Device, nop, raises

with Device() as dev:
    memory, vm = Memory(16 * PAGE), dev.vm()
    memory.view[:3] = b"abc"
    for _ in range(3):
        with raises(errno.EOPNOTSUPP):
            dev.userptr(memory.addr, memory.size)
    assert pinned() == 0 and memory.view[:3] == b"abc"
    fd, view = udmabuf([(0, 4 * PAGE)], 4 * PAGE)
    with raises(errno.EOPNOTSUPP):
        import_(dev, fd)
    with raises(errno.EOPNOTSUPP):
        dev.bind(vm, dev.bo(PAGE), VA, PAGE)
    with raises(errno.EOPNOTSUPP):
        dev.queue(vm, flags=QUEUE_USER)
    dev.bind(vm, dev.bo(PAGE, HBM), VA, PAGE)
    assert dev.finish(dev.queue(vm), [nop()]) == 1
"""


@pytest.fixture(scope="module")
def special() -> Iterator[Any]:
    with booted(kernel_arguments="swiotlb=force", device="timing=v5e") as running:
        yield running


@pytest.mark.expects(f"vtpu .*{NOT_SUPPORTED}")
def test_memory_that_only_copies_reach_is_refused(special: Any) -> None:
    """Of each kind, before anything is copied; what is in HBM works."""
    special.run(["python3", "-c", REFUSED]).check()
    assert NOT_SUPPORTED in special.run(["dmesg"]).text


MODELLED = f"""
import errno, sys
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import VA, counting

MHZ, CYCLES, BUSY_SEQ, SYNC = 16, 17, 22, 29
code = counting(100)
with raw.Device() as dev:
    vm, bo = dev.vm(), dev.bo(raw.PAGE, raw.HBM)
    with dev.map(bo) as view:
        view[: len(code)] = code
    dev.bind(vm, bo, VA, raw.PAGE, raw.READ | raw.EXEC)
    queue = dev.queue(vm)
    cycles = []
    for _ in range(3):
        cycles.append(dev.counters(0, [CYCLES])[0])
        assert dev.finish(queue, [raw.run(VA, len(code))]) == 1
    mhz, total, busy = dev.counters(0, [MHZ, CYCLES, BUSY_SEQ])
    assert mhz > 0 and cycles[1] - cycles[0] == cycles[2] - cycles[1] > 200, (mhz, cycles)
    assert 0 < busy <= total == 3 * cycles[1], (busy, total, cycles)
    for number in range(16, 31):
        dev.counters(0, [number])
    with raw.raises(errno.EINVAL):
        dev.counters(0, [31])
"""


def test_a_modelled_chips_counters(special: Any) -> None:
    """The same program takes the same cycles each time, of which the sequencer is busy."""
    special.run(["python3", "-c", MODELLED]).check()
