# SPDX-License-Identifier: MIT
"""What watches over the driver's tests sees bugs of the driver: some are planted in a copy of it.

Checkers look at a module by the kernel's configuration and by how the module is compiled. One that
did not would let everything pass, as would a report that nobody reads: KERNEL=debug.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import FOLDER
from harness import no_memory_leaks, unexpected, watched
from watch import Expected

pytestmark = [pytest.mark.guest, pytest.mark.stress]

# DEV_QUERY of an unknown kind has a bug: the number of its kind is its place here.
FIRST = 100
QUERY = "static int vtpu_dev_query_ioctl("
UNKNOWN = "\tdefault:\n\t\treturn -EINVAL;\n"
PLANTED = """
#include <linux/pm_runtime.h>
#include <linux/slab.h>

static DEFINE_SPINLOCK(planted_spin);
static DEFINE_MUTEX(planted_one);
static DEFINE_MUTEX(planted_other);
static volatile struct { u32 words[4], behind[4]; } planted_words;

static noinline int vtpu_planted(struct device *dev, unsigned int which)
{
	void *volatile memory;

	switch (which) {
@	}
	return -EINVAL;
}

"""
# The name of a bug: its code, what is said of it. In an order in which none switches off the
# checker of the next: lockdep ends with its own report, and with KASAN's.
BUGS = {
    "a device that stays awake": (
        "pm_runtime_get_noresume(dev);\n",
        "keep it awake",
    ),
    "more than the log keeps": (
        'for (int i = 0; i < 4000; i++)\n\tpr_info("vtpu_planted %0900d\\n", i);\n',
        "the kernel's log overran",
    ),
    "a shift too far": (
        "return 1 << which;\n",
        "UBSAN: shift-out-of-bounds",
    ),
    "an index too large": (
        "return planted_words.words[which % 4 + 4];\n",
        "UBSAN: array-index-out-of-bounds",
    ),
    "sleep under a spinlock": (
        "spin_lock(&planted_spin);\n"
        "memory = kmalloc(64, GFP_KERNEL);\n"
        "spin_unlock(&planted_spin);\n"
        "kfree(memory);\n",
        "BUG: sleeping function called from invalid context",
    ),
    # Several: the last one's address may be left over on a stack.
    "lost memory": (
        "for (int i = 0; i < 8; i++)\n\tmemory = kmalloc(64, GFP_KERNEL);\nmemory = NULL;\n",
        "",
    ),
    "locks in both orders": (
        "mutex_lock(&planted_one);\n"
        "mutex_lock(&planted_other);\n"
        "mutex_unlock(&planted_other);\n"
        "mutex_unlock(&planted_one);\n"
        "mutex_lock(&planted_other);\n"
        "mutex_lock(&planted_one);\n"
        "mutex_unlock(&planted_one);\n"
        "mutex_unlock(&planted_other);\n",
        "possible circular locking dependency",
    ),
    "use after free": (
        "memory = kmalloc(64, GFP_KERNEL);\nkfree(memory);\nreturn *(volatile u32 *)memory & 1;\n",
        "KASAN: slab-use-after-free in vtpu_planted",
    ),
}


def plant(folder: Path) -> Path:
    """A copy of the driver with all the bugs."""
    from vtpu_guest.driver import SOURCE

    source = folder / "kmod"
    shutil.copytree(SOURCE, source)
    path = source / "vtpu_drv.c"
    text = path.read_text()
    for part in (QUERY, UNKNOWN):
        assert text.count(part) == 1
    cases = ""
    for number, (code, _) in enumerate(BUGS.values(), FIRST):
        lines = code.replace("\n", "\n\t\t").rstrip("\t")
        cases += f"\tcase {number}:\n\t\t{lines}\t\treturn 0;\n"
    text = text.replace(QUERY, PLANTED.replace("@", cases) + QUERY)
    call = UNKNOWN.replace("-EINVAL", "vtpu_planted(drm->dev, args->query)")
    path.write_text(text.replace(UNKNOWN, call))
    return source


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from vtpu_guest import Guest, kernels, roots
    from vtpu_guest.cache import build_lock
    from vtpu_guest.driver import compile_driver, exchange

    if kernels.chosen_name() != "debug":
        pytest.skip("this kernel has no checkers; KERNEL=debug has")
    with build_lock():
        kernel = kernels.chosen(roots.build_root(), roots.guest_root())
        module = compile_driver(kernel, plant(tmp_path_factory.mktemp("planted")))
    with Guest() as running, watched(running):
        exchange(running, module, kernel)
        assert unexpected(running, Expected()) == []
        yield running


def meet(guest: Any, name: str) -> None:
    """Calls what has the bug."""
    number = FIRST + list(BUGS).index(name)
    ask = (
        f"import sys; sys.path.insert(0, {FOLDER!r}); from vtpu_raw import Device\n"
        f"with Device() as device: device.call('dev_query', query={number})"
    )
    guest.run(["python3", "-c", ask], timeout=120).check()


@pytest.mark.parametrize("name", [name for name, (_, said) in BUGS.items() if said])
def test_a_bug_is_reported(name: str, guest: Any) -> None:
    meet(guest, name)
    found = "\n".join(unexpected(guest, Expected()))
    assert BUGS[name][1] in found
    assert unexpected(guest, Expected()) == []


def test_lost_memory_is_reported(guest: Any) -> None:
    meet(guest, "lost memory")
    with pytest.raises(AssertionError, match=r"(?s)unreferenced object.*vtpu_planted"):
        no_memory_leaks(guest)
    no_memory_leaks(guest)


def test_a_checker_that_is_off_is_no_good_news(guest: Any) -> None:
    """The last test of this guest: kmemleak cannot be switched on again."""
    from vtpu_guest import GuestError
    from vtpu_guest.kmemleak import FILE

    guest.run(f"echo off >{FILE}").check()
    with pytest.raises(GuestError, match="kmemleak is off"):
        no_memory_leaks(guest)
