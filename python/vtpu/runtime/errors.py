# SPDX-License-Identifier: MIT
"""What goes wrong: one class, with a subclass for each thing a caller may act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from vtpu.runtime._native import ffi, lib

if TYPE_CHECKING:
    from vtpu.runtime.executable import Executable

_ACCESSES = ("none", "read", "write", "execute")
_NO_PC = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class FaultDetail:
    """The device's record of a refused access or instruction.

    address: device address, VMEM address or TRAP code, by cause.
    pc: byte offset in the kernel; None when no instruction is to blame.
    cookie: the guilty command's.
    kernel, operation, module: where in the executable, if it is known.
    """

    cause: str
    access: str
    address: int
    pc: int | None
    cookie: int
    kernel: str = ""
    operation: str = ""
    module: str = ""

    @property
    def place(self) -> str:
        """Where in the model, as words; empty when it is not known."""
        words = [f"kernel {self.kernel!r}"] if self.kernel else []
        words += [text for text in (self.operation, self.module) if text]
        return ", ".join(words)

    def __str__(self) -> str:
        text = self.cause
        if self.access != "none":
            text += f", {self.access} at {self.address:#x}"
        elif self.address:
            text += f", code {self.address:#x}"
        if self.pc is not None:
            text += f", pc {self.pc:#x}"
        return f"{text}, cookie {self.cookie}"


class TpuError(Exception):
    """An operation of the runtime failed.

    code: the library's status. message: names the input and the limit.
    detail: the device's record, when it has one.
    """

    def __init__(self, code: int, message: str, detail: FaultDetail | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail


class TpuInvalidError(TpuError, ValueError):
    """An argument is wrong, or the object is closed."""


class TpuBadExecutableError(TpuInvalidError):
    """The file is not one that this device can run."""


class TpuOutOfMemoryError(TpuError, MemoryError):
    """Host memory, HBM, device addresses or hardware queues ran out."""


class TpuTimeoutError(TpuError, TimeoutError):
    """The caller's own timeout passed; the work goes on."""


class TpuFaultError(TpuError):
    """The device refused an access or an instruction of the job."""


class TpuHangError(TpuError):
    """The job passed its queue's time limit and was stopped."""


class TpuLostError(TpuError):
    """The device was reset or is gone."""


class TpuCancelledError(TpuError):
    """The job stood behind one that failed."""


def _classes() -> dict[int, type[TpuError]]:
    return {
        lib.TPURT_ERROR_INVALID: TpuInvalidError,
        lib.TPURT_ERROR_OUT_OF_MEMORY: TpuOutOfMemoryError,
        lib.TPURT_ERROR_BAD_EXECUTABLE: TpuBadExecutableError,
        lib.TPURT_ERROR_TIMEOUT: TpuTimeoutError,
        lib.TPURT_ERROR_FAULT: TpuFaultError,
        lib.TPURT_ERROR_HUNG: TpuHangError,
        lib.TPURT_ERROR_LOST: TpuLostError,
        lib.TPURT_ERROR_CANCELLED: TpuCancelledError,
    }


def last_message() -> str:
    return str(ffi.string(lib.tpurt_last_error()).decode("utf-8", "replace"))


def fail(status: int, detail: FaultDetail | None = None) -> NoReturn:
    """Raises what a status of this thread's last call means."""
    message = last_message()
    if detail and detail.place:
        message = f"{message}, in {detail.place}"
    raise _classes().get(status, TpuError)(status, message, detail)


def check(status: int) -> None:
    if status:
        fail(status)


def invalid(message: str) -> TpuInvalidError:
    """For what is found wrong before the library is called."""
    return TpuInvalidError(lib.TPURT_ERROR_INVALID, message)


def fault_detail(state: Any, executable: Executable | None, kernel: str) -> FaultDetail | None:
    """The fault in a tpurt_queue_state, placed in the executable if one is given."""
    if state.status == lib.TPURT_OK or state.status == lib.TPURT_ERROR_LOST:
        return None
    hung = state.status == lib.TPURT_ERROR_HUNG
    pc = None if state.fault_pc == _NO_PC else int(state.fault_pc)
    operation = module = ""
    if executable is not None and pc is not None:
        operation, module = executable.operation_at(pc, kernel)
    name = ffi.string(lib.tpurt_fault_name(state.fault_cause)).decode()
    return FaultDetail(
        cause="time limit" if hung else name,
        access=_ACCESSES[state.fault_access & 3],
        address=int(state.fault_address),
        pc=pc,
        cookie=int(state.fault_cookie),
        kernel=kernel,
        operation=operation,
        module=module,
    )
