# SPDX-License-Identifier: MIT
"""Memory that the guest's kernel has lost, if it is one that can tell."""

from __future__ import annotations

from .kernels import chosen_name
from .link import Link

FILE = "/sys/kernel/debug/kmemleak"
# It says nothing of what is younger than five seconds, nor of what the first scan finds
# changed. When it has switched itself off, a scan is refused.
_LOOK = f"""
set -e
if ! [ -e {FILE} ]; then echo 'there is no kmemleak' >&2; exit $1; fi
sleep 5
for i in 1 2; do
    echo scan >{FILE} || {{ echo 'kmemleak is off' >&2; exit 1; }}
done
cat {FILE}
echo clear >{FILE}
"""


def memory_leaks(guest: Link) -> str:
    """What nobody points to since one looked last; "" on a kernel that cannot tell.

    GuestError when the debug kernel, which can, does not.
    """
    absent = "1" if chosen_name() == "debug" else "0"
    return guest.run(["sh", "-c", _LOOK, "kmemleak", absent], timeout=300).check().text
