# SPDX-License-Identifier: MIT
"""KVM or TCG: KVM only when a virtual CPU really runs here."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import multiprocessing
import os
import struct
from dataclasses import dataclass

_KVM_CREATE_VM = 0xAE01
_KVM_GET_VCPU_MMAP_SIZE = 0xAE04
_KVM_CREATE_VCPU = 0xAE41
_KVM_SET_USER_MEMORY_REGION = 0x4020AE46
_KVM_RUN = 0xAE80
_KVM_SET_REGS = 0x4090AE82
_KVM_GET_SREGS = 0x8138AE83
_KVM_SET_SREGS = 0x4138AE84
_EXIT_HLT = 5
_TRY_SECONDS = 2.0


@dataclass(frozen=True)
class Accelerator:
    name: str
    reason: str

    @property
    def arguments(self) -> list[str]:
        if self.name == "kvm":
            return ["-accel", "kvm", "-cpu", "host"]
        # Programs that find AVX use it, and each of its instructions is then many
        # of the host's; a fifth level of page tables lengthens every walk.
        return ["-accel", "tcg,thread=multi", "-cpu", "max,-avx,-avx2,-la57"]


def choose() -> Accelerator:
    """What VTPU_ACCEL asks for, else KVM if it works, else TCG."""
    forced = os.environ.get("VTPU_ACCEL", "")
    if forced in {"tcg", "kvm"}:
        return Accelerator(forced, "VTPU_ACCEL says so")
    if forced:
        raise ValueError(f"VTPU_ACCEL is {forced!r}; it can be 'kvm' or 'tcg'")
    problem = kvm_problem()
    return Accelerator("tcg", f"KVM: {problem}") if problem else Accelerator("kvm", "it works here")


def kvm_problem() -> str | None:
    """Why KVM cannot be used here, or None.

    That /dev/kvm opens and gives a VM says little: without hardware
    virtualisation some hosts still offer it, and then never get through the
    guest's firmware. So the CPU has to offer it, and run one instruction.
    """
    if not os.path.exists("/dev/kvm"):
        return "there is no /dev/kvm"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm may not be opened by this user"
    with open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.startswith("flags")), "").split()
    if not {"vmx", "svm"} & set(flags):
        return "the CPU offers no virtualisation (vmx or svm)"
    # In a process of its own: a vCPU that does not come back must not hang us.
    trial = multiprocessing.get_context("fork").Process(target=_run_one_instruction, daemon=True)
    trial.start()
    trial.join(_TRY_SECONDS)
    if trial.is_alive():
        trial.kill()
        trial.join()
        return "a virtual CPU does not run"
    return None if trial.exitcode == 0 else "a virtual CPU cannot be run"


def _run_one_instruction() -> None:
    """Runs HLT in real mode at address 0, and exits with 0 when it halts."""
    kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    machine = fcntl.ioctl(kvm, _KVM_CREATE_VM, 0)
    memory = mmap.mmap(-1, 4096)
    memory[0] = 0xF4
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    region = struct.pack("<IIQQQ", 0, 0, 0, 4096, address)
    fcntl.ioctl(machine, _KVM_SET_USER_MEMORY_REGION, region)
    cpu = fcntl.ioctl(machine, _KVM_CREATE_VCPU, 0)
    shared = mmap.mmap(cpu, fcntl.ioctl(kvm, _KVM_GET_VCPU_MMAP_SIZE, 0))
    segments = bytearray(312)
    fcntl.ioctl(cpu, _KVM_GET_SREGS, segments)
    segments[0:8] = bytes(8)  # base of the code segment
    segments[12:14] = bytes(2)  # its selector
    fcntl.ioctl(cpu, _KVM_SET_SREGS, bytes(segments))
    registers = bytearray(144)
    registers[136:144] = struct.pack("<Q", 2)  # rflags: the bit that is always set
    fcntl.ioctl(cpu, _KVM_SET_REGS, bytes(registers))
    fcntl.ioctl(cpu, _KVM_RUN, 0)
    os._exit(0 if struct.unpack_from("<I", shared, 8)[0] == _EXIT_HLT else 1)
