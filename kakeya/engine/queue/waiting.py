"""Those that wait for a place, in each of the orders that are asked for.

    shares    by class, share and work: whose turn it is
    age       by arrival, and by the room that is needed: who waited longest of those that fit
    deadline  whose time is over
    work      how many prompts go before one, and how long these take

Each takes a time that hardly grows with how many wait. By room and by work they are put in order
when somebody asks, each once: who left before never is. Those that were parked are also listed, in
the order of parking: they are few, they hold KV, and each is looked at for its deadline.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Generic

from kakeya.engine.queue.fair_shares import FairShares
from kakeya.engine.queue.policy import CLASSES, Account, AheadOfClaim, ClaimT, GenerationClaim, Turn

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
        self._by_age: OrderedDict[int, ClaimT] = OrderedDict()
        self._deadlines: list[tuple[float, int]] = []
        # What is filed only when somebody asks for it, up to a number: the others have none yet.
        self._work = tuple(_Work() for _ in range(CLASSES))
        self._worked = 0
        self._by_need = tuple(_Needs() for _ in range(CLASSES))
        self._needed = 0
        self._needs = 0

    def add(self, claim: ClaimT, *, is_parked: bool = False) -> None:
        """It waits from now on; its account says so already."""
        turn = self.shares.add(claim)
        number = claim.number
        if is_parked:
            self._work[claim.account.priority].add(turn, claim.work_s)
            self.parked.append(claim)
            return
        self._by_age[number] = claim
        if claim.expires_s < inf:
            deadlines = self._deadlines
            if len(deadlines) > 2 * len(self._by_age) + _FEW:
                deadlines[:] = [one for one in deadlines if one[1] in self._by_age]
                heapify(deadlines)
            heappush(deadlines, (claim.expires_s, number))

    def remove(self, claim: ClaimT) -> None:
        """It waits no longer."""
        turn = self.shares.remove(claim)
        if self._by_age.pop(claim.number, None) is None:
            self.parked.remove(claim)
        elif claim.number > self._worked:
            return
        self._work[claim.account.priority].remove(turn)

    def expired(self, now_s: float) -> list[ClaimT]:
        """Whose deadline is over and who has not begun, the earliest deadline first."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number = heappop(self._deadlines)
            if number in self._by_age:
                late.append(self._by_age[number])
        return late

    def oldest(self, *, without: int | None = None) -> ClaimT | None:
        """Who arrived first, of all classes but this one, of which few wait; None = nobody."""
        found = next((one for one in self._by_age.values() if one.priority != without), None)
        for claim in self.parked:
            if claim.priority != without and (found is None or claim.number < found.number):
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
        self._file_needs()
        best = inf
        for needs, (of_these, of_others) in zip(self._by_need, rooms, strict=True):
            for need, number in needs.firsts.items():
                if number < best and need <= of_others:
                    skipped = running if need > of_these else ()
                    best = min(best, needs.oldest(need, self._by_age, skipped))
        return None if best == inf else self._by_age[int(best)]

    def ahead_of(self, claim: GenerationClaim) -> AheadOfClaim:
        """Who goes before a claim by class and work, and what of their prompts is left."""
        for one in self._since(self._worked):
            self._work[one.priority].add((one.alone_s, one.number), one.work_s)
            self._worked = one.number
        turn = claim.arrived_s + claim.work_s, claim.number
        count, work_ns = self._work[claim.priority].before(turn)
        for work in self._work[: claim.priority]:
            count, work_ns = count + work.count, work_ns + work.work_ns
        return AheadOfClaim(count, work_ns / _NS)

    def _since(self, number: int) -> list[ClaimT]:
        """Who has not begun and arrived after this one, by age."""
        found = []
        for claim in reversed(self._by_age.values()):
            if claim.number <= number:
                break
            found.append(claim)
        found.reverse()
        return found

    def _file_needs(self) -> None:
        if self._needs > 2 * len(self._by_age) + _FEW:
            self._by_need = tuple(_Needs() for _ in range(CLASSES))
            self._needed = self._needs = 0
        for claim in self._since(self._needed):
            self._by_need[claim.account.priority].add(claim)
            self._needed = claim.number
            self._needs += 1


@dataclass(slots=True, eq=False)
class _Needs:
    """Claims of one class by the room that they need. `firsts` are numbers that the oldest one of
    each need has at least."""

    alike: dict[int, _Alike] = field(default_factory=dict)
    firsts: dict[int, float] = field(default_factory=dict)

    def add(self, claim: GenerationClaim) -> None:
        need = claim.need_bytes
        alike = self.alike.get(need)
        if alike is None:
            alike = self.alike[need] = _Alike()
        if not alike.firsts:
            self.firsts[need] = claim.number
        alike.add(claim.number, claim.account)

    def oldest(self, need: int, waiting: Container[int], without: Collection[str]) -> float:
        """See `_Alike.oldest`, of those that need so much."""
        alike = self.alike[need]
        found = alike.oldest(waiting, without)
        self.firsts[need] = alike.firsts[0][0] if alike.firsts else inf
        return found


@dataclass(slots=True, eq=False)
class _Alike:
    """Numbers of claims of one class that need the same room, by account, in order; the first of
    each account lies in a heap. Those that wait no longer go when they come to the top."""

    queues: dict[Account, deque[int]] = field(default_factory=dict)
    firsts: list[tuple[int, Account]] = field(default_factory=list)

    def add(self, number: int, account: Account) -> None:
        queue = self.queues.get(account)
        if queue is not None:
            queue.append(number)
        else:
            self.queues[account] = deque((number,))
            heappush(self.firsts, (number, account))

    def oldest(self, waiting: Container[int], without: Collection[str]) -> float:
        """The least number that waits, of other clients than these; infinity = there is none."""
        firsts = self.firsts
        skipped, found = [], inf
        while firsts:
            number, account = firsts[0]
            if number not in waiting:
                self._drop_first(waiting)
            elif account.client in without:
                skipped.append(heappop(firsts))
            else:
                found = number
                break
        for entry in skipped:
            heappush(firsts, entry)
        return found

    def _drop_first(self, waiting: Container[int]) -> None:
        """The first one waits no longer: go on to the next one of its account."""
        _, account = self.firsts[0]
        queue = self.queues[account]
        while queue and queue[0] not in waiting:
            queue.popleft()
        if queue:
            heapreplace(self.firsts, (queue[0], account))
        else:
            heappop(self.firsts)
            del self.queues[account]


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

    def add(self, turn: Turn, work_s: float) -> None:
        work_ns = round(work_s * _NS)
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
