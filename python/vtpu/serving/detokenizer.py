# SPDX-License-Identifier: MIT
"""Tokens to text, one at a time: UTF-8 safe, stop strings never leak.

The same object serves streamed and unstreamed answers, so both give the same
text. Not thread-safe: one per sequence, used on the event loop's thread.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
    """Turns token bytes into text that may be shown.

    token_bytes: the bytes that a token id stands for; b"" for control tokens.
    stop: strings that end the text; neither they nor what follows is ever given
        out, and text that may be the beginning of one is held back.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        self.stopped = False
        # Complete characters decoded so far, held back ones included: where the
        # next token's text will start.
        self.num_chars = 0
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        # Keeps an incomplete character until its last byte has come. Bytes that
        # can never become one turn into U+FFFD.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def append(self, token_id: int, may_stop: bool = True) -> str:
        """Take a token in; return the text that is now certain.

        may_stop: false while stop strings do not count yet (min_tokens).
        """
        if self.stopped:
            return ""
        new = self._decoder.decode(self._token_bytes(token_id))
        self.num_chars += len(new)
        if not (self._stop and may_stop):
            return new
        # Held text was no match before, so a match ends in the new characters.
        text = self._held + new
        self._held = ""
        first = min((at for at in (text.find(s) for s in self._stop) if at >= 0), default=-1)
        if first >= 0:
            self.stopped = True
            return text[:first]
        keep = self._longest_beginning_of_stop(text)
        if keep:
            self._held = text[-keep:]
            return text[:-keep]
        return text

    def flush(self) -> str:
        """The text that was held back, at the end of the sequence.

        A character whose last bytes never came is dropped: it is not text.
        """
        held, self._held = self._held, ""
        return held

    def _longest_beginning_of_stop(self, text: str) -> int:
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
