# SPDX-License-Identifier: MIT
"""The sensors against the model of docs/hardware-programming.md, and who has them."""

import struct
from collections.abc import Callable

import pytest
from machine import D, Machine, OpenFunctions, Queue
from vtpu_compiler import hw

AT = 0x400000
STEADY_MC = hw.SENSOR_AMBIENT_MC + hw.SENSOR_IDLE_MW * hw.SENSOR_MC_PER_W // 1000


def work(queue: Queue) -> None:
    queue.do("FILL", struct.pack("<QQI", AT, 32 << 20, 7))


def spent(machine: Machine, act: Callable[[], None]) -> tuple[float, float, float]:
    """Microjoules that were spent meanwhile, and microseconds that passed: at least and at most."""
    outer = machine.reg("TIME", 8)
    before = machine.reg("SENSOR_ENERGY", 8)
    inner = machine.reg("TIME", 8)
    act()
    inner = machine.reg("TIME", 8) - inner
    after = machine.reg("SENSOR_ENERGY", 8)
    outer = machine.reg("TIME", 8) - outer
    # A look within a millisecond of the last one sees that one's values.
    return after - before, inner / 1000 - 1000, outer / 1000 + 1000


def rest(machine: Machine) -> None:
    until = machine.reg("TIME", 8) + 30_000_000
    machine.wait_for(lambda: machine.reg("TIME", 8) > until, "rest")


def test_an_idle_chip_is_steady(machine: Machine) -> None:
    energy, least, most = spent(machine, lambda: rest(machine))
    assert least * hw.SENSOR_IDLE_MW / 1000 <= energy <= most * hw.SENSOR_IDLE_MW / 1000
    assert machine.reg("SENSOR_POWER") == hw.SENSOR_IDLE_MW * 1000
    assert machine.reg("SENSOR_TEMP") == STEADY_MC
    assert machine.reg("SENSOR_TEMP_CRITICAL") == hw.SENSOR_CRITICAL_MC


def test_work_costs_energy(machine: Machine, queue: Queue) -> None:
    """More than rest would in that time, by what 20 ms of work take; and no more than work can."""
    rest_w, work_w = hw.SENSOR_IDLE_MW / 1000, hw.SENSOR_ACTIVE_MW / 1000
    begin = machine.reg("TIME", 8)
    before = machine.reg("SENSOR_ENERGY", 8)

    def since() -> tuple[int, float]:
        energy = machine.reg("SENSOR_ENERGY", 8) - before
        return energy, (machine.reg("TIME", 8) - begin) / 1000 + 1000

    def costs_more() -> bool:
        work(queue)
        energy, most = since()
        return energy >= most * rest_w + 20_000 * work_w

    machine.wait_for(costs_more, "more energy")
    energy, most = since()
    assert energy <= most * (rest_w + work_w)
    assert machine.reg("SENSOR_POWER") > hw.SENSOR_IDLE_MW * 1000


def test_work_warms_it_up_and_it_cools_down(machine: Machine, queue: Queue) -> None:
    def is_warmer() -> bool:
        work(queue)
        return machine.reg("SENSOR_TEMP") >= STEADY_MC + 100

    machine.wait_for(is_warmer, "warmer")
    warm = machine.reg("SENSOR_TEMP")
    machine.wait_for(lambda: machine.reg("SENSOR_TEMP") < warm, "cooler")
    most = hw.SENSOR_AMBIENT_MC
    most += (hw.SENSOR_IDLE_MW + hw.SENSOR_ACTIVE_MW) * hw.SENSOR_MC_PER_W // 1000
    assert STEADY_MC <= machine.reg("SENSOR_TEMP") < most < hw.SENSOR_CRITICAL_MC


def test_asleep_it_needs_less(machine: Machine) -> None:
    machine.sleep(True)
    rest(machine)
    machine.sleep(False)
    assert machine.reg("SENSOR_POWER") < hw.SENSOR_IDLE_MW * 1000


def test_no_reset_changes_them(machine: Machine, queue: Queue) -> None:
    work(queue)
    machine.wait_for(lambda: machine.reg("SENSOR_ENERGY", 8) > 0, "energy")
    energy = machine.reg("SENSOR_ENERGY", 8)
    machine.reset()
    machine.wait_reset()
    assert machine.reg("SENSOR_ENERGY", 8) >= energy
    assert machine.reg("SENSOR_TEMP") >= STEADY_MC


def test_a_temperature_on_demand(machine: Machine) -> None:
    for value in (0, 120_000, 1_000_000):
        assert machine.inject("TEMPERATURE", value)
        assert machine.reg("SENSOR_TEMP") == value
    machine.reset()
    machine.wait_reset()
    assert machine.reg("SENSOR_TEMP") == 1_000_000
    assert machine.inject("TEMPERATURE", 0xFFFFFFFF)
    assert machine.reg("SENSOR_TEMP") == STEADY_MC


@pytest.mark.parametrize("name", ["TEMP", "TEMP_CRITICAL", "POWER", "ENERGY"])
def test_they_are_read_only(machine: Machine, name: str) -> None:
    machine.write(D[f"REG_SENSOR_{name}"], 1)
    assert len(machine.errors) == 1


def test_they_are_the_physical_functions_and_see_the_whole_chip(
    open_functions: OpenFunctions,
) -> None:
    physical, virtual = open_functions(2)
    assert not virtual.reg("CAPS") & D["CAPS_SENSORS"]
    queue = Queue(virtual)

    def is_warmer() -> bool:
        work(queue)
        return physical.reg("SENSOR_TEMP") > STEADY_MC

    physical.wait_for(is_warmer, "warmer")
    for name in ("TEMP", "TEMP_CRITICAL", "POWER"):
        assert virtual.reg(f"SENSOR_{name}") == 0
    assert virtual.reg("SENSOR_ENERGY", 8) == 0
