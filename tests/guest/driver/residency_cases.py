# SPDX-License-Identifier: MIT
"""Who leaves HBM when it is short, and who does not. Runs in a guest with little of it, as root."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

import vtpu_raw as raw
from cases import VA, collector, main
from memory_cases import Client, push_out, share
from vtpu_raw import HBM, PAGE, Device, UserQueue, raises

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)


@case
def who_was_idle_for_longest_leaves_first() -> None:
    """Not who came first: the one that was used last stays."""
    with Client() as one, Client() as two, Device() as other:
        for client in (one, two):
            client.place(client.bo(share(client, 0.4), HBM), share(client, 0.4))
        two.finish_ok([raw.nop()])
        one.finish_ok([raw.nop()])
        before = other.memory()
        other.bo(share(other, 0.4), HBM)
        after = other.memory()
        assert after.evictions == before.evictions + 1
        # It would have to come back for a job.
        one.finish_ok([raw.nop()])
        assert other.memory().evictions == after.evictions


@case
def a_user_queue_keeps_its_address_space() -> None:
    """It comes to HBM with the queue, stays, and may leave once the queue is gone."""
    with Client() as dev, Device() as other:
        size = share(dev, 0.6)
        va = dev.place(dev.bo(size, HBM), size)
        push_out(dev)
        user = UserQueue(dev, dev.vm_id)
        assert dev.memory().hbm_evicted == 0
        with raises(errno.ENOSPC):
            other.bo(size, HBM)
        assert dev.memory().hbm_evicted == 0
        user.finish(raw.fill(va, PAGE, 7), raw.copy(VA, va, 8))
        assert dev.page[:8:4] == b"\7\7"
        user.destroy()
        user.unmap()
        other.bo(size, HBM)
        assert dev.memory().hbm_evicted == size


@case
def a_user_queue_needs_room_for_its_address_space() -> None:
    """One that others keep from HBM is not made, and what was there is as it was."""
    with Client() as holder, Client() as dev:
        size = share(dev, 0.6)
        holder.place(holder.bo(size, HBM), size)
        user = UserQueue(holder, holder.vm_id)
        before = dev.memory()
        with raises(errno.ENOSPC):
            dev.bo(size, HBM)
        assert dev.memory() == before
        user.destroy()
        user.unmap()
        dev.place(dev.bo(size, HBM), size)
        second = UserQueue(dev, dev.vm_id)
        # Its buffer left for the other one's, which stays now.
        assert dev.memory().hbm_evicted == size
        with raises(errno.ENOSPC):
            UserQueue(holder, holder.vm_id)
        second.destroy()
        second.unmap()
        again = UserQueue(holder, holder.vm_id)
        again.finish(raw.nop())
        again.destroy()
        again.unmap()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
