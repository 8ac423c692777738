# SPDX-License-Identifier: MIT
"""Where the driver's fuzzer begins: programs in words, kmod/fuzz/README.md."""

from __future__ import annotations

import pytest
from vtpu_guest import fuzz_driver

CALLS = fuzz_driver.calls()


def test_a_program_in_words_is_numbers_and_zeroes() -> None:
    assert CALLS[0] == "nothing"
    first, second = CALLS.index("vm_create"), CALLS.index("bo_create")
    data = fuzz_driver.program("# what it is\nparallel\nvm_create\n\nbo_create 0 0 1  # HBM\n")
    assert data[:2] == bytes([1, first])
    assert data[-fuzz_driver.CALL_BYTES :].rstrip(b"\0") == bytes([second, 0, 0, 1])
    assert data.replace(b"\0", b"") == bytes([1, first, second, 1])
    assert fuzz_driver.program("killed\nvm_create")[0] == 2


def test_a_call_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="vm_creat"):
        fuzz_driver.program("vm_creat")


def test_one_program_makes_every_call() -> None:
    made = {line.split()[0] for line in (fuzz_driver.CORPUS / "each_call").read_text().splitlines()}
    assert set(CALLS) <= made
