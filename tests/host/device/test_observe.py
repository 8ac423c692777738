# SPDX-License-Identifier: MIT
"""What can be seen of the machine from outside: events and the description of its state."""

import struct

from asm import R, ins, pc, program
from machine import D, Machine, Queue
from vtpu_compiler import hw


def test_events_of_commands_doorbells_and_faults(machine: Machine, queue: Queue) -> None:
    queue.do("NOP")
    queue.run_fault(ins("TRAP", code=77))
    run, nop = D["CMD_RUN"], D["CMD_NOP"]
    # Doorbells are rung by this thread, the rest comes from the machine's.
    assert [event for event in machine.events if event[0] == "DOORBELL"] == [
        ("DOORBELL", 0, 1, 0),
        ("DOORBELL", 0, 2, 0),
    ]
    assert [event for event in machine.events if event[0] != "DOORBELL"] == [
        ("BEGIN", 0, nop, 0),
        ("END", 0, nop, 0),
        ("BEGIN", 0, run, 1),
        ("FAULT", 0, hw.FAULT["TRAP"], 77),
    ]


def test_the_doorbell_register_is_traced_too(machine: Machine, queue: Queue) -> None:
    fence = queue.push("NOP")
    queue.set("DOORBELL", 1)
    queue.wait(fence)
    assert machine.events[0] == ("DOORBELL", 0, 1, 0)


def test_instructions_are_traced_when_wanted(machine: Machine, queue: Queue) -> None:
    code = program(
        ins("LI", rd=1, value=2),
        ins("V_ADD", dst=0, a=64, b=128, rows=1, width=16, dst_stride=0, a_stride=0, b_stride=0),
        ins("SUB", rd=1, a=R(1), b=1),
        ins("BNE", a=R(1), b=0, target=pc(1)),
    )
    queue.run(code)
    assert not [event for event in machine.events if event[0] == "INSTRUCTION"]
    machine.trace_instructions = True
    queue.run(code)
    loop = [("V_ADD", 1), ("SUB", 2), ("BNE", 3)]
    assert [event[2:] for event in machine.events if event[0] == "INSTRUCTION"] == [
        (hw.OPS[name].code, pc(index)) for name, index in [("LI", 0), *loop, *loop, ("HALT", 4)]
    ]


def test_injections_are_traced(machine: Machine, queue: Queue) -> None:
    machine.inject("IRQ_LOSS", 1)
    queue.do("NOP")
    machine.wait_for(lambda: machine.injected("IRQ_LOSS") == 0, "lost")
    other = Queue(machine, 1)
    other.do("NOP")
    assert [event[0] for event in machine.events].count("INJECTED") == 1


def test_the_description(machine: Machine, queue: Queue) -> None:
    queue.run(program(ins("NOP")))
    waiting = Queue(machine, 3, priority=2)
    waiting.push("WAIT", struct.pack("<QQ", machine.alloc(64), 1))
    waiting.ring_doorbell()
    machine.wait_for(lambda: "waits for a word" in machine.describe(), "held")
    faulty = Queue(machine, 2)
    faulty.run_fault(ins("NOP") + ins("TRAP", code=0x77))
    lines = machine.describe().splitlines()
    assert lines[0].startswith("device: ready, 0 resets")
    assert "engine SEQ: 3 instructions" in lines and "engine MXU: 0 instructions" in lines
    assert f"context 0: root {machine.roots[0]:#x}" in lines
    assert "queue 0: READY, context 0, priority 1, vector 1, head 1, tail 1" in lines
    assert (
        "queue 2: FAULTED, context 0, priority 1, vector 3, head 0, tail 1, "
        "fault TRAP access 0 address 0x77 pc 0x40 entry 0"
    ) in lines
    assert [line for line in lines if line.startswith("queue 3:") and "priority 2" in line]
    assert len([line for line in lines if line.startswith("queue ")]) == 3


def test_the_description_is_cut_to_its_room(machine: Machine, queue: Queue) -> None:
    whole = machine.describe()
    assert machine.describe(10) == whole[:9]
    queue.do("NOP")
