"""The tokens with which the next request of a conversation will begin.

The tokens that a template writes for a message may depend on those behind it (reasoning that is
left out of earlier turns, a date, a turn that is still open), so the prefix of a request that has
not come yet cannot be cut out of a shorter one. It is the common beginning of two requests that
differ only in the next message of the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kakeya.generation.cuts import marked
from kakeya.text.template import Message, Tool

_PROBES = ("0", "x")
"""Two messages of a user's. They share no character, so no token either."""


class ChatEncoder(Protocol):
    """Renders and encodes conversations: `TextModel`."""

    async def encode_chat(
        self, messages: Sequence[Message], *, at_most: int, tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Encode a conversation. Raises KakeyaError."""
        ...

    async def cuts_of(
        self,
        token_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        at_most: int,
        tools: Sequence[Tool] = (),
    ) -> tuple[int, ...]:
        """The cuts of an encoded conversation."""
        ...


async def encode_prefix(
    text: ChatEncoder, messages: Sequence[Message], *, at_most: int, tools: Sequence[Tool] = ()
) -> list[int]:
    """Encode the common beginning of requests that go on from these messages.

    Raises as `TextModel.encode_chat`.
    """
    request, length = await _probe(text, messages, at_most, tools)
    return request[:length]


async def encode_ahead(
    text: ChatEncoder, messages: Sequence[Message], *, at_most: int, tools: Sequence[Tool] = ()
) -> list[int]:
    """Encode a prompt to compute before its request comes, marked with its cuts.

    Messages that end with the user's are a request already. For others it is their prefix, and one
    token more, which stands for the next message: the last token is never prefilled. Raises as
    `TextModel.encode_chat`.
    """
    if messages and messages[-1]["role"] == "user":
        request = await text.encode_chat(messages, at_most=at_most, tools=tools)
        length = len(request)
    else:
        request, length = await _probe(text, messages, at_most, tools)
    cuts = await text.cuts_of(request, messages, at_most=at_most, tools=tools)
    return marked(request[: length + 1], cuts)


async def _probe(
    text: ChatEncoder, messages: Sequence[Message], at_most: int, tools: Sequence[Tool]
) -> tuple[list[int], int]:
    """A request that goes on from these messages, and the count of tokens in every such request."""
    one, other = [
        await text.encode_chat(
            [*messages, {"role": "user", "content": probe}], at_most=at_most, tools=tools
        )
        for probe in _PROBES
    ]
    parting = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one, next(parting, len(one))
