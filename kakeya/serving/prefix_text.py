"""The tokens with which the next request of a conversation will begin.

Theory: what a template writes of a message may depend on those behind it (reasoning that is left
out of earlier turns, a date, a turn that is still open), so the prefix of a request that is not
there yet cannot be cut out of a shorter one. It is what two requests have in common that differ
only in what the user says next.
"""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.serving.template import Message, Tool
from kakeya.serving.text import TextModel

_PROBES = ("0", "x")
"""Two things that a user may say. They share no character, so no token either."""


async def encode_prefix(
    text: TextModel, messages: Sequence[Message], *, at_most: int, tools: Sequence[Tool] = ()
) -> list[int]:
    """Encode what every request has that goes on from these messages.

    Messages that end with the user's are a request already, and encoded as that. Raises as
    `TextModel.encode_chat`.
    """
    if messages and messages[-1]["role"] == "user":
        return await text.encode_chat(messages, at_most=at_most, tools=tools)
    one, other = [
        await text.encode_chat(
            [*messages, {"role": "user", "content": probe}], at_most=at_most, tools=tools
        )
        for probe in _PROBES
    ]
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one if shared is None else one[:shared]
