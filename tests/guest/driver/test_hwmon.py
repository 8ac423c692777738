# SPDX-License-Identifier: MIT
"""The chip's sensors as the kernel's other tools find them: /sys/class/hwmon."""

from __future__ import annotations

from typing import Any

import pytest
from test_injection import inject
from test_telemetry import python

pytestmark = pytest.mark.guest

SENSORS = """
def hwmon():
    '''The folder that tools find by its name, which is the device's.'''
    [found] = [path for path in glob.glob("/sys/class/hwmon/hwmon*")
               if open(f"{path}/name").read() == "vtpu\\n"]
    assert os.path.realpath(f"{found}/device") == os.path.realpath(PCI)
    return found

def sensor(name):
    return int(open(f"{hwmon()}/{name}").read())
"""


def test_what_they_show(guest: Any) -> None:
    """An idle chip, one that has worked, and a temperature of the host's choice."""
    inject(guest, "inject-temperature", 94_999)
    python(
        guest,
        SENSORS
        + """
assert sensor("temp1_input") == 94_999 and sensor("temp1_crit") == 95_000
assert sensor("temp1_crit_alarm") == 0
with Setup() as dev:
    settled()
    energy, busy = sensor("energy1_input"), register("STAT_BUSY_NS")
    big = dev.bo(8 << 20, raw.HBM)
    dev.bind(dev.vm_id, big, 1 << 40, 8 << 20)
    while register("STAT_BUSY_NS") - busy < 50_000_000:
        dev.finish_ok([raw.fill(1 << 40, 8 << 20, 1)] * 4)
    settled()
    # 60 W more while it works; a look is up to a millisecond old.
    spent = register("STAT_BUSY_NS") - busy
    until(lambda: sensor("energy1_input") - energy >= 60 * spent / 1000, 20, "energy for it")
    assert 2_000_000 <= sensor("power1_average") <= 75_000_000  # it may have slept before
""",
    )
    inject(guest, "inject-temperature", 95_001)
    python(guest, SENSORS + 'assert sensor("temp1_crit_alarm") == 1')
    inject(guest, "inject-temperature", 0xFFFFFFFF)
    python(
        guest,
        SENSORS
        + """
assert 30_000 < sensor("temp1_input") < 75_000 and sensor("temp1_crit_alarm") == 0
""",
    )


def test_a_device_that_sleeps_is_left_asleep(guest: Any) -> None:
    python(
        guest,
        SENSORS
        + """
power("auto")
until(lambda: attribute("power/runtime_status") == "suspended", 60, "the device sleeps")
for name in "temp1_input", "temp1_crit", "temp1_crit_alarm", "power1_average", "energy1_input":
    with raises(errno.ENODATA):
        sensor(name)
assert attribute("power/runtime_status") == "suspended"
power("on")
assert sensor("temp1_input") > 0
""",
    )


def test_readers_while_the_device_goes_and_comes(guest: Any) -> None:
    python(
        guest,
        SENSORS
        + """
from cases import rebinding_amid
import threading
seen, mine = set(), threading.local()

def read_it():
    # Again and again through one open file, as a monitor does, until its device has gone.
    try:
        if not hasattr(mine, "file"):
            [folder] = glob.glob(f"{PCI}/hwmon/hwmon*") or [""]
            mine.file = open(f"{folder}/temp1_input", "rb", buffering=0)
        mine.file.seek(0)
        seen.add(int(mine.file.read(32)) > 0)
    except OSError as error:
        seen.add(error.errno)
        if error.errno == errno.ENODEV:
            del mine.file
        if error.errno != errno.ENODATA:
            raise

rebinding_amid(read_it, threads=3, times=6)
assert {True, errno.ENODEV} <= seen <= {True, errno.ENODEV, errno.ENOENT, errno.ENODATA}, seen
power("on")
assert sensor("temp1_input") > 0
""",
    )


@pytest.mark.expects(resets=True)
def test_readers_amid_function_resets(guest: Any) -> None:
    """Values, or ENODATA while the BARs decode nothing; never all ones or zero."""
    python(
        guest,
        SENSORS
        + """
import threading
stop, values, problems = threading.Event(), set(), []
path = f"{hwmon()}/temp1_input"

def reader():
    while not stop.is_set():
        try:
            values.add(int(open(path).read()))
        except OSError as error:
            if error.errno != errno.ENODATA:
                problems.append(error)

readers = [threading.Thread(target=reader) for _ in range(2)]
for thread in readers:
    thread.start()
for _ in range(5):
    open(f"{PCI}/reset", "w").write("1")
stop.set()
for thread in readers:
    thread.join()
assert not problems, problems
assert values and min(values) > 30_000 and max(values) < 75_000, values
""",
    )
