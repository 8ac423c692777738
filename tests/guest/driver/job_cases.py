# SPDX-License-Identifier: MIT
"""Queues, jobs, and how they end. Runs in the guest as root."""

from __future__ import annotations

import errno
import os
import random
import sys
import time
from collections.abc import Callable

import vtpu_raw as raw
from cases import VA, Setup, collector, counting, long_matmul, main, until
from vtpu_raw import HBM, HUGE, PAGE, READ, SYNC_SIGNAL, SYNC_TIMELINE, WRITE, Device, raises
from watch import HANG, HELD_UP, expects

CASES: dict[str, Callable[[], None]] = {}
case = collector(CASES)
QUEUE_BUSY_NS = 1  # a counter


# ---- Queues ----


@case
def queue_limits() -> None:
    with Device() as dev:
        total = dev.info().num_queues
        vm = dev.vm()
        queues = []
        with raises(errno.ENOSPC):
            for _ in range(total + 1):
                queues.append(dev.queue(vm))
        assert 4 <= len(queues) < total, len(queues)
        others = []
        try:
            with raises(errno.ENOSPC):
                for _ in range(total):
                    others.append(Device())
                    other_vm = others[-1].vm()
                    for _ in range(len(queues)):
                        others[-1].queue(other_vm)
        finally:
            for other in others:
                other.close()
        dev.call("queue_destroy", queue_id=queues.pop())
        queue = dev.queue(vm)
        assert dev.finish(queue, [raw.nop()]) == 1


@case
def queue_arguments() -> None:
    with Device() as dev:
        vm = dev.vm()
        with raises(errno.ENOENT):
            dev.queue(vm + 7)
        for change in ({"priority": 3}, {"flags": 2}, {"stall_ms": 600001}, {"timeout_ms": 600001}):
            with raises(errno.EINVAL):
                dev.call("queue_create", **{"vm_id": vm, **change})
        with raises(errno.ENOENT):
            dev.state(5)
        with raises(errno.ENOENT):
            dev.call("queue_destroy", queue_id=5)
        with raises(errno.EINVAL):
            dev.call("queue_destroy", queue_id=dev.queue(vm), pad=1)
        queue = dev.queue(vm, priority=2)
        assert dev.finish(queue, [raw.nop()]) == 1
    child = os.fork()
    if not child:
        os.setgroups([])
        # The node is root's here; what counts is the capability.
        dev = Device()
        os.setuid(65534)
        try:
            dev.queue(dev.vm(), priority=2)
        except OSError as error:
            os._exit(0 if error.errno == errno.EPERM else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "a high priority needs the capability"


# ---- Jobs ----


@case
def submit_nop() -> None:
    with Setup() as dev:
        for _ in range(10):
            dev.finish_ok([raw.nop()])
        state = dev.state(dev.queue_id)
        assert state.completed == 10 and state.status == raw.OK and state.fault_cause == 0


@case
def submit_copy_fill() -> None:
    with Setup() as dev:
        dev.host_map[:] = random.Random(2).randbytes(dev.size)
        dev.finish_ok([raw.copy(dev.hbm_va, dev.host_va, dev.size)])
        assert dev.hbm_map[:] == dev.host_map[:]
        dev.finish_ok(
            [
                raw.fill(dev.hbm_va + 64, 128, 0x01020304),
                raw.copy(dev.host_va, dev.hbm_va, dev.size),
                raw.timestamp(dev.host_va + PAGE),
                raw.signal(dev.host_va + PAGE + 8, 77),
                raw.wait(dev.host_va + PAGE + 8, 70),
            ]
        )
        assert dev.host_map[64:192] == b"\x04\x03\x02\x01" * 32
        assert int.from_bytes(dev.host_map[PAGE : PAGE + 8], "little") > 0
        assert int.from_bytes(dev.host_map[PAGE + 8 : PAGE + 16], "little") == 77


@case
def submit_run_halt() -> None:
    with Setup() as dev:
        dev.finish_ok([dev.run(raw.HALT)])


@case
def submit_many_in_order() -> None:
    """More jobs than the ring has entries; each leaves its number."""
    count, per_job = 300, 8
    with Setup() as dev:
        sync = dev.syncobj()
        for i in range(count):
            commands = [raw.nop()] * (per_job - 1) + [raw.fill(dev.host_va, 4, i)]
            last = [(sync, SYNC_SIGNAL, 0)] if i == count - 1 else []
            dev.submit(dev.queue_id, commands, last)
        dev.wait(sync, 30)
        assert int.from_bytes(dev.host_map[:4], "little") == count - 1
        assert dev.state(dev.queue_id).completed == count


@case
def submit_binary_dependency_between_queues() -> None:
    with Setup() as dev:
        other = dev.queue(dev.vm_id)
        first, second = dev.syncobj(), dev.syncobj()
        go = dev.hbm_va + PAGE
        dev.submit(
            dev.queue_id,
            [raw.wait(go, 1), raw.fill(dev.host_va, 4, 5)],
            [(first, SYNC_SIGNAL, 0)],
        )
        dev.submit(
            other,
            [raw.copy(dev.host_va + 8, dev.host_va, 4)],
            [(first, 0, 0), (second, SYNC_SIGNAL, 0)],
        )
        with raises(errno.ETIME):
            dev.wait(second, 0.05)
        dev.hbm_map[PAGE] = 1
        dev.wait(second)
        assert dev.host_map[8:12] == b"\5\0\0\0"


@case
def submit_timeline() -> None:
    with Setup() as dev:
        line = dev.syncobj()
        for point in (1, 2, 3):
            syncs = [(line, SYNC_SIGNAL | SYNC_TIMELINE, point)]
            if point > 1:
                syncs.append((line, SYNC_TIMELINE, point - 1))
            dev.submit(dev.queue_id, [raw.fill(dev.host_va, 4, point)], syncs)
        dev.wait_point(line, 3)
        assert dev.host_map[0] == 3
        with raises(errno.ETIME):
            dev.wait_point(line, 4, 0.02)
        dev.signal_point(line, 4)
        dev.wait_point(line, 4)
        dev.submit(dev.queue_id, [raw.nop()], [(line, SYNC_TIMELINE, 4)])


@case
def submit_arguments() -> None:
    with Setup() as dev:
        one = raw.words("IIQQQQQ", *raw.nop())
        good = {"queue_id": dev.queue_id, "cmds": raw.buffer_address(one), "num_cmds": 1}
        wrong = [
            ({"queue_id": 99}, errno.ENOENT),
            ({"flags": 2}, errno.EINVAL),
            ({"num_cmds": 0}, errno.EINVAL),
            ({"num_cmds": 65}, errno.EINVAL),
            ({"num_syncs": 65}, errno.EINVAL),
            ({"cmds": 0}, errno.EFAULT),
            ({"cmds": 1 << 63}, errno.EFAULT),
            ({"num_syncs": 1}, errno.EFAULT),
            ({"num_syncs": 1, "syncs": 1 << 62}, errno.EFAULT),
        ]
        for change, error in wrong:
            with raises(error):
                dev.call("submit", **{**good, **change})
        commands = [
            (0, 0, 0, 0, 0, 0, 0),
            (8, 0, 0, 0, 0, 0, 0),
            (0x101, 0, 0, 0, 0, 0, 0),
            (raw.NOP, 0, 1, 0, 0, 0, 0),
            (raw.NOP, 0, 0, 0, 0, 0, 1),
            (raw.RUN, 0, 0, 0, 0, 1 << 32, 0),
            (raw.RUN, 0, 0, 0, 0, 0, 1),
            (raw.COPY, 0, 0, 0, 0, 1, 0),
            (raw.FILL, 0, 0, 0, 1 << 32, 0, 0),
            (raw.FILL, 0, 0, 0, 0, 1, 0),
            (raw.WAIT, 0, 0, 0, 1, 0, 0),
            (raw.SIGNAL, 0, 0, 0, 1, 0, 0),
            (raw.TIMESTAMP, 0, 0, 1, 0, 0, 0),
        ]
        for command in commands:
            with raises(errno.EINVAL):
                dev.submit(dev.queue_id, [raw.nop(), command])
        sync = dev.syncobj()
        for item, error in [
            ((99, 0, 0), errno.ENOENT),
            ((99, SYNC_SIGNAL, 0), errno.ENOENT),
            ((99, SYNC_SIGNAL | SYNC_TIMELINE, 1), errno.ENOENT),
            ((sync, 4, 0), errno.EINVAL),
            ((sync, SYNC_SIGNAL, 1), errno.EINVAL),
            ((sync, 0, 1), errno.EINVAL),
            ((sync, SYNC_SIGNAL | SYNC_TIMELINE, 0), errno.EINVAL),
            ((sync, 0, 0), errno.EINVAL),  # has no fence yet
        ]:
            with raises(error):
                dev.submit(dev.queue_id, [raw.nop()], [(sync, SYNC_SIGNAL, 0), item])
        assert dev.state(dev.queue_id).completed == 0
        dev.finish_ok([raw.nop()])


@case
def bo_wait() -> None:
    with Setup() as dev:
        idle = dev.bo(PAGE)
        go = dev.hbm_va + PAGE
        dev.submit(dev.queue_id, [raw.wait(go, 1)])
        for handle in (dev.host, dev.hbm):
            with raises(errno.ETIMEDOUT):
                dev.call("bo_wait", handle=handle, timeout_ns=0)
            with raises(errno.ETIMEDOUT):
                dev.call("bo_wait", handle=handle, timeout_ns=raw.absolute(0.05))
        dev.call("bo_wait", handle=idle, timeout_ns=0)
        dev.hbm_map[PAGE] = 1
        dev.call("bo_wait", handle=dev.hbm, timeout_ns=raw.absolute(5))
        dev.call("bo_wait", handle=dev.hbm, timeout_ns=0)
        with raises(errno.EINVAL):
            dev.call("bo_wait", handle=dev.hbm, pad=1)
        with raises(errno.ENOENT):
            dev.call("bo_wait", handle=999)


@case
def bo_wait_for_all_address_spaces() -> None:
    with Setup() as dev:
        vm = dev.vm()
        queue = dev.queue(vm)
        dev.bind(vm, dev.host, dev.host_va, dev.size)
        dev.bind(vm, dev.hbm, dev.hbm_va, dev.size)
        for number, line in enumerate((dev.queue_id, queue)):
            dev.submit(line, [raw.wait(dev.hbm_va + 8 * number, 1)])
        for number in range(2):
            with raises(errno.ETIMEDOUT):
                dev.call("bo_wait", handle=dev.host, timeout_ns=raw.absolute(0.05))
            dev.hbm_map[8 * number] = 1
        dev.call("bo_wait", handle=dev.host, timeout_ns=raw.absolute(20))


@case
def priorities_share_the_time() -> None:
    """64 : 1, of two that always have work; by the device's clock."""
    with Setup(timeout_ms=60000) as dev:
        loop = dev.run(raw.LOOP)
        low, high = (dev.queue(dev.vm_id, 60000, priority=priority) for priority in (0, 2))

        def busy() -> tuple[int, int]:
            return dev.counters(low, [QUEUE_BUSY_NS])[0], dev.counters(high, [QUEUE_BUSY_NS])[0]

        for queue in (low, high):
            dev.submit(queue, [loop])
        until(lambda: busy()[1] > 0, 20, "both have work")
        before = busy()
        until(lambda: busy()[0] > before[0] + 5_000_000, 60, "the low one has its turns")
        after = busy()
        assert after[1] - before[1] > 16 * (after[0] - before[0]), (before, after)


# ---- Faults and hangs ----


@case
def page_fault() -> None:
    with Setup() as dev:
        lost = VA + (5 << 30)
        behind = dev.syncobj()
        sync = dev.syncobj()
        hold = dev.hbm_va + PAGE
        commands = [
            raw.nop(cookie=1),
            raw.wait(hold, 1, cookie=2),
            raw.copy(dev.hbm_va, lost, 64, cookie=0xABC),
        ]
        dev.submit(dev.queue_id, commands, [(sync, SYNC_SIGNAL, 0)])
        dev.submit(dev.queue_id, [raw.nop()], [(behind, SYNC_SIGNAL, 0)])
        dev.hbm_map[PAGE] = 1
        dev.wait(sync)
        assert dev.fence_error(sync) == -errno.EFAULT, dev.fence_error(sync)
        dev.wait(behind)
        assert dev.fence_error(behind) == -errno.ECANCELED, dev.fence_error(behind)
        state = dev.state(dev.queue_id)
        assert state.status == raw.FAULTED and state.fault_cause == raw.FAULT_UNMAPPED, state
        assert state.fault_addr == lost and state.fault_access == 1, state
        assert state.fault_cookie == 0xABC and state.fault_pc == 0xFFFFFFFF, state
        with raises(errno.EIO):
            dev.submit(dev.queue_id, [raw.nop()])
        other = dev.queue(dev.vm_id)
        assert dev.finish(other, [raw.nop()]) == 1
        dev.call("queue_destroy", queue_id=dev.queue_id)
        for _ in range(3):
            queue = dev.queue(dev.vm_id)
            assert dev.finish(queue, [raw.fill(dev.hbm_va, 4, 1)]) == 1
            dev.call("queue_destroy", queue_id=queue)


@case
def rights_are_enforced() -> None:
    with Setup() as dev:
        bo = dev.bo(PAGE, HBM)
        read_only, write_only = VA + (6 << 30), VA + (7 << 30)
        dev.bind(dev.vm_id, bo, read_only, PAGE, READ)
        dev.bind(dev.vm_id, bo, write_only, PAGE, WRITE)
        for command, access in [
            (raw.fill(read_only, 4, 1), 2),
            (raw.copy(dev.hbm_va, write_only, 4), 1),
            (raw.run(read_only, 64), 3),
        ]:
            queue = dev.queue(dev.vm_id)
            assert dev.finish(queue, [command]) == -errno.EFAULT
            state = dev.state(queue)
            assert state.fault_cause == raw.FAULT_PROTECTION and state.fault_access == access, state
            dev.call("queue_destroy", queue_id=queue)
        dev.finish_ok([raw.fill(write_only, 4, 9), raw.copy(dev.host_va, read_only, 4)])
        assert dev.host_map[0] == 9


@case
def trap_is_reported() -> None:
    with Setup() as dev:
        got = dev.finish(dev.queue_id, [dev.run(raw.trap(0x1234), cookie=7)])
        state = dev.state(dev.queue_id)
        assert got == -errno.EFAULT and state.fault_cause == raw.FAULT_TRAP, state
        assert state.fault_addr == 0x1234 and state.fault_pc == 0 and state.fault_cookie == 7, state


@case
def use_after_unmap_faults() -> None:
    with Setup() as dev:
        dev.finish_ok([raw.copy(dev.host_va, dev.hbm_va, 8)])
        dev.unbind(dev.vm_id, dev.hbm_va, dev.size)
        got = dev.finish(dev.queue_id, [raw.copy(dev.host_va, dev.hbm_va, 8)])
        assert got == -errno.EFAULT, got
        assert dev.state(dev.queue_id).fault_cause == raw.FAULT_UNMAPPED


@case
@expects(HANG)
def hang_is_ended_by_the_timeout() -> None:
    with Setup(timeout_ms=300) as dev:
        before = dev.resets()
        innocent = dev.queue(dev.vm_id, 300)
        hung, behind, other = dev.syncobj(), dev.syncobj(), dev.syncobj()
        start = time.monotonic()
        dev.submit(dev.queue_id, [dev.run(raw.LOOP, cookie=3)], [(hung, SYNC_SIGNAL, 0)])
        dev.submit(dev.queue_id, [raw.nop()], [(behind, SYNC_SIGNAL, 0)])
        time.sleep(0.05)
        dev.submit(innocent, [raw.fill(dev.host_va, 4, 6)], [(other, SYNC_SIGNAL, 0)])
        dev.wait(hung)
        took = time.monotonic() - start
        assert took > 0.25, took
        assert dev.fence_error(hung) == -errno.ETIMEDOUT, dev.fence_error(hung)
        dev.wait(behind)
        assert dev.fence_error(behind) == -errno.ECANCELED
        dev.wait(other)
        assert dev.fence_error(other) == 1 and dev.host_map[0] == 6
        assert dev.state(dev.queue_id).status == raw.HUNG
        with raises(errno.EIO):
            dev.submit(dev.queue_id, [raw.nop()])
        assert dev.finish(innocent, [raw.nop()]) == 1
        after = dev.resets()
        assert after.queue_resets == before.queue_resets + 1, (before, after)
        assert after.device_resets == before.device_resets


@case
@expects(HANG)
def wait_without_end_is_a_hang() -> None:
    with Setup(timeout_ms=300) as dev:
        assert dev.finish(dev.queue_id, [raw.wait(dev.hbm_va, 1)]) == -errno.ETIMEDOUT
        assert dev.state(dev.queue_id).status == raw.HUNG


@case
@expects(HANG)
def long_job_of_another_queue_is_no_hang() -> None:
    """A job with a short limit, behind a program of a queue with a long one."""
    with Setup(timeout_ms=200) as dev:
        long_queue = dev.queue(dev.vm_id, 1500)
        hung, late = dev.syncobj(), dev.syncobj()
        dev.submit(long_queue, [dev.run(raw.LOOP)], [(hung, SYNC_SIGNAL, 0)])
        time.sleep(0.05)
        dev.submit(dev.queue_id, [raw.nop()], [(late, SYNC_SIGNAL, 0)])
        dev.wait(late)
        assert dev.fence_error(late) == 1
        assert dev.state(dev.queue_id).status == raw.OK
        dev.wait(hung)
        assert dev.state(long_queue).status == raw.HUNG


@case
@expects(HANG)
def a_turn_that_comes_late_is_no_hang() -> None:
    """A job gets its own time though another queue used up its limit."""
    with Setup(timeout_ms=5000) as dev:
        start = time.monotonic()
        count = 20000
        dev.finish_ok([dev.run(counting(count))])
        count = min(int(count * 0.25 / (time.monotonic() - start)), 1 << 31)
        dev.unbind(dev.vm_id, dev.code_va, PAGE)
        late_queue, hung, late = dev.queue(dev.vm_id, 400), dev.syncobj(), dev.syncobj()
        first = dev.queue(dev.vm_id, 300)
        code = raw.LOOP + counting(count, at=1)
        dev.program(code)
        dev.submit(first, [raw.run(dev.code_va, len(code))], [(hung, SYNC_SIGNAL, 0)])
        time.sleep(0.02)
        job = raw.run(dev.code_va, len(code), entry=64)
        dev.submit(late_queue, [job], [(late, SYNC_SIGNAL, 0)])
        dev.wait(late)
        assert dev.fence_error(late) == 1, dev.state(late_queue)
        dev.wait(hung)


@case
@expects(HANG, HELD_UP)
def a_long_instruction_holds_up_no_other_process() -> None:
    """Nor does it cost them their jobs, when its own process gives memory back."""
    with Setup(timeout_ms=30000, size=2 * HUGE) as dev, Setup() as other:
        before = dev.resets().device_resets
        sync = dev.syncobj()
        dev.submit(dev.queue_id, [dev.run(long_matmul(dev.hbm_va))], [(sync, SYNC_SIGNAL, 0)])
        time.sleep(0.2)
        other.unbind(other.vm_id, other.hbm_va, other.size)
        with raises(errno.ETIME):
            dev.wait(sync, 0)
        dev.unbind(dev.vm_id, dev.host_va, dev.size)
        dev.wait(sync)
        assert dev.fence_error(sync) == -errno.ETIMEDOUT
        assert dev.state(dev.queue_id).status == raw.HUNG
        other.finish_ok([raw.nop()])
        assert dev.resets().device_resets == before


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
