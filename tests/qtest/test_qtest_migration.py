# SPDX-License-Identifier: MIT
"""Stop and continue, snapshots and live migration of the PCIe device with work in flight."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import gated
import pytest
from asm import R, ins, program
from qtest import (
    COMMAND,
    COMMAND_MEMORY,
    EXEC,
    RAM,
    READ,
    WRITE,
    AddressSpace,
    D,
    Qemu,
    Queue,
    Vtpu,
    device_arguments,
    wait_for,
)

TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000
HBM_BYTES = 32 << 20
Start = Callable[..., Vtpu]


@pytest.fixture
def start(qemu_command: list[str], tmp_path: Path) -> Iterator[Start]:
    """Starts one more QEMU. `incoming`: it waits for a migration."""
    with ExitStack() as stack:
        count = 0

        def make(*options: str, incoming: bool = False, **properties: str) -> Vtpu:
            nonlocal count
            folder = tmp_path / str(count)
            folder.mkdir()
            count += 1
            settings = {"hbm_size": str(HBM_BYTES), "threads": "2"} | properties
            more = ("-incoming", "defer") if incoming else ()
            qemu = stack.enter_context(
                Qemu(qemu_command, folder, *options, *device_arguments(**settings), *more)
            )
            vtpu = Vtpu(qemu, set_up=not incoming)
            if not incoming:
                vtpu.enable()
            return vtpu

        yield make


def _status(qemu: Qemu) -> str:
    return str(qemu.qmp("query-migrate").get("status"))


def _ended(qemu: Qemu) -> bool:
    return _status(qemu) in ("completed", "failed", "cancelled")


def _begin(source: Vtpu, target: Vtpu, path: Path) -> None:
    uri = f"unix:{path}/migrate-{random.getrandbits(32):x}"
    target.qemu.qmp("migrate-incoming", uri=uri)
    source.qemu.qmp("migrate", uri=uri)


def _migrate(source: Vtpu, target: Vtpu, path: Path) -> None:
    """Until the target runs."""
    _begin(source, target, path)
    wait_for(lambda: _ended(source.qemu), "the migration's end")
    assert _status(source.qemu) == "completed", source.qemu.qmp("query-migrate")
    wait_for(lambda: target.qemu.qmp("query-status")["running"], "the target runs")


def _at(vtpu: Vtpu, queue: Queue) -> Queue:
    """The queue's handle on another device."""
    copy = Queue.__new__(Queue)
    copy.__dict__.update(queue.__dict__)
    copy.vtpu = vtpu
    return copy


def _map(
    space: AddressSpace, page: int, target: int, pages: int, rights: int, *, hbm: bool = True
) -> int:
    """Pages from number `page` on; returns the address of the first."""
    for n in range(pages):
        space.map(page + n, target + n * 4096, rights, hbm=hbm)
    return space.BASE + page * 4096


class _Gated:
    """The gated program on queue 0 of context 0, in pages of HBM."""

    def __init__(self, vtpu: Vtpu) -> None:
        space = AddressSpace(vtpu, 0, TABLES)
        self.va = _map(space, 0, DATA, gated.BYTES // 4096, READ | WRITE)
        self.code = gated.code(self.va)
        code_va = _map(space, 100, CODE, (len(self.code) + 4095) // 4096, EXEC)
        vtpu.hbm_write(DATA, gated.data())
        vtpu.hbm_write(CODE, self.code)
        self.space, self.queue, self._code_va = space, Queue(vtpu, 0), code_va

    def run(self) -> None:
        self.queue.push("RUN", self.queue.run(self._code_va, len(self.code)))

    def wait_gate(self, vtpu: Vtpu, phase: int) -> None:
        at = gated.progress(DATA)
        wait_for(lambda: vtpu.hbm_read(at, 8) == struct.pack("<Q", phase), f"gate {phase}", vtpu)

    def open(self, vtpu: Vtpu, phases: int) -> None:
        vtpu.hbm_write(gated.gate(DATA), gated.open_gate(phases))

    def results(self, vtpu: Vtpu) -> bytes:
        return gated.results(vtpu.hbm_read(DATA, gated.BYTES))


@pytest.fixture
def expected(start: Start) -> bytes:
    """What the program computes when nobody disturbs it."""
    vtpu = start()
    job = _Gated(vtpu)
    job.open(vtpu, gated.PHASES)
    job.run()
    vtpu.wait_interrupt(job.queue.vector)
    return job.results(vtpu)


def test_stop_and_continue(start: Start, expected: bytes) -> None:
    """The machine is at rest in between, and its time stands still."""
    vtpu = start()
    job = _Gated(vtpu)
    job.run()
    for phase in range(gated.PHASES):
        job.wait_gate(vtpu, phase + 1)
        vtpu.qemu.qmp("stop")
        job.open(vtpu, phase + 1)
        time, count = vtpu.reg("TIME", 8), vtpu.reg("STAT_INSTRUCTIONS", 8)
        for _ in range(50):
            assert vtpu.reg("TIME", 8) == time and vtpu.reg("STAT_INSTRUCTIONS", 8) == count
        vtpu.qemu.qmp("cont")
    vtpu.wait_interrupt(job.queue.vector)
    assert vtpu.reg("TIME", 8) > time
    assert job.results(vtpu) == expected


@pytest.mark.parametrize("paths", [("avx512", "scalar"), ("scalar", "avx2")], ids=str)
def test_a_program_moves_several_times(
    start: Start, expected: bytes, tmp_path: Path, paths: tuple[str, str]
) -> None:
    """At every gate, each time to a new process, with another vector path."""
    try:
        vtpu = start(isa_path=paths[0])
    except (ConnectionError, OSError):
        pytest.skip("this host has no such path")
    job = _Gated(vtpu)
    job.run()
    for phase in range(gated.PHASES):
        job.wait_gate(vtpu, phase + 1)
        target = start(incoming=True, isa_path=paths[(phase + 1) % 2], threads=str(1 + phase % 2))
        _migrate(vtpu, target, tmp_path)
        assert job.results(target) == job.results(vtpu)
        vtpu = target
        job.open(vtpu, phase + 1)
    vtpu.wait_interrupt(job.queue.vector)
    assert job.results(vtpu) == expected


def _snapshot_disk(qemu: Qemu, path: Path) -> None:
    """An empty qcow2 image, made by QEMU itself."""
    path.touch()
    qemu.qmp("blockdev-add", driver="file", filename=str(path), **{"node-name": "file"})
    qemu.qmp(
        "blockdev-create",
        **{"job-id": "create", "options": {"driver": "qcow2", "file": "file", "size": 1 << 20}},
    )
    _job(qemu, "create")
    qemu.qmp("blockdev-add", driver="qcow2", file="file", **{"node-name": "disk"})


def _job(qemu: Qemu, name: str) -> None:
    def job() -> dict[str, str]:
        return next(j for j in qemu.qmp("query-jobs") if j["id"] == name)

    wait_for(lambda: job()["status"] == "concluded", f"job {name}")
    assert "error" not in job(), job()
    qemu.qmp("job-dismiss", id=name)


def _snapshot(qemu: Qemu, verb: str, tag: str) -> None:
    words = {"job-id": verb, "tag": tag, "vmstate": "disk", "devices": ["disk"]}
    qemu.qmp(f"snapshot-{verb}", **words)
    _job(qemu, verb)


def test_savevm_and_loadvm(start: Start, expected: bytes, tmp_path: Path) -> None:
    """Back to the second gate twice, from behind it, from the end and from a new process."""
    vtpu = start()
    _snapshot_disk(vtpu.qemu, tmp_path / "disk.qcow2")
    job = _Gated(vtpu)
    job.run()
    job.wait_gate(vtpu, 1)
    job.open(vtpu, 1)
    job.wait_gate(vtpu, 2)
    _snapshot(vtpu.qemu, "save", "second")
    assert vtpu.qemu.qmp("query-status")["running"], "savevm does not stop the machine for good"
    job.open(vtpu, 2)
    job.wait_gate(vtpu, 3)
    for _ in range(2):
        _snapshot(vtpu.qemu, "load", "second")
        assert vtpu.hbm_read(gated.progress(DATA), 8) == struct.pack("<Q", 2)
        job.open(vtpu, gated.PHASES)
        vtpu.wait_interrupt(job.queue.vector)
        assert job.results(vtpu) == expected
        assert vtpu.reg("STAT_PROGRAMS", 8) == 1


def test_a_copy_in_flight(start: Start, tmp_path: Path) -> None:
    """Many copies from system memory, a migration in their midst, and each has its data."""
    source, target = start(), start(incoming=True)
    rng = random.Random(1)
    space = AddressSpace(source, 0, TABLES)
    pages = 256
    data = rng.randbytes(pages * 4096)
    source.qemu.write(RAM + 0x100000, data[: 512 << 10])
    source.qemu.write(RAM + 0x180000, data[512 << 10 :])
    ram = _map(space, 0, RAM + 0x100000, pages, READ, hbm=False)
    hbm = _map(space, pages, 0x1000000, pages, READ | WRITE)
    source.inject("hbm-slow", 200)
    queue = Queue(source, 0)
    for _ in range(12):
        queue.push("FILL", struct.pack("<QQI", hbm, pages * 4096, 0), flags=0)
        last = queue.push("COPY", struct.pack("<QQQ", hbm, ram, pages * 4096))
        if queue.tail - queue.reg("HEAD") > 12:
            break
    _migrate(source, target, tmp_path)
    moved = _at(target, queue)
    assert source.qemu.load(queue.fence_at, 8) < last, "it was over before"
    target.inject("hbm-slow", 1)
    wait_for(lambda: moved.fence == last, "the last copy", target)
    assert target.hbm_read(0x1000000, len(data)) == data


def test_a_held_wait_and_a_masked_vector(start: Start, tmp_path: Path) -> None:
    source, target = start(), start(incoming=True)
    space = AddressSpace(source, 0, TABLES)
    word = space.map(0, DATA, READ | WRITE)
    queue = Queue(source, 0)
    queue.push("WAIT", struct.pack("<QQ", word, 9))
    wait_for(lambda: "waits for a word" in source.property("state"), "held")
    source.mask(5, True)
    source.set("TEST_IRQ", 5)
    wait_for(lambda: source.pending(5), "pending")
    faulted = Queue(source, 7)
    assert faulted.expect_fault("NOP", b"\1") == "BAD_COMMAND"
    source.inject("irq-loss", 0)
    _migrate(source, target, tmp_path)
    assert target.pending(5) and not target.interrupted(5)
    target.mask(5, False)
    target.wait_interrupt(5)
    assert not target.pending(5)
    moved = _at(target, faulted)
    assert moved.state == "FAULTED" and moved.cause == "BAD_COMMAND"
    assert target.reg("ERR_QUEUES") == 1 << 7
    moved.reset()
    target.set("ERR_QUEUES", 1 << 7)
    Queue(target, 7).do("NOP")
    waiting = _at(target, queue)
    assert waiting.fence == 0
    target.hbm_write(DATA, struct.pack("<Q", 9))
    target.wait_interrupt(queue.vector)
    assert waiting.fence == 1


def test_a_reset_while_parked_and_after_a_load(
    start: Start, expected: bytes, tmp_path: Path
) -> None:
    """What was in flight is gone, wherever it was; a load brings it back."""
    vtpu = start()
    _snapshot_disk(vtpu.qemu, tmp_path / "disk.qcow2")
    job = _Gated(vtpu)
    job.run()
    job.wait_gate(vtpu, 1)
    _snapshot(vtpu.qemu, "save", "first")
    resets = 0

    def by_register() -> None:
        vtpu.set("CTRL", D["CTRL_RESET"])

    def by_function() -> None:
        vtpu.pci.write(vtpu.pci.capability(0x10) + 8, 0x8000, 2)
        vtpu.setup()

    def by_machine() -> None:
        vtpu.qemu.qmp("system_reset")
        wait_for(lambda: vtpu.port.read(COMMAND, 2) & COMMAND_MEMORY == 0, "machine reset")
        vtpu.setup()

    for reset in (by_register, by_function, by_machine):
        for parked in (True, False):
            if parked:
                vtpu.qemu.qmp("stop")
            reset()
            if parked:
                # At rest it is over at once; and it has ended when the machine goes on.
                assert not vtpu.reg("STATUS") & D["STATUS_RESETTING"]
                vtpu.qemu.qmp("cont")
            vtpu.wait_reset()
            resets += 1
            assert job.queue.state == "DISABLED"
            job.open(vtpu, gated.PHASES)
            vtpu.enable()
            AddressSpace(vtpu, 0, TABLES)
            Queue(vtpu, 1).do("NOP")
            assert job.queue.fence == 0 and not vtpu.interrupted(job.queue.vector)
            assert vtpu.hbm_read(gated.progress(DATA), 8) == struct.pack("<Q", 1)
            _snapshot(vtpu.qemu, "load", "first")
    job.open(vtpu, gated.PHASES)
    vtpu.wait_interrupt(job.queue.vector)
    assert job.results(vtpu) == expected


def _slow(source: Vtpu) -> None:
    """So slow a migration that it does not end by itself."""
    source.qemu.qmp("migrate-set-parameters", **{"max-bandwidth": 1 << 20})


def test_a_reset_while_the_migration_is_under_way(start: Start, tmp_path: Path) -> None:
    source, target = start(), start(incoming=True)
    job = _Gated(source)
    job.run()
    job.wait_gate(source, 1)
    _slow(source)
    _begin(source, target, tmp_path)
    wait_for(lambda: _status(source.qemu) == "active", "under way")
    source.set("CTRL", D["CTRL_RESET"])
    source.wait_reset()
    source.enable()
    AddressSpace(source, 0, TABLES)
    job.open(source, gated.PHASES)
    after = Queue(source, 1)
    after.do("NOP")
    assert _status(source.qemu) == "active", "it ended before the reset"
    source.qemu.qmp("migrate-set-parameters", **{"max-bandwidth": 1 << 34})
    wait_for(lambda: _ended(source.qemu), "the migration's end")
    wait_for(lambda: target.qemu.qmp("query-status")["running"], "the target runs")
    assert target.reg("RESET_COUNT") == source.reg("RESET_COUNT")
    assert _at(target, job.queue).state == "DISABLED" and _at(target, job.queue).fence == 0
    assert target.hbm_read(gated.progress(DATA), 8) == struct.pack("<Q", 1)
    _at(target, after).do("NOP")


@pytest.mark.parametrize("how", ["cancelled", "refused"])
def test_the_source_goes_on(start: Start, expected: bytes, tmp_path: Path, how: str) -> None:
    """After a migration that was cancelled, or that the target refused."""
    source = start()
    size = HBM_BYTES if how == "cancelled" else 2 * HBM_BYTES
    target = start(incoming=True, hbm_size=str(size))
    target.qemu.may_fail = True
    job = _Gated(source)
    job.run()
    for phase in range(1, gated.PHASES):
        job.wait_gate(source, phase)
        job.open(source, phase)
    job.wait_gate(source, gated.PHASES)
    if how == "cancelled":
        _slow(source)
        _begin(source, target, tmp_path)
        wait_for(lambda: _status(source.qemu) == "active", "under way")
        source.qemu.qmp("migrate_cancel")
    else:
        _begin(source, target, tmp_path)
    wait_for(lambda: _ended(source.qemu), "the migration's end")
    assert _status(source.qemu) == {"cancelled": "cancelled", "refused": "failed"}[how]
    wait_for(lambda: source.qemu.qmp("query-status")["running"], "the source runs")
    job.open(source, gated.PHASES)
    source.wait_interrupt(job.queue.vector)
    assert job.results(source) == expected
    target.qemu.process.wait(60)
    log = target.qemu.log.read_text(errors="replace")
    if how == "refused":
        assert "vtpu-hbm" in log and "Size mismatch" in log, log


def _whole_hbm(vtpu: Vtpu) -> bytes:
    return b"".join(vtpu.hbm_read(at, 1 << 20) for at in range(0, HBM_BYTES, 1 << 20))


class _Writers:
    """Everything that writes HBM behind the processor's back, each to pages of its own."""

    PAGES = 16
    SIZE = PAGES * 4096
    NUMBERS, ARGS = 0xC00000, 0xC01000  # HBM offsets

    def __init__(self, vtpu: Vtpu) -> None:
        self.vtpu = vtpu
        self.space = AddressSpace(vtpu, 0, TABLES)
        self.queue = Queue(vtpu, 0)
        self.rng = random.Random(7)
        self._next = 0
        vtpu.qemu.write(RAM + 0x100000, self.rng.randbytes(self.SIZE))
        self.ram = self._pages(RAM + 0x100000, hbm=False)
        self.areas = [self._pages(0x800000 + n * self.SIZE) for n in range(7)]
        # Each page apart from the next: no range of these addresses is one piece of HBM.
        pieces = [
            self._pages(0x1000000 + n * 7 % self.PAGES * 8192, pages=1) for n in range(self.PAGES)
        ]
        self.apart = pieces[0]
        self.code = self._program(self._pages(self.NUMBERS, pages=1))
        vtpu.hbm_write(CODE, self.code)
        self.code_va = self._pages(CODE, pages=(len(self.code) + 4095) // 4096, rights=EXEC)
        self.args = self._pages(self.ARGS, pages=1)

    def _pages(
        self, target: int, *, pages: int = PAGES, hbm: bool = True, rights: int = READ | WRITE
    ) -> int:
        first, self._next = self._next, self._next + pages
        return _map(self.space, first, target, pages, rights, hbm=hbm)

    def _program(self, numbers: int) -> bytes:
        """Stores in every way, what it stores being different each time."""

        def move(name: str, dst: int, src: int, rows: int, size: int, dst_stride: int) -> bytes:
            return ins(
                name,
                dst=dst,
                src=src,
                rows=rows,
                row_bytes=size,
                dst_stride=dst_stride,
                src_stride=0,
            )

        def scatter(fmt: str, table: int) -> bytes:
            return ins(
                "DMA_SCATTER",
                fmt=fmt,
                table=table,
                src=0,
                index=0x1000,
                count=4,
                width=1024,
                table_rows=self.PAGES,
                src_stride=0,
            )

        def stores(mode: str, to: int) -> list[bytes]:
            addresses = [to + n * 4096 for n in range(self.PAGES)]
            return [ins("ST", mode=mode, addr=at, value=R(8)) for at in addresses]

        return program(
            move("DMA_LOAD", 0, numbers, 1, 4096, 0),
            move("DMA_LOAD", 0x1000, numbers, 1, 64, 0),
            ins("SYNC"),
            move("DMA_STORE", self.areas[0], 0, self.PAGES, 4096, 4096),
            move("DMA_STORE", self.apart, 0, 1, 3 * 4096, 0),
            scatter("F32", self.areas[1]),
            scatter("BF16", self.apart + 3 * 4096 + 2048),
            ins("SYNC"),
            *stores("U64", self.areas[2] + 64),
            *stores("U32", self.areas[3] + 4),
        )

    def write(self, *, as_processor: bool = True) -> None:
        """Every writer once more, unless the queue is full. The processor stands still when
        the machine does, which a test that plays it does not know: at the end it keeps off."""
        vtpu, queue = self.vtpu, self.queue
        if queue.tail - queue.reg("HEAD") > 16 - 6:
            return
        if as_processor:
            numbers = struct.pack("<4I", *self.rng.sample(range(self.PAGES), 4))
            vtpu.hbm_write(self.NUMBERS, numbers + self.rng.randbytes(4080))
            vtpu.hbm_write(self.ARGS, struct.pack("<Q", self.rng.getrandbits(64)))
        run = struct.pack("<QIIQI", self.code_va, len(self.code), 0, self.args, 1)
        number = self.rng.getrandbits(32)
        size = self.SIZE
        queue.push("RUN", run, flags=0)
        queue.push("COPY", struct.pack("<QQQ", self.areas[4] + 8, self.ram, size - 8), flags=0)
        queue.push("COPY", struct.pack("<QQQ", self.areas[5], self.areas[0], size), flags=0)
        queue.push("FILL", struct.pack("<QQI", self.areas[6] + 4, size - 4, number), flags=0)
        queue.push("SIGNAL", struct.pack("<QQ", self.apart + 15 * 4096, number), flags=0)
        queue.push("TIMESTAMP", struct.pack("<Q", self.apart + 14 * 4096), flags=0)


def _backend() -> tuple[tuple[str, ...], dict[str, str]]:
    memory = f"memory-backend-memfd,id=hbm,size={HBM_BYTES},share=on"
    return ("-object", memory), {"hbm_memdev": "hbm"}


@pytest.mark.parametrize("memory", ["own", "backend"])
def test_what_the_engines_write_meanwhile_arrives(
    start: Start, tmp_path: Path, memory: str
) -> None:
    """Several passes over memory that is written all the time: in the end both sides have
    the same bytes, all of them."""
    options, properties = _backend() if memory == "backend" else ((), {})
    source = start(*options, **properties)
    target = start(*options, "-S", incoming=True, **properties)
    writers = _Writers(source)
    source.qemu.qmp("migrate-set-parameters", **{"max-bandwidth": 4 << 20, "downtime-limit": 1})
    _begin(source, target, tmp_path)

    def passes() -> int:
        ram = source.qemu.qmp("query-migrate").get("ram", {})
        return int(ram.get("dirty-sync-count", 0))

    while passes() < 5:
        writers.write()
        assert not _ended(source.qemu), "it ended too early"
    source.qemu.qmp("migrate-set-parameters", **{"max-bandwidth": 1 << 34, "downtime-limit": 2000})
    while not _ended(source.qemu):
        writers.write(as_processor=False)
    assert _status(source.qemu) == "completed"
    assert writers.queue.tail > 5 * 6 and writers.queue.state != "FAULTED", writers.queue.cause
    wait_for(lambda: target.qemu.qmp("query-status")["status"] == "paused", "loaded")
    assert _whole_hbm(target) == _whole_hbm(source)
    assert any(_whole_hbm(source)[0x1000000:])
