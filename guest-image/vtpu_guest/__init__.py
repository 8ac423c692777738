# SPDX-License-Identifier: MIT
"""Builds and runs the vTPU guest: Debian 13 on a QEMU that has the device."""

import sys

# Said before anything is imported that an old version cannot read.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        f"vtpu: this is Python {sys.version.split()[0]} and 3.11 or newer is needed;"
        " name one with PYTHON=..."
    )

from .attach import Attached
from .guest import Guest
from .link import Completed, GuestError

__all__ = ["Attached", "Completed", "Guest", "GuestError"]
