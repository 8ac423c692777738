# SPDX-License-Identifier: MIT
"""Detokenising: split characters, split stop strings, streamed = unstreamed."""

from __future__ import annotations

import random

import pytest
from vtpu.serving.detokenizer import Detokenizer


def pieces_of(data: bytes, rng: random.Random) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        size = rng.randint(1, 4)
        pieces.append(data[at : at + size])
        at += size
    return pieces


def feed(pieces: list[bytes], stop: list[str]) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(pieces.__getitem__, stop)
    out = [detokenizer.append(i) for i in range(len(pieces))]
    return [*out, detokenizer.flush()], detokenizer.stopped


def test_a_character_split_over_tokens_is_never_replaced() -> None:
    text = "naïve — 漢字 👩‍👩‍👧 é𝄞"
    pieces = [bytes([b]) for b in text.encode()]
    out, _ = feed(pieces, [])
    assert "".join(out) == text
    assert not any("\ufffd" in part for part in out)


def test_bytes_that_are_no_character_become_one_replacement() -> None:
    out, _ = feed([b"a\xff", b"b"], [])
    assert "".join(out) == "a\ufffdb"


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    out, _ = feed([b"ok", "é".encode()[:1]], [])
    assert "".join(out) == "ok"


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        ([b"hello ST", b"OP world"], ["STOP"], "hello "),
        ([b"hello S", b"T", b"OX"], ["STOP"], "hello STOX"),
        ([b"hello STO"], ["STOP"], "hello STO"),
        ([b"aab", b"aac"], ["aac"], "aab"),
        ([b"a", b"a", b"a", b"b"], ["aab"], "a"),
        ([b"xSTOP", b"y"], ["STOP", "x"], ""),
        ([b"one\n", b"\ntwo"], ["\n\n"], "one"),
        (["é".encode()[:1], "é".encode()[1:] + b"X"], ["é"], ""),
        ([b"END"], ["END"], ""),
    ],
)
def test_stop_strings(pieces: list[bytes], stop: list[str], text: str) -> None:
    out, stopped = feed(pieces, stop)
    assert "".join(out) == text
    assert stopped == any(s in b"".join(pieces).decode() for s in stop)


def test_no_part_of_a_stop_string_is_ever_given_out() -> None:
    """At every moment the shown text is a prefix of the final one."""
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choice("abé漢") for _ in range(30))
        stop = [
            "".join(rng.choice("abé漢") for _ in range(rng.randint(1, 5)))
            for _ in range(rng.randint(1, 3))
        ]
        pieces = pieces_of(text.encode(), rng)
        out, stopped = feed(pieces, stop)
        shown = "".join(out)
        assert text.startswith(shown)
        assert not any(s in shown for s in stop)
        if not stopped:
            assert shown == text
        else:
            assert any(text.startswith(s, len(shown)) for s in stop)


def test_stop_strings_do_not_count_before_they_may() -> None:
    pieces = [b"STOP", b"a", b"STOP", b"b"]
    detokenizer = Detokenizer(pieces.__getitem__, ["STOP"])
    out = [detokenizer.append(i, may_stop=i >= 2) for i in range(len(pieces))]
    assert "".join(out) == "STOPa"
    assert detokenizer.stopped


def test_num_chars_counts_complete_characters() -> None:
    pieces = [b"ab", "é".encode()[:1], "é".encode()[1:], b"c"]
    detokenizer = Detokenizer(pieces.__getitem__)
    counts = []
    for i in range(len(pieces)):
        counts.append(detokenizer.num_chars)
        detokenizer.append(i)
    assert counts == [0, 2, 2, 3]
