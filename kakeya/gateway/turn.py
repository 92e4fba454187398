"""One generation of an engine for an HTTP client, and what the turn behind it begins with."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kakeya.backends.request import ChatRequest, CompletionRequest, Request
from kakeya.dispatch.routed.copied import CopiedAnswer
from kakeya.gateway.answer import GeneratedAnswer
from kakeya.gateway.prompts import turn_of
from kakeya.gateway.recent import RequestRecord
from kakeya.generation.cuts import marked
from kakeya.generation.frames import Frame, Tokens
from kakeya.generation.model import ServedModel
from kakeya.generation.request import DecodeRequest
from kakeya.prefix.seam import PrefixClaim
from kakeya.text.bound import TooManyTokens
from kakeya.text.prefix import encode_ahead
from kakeya.text.prompt import most_prompt_tokens
from kakeya.text.text import TextModel, Texts
from kakeya.text.tools.answer import Said

BEGUN = Said("")
"""No part of an answer: its first token is there. The client of an answer that any node may go on
with is told its id then, be it long until there is a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGeneration:
    """One answer to a request, ready to be generated."""

    model: ServedModel
    counted_as: str  # the base of an adapter: metrics have no label for each adapter
    request: DecodeRequest
    answer: GeneratedAnswer
    began_mono: float
    asked: Request
    prompt: str | tuple[int, ...]  # as its caller wrote it; "" for a conversation
    claim: PrefixClaim
    record: RequestRecord | None  # of the first answer to a request
    copied: CopiedAnswer | None = None
    """Where any node may go on with the answer."""
    token_ids: list[int] = field(default_factory=list)

    def decode(self) -> AsyncGenerator[Frame, None]:
        """The frames of its model. Those of an answer that any node may go on with have one token
        each, so that its events are the same whichever steps commit the tokens."""
        if self.copied is None:
            return self.model.decode(self.request)
        return _one_by_one(self.copied.decode(self.model, self.request))


async def _one_by_one(frames: AsyncGenerator[Frame, None]) -> AsyncGenerator[Frame, None]:
    async with aclosing(frames):
        async for frame in frames:
            if not isinstance(frame, Tokens):
                yield frame
                continue
            for index, token_id in enumerate(frame.token_ids):
                yield Tokens(token_ids=(token_id,), logprobs=frame.logprobs[index : index + 1])


async def next_tokens(job: HttpGeneration, texts: Texts) -> Sequence[int]:
    """The tokens that the next turn of a conversation begins with; without a conversation the
    prompt, since it may be repeated.

    The tokens are marked with their cuts; () where the context has no room for another turn.
    Raises as rendering does.
    """
    if not job.claim.use.keys.conversation_id:
        return marked(job.request.token_ids, job.request.cuts)
    at_most = most_prompt_tokens(job.claim.facts)
    text = await texts.get(job.claim.facts.model_path, job.model.manifest.template)
    try:
        token_ids = await _continued(job, text, at_most)
    except TooManyTokens:
        return ()
    return token_ids if len(token_ids) <= at_most else ()


async def _continued(job: HttpGeneration, text: TextModel, at_most: int) -> Sequence[int]:
    match job.asked:
        case ChatRequest() as asked:
            turn = asked.chat.followed_by(turn_of(job.answer))
            return await encode_ahead(text, turn, at_most=at_most)
        case CompletionRequest() if isinstance(job.prompt, str):
            return await text.encode(job.prompt + job.answer.text, at_most=at_most)
        case CompletionRequest():
            return marked((*job.request.token_ids, *job.token_ids), job.request.cuts)
