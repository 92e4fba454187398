"""Token ids of a text whose last id is known: for those that llama-server does not tell."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tokenizers import Tokenizer

from kakeya.text.detokenizer import BYTE_OF


class TokenSpelling:
    """The tokens of a byte-level vocabulary by their bytes; made at the first question."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones too."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def before(self, text: str, count: int, last: int) -> Sequence[int]:
        """The `count` ids before `last` of a text.

        Those of the tokenizer if they are so many, else any that spell it, each of which but the
        last ends within a character. If there are none, since the text is not what the tokens
        spelled, the tokenizer's ids of the text, however many they are.
        """
        usual: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(usual) == count + 1 and usual[-1] == last:
            return usual[:-1]
        end = self._bytes.get(last, b"")
        whole = text.encode()
        spelled = whole[: len(whole) - len(end)]
        found = self._spell(spelled, count) if whole.endswith(end) else None
        if found is not None:
            return found
        rest = spelled.decode("utf-8", "replace")
        ids: list[int] = self._tokenizer.encode(rest, add_special_tokens=False).ids
        return ids

    def _spell(self, whole: bytes, count: int) -> Sequence[int] | None:
        """So many ids that spell bytes, the longest first."""
        ids, longest = self._ids, max(map(len, self._ids))

        @functools.cache
        def from_(at: int, left: int) -> tuple[int, ...] | None:
            if left == 0:
                return () if at == len(whole) else None
            for end in range(min(len(whole), at + longest), at, -1):
                token = ids.get(whole[at:end])
                if token is None or not _is_cut(whole[:end]):
                    continue
                rest = from_(end, left - 1)
                if rest is not None:
                    return (token, *rest)
            return None

        return from_(0, count)

    @functools.cached_property
    def _bytes(self) -> dict[int, bytes]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=False)
        return {
            token_id: bytes(BYTE_OF[one] for one in token)
            for token, token_id in vocabulary.items()
            if all(one in BYTE_OF for one in token)
        }

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        return {spelled: token_id for token_id, spelled in self._bytes.items()}


def _is_cut(data: bytes) -> bool:
    """Whether bytes end within a character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
