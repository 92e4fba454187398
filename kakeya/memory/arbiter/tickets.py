"""Requests that wait for memory, by the number of the lease that each is to have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from kakeya.memory.arbiter.policy import Rules, periods
from kakeya.memory.arbiter.queue import LoadTicket
from kakeya.memory.arbiter.resident import LeaseId, RequestPriority, ResidentKey

_LATE_S = 0.5
"""A caller that leaves so shortly before its deadline has no time left, and comes again."""
_Order = tuple[float, float, float]
_Wish = tuple[ResidentKey, RequestPriority]


class Tickets(dict[LeaseId, LoadTicket]):
    """Tickets in the order of arrival; `in_order` gives the order of service.

    A request that waited to its limit for residents to drain is refused and told to come again. Its
    place is kept meanwhile.

    A request without time for a load leaves a wish: its model is loaded in its turn, as soon as
    idle residents can make room, and is there when the request comes again. A wish takes nothing
    from the requests in the queue.
    """

    def __init__(self, tickets: Mapping[LeaseId, LoadTicket] | None = None) -> None:
        super().__init__(tickets or {})
        self._kept: dict[_Wish, LoadTicket] = {}
        self.wished: dict[ResidentKey, LoadTicket] = {}
        """The wish for each load."""

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
        wished = self.wished.get(ticket.ask.key)
        for before in (kept, wished):
            if before is not None and before.ask.priority == ticket.ask.priority:
                ticket.place_mono = min(ticket.place_mono, before.place_mono)
        self[ticket.lease] = ticket

    def keep(self, ticket: LoadTicket, until_mono: float) -> None:
        """Keep the place of a refused request for it, and for requests that want the same."""
        alike = [one for one in self.values() if _wish(one) == _wish(ticket)]
        for one in alike:
            one.place_mono = min(one.place_mono, ticket.place_mono)
        ticket.kept_until_mono = until_mono
        self._kept[_wish(ticket)] = ticket

    def wish(self, ticket: LoadTicket, now: float, rules: Rules) -> None:
        """Remember a request's wish for a load until the next try, at the place of an earlier one;
        room and leases of memory are not wished for."""
        if ticket.is_of_model:
            before = self.wished.get(ticket.ask.key)
            ticket.place_mono = min(ticket.place_mono, before.place_mono if before else math.inf)
            ticket.kept_until_mono = now + ticket.ask.load_s + rules.age_s + rules.place_s
            self.wished[ticket.ask.key] = ticket

    def withdraw(self, lease: LeaseId, now: float, rules: Rules) -> bool:
        """Take a request out of the queue; False = it is not there. One that leaves at its deadline
        leaves a wish."""
        ticket = self.pop(lease, None)
        if ticket is not None and now >= ticket.ask.deadline_mono - _LATE_S:
            self.wish(ticket, now, rules)
        return ticket is not None

    def wants(self, key: ResidentKey) -> bool:
        """Whether a request or a wish waits for a resident."""
        return key in self.wished or bool(self.of(key))

    def lapse(self, now: float) -> None:
        """Drop the places and wishes that were kept for long enough."""
        for key, wished in tuple(self.wished.items()):
            if wished.kept_until_mono is not None and now >= wished.kept_until_mono:
                del self.wished[key]
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
        for one in (*self.values(), *self._kept.values(), *self.wished.values()):
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
