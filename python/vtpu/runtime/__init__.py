# SPDX-License-Identifier: MIT
"""The runtime for Python: libtpurt with context managers, buffers and exceptions.

with Device.open() as device:
    executable = device.load("step.elf")
    weights = device.buffer(n, hbm=True, name="weights")
    launch = device.queue().prepare(executable, {"weights": weights, ...})
    launch.submit(cookie=7).wait()
"""

from vtpu.runtime.buffer import Buffer
from vtpu.runtime.device import Device, DeviceInfo, DeviceMemory, DeviceStats
from vtpu.runtime.errors import (
    FaultDetail,
    TpuBadExecutableError,
    TpuCancelledError,
    TpuError,
    TpuFaultError,
    TpuHangError,
    TpuInvalidError,
    TpuLostError,
    TpuOutOfMemoryError,
    TpuTimeoutError,
)
from vtpu.runtime.executable import Executable, Kernel
from vtpu.runtime.fence import Fence
from vtpu.runtime.queues import Launch, Queue, QueueState

Error = TpuError

__all__ = [
    "Buffer",
    "Device",
    "DeviceInfo",
    "DeviceMemory",
    "DeviceStats",
    "Error",
    "Executable",
    "FaultDetail",
    "Fence",
    "Kernel",
    "Launch",
    "Queue",
    "QueueState",
    "TpuBadExecutableError",
    "TpuCancelledError",
    "TpuError",
    "TpuFaultError",
    "TpuHangError",
    "TpuInvalidError",
    "TpuLostError",
    "TpuOutOfMemoryError",
    "TpuTimeoutError",
]
