# SPDX-License-Identifier: MIT
"""Byte-level BPE tokeniser built from a GGUF file's own metadata.

The BPE itself is the `tokenizers` library's; this module only translates the
metadata and keeps what detokenising needs. Thread-safe after construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BPETokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

# GGUF's token types that matter here; the others are ordinary text.
_CONTROL = 3
_USER_DEFINED = 4

# Control tokens that end a turn or a document, by the names that models use. The
# metadata names only one of them as eos.
_END_NAMES = frozenset(("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>"))


class TokenizerError(ValueError):
    """The model file's tokeniser metadata is missing, inconsistent or unknown."""


def _pre_tokenizer(name: str) -> PreTokenizer:
    """The splitter that `tokenizer.ggml.pre` names.

    Both end in GPT-2's byte-level split; "smollm" first isolates every digit (any
    character of Unicode's number categories).
    """
    gpt2 = ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return gpt2
    if name == "smollm":
        return PreTokenizers([Digits(individual_digits=True), gpt2])
    raise TokenizerError(f"tokenizer.ggml.pre is {name!r}; supported are 'smollm' and 'gpt-2'")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte value.

    Bytes that print as themselves in Latin-1 do; the other 68 take the code points
    from 256 on, in order.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (b for b in range(256) if b not in plain)
    alphabet = {chr(b): b for b in plain}
    alphabet.update((chr(256 + i), b) for i, b in enumerate(shifted))
    return alphabet


class Tokenizer:
    """Text to token ids, and token ids to bytes.

    vocab_size: number of token ids.
    eos_token_id: the id that the model file names.
    stop_token_ids: all ids that end an answer, eos included.
    bos: text of the beginning-of-sequence token ("" when there is none).
    chat_template: Jinja source, or None.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        model = _need(metadata, "tokenizer.ggml.model", str)
        if model != "gpt2":
            raise TokenizerError(
                f"tokenizer.ggml.model is {model!r}; supported is 'gpt2' (byte-level BPE)"
            )
        tokens: Sequence[str] = _need(metadata, "tokenizer.ggml.tokens", Sequence)
        merges: Sequence[str] = _need(metadata, "tokenizer.ggml.merges", Sequence)
        pre = _pre_tokenizer(_need(metadata, "tokenizer.ggml.pre", str))
        types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or ()
        if types and len(types) != len(tokens):
            raise TokenizerError(
                f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
            )
        self._tokens = tokens
        self.vocab_size = len(tokens)
        self.control_ids = {tokens[i]: i for i, kind in enumerate(types) if kind == _CONTROL}
        self.eos_token_id = self._token_id(metadata, "eos")
        self._bos_token_id = self._token_id(metadata, "bos")
        self._add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", False))
        ends = {i for name, i in self.control_ids.items() if name in _END_NAMES}
        if self.eos_token_id is not None:
            ends.add(self.eos_token_id)
        self.stop_token_ids = frozenset(ends)
        self.chat_template: str | None = metadata.get("tokenizer.chat_template")
        self._bpe = _build(tokens, types, merges, pre)
        self._alphabet = _byte_alphabet()
        self._bytes: dict[int, bytes] = dict.fromkeys(self.control_ids.values(), b"")

    def _token_id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = metadata.get(key)
        if value is None:
            return None
        if not 0 <= value < self.vocab_size:
            raise TokenizerError(f"{key} is {value}, the vocabulary has {self.vocab_size} tokens")
        return int(value)

    @property
    def bos(self) -> str:
        return self.text_of(self._bos_token_id)

    @property
    def eos(self) -> str:
        return self.text_of(self.eos_token_id)

    def text_of(self, token_id: int | None) -> str:
        """The vocabulary's own spelling of a token ("" for None)."""
        return "" if token_id is None else self._tokens[token_id]

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of a text; names of control tokens become their ids.

        add_bos: prepend the beginning-of-sequence token if the model file wants
            one. False for rendered chat templates, which write their own.
        Raises UnicodeEncodeError for a text with lone surrogates.
        """
        text.encode()  # The library would raise a TypeError that says less.
        # Only the library's batch functions let other threads run meanwhile, and a
        # long text takes the emulated guest seconds.
        ids = self._bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if add_bos and self._add_bos and self._bos_token_id is not None:
            ids.insert(0, self._bos_token_id)
        return ids

    def least_tokens(self, text: str) -> int:
        """A lower bound of encode()'s tokens that costs next to nothing."""
        return len(text) // self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        # In characters of text. A byte of a token is a character of its spelling, a
        # control or user-defined token is spelt as it is, and no byte stands for more
        # than a character.
        return max(map(len, self._tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; b"" for control tokens."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def raw_bytes(self, token_id: int) -> bytes:
        """Like token_bytes, but a control token gives its name."""
        return self.token_bytes(token_id) or self._tokens[token_id].encode()

    def _compute_bytes(self, token_id: int) -> bytes:
        # Computed when first seen: 49,152 up front would be half a second of the
        # emulated guest's start.
        token = self._tokens[token_id]
        try:
            return bytes([self._alphabet[c] for c in token])
        except KeyError:  # A user-defined token is spelt in plain text.
            return token.encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a whole sequence, control tokens left out."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")


def _build(
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[str],
    pre: PreTokenizer,
) -> BPETokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError("tokenizer.ggml.tokens has duplicates")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        bpe = BPETokenizer(BPE(vocab=vocab, merges=pairs))  # type: ignore[arg-type]
    except Exception as error:
        raise TokenizerError(f"tokenizer.ggml.merges do not fit: {error}") from error
    bpe.pre_tokenizer = pre
    whole = [
        AddedToken(tokens[i], special=kind == _CONTROL, normalized=False)
        for i, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    bpe.add_tokens(whole)
    return bpe


def _need(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    value = metadata.get(key)
    if not isinstance(value, kind):
        problem = "is missing" if value is None else f"is {type(value).__name__}"
        raise TokenizerError(f"the model file's {key} {problem}")
    return value
