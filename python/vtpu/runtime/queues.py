# SPDX-License-Identifier: MIT
"""Queues, and launches recorded for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vtpu.runtime._native import ffi, lib, new_struct
from vtpu.runtime.buffer import Buffer
from vtpu.runtime.errors import FaultDetail, check, fail, fault_detail, invalid
from vtpu.runtime.executable import Executable
from vtpu.runtime.fence import Fence

if TYPE_CHECKING:
    from vtpu.runtime.device import Device

Address = Buffer | int
_NULL = ffi.NULL
_POINT = ffi.typeof("uint64_t[1]")
_new = ffi.new
_submit = lib.tpurt_commands_submit


@dataclass(frozen=True, slots=True)
class QueueState:
    """status: "ok", "fault", "hung" or "lost". submitted, completed: points."""

    status: str
    fault: FaultDetail | None
    submitted: int
    completed: int


class Queue:
    """Jobs in order, on one timeline. Made by Device.queue(). Any thread may use it.

    A queue on which a job failed takes no more until recover(). close() lets recorded
    launches finish, then cancels the rest.
    """

    __slots__ = ("__weakref__", "_device", "_handle")

    def __init__(self, device: Device, handle: Any) -> None:
        self._device = device
        self._handle: Any = ffi.gc(handle, lib.tpurt_queue_release)

    def __repr__(self) -> str:
        return "<Queue, closed>" if self._handle is None else f"<Queue of {self._device!r}>"

    @property
    def handle(self) -> Any:
        """The library's handle. Raises TpuInvalidError when the queue is closed."""
        if self._handle is None:
            raise invalid("the queue is closed")
        return self._handle

    @property
    def device(self) -> Device:
        return self._device

    @property
    def state(self) -> QueueState:
        state = new_struct("tpurt_queue_state")
        check(lib.tpurt_queue_get_state(self.handle, state))
        status = ffi.string(lib.tpurt_status_name(state.status)).decode()
        return QueueState(
            status, fault_detail(state, None, ""), int(state.submitted), int(state.completed)
        )

    def recover(self) -> None:
        """Makes a failed queue usable again; its old fences keep their errors."""
        check(lib.tpurt_queue_recover(self.handle))

    def nop(self) -> Fence:
        """An empty job: what a submission costs, or a mark on the timeline."""
        point = _new(_POINT)
        status = lib.tpurt_queue_nop(self.handle, point)
        return self.fence(status, point)

    def copy(self, dst: Address, src: Address, nbytes: int) -> Fence:
        """Copies between device addresses; the ranges must not overlap."""
        point = _new(_POINT)
        status = lib.tpurt_queue_copy(self.handle, address(dst), address(src), nbytes, point)
        return self.fence(status, point)

    def fill(self, dst: Address, nbytes: int, pattern: int = 0) -> Fence:
        """Fills bytes, a multiple of 4, with a 32-bit pattern."""
        point = _new(_POINT)
        status = lib.tpurt_queue_fill(self.handle, address(dst), nbytes, pattern, point)
        return self.fence(status, point)

    def prepare(
        self,
        executable: Executable,
        args: Mapping[str, Address] | Sequence[Address],
        kernel: str = "",
        *,
        timed: bool = False,
    ) -> Launch:
        """Records a run of a kernel, to be submitted any number of times.

        args: by name (all of executable.args), or in their order. Buffers given are
        kept alive. timed: also record the device's time, see Launch.device_ns.
        """
        return Launch(self, executable, _ordered(executable, args), kernel, timed)

    def fence(self, status: int, point: Any) -> Fence:
        """The fence of a submission that the library answered with status."""
        if status:
            self.fail(status)
        return Fence(self, point[0])

    def fail(self, status: int) -> None:
        """Raises the error of a refused submission, with the queue's fault if that is why."""
        failed = (lib.TPURT_ERROR_FAULT, lib.TPURT_ERROR_HUNG)
        fail(status, self.state.fault if status in failed else None)

    def close(self) -> None:
        """Gives the queue back; a second call does nothing."""
        self._handle = None

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Launch:
    """A recorded run of a kernel. Made by Queue.prepare().

    Letting go of it while the device still runs it waits for the device.
    """

    __slots__ = ("__weakref__", "_args", "_handle", "_queue", "_times", "executable", "kernel")

    def __init__(
        self,
        queue: Queue,
        executable: Executable,
        args: Sequence[Address],
        kernel: str,
        timed: bool,
    ) -> None:
        entry = executable.kernel(kernel)
        commands = _new("tpurt_commands **")
        check(lib.tpurt_commands_create(queue.handle, commands))
        handle = ffi.gc(commands[0], lib.tpurt_commands_release)
        self._times: Buffer | None = None
        if timed:
            self._times = queue.device.buffer(16, name="timestamps")
            check(lib.tpurt_commands_timestamp(handle, self._times.va))
        words = [address(arg) for arg in args]
        check(lib.tpurt_commands_run(handle, executable.handle, entry.index, words, len(words)))
        if self._times:
            check(lib.tpurt_commands_timestamp(handle, self._times.va + 8))
        self._queue = queue
        self._args = tuple(args)
        self._handle: Any = handle
        self.executable = executable
        self.kernel = entry.name
        queue.device.track(self)

    def __repr__(self) -> str:
        return f"<Launch of {self.kernel!r} of {self.executable!r}>"

    def submit(self, cookie: int = 0, wait: Iterable[Fence] = ()) -> Fence:
        """Submits the run as a job, after the fences in wait.

        cookie: 32 bits that go into traces and faults.
        """
        handle = self._handle
        if handle is None:
            raise invalid("the launch is closed")
        point = _new(_POINT)
        if wait:
            fences = [(fence.queue.handle, fence.point) for fence in wait]
            status = _submit(handle, cookie, fences, len(fences), point)
        else:
            status = _submit(handle, cookie, _NULL, 0, point)
        if status:
            self._queue.fail(status)
        return Fence(self._queue, point[0], self)

    @property
    def device_ns(self) -> int:
        """Device time of the last finished run, in nanoseconds. Needs timed=True."""
        if self._times is None:
            raise invalid("the launch was not prepared with timed=True")
        start, end = self._times.map().cast("Q")
        return int(end - start)

    def close(self) -> None:
        """Lets go of the recording, waiting for the device if it still runs it."""
        self._handle = None
        if self._times:
            self._times.close()


def address(value: Address) -> int:
    return value.va if isinstance(value, Buffer) else value


def _ordered(
    executable: Executable, args: Mapping[str, Address] | Sequence[Address]
) -> Sequence[Address]:
    if not isinstance(args, Mapping):
        return args
    missing = [name for name in executable.args if name not in args]
    unknown = [name for name in args if name not in executable.args]
    if missing or unknown:
        raise invalid(
            f"executable {executable.name!r} takes the arguments {', '.join(executable.args)}; "
            f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
        )
    return [args[name] for name in executable.args]
