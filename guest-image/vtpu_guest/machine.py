# SPDX-License-Identifier: MIT
"""The machine that the guest runs on, as QEMU's command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .accel import Accelerator
from .qemu import Qemu

# Debian's kernel as it is; the arguments only leave out waiting and probing
# that an emulated machine has no use for, and let a task wait for its turn: with
# sixty processes on a busy host one can be preempted for twenty seconds. The
# firmware's window for large BARs lies in what its memory map reserves just below
# 1 TiB; the kernel would refuse it to a device that is plugged in, hence no_e820.
KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet loglevel=4 panic=-1 "
    "nokaslr mitigations=off tsc=reliable no_timer_check audit=0 lsm=capability "
    "cryptomgr.notests random.trust_cpu=on rcupdate.rcu_expedited=1 "
    "rcupdate.rcu_cpu_stall_timeout=100 "
    "pci=no_e820"
)
AGENT_PORT = "org.qemu.guest_agent.0"
GUEST_HTTP_PORT = 8000


@dataclass(frozen=True)
class Images:
    """What a guest boots from."""

    qemu: Qemu
    kernel: Path
    packed_kernel: Path | None
    """The same one with its own decompressor, if there is one: for kexec, and for machines
    that suspend to RAM. QEMU resets those at wakeup, and then writes an ELF file anew."""
    initramfs: Path
    root: Path
    payload: Path
    model: Path | None


@dataclass(frozen=True)
class Machine:
    images: Images
    accelerator: Accelerator
    memory_mb: int = 2048
    cpus: int = 2
    forward: Mapping[int, int] = field(default_factory=dict)
    """Port of 127.0.0.1 on the host -> port of the guest."""
    start: Sequence[str] = ()
    """The command that init starts; the guest powers off when it ends."""
    terminal: bool = False
    """Give that command this terminal."""
    device: str | None = ""
    """Properties of the vTPU ("name=value,..."), or None for no vTPU."""
    extra_arguments: Sequence[str] = ()
    kernel_arguments: str = ""

    def command(self, folder: Path) -> list[str]:
        """QEMU's command line; its sockets and logs are in folder."""
        return [
            *self.images.qemu.command,
            *("-name", "vtpu", "-machine", "q35", *self.accelerator.arguments),
            *("-smp", str(self.cpus), "-m", f"{self.memory_mb}M"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-kernel", str(self.images.kernel), "-initrd", str(self.images.initramfs)),
            *("-append", self._kernel_line()),
            *self._console(folder),
            *("-qmp", f"unix:{folder}/qmp,server=on,wait=off"),
            # For who attaches beside the one that started it: attach.py
            *("-qmp", f"unix:{folder}/qmp-attach,server=on,wait=off"),
            *self._disk("root", self.images.root),
            *self._disk("payload", self.images.payload),
            *self._disk("model", self.images.model),
            *self._network(),
            *self._ports(folder),
            *self._vtpu(),
            *("-device", "virtio-rng-pci"),
            *self.extra_arguments,
        ]

    def _kernel_line(self) -> str:
        words = [KERNEL_ARGUMENTS, self.kernel_arguments, os.environ.get("VTPU_KERNEL_ARGS", "")]
        if self.start:
            words.append("vtpu.start=" + ",".join(escape(word) for word in self.start))
        if self.terminal:
            words.append("vtpu.terminal=1")
        return " ".join(word for word in words if word)

    def _console(self, folder: Path) -> list[str]:
        log = f"logfile={folder}/console.log"
        backend = "stdio,signal=off" if self.terminal else "null"
        return ["-chardev", f"{backend},id=console,{log}", "-serial", "chardev:console"]

    @staticmethod
    def _disk(name: str, image: Path | None) -> list[str]:
        if image is None:
            return []
        node = f"driver=file,node-name={name},filename={image},read-only=on,auto-read-only=off"
        return ["-blockdev", node, "-device", f"virtio-blk-pci,drive={name},serial={name}"]

    def _network(self) -> list[str]:
        rules = "".join(
            f",hostfwd=tcp:127.0.0.1:{host}-:{guest}" for host, guest in self.forward.items()
        )
        return ["-netdev", f"user,id=net{rules}", "-device", "virtio-net-pci,netdev=net,romfile="]

    @staticmethod
    def _ports(folder: Path) -> list[str]:
        return [
            *("-device", "virtio-serial-pci"),
            *("-chardev", f"socket,id=agent,path={folder}/agent,server=on,wait=off"),
            *("-device", f"virtserialport,chardev=agent,name={AGENT_PORT}"),
            *("-chardev", f"file,id=log,path={folder}/guest.log"),
            *("-device", "virtserialport,chardev=log,name=vtpu.log"),
        ]

    def _vtpu(self) -> list[str]:
        """Behind a root port, as a card would be: that gives it AER and hot-plug.

        Native hot-plug: with ACPI's, QEMU leaves the port's link down in its
        registers, and Linux cannot reset the bus behind it.
        """
        if self.device is None:
            return []
        device = "vtpu,id=vtpu0,bus=vtpu-port" + (f",{self.device}" if self.device else "")
        port = "pcie-root-port,id=vtpu-port,chassis=1"
        native = "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off"
        return ["-global", native, "-device", port, "-device", device]


def escape(word: str) -> str:
    """A word for init's vtpu.start, which splits at commas."""
    plain = "-._/:=+@"
    return "".join(
        char if char.isascii() and (char.isalnum() or char in plain) else _percent(char)
        for char in word
    )


def _percent(char: str) -> str:
    return "".join(f"%{byte:02x}" for byte in char.encode())
