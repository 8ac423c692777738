# SPDX-License-Identifier: MIT
"""For gdb: stacks of an x86-64 Linux kernel that has no DWARF of its own.

The kernel carries ORC tables for its own stack traces: a sorted list of
addresses, and for each what the stack looks like from there on. This reads
them from the halted machine, for the kernel and for every module.

Format: arch/x86/include/asm/orc_types.h and orc_lookup.h of Linux 6.4 and
later. Run by gdb's own Python; nothing imports it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import gdb  # type: ignore[import-untyped]
from gdb.unwinder import Unwinder, register_unwinder  # type: ignore[import-untyped]

# enum of orc_types.h
_REG_PREV_SP, _REG_BP, _REG_SP, _REG_BP_INDIRECT, _REG_SP_INDIRECT = 1, 4, 5, 8, 9
_TYPE_CALL, _TYPE_REGS, _TYPE_REGS_PARTIAL = 2, 3, 4
_ENTRY = struct.Struct("<hhH")
# Offsets in struct pt_regs, and in the part of it that an interrupt pushes.
_REGS_BP, _REGS_IP, _REGS_SP = 32, 128, 152
_IRET_IP, _IRET_SP = 0, 24


@dataclass(frozen=True)
class Table:
    """Where one ORC table lies, and the code that it covers."""

    ips: int
    entries: int
    count: int
    start: int
    end: int

    def find(self, address: int) -> tuple[int, int, int] | None:
        """(sp_offset, bp_offset, flags) of the last entry at or before the address."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self._ip(middle) <= address:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return None
        found: tuple[int, int, int] = _ENTRY.unpack(_read(self.entries + (low - 1) * 6, 6))
        return found

    def _ip(self, index: int) -> int:
        """Each is stored as its distance from its own place."""
        at = self.ips + index * 4
        (distance,) = struct.unpack("<i", _read(at, 4))
        return at + int(distance)


def _read(address: int, size: int) -> bytes:
    return bytes(gdb.selected_inferior().read_memory(address & (1 << 64) - 1, size))


def _word(address: int) -> int:
    (value,) = struct.unpack("<Q", _read(address, 8))
    return int(value)


def _symbol(name: str) -> int:
    found = gdb.lookup_static_symbol(name) or gdb.lookup_global_symbol(name)
    if found is not None:
        return int(found.value().address)
    return int(gdb.parse_and_eval(f"(unsigned long)&'{name}'")) & (1 << 64) - 1


def _kernel_table() -> Table:
    ips, ips_end = _symbol("__start_orc_unwind_ip"), _symbol("__stop_orc_unwind_ip")
    count = (ips_end - ips) // 4
    return Table(ips, _symbol("__start_orc_unwind"), count, _symbol("_text"), _symbol("_end"))


def _module_tables() -> list[Table]:
    """By the type of the driver's debug information, from the kernel's list."""
    try:
        kind = gdb.lookup_type("struct module")
    except gdb.error:
        return []  # the driver is not loaded: nothing knows the type
    head = _symbol("modules")
    offset = next(field.bitpos // 8 for field in kind.fields() if field.name == "list")
    tables = []
    at = _word(head)
    while at != head:
        module = gdb.Value(at - offset).cast(kind.pointer()).dereference()
        arch, text = module["arch"], module["mem"][0]
        base = int(text["base"])
        ips, entries = int(arch["orc_unwind_ip"]), int(arch["orc_unwind"])
        count = int(arch["num_orcs"])
        tables.append(Table(ips, entries, count, base, base + int(text["size"])))
        at = _word(at)
    return tables


class _FrameId:
    def __init__(self, sp: int, pc: int) -> None:
        self.sp = gdb.Value(sp).cast(gdb.lookup_type("unsigned long"))
        self.pc = gdb.Value(pc).cast(gdb.lookup_type("unsigned long"))


class OrcUnwinder(Unwinder):  # type: ignore[misc]
    """One frame further, by the table of the code that it is in."""

    def __init__(self) -> None:
        super().__init__("orc")
        self._tables: list[Table] = []

    def _table(self, address: int) -> Table | None:
        if not self._tables:
            self._tables = [_kernel_table(), *_module_tables()]
        for table in self._tables:
            if table.start <= address < table.end:
                return table
        return None

    def __call__(self, frame: Any) -> Any:
        registers = [frame.read_register(name) for name in ("rip", "rsp", "rbp")]
        ip, sp, bp = (int(value) & (1 << 64) - 1 for value in registers)
        try:
            table = self._table(ip)
            # What a call returns to may belong to the next thing; the newest
            # frame is where it is.
            found = table.find(ip if frame.level() == 0 else ip - 1) if table else None
            return self._previous(frame, ip, sp, bp, *found) if found else None
        except gdb.MemoryError:
            return None

    def _previous(
        self, frame: Any, ip: int, sp: int, bp: int, sp_offset: int, bp_offset: int, flags: int
    ) -> Any:
        sp_reg, bp_reg, kind = flags & 15, flags >> 4 & 15, flags >> 8 & 7
        if sp_reg == _REG_SP:
            base = sp + sp_offset
        elif sp_reg == _REG_BP:
            base = bp + sp_offset
        elif sp_reg == _REG_SP_INDIRECT:
            base = _word(sp) + sp_offset
        elif sp_reg == _REG_BP_INDIRECT:
            base = _word(bp + sp_offset)
        else:
            return None
        if kind == _TYPE_CALL:
            new_ip, new_sp = _word(base - 8), base
        elif kind == _TYPE_REGS:
            new_ip, new_sp, bp = (_word(base + at) for at in (_REGS_IP, _REGS_SP, _REGS_BP))
        elif kind == _TYPE_REGS_PARTIAL:
            new_ip, new_sp = _word(base + _IRET_IP), _word(base + _IRET_SP)
        else:
            return None  # the end of the stack
        if bp_reg == _REG_PREV_SP:
            bp = _word(base + bp_offset)
        elif bp_reg == _REG_BP:
            bp = _word(bp + bp_offset)
        info = frame.create_unwind_info(_FrameId(base, ip))
        kind64 = gdb.lookup_type("unsigned long")
        for name, value in (("rip", new_ip), ("rsp", new_sp), ("rbp", bp)):
            info.add_saved_register(name, gdb.Value(value).cast(kind64))
        return info


register_unwinder(None, OrcUnwinder(), replace=True)
