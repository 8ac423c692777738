# SPDX-License-Identifier: MIT
"""The GGUF reader on files made here: what it reads, and how it refuses."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from vtpu.gguf import GGUFError, GGUFFile

U8, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 0, 5, 6, 7, 8, 9, 10, 12


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def gguf(keys: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


KEYS = [
    key("general.architecture", STRING, text("llama")),
    key("a.count", I32, struct.pack("<i", -7)),
    key("a.big", U64, struct.pack("<Q", 2**63 + 1)),
    key("a.real", F64, struct.pack("<d", 0.1)),
    key("a.yes", BOOL, b"\x01"),
    key("a.words", ARRAY, array(STRING, [text("né"), text(""), text("x y")])),
    key("a.numbers", ARRAY, array(F32, [struct.pack("<f", v) for v in (1, 2.5)])),
    key("a.nested", ARRAY, array(ARRAY, [array(U8, [b"\1", b"\2"]), array(U8, [])])),
]
TENSORS = [tensor("norm", (4,), 0, 0), tensor("matrix", (3, 64), 3, 32)]
DATA = bytes(range(32)) + bytes(120)


@pytest.fixture
def load(tmp_path: Path):
    def _load(content: bytes) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return GGUFFile(path)

    return _load


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_kind_of_value(load, version: int) -> None:
    meta = load(gguf(KEYS, TENSORS, DATA, version)).metadata
    assert meta["general.architecture"] == "llama"
    assert meta["a.count"] == -7
    assert meta["a.big"] == 2**63 + 1
    assert meta["a.real"] == 0.1
    assert meta["a.yes"] is True
    assert list(meta["a.words"]) == ["né", "", "x y"]
    assert meta["a.words"][0] == "né"
    assert meta["a.numbers"] == [1, 2.5]
    assert meta["a.nested"] == [[1, 2], []]


def test_finds_tensors(load) -> None:
    file = load(gguf(KEYS, TENSORS, DATA))
    assert list(file.tensors) == ["norm", "matrix"]
    assert file.tensors["matrix"].shape == (3, 64)
    assert file.tensors["matrix"].dtype == "q4_1"
    assert file.tensors["matrix"].nbytes == 3 * 2 * 20
    assert bytes(file.raw("norm")) == bytes(range(16))
    assert file.raw("norm").readonly
    with pytest.raises(GGUFError, match=r"model\.gguf: no tensor other"):
        file.raw("other")


def test_alignment_is_the_files_own(load) -> None:
    keys = [key("general.alignment", 4, struct.pack("<I", 64))]
    content = gguf(keys, [tensor("norm", (4,), 0, 0)])
    content += bytes(-len(content) % 64) + bytes(range(16))
    assert bytes(load(content).raw("norm")) == bytes(range(16))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\x7fELF" + bytes(100), "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (gguf([], [], version=1), "GGUF version 1, supported: 2, 3"),
        (gguf([], [], version=9), "GGUF version 9, supported: 2, 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (gguf([key("k", STRING, struct.pack("<Q", 2**63))], []), "truncated"),
        (gguf([key("k", ARRAY, struct.pack("<IQ", STRING, 2**40))], []), "truncated"),
        (gguf([key("k", ARRAY, struct.pack("<IQ", F64, 2**61))], []), "truncated"),
        (gguf([key("k", 99, b"")], []), "unknown metadata type 99"),
        (gguf([key("k", STRING, struct.pack("<Q", 1) + b"\xff")], []), "corrupt text"),
        (gguf([], [tensor("t", (1, 32), 3, 0)]), "truncated: tensor t ends at byte"),
        (gguf([], [tensor("t", (2**62, 32), 3, 0)]), "truncated: tensor t ends at"),
        (gguf([], [tensor("t", (1, 256), 12, 0)]), "tensor t has type q4_k, supported"),
        (gguf([], [tensor("t", (1, 256), 77, 0)]), "tensor t has type 77, supported"),
        (gguf([], [tensor("t", (1, 33), 3, 0)]), "rows of 33 values"),
        (gguf([], [tensor("t", (), 0, 0)]), "tensor t has 0 dimensions"),
        (gguf([], [tensor("t", (1,) * 9, 0, 0)]), "tensor t has 9 dimensions"),
        (gguf([], [tensor("t", (1,), 0, 0)] * 2, bytes(4)), "the same name"),
        (gguf([key("general.alignment", U8, b"\0")], []), "general.alignment is 0"),
    ],
)
def test_refuses_and_names_the_file(load, content: bytes, message: str) -> None:
    with pytest.raises(GGUFError, match=message) as caught:
        load(content)
    assert "model.gguf" in str(caught.value)


def test_deep_nesting_is_refused(load) -> None:
    value = array(U8, [])
    for _ in range(2000):
        value = array(ARRAY, [value])
    with pytest.raises(GGUFError, match="nest more than 4 deep"):
        load(gguf([key("k", ARRAY, value)], []))


def test_bad_text_in_an_array_is_found_when_read(load) -> None:
    bad = struct.pack("<Q", 1) + b"\xff"
    words = load(gguf([key("k", ARRAY, array(STRING, [bad]))], [])).metadata["k"]
    assert len(words) == 1
    with pytest.raises(GGUFError, match=r"model\.gguf: corrupt text"):
        words[0]


def test_every_truncation_is_refused(load) -> None:
    whole = gguf(KEYS, TENSORS, DATA)
    for size in range(len(whole)):
        with pytest.raises(GGUFError):
            load(whole[:size])


def test_no_corruption_escapes_as_another_error(load) -> None:
    """Every byte of the header, changed: read all the same, or refused clearly."""
    whole = bytearray(gguf(KEYS, TENSORS, DATA))
    for at in range(len(whole) - len(DATA)):
        for flip in (0x01, 0x80, 0xFF):
            changed = whole.copy()
            changed[at] ^= flip
            try:
                file = load(bytes(changed))
                for name in file.tensors:
                    file.raw(name)
                for value in file.metadata.values():
                    list(value) if hasattr(value, "__len__") else None
            except GGUFError:
                pass


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"absent\.gguf: No such file"):
        GGUFFile(tmp_path / "absent.gguf")
