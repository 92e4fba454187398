"""The life of a ring group at the node that leads it. Pure.

STARTING -> UP          memory is lent, ranks are started, loaded and checked
   |         |
   v         v
 WAITING <---+          a rank was refused or lost; STARTING again after a pause, or as soon as
   |                    its members are seen again
   +-> STARTING
ENDING                  from each state, by `kakeya ring down`, and for good
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Seconds after the 1st, 2nd, ... failure in a row; the last value repeats."""
CALM_S = 120.0
"""A group that was up for so long before it failed begins with the first pause again."""


class GroupPhase(StrEnum):
    """See the module."""

    STARTING = "starting"
    UP = "up"
    WAITING = "waiting"
    ENDING = "ending"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """`since_mono` is the begin of the phase; `retry_mono` the next try of a group that waits,
    infinite otherwise; `reason` the last failure in words, "" = none yet."""

    phase: GroupPhase = GroupPhase.STARTING
    since_mono: float = 0.0
    retry_mono: float = math.inf
    failures: int = 0
    reason: str = ""

    def began(self, now: float) -> GroupState:
        """A try begins."""
        return self._to(GroupPhase.STARTING, now)

    def up(self, now: float) -> GroupState:
        """All ranks serve."""
        return self._to(GroupPhase.UP, now)

    def failed(self, reason: str, now: float) -> GroupState:
        """A try failed, or a rank was lost."""
        if self.phase in (GroupPhase.ENDING, GroupPhase.WAITING):
            return self
        was_calm = self.phase is GroupPhase.UP and now - self.since_mono >= CALM_S
        failures = 1 if was_calm else self.failures + 1
        pause_s = PAUSES_S[min(failures, len(PAUSES_S)) - 1]
        waiting = self._to(GroupPhase.WAITING, now)
        return replace(waiting, retry_mono=now + pause_s, failures=failures, reason=reason)

    def members_seen(self, now: float) -> GroupState:
        """All members are there: the next try need not wait long."""
        if self.phase is not GroupPhase.WAITING:
            return self
        return replace(self, retry_mono=min(self.retry_mono, max(now, self.since_mono) + 1.0))

    def ended(self, now: float) -> GroupState:
        """The wish is over."""
        return self._to(GroupPhase.ENDING, now)

    def _to(self, phase: GroupPhase, now: float) -> GroupState:
        if self.phase is GroupPhase.ENDING:
            return self
        since = self.since_mono if phase is self.phase else now
        return replace(self, phase=phase, since_mono=since, retry_mono=math.inf)
