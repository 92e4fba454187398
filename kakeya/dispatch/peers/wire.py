"""Quotes, manifests and waits as messages of ServingService, and back."""

from __future__ import annotations

from kakeya.dispatch.peers.quote import AnswerOrigin, Quote
from kakeya.generation.facts import PromptsAlike, RequestLoad
from kakeya.generation.manifest import GivenTemplate, Manifest, Thinking
from kakeya.generation.waiting import RequestWait, WaitReason
from kakeya.v1 import serving_pb2 as pb

_NOT_KNOWN = -1.0
_MOST_PER_S = 1000.0
_THINKING: dict[str, Thinking] = {"on": "on", "off": "off"}


def quote_to_wire(quote: Quote) -> pb.QuoteResponse:
    """The message of a quote."""
    return pb.QuoteResponse(
        is_ready=quote.is_ready,
        load_seconds=_NOT_KNOWN if quote.load_s is None else quote.load_s,
        prefill_tokens_per_second=quote.prefill_tokens_per_s,
        tokens_per_second=quote.tokens_per_s,
        piece_tokens=quote.piece_tokens,
        batch_rows=quote.batch_rows,
        answer_tokens=quote.load.answers,
        waiting=quote.load.waiting,
        waiting_tokens=quote.load.waiting_tokens,
        prompts_per_second=quote.load.prompts_per_s,
        busy_share=quote.load.busy_share,
        cached_tokens=quote.cached_tokens,
        alike_requests=quote.alike.requests,
        coming_tokens=quote.alike.tokens,
        refusal=quote.refusal,
        weights=quote.origin.weights,
        numerics=quote.origin.numerics,
    )


def quote_from_wire(message: pb.QuoteResponse) -> Quote:
    """The quote in a message."""
    return Quote(
        is_ready=message.is_ready,
        load_s=message.load_seconds if message.load_seconds >= 0 else None,  # nor NaN
        prefill_tokens_per_s=max(0.0, message.prefill_tokens_per_second),
        tokens_per_s=max(0.0, message.tokens_per_second),
        piece_tokens=message.piece_tokens,
        batch_rows=max(1, message.batch_rows),
        load=RequestLoad(
            answers=tuple(message.answer_tokens),
            waiting=message.waiting,
            waiting_tokens=message.waiting_tokens,
            prompts_per_s=_within(message.prompts_per_second, _MOST_PER_S),
            busy_share=_within(message.busy_share, 1.0),
        ),
        cached_tokens=message.cached_tokens,
        alike=PromptsAlike(requests=message.alike_requests, tokens=message.coming_tokens),
        refusal=message.refusal,
        origin=AnswerOrigin(weights=message.weights, numerics=message.numerics),
    )


def _within(number: float, most: float) -> float:
    return min(number, most) if number > 0 else 0.0  # nor NaN


def manifest_to_wire(manifest: Manifest) -> pb.ServedManifest:
    """What the owner of a model says of requests to it."""
    return pb.ServedManifest(
        template=manifest.template.source if manifest.template else "",
        thinking=manifest.thinking,
        temperature=manifest.temperature,
        top_p=manifest.top_p,
        max_tokens=manifest.max_tokens,
    )


def manifest_from_wire(message: pb.ServedManifest) -> Manifest:
    """The manifest in a message."""
    return Manifest(
        template=GivenTemplate(message.template, "") if message.template else None,
        thinking=_THINKING.get(message.thinking, "auto"),
        temperature=message.temperature if message.HasField("temperature") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
    )


def wait_to_wire(wait: RequestWait | None) -> pb.RoutedWait | None:
    """The message of a wait; None for a request that does not wait."""
    if wait is None:
        return None
    return pb.RoutedWait(
        reason=wait.reason,
        position=wait.position or 0,
        seconds=wait.seconds or 0.0,
        progress=wait.progress,
    )


def wait_from_wire(message: pb.RoutedWait, model_id: str) -> RequestWait | None:
    """The wait in a message; None for a reason that this build does not know."""
    if message.reason not in set(WaitReason):
        return None
    return RequestWait(
        reason=WaitReason(message.reason),
        model_id=model_id,
        position=message.position or None,
        seconds=message.seconds or None,
        progress=message.progress,
    )
