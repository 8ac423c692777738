# SPDX-License-Identifier: MIT
"""The tokeniser and the chat template of the real model file."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from vtpu.serving.chat_template import ChatTemplate, ChatTemplateError
from vtpu.tokenizer import Tokenizer, TokenizerError

TEXTS = [
    "Hello, world!",
    "  two spaces, a tab\tand\n\n\nlines  ",
    "it's we're I'll they've I'd I'm don't",
    "123 4567 3.14 ½ ² Ⅷ ٣",
    "naïve — 漢字 👩‍👩‍👧 𝄞 مرحبا привет",
    "def f(x):\n    return {x: [1, 2]}\n",
    "\x00\x7f\u00ad\u2028",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", [*TEXTS, "#" * 800, "\n" + " " * 800, "<|im_start|>" * 50])
def test_least_tokens_is_a_lower_bound(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_other_threads_run_while_a_text_is_read(tokenizer: Tokenizer) -> None:
    begun, order = threading.Event(), []

    def read() -> None:
        begun.set()
        tokenizer.encode("some words " * 100_000)
        order.append("read")

    interval = sys.getswitchinterval()
    # No thread is made to hand over the interpreter: the library has to offer it.
    sys.setswitchinterval(1000)
    try:
        reader = threading.Thread(target=read)
        reader.start()
        begun.wait()
        order.append("meanwhile")
        reader.join()
    finally:
        sys.setswitchinterval(interval)
    assert order == ["meanwhile", "read"]


def test_known_ids(tokenizer: Tokenizer) -> None:
    def spelt(text: str) -> list[str]:
        return [tokenizer.text_of(i) for i in tokenizer.encode(text)]

    assert spelt("Hello world") == ["Hello", "Ġworld"]
    # Every digit stands alone, and so does the space before one.
    assert spelt("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert spelt("x½y") == ["x", "Â½", "y"]
    assert spelt("don't") == ["don", "'t"]
    # The last of several spaces belongs to the word.
    assert spelt("a   b") == ["a", "ĠĠ", "Ġb"]


def test_control_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user") == [1, *tokenizer.encode("user")]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.stop_token_ids == {0, 2}
    assert tokenizer.token_bytes(1) == b""
    assert tokenizer.raw_bytes(1) == b"<|im_start|>"


def test_every_token_has_bytes_and_all_useful_byte_values_occur(
    tokenizer: Tokenizer,
) -> None:
    raw = [tokenizer.raw_bytes(i) for i in range(tokenizer.vocab_size)]
    assert all(raw)
    missing = {b for b in range(256) if bytes([b]) not in raw}
    never_in_text = {0xC0, 0xC1, *range(0xF5, 0x100)}
    # The model has no token for these: control characters and unassigned planes.
    assert missing - never_in_text == {4, 6, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


def good_metadata() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
    }


def test_minimal_metadata() -> None:
    tokenizer = Tokenizer(good_metadata())
    assert tokenizer.encode("ab<end>ba") == [2, 3, 1, 0]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "llama", "'llama'"),
        ("pre", "llama-bpe", "'llama-bpe'"),
        ("tokens", None, "tokens is missing"),
        ("tokens", ["a", "a", "ab", "<end>"], "duplicates"),
        ("merges", ["a zz"], "merges"),
        ("token_type", [1], "1 entries for 4"),
        ("eos_token_id", 9, "eos_token_id is 9"),
    ],
)
def test_bad_metadata_is_named(key: str, value: object, message: str) -> None:
    metadata = good_metadata()
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(metadata)


def test_bos_is_added_when_the_file_wants_it() -> None:
    metadata = good_metadata()
    metadata["tokenizer.ggml.bos_token_id"] = 3
    metadata["tokenizer.ggml.add_bos_token"] = True
    tokenizer = Tokenizer(metadata)
    assert tokenizer.encode("ab") == [3, 2]
    assert tokenizer.encode("ab", add_bos=False) == [2]


def test_chat_template_of_the_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos, tokenizer.eos)
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Hi"}
    assert template.render([system, user]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render([user]).startswith("<|im_start|>system\nYou are a helpful")


def test_template_errors_carry_the_message() -> None:
    refuses = ChatTemplate("{{ raise_exception('roles must alternate') }}", "", "")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        refuses.render([])
    with pytest.raises(ChatTemplateError, match="not valid"):
        ChatTemplate("{% for %}", "", "")
    with pytest.raises(ChatTemplateError, match="failed"):
        ChatTemplate("{{ messages[9]['x'] }}", "", "").render([])


def test_template_is_sandboxed() -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ChatTemplateError):
        ChatTemplate(escape, "", "").render([])
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages.append(1) }}", "", "").render([])
