"""Where others are likely to part from a rendered conversation: its cuts (`precache.cuts`).

    <system> ... <user> first question <assistant> answer <user> next question <assistant>
                       |                          |      |                    |
                       cut                        cut    cut                  cut

    its stable part   where the first message begins that is not the system's: other conversations
                      share that much
    its turns         where a message of the user's begins (what was said so far may be rendered
                      and computed ahead), and before the last token of what a template writes in
                      front of an answer (there ended the prompt of that turn)

Turns are found by the tokens that a template writes around messages. A text that forges them gets
cuts that are of no use to anybody, and costs nothing else.

Law: the cuts of a conversation that goes on are those that it had, and perhaps some behind them.
So none may depend on what comes later. What is rendered ahead ends where a message of the user's
begins: there is always a cut, elsewhere where it is far enough behind the one before it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kakeya.core.errors import KakeyaError
from kakeya.core.units import pack_ids
from kakeya.text.prefix import ChatEncoder, encode_prefix
from kakeya.text.template import Message, Tool

LEAST_TOKENS = 32
"""In front of a cut that can be done without: fewer take hardly less time to compute."""
_STABLE_ROLES = ("system", "developer")
_MAX_STABLE = 64
"""Stable parts that are remembered: 8 KB for each 2000 tokens."""
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Signs:
    """What a template writes around messages, as packed tokens; b"" = it cannot be told."""

    opening: bytes = b""
    """In front of a message of the user's that is not the first."""
    closing: bytes = b""
    """Behind the user's last message, in front of an answer."""


class PromptCuts:
    """Finds the cuts of conversations as one folder's template renders them."""

    def __init__(self, text: ChatEncoder) -> None:
        self._text = text
        self._stable: OrderedDict[bytes, bytes] = OrderedDict()
        self._signs: Signs | None = None

    async def find(
        self,
        token_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        at_most: int,
        tools: Sequence[Tool] = (),
    ) -> tuple[int, ...]:
        """The cuts of a conversation that was rendered to these tokens, in order."""
        packed = pack_ids(token_ids)
        leading = list(takewhile(lambda message: message["role"] in _STABLE_ROLES, messages))
        stable = await self._stable_tokens(packed, leading, at_most, tools)
        if self._signs is None:
            self._signs = await self._look()
        openings = {end for end in _ends(packed, self._signs.opening) if end > stable}
        closings = {end - 1 for end in _ends(packed, self._signs.closing) if end - 1 > stable}
        return tuple(_spaced(sorted({stable} | openings | closings), openings))

    async def _stable_tokens(
        self, packed: bytes, leading: Sequence[Message], at_most: int, tools: Sequence[Tool]
    ) -> int:
        """How many tokens of a conversation all others have with the same leading messages."""
        said = json.dumps([[dict(message) for message in leading], list(tools)])
        key = hashlib.sha256(said.encode()).digest()
        known = self._stable.get(key)
        if known is None or not packed.startswith(known):
            # The first time; or the template wrote something else, as the date of another day.
            try:
                prefix = await encode_prefix(self._text, leading, at_most=at_most, tools=tools)
            except KakeyaError:
                return 0
            known = self._stable[key] = pack_ids(prefix)
            if len(self._stable) > _MAX_STABLE:
                self._stable.popitem(last=False)
        self._stable.move_to_end(key)
        return _alike(packed, known)

    async def _look(self) -> Signs:
        """See what the template writes, by conversations that differ in one message only."""
        user = {"role": "user", "content": "0"}
        try:
            asked = [
                await self._text.encode_chat([{**user, "content": said}], at_most=1 << 20)
                for said in ("0", "x")
            ]
            closing = _common_end(*asked)
        except KakeyaError:
            closing = b""
        try:
            answered = [
                await encode_prefix(
                    self._text, [user, {"role": "assistant", "content": said}], at_most=1 << 20
                )
                for said in ("0", "x")
            ]
            opening = _common_end(*answered)
        except KakeyaError:
            opening = b""
        return Signs(opening, closing)


def _ends(packed: bytes, sign: bytes) -> Iterator[int]:
    """Behind how many tokens each occurrence of a sign ends."""
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


def _alike(one: bytes, other: bytes) -> int:
    """How many tokens two texts begin with alike."""
    alike, unknown = 0, min(len(one), len(other)) // _TOKEN_BYTES
    while alike < unknown:  # by halves: this is on the event loop, and texts are long
        middle = (alike + unknown + 1) // 2
        if one.startswith(other[: middle * _TOKEN_BYTES]):
            alike = middle
        else:
            unknown = middle - 1
    return alike


def _common_end(one: Sequence[int], other: Sequence[int]) -> bytes:
    """What two texts end with, packed; nothing where they are equal."""
    backwards = zip(reversed(one), reversed(other), strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], backwards))
    if shared in (len(one), len(other)):
        return b""
    return pack_ids(one[len(one) - shared :])
