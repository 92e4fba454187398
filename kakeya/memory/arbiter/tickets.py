"""Requests that wait for memory, by the number of the lease that each is to have."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from copy import deepcopy
from dataclasses import replace
from heapq import heapify, heappop, heappush

from kakeya.memory.arbiter.model_queue import ModelQueue
from kakeya.memory.arbiter.policy import Rules, periods, ticket_rank
from kakeya.memory.arbiter.queue import LoadTicket, NotYet
from kakeya.memory.arbiter.resident import LeaseId, RequestPriority, ResidentKey

_LATE_S = 0.5
"""A caller that leaves so shortly before its deadline has no time left, and comes again."""
_GONE = 64
"""Deadlines of requests that left may stay in the heap, as many as requests wait and this many
more."""
_Order = tuple[float, float, float]
_Wish = tuple[ResidentKey, RequestPriority]


class Tickets:
    """The tickets, with a queue for each model and priority; `walk` gives the order of service.

    A request that waited to its limit for residents to drain is refused and told to come again. Its
    place is kept meanwhile.

    A request without time for a load leaves a wish: its model is loaded in its turn, as soon as
    idle residents can make room, and is there when the request comes again. A wish takes nothing
    from the requests in the queue.
    """

    def __init__(self) -> None:
        self._tickets: dict[LeaseId, LoadTicket] = {}
        self._queues: dict[_Wish, ModelQueue] = {}
        self._deadlines: list[tuple[float, LeaseId]] = []
        self._stuck: dict[LeaseId, LoadTicket] = {}
        """Requests that waited for residents to drain at the last walk."""
        self._kept: dict[_Wish, LoadTicket] = {}
        self.wished: dict[ResidentKey, LoadTicket] = {}
        """The wish for each load."""

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def is_empty(self) -> bool:
        """Whether no request waits and no place is kept."""
        return not self._tickets and not self._kept

    @property
    def kept(self) -> tuple[ResidentKey, ...]:
        """The residents that refused requests with a kept place want."""
        return tuple(ticket.ask.key for ticket in self._kept.values())

    @property
    def wanted(self) -> tuple[ResidentKey, ...]:
        """The resident that each request waits for, in the order of arrival."""
        return tuple(ticket.ask.key for ticket in self._tickets.values())

    def get(self, lease: LeaseId) -> LoadTicket | None:
        """The request that is to have a lease; None = it does not wait."""
        return self._tickets.get(lease)

    def of(self, key: ResidentKey) -> list[LoadTicket]:
        """The requests that wait for one resident, in the order of arrival."""
        found = [one for queue in self._queues_of(key) for one in queue.tickets.values()]
        return sorted(found, key=lambda one: one.lease)

    def wants(self, key: ResidentKey) -> bool:
        """Whether a request or a wish waits for a resident."""
        return key in self.wished or bool(self._queues_of(key))

    def outline(self) -> Tickets:
        """A copy in which the first request of each queue stands for all of it, up to the last
        deadline."""
        copy = Tickets()
        for queue in self._queues.values():
            ask = queue.first.ask
            last_mono = max(one.ask.deadline_mono for one in queue.tickets.values())
            copy.enter(replace(queue.first, ask=replace(ask, deadline_mono=last_mono)))
        copy._kept, copy.wished = deepcopy(self._kept), deepcopy(self.wished)
        copy._stuck = {
            lease: copy._tickets[lease] for lease in self._stuck if lease in copy._tickets
        }
        return copy

    # Coming and going.

    def enter(self, ticket: LoadTicket) -> None:
        """Put a request into the queue: at the place that is kept for it, else at the end."""
        wish = _wish(ticket)
        if self._kept or self.wished:
            self.lapse(ticket.asked_mono)
            for before in (self._kept.get(wish), self.wished.get(ticket.ask.key)):
                if before is not None and before.ask.priority == ticket.ask.priority:
                    ticket.place_mono = min(ticket.place_mono, before.place_mono)
        self._tickets[ticket.lease] = ticket
        if (queue := self._queues.get(wish)) is None:
            queue = self._queues[wish] = ModelQueue()
        queue.add(ticket)
        if ticket.ask.deadline_mono < math.inf:
            heappush(self._deadlines, (ticket.ask.deadline_mono, ticket.lease))

    def remove(self, lease: LeaseId) -> None:
        """Take a waiting request out of the queue."""
        wish = _wish(self._tickets.pop(lease))
        queue = self._queues[wish]
        queue.remove(lease)
        if not queue.tickets:
            del self._queues[wish]
        self._stuck.pop(lease, None)
        if len(self._deadlines) > 2 * len(self._tickets) + _GONE:
            self._deadlines = [one for one in self._deadlines if one[1] in self._tickets]
            heapify(self._deadlines)

    def withdraw(self, ticket: LoadTicket, now: float, rules: Rules) -> None:
        """Take a request out of the queue. One that leaves at its deadline leaves a wish."""
        self.remove(ticket.lease)
        if _is_late(ticket, now):
            self.wish(ticket, now, rules)

    def keep(self, ticket: LoadTicket, until_mono: float) -> None:
        """Keep the place of a refused request for it, and for requests that want the same."""
        wish = _wish(ticket)
        if (alike := self._queues.get(wish)) is not None:
            for one in alike.tickets.values():
                one.place_mono = min(one.place_mono, ticket.place_mono)
            alike.sort()
        ticket.kept_until_mono = until_mono
        self._kept[wish] = ticket

    def wish(self, ticket: LoadTicket, now: float, rules: Rules) -> None:
        """Remember a request's wish for a load until the next try, at the place of an earlier one;
        room and leases of memory are not wished for."""
        if ticket.is_of_model:
            before = self.wished.get(ticket.ask.key)
            ticket.place_mono = min(ticket.place_mono, before.place_mono if before else math.inf)
            ticket.kept_until_mono = now + ticket.ask.load_s + rules.age_s + rules.place_s
            self.wished[ticket.ask.key] = ticket

    def lapse(self, now: float) -> None:
        """Drop the places and wishes that were kept for long enough."""
        for key, wished in tuple(self.wished.items()):
            if wished.kept_until_mono is not None and now >= wished.kept_until_mono:
                del self.wished[key]
        for wish, ticket in tuple(self._kept.items()):
            if ticket.kept_until_mono is not None and now >= ticket.kept_until_mono:
                del self._kept[wish]

    def go_first(self, lease: LeaseId) -> None:
        """Let a request stand before all others, as the one that waited longest."""
        ticket = self._tickets[lease]
        ticket.go_first()
        self._queues[_wish(ticket)].sort()

    # The order of service.

    def walk(
        self, now: float, rules: Rules, closed: Container[ResidentKey]
    ) -> Iterator[LoadTicket]:
        """All waiting requests and kept places for a decision on each: the most urgent first, then
        the oldest.

        From the moment at which a key is in `closed`, its requests are left out, but for those
        whose deadline has passed: they wait behind the one that closed it. So a walk takes a time
        that grows with the models, and not with the requests.
        """
        walks: list[Iterator[tuple[float, LoadTicket]]] = []
        walks += (queue.walk() for queue in self._queues.values())
        walks += (iter(((one.place_mono, one),)) for one in self._expired(now))
        away = [one for wish, one in self._kept.items() if wish not in self._queues]
        walks += (iter(((one.place_mono, one),)) for one in away)
        heads: list[tuple[_Order, int, LoadTicket]] = []

        def step(number: int) -> None:
            if (found := next(walks[number], None)) is not None:
                place_mono, ticket = found
                heappush(heads, (_order(ticket, place_mono, now, rules), number, ticket))

        for number in range(len(walks)):
            step(number)
        stuck: dict[LeaseId, LoadTicket] = {}
        first_away = len(walks) - len(away)
        while heads:
            _, number, ticket = heappop(heads)
            is_there = number >= first_away or ticket.lease in self._tickets
            is_open = ticket.ask.key not in closed
            if is_there and (is_open or now >= ticket.ask.deadline_mono):
                yield ticket
                if ticket.is_stuck and ticket.lease in self._tickets:
                    stuck[ticket.lease] = ticket
            if is_open:
                step(number)
        for lease, ticket in self._stuck.items():
            if lease not in stuck:  # it waits behind another one now
                ticket.mark(now, NotYet())
        self._stuck = stuck

    def is_behind(self, ticket: LoadTicket, now: float) -> bool:
        """Whether a request in the queue, far from its deadline, stands behind one that wants the
        same."""
        return self._queues[_wish(ticket)].first is not ticket and not _is_late(ticket, now)

    def urgency(self, key: ResidentKey, now: float, rules: Rules) -> _Order:
        """The rank of the first request that waits for a resident; the last rank where none
        waits."""
        firsts = (queue.first for queue in self._queues_of(key))
        places = (_order(one, one.place_mono, now, rules) for one in firsts)
        return min(places, default=(math.inf, math.inf, math.inf))

    def keys_in_order(self, now: float, rules: Rules) -> list[ResidentKey]:
        """The residents that requests wait for, the one of the most urgent request first."""
        keys = dict.fromkeys(key for key, _ in self._queues)
        return sorted(keys, key=lambda key: self.urgency(key, now, rules))

    def due(self, now: float, rules: Rules) -> Iterator[float]:
        """The monotonic times at which the decision on a waiting request may change without an
        event, but for deadlines."""
        firsts = [queue.first for queue in self._queues.values()]
        for one in (*firsts, *self._kept.values(), *self.wished.values()):
            yield one.place_mono + (periods(now - one.place_mono, rules.age_s) + 1) * rules.age_s
            if one.kept_until_mono is not None:
                yield one.kept_until_mono
        for one in self._stuck.values():
            if (limit_mono := one.limit_mono(rules)) is not None:
                yield limit_mono

    def next_deadline_mono(self, now: float) -> float:
        """The first deadline after `now`; infinite = there is none."""
        while self._deadlines and self._deadlines[0][1] not in self._tickets:
            heappop(self._deadlines)
        if self._deadlines and self._deadlines[0][0] > now:
            return self._deadlines[0][0]
        return min((at for at, lease in self._deadlines if at > now), default=math.inf)

    def _expired(self, now: float) -> list[LoadTicket]:
        """The requests whose deadline has passed; the walk refuses them."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease = heappop(self._deadlines)
            if (ticket := self._tickets.get(lease)) is not None:
                found.append(ticket)
        return found

    def _queues_of(self, key: ResidentKey) -> list[ModelQueue]:
        found = (self._queues.get((key, priority)) for priority in RequestPriority)
        return [queue for queue in found if queue is not None]


def _wish(ticket: LoadTicket) -> _Wish:
    return ticket.ask.key, ticket.ask.priority


def _is_late(ticket: LoadTicket, now: float) -> bool:
    return now >= ticket.ask.deadline_mono - _LATE_S


def _order(ticket: LoadTicket, place_mono: float, now: float, rules: Rules) -> _Order:
    return ticket_rank(ticket.ask.priority, now - place_mono, rules), place_mono, ticket.lease
