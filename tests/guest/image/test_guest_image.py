# SPDX-License-Identifier: MIT
"""A real guest, used as the other tests use it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vtpu_guest import Guest, GuestError, kernels

pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with Guest() as running:
        yield running


def test_the_chosen_kernel(guest: Guest) -> None:
    """Debian's, of its release or of its backports, or the one that is built to find faults."""
    kinds = {
        "default": r"6\.12\..*-amd64",
        "backports": r"7\..*-amd64",
        "debug": r"6\.12\..*-debug",
    }
    release = guest.run(["uname", "-r"]).check().text.strip()
    assert re.fullmatch(kinds[kernels.chosen_name()], release), release
    assert "cloud" not in release


def test_output_status_and_input(guest: Guest) -> None:
    done = guest.run("cat; echo oops >&2; exit 3", input="some text")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"some text", b"oops\n")


def test_environment(guest: Guest) -> None:
    assert guest.run("echo $A", env={"A": "b c"}).text == "b c\n"


def test_command_that_takes_too_long_is_ended(guest: Guest) -> None:
    with pytest.raises(TimeoutError, match="sleep"):
        guest.run(["sleep", "77"], timeout=1)
    assert guest.run(["pgrep", "-x", "sleep"]).returncode == 1


def test_files_go_in_and_come_back(guest: Guest) -> None:
    data = os.urandom((1 << 20) + 3)
    guest.put(data, "/tmp/data", mode=0o755)
    assert guest.get("/tmp/data") == data
    assert guest.run(["test", "-x", "/tmp/data"]).returncode == 0


def test_device_and_driver_are_there(guest: Guest) -> None:
    assert guest.run(["test", "-c", "/dev/accel/accel0"]).returncode == 0


def test_monitor(guest: Guest) -> None:
    assert guest.qmp("query-status")["running"] is True


def test_nothing_is_left_after_shutdown() -> None:
    guest = Guest(device=None)
    guest.start()
    pid, folder = guest.pid, guest._need_folder()
    guest.shutdown()
    assert not folder.exists()
    assert not Path(f"/proc/{pid}").exists()
    assert "power off" in guest.console_log.read_text(errors="replace")


def test_started_command_ends_the_guest() -> None:
    guest = Guest(device=None, start=["sh", "-c", "echo 'here, I am'"])
    guest.start(wait=False)
    assert guest.wait_exit(timeout=120) == 0
    assert "here, I am" in guest.console_log.read_text(errors="replace")


def test_a_machine_that_qemu_refuses() -> None:
    guest = Guest(extra_arguments=["-device", "no-such-device"])
    with pytest.raises(GuestError, match="no-such-device"):
        guest.start()


def test_a_started_command_that_fails_is_named() -> None:
    guest = Guest(device=None, start=["sh", "-c", "echo no such model; exit 4"])
    guest.start(wait=False)
    try:
        with pytest.raises(GuestError, match="command exited with status 4") as caught:
            while True:
                guest.check_running()
                time.sleep(0.1)
        assert caught.value.log is not None
        assert "no such model" in caught.value.log.read_text(errors="replace")
    finally:
        guest.kill()
