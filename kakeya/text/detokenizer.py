"""Committed tokens to text, as they come; sans-I/O.

The text is the same however the tokens were cut into frames, and never ends in half a character.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>\Z")
_LONGEST_BYTES = 4
"""Of a character in UTF-8."""
_WINDOW_TOKENS = 64
"""Most tokens that a decoder without a byte table holds back while its text is not settled."""
_CONTEXT_TOKENS = 16
"""Tokens of a prompt that tell a decoder how the text behind them begins."""


def _byte_characters() -> dict[str, int]:
    """The printable stand-in for each byte in byte-level vocabularies, reversed.

    Bytes that print stand for themselves; the others are numbered from U+0100 in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    pairs = {chr(byte): byte for byte in printable}
    pairs.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return pairs


BYTE_OF: Mapping[str, int] = _byte_characters()
"""The byte behind each character."""


class ByteDetokenizer:
    """Byte-level vocabularies: each token is a fixed string of bytes. O(1) per token.

    `hidden` are the special tokens whose text is not shown; `bytes_of` belongs to them.
    """

    def __init__(
        self, tokenizer: Tokenizer, hidden: frozenset[int], bytes_of: dict[int, bytes]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is settled by them, never half a character."""
        known = self._bytes_of
        try:
            return self._utf8.decode(b"".join(map(known.__getitem__, token_ids)))
        except KeyError:
            for token_id in token_ids:
                known[token_id] = self._look_up(token_id)
            return self.feed(token_ids)

    def finish(self) -> str:
        """End the text; an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            return b""
        return bytes_of(self._tokenizer, token_id, is_byte_level=True)


class WindowDetokenizer:
    """Any other vocabulary: decodes a short window of tokens again and returns the new text.

    Many of these decoders take the blank from the first word of a text, so a text that goes on from
    a prompt needs to know the end of it: `after`. `hidden` as for `ByteDetokenizer`.
    """

    def __init__(
        self, tokenizer: Tokenizer, hidden: frozenset[int], after: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window = [one for one in after[-_CONTEXT_TOKENS:] if one not in hidden]
        # window[:settled] is shown already; it gives the rest its context
        self._settled = len(self._window)
        while self._settled and self._ends_in_half(self._window[: self._settled]):
            self._settled -= 1  # half a character at the end of the prompt is whole in the text

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is settled by them, never half a character."""
        shown = ""
        for token_id in token_ids:
            if token_id in self._hidden:
                continue
            self._window.append(token_id)
            shown += self._new_text(held_back="\ufffd")
        return shown

    def finish(self) -> str:
        """End the text; an unfinished character becomes U+FFFD."""
        return self._new_text(held_back=None)

    def _new_text(self, *, held_back: str | None) -> str:
        whole = self._decode(self._window)
        before = self._decode(self._window[: self._settled])
        is_long = len(self._window) - self._settled > _WINDOW_TOKENS
        if len(whole) <= len(before) and not is_long:
            return ""
        if held_back is not None and whole.endswith(held_back) and not is_long:
            return ""
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        return whole[len(before) :]

    def _ends_in_half(self, token_ids: Sequence[int]) -> bool:
        """Whether tokens end within a character. The text does not tell: U+FFFD is one, too."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in token_ids[-_LONGEST_BYTES:]:
            utf8.decode(bytes_of(self._tokenizer, token_id, is_byte_level=False))
        return bool(utf8.getstate()[0])

    def _decode(self, token_ids: Sequence[int]) -> str:
        decoded: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return decoded


def bytes_of(tokenizer: Tokenizer, token_id: int, *, is_byte_level: bool) -> bytes:
    """The bytes of one token by itself, special ones spelled out; b"" for an unknown id."""
    token = tokenizer.id_to_token(token_id) or ""
    if not is_byte_level:
        byte = _BYTE_TOKEN.match(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


Detokenizer = ByteDetokenizer | WindowDetokenizer
