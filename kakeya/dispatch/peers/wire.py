"""Quotes, manifests, waits and copies of answers as messages of ServingService, and back."""

from __future__ import annotations

from dataclasses import replace

from kakeya.dispatch.peers.held_answers import AnswerCopy
from kakeya.dispatch.peers.quote import AnswerOrigin, Quote
from kakeya.generation.engine_wire import (
    frames_from_wire,
    frames_to_wire,
    job_to_wire,
    request_from_wire,
)
from kakeya.generation.facts import PromptsAlike, RequestLoad
from kakeya.generation.frames import Done, Progress, Tokens
from kakeya.generation.kv import NO_KV
from kakeya.generation.manifest import GivenTemplate, Manifest, Thinking
from kakeya.generation.request import GenerationPriority
from kakeya.generation.waiting import RequestWait, WaitReason
from kakeya.v1 import serving_pb2 as pb

_NOT_KNOWN = -1.0
_MOST_PER_S = 1000.0
_MOST_BYTES_PER_S = 1e12
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
        shares_kv=quote.kv_rates is not None,
        kv_bytes_per_second=quote.kv_rates,
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
        kv_rates=_kv_rates(message) if message.shares_kv else None,
    )


def _kv_rates(message: pb.QuoteResponse) -> dict[str, float]:
    told = message.kv_bytes_per_second.items()
    return {node_id: min(rate, _MOST_BYTES_PER_S) for node_id, rate in told if rate > 0}


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


def priority_from_wire(raw: int) -> GenerationPriority:
    """The priority in a message; the least urgent one for a number that this build has not."""
    return GenerationPriority(min(raw, max(GenerationPriority)))


def copy_to_wire(copy: AnswerCopy, frames_before: int = 0) -> pb.AnswerCopy:
    """The message of a copy; of one whose frames before are known, only what is new."""
    frames = [frames_to_wire([frame]) for frame in copy.frames]
    new = pb.AnswerCopy(
        answer_id=copy.answer_id,
        client=copy.client,
        frames=frames,
        is_complete=copy.is_complete,
        weights=copy.origin.weights,
        numerics=copy.origin.numerics,
        ended=copy.ended,
    )
    if frames_before:
        return new
    new.MergeFrom(
        pb.AnswerCopy(
            model_id=copy.model_id,
            body=copy.body,
            created_at=copy.created_at,
            system_fingerprint=copy.fingerprint,
            node_id=copy.node_id,
        )
    )
    if copy.request is not None:
        # What belongs to the node that began the answer, the next one has of its own.
        asked = replace(
            copy.request, draft_sources=(), kv_key="", client="", user="", deadline_s=None
        )
        new.request.CopyFrom(job_to_wire(asked, NO_KV))
    return new


def copy_from_wire(message: pb.AnswerCopy) -> AnswerCopy:
    """The copy in a message. Raises InvalidArgument and PeerProtocol for what is none."""
    frames = [frame for one in message.frames for frame in frames_from_wire(one)]
    return AnswerCopy(
        answer_id=message.answer_id,
        client=message.client,
        model_id=message.model_id,
        body=message.body,
        created_at=message.created_at,
        request=request_from_wire(message.request) if message.HasField("request") else None,
        frames=[frame for frame in frames if isinstance(frame, Tokens | Progress | Done)],
        is_complete=message.is_complete,
        origin=AnswerOrigin(weights=message.weights, numerics=message.numerics),
        fingerprint=message.system_fingerprint,
        node_id=message.node_id,
        ended=message.ended,
    )
