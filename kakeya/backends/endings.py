"""The endings of an engine's stream, and the next step for each: one table. Pure.

    Done             nothing follows
    EngineLost       another engine goes on at once from the committed tokens
    MakeWay          the engine needed the memory for others: the generation goes on after a pause
    AdapterUnknown   the engine lacks the adapter: all is given back, and the adapter loaded again
    Superseded       another request or a peer brings the blocks: all is given back, to wait again

Too many losses in a row without a token in between end the generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from kakeya.backends.engine.failures import MOST_OUTGROWN, losses_of, lost_too_often
from kakeya.core.errors import KakeyaError, KvRefused, MemoryRefused, NotFound, PeerUnavailable
from kakeya.generation.continuation import Continuation
from kakeya.generation.frames import Done
from kakeya.prefix.request.exchange import Superseded

MOST_UNKNOWN = 3
"""The most tries in a row at which the engine may lack the adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """An engine died, or broke the stream; `most` losses in a row end the generation.

    `retry_after_s` is the time until another engine may serve, None = only after the owner acts.
    """

    model_id: str
    error: PeerUnavailable
    most: int
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeWay:
    """An engine ended the generation so that other ones go on; `most` as in `EngineLost`."""

    refusal: MemoryRefused
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUnknown:
    """A restarted engine has empty slots, or the load of the adapter failed."""

    adapter: str
    error: NotFound


AttemptEnding = Done | EngineLost | MakeWay | AdapterUnknown | Superseded


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Go on after `in_s`, with the held resources or after all of them were given back."""

    in_s: float = 0.0
    gives_back: bool = False


@dataclass(frozen=True, slots=True)
class EndWith:
    """End the generation with an error for the caller."""

    error: KakeyaError


FAILURES = (Superseded, PeerUnavailable, MemoryRefused, NotFound)
"""Errors of a stream that may be endings."""


def ending_of(
    failure: Exception,
    job: Continuation,
    *,
    model_id: str,
    adapter: str,
    is_alone: bool,
    most: int,
    retry_after_s: float | None,
) -> AttemptEnding:
    """Return the ending of a failure, and count it in the job; `adapter` "" = none is in use,
    `is_alone` = the engine had no other generation. Raises the failure if it is not an ending."""
    match failure:
        case Superseded():
            return failure
        case KvRefused():
            raise failure
        case MemoryRefused():
            job.interrupt("engine")
            return MakeWay(refusal=failure, most=most)
        case PeerUnavailable():
            job.interrupt(*losses_of(failure, job, is_alone=is_alone))
            return EngineLost(
                model_id=model_id, error=failure, most=most, retry_after_s=retry_after_s
            )
        case NotFound() if adapter:
            job.interrupt("adapter")
            return AdapterUnknown(adapter=adapter, error=failure)
    raise failure


def after(ending: AttemptEnding, job: Continuation) -> Retry | EndWith | None:
    """Return the next step after an ending that the job has counted; None = none."""
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
            if job.losses["engine"] < most and job.losses["memory"] < MOST_OUTGROWN:
                return Retry()
            return EndWith(lost_too_often(model_id, error, job, ending.retry_after_s))
        case AdapterUnknown(adapter=adapter, error=unknown):
            if (losses := job.losses["adapter"]) < MOST_UNKNOWN:
                return Retry(gives_back=True)
            message = (
                f"the engine forgot adapter {adapter} {losses} times in a row: {unknown.message}"
            )
            return EndWith(PeerUnavailable(message, retry_after_s=1.0))
