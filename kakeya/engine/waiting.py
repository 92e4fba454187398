"""Those that wait for a place, in each of the orders that are asked for.

    shares    by class, share and work: whose turn it is
    age       by arrival, and by the room that is needed: who waited longest of those that fit
    deadline  whose time is over
    work      how many prompts go before one, and how long these take

Each takes a time that hardly grows with how many wait. Those that were parked are also listed,
in the order of parking: they are few, they hold KV, and their deadlines were kept.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic

from kakeya.engine.policy import CLASSES, Account, Ahead, Claim, ClaimT
from kakeya.engine.shares import FairShares, Turn

_RUN = 512
"""Prompts whose work is added up together."""
_NS = 1_000_000_000
_FEW = 64
"""Entries that may be stale, whatever the others are."""


class Waiting(Generic[ClaimT]):
    """Who waits. `claims` are all of them by number, `parked` those that have begun.

    Numbers rise with each arrival. What a claim's orders go by stays as it is while it waits, but
    for what its account used.
    """

    def __init__(self) -> None:
        self.shares: FairShares[ClaimT] = FairShares()
        self.claims = self.shares.waiting
        self.parked: list[ClaimT] = []
        self._work = tuple(_Work() for _ in range(CLASSES))
        self._by_age: OrderedDict[int, ClaimT] = OrderedDict()
        self._by_need: tuple[dict[int, _Alike], ...] = tuple({} for _ in range(CLASSES))
        self._deadlines: list[tuple[float, int]] = []

    def add(self, claim: ClaimT, *, is_parked: bool = False) -> None:
        """It waits from now on; its account says so already."""
        turn = self.shares.add(claim)
        priority = claim.account.priority
        self._work[priority].add(turn, round(claim.work_s * _NS))
        if is_parked:
            self.parked.append(claim)
            return
        self._by_age[claim.number] = claim
        groups = self._by_need[priority]
        alike = groups.get(claim.need_bytes)
        if alike is None:
            alike = groups[claim.need_bytes] = _Alike()
        alike.add(claim.number, claim.account)
        if claim.expires_s < math.inf:
            if len(self._deadlines) > 2 * len(self._by_age) + _FEW:
                self._deadlines = [one for one in self._deadlines if one[1] in self._by_age]
                heapify(self._deadlines)
            heappush(self._deadlines, (claim.expires_s, claim.number))

    def remove(self, claim: ClaimT) -> None:
        """It waits no longer."""
        turn = self.shares.remove(claim)
        priority = claim.account.priority
        self._work[priority].remove(turn)
        if self._by_age.pop(claim.number, None) is None:
            self.parked.remove(claim)
            return
        groups = self._by_need[priority]
        if not groups[claim.need_bytes].remove(claim.number, claim.account):
            del groups[claim.need_bytes]

    def expired(self, now_s: float) -> list[ClaimT]:
        """Whose deadline is over and who has not begun, the earliest deadline first."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number = heappop(self._deadlines)
            if number in self._by_age:
                late.append(self._by_age[number])
        return late

    def oldest(self) -> ClaimT | None:
        """Who arrived first; None = nobody waits."""
        found = next(iter(self._by_age.values()), None)
        for claim in self.parked:
            if found is None or claim.number < found.number:
                found = claim
        return found

    def oldest_within(
        self, rooms: Sequence[tuple[int, int]], running: Collection[str]
    ) -> ClaimT | None:
        """Who arrived first of those that have not begun and that fit.

        `rooms` are the bytes that one of each class can get: at least 0 where there is a place for
        it at all; the first of a client that runs something, which are no more than the second, of
        another one. `running` are the clients that run something.
        """
        for claim in self._by_age.values():
            of_these, of_others = rooms[claim.priority]
            if claim.need_bytes <= (of_these if claim.account.client in running else of_others):
                return claim
            break  # the usual case was looked at
        best = math.inf
        for groups, (of_these, of_others) in zip(self._by_need, rooms, strict=True):
            for need, alike in groups.items():
                if need <= of_others and alike.firsts[0][0] < best:
                    best = min(best, alike.oldest(running if need > of_these else ()))
        return None if best == math.inf else self._by_age[int(best)]

    def ahead_of(self, claim: Claim) -> Ahead:
        """Who goes before a claim by class and work, and what of their prompts is left."""
        turn = claim.arrived_s + claim.work_s, claim.number
        count, work_ns = self._work[claim.priority].before(turn)
        for work in self._work[: claim.priority]:
            count, work_ns = count + work.count, work_ns + work.work_ns
        return Ahead(count, work_ns / _NS)


@dataclass(slots=True, eq=False)
class _Alike:
    """Numbers of claims of one class that need the same room, by account; the first of each account
    lies in a heap, whose first entry is never a stale one."""

    queues: dict[Account, OrderedDict[int, None]] = field(default_factory=dict)
    firsts: list[tuple[int, Account]] = field(default_factory=list)

    def add(self, number: int, account: Account) -> None:
        queue = self.queues.get(account)
        if queue is not None:
            queue[number] = None
        else:
            self.queues[account] = OrderedDict({number: None})
            heappush(self.firsts, (number, account))

    def remove(self, number: int, account: Account) -> bool:
        """Take one out; False = none is left."""
        queue, firsts = self.queues[account], self.firsts
        was_first = next(iter(queue)) == number
        del queue[number]
        if not queue:
            del self.queues[account]
        elif was_first:
            heappush(firsts, (next(iter(queue)), account))
        while firsts and not self._leads(*firsts[0]):
            heappop(firsts)
        if len(firsts) > 2 * len(self.queues) + _FEW:
            firsts[:] = [one for one in firsts if self._leads(*one)]
            heapify(firsts)
        return bool(firsts)

    def oldest(self, without: Collection[str]) -> float:
        """The least number of a claim of other clients than these; infinity = there is none."""
        skipped, found = [], math.inf
        while self.firsts:
            number, account = self.firsts[0]
            if not self._leads(number, account):
                heappop(self.firsts)
            elif account.client in without:
                skipped.append(heappop(self.firsts))
            else:
                found = number
                break
        for entry in skipped:
            heappush(self.firsts, entry)
        return found

    def _leads(self, number: int, account: Account) -> bool:
        queue = self.queues.get(account)
        return queue is not None and next(iter(queue)) == number


@dataclass(slots=True, eq=False)
class _Work:
    """What is left of the prompts of one class, in nanoseconds, so that sums are exact; sorted, in
    runs."""

    count: int = 0
    work_ns: int = 0
    turns: list[list[Turn]] = field(default_factory=lambda: [[]])
    works: list[list[int]] = field(default_factory=lambda: [[]])
    sums: list[int] = field(default_factory=lambda: [0])
    lasts: list[Turn] = field(default_factory=list)
    """The last turn of each run but the hindmost."""

    def add(self, turn: Turn, work_ns: int) -> None:
        self.count, self.work_ns = self.count + 1, self.work_ns + work_ns
        run = bisect_left(self.lasts, turn)
        turns, works = self.turns[run], self.works[run]
        at = bisect_left(turns, turn)
        turns.insert(at, turn)
        works.insert(at, work_ns)
        self.sums[run] += work_ns
        if len(turns) > 2 * _RUN:
            self.turns[run : run + 1] = turns[:_RUN], turns[_RUN:]
            self.works[run : run + 1] = works[:_RUN], works[_RUN:]
            self.sums[run : run + 1] = map(sum, self.works[run : run + 2])
            self.lasts.insert(run, turns[_RUN - 1])

    def remove(self, turn: Turn) -> None:
        run = bisect_left(self.lasts, turn)
        turns, works = self.turns[run], self.works[run]
        at = bisect_left(turns, turn)
        del turns[at]
        work_ns = works.pop(at)
        self.sums[run] -= work_ns
        self.count, self.work_ns = self.count - 1, self.work_ns - work_ns
        if not turns and self.lasts:
            del self.turns[run], self.works[run], self.sums[run]
            del self.lasts[min(run, len(self.lasts) - 1)]

    def before(self, turn: Turn) -> tuple[int, int]:
        """How many come before it, and their work together."""
        run = bisect_left(self.lasts, turn)
        at = bisect_left(self.turns[run], turn)
        count = sum(map(len, self.turns[:run])) + at
        return count, sum(self.sums[:run]) + sum(self.works[run][:at])
