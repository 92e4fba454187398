"""Cuts of a rendered conversation: where others are likely to part from it (`generation.cuts`).

    <system> ... <user> first question <assistant> answer <user> next question <assistant>
                       |                          |      |                    |
                       cut                        cut    cut                  cut

    its stable part   up to the first message that is not the system's: other conversations share
                      it
    its turns         before each message of the user's (the messages before may be rendered and
                      computed ahead), and before the last token that a template writes in front of
                      an answer (there ended the prompt of that turn)

Turns are found by the tokens that a template writes around messages. A text that forges them gets
useless cuts, and costs nothing else.

Law: the cuts of a conversation that goes on are those that it had, and perhaps some behind them.
So no cut may depend on later messages. There is always a cut before a message of the user's, where
conversations rendered ahead end, and other cuts only far enough behind the cut before them.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kakeya.core.errors import KakeyaError
from kakeya.core.units import pack_ids
from kakeya.text.chat import Chat, Message
from kakeya.text.prefix import ChatEncoder, encode_prefix

LEAST_TOKENS = 32
"""Least tokens in front of an optional cut: fewer take hardly less time to compute."""
_STABLE_ROLES = ("system", "developer")
_MAX_STABLE = 64
"""Stable parts that are remembered: 8 KB for each 2000 tokens."""
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Signs:
    """Tokens that a template writes around messages, packed; b"" = unknown."""

    opening: bytes = b""
    """The tokens in front of a message of the user's that is not the first."""
    closing: bytes = b""
    """The tokens behind the user's last message, in front of an answer."""


class PromptCuts:
    """Finds the cuts of conversations as one folder's template renders them."""

    def __init__(self, text: ChatEncoder) -> None:
        self._text = text
        self._stable: OrderedDict[bytes, bytes] = OrderedDict()
        self._signs: Signs | None = None

    async def find(self, token_ids: Sequence[int], chat: Chat, *, at_most: int) -> tuple[int, ...]:
        """The cuts of a conversation that was rendered to these tokens, in order."""
        packed = pack_ids(token_ids)
        leading = takewhile(lambda message: message["role"] in _STABLE_ROLES, chat.messages)
        shared = replace(chat, messages=tuple(leading), continues_last=False)
        stable = await self._stable_tokens(packed, shared, at_most)
        if self._signs is None:
            self._signs = await self._look()
        openings = {end for end in _ends(packed, self._signs.opening) if end > stable}
        closings = {end - 1 for end in _ends(packed, self._signs.closing) if end - 1 > stable}
        return tuple(_spaced(sorted({stable} | openings | closings), openings))

    async def _stable_tokens(self, packed: bytes, shared: Chat, at_most: int) -> int:
        """The count of tokens that all conversations with the same leading messages begin with."""
        messages, tools = map(dict, shared.messages), map(dict, shared.tools)
        said = json.dumps([*messages, shared.plain_tools, dict(shared.kwargs), *tools])
        key = hashlib.sha256(said.encode()).digest()
        known = self._stable.get(key)
        if known is None or not packed.startswith(known):
            # The first time; or the template wrote something else, as the date of another day.
            try:
                prefix = await encode_prefix(self._text, shared, at_most=at_most)
            except KakeyaError:
                return 0
            known = self._stable[key] = pack_ids(prefix)
            if len(self._stable) > _MAX_STABLE:
                self._stable.popitem(last=False)
        self._stable.move_to_end(key)
        return common_tokens(packed, known)

    async def _look(self) -> Signs:
        """Find the tokens of the template, by conversations that differ in one message only."""
        user: Message = {"role": "user", "content": "0"}
        try:
            asked = [
                await self._text.encode_chat(
                    Chat(messages=({**user, "content": said},)), at_most=1 << 20
                )
                for said in ("0", "x")
            ]
            closing = _common_end(*asked)
        except KakeyaError:
            closing = b""
        try:
            answered = [
                await encode_prefix(
                    self._text,
                    Chat(messages=(user, {"role": "assistant", "content": said})),
                    at_most=1 << 20,
                )
                for said in ("0", "x")
            ]
            opening = _common_end(*answered)
        except KakeyaError:
            opening = b""
        return Signs(opening, closing)


def _ends(packed: bytes, sign: bytes) -> Iterator[int]:
    """The position behind each occurrence of a sign."""
    at = packed.find(sign) if sign else -1
    while at >= 0:
        if at % _TOKEN_BYTES == 0:
            yield (at + len(sign)) // _TOKEN_BYTES
        at = packed.find(sign, at + 1)


def _spaced(places: Iterable[int], always: Collection[int]) -> Iterator[int]:
    last = 0
    for place in places:
        if place in always or place - last >= LEAST_TOKENS:
            yield place
            last = place


def common_tokens(one: bytes, other: bytes) -> int:
    """The count of tokens that two texts, packed, begin with in common."""
    alike, unknown = 0, min(len(one), len(other)) // _TOKEN_BYTES
    while alike < unknown:  # by halves: this is on the event loop, and texts are long
        middle = (alike + unknown + 1) // 2
        if one.startswith(other[: middle * _TOKEN_BYTES]):
            alike = middle
        else:
            unknown = middle - 1
    return alike


def _common_end(one: Sequence[int], other: Sequence[int]) -> bytes:
    """The common end of two texts, packed; empty where they are equal."""
    backwards = zip(reversed(one), reversed(other), strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], backwards))
    if shared in (len(one), len(other)):
        return b""
    return pack_ids(one[len(one) - shared :])
