# SPDX-License-Identifier: MIT
"""Completion of submitted work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from vtpu.runtime._native import lib, new_struct
from vtpu.runtime.errors import check, fail, fault_detail

if TYPE_CHECKING:
    from vtpu.runtime.queues import Launch, Queue


class Fence:
    """A point on a queue's timeline: it ends when the job submitted with it does.

    It may be waited for any number of times, by several threads, or awaited.
    """

    __slots__ = ("_launch", "point", "queue")

    def __init__(self, queue: Queue, point: int, launch: Launch | None = None) -> None:
        self.queue = queue
        self._launch = launch
        self.point = point

    def __repr__(self) -> str:
        return f"<Fence point {self.point} of {self.queue!r}>"

    def wait(self, timeout: float | None = None) -> None:
        """Waits at most timeout seconds (None: as long as it takes), without the GIL.

        Raises TpuTimeoutError, or the error that ended the job.
        """
        ns = -1 if timeout is None else max(int(timeout * 1e9), 0)
        status = lib.tpurt_fence_wait(self.queue.handle, self.point, ns)
        if status:
            self._fail(status)

    def done(self) -> bool:
        """Whether the job has ended, well or not."""
        status = lib.tpurt_fence_wait(self.queue.handle, self.point, 0)
        return bool(status != lib.TPURT_ERROR_TIMEOUT)

    def _fail(self, status: int) -> None:
        if status not in (lib.TPURT_ERROR_FAULT, lib.TPURT_ERROR_HUNG):
            fail(status)
        state = new_struct("tpurt_queue_state")
        handle = self.queue.handle
        check(lib.tpurt_fence_get_state(handle, self.point, state))
        executable = self._launch.executable if self._launch else None
        kernel = self._launch.kernel if self._launch else ""
        detail = fault_detail(state, executable, kernel)
        # The message again: the call above may have replaced it.
        lib.tpurt_fence_wait(handle, self.point, 0)
        fail(status, detail)

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        ended: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            loop.remove_reader(fd)
            if not ended.done():
                ended.set_result(None)

        loop.add_reader(fd, end)
        try:
            check(lib.tpurt_fence_notify(self.queue.handle, self.point, fd))
            await ended
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        self.wait(0)

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait().__await__()
