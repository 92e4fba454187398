"""The waiting requests for one model at one priority, in the order of their places.

Ageing keeps this order: of two requests of one priority the one with the earlier place has aged at
least as much, at all times. So nothing is sorted as time passes, and only the first request of each
queue has to be compared with those of others.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from kakeya.memory.arbiter.queue import LoadTicket
from kakeya.memory.arbiter.resident import LeaseId

_GONE = 16
"""Requests that left may stay in the order, as many as wait and this many more."""


class ModelQueue:
    """One such queue. A request that leaves stays in the order until it comes first, or until most
    of the order has left; so each step takes O(log n)."""

    __slots__ = ("_begin", "_order", "tickets")

    def __init__(self) -> None:
        self._order: list[tuple[float, LeaseId]] = []
        self._begin = 0
        self.tickets: dict[LeaseId, LoadTicket] = {}

    def add(self, ticket: LoadTicket) -> None:
        """Put a request at its place."""
        self.tickets[ticket.lease] = ticket
        insort(self._order, (ticket.place_mono, ticket.lease), lo=self._begin)

    def remove(self, lease: LeaseId) -> None:
        """Take a request out."""
        del self.tickets[lease]
        if len(self._order) > 2 * len(self.tickets) + _GONE:
            self.sort()

    def sort(self) -> None:
        """Note that places have changed. Walks that are under way keep to the old ones."""
        self._order = sorted((one.place_mono, one.lease) for one in self.tickets.values())
        self._begin = 0

    @property
    def first(self) -> LoadTicket:
        """The first request of a queue that is not empty."""
        while (ticket := self.tickets.get(self._order[self._begin][1])) is None:
            self._begin += 1
        return ticket

    def walk(self) -> Iterator[tuple[float, LoadTicket]]:
        """The requests with their places, in order; requests may be removed meanwhile."""
        order = self._order
        for index in range(self._begin, len(order)):
            place_mono, lease = order[index]
            if (ticket := self.tickets.get(lease)) is not None:
                yield place_mono, ticket
