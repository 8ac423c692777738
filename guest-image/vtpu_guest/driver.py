# SPDX-License-Identifier: MIT
"""The kernel driver alone: compiled in seconds, exchanged in a running guest."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from .cache import GUEST_IMAGE, REPO, cache_dir, key, log_dir, sync_tree
from .kernel import Modules
from .kernels import Kernel
from .link import GuestError, Link
from .payload import needed_modules
from .privileged import run_in_root
from .stage import Stage, StageError

SOURCE = REPO / "kmod"
EXAMPLE = SOURCE / "example"
HEADERS = REPO / "qemu-device/include"
_SCRIPT = GUEST_IMAGE / "build-driver"
_TREE = "/tree"
_IN_GUEST = "/run/vtpu-dev"
_MODULE = re.compile(r"^obj-\S+ [:+]= (\w+)\.o$", re.MULTILINE)
_DIAGNOSTIC = re.compile(rf"^{_TREE}/kmod/(\S+?:\d+.*)$", re.MULTILINE)
# Who keeps the module, in words that a person can act on.
_HOLDERS = r"""
for fd in /proc/[0-9]*/fd/*; do
    case $(readlink "$fd" 2>/dev/null) in
    /dev/accel/*) pid=${fd#/proc/}; pid=${pid%%/*}
                  echo "$(cat "/proc/$pid/comm") (process $pid)";;
    esac
done | sort -u
"""
_EXCHANGE = rf"""
set -e
echo "<6>vtpu-dev: exchange $1" >/dev/kmsg
for driver in vtpu vtpu_first; do
    if [ -d "/sys/module/$driver" ]; then rmmod "$driver"; fi
done
while read -r name; do
    [ -d "/sys/module/${{name%.ko}}" ] || insmod "{_IN_GUEST}/$name"
done <{_IN_GUEST}/order
"""
_MESSAGES = 'dmesg | sed "1,/vtpu-dev: exchange $1/d"'


def _module_name(source: Path) -> str:
    kbuild = source / "Kbuild"
    names = _MODULE.findall(kbuild.read_text()) if kbuild.is_file() else []
    if len(names) != 1:
        raise StageError(f"{kbuild} has to name one module (obj-m := name.o), and has {len(names)}")
    return str(names[0])


def compile_driver(kernel: Kernel, source: Path = SOURCE) -> Path:
    """Compiles what changed and returns the module for the guest; the one with debug
    information is in kmod/ beside it.

    The source is that of vtpu.ko or of another module that drives the device alone.
    Needs the build lock. StageError has the compiler's messages, with paths of
    the checkout.
    """
    name = _module_name(source)
    # A tree of its own: an image's make must not find half of this one's edits.
    tree = cache_dir() / f"driver-tree-{key(kernel.identity, str(source))}"
    sync_tree(source, tree / "kmod")
    sync_tree(HEADERS, tree / "qemu-device/include")
    log = log_dir() / "driver.log"
    read = {_SCRIPT.parent: "/script"}
    headers = f"/lib/modules/{kernel.release}/build"
    if kernel.headers:
        read[kernel.headers] = headers = "/headers"
    command = ["env", f"VTPU_HW_INCLUDE={_TREE}/qemu-device/include"]
    command += ["sh", f"/script/{_SCRIPT.name}", headers, _TREE, _TREE]
    with Stage("driver") as stage:
        try:
            run_in_root(stage, kernel.root, command, log, read=read, write={tree: _TREE})
        except StageError:
            found = _DIAGNOSTIC.findall(log.read_text(errors="replace"))
            if not found:
                raise
            folder = source.relative_to(REPO) if source.is_relative_to(REPO) else source
            said = [f"{folder}/{line}" for line in found]
            raise StageError("it does not compile\n" + "\n".join(said), log) from None
    return tree / f"{name}.ko"


@dataclass(frozen=True)
class Exchange:
    """What exchanging the module did: the kernel's messages about it."""

    messages: str
    seconds: float


def exchange(guest: Link, module: Path, kernel: Kernel) -> Exchange:
    """Takes the module out of a running guest and puts this one in.

    GuestError when a process holds it, or when the new one does not load; the
    guest has then no driver, but goes on.
    """
    start = time.monotonic()
    release = guest.run(["uname", "-r"]).check().text.strip()
    if release != kernel.release:
        raise GuestError(
            f"the guest runs {release}, the driver is for {kernel.release}: KERNEL= chooses"
        )
    modules = Modules(kernel)
    order = needed_modules([module], modules)
    present = guest.run(f"mkdir -p {_IN_GUEST} && ls /sys/module").check().text.split()
    for name in set(order).difference(present):
        guest.put(modules.read(name), f"{_IN_GUEST}/{name}.ko")
    guest.put(module, f"{_IN_GUEST}/{module.name}")
    names = "".join(f"{name}\n" for name in [*(f"{need}.ko" for need in order), module.name])
    guest.put(names.encode(), f"{_IN_GUEST}/order")

    mark = f"{time.time_ns():x}"
    done = guest.run(["sh", "-c", _EXCHANGE, "exchange", mark])
    messages = guest.run(["sh", "-c", _MESSAGES, "messages", mark]).text
    if done.returncode != 0:
        holders = guest.run(_HOLDERS).text.split("\n")[:-1]
        reason = done.stderr.decode(errors="replace").strip()
        if holders:
            reason = f"the driver is in use by {', '.join(holders)}: end it first"
        raise GuestError(f"{reason}\n{messages}".strip())
    return Exchange(messages, time.monotonic() - start)
