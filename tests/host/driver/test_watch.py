# SPDX-License-Identifier: MIT
"""What watches over the driver's tests: what it lets pass, and what it does not."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
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
IDLE = watch.Device(binding=7, resets=2, hbm=4096, buffers=1)
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


def test_a_reference_to_the_module_that_is_left_fails() -> None:
    assert judge(replace(BEFORE, references=0)) == []
    [problem] = judge(replace(BEFORE, references=2))
    assert "references" in problem
