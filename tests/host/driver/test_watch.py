# SPDX-License-Identifier: MIT
"""What watches over the driver's tests: what it lets pass, and what it does not."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "guest/driver/watch.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("driver_watch", SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


watch = load()
NAME = "0000:01:00.0"
IDLE = watch.Device(binding=7, resets=2, hbm=4096, buffers=1, awake=0)
BEFORE = watch.State(sequence=10, references=1, devices={NAME: IDLE})
OVER_TIME = "vtpu 0000:01:00.0: [drm] queue 3 is over its time limit, pc 0x0"
STUCK = "vtpu 0000:01:00.0: [drm] *ERROR* queue 3 does not stop, resetting the engines"


def judge(now: Any = BEFORE, said: Any = (), **expected: Any) -> list[str]:
    messages = [watch.Message(number, level, text) for number, (level, text) in enumerate(said)]
    return watch.judge(BEFORE, now, messages, watch.Expected(**expected))


def with_device(**values: int) -> Any:
    return replace(BEFORE, devices={NAME: replace(IDLE, **values)})


def test_nothing() -> None:
    assert judge() == []


def test_a_message_below_a_warning_passes() -> None:
    assert judge(said=[(5, "vtpu: notice"), (6, "vtpu: info")]) == []


@pytest.mark.parametrize("level", range(5))
def test_a_warning_and_worse_fails_with_what_follows(level: int) -> None:
    said = [(6, "vtpu: hello"), (level, "WARNING: CPU: 0"), (6, "Call Trace:")]
    assert judge(said=said) == ["kernel:", "WARNING: CPU: 0", "Call Trace:"]


LOCKS_IN_BOTH_ORDERS = [
    "",
    "=====",
    "WARNING: possible circular locking dependency detected",
    "irq/24-pciehp/47 is trying to acquire lock:",
    "ffff888009f4ab00 (&ctrl->reset_lock){.+.+}-{3:3}, at: pciehp_unconfigure_device+0x12d/0x1c0",
    "but task is already holding lock:",
    "ffffffff8259a648 (pci_rescan_remove_lock){+.+.}-{3:3}, at: pciehp_unconfigure_device+0x98",
    "Call Trace:",
    " </TASK>",
]


def test_the_pci_cores_own_locks_pass_and_a_drivers_do_not() -> None:
    report = [(4, text) for text in LOCKS_IN_BOTH_ORDERS]
    assert judge(said=report) == []
    assert judge(said=[*report, (4, STUCK)]) == ["kernel:", STUCK]
    of_the_driver = [(4, text.replace("ctrl->reset_lock", "vdev->lock")) for _, text in report]
    assert judge(said=of_the_driver)


def test_what_is_expected_passes_and_nothing_else() -> None:
    hang = [(4, OVER_TIME)]
    assert judge(said=hang) == ["kernel:", OVER_TIME]
    assert judge(said=hang, messages=[watch.HANG]) == []
    assert judge(said=[*hang, (3, STUCK)], messages=[watch.HANG]) == ["kernel:", STUCK]
    assert judge(said=[*hang, (3, STUCK)], messages=[watch.HANG, watch.STUCK_QUEUE]) == []
    assert judge(said=[(4, "nvme queue 3 is over its time limit")], messages=[watch.HANG])


WARNING_OF_ANOTHER = [
    "------------[ cut here ]------------",
    "name 'node'",
    "WARNING: CPU: 0 PID: 76 at fs/proc/generic.c:733 remove_proc_entry+0xa2/0x1b0",
    "Modules linked in: vtpu(O)",
    "---[ end trace 0000000000000000 ]---",
]


def test_an_expected_warning_goes_with_its_report() -> None:
    report = [(4, text) for text in WARNING_OF_ANOTHER]
    expected = [r"WARNING: .*remove_proc_entry"]
    assert judge(said=report)
    assert judge(said=report, messages=expected) == []
    assert judge(said=[*report, (3, STUCK)], messages=expected) == ["kernel:", STUCK]
    of_the_driver = [(4, text.replace("remove_proc_entry", "vtpu_remove")) for _, text in report]
    assert judge(said=[*report, *of_the_driver], messages=expected)
    assert judge(said=report, messages=["Modules linked in"])


def test_what_the_machine_says_passes() -> None:
    assert judge(said=[(4, "vtpu: loading out-of-tree module taints kernel.")]) == []
    assert judge(said=[(4, "other: loading out-of-tree module taints kernel.")])


def test_a_reset_fails_unless_it_is_expected() -> None:
    [problem] = judge(with_device(resets=3))
    assert "1 resets" in problem
    assert judge(with_device(resets=3), resets=True) == []


def test_the_count_begins_anew_with_the_binding() -> None:
    assert judge(with_device(binding=8, resets=0)) == []
    assert judge(with_device(binding=8, resets=1))
    assert judge(replace(BEFORE, devices={})) == []


def test_memory_that_does_not_come_back_fails() -> None:
    assert judge(with_device(hbm=0), resets=True) == []
    [problem] = judge(with_device(hbm=8192), resets=True)
    assert "8192" in problem
    assert judge(with_device(binding=8, resets=0, hbm=8192))
    [problem] = judge(with_device(buffers=2), resets=True)
    assert "buffers" in problem


def test_a_device_that_is_kept_awake_fails() -> None:
    assert judge(with_device(awake=0), resets=True) == []
    [problem] = judge(with_device(awake=1), resets=True)
    assert "awake" in problem
    assert judge(with_device(binding=8, resets=0, awake=1))


def test_a_device_that_does_not_tell_fails() -> None:
    assert judge(replace(BEFORE, devices={}, silent=[f"{NAME}: no such file"]))


def test_messages_that_nobody_has_read_fail() -> None:
    [problem] = judge(replace(BEFORE, lost=3), messages=[".*"], resets=True)
    assert "3 messages" in problem


def test_a_reference_to_the_module_that_is_left_fails() -> None:
    assert judge(replace(BEFORE, references=0)) == []
    [problem] = judge(replace(BEFORE, references=2))
    assert "references" in problem


# ---- The kernel's log, as it is read ----


def said(sequence: int, priority: int = 6, text: str = "vtpu: hello") -> bytes:
    return f"{priority},{sequence},123456,-;{text}\n SUBSYSTEM=pci\n".encode()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What reading /dev/kmsg gives, once each; then there is no more."""
    answers: list[Any] = []

    def read(_file: int, _size: int) -> bytes:
        answer = answers.pop(0) if answers else BlockingIOError()
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    fake = SimpleNamespace(O_RDONLY=0, O_NONBLOCK=0, open=lambda *_: 3, read=read)
    monkeypatch.setattr(watch, "os", fake)
    monkeypatch.setattr(watch, "NOTE", tmp_path / "note")
    monkeypatch.setattr(watch, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(watch, "REFERENCES", tmp_path / "refcnt")
    return answers


def test_what_was_said_before_the_watch_began_passes(log: list[Any]) -> None:
    log += [said(4, 3, STUCK), said(9, 3, STUCK)]  # with a gap, too
    assert watch.Watch().problems(watch.Expected()) == []


def test_each_message_is_judged_once_by_whoever_looks_next(log: list[Any]) -> None:
    first = watch.Watch()
    log += [said(0, 3, STUCK)]
    assert first.problems(watch.Expected()) == ["kernel:", STUCK]
    log += [said(0, 3, STUCK), said(1), said(2, 12, "of a process"), said(3, 4, OVER_TIME)]
    assert watch.Watch().problems(watch.Expected()) == ["kernel:", OVER_TIME]
    assert watch.Watch().problems(watch.Expected()) == []


@pytest.mark.parametrize("error", [[], [BrokenPipeError()]], ids=["between looks", "amid reading"])
def test_what_the_log_has_dropped_is_a_problem_once(log: list[Any], error: list[Any]) -> None:
    log += [said(5)]
    first = watch.Watch()
    log += [said(6), *error, said(9), said(10)]
    [problem] = first.problems(watch.Expected())
    assert "2 messages" in problem
    log += [said(9), said(10), said(11)]
    assert watch.Watch().problems(watch.Expected()) == []
    log += [*error, said(20)]
    [problem] = watch.Watch().problems(watch.Expected())
    assert "8 messages" in problem


def test_a_device_with_a_driver_is_looked_at_or_missed(
    log: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch, "DEBUGFS", tmp_path / "debugfs")
    monkeypatch.setattr(watch, "SETTLE_SECONDS", 0)
    first = watch.Watch()
    device, debugfs = tmp_path / "driver" / NAME, tmp_path / "debugfs" / NAME
    (device / "power").mkdir(parents=True)
    debugfs.mkdir(parents=True)
    for name in ("device_resets", "engine_resets", "power/runtime_usage"):
        (device / name).write_text("0\n")
    (debugfs / "hbm").write_text("0 of 4096 bytes used, 0 evicted\n")
    [problem] = first.problems(watch.Expected())
    assert NAME in problem and "dma" in problem
    (debugfs / "dma").write_text("0 buffers, 0 bytes mapped\n")
    assert watch.Watch().problems(watch.Expected()) == []
    (device / "power/runtime_usage").write_text("1\n")
    [problem] = watch.Watch().problems(watch.Expected())
    assert "awake" in problem
