"""Requests that wait for memory, by the number of the lease that each is to have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from kakeya.memory.arbiter.policy import Rules, periods
from kakeya.memory.arbiter.queue import LoadTicket
from kakeya.memory.arbiter.resident import LeaseId, RequestPriority, ResidentKey

_Order = tuple[float, float, float]
_Wish = tuple[ResidentKey, RequestPriority]


class Tickets(dict[LeaseId, LoadTicket]):
    """Tickets in the order of arrival; `in_order` gives the order of service.

    A request that waited to its limit for residents to drain is refused and told to come again. Its
    place is kept meanwhile.
    """

    def __init__(self, tickets: Mapping[LeaseId, LoadTicket] | None = None) -> None:
        super().__init__(tickets or {})
        self._kept: dict[_Wish, LoadTicket] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no request waits and no place is kept."""
        return not self and not self._kept

    @property
    def kept(self) -> tuple[ResidentKey, ...]:
        """The residents that refused requests with a kept place want."""
        return tuple(ticket.ask.key for ticket in self._kept.values())

    def enter(self, ticket: LoadTicket) -> None:
        """Put a request into the queue: at the place that is kept for it, else at the end."""
        self.lapse(ticket.asked_mono)
        kept = self._kept.get(_wish(ticket))
        if kept is not None:
            ticket.place_mono = kept.place_mono
        self[ticket.lease] = ticket

    def keep(self, ticket: LoadTicket, until_mono: float) -> None:
        """Keep the place of a refused request for it, and for requests that want the same."""
        alike = [one for one in self.values() if _wish(one) == _wish(ticket)]
        for one in alike:
            one.place_mono = min(one.place_mono, ticket.place_mono)
        ticket.kept_until_mono = until_mono
        self._kept[_wish(ticket)] = ticket

    def lapse(self, now: float) -> None:
        """Drop the places that were kept for long enough."""
        for wish, ticket in tuple(self._kept.items()):
            if ticket.kept_until_mono is not None and now >= ticket.kept_until_mono:
                del self._kept[wish]

    def of(self, key: ResidentKey) -> tuple[LoadTicket, ...]:
        """The requests that wait for one resident."""
        return tuple(one for one in self.values() if one.ask.key == key)

    def in_order(self, now: float, rules: Rules) -> list[LoadTicket]:
        """All waiting requests and kept places: the most urgent first, then the oldest."""
        taken = {_wish(one) for one in self.values()}
        away = (one for wish, one in self._kept.items() if wish not in taken)
        return sorted((*self.values(), *away), key=lambda one: _order(one, now, rules))

    def urgency(self, key: ResidentKey, now: float, rules: Rules) -> _Order:
        """The rank of the first request that waits for a resident; the last rank where none
        waits."""
        places = (_order(one, now, rules) for one in self.of(key))
        return min(places, default=(math.inf, math.inf, math.inf))

    def due(self, now: float, rules: Rules) -> Iterator[float]:
        """The monotonic times at which a waiting request may be decided anew without an event."""
        for one in (*self.values(), *self._kept.values()):
            yield one.place_mono + (periods(now - one.place_mono, rules.age_s) + 1) * rules.age_s
            if one.kept_until_mono is not None:
                yield one.kept_until_mono
                continue
            yield one.ask.deadline_mono
            limit_mono = one.limit_mono(rules)
            if limit_mono is not None:
                yield limit_mono


def _wish(ticket: LoadTicket) -> _Wish:
    return ticket.ask.key, ticket.ask.priority


def _order(ticket: LoadTicket, now: float, rules: Rules) -> _Order:
    return ticket.rank(now, rules), ticket.place_mono, ticket.lease
