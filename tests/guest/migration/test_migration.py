# SPDX-License-Identifier: MIT
"""A guest that serves moves to another QEMU in the middle of an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from vtpu_guest import Guest
from vtpu_guest.model import fetch

pytestmark = pytest.mark.guest
HERE = Path(__file__).resolve().parent
PORT, TOKENS, LIMIT_S = 8000, 48, 300.0


def _wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.05)


def _set_slow(guest: Guest, factor: int) -> None:
    guest.qmp(
        "qom-set",
        path="/machine/peripheral/vtpu0",
        property="inject-hbm-slow",
        value=factor,
    )


def test_the_answer_does_not_notice(tmp_path: Path) -> None:
    """Tokens and the bits of their log-probabilities, against a run that stayed."""
    model = f"/opt/model/{fetch().name}"
    server = ["python3", "-m", "vtpu.server", "--model", model, "--port", str(PORT)]
    source = Guest(start=server)
    target = Guest(start=server, extra_arguments=["-incoming", "defer"])
    try:
        source.start()
        source.put(HERE / "stream.py", "/tmp/stream.py")
        ready = f"python3 -c 'import urllib.request as r; r.urlopen(\"http://127.0.0.1:{PORT}/health\")'"
        _wait(lambda: source.run(ready).returncode == 0, "the server is ready")
        stream = ["python3", "/tmp/stream.py", str(PORT)]
        source.run([*stream, "/tmp/stayed", str(TOKENS)], timeout=LIMIT_S).check()
        stayed = source.get("/tmp/stayed").splitlines()
        assert len(stayed) == TOKENS + 1 and stayed[-1] == b"end"

        source.agent("guest-exec", path=stream[0], arg=[*stream[1:], "/tmp/moved", str(TOKENS)])
        moved_so_far = "cat /tmp/moved 2>/dev/null | wc -l"
        _wait(lambda: int(source.run(moved_so_far).text) >= 4, "four tokens")
        # From here on every token takes long: that also travels.
        _set_slow(source, 30)
        target.start(wait=False)
        uri = f"unix:{tmp_path}/migration"
        target.qmp("migrate-incoming", uri=uri)
        source.qmp("migrate-set-parameters", **{"max-bandwidth": 1 << 34})
        source.qmp("migrate", uri=uri)
        _wait(
            lambda: source.qmp("query-migrate").get("status") in ("completed", "failed"),
            "the migration's end",
        )
        status = source.qmp("query-migrate")
        assert status["status"] == "completed", status
        print(f"downtime {status['downtime']} ms, in all {status['total-time']} ms")
        source.kill()
        target.wait_agent()
        arrived = len(target.get("/tmp/moved").splitlines())
        _set_slow(target, 1)
        _wait(lambda: target.get("/tmp/moved").endswith(b"end\n"), "the answer's end")
        assert arrived < TOKENS, "it was over before"
        assert target.get("/tmp/moved").splitlines() == stayed
        # And the machine is whole: the same again, begun there.
        target.run([*stream, "/tmp/again", str(TOKENS)], timeout=LIMIT_S).check()
        assert target.get("/tmp/again").splitlines() == stayed
        target.shutdown()
    finally:
        source.kill()
        target.kill()
