# SPDX-License-Identifier: MIT
"""The kernel's list of symbols as an ELF file, read back by pyelftools."""

from __future__ import annotations

import io

import pytest
from elftools.elf.elffile import ELFFile
from vtpu_guest.symbols import parse_kallsyms, placed, symbol_elf

KALLSYMS = """\
0000000000000000 A fixed_percpu_data
ffffffff81000000 T _text
ffffffffc0100010 t vtpu_open\t[vtpu]
ffffffff82c079c0 D jiffies
"""


def test_names_addresses_and_kinds_come_back() -> None:
    elf = ELFFile(io.BytesIO(symbol_elf(parse_kallsyms(KALLSYMS))))
    assert elf["e_machine"] == "EM_X86_64"
    found = {
        symbol.name: (symbol["st_value"], symbol["st_info"]["type"])
        for symbol in elf.get_section_by_name(".symtab").iter_symbols()
        if symbol.name
    }
    assert found == {
        "_text": (0xFFFFFFFF81000000, "STT_FUNC"),
        "jiffies": (0xFFFFFFFF82C079C0, "STT_OBJECT"),
        "vtpu_open": (0xFFFFFFFFC0100010, "STT_FUNC"),
    }
    text = elf.get_section_by_name(".text")
    for address, _ in found.values():
        assert text["sh_addr"] <= address < text["sh_addr"] + text["sh_size"]


def test_a_list_without_addresses_is_refused() -> None:
    hidden = "0000000000000000 T _text\n0000000000000000 t vtpu_open\t[vtpu]\n"
    with pytest.raises(ValueError, match="root"):
        symbol_elf(parse_kallsyms(hidden))


def test_sections_are_placed_by_name_and_nothing_else_changes() -> None:
    module = symbol_elf(parse_kallsyms(KALLSYMS))
    moved = placed(module, {".text": 0xFFFFFFFFC0200000, ".none": 1})
    before, after = (ELFFile(io.BytesIO(data)) for data in (module, moved))
    assert after.get_section_by_name(".text")["sh_addr"] == 0xFFFFFFFFC0200000
    for old, new in zip(before.iter_sections(), after.iter_sections(), strict=True):
        assert old.name == new.name
        if old.name != ".text":
            assert old.header == new.header and old.data() == new.data()
    assert sum(a != b for a, b in zip(module, moved, strict=True)) <= 8
