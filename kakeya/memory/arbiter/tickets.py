"""Who waits for memory, by the lease that each is to have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from kakeya.memory.arbiter.policy import Rules, periods
from kakeya.memory.arbiter.queue import LoadTicket
from kakeya.memory.arbiter.resident import LeaseId, RequestPriority, ResidentKey

_Order = tuple[float, float, float]
_Wish = tuple[ResidentKey, RequestPriority]


class Tickets(dict[LeaseId, LoadTicket]):
    """In the order in which they came; `in_order` is the one in which they are served.

    Who waited for others to let go, to the limit, is refused and told to come again. Its place is
    kept meanwhile, and is that of all who ask for the same as urgently: one of them is the one that
    was told to.
    """

    def __init__(self, tickets: Mapping[LeaseId, LoadTicket] | None = None) -> None:
        super().__init__(tickets or {})
        self._kept: dict[_Wish, LoadTicket] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits, and nobody is expected back."""
        return not self and not self._kept

    @property
    def kept(self) -> tuple[ResidentKey, ...]:
        """What those wait for whose places are kept."""
        return tuple(ticket.ask.key for ticket in self._kept.values())

    def enter(self, ticket: LoadTicket) -> None:
        """Put a request into the line: where a place is kept for it, else at the end."""
        self.lapse(ticket.asked_mono)
        kept = self._kept.get(_wish(ticket))
        if kept is not None:
            ticket.place_mono = kept.place_mono
        self[ticket.lease] = ticket

    def keep(self, ticket: LoadTicket, until_mono: float) -> None:
        """Keep the place of one that was refused. Those that wait for the same have it, too."""
        alike = [one for one in self.values() if _wish(one) == _wish(ticket)]
        for one in alike:
            one.place_mono = min(one.place_mono, ticket.place_mono)
        ticket.kept_until_mono = until_mono
        self._kept[_wish(ticket)] = ticket

    def lapse(self, now: float) -> None:
        """Keep no place longer than it is to be kept."""
        for wish, ticket in tuple(self._kept.items()):
            if ticket.kept_until_mono is not None and now >= ticket.kept_until_mono:
                del self._kept[wish]

    def of(self, key: ResidentKey) -> tuple[LoadTicket, ...]:
        """Those that wait for one resident."""
        return tuple(one for one in self.values() if one.ask.key == key)

    def in_order(self, now: float, rules: Rules) -> list[LoadTicket]:
        """The most urgent first, among equals who came first; with places that nobody has taken."""
        taken = {_wish(one) for one in self.values()}
        away = (one for wish, one in self._kept.items() if wish not in taken)
        return sorted((*self.values(), *away), key=lambda one: _order(one, now, rules))

    def urgency(self, key: ResidentKey, now: float, rules: Rules) -> _Order:
        """Where the first who waits for a resident stands; behind all where nobody does."""
        places = (_order(one, now, rules) for one in self.of(key))
        return min(places, default=(math.inf, math.inf, math.inf))

    def due(self, now: float, rules: Rules) -> Iterator[float]:
        """When time alone changes what becomes of one, on the monotonic clock."""
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
