"""The failures of one model: for how long it is not loaded again, and what requests are told.

Each pause within half an hour is longer than the last one. A model may also be barred, until what
barred it is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kakeya.core.errors import KakeyaError, LoadFailed, MemoryRefused, PeerUnavailable
from kakeya.generation.continuation import Continuation, Loss

PAUSES_S = (30.0, 60.0, 120.0, 300.0)
"""Seconds after the 1st, 2nd, ... failure within half an hour; the last value repeats."""
_COUNT_S = 1800.0
MOST_OUTGROWN = 2
"""The most engines in a row whose memory a generation may outgrow: after a first one the next runs
a single sequence at a time, and a third one would end as the second."""


class EngineOutgrew(PeerUnavailable):
    """An engine was ended because it outgrew its memory; the message says how."""


class GroupRefused(LoadFailed):
    """A ring group computes something else than one process; it is ended, and serves nothing."""

    code = "group_refused"


def losses_of(failure: PeerUnavailable, job: Continuation, *, is_alone: bool) -> tuple[Loss, ...]:
    """How the loss of an engine counts in a generation: one that waited there, while another one
    outgrew its memory, had no part in that. `is_alone` = the engine had no other."""
    if isinstance(failure, EngineOutgrew) and (is_alone or job.is_under_way):
        return "engine", "memory"
    return ("engine",)


def lost_too_often(
    model_id: str, last: PeerUnavailable, job: Continuation, retry_after_s: float | None
) -> KakeyaError:
    """The error of a generation that lost engines again and again without a token between.

    Where it outgrew the memory of several, another try would do the same: no time to come again.
    """
    times = job.losses["engine"]
    if job.losses["memory"] >= MOST_OUTGROWN:
        return MemoryRefused(
            f"model {model_id} has too little memory for this request, with a prompt of "
            f"{job.prompt_tokens} tokens: {times} engines were ended in a row, the last as "
            f"{last.message}; send a shorter prompt, or give the node a larger budget "
            "(--memory-budget)"
        )
    return PeerUnavailable(
        f"model {model_id} lost {times} engines in a row over this request without a token, the "
        f"last with: {last.message}",
        retry_after_s=retry_after_s,
    )


class ModelFailures:
    """See the module; `mono` is a monotonic clock, in seconds."""

    def __init__(self, model_id: str, mono: Callable[[], float]) -> None:
        self._model_id = model_id
        self._mono = mono
        self._until_mono = 0.0
        self._failed_mono: list[float] = []
        self.reason = ""
        """Why the model failed last or is barred; "" = neither, or it was loaded since."""

    @property
    def is_barred(self) -> bool:
        """Whether the model is not loaded until `bar` ends it."""
        return bool(self.reason) and self._until_mono == math.inf

    @property
    def may_load(self) -> bool:
        """Whether a load may be tried: the pause after the last failure is over."""
        return not self.reason or self._mono() >= self._until_mono

    def note(self, reason: str) -> None:
        """Begin the pause after a failure; a barred model stays barred."""
        if self.is_barred:
            return
        now = self._mono()
        self._failed_mono = [at for at in self._failed_mono if now - at < _COUNT_S]
        pause_s = PAUSES_S[min(len(self._failed_mono), len(PAUSES_S) - 1)]
        self._failed_mono.append(now)
        self.reason, self._until_mono = reason, now + pause_s

    def bar(self, reason: str) -> bool:
        """Bar the model for a reason in words, or end that with ""; whether anything changed."""
        if not reason and not self.is_barred:
            return False
        self.reason, self._until_mono = reason, math.inf if reason else 0.0
        return True

    def clear(self) -> None:
        """Note that the model was loaded. Pauses of later failures still count those before."""
        self.reason, self._until_mono = "", 0.0

    def check(self) -> None:
        """Raise MemoryRefused for a barred model, PeerUnavailable during a pause."""
        if self.is_barred:
            raise MemoryRefused(self.reason)
        if not self.may_load:
            raise PeerUnavailable(
                f"model {self._model_id} is failed: {self.reason}; it is tried again later",
                retry_after_s=max(1.0, self._until_mono - self._mono()),
            )
