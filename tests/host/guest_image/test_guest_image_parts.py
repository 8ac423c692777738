# SPDX-License-Identifier: MIT
"""The parts of the image builder that need no root and no network."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from vtpu_guest import accel, cache, checks, cpio, debian, kernel, machine, privileged, stage


def test_one_line_source_with_options() -> None:
    line = "deb [arch=amd64 signed-by=/k.gpg] file:/mirror bookworm main contrib"
    text = f"# deb nowhere x main\n{line}\n"
    assert debian.parse_one_line(text) == [
        debian.Source("file:/mirror", ("bookworm",), ("main", "contrib"))
    ]


def test_stanza_source_with_comment_between_and_folded_field() -> None:
    text = (
        "Types: deb deb-src\n# old\nURIs: file:/mirror\n"
        "Suites: trixie\n trixie-updates\nComponents: main\n"
    )
    (source,) = debian.parse_deb822(text)
    assert source.suites == ("trixie", "trixie-updates")
    assert source.is_debian_main


@pytest.mark.parametrize("line", ["Enabled: no", "Types: deb-src"])
def test_stanza_that_does_not_count(line: str) -> None:
    fields = {"Types": "deb", "URIs": "file:/m", "Suites": "trixie", "Components": "main"}
    name, _, value = line.partition(": ")
    fields[name] = value
    text = "\n".join(f"{name}: {value}" for name, value in fields.items())
    assert debian.parse_deb822(text) == []


def test_mirror_skips_other_vendors_archives(tmp_path: Path) -> None:
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    (folder / "a.list").write_text("deb file:/vendor vendor-bookworm main\n")
    (folder / "b.sources").write_text(
        "Types: deb\nURIs: file:/vendor2\nSuites: nodistro\nComponents: main\n\n"
        "Types: deb\nURIs: file:/debian/\nSuites: bookworm bookworm-updates\nComponents: main\n"
    )
    assert debian.configured_mirror(tmp_path) == "file:/debian"


def test_no_mirror_leaves_the_default(tmp_path: Path) -> None:
    assert debian.configured_mirror(tmp_path) is None


@pytest.mark.skipif(not shutil.which("cpio"), reason="no cpio here")
def test_archive_is_read_by_cpio() -> None:
    data = cpio.archive(["modules"], [("init", b"abc"), ("modules/order", b"x" * 5)])
    listing = subprocess.run(["cpio", "-t"], input=data, capture_output=True, check=True)
    assert listing.stdout.decode().split() == [
        "dev",
        "modules",
        "dev/console",
        "init",
        "modules/order",
    ]


def test_archive_members_start_at_multiples_of_four() -> None:
    data = cpio.archive([], [("a", b"1"), ("bc", b"22"), ("d", b"")])
    at = names = 0
    while True:
        assert data[at : at + 6] == b"070701"
        size, name_size = int(data[at + 54 : at + 62], 16), int(data[at + 94 : at + 102], 16)
        name = data[at + 110 : at + 110 + name_size - 1]
        if name == b"TRAILER!!!":
            break
        names += 1
        at += (110 + name_size + 3) // 4 * 4 + (size + 3) // 4 * 4
    assert names == 5  # dev, dev/console and the three files


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"[3/9] cc a.c\n[4/9] cc b.c\n", "4/9"),
        (b"12%\n 57%\n", "57%"),
        (b"a\nb\n", "2 lines"),
        (b"", ""),
    ],
)
def test_counter(text: bytes, shown: str) -> None:
    assert stage.counter_of(text, text.count(b"\n")) == shown


def test_failed_command_names_reason_and_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(stage.StageError) as caught:
        stage.run_logged(stage.Stage("x"), ["sh", "-c", "echo 'E: no room'; exit 7"], log)
    assert "exit status 7" in caught.value.reason
    assert "E: no room" in caught.value.reason
    assert caught.value.log == log


@pytest.mark.parametrize(
    ("cause", "shown"),
    [
        ("NewConnectionError('<x>: [Errno -3] Temporary failure in name resolution')", "Temporary"),
        ("ConnectTimeoutError(<x>, 'Connection to index timed out. (timeout=15)')", "timed out"),
        ("ProxyError('Cannot connect to proxy.', x)", "ProxyError"),
    ],
)
def test_pip_without_network_names_the_package_and_the_cause(
    tmp_path: Path, cause: str, shown: str
) -> None:
    retry = f"WARNING: Retrying (Retry(total=4)) after connection broken by '{cause}': /x/"
    lines = [retry, retry, "ERROR: No matching distribution found for llm==1"]
    command = ["sh", "-c", 'printf "%s\\n" "$@"; exit 1', "sh", *lines]
    with pytest.raises(stage.StageError) as caught:
        stage.run_logged(stage.Stage("x"), command, tmp_path / "log")
    assert "could not download" in caught.value.reason
    assert "found for llm==1" in caught.value.reason
    assert f"({shown}" in caught.value.reason
    assert "WARNING" not in caught.value.reason


def test_kernel_cut_off_by_a_full_disk_is_not_whole(tmp_path: Path) -> None:
    data = Path(sys.executable).resolve().read_bytes()
    (tmp_path / "whole").write_bytes(data)
    (tmp_path / "cut").write_bytes(data[:-1])
    (tmp_path / "empty").touch()
    found = [kernel.is_whole_elf(tmp_path / name) for name in ("whole", "cut", "empty")]
    assert found == [True, False, False]


def test_key_depends_on_names_and_bytes_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "1/tree", tmp_path / "2/tree"
    for tree in (first, second):
        tree.mkdir(parents=True)
        (tree / "a.c").write_text("int a;")
    assert cache.key(first) == cache.key(second)
    (second / "a.o").write_text("left behind by a build")
    assert cache.key(first) == cache.key(second)
    (second / "a.c").rename(second / "b.c")
    assert cache.key(first) != cache.key(second)


def test_fresh_leaves_nothing_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), cache.fresh(tmp_path / "x") as work:
        work.mkdir()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_removal_cannot_leave_half_a_result_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(command: list[str]) -> None:
        raise KeyboardInterrupt

    result = tmp_path / "build-root-1"
    result.mkdir()
    monkeypatch.setattr(privileged, "run_privileged", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.remove(result)
    assert not result.exists()


def test_next_build_removes_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(privileged, "sudo", list)
    for name in (".root-1.new", ".root-2.old", "payload-3.files", "payload-3.erofs"):
        (cache.cache_dir() / name).mkdir()
    with cache.build_lock():
        assert {path.name for path in cache.cache_dir().iterdir()} == {"lock", "payload-3.erofs"}


def test_failed_command_of_root_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privileged, "sudo", list)
    with pytest.raises(stage.StageError, match="No such file"):
        privileged.run_privileged(["mkdir", "/nowhere/at/all"])


def test_make_passes_values_on_as_they_are(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nfor word; do printf '<%s>' \"$word\"; done\n")
    python.chmod(0o755)
    prompt = """--it's "$x" $(id) `id` ; \\ #1\nline 2 é"""
    values = [f"PROMPT={prompt}", "MAX_TOKENS=1;id", "MODEL=a b$c"]
    shown = subprocess.run(
        ["make", "-s", "-C", str(cache.REPO), "run", f"PYTHON={python}", *values],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == (
        f"<-m><vtpu_guest><run><--model=a b$c><--prompt={prompt}><--max-tokens=1;id>"
    )


def test_reader_that_leaves_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "from vtpu_guest import __main__ as m; import sys\n"
    code += "m.build = lambda model: print('x' * 99, flush=True)\n"
    code += "sys.argv = ['vtpu', 'build']; sys.exit(m.main())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(cache.GUEST_IMAGE)},
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_sync_keeps_the_time_of_unchanged_files(tmp_path: Path) -> None:
    source, target = tmp_path / "s", tmp_path / "t"
    source.mkdir()
    (source / "same.c").write_text("1")
    (source / "gone.c").write_text("2")
    cache.sync_tree(source, target)
    (target / "vtpu.mod.c").write_text("kbuild's")
    before = (target / "same.c").stat().st_mtime_ns
    (source / "gone.c").unlink()
    cache.sync_tree(source, target)
    assert (target / "same.c").stat().st_mtime_ns == before
    assert sorted(path.name for path in target.iterdir()) == ["same.c", "vtpu.mod.c"]


def test_start_words_survive_the_kernel_command_line() -> None:
    escaped = machine.escape('a b,"c"\né%')
    assert not set(escaped) & set(' ,"\n')
    assert escaped == "a%20b%2c%22c%22%0a%c3%a9%25"


def test_busy_and_impossible_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(stage.StageError, match=str(port)):
            checks.need_port(port)
    with pytest.raises(stage.StageError, match="65536"):
        checks.need_port(65536)


def test_missing_memory_and_disk_say_how_much(tmp_path: Path) -> None:
    with pytest.raises(stage.StageError, match=r"needs 1000000000 MB .* \d+ MB are available"):
        checks.need_memory(10**9)
    with pytest.raises(stage.StageError, match=r"needs 1000000000 MB .* \d+ MB free"):
        cache.need_space(tmp_path, 10**9, "a test")


def test_accelerator_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTPU_ACCEL", "tcg")
    assert accel.choose().name == "tcg"
    monkeypatch.setenv("VTPU_ACCEL", "fast")
    with pytest.raises(ValueError, match="fast"):
        accel.choose()
