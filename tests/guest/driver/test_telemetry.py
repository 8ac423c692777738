# SPDX-License-Identifier: MIT
"""What the driver tells of itself: debugfs, sysfs, fdinfo, tracepoints, and faults on demand."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import FOLDER
from watch import HANG, LOST, STUCK_ENGINES, STUCK_QUEUE

pytestmark = pytest.mark.guest
TRACE = "/sys/kernel/tracing"
STALE = r"vtpu .*translations of context \d+ stay in use"

PRELUDE = f"""
import sys, atexit, errno, glob, os, re
sys.path.insert(0, {FOLDER!r})
import vtpu_raw as raw
from cases import Setup, until, pci_device
from vtpu_raw import raises

PCI = f"/sys/bus/pci/devices/{{pci_device()}}"
[DEBUG] = glob.glob(f"/sys/kernel/debug/accel/{{pci_device()}}")

def read(name):
    return open(f"{{DEBUG}}/{{name}}").read()

def write(name, value):
    with open(f"{{DEBUG}}/{{name}}", "w") as file:
        file.write(str(value))

def register(name):
    return int(re.search(rf"^{{name}}: (\\S+)$", read("registers"), re.M)[1], 0)

def attribute(name):
    return open(f"{{PCI}}/{{name}}").read().rstrip()

def power(control):
    open(f"{{PCI}}/power/control", "w").write(control)

# A device that sleeps is not looked at; it may when the program has ended.
power("on")
atexit.register(power, "auto")

def fdinfo(dev):
    '''By the rules of the kernel's drm-usage-stats.rst.'''
    units = {{"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "ns": 1}}
    found = {{}}
    for line in open(f"/proc/self/fdinfo/{{dev.fd}}"):
        key, value = line.rstrip("\\n").split(":", 1)
        if re.match("drm-(engine|cycles|total|shared|active|resident|purgeable)-", key):
            number, _, unit = value.strip().partition(" ")
            assert key not in found
            found[key] = int(number) * units[unit]
        elif key.startswith("drm-"):
            found[key] = value.strip()
    return found

def settled():
    '''All that was executed is booked.'''
    until(lambda: not register("STATUS") & 4, 20, "the device is idle")
"""


def python(guest: Any, body: str) -> str:
    """Runs a program in the guest, and gives what it printed."""
    guest.put((PRELUDE + body).encode(), f"{FOLDER}/telemetry.py")
    return guest.run(["python3", f"{FOLDER}/telemetry.py"], timeout=90).check().text


@pytest.mark.expects(HANG, resets=True)
def test_debugfs_while_a_program_runs(guest: Any) -> None:
    """Owner, ring and address space of a queue that is at work, and the same queue's end."""
    python(
        guest,
        """
with Setup(timeout_ms=30000) as dev:
    sync = dev.syncobj()
    jobs = [raw.nop(1), dev.run(raw.LOOP, cookie=5), raw.copy(dev.host_va, dev.hbm_va, 64, 6)]
    dev.submit(dev.queue_id, jobs, [(sync, raw.SYNC_SIGNAL, 0)])
    until(lambda: "RUNNING, head 1, tail 3, pc 0x0" in read("queues"), 60, "the program runs")
    queues = read("queues")
    assert re.match(rf"queue \\d+: pid {os.getpid()} python3\\n  status ok, ", queues), queues
    assert "priority 1, timeout 30000 ms" in queues and "1 in flight" in queues, queues
    [number] = re.findall(r"^queue (\\d+):", queues, re.M)
    rings = read("rings").splitlines()
    assert rings[0] == f"queue {number}:", rings
    assert f"1: RUN cookie=0x5 code={dev.code_va:#x}/0x40 entry=0 args=0/0" in rings[1].replace(
        "0x0", "0"), rings
    assert re.fullmatch(rf"  2: COPY cookie=0x6 fence=\\d+ irq dst={dev.host_va:#x} "
                        rf"src={dev.hbm_va:#x} bytes=0x40", rings[2]), rings
    contexts = read("contexts")
    for va, what in (dev.host_va, "rw- 4K system"), (dev.hbm_va, "rw- 4K hbm"):
        pattern = rf"  {va:#x}-{va + dev.size:#x} {what} \\S+ bo=\\S+\\+0x0/{dev.size:#x}$"
        assert re.search(pattern, contexts, re.M), contexts
    assert re.search(rf"  {dev.code_va:#x}-\\S+ r-x 4K system ", contexts), contexts
    assert f"{2 * dev.size + raw.PAGE} bytes mapped" in contexts, contexts
    used = dev.memory().hbm_used
    assert read("hbm").startswith(f"{used} of {dev.info().hbm_bytes} bytes used, 0 evicted\\n")
    assert f"used {used} free" in read("hbm")
    assert re.search(rf"pid {os.getpid()} python3\\ndrm-engine-tpu:", read("usage"))
    before = dev.resets()
    with raises(errno.EINVAL):
        write("reset_queue", 99)
    with raises(errno.ENOENT):
        write("reset_queue", 31)
    write("reset_queue", number)
    dev.wait(sync)
    assert dev.fence_error(sync) == -errno.ETIMEDOUT
    assert dev.resets().queue_resets == before.queue_resets + 1
    assert "status hung (stopped)" in read("queues")
    other = dev.queue(dev.vm_id)
    write("reset_device", 1)
    assert dev.finish(other, [raw.nop()]) == 1
    assert dev.resets().device_resets == before.device_resets + 1
assert read("queues") == read("contexts") == read("rings") == ""
""",
    )


def test_huge_and_partial_mappings(guest: Any) -> None:
    """Neighbours of one buffer's pieces are told apart; a hole stays one."""
    python(
        guest,
        """
with Setup() as dev:
    bo = dev.bo(4 * raw.HUGE, raw.HBM)
    va = 1 << 40
    dev.bind(dev.vm_id, bo, va, 2 * raw.HUGE, raw.READ, raw.HUGE)
    dev.bind(dev.vm_id, bo, va + 2 * raw.HUGE, raw.PAGE, raw.WRITE, raw.PAGE)
    dev.bind(dev.vm_id, bo, va + 3 * raw.HUGE, raw.PAGE, raw.EXEC)
    found = [line.split() for line in read("contexts").splitlines() if "  0x100" in line]
    found = [(words[0], words[1], words[2], words[5].partition("+")[2]) for words in found
             if int(words[0].split("-")[0], 0) >= va]
    assert found == [
        (f"{va:#x}-{va + 2 * raw.HUGE:#x}", "r--", "2M", "0x200000/0x800000"),
        (f"{va + 2 * raw.HUGE:#x}-{va + 2 * raw.HUGE + raw.PAGE:#x}", "-w-", "4K",
         "0x1000/0x800000"),
        (f"{va + 3 * raw.HUGE:#x}-{va + 3 * raw.HUGE + raw.PAGE:#x}", "--x", "4K",
         "0x0/0x800000"),
    ], found
""",
    )


@pytest.mark.expects(resets=True)
def test_a_clients_time_is_the_devices_count(guest: Any) -> None:
    """To the nanosecond, over the ends of queues and resets; and never less than before."""
    python(
        guest,
        """
with Setup(timeout_ms=30000) as a, Setup() as b:
    settled()
    start = register("STAT_BUSY_NS")
    assert fdinfo(a)["drm-engine-tpu"] == fdinfo(b)["drm-engine-tpu"] == 0
    for dev, times in (a, 3), (b, 9):
        for _ in range(times):
            dev.finish_ok([raw.fill(dev.hbm_va, dev.size, 1), dev.run(raw.HALT)])
            dev.unbind(dev.vm_id, dev.code_va, raw.PAGE)
    other = b.queue(b.vm_id)
    assert b.finish(other, [raw.fill(b.hbm_va, b.size, 2)]) == 1
    settled()
    spent = [fdinfo(dev)["drm-engine-tpu"] for dev in (a, b)]
    assert all(spent) and sum(spent) == register("STAT_BUSY_NS") - start, spent
    b.call("queue_destroy", queue_id=other)
    a.call("queue_destroy", queue_id=a.queue_id)
    assert [fdinfo(dev)["drm-engine-tpu"] for dev in (a, b)] == spent
    assert int(attribute("busy_time_us")) >= sum(spent) // 1000

    # A program that runs now counts now, and has counted once it was stopped.
    queue = a.queue(a.vm_id, timeout_ms=30000)
    sync = a.syncobj()
    a.submit(queue, [a.run(raw.LOOP)], [(sync, raw.SYNC_SIGNAL, 0)])
    until(lambda: fdinfo(a)["drm-engine-tpu"] >= spent[0] + 50_000_000, 20, "its time goes on")
    write("reset_device", 1)
    a.wait(sync)
    after = fdinfo(a)["drm-engine-tpu"]
    assert after >= spent[0] + 50_000_000
    assert fdinfo(b)["drm-engine-tpu"] == spent[1]
    b.finish_ok([raw.fill(b.hbm_va, b.size, 3)])
    settled()
    assert fdinfo(a)["drm-engine-tpu"] == after
    assert fdinfo(b)["drm-engine-tpu"] == spent[1] + register("STAT_BUSY_NS")
""",
    )


def test_a_clients_memory(guest: Any) -> None:
    python(
        guest,
        """
with Setup(timeout_ms=30000) as dev:
    found = fdinfo(dev)
    assert found["drm-driver"] == "vtpu" and found["drm-pdev"] == pci_device()
    assert found["drm-total-hbm"] == found["drm-resident-hbm"] == dev.size
    assert found["drm-total-system"] == found["drm-resident-system"] == dev.size
    assert read("dma") == f"1 buffers, {dev.size} bytes mapped\\n"
    more = dev.bo(8 * raw.PAGE, raw.HBM)
    dev.bo(2 * raw.PAGE)  # of system memory, and nothing needs its pages yet
    found = fdinfo(dev)
    assert found["drm-total-hbm"] == found["drm-resident-hbm"] == dev.size + 8 * raw.PAGE
    assert found["drm-total-system"] == dev.size + 2 * raw.PAGE
    assert found["drm-resident-system"] == dev.size
    assert found["drm-active-hbm"] == found["drm-active-system"] == 0
    dev.submit(dev.queue_id, [dev.run(raw.LOOP)])
    found = fdinfo(dev)
    assert found["drm-active-hbm"] == dev.size  # what is mapped where the program runs
    assert found["drm-active-system"] == dev.size + raw.PAGE
    assert read("dma") == f"2 buffers, {dev.size + raw.PAGE} bytes mapped\\n"
    dev.close_bo(more)
    assert fdinfo(dev)["drm-total-hbm"] == dev.size
    with Setup() as other:
        assert fdinfo(other)["drm-client-id"] != found["drm-client-id"]
        assert fdinfo(other)["drm-total-hbm"] == other.size
""",
    )


def test_sysfs(guest: Any) -> None:
    python(
        guest,
        """
with Setup() as dev:
    info, memory, resets = dev.info(), dev.memory(), dev.resets()
    assert attribute("hw_version") == f"{info.hw_version >> 16}.{info.hw_version & 0xffff}"
    assert int(attribute("isa_version")) == info.isa_version
    assert int(attribute("hbm_total")) == info.hbm_bytes
    assert int(attribute("hbm_used")) == memory.hbm_used > 0
    assert int(attribute("device_resets")) == resets.device_resets
    assert int(attribute("engine_resets")) == resets.engine_resets
    assert int(attribute("queue_resets")) == resets.queue_resets
    assert dev.finish(dev.queue_id, [dev.run(raw.trap(1))]) == -errno.EFAULT
""",
    )


@pytest.mark.expects(STALE, STUCK_QUEUE, STUCK_ENGINES, LOST, resets=True)
def test_faults_on_demand(guest: Any) -> None:
    """Each ends as the driver's rules say; a number is used up."""
    python(
        guest,
        """
def armed(what, count=1):
    write(f"inject/{what}", count)

with Setup(timeout_ms=400) as dev:
    before = dev.resets()
    armed("irq")
    dev.finish_ok([raw.fill(dev.host_va, 4, 7)])  # found by its time limit
    armed("hbm", 2)
    for _ in range(2):
        with raises(errno.ENOSPC):
            dev.bo(raw.PAGE, raw.HBM)
    dev.bo(raw.PAGE, raw.HBM)
    armed("memory")
    with raises(errno.ENOMEM):
        dev.submit(dev.queue_id, [raw.nop()])
    dev.finish_ok([raw.nop()])
    assert dev.resets() == before
    armed("tlb", 2)  # for the flush, and for the one after the program was stopped
    dev.unbind(dev.vm_id, dev.hbm_va, dev.size)
    assert dev.resets().device_resets == before.device_resets + 1
    dev.finish_ok([raw.nop()])  # idle queues go on
    armed("stop")
    dev.call("queue_destroy", queue_id=dev.queue_id)
    until(lambda: dev.resets().engine_resets == before.engine_resets + 1, 20, "engines")
    assert dev.resets().device_resets == before.device_resets + 1
    dev.queue_id = dev.queue(dev.vm_id)
    armed("stop")
    armed("engines")
    dev.call("queue_destroy", queue_id=dev.queue_id)
    until(lambda: dev.resets().device_resets == before.device_resets + 2, 20, "the device")
    assert dev.resets().engine_resets == before.engine_resets + 1
    dev.queue_id = dev.queue(dev.vm_id)
    # A self-test interrupt comes for no reason, as far as the queues know.
    def interrupts():
        return sum(int(n) for line in open("/proc/interrupts") if line.rstrip().endswith("vtpu")
                   for n in line.split()[1:] if n.isdigit())
    count = interrupts()
    write("test_irq", 1)
    until(lambda: interrupts() > count, 20, "the interrupt")
    dev.finish_ok([raw.nop()])
    # A reset that fails: the device is given up until a function reset.
    armed("reset")
    with raises(errno.EIO):
        write("reset_device", 1)
    with raises(errno.EIO):
        dev.queue(dev.vm_id)
    with open(f"{PCI}/reset", "w") as file:
        file.write("1")
for name in os.listdir(f"{DEBUG}/inject"):
    if not name.startswith("fail_"):
        assert read(f"inject/{name}") == "0\\n", name
with Setup() as dev:
    dev.finish_ok([raw.nop()])
""",
    )


def test_a_device_that_sleeps_is_left_asleep(guest: Any) -> None:
    """Whoever only looks gets what was known when it fell asleep, or ENODATA."""
    python(
        guest,
        """
def asleep():
    return attribute("power/runtime_status") == "suspended"

with Setup() as dev:
    dev.finish_ok([raw.fill(dev.hbm_va, dev.size, 1)])
    settled()
    power("auto")
    until(asleep, 60, "the device sleeps")
    for name in "registers", "rings":
        with raises(errno.ENODATA):
            read(name)
    assert "context" in read("queues") and "device:" not in read("queues")
    assert read("hbm") and read("contexts") and read("usage")
    busy = fdinfo(dev)["drm-engine-tpu"]
    assert busy > 0 and int(attribute("busy_time_us")) >= busy // 1000
    assert int(attribute("hbm_used")) > 0
    assert asleep()
    write("test_irq", 0)  # an order, and so it wakes
    assert not asleep()
    assert fdinfo(dev)["drm-engine-tpu"] == busy
""",
    )


def test_nothing_is_touched_once_the_device_has_gone(guest: Any) -> None:
    """Files that were opened before tell so, and the last numbers stay."""
    python(
        guest,
        """
from cases import DRIVER
with Setup() as dev:
    dev.finish_ok([raw.fill(dev.hbm_va, dev.size, 1)])
    settled()
    spent = fdinfo(dev)["drm-engine-tpu"]
    assert spent
    files = [open(f"{DEBUG}/{name}") for name in
             ("registers", "queues", "rings", "contexts", "hbm", "usage")]
    commands = [os.open(f"{DEBUG}/{name}", os.O_WRONLY) for name in
                ("reset_queue", "reset_device", "test_irq", "inject/reset")]
    busy = open(f"{PCI}/busy_time_us")
    address = pci_device()
    open(f"{DRIVER}/unbind", "w").write(address)
    # The files went with the device: EIO is debugfs's word for that.
    for file in files:
        with raises(errno.EIO, errno.ENODEV):
            file.read()
    for file in commands:
        with raises(errno.EIO, errno.ENODEV):
            os.write(file, b"1")
    with raises(errno.ENODEV):
        busy.read()
    assert fdinfo(dev).get("drm-engine-tpu", spent) == spent  # DRM may not ask the driver
open(f"{DRIVER}/bind", "w").write(address)
until(lambda: glob.glob(raw.DEVICES), 20, "the device is there again")
with Setup() as dev:
    dev.finish_ok([raw.nop()])
""",
    )


JOB = f"""
from pathlib import Path
from vtpu.runtime import Device, TpuFaultError

trace = Path("{TRACE}")
(trace / "trace").write_text("")
(trace / "events/vtpu/enable").write_text("1")
with Device.open() as device:
    executable = device.load("/opt/vtpu/aot/step.elf")
    with device.queue() as queue:
        queue.nop().wait()
        small = device.buffer(4096)
        launch = queue.prepare(executable, dict.fromkeys(executable.args, small))
        try:
            launch.submit(cookie=0xABC123).wait()
        except TpuFaultError:
            print("faulted")
(trace / "events/vtpu/enable").write_text("0")
"""


def test_one_job_from_the_runtime_to_the_device(guest: Any) -> None:
    """The runtime's cookie, the driver's fence and entries, the device's queue and entry; and
    the report of the core dump, which tells the same."""

    def monitor(line: str) -> None:
        assert guest.qmp("human-monitor-command", **{"command-line": line}) == ""

    if guest.run("test -e /opt/vtpu/aot/step.elf").returncode:
        pytest.skip("the guest has no compiled model")
    guest.run(f"mountpoint -q {TRACE} || mount -t tracefs none {TRACE}").check()
    dumps = "/sys/class/devcoredump/devcd*/data"
    guest.run(f"for dump in {dumps}; do test ! -e $dump || echo 0 >$dump; done").check()
    guest.put(JOB.encode(), f"{FOLDER}/job.py")
    log = guest.host_log()
    seen = len(log.read_text())
    events = ("vtpu_command_begin", "vtpu_command_end", "vtpu_fault")
    for event in events:
        monitor(f"trace-event {event} on")
    try:
        done = guest.run(["python3", f"{FOLDER}/job.py"], timeout=90).check()
    finally:
        for event in events:
            monitor(f"trace-event {event} off")
    assert done.text == "faulted\n"

    kernel = [
        (match[1], dict(pair.split("=") for pair in match[2].split()))
        for match in re.finditer(
            r": vtpu_(job_submit|job_run|job_done|fault): (.*)$",
            guest.get(f"{TRACE}/trace").decode(),
            re.M,
        )
    ]
    device = re.findall(
        r"vtpu_(command_begin|command_end|fault) dev \S+ queue (\d+) (?:op|cause) (\d+) "
        r"(?:entry|address) (\S+)",
        log.read_text()[seen:],
    )

    def one(name: str, **ids: str) -> dict[str, str]:
        [found] = [
            fields for event, fields in kernel if event == name and ids.items() <= fields.items()
        ]
        return found

    submit = one("job_submit", cookie="0xabc123")
    run = one("job_run", fence=submit["fence"])
    assert run["queue"] == submit["queue"] and run["cookie"] == "0xabc123"
    assert int(run["tail"]) - int(run["first"]) == int(submit["cmds"]) == 1
    fault = one("fault", queue=run["queue"], first=run["first"])
    assert fault["cookie"] == "0xabc123"
    assert one("job_done", queue=run["queue"], seq=run["seq"])["error"] == "-14"
    # The device began that very entry, did not end it, and faulted for the same reason.
    assert ("command_begin", run["queue"], "2", run["first"]) in device
    assert ("command_end", run["queue"], "2", run["first"]) not in device
    assert ("fault", run["queue"], fault["cause"], fault["addr"]) in device
    # The one before, of no cookie, is another of the device's entries.
    assert ("command_end", run["queue"], "1", str(int(run["first"]) - 1)) in device

    report = guest.run(f"python3 -m vtpu_compiler coredump {dumps}", timeout=90).check().text
    assert report.startswith(f"fault: UNMAPPED, read of {fault['addr']} at pc {fault['pc']}\n")
    assert f"queue {run['queue']}, entry {run['first']}," in report
    assert "program step of /opt/vtpu/aot/step.elf" in report, report
    assert "launch block at" in report
    assert re.search(rf"^=> +{int(fault['pc'], 16):x}: \w", report, re.M)
    assert re.search(r"model\.\S+ vtpu/models/llama\.py:\d+", report)
