# SPDX-License-Identifier: MIT
"""A small client of QEMU's qtest and QMP sockets, and the vTPU behind a root port.

No guest runs: the test is the CPU. Waiting is on state, with a limit far above
what any machine needs.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

REPO = Path(__file__).parents[2]
LIMIT_S = 60.0


def _defines() -> dict[str, int]:
    header = REPO / "qemu-device" / "include" / "vtpu_hw.h"
    found = re.findall(r"#define VTPU_(\w+)\s+(0x[0-9a-f]+|\d+)u?\b", header.read_text())
    return {name: int(value, 0) for name, value in found}


D = _defines()


def wait_for(condition: Callable[[], bool], what: str, vtpu: Vtpu | None = None) -> None:
    """With a device at hand, a condition that never comes is reported with its state."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"never: {what}\n{vtpu.property('state') if vtpu else ''}")


class _Lines:
    """Lines over a socket that QEMU connects to."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.settimeout(LIMIT_S)
        self._buffer = b""

    def accept(self) -> None:
        self._socket, _ = self._listener.accept()
        self._listener.close()
        self._socket.settimeout(LIMIT_S)

    def send(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def receive(self) -> str:
        while b"\n" not in self._buffer:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("QEMU closed its socket")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def close(self) -> None:
        self._socket.close()


class Qemu:
    """A QEMU under qtest."""

    def __init__(self, command: list[str], folder: Path, *options: str) -> None:
        self._qtest, self._qmp = _Lines(folder / "qtest"), _Lines(folder / "qmp")
        self.log, self.killed = folder / "qemu.log", False
        self.may_fail = False  # a test that expects it to end with an error says so
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *command,
                    *("-machine", "q35,accel=qtest", "-m", "256", "-display", "none"),
                    *("-nodefaults", "-no-user-config", "-d", "guest_errors"),
                    *("-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off"),
                    *("-qtest", f"unix:{folder}/qtest", "-qtest-log", "none"),
                    *("-qmp", f"unix:{folder}/qmp"),
                    *options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._qtest.accept()
        self._qmp.accept()
        json.loads(self._qmp.receive())  # the greeting
        self.qmp("qmp_capabilities")

    def __enter__(self) -> Qemu:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.killed:
            return
        try:
            self.qmp("quit")
            assert self.process.wait(LIMIT_S) == 0
        except (OSError, ConnectionError):
            pass
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._qtest.close()
            self._qmp.close()
        if kind is None and not self.may_fail:
            assert self.process.returncode == 0, self.log.read_text(errors="replace")

    def kill(self) -> None:
        """As kill -9 does."""
        self.killed = True
        self.process.kill()
        self.process.wait()
        self._qtest.close()
        self._qmp.close()

    def qmp(self, command: str, **arguments: Any) -> Any:
        self._qmp.send(json.dumps({"execute": command, "arguments": arguments}))
        while True:
            answer = json.loads(self._qmp.receive())
            if "error" in answer:
                raise RuntimeError(answer["error"]["desc"])
            if "return" in answer:
                return answer["return"]

    def trace(self, event: str) -> None:
        """Writes a trace event, or a pattern of them, to the log from now on."""
        self.qmp("trace-event-set-state", name=event, enable=True)

    def traced(self, prefix: str) -> list[str]:
        """The events so far whose names begin so, without the log's own prefix."""
        text = self.log.read_text(errors="replace")
        return re.findall(rf"^(?:\S+ )?({prefix}\S* .*)$", text, re.M)

    def command(self, words: str) -> list[str]:
        self._qtest.send(words)
        while True:
            answer = self._qtest.receive().split()
            if answer[0] == "IRQ":
                continue
            assert answer[0] == "OK", f"{words}: {answer}"
            return answer[1:]

    def outl(self, port: int, value: int) -> None:
        self.command(f"outl {port:#x} {value:#x}")

    def inl(self, port: int) -> int:
        return int(self.command(f"inl {port:#x}")[0], 0)

    def read(self, addr: int, size: int) -> bytes:
        return bytes.fromhex(self.command(f"read {addr:#x} {size:#x}")[0][2:])

    def write(self, addr: int, data: bytes) -> None:
        self.command(f"write {addr:#x} {len(data):#x} 0x{data.hex()}")

    def load(self, addr: int, size: int) -> int:
        """One access of 4 or 8 bytes."""
        letter = {4: "l", 8: "q"}[size]
        return int(self.command(f"read{letter} {addr:#x}")[0], 0)

    def store(self, addr: int, value: int, size: int) -> None:
        letter = {4: "l", 8: "q"}[size]
        self.command(f"write{letter} {addr:#x} {value:#x}")


class Pci:
    """Configuration space of one function, by the 0xcf8 ports."""

    def __init__(self, qemu: Qemu, bus: int, slot: int, function: int = 0) -> None:
        self.qemu, self._base = qemu, 1 << 31 | bus << 16 | slot << 11 | function << 8

    def read(self, offset: int, size: int = 4) -> int:
        self.qemu.outl(0xCF8, self._base | (offset & ~3))
        return self.qemu.inl(0xCFC) >> 8 * (offset & 3) & ((1 << 8 * size) - 1)

    def write(self, offset: int, value: int, size: int = 4) -> None:
        if size == 4:
            self.qemu.outl(0xCF8, self._base | offset)
            self.qemu.outl(0xCFC, value)
            return
        letter = {1: "b", 2: "w"}[size]
        self.qemu.outl(0xCF8, self._base | (offset & ~3))
        self.qemu.command(f"out{letter} {0xCFC + (offset & 3):#x} {value:#x}")

    def capability(self, number: int) -> int:
        at = self.read(0x34, 1)
        while at:
            if self.read(at, 1) == number:
                return at
            at = self.read(at + 1, 1)
        raise AssertionError(f"no capability {number:#x}")


COMMAND, COMMAND_MEMORY, COMMAND_MASTER = 0x04, 2, 4
DEVICE = "/machine/peripheral/tpu"
# Where the first device is put; the others follow at these distances.
REGS, DOORBELLS, HBM_BAR = 0xC000_0000, 0xC010_0000, 0x80_0000_0000
NEXT_REGS, NEXT_HBM = 16 << 20, 64 << 30
MSIX_DATA_AT = 0x1F0_0000  # vector v's message lands in RAM at + 4 * v
RAM = 0x100_0000  # free for tests up to MSIX_DATA_AT; every device has RAM_SHARE of it
RAM_SHARE, NEXT_MSIX_DATA = 0x20_0000, 0x1000
VALID, READ, WRITE, EXEC, HBM = 1, 2, 4, 8, 16


def device_arguments(number: int = 0, **properties: str) -> tuple[str, ...]:
    """QEMU's arguments for the device of that number behind a root port of its own."""
    n = str(number) if number else ""
    words = "".join(f",{key.replace('_', '-')}={value}" for key, value in properties.items())
    port = f"pcie-root-port,id=rp{n},bus=pcie.0,addr={4 + number},chassis={1 + number}"
    return ("-device", port, "-device", f"vtpu,id=tpu{n},bus=rp{n}{words}")


class Vtpu:
    """The device, set up as a driver would: bridge windows, BARs, MSI-X into RAM."""

    def __init__(self, qemu: Qemu, number: int = 0, *, set_up: bool = True) -> None:
        """Not set up: one whose state is to be loaded."""
        self.qemu, self.bus = qemu, 1 + number
        self.port, self.pci = Pci(qemu, 0, 4 + number), Pci(qemu, self.bus, 0)
        self.regs, self.doorbells = REGS + number * NEXT_REGS, DOORBELLS + number * NEXT_REGS
        self.hbm = HBM_BAR + number * NEXT_HBM
        self.ram, self.msix_at = RAM + number * RAM_SHARE, MSIX_DATA_AT + number * NEXT_MSIX_DATA
        self.path = DEVICE + (str(number) if number else "")
        if set_up:
            self.setup()
            self.wait_reset()  # of power-on: what is written before it ends is lost

    def setup(self) -> None:
        port, pci = self.port, self.pci
        port.write(0x18, self.bus << 16 | self.bus << 8)  # its bus is behind it
        port.write(0x20, self.regs >> 16 | (self.regs + NEXT_REGS - 1 & 0xFFF0_0000))
        port.write(0x24, 0xFFF1_0001)  # prefetchable window, with the upper halves
        port.write(0x28, self.hbm >> 32)
        port.write(0x2C, self.hbm + NEXT_HBM - 1 >> 32)
        port.write(COMMAND, COMMAND_MEMORY | COMMAND_MASTER, 2)
        pci.write(0x10 + 4 * D["BAR_REGS"], self.regs)
        pci.write(0x10 + 4 * D["BAR_HBM"], self.hbm & 0xFFFFFFFF)
        pci.write(0x14 + 4 * D["BAR_HBM"], self.hbm >> 32)
        pci.write(0x10 + 4 * D["BAR_DOORBELL"], self.doorbells)
        pci.write(COMMAND, COMMAND_MEMORY | COMMAND_MASTER, 2)
        self.enable_msix()

    def enable_msix(self) -> None:
        for vector in range(D["NUM_MSIX"]):
            at = self.regs + D["MSIX_TABLE"] + 16 * vector
            self.qemu.store(at, self.msix_at + 4 * vector, 4)
            self.qemu.store(at + 4, 0, 4)
            self.qemu.store(at + 8, 0x1000 + vector, 4)
            self.qemu.store(at + 12, 0, 4)
        self.pci.write(self.pci.capability(0x11) + 2, 0x8000, 2)

    def mask(self, vector: int, masked: bool) -> None:
        self.qemu.store(self.regs + D["MSIX_TABLE"] + 16 * vector + 12, int(masked), 4)

    def pending(self, vector: int) -> bool:
        word = self.qemu.load(self.regs + D["MSIX_PBA"] + 8 * (vector // 64), 8)
        return bool(word >> vector % 64 & 1)

    def interrupted(self, vector: int) -> bool:
        return self.qemu.load(self.msix_at + 4 * vector, 4) == 0x1000 + vector

    def clear_interrupt(self, vector: int) -> None:
        self.qemu.store(self.msix_at + 4 * vector, 0, 4)

    def wait_interrupt(self, vector: int) -> None:
        wait_for(lambda: self.interrupted(vector), f"vector {vector}", self)
        self.clear_interrupt(vector)

    def read(self, offset: int, size: int = 4) -> int:
        return self.qemu.load(self.regs + offset, size)

    def write(self, offset: int, value: int, size: int = 4) -> None:
        self.qemu.store(self.regs + offset, value, size)

    def reg(self, name: str, size: int = 4) -> int:
        return self.read(D[f"REG_{name}"], size)

    def set(self, name: str, value: int, size: int = 4) -> None:
        self.write(D[f"REG_{name}"], value, size)

    def property(self, name: str) -> Any:
        return self.qemu.qmp("qom-get", path=self.path, property=name)

    def inject(self, fault: str, value: int | bool) -> None:
        self.qemu.qmp("qom-set", path=self.path, property=f"inject-{fault}", value=value)

    def wait_injected(self, fault: str, value: int | bool = 0) -> None:
        """Until the fault has been used up."""
        wait_for(lambda: self.property(f"inject-{fault}") == value, f"inject-{fault}")

    def cut_power(self) -> None:
        """Of its slot, which lets it go: asked for by device_del, or pulled out."""
        slot = self.port.capability(0x10) + 0x18
        self.port.write(slot, self.port.read(slot, 2) | 0x0700 | 0x00C0, 2)
        assert self.pci.read(0) == 0xFFFFFFFF and not self.plugged()

    def plugged(self) -> bool:
        names = (
            child["name"] for child in self.qemu.qmp("qom-list", path=DEVICE.rpartition("/")[0])
        )
        return self.path.rpartition("/")[2] in names

    def wait_reset(self) -> None:
        wait_for(lambda: not self.reg("STATUS") & D["STATUS_RESETTING"], "reset")

    def enable(self) -> None:
        self.set("CTRL", D["CTRL_ENABLE"])

    def hbm_write(self, offset: int, data: bytes) -> None:
        self.qemu.write(self.hbm + offset, data)

    def hbm_read(self, offset: int, size: int) -> bytes:
        return self.qemu.read(self.hbm + offset, size)


class AddressSpace:
    """Page tables of one context from `tables` on, 4 KiB pages in one 2 MiB of addresses."""

    BASE = 0x4000_0000

    def __init__(self, vtpu: Vtpu, context: int, tables: int) -> None:
        self.vtpu, self.context, self._leaf = vtpu, context, tables + 3 * 4096
        vtpu.hbm_write(tables, bytes(4 * 4096))
        for level in range(3):
            shift = 12 + 9 * (3 - level)
            entry = tables + level * 4096 + 8 * (self.BASE >> shift & 511)
            vtpu.hbm_write(entry, struct.pack("<Q", tables + (level + 1) * 4096 | VALID))
        vtpu.write(D["REG_CTX_ROOT"] + 8 * context, tables | VALID, 8)

    def map(self, page: int, target: int, rights: int, *, hbm: bool = True) -> int:
        """Page number `page` of the space; returns its address."""
        entry = target | rights | VALID | (HBM if hbm else 0)
        self.vtpu.hbm_write(self._leaf + 8 * page, struct.pack("<Q", entry))
        return self.BASE + page * 4096

    def raw(self, page: int, entry: int) -> int:
        self.vtpu.hbm_write(self._leaf + 8 * page, struct.pack("<Q", entry))
        return self.BASE + page * 4096


class Queue:
    """A queue with its ring and fence in RAM."""

    def __init__(
        self,
        vtpu: Vtpu,
        number: int,
        *,
        context: int = 0,
        ring: int | None = None,
        fence: int | None = None,
        vector: int | None = None,
    ) -> None:
        self.vtpu, self.number, self.tail = vtpu, number, 0
        self.vector = number + 1 if vector is None else vector
        self.ring = vtpu.ram + number * 8192
        self.fence_at = self.ring + 4096
        vtpu.qemu.write(self.ring, bytes(8192))
        self.set("RING_BASE", self.ring if ring is None else ring, 8)
        self.set("FENCE_ADDR", self.fence_at if fence is None else fence, 8)
        self.set("RING_LOG2", 4)
        self.set("CONTEXT", context)
        self.set("VECTOR", self.vector)
        self.set("PRIORITY", 1)
        self.set("CTRL", D["Q_CTRL_ENABLE"])

    def set(self, name: str, value: int, size: int = 4) -> None:
        self.vtpu.write(D[f"REG_Q_{name}"] + self.number * D["QUEUE_STRIDE"], value, size)

    def reg(self, name: str, size: int = 4) -> int:
        return self.vtpu.read(D[f"REG_Q_{name}"] + self.number * D["QUEUE_STRIDE"], size)

    @property
    def state(self) -> str:
        states = {v: k for k, v in D.items() if k.startswith("QUEUE_STATE_")}
        return states[self.reg("QSTATUS")].removeprefix("QUEUE_STATE_")

    @property
    def cause(self) -> str:
        causes = {v: k for k, v in D.items() if k.startswith("FAULT_")}
        return causes[self.reg("FAULT_CAUSE")].removeprefix("FAULT_")

    @property
    def fence(self) -> int:
        return self.vtpu.qemu.load(self.fence_at, 8)

    def push(self, command: str, payload: bytes = b"", *, flags: int = 3) -> int:
        entry = struct.pack(
            "<BBHIQQ40s", D[f"CMD_{command}"], flags, 0, 0, self.tail + 1, 0, payload
        )
        self.vtpu.qemu.write(self.ring + self.tail % 16 * 64, entry)
        self.tail += 1
        self.vtpu.qemu.store(self.vtpu.doorbells + self.number * 4096, self.tail, 4)
        return self.tail

    def do(self, command: str, payload: bytes = b"") -> None:
        """Ends with the interrupt, which comes after the fence."""
        fence = self.push(command, payload)
        wait_for(
            lambda: self.vtpu.interrupted(self.vector) or self.state == "FAULTED",
            f"vector {self.vector}",
            self.vtpu,
        )
        assert self.state != "FAULTED", self.cause
        self.vtpu.clear_interrupt(self.vector)
        assert self.fence == fence

    def expect_fault(self, command: str, payload: bytes = b"") -> str:
        self.push(command, payload)
        self.vtpu.wait_interrupt(0)
        assert self.state == "FAULTED"
        return self.cause

    def run(self, code_va: int, code_bytes: int, args_va: int = 0, num_args: int = 0) -> bytes:
        return struct.pack("<QIIQI", code_va, code_bytes, 0, args_va, num_args)

    def reset(self) -> None:
        self.set("CTRL", D["Q_CTRL_RESET"])
        wait_for(lambda: self.state == "DISABLED", "queue reset")


def find_qemu() -> list[str]:
    """The command of VTPU_QEMU, or of the QEMU that the guest's package builds."""
    named = os.environ.get("VTPU_QEMU")
    if named:
        return [named]
    from vtpu_guest import qemu, roots
    from vtpu_guest.cache import build_lock

    with build_lock():
        return qemu.build(roots.build_root()).command
