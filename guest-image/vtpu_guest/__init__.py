# SPDX-License-Identifier: MIT
"""Builds and runs the vTPU guest: Debian 13 on a QEMU that has the device."""

from .guest import Completed, Guest, GuestError

__all__ = ["Completed", "Guest", "GuestError"]
