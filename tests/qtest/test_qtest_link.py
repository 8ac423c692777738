# SPDX-License-Identifier: MIT
"""The inter-chip link: two devices of one QEMU, and of two that share a socket."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from asm import R, ins, program, remote_store
from qtest import (
    EXEC,
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
from vtpu_compiler import hw

TABLES, CODE, DATA = 0x100000, 0x200000, 0x300000
FABRIC = ("-device", "vtpu-fabric,id=f0,shape=2")
Start = Callable[..., list["Chip"]]


class Chip:
    """A device with one context (code, a writable page of HBM, one of RAM) and one queue."""

    def __init__(self, vtpu: Vtpu) -> None:
        self.vtpu = vtpu
        self.setup()

    def setup(self) -> None:
        vtpu = self.vtpu
        self.space = AddressSpace(vtpu, 0, TABLES)
        self.code = self.space.map(0, CODE, EXEC)
        self.page = self.space.map(1, DATA, READ | WRITE)
        self.ram = vtpu.ram + 0x40000
        self.ram_page = self.space.map(2, self.ram, READ | WRITE, hbm=False)
        vtpu.set("LINK_ACCEPT", 3)
        vtpu.set("LINK_CTRL", D["LINK_CTRL_ENABLE"])
        vtpu.enable()
        self.queue = Queue(vtpu, 0)

    def _load(self, *code: bytes) -> bytes:
        words = program(*code)
        self.vtpu.hbm_write(CODE, words)
        return self.queue.run(self.code, len(words))

    def run(self, *code: bytes) -> None:
        self.queue.do("RUN", self._load(*code))

    def start(self, *code: bytes) -> int:
        """Returns the fence; the program has begun."""
        fence = self.queue.push("RUN", self._load(*code))
        wait_for(lambda: self.queue.state in ("RUNNING", "PREEMPTED"), "begun", self.vtpu)
        return fence

    def link_fault(self) -> tuple[str, int]:
        """(reason, chip), once the queue has faulted; a new queue then."""
        self.vtpu.wait_interrupt(0)
        wait_for(lambda: self.queue.state == "FAULTED", "fault", self.vtpu)
        assert self.queue.cause == "LINK"
        word = self.queue.reg("FAULT_ADDR", 8)
        self.queue.reset()
        self.vtpu.set("ERR_QUEUES", 1)
        self.queue = Queue(self.vtpu, 0)
        reason = next(name for name, value in hw.LINK_REASON.items() if value == word >> 56)
        return reason, word >> 48 & 0xFF

    def counter(self, index: int) -> int:
        return self.vtpu.read(D["REG_LINK_COUNTER"] + 8 * index, 8)

    def wait_peers(self, mask: int) -> None:
        wait_for(lambda: self.vtpu.reg("LINK_PEERS") == mask, f"peers {mask}", self.vtpu)


@pytest.fixture
def start(qemu_command: list[str], tmp_path: Path) -> Iterator[Start]:
    """Starts a QEMU with devices for the given chips; further options first."""
    with ExitStack() as stack:

        def make(name: str, chips: tuple[int, ...], *options: str) -> list[Chip]:
            folder = tmp_path / name
            folder.mkdir()
            settings = {"hbm_size": "64M", "threads": "1", "fabric": "f0"}
            devices = [
                word
                for n, chip in enumerate(chips)
                for word in device_arguments(n, **settings, chip=str(chip))
            ]
            qemu = stack.enter_context(Qemu(qemu_command, folder, *options, *devices))
            return [Chip(Vtpu(qemu, n)) for n in range(len(chips))]

        yield make


def store(dst: int, src: int, size: int, counter: int = 1) -> bytes:
    """To the other chip, which counts it."""
    return remote_store(1, dst, src, size, counter)


def wait(value: int, chip: int) -> bytes:
    return ins("LINK_WAIT", counter=1, value=value, chip=chip)


SIGNAL = ins("REMOTE_SIGNAL", chip=0, counter=1, add=1)


def exchange(a: Chip, b: Chip) -> None:
    """Stores to HBM and to RAM, and a wait that the other one satisfies."""
    data = os.urandom(4096)
    a.vtpu.hbm_write(DATA, data)
    base = a.counter(1), b.counter(1)
    fence = a.start(
        store(b.page, a.page, 4096), store(b.ram_page, a.page, 4096), wait(base[0] + 1, 1)
    )
    b.run(wait(base[1] + 2, 0), SIGNAL)
    assert b.vtpu.hbm_read(DATA, 4096) == data
    assert b.vtpu.qemu.read(b.ram, 4096) == data
    a.vtpu.wait_interrupt(a.queue.vector)
    assert a.queue.fence == fence


# --- one QEMU ---


def test_two_devices_exchange(start: Start) -> None:
    a, b = start("one", (0, 1), *FABRIC)
    assert [chip.vtpu.reg("LINK_ID") & 0xFF for chip in (a, b)] == [0, 1]
    exchange(a, b)
    words = a.vtpu.qemu.qmp("qom-get", path="/machine/peripheral/f0", property="state")
    assert "chip 1: enabled" in words and "link: chip 0, enabled" in a.vtpu.property("state")


def test_cables_fail_by_properties(start: Start) -> None:
    a, b = start("one", (0, 1), *FABRIC)

    def cable(name: str, value: int) -> None:
        a.vtpu.qemu.qmp("qom-set", path="/machine/peripheral/f0", property=name, value=value)

    cable("chip0-x+-corrupt", 1)
    a.run(ins("REMOTE_SIGNAL", chip=1, counter=1, add=1))
    assert a.vtpu.read(D["REG_LINK_CRC_ERRORS"], 8) == 1
    cable("chip1-x--down", 1)
    cable("chip1-x+-down", 1)
    assert a.vtpu.reg("LINK_STATUS") == D["LINK_STATUS_ENABLED"]
    b.queue.push("RUN", b._load(SIGNAL))
    assert b.link_fault() == ("NO_ROUTE", 0)
    with pytest.raises(RuntimeError, match=r"chip0-x\+-down cannot be 2: it is 0 to 1"):
        cable("chip0-x+-down", 2)


def test_the_other_device_is_unplugged(start: Start) -> None:
    a, b = start("one", (0, 1), *FABRIC)
    a.start(wait(1, 1))
    b.vtpu.qemu.qmp("device_del", id="tpu1")
    b.vtpu.cut_power()
    assert a.link_fault() in (("REFUSED", 1), ("LOST", 1))  # it is reset, then gone
    wait_for(lambda: a.vtpu.reg("LINK_ERR") == D["LINK_ERR_PEER_LOST"], "error", a.vtpu)
    a.queue.push("RUN", a._load(wait(1, 1)))
    assert a.link_fault() == ("LOST", 1)


def test_the_other_device_is_reset(start: Start) -> None:
    """By the function-level reset, while it is stored to."""
    a, b = start("one", (0, 1), *FABRIC)
    a.start(store(b.ram_page, a.page, 4096), ins("JMP", target=0))
    wait_for(lambda: b.vtpu.reg("LINK_RX_PACKETS", 8) > 10, "traffic", a.vtpu)
    control = b.vtpu.pci.capability(0x10) + 8
    b.vtpu.pci.write(control, b.vtpu.pci.read(control, 2) | 0x8000, 2)
    b.vtpu.setup()
    b.vtpu.wait_reset()
    b.vtpu.qemu.write(b.ram, bytes(4096))
    assert a.link_fault() == ("REFUSED", 1)
    assert b.vtpu.qemu.read(b.ram, 4096) == bytes(4096)
    b.setup()
    exchange(a, b)


def test_the_link_reaches_no_registers(start: Start) -> None:
    """Not by a page that leads to the receiver's own BAR."""
    a, b = start("one", (0, 1), *FABRIC)
    va = b.space.map(3, b.vtpu.regs, READ | WRITE, hbm=False)
    a.queue.push("RUN", a._load(store(va, a.page, 4096)))
    assert a.link_fault() == ("BUS", 1)
    assert b.vtpu.reg("LINK_RX_REASON") == hw.LINK_REASON["BUS"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("vtpu-fabric,id=f0",), "shape is required"),
        (("vtpu-fabric,id=f0,shape=5x5",), "shape '5x5': the shape is X or XxY"),
        (("vtpu-fabric,id=f0,shape=2,chardev=no",), "chardev 'no' cannot be served by a thread"),
        ((FABRIC[1], "vtpu,fabric=f0,chip=2"), "chip must be below 2"),
        ((FABRIC[1], "vtpu,fabric=f0", "vtpu,fabric=f0"), "chip: the fabric has that one already"),
        (("vtpu,fabric=f0",), "f0"),
    ],
)
def test_bad_properties(qemu_command: list[str], options: tuple[str, ...], message: str) -> None:
    words = [word for option in options for word in ("-device", option)]
    done = subprocess.run(
        [
            *(*qemu_command, "-machine", "q35,accel=qtest", "-nodefaults", "-display", "none"),
            *("-chardev", "null,id=no", *words),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and message in done.stderr, done.stderr


def test_migration_is_refused(start: Start, tmp_path: Path) -> None:
    (a, _) = start("one", (0, 1), *FABRIC)
    with pytest.raises(RuntimeError, match="vtpu"):
        a.vtpu.qemu.qmp("migrate", uri=f"file:{tmp_path}/state")


# --- two QEMUs ---


def side(path: Path, server: bool) -> tuple[str, ...]:
    role = "server=on,wait=off" if server else "server=off,reconnect-ms=100"
    return (
        *("-chardev", f"socket,id=c0,path={path},{role}"),
        *("-device", "vtpu-fabric,id=f0,shape=2,chardev=c0"),
    )


def test_two_processes_exchange(start: Start, tmp_path: Path) -> None:
    (a,) = start("a", (0,), *side(tmp_path / "link", True))
    assert a.vtpu.reg("LINK_PEERS") == 1
    (b,) = start("b", (1,), *side(tmp_path / "link", False))
    a.wait_peers(3)
    b.wait_peers(3)
    exchange(a, b)
    # Much at once: the window and the socket's buffers fill.
    a.run(
        ins("LI", rd=9, value=0),
        store(b.page, a.page, 4096, counter=2),
        ins("ADD", rd=9, a=R(9), b=1),
        ins("BLT", a=R(9), b=2000, target=64),
    )
    assert b.counter(2) == 2000


def test_a_killed_peer_is_lost_and_comes_back(start: Start, tmp_path: Path) -> None:
    (a,) = start("a", (0,), *side(tmp_path / "link", True))
    for name in ("b", "c"):
        (b,) = start(name, (1,), *side(tmp_path / "link", False))
        a.wait_peers(3)
        exchange(a, b)
        a.start(wait(100, 1))
        b.vtpu.qemu.kill()
        assert a.link_fault() == ("LOST", 1)
        wait_for(lambda: a.vtpu.reg("LINK_ERR") == D["LINK_ERR_PEER_LOST"], "error", a.vtpu)
        a.vtpu.set("LINK_ERR", D["LINK_ERR_PEER_LOST"])
        assert a.vtpu.reg("LINK_PEERS") == 1
        a.vtpu.clear_interrupt(0)


def test_a_killed_server_comes_back(start: Start, tmp_path: Path) -> None:
    """The client's side of the same; stores are in flight."""
    (b,) = start("b", (1,), *side(tmp_path / "link", True))
    (a,) = start("a", (0,), *side(tmp_path / "link", False))
    a.wait_peers(3)
    a.start(store(b.page, a.page, 4096), ins("JMP", target=0))
    wait_for(lambda: b.counter(1) > 10, "traffic", a.vtpu)
    b.vtpu.qemu.kill()
    assert a.link_fault() == ("LOST", 1)
    (b,) = start("c", (1,), *side(tmp_path / "link", True))
    a.wait_peers(3)
    a.vtpu.clear_interrupt(0)
    exchange(a, b)


def test_noise_on_the_socket(start: Start, tmp_path: Path) -> None:
    """Garbage, silence and a half frame end or keep a connection, and nothing else."""
    (a,) = start("a", (0,), *side(tmp_path / "link", True))
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 8, os.urandom(100_000), b"VTLK", b""):
        with socket.socket(socket.AF_UNIX) as noise:
            noise.settimeout(60)
            noise.connect(str(tmp_path / "link"))
            greeting = noise.recv(40, socket.MSG_WAITALL)
            assert greeting[:4] == b"VTLK" and greeting[6:8] == struct.pack("<BB", 1, 0)
            try:
                noise.sendall(data)
                if len(data) > 100:
                    while noise.recv(4096):
                        pass
            except ConnectionError:
                pass
        assert a.vtpu.reg("LINK_PEERS") == 1
        a.run(ins("REMOTE_SIGNAL", chip=0, counter=3, add=1))
    (b,) = start("b", (1,), *side(tmp_path / "link", False))
    a.wait_peers(3)
    exchange(a, b)
