"""One generation in several requests to llama-server: what is left, and the end of all. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kakeya.generation.frames import Done, StopReason
from kakeya.generation.request import DecodeRequest


def rest_of(request: DecodeRequest, committed: Sequence[int]) -> DecodeRequest:
    """The request for what is left behind committed tokens."""
    if not committed:
        return request
    return replace(
        request,
        token_ids=[*request.token_ids, *committed],
        prompt_tokens=request.prompt_tokens or len(request.token_ids),
        max_tokens=request.max_tokens - len(committed),
    )


def total(ends: Sequence[Done], request: DecodeRequest, committed: Sequence[int]) -> Done:
    """The end of a generation, from the ends of its parts: the first one read the prompt."""
    first, done = ends[0].usage, ends[-1]
    usage = replace(
        done.usage,
        prefill_s=first.prefill_s,
        total_s=sum(end.usage.total_s for end in ends),
        cached_tokens=min(first.cached_tokens, max(0, len(request.token_ids) - 1)),
        forwards=len(committed),
    )
    is_stopped = not committed or committed[-1] in request.stop_token_ids or request.grammar
    if done.reason is StopReason.STOP_TOKEN and not is_stopped:
        is_full = len(committed) < request.max_tokens
        reason = StopReason.CONTEXT_FULL if is_full else StopReason.MAX_TOKENS
        return Done(reason=reason, usage=usage)
    return replace(done, usage=usage)


def goes_on(
    request: DecodeRequest,
    committed: Sequence[int],
    ends: frozenset[int],
    context_tokens: int,
) -> bool:
    """Whether a generation that llama-server ended has more to come: its last token ends answers by
    the model's file, but not by the request."""
    return (
        bool(committed)
        and committed[-1] in ends
        and committed[-1] not in request.stop_token_ids
        and not request.grammar
        and len(committed) < request.max_tokens
        and len(request.token_ids) + len(committed) < context_tokens
    )
