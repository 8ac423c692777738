# SPDX-License-Identifier: MIT
"""Room for many clients at once at the ports that QEMU forwards.

QEMU's user network (libslirp) listens with room for a single connection that waits
to be accepted. Of forty clients that come together, the kernel then holds up or
resets a third. listen() again on the same socket makes the room larger; pidfd_getfd
is how to get at a socket of another process.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Collection

BACKLOG = 1024
_PIDFD_GETFD = 438  # the same number on all architectures


def widen(pid: int, ports: Collection[int]) -> int:
    """Widens the process's TCP listeners on these ports; how many it found.

    Where the system forbids it the listeners stay as they are: that is slower for
    a crowd, but no error.
    """
    call = ctypes.CDLL(None, use_errno=True).syscall
    found = 0
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return 0
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            copy = call(_PIDFD_GETFD, process, int(name), 0) if _is_socket(pid, name) else -1
            if copy >= 0:
                with socket.socket(fileno=copy) as listener:
                    found += _widen(listener, ports)
    except OSError:
        pass  # The process has ended, which is for others to notice.
    finally:
        os.close(process)
    return found


def _is_socket(pid: int, name: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    except OSError:
        return False


def _widen(listener: socket.socket, ports: Collection[int]) -> bool:
    if listener.family != socket.AF_INET or listener.type != socket.SOCK_STREAM:
        return False
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    if listener.getsockname()[1] not in ports:
        return False
    listener.listen(BACKLOG)
    return True
