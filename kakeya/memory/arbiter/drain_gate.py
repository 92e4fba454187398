"""Residents that take no new leases because a queued request needs their room.

    claimed    closed: leases end one by one, and the queued request gets the room
    `shut_s`   later, still in use: open once for the requests that wait for the resident itself
    then       closed again, for twice as long

A resident may be in use for hours. The doubling serves both sides in the end: the request that
needs the room waits about as long as the longest use, and requests for the resident wait little
longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kakeya.memory.arbiter.ledger import Ledger
from kakeya.memory.arbiter.policy import Rules
from kakeya.memory.arbiter.resident import ResidentKey, State


@dataclass(slots=True)
class _Closed:
    since_mono: float
    limit_s: float

    @property
    def until_mono(self) -> float:
        return self.since_mono + self.limit_s


class DrainGate:
    """The closed residents of one ledger."""

    def __init__(self, rules: Rules, ledger: Ledger) -> None:
        self._rules = rules
        self._ledger = ledger
        self._closed: dict[ResidentKey, _Closed] = {}

    @property
    def are_open(self) -> bool:
        """Whether no resident is closed."""
        return not self._closed

    def to_open(self, now: float) -> frozenset[ResidentKey]:
        """The residents that were closed for long enough."""
        return frozenset(key for key, gate in self._closed.items() if now >= gate.until_mono)

    def walked(
        self, claims: Collection[ResidentKey], opened: Collection[ResidentKey], now: float
    ) -> None:
        """Note a walk over the queue: waiting requests claim `claims`, which drain from now on,
        and `opened` took new leases."""
        still = {key: self._closed.get(key, _Closed(now, self._rules.shut_s)) for key in claims}
        # The requests that waited for it are let in; the next time it stays closed for longer.
        again = {key: _Closed(now, 2 * self._closed[key].limit_s) for key in opened}
        self._closed = still | again
        for one in self._ledger.residents:
            is_claimed = one.key in claims
            if one.state is State.READY and is_claimed:
                self._ledger.put(one.moved(State.DRAINING))
            elif one.state is State.DRAINING and not one.is_leaving and not is_claimed:
                self._ledger.put(one.moved(State.READY))

    def due(self) -> Iterator[float]:
        """The monotonic times at which residents open."""
        for gate in self._closed.values():
            yield gate.until_mono
