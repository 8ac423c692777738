# SPDX-License-Identifier: MIT
"""What every back end must do. Runs on the host (core) and in the guest (drm)."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import programs
import pytest

if TYPE_CHECKING:
    from vtpu.runtime import Device, Executable, Fence, Queue

HANG_MS = 1000  # long enough for sound work on a busy machine


@pytest.fixture
def counter(device: Device) -> Executable:
    """Increments the 64-bit word at its only argument."""
    return device.load(
        programs.executable({"count": programs.add_one(0) + programs.HALT}, ["word"])
    )


@pytest.fixture
def brief(device: Device) -> Iterator[Queue]:
    """A queue on which a hang ends soon."""
    with device.queue(timeout_ms=HANG_MS) as queue:
        yield queue


@pytest.fixture
def spinner(device: Device) -> Executable:
    """Never ends."""
    return device.load(programs.executable({"spin": programs.SPIN}, []))


def word(buffer: memoryview, index: int = 0) -> int:
    return buffer.cast("Q")[index]


# ---- Device ----


def test_info(device: Device) -> None:
    info = device.info
    assert info.backend == os.environ.get("VTPU_BACKEND", "core")
    assert info.isa_version == 1
    assert info.hbm_bytes >= 16 << 20
    assert info.page_bytes == 4096
    assert info.va_start < info.va_end <= 1 << 48


@pytest.mark.parametrize(
    ("name", "text"),
    [("nonsense", "nonsense"), ("drm:/dev/null", "/dev/null"), ("drm:/no/such", "/no/such")],
)
def test_open_names_what_it_cannot(name: str, text: str) -> None:
    from vtpu.runtime import Device, TpuError

    with pytest.raises(TpuError, match=text):
        Device.open(name)


def test_two_devices_are_apart(open_device: Callable[[], Device]) -> None:
    with open_device() as one, open_device() as two:
        va = one.info.va_start + (64 << 20)
        a = one.buffer(4096, hbm=True, va=va)
        b = two.buffer(4096, hbm=True, va=va)
        one.queue().fill(a, 4096, 1).wait()
        two.queue().fill(b, 4096, 2).wait()
        assert word(a.map()) == 0x1_0000_0001
        assert word(b.map()) == 0x2_0000_0002


# ---- Buffers ----


@pytest.mark.parametrize("hbm", [False, True])
@pytest.mark.parametrize("nbytes", [1, 4096, 10_000, (2 << 20) + 4096, 5 << 20])
def test_buffers_begin_zeroed_and_hold(device: Device, hbm: bool, nbytes: int) -> None:
    buffer = device.buffer(nbytes, hbm=hbm, name="held")
    view = buffer.map()
    assert len(view) == nbytes and not any(view[:4096]) and not any(view[-4096:])
    buffer.write(nbytes - 1, b"\x5a")
    assert buffer.read(nbytes - 1) == b"\x5a"
    if nbytes >= 2 << 20:
        assert buffer.va % (2 << 20) == 0


def test_freed_memory_comes_back_zeroed(device: Device) -> None:
    for _ in range(3):
        with device.buffer(3 << 20, hbm=True) as buffer:
            assert not any(buffer.read(0, 4096)) and not any(buffer.read((3 << 20) - 4096))
            view = buffer.map()
            view[:] = b"\xff" * len(view)
            del view


def test_memory_is_accounted(device: Device) -> None:
    before = device.memory()
    buffer = device.buffer(3 << 20, hbm=True)
    host = device.buffer(100)
    during = device.memory()
    assert during.hbm_used >= before.hbm_used + (3 << 20)
    assert during.client_hbm - before.client_hbm == 3 << 20
    assert during.client_host - before.client_host == 4096
    buffer.close()
    host.close()
    after = device.memory()
    assert (after.client_hbm, after.client_host) == (before.client_hbm, before.client_host)


def test_wrong_buffers_are_refused(device: Device) -> None:
    from vtpu.runtime import TpuInvalidError, TpuOutOfMemoryError

    with pytest.raises(TpuInvalidError, match="0 bytes"):
        device.buffer(0)
    with pytest.raises(TpuInvalidError, match="multiple of 4096"):
        device.buffer(4096, va=device.info.va_start + 1)
    with pytest.raises(TpuInvalidError, match="are not free"):
        device.buffer(4096, va=device.info.va_end)
    with pytest.raises((TpuOutOfMemoryError, TpuInvalidError)):
        device.buffer(device.info.hbm_bytes * 2, hbm=True, name="huge")
    taken = device.buffer(4096, name="taken")
    with pytest.raises(TpuInvalidError, match="are not free"):
        device.buffer(4096, va=taken.va)
    with pytest.raises(TpuInvalidError, match="'taken'"):
        taken.write(4090, b"1234567")
    with pytest.raises(TpuInvalidError, match="'taken'"):
        taken.read(-1, 1)


def test_memory_of_the_process_is_a_buffer(device: Device, queue: Queue) -> None:
    from vtpu.runtime import TpuFaultError, TpuInvalidError

    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    memory[:] = bytes(range(256)) * (3 * page // 256)
    copied = device.buffer(3 * page, hbm=True)
    before = device.memory().client_host
    with device.import_buffer(memory, name="mine") as mine:
        assert device.memory().client_host == before + 3 * page
        queue.copy(copied.va, mine.va, 3 * page).wait(10)
        assert copied.read() == memory[:]
        queue.fill(mine.va + page, 8, 0x01020304).wait(10)
        assert memory[page : page + 8] == b"\4\3\2\1" * 2 and mine.read(page, 1) == b"\4"
    assert device.memory().client_host == before
    with device.import_buffer(memory, read_only=True) as mine:
        queue.copy(copied.va, mine.va + page, 8).wait(10)
        assert copied.read(0, 8) == b"\4\3\2\1" * 2
        with pytest.raises(TpuFaultError):
            queue.fill(mine.va, 8, 0).wait(10)
    for wrong in (memoryview(memory)[8 : page + 8], memoryview(memory)[:100]):
        with pytest.raises(TpuInvalidError, match="whole pages"):
            device.import_buffer(wrong)


def test_imported_memory_is_kept(device: Device, queue: Queue) -> None:
    """By the buffer, or else by the last view of it."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    gone = weakref.ref(memory)
    buffer = device.import_buffer(memory)
    del memory
    queue.fill(buffer.va, 4, 0x07070707).wait(10)
    view = buffer.map()
    buffer.close()
    del buffer
    gc.collect()
    assert view[0] == 7 and gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_closed_buffers_say_so_and_views_live_on(device: Device) -> None:
    from vtpu.runtime import TpuInvalidError

    buffer = device.buffer(4096, hbm=True, name="gone")
    view = buffer.map()
    view[0] = 7
    buffer.close()
    buffer.close()
    for use in (buffer.map, lambda: buffer.va, lambda: buffer.write(0, b"1"), buffer.read):
        with pytest.raises(TpuInvalidError, match="'gone' is closed"):
            use()
    gc.collect()
    assert view[0] == 7
    view[0] = 8


def test_numpy_sees_the_buffer(device: Device) -> None:
    numpy = pytest.importorskip("numpy")
    buffer = device.buffer(4096)
    array = numpy.frombuffer(buffer.map(), dtype=numpy.uint32)
    array[5] = 0xDEADBEEF
    assert buffer.read(20, 4) == b"\xef\xbe\xad\xde"


@pytest.mark.parametrize("hbm", [False, True])
def test_files_are_read_straight_in(device: Device, tmp_path: Path, hbm: bool) -> None:
    from vtpu.runtime import TpuError

    data = os.urandom(1 << 16) * 40
    path = tmp_path / "data"
    path.write_bytes(data)
    buffer = device.buffer(4 << 20, hbm=hbm)
    seen: list[int] = []
    with path.open("rb", buffering=0) as file:
        buffer.read_from(file.fileno(), 2_000_001, offset=77, buf_offset=33, progress=seen.append)
        assert buffer.read(33, 2_000_001) == data[77 : 77 + 2_000_001]
        assert seen == [2_000_001]
        with pytest.raises(TpuError, match="bytes short"):
            buffer.read_from(file.fileno(), len(data) + 1)


# ---- Commands and fences ----


@pytest.mark.parametrize("src_hbm", [False, True])
@pytest.mark.parametrize("dst_hbm", [False, True])
def test_copy_and_fill(device: Device, queue: Queue, src_hbm: bool, dst_hbm: bool) -> None:
    nbytes = (2 << 20) + 8192
    src = device.buffer(nbytes, hbm=src_hbm)
    dst = device.buffer(nbytes, hbm=dst_hbm)
    src.write(0, os.urandom(4096))
    queue.fill(src.va + 4096, nbytes - 4096, 0xA5A5A5A5).wait()
    queue.copy(dst.va + 3, src.va + 1, nbytes - 8).wait()
    assert dst.read(3, nbytes - 8) == src.read(1, nbytes - 8)
    assert src.read(nbytes - 4096) == b"\xa5" * 4096


def test_points_ascend_and_end_in_order(device: Device, queue: Queue) -> None:
    buffer = device.buffer(4096, hbm=True)
    fences = [queue.fill(buffer, 4096, value) for value in range(200)]
    assert [fence.point for fence in fences] == list(range(1, 201))
    fences[-1].wait()
    assert all(fence.done() for fence in fences)
    assert word(buffer.map()) == 199 << 32 | 199
    state = queue.state
    assert (state.status, state.fault, state.submitted, state.completed) == ("ok", None, 200, 200)


def test_more_jobs_than_any_ring_holds(device: Device, queue: Queue, counter: Executable) -> None:
    buffer = device.buffer(8, hbm=True)
    launch = queue.prepare(counter, [buffer])
    for _ in range(3000):
        fence = launch.submit()
    fence.wait()
    assert word(buffer.map()) == 3000


def test_an_empty_job_takes_its_turn(device: Device, queue: Queue) -> None:
    before = queue.state.completed
    buffer = device.buffer(4096)
    queue.fill(buffer, 4096, 0x01020304)
    queue.nop().wait(30)
    assert word(buffer.map()) == 0x0102030401020304
    assert queue.state.completed == before + 2


def test_fill_of_odd_bytes_is_refused(device: Device, queue: Queue) -> None:
    from vtpu.runtime import TpuInvalidError

    with pytest.raises(TpuInvalidError, match="multiple of 4"):
        queue.fill(device.buffer(64), 6)


def test_wait_times_out(brief: Queue, spinner: Executable) -> None:
    from vtpu.runtime import TpuCancelledError, TpuHangError, TpuTimeoutError

    fence = brief.prepare(spinner, []).submit()
    assert not fence.done()
    start = time.monotonic()
    with pytest.raises(TpuTimeoutError):
        fence.wait(0.05)
    assert 0.04 < time.monotonic() - start < 2
    with pytest.raises((TpuHangError, TpuCancelledError)):
        fence.wait()


def test_waiting_releases_the_gil(brief: Queue, spinner: Executable) -> None:
    from vtpu.runtime import TpuError

    fence = brief.prepare(spinner, []).submit()

    def wait() -> None:
        with pytest.raises(TpuError):
            fence.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    assert sum(1 for _ in range(10_000)) and thread.is_alive()
    thread.join()


def test_fences_are_awaitable(
    device: Device, queue: Queue, brief: Queue, spinner: Executable
) -> None:
    from vtpu.runtime import TpuFaultError

    buffer = device.buffer(1 << 20, hbm=True)

    async def main() -> None:
        fences = [queue.fill(buffer, 1 << 20, value) for value in range(20)]
        await asyncio.gather(*(wait(fence) for fence in fences))
        await fences[0]
        with pytest.raises(TpuFaultError):
            await queue.fill(0x1000, 4)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(brief.prepare(spinner, []).submit()), 0.05)

    async def wait(fence: Fence) -> None:
        await fence

    asyncio.run(main())


def test_a_job_waits_for_other_queues(device: Device, queue: Queue, counter: Executable) -> None:
    buffer = device.buffer(16 << 20, hbm=True)
    with device.queue() as other:
        slow = [other.fill(buffer.va + 8, (16 << 20) - 8, 1) for _ in range(5)]
        last = other.fill(buffer, 4, 41)
        launch = queue.prepare(counter, [buffer])
        launch.submit(wait=[*slow, last]).wait()
        assert last.done() and word(buffer.map()) == 42


# ---- Programs ----


def test_a_program_gets_its_arguments(device: Device, queue: Queue) -> None:
    code = b"".join(programs.store_argument(0, index) for index in range(1, 2)) + programs.HALT
    exe = device.load(programs.executable({"main": code}, ["out", "value"]))
    assert exe.args == ("out", "value") and list(exe.kernels) == ["main"]
    out = device.buffer(8)
    value = 0xFEDC_BA98_7654_3210
    queue.prepare(exe, {"value": value, "out": out}).submit(cookie=9).wait()
    assert word(out.map()) == value


def test_sixteen_arguments_and_two_kernels(device: Device, queue: Queue) -> None:
    names = [f"a{index}" for index in range(16)]
    exe = device.load(
        programs.executable(
            {
                "last": programs.store_argument(0, 15) + programs.HALT,
                "first": programs.store_argument(0, 1) + programs.HALT,
            },
            names,
        )
    )
    out = device.buffer(8)
    words = [out, *range(101, 116)]
    for kernel, expected in (("first", 101), ("last", 115)):
        queue.prepare(exe, words, kernel).submit().wait()
        assert word(out.map()) == expected


def test_a_launch_is_submitted_many_times(
    device: Device, queue: Queue, counter: Executable
) -> None:
    buffer = device.buffer(16, hbm=True)
    first = queue.prepare(counter, {"word": buffer})
    second = queue.prepare(counter, {"word": buffer.va + 8}, timed=True)
    for _ in range(50):
        first.submit()
        second.submit().wait()
    assert [word(buffer.map(), index) for index in (0, 1)] == [50, 50]
    assert 0 < second.device_ns < 10_000_000_000


def test_wrong_arguments_are_named(device: Device, queue: Queue, counter: Executable) -> None:
    from vtpu.runtime import TpuInvalidError

    with pytest.raises(TpuInvalidError, match=r"missing: word; unknown: wrod"):
        queue.prepare(counter, {"wrod": 1})
    with pytest.raises(TpuInvalidError, match="takes 1 arguments, not 2"):
        queue.prepare(counter, [1, 2])
    with pytest.raises(TpuInvalidError, match="no kernel 'main'"):
        queue.prepare(counter, [1], "main")


# ---- Failures ----


def test_a_fault_is_told_in_the_models_words(device: Device, queue: Queue) -> None:
    from vtpu.runtime import TpuFaultError

    where = [(0, "load", "model.embed"), (64, "rms_norm", "model.layers.3.norm")]
    code = programs.store(0, 5) + programs.store(1, 6) + programs.HALT
    exe = device.load(
        programs.executable({"step": code}, ["good", "bad"], pc_map=programs.operation_map(where))
    )
    good = device.buffer(64)
    bad = device.info.va_start + (1 << 40)
    launch = queue.prepare(exe, {"good": good, "bad": bad})
    before = queue.fill(good, 64, 1)
    fence = launch.submit(cookie=77)
    before.wait()
    with pytest.raises(TpuFaultError, match=r"unmapped.*rms_norm, model\.layers\.3\.norm") as info:
        fence.wait()
    detail = info.value.detail
    assert detail is not None
    assert (detail.cause, detail.access, detail.address) == ("unmapped", "write", bad)
    assert (detail.pc, detail.cookie, detail.kernel) == (64, 77, "step")
    assert (detail.operation, detail.module) == ("rms_norm", "model.layers.3.norm")
    assert good.read(0, 4) == b"\5\0\0\0"
    state = queue.state
    assert state.status == "fault" and state.completed == 1
    assert state.fault is not None and state.fault.cause == "unmapped"


def test_a_failed_queue_refuses_until_recovered(device: Device, queue: Queue) -> None:
    from vtpu.runtime import TpuCancelledError, TpuFaultError

    buffer = device.buffer(64)
    faulty = queue.fill(0x1000, 4)
    with pytest.raises(TpuFaultError):
        faulty.wait()
    with pytest.raises(TpuFaultError, match="recover it or create another"):
        queue.fill(buffer, 64)
    # Another queue of the same device has not noticed.
    device.queue().fill(buffer, 64, 3).wait()
    queue.recover()
    queue.recover()
    assert queue.state.status == "ok"
    queue.fill(buffer, 64, 4).wait()
    assert buffer.read(0, 1) == b"\4"
    with pytest.raises((TpuFaultError, TpuCancelledError)):
        faulty.wait()
    assert faulty.done()


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (programs.trap(0x1234), "trap"),
        (b"\xff" + bytes(63), "illegal instruction"),
        (programs.instruction("JMP", (0, 1 << 16)), "pc range"),
    ],
)
def test_programs_that_fault(device: Device, queue: Queue, code: bytes, cause: str) -> None:
    from vtpu.runtime import TpuFaultError

    exe = device.load(programs.executable({"bad": code}, []))
    with pytest.raises(TpuFaultError) as info:
        queue.prepare(exe, []).submit().wait()
    assert info.value.detail is not None and info.value.detail.cause == cause
    if cause == "trap":
        assert info.value.detail.address == 0x1234


def test_rights_are_the_hardwares(device: Device, queue: Queue, counter: Executable) -> None:
    from vtpu.runtime import TpuFaultError

    constant = device.buffer(4096, hbm=True, read_only=True)
    code = counter.kernels["count"].va
    for target in (constant.va, code):
        with pytest.raises(TpuFaultError) as info:
            queue.fill(target, 64).wait()
        assert info.value.detail is not None and info.value.detail.cause == "protection"
        queue.recover()


def test_a_closed_buffer_faults_its_user(device: Device, queue: Queue) -> None:
    from vtpu.runtime import TpuFaultError

    buffer = device.buffer(4096, hbm=True)
    va = buffer.va
    queue.fill(va, 4096).wait()
    buffer.close()
    with pytest.raises(TpuFaultError) as info:
        queue.fill(va, 4096).wait()
    assert info.value.detail is not None and info.value.detail.cause == "unmapped"


def test_a_hang_ends_in_time_and_alone(device: Device, counter: Executable) -> None:
    from vtpu.runtime import TpuCancelledError, TpuHangError

    spin = device.load(programs.executable({"spin": programs.SPIN}, []))
    buffer = device.buffer(8, hbm=True)
    hung = device.queue(timeout_ms=HANG_MS)
    fence = hung.prepare(spin, []).submit(cookie=5)
    behind = hung.fill(buffer, 8, 1)
    start = time.monotonic()
    with pytest.raises(TpuHangError, match="time limit") as info:
        fence.wait()
    assert time.monotonic() - start < 10
    assert info.value.detail is not None and info.value.detail.cookie == 5
    with pytest.raises(TpuCancelledError, match="behind point 1"):
        behind.wait()
    assert hung.state.status == "hung"
    hung.recover()
    hung.prepare(counter, [buffer]).submit().wait()
    assert word(buffer.map()) == 1


# ---- Lifetimes ----


def test_closing_the_device_closes_all(open_device: Callable[[], Device]) -> None:
    from vtpu.runtime import TpuInvalidError

    device = open_device()
    exe = device.load(programs.executable({"count": programs.add_one(0) + programs.HALT}, ["w"]))
    queue = device.queue()
    buffer = device.buffer(64, name="late")
    launch = queue.prepare(exe, [buffer])
    fence = launch.submit()
    fence.wait()
    view = buffer.map()
    device.close()
    device.close()
    for use in (
        lambda: device.buffer(1),
        device.queue,
        device.memory,
        device.stats,
        lambda: buffer.va,
        lambda: queue.fill(0, 4),
        lambda: queue.state,
        launch.submit,
        fence.wait,
        lambda: queue.prepare(exe, [0]),
    ):
        with pytest.raises(TpuInvalidError, match="closed"):
            use()
    assert view.cast("Q")[0] == 1


def test_dropping_everything_in_flight(open_device: Callable[[], Device]) -> None:
    for _ in range(5):
        device = open_device()
        buffer = device.buffer(8 << 20, hbm=True)
        queue = device.queue()
        for _ in range(10):
            queue.fill(buffer, 8 << 20)
        del device, buffer, queue
        gc.collect()


def test_queues_run_out_cleanly(device: Device) -> None:
    from vtpu.runtime import TpuError

    queues: list[Queue] = []
    with pytest.raises(TpuError):
        while len(queues) < 4096:
            queues.append(device.queue())
    assert queues
    for queue in queues:
        queue.close()
    buffer = device.buffer(64)
    device.queue().fill(buffer, 64).wait()


def test_threads_share_a_device(device: Device, counter: Executable) -> None:
    buffer = device.buffer(4 * 8, hbm=True)
    shared = device.queue()
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            own = device.queue()
            mine = own.prepare(counter, [buffer.va + index * 8])
            both = shared.prepare(counter, [buffer.va + 24])
            for _ in range(100):
                both.submit().wait()
                mine.submit().wait()
                device.buffer(4096).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [word(buffer.map(), index) for index in range(4)] == [100, 100, 100, 300]


def test_stats_count(device: Device, queue: Queue, counter: Executable) -> None:
    buffer = device.buffer(8)
    before = device.stats()
    queue.prepare(counter, [buffer], timed=True).submit().wait()
    after = device.stats()
    assert after.jobs_submitted == before.jobs_submitted + 1
    assert after.commands_submitted == before.commands_submitted + 3
    if after.has_counters:
        assert after.programs == before.programs + 1
        assert after.instructions == before.instructions + 4
