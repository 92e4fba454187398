"""Who waits for memory, by the lease that each is to have."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kakeya.memory.line import Ticket
from kakeya.memory.policy import Rules, periods
from kakeya.memory.resident import LeaseId, ResidentKey

_Order = tuple[float, float]


class Tickets(dict[LeaseId, Ticket]):
    """In the order in which they came; `in_order` is the one in which they are served."""

    def of(self, key: ResidentKey) -> tuple[Ticket, ...]:
        """Those that wait for one resident."""
        return tuple(one for one in self.values() if one.ask.key == key)

    def in_order(self, now: float, rules: Rules) -> list[Ticket]:
        """The most urgent first; among equals who came first."""
        return sorted(self.values(), key=lambda one: _order(one, now, rules))

    def urgency(self, key: ResidentKey, now: float, rules: Rules) -> _Order:
        """Where the first who waits for a resident stands; behind all where nobody does."""
        places = (_order(one, now, rules) for one in self.of(key))
        return min(places, default=(math.inf, math.inf))

    def due(self, now: float, rules: Rules) -> Iterator[float]:
        """When time alone changes what becomes of one, on the monotonic clock."""
        for one in self.values():
            yield one.ask.deadline_mono
            yield one.asked_mono + (periods(now - one.asked_mono, rules.age_s) + 1) * rules.age_s
            limit_mono = one.limit_mono(rules)
            if limit_mono is not None:
                yield limit_mono


def _order(ticket: Ticket, now: float, rules: Rules) -> _Order:
    return ticket.rank(now, rules), ticket.lease
