"""The tokens with which the next request of a conversation will begin.

The tokens that a template writes for a message may depend on those behind it (reasoning that is
left out of earlier turns, a date, a turn that is still open), so the prefix of a request that has
not come yet cannot be cut out of a shorter one. It is the common beginning of two requests that
differ only in the next message of the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kakeya.generation.cuts import marked
from kakeya.text.chat import Chat

_PROBES = ("0", "x")
"""Two messages of a user's. They share no character, so no token either."""


class ChatEncoder(Protocol):
    """Renders and encodes conversations: `TextModel`."""

    async def encode_chat(self, chat: Chat, *, at_most: int) -> list[int]:
        """Encode a conversation. Raises KakeyaError."""
        ...

    async def cuts_of(
        self, token_ids: Sequence[int], chat: Chat, *, at_most: int
    ) -> tuple[int, ...]:
        """The cuts of an encoded conversation."""
        ...


async def encode_prefix(text: ChatEncoder, chat: Chat, *, at_most: int) -> list[int]:
    """Encode the common beginning of requests that go on from this conversation.

    Raises as `TextModel.encode_chat`.
    """
    request, length = await _probe(text, chat, at_most)
    return request[:length]


async def encode_ahead(text: ChatEncoder, chat: Chat, *, at_most: int) -> list[int]:
    """Encode a prompt to compute before its request comes, marked with its cuts.

    Messages that end with the user's, or with one to continue, are a request already. For others it
    is their prefix, and one token more, which stands for the next message: the last token is never
    prefilled. Raises as `TextModel.encode_chat`.
    """
    if chat.continues_last or (chat.messages and chat.messages[-1]["role"] == "user"):
        request = await text.encode_chat(chat, at_most=at_most)
        length = len(request)
    else:
        request, length = await _probe(text, chat, at_most)
    cuts = await text.cuts_of(request, chat, at_most=at_most)
    return marked(request[: length + 1], cuts)


async def _probe(text: ChatEncoder, chat: Chat, at_most: int) -> tuple[list[int], int]:
    """A request that goes on from a conversation, and the count of tokens in every such request."""
    chat = replace(chat, continues_last=False)
    one, other = [
        await text.encode_chat(
            chat.followed_by({"role": "user", "content": probe}), at_most=at_most
        )
        for probe in _PROBES
    ]
    parting = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one, next(parting, len(one))
