# SPDX-License-Identifier: MIT
"""A machine whose devices reach memory only through bounce buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import FOLDER
from conftest import put_cases

pytestmark = pytest.mark.guest

REFUSED = f"""
import errno, sys
sys.path.insert(0, {FOLDER!r})
from cases import VA
from dmabuf_cases import import_, udmabuf
from userptr_cases import Memory, pinned
from vtpu_raw import HBM, PAGE, Device, nop, raises

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
    dev.bind(vm, dev.bo(PAGE, HBM), VA, PAGE)
    assert dev.finish(dev.queue(vm), [nop()]) == 1
"""


@pytest.fixture(scope="module")
def bouncing() -> Iterator[Any]:
    from vtpu_guest import Guest

    with Guest(kernel_arguments="swiotlb=force") as running:
        put_cases(running)
        yield running


def test_memory_that_only_copies_reach_is_refused(bouncing: Any) -> None:
    """Of each kind, before anything is copied; what is in HBM works."""
    bouncing.run(["python3", "-c", REFUSED]).check()
    messages = bouncing.run(["dmesg"]).text
    assert "bounce buffers: not supported" in messages
    for bad in ("WARNING:", "BUG:", "swiotlb buffer is full"):
        assert bad not in messages, messages[-3000:]
