"""What may end the stream of an engine, and what follows: one table, pure.

    Done             nothing follows
    EngineLost       another engine goes on from the tokens committed so far, at once
    MakeWay          the engine needed the room for others: it goes on after a pause
    AdapterUnknown   the engine has no such adapter: all is given back, and the adapter comes again
    Superseded       another request, or a peer, brings the blocks: all is given back, to wait again

Too many losses in a row, without a token between them, end the generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from kakeya.core.errors import KakeyaError, MemoryRefused, NotFound, PeerUnavailable
from kakeya.generation.continuation import Continuation
from kakeya.generation.frames import Done
from kakeya.prefix.request.exchange import Superseded

MOST_UNKNOWN = 3
"""Engines in a row that may not know an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """An engine died, or broke the stream; at most `most` may in a row. `retry_after_s` is when
    another one may serve, None = not before a person acts."""

    model_id: str
    error: PeerUnavailable
    most: int
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeWay:
    """An engine ended the generation so that others can go on; `most` as in `EngineLost`."""

    refusal: MemoryRefused
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUnknown:
    """An engine was started anew and has empty slots, or the load of the adapter failed."""

    adapter: str
    error: NotFound


AttemptEnding = Done | EngineLost | MakeWay | AdapterUnknown | Superseded


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Go on in so many seconds; with what is held, or after all of it was given back."""

    in_s: float = 0.0
    gives_back: bool = False


@dataclass(frozen=True, slots=True)
class EndWith:
    """Tell the caller."""

    error: KakeyaError


FAILURES = (Superseded, PeerUnavailable, MemoryRefused, NotFound)
"""Errors of a stream that may be endings."""


def ending_of(
    failure: Exception,
    job: Continuation,
    *,
    model_id: str,
    adapter: str,
    most: int,
    retry_after_s: float | None,
) -> AttemptEnding:
    """Which ending a failure is, which the job counts; `adapter` "" = none is in use. Raises the
    failure where it is none."""
    match failure:
        case Superseded():
            return failure
        case MemoryRefused():
            job.interrupt("engine")
            return MakeWay(refusal=failure, most=most)
        case PeerUnavailable():
            job.interrupt("engine")
            return EngineLost(
                model_id=model_id, error=failure, most=most, retry_after_s=retry_after_s
            )
        case NotFound() if adapter:
            job.interrupt("adapter")
            return AdapterUnknown(adapter=adapter, error=failure)
    raise failure


def after(ending: AttemptEnding, job: Continuation) -> Retry | EndWith | None:
    """What follows an ending that the job has counted already; None = nothing."""
    match ending:
        case Done():
            return None
        case Superseded():
            return Retry(gives_back=True)
        case MakeWay(refusal=refusal, most=most):
            if refusal.retry_after_s is None or job.losses["engine"] >= most:
                return EndWith(refusal)
            return Retry(in_s=refusal.retry_after_s)
        case EngineLost(model_id=model_id, error=error, most=most):
            if (losses := job.losses["engine"]) < most:
                return Retry()
            message = (
                f"model {model_id} lost {losses} engines in a row over this request without a "
                f"token, the last with: {error.message}"
            )
            return EndWith(PeerUnavailable(message, retry_after_s=ending.retry_after_s))
        case AdapterUnknown(adapter=adapter, error=unknown):
            if (losses := job.losses["adapter"]) < MOST_UNKNOWN:
                return Retry(gives_back=True)
            message = (
                f"the engine forgot adapter {adapter} {losses} times in a row: {unknown.message}"
            )
            return EndWith(PeerUnavailable(message, retry_after_s=1.0))
