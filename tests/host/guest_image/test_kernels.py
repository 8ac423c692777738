# SPDX-License-Identifier: MIT
"""Which kernel a guest boots, and how its modules are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from vtpu_guest import debian, kernel, kernels
from vtpu_guest.driver import compile_driver
from vtpu_guest.stage import StageError


def made_up(tmp_path: Path, needs: str, builtin: str = "") -> kernels.Kernel:
    folder = tmp_path / "1.2-test"
    folder.mkdir()
    (folder / "modules.dep").write_text(needs)
    (folder / "modules.builtin").write_text(builtin)
    return kernels.Kernel("id", "1.2-test", tmp_path / "vmlinux", tmp_path, tmp_path)


def test_a_kernel_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTPU_KERNEL", "6-x")
    with pytest.raises(StageError, match="KERNEL is '6-x'; it can be default, backports"):
        kernels.chosen_name()


@pytest.mark.parametrize("value", [None, "", "default"])
def test_the_default_needs_no_word(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("VTPU_KERNEL", raising=False)
    else:
        monkeypatch.setenv("VTPU_KERNEL", value)
    assert kernels.chosen_name() == "default"


def test_only_the_debug_kernel_is_given_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in kernels.NAMES:
        monkeypatch.setenv("VTPU_KERNEL", name)
        assert (kernels.patience() > 1) == (name == "debug")


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    needs = "a/top.ko.xz: a/mid-one.ko.xz a/low.ko.xz\na/mid-one.ko.xz: a/low.ko.xz\na/low.ko.xz:\n"
    modules = kernel.Modules(made_up(tmp_path, needs, "kernel/fs/erofs.ko\n"))
    assert modules.order(["top", "erofs"]) == ["low", "mid_one", "top"]


def test_a_module_that_became_a_library_is_not_missed(tmp_path: Path) -> None:
    modules = kernel.Modules(made_up(tmp_path, ""))
    assert modules.order(["crc32c_generic"]) == []
    with pytest.raises(StageError, match="no module overlay"):
        modules.order(["overlay"])


def test_a_kernel_that_is_an_elf_file_is_started_as_it_is(tmp_path: Path) -> None:
    assert kernel.build_vmlinux(made_up(tmp_path, "")) == tmp_path / "vmlinux"


def test_backports_need_a_mirror_to_take_them_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "configured_mirror", lambda: "file:/debian")
    assert debian.mmdebstrap_sources(False, with_backports=True) == [
        "deb file:/debian trixie main",
        "deb file:/debian trixie-backports main",
    ]
    monkeypatch.setattr(debian, "configured_mirror", lambda: None)
    with pytest.raises(StageError, match="needs a Debian mirror"):
        debian.mmdebstrap_sources(False, with_backports=True)


def test_what_is_compiled_as_a_driver_is_one_module(tmp_path: Path) -> None:
    chosen = kernels.Kernel("", "", tmp_path, tmp_path, tmp_path)
    for kbuild in ("", "obj-m := one.o\nobj-m += other.o\n"):
        (tmp_path / "Kbuild").write_text(kbuild)
        with pytest.raises(StageError, match=f"{tmp_path}/Kbuild has to name one module"):
            compile_driver(chosen, tmp_path)
    (tmp_path / "Kbuild").unlink()
    with pytest.raises(StageError, match="and has 0"):
        compile_driver(chosen, tmp_path)
