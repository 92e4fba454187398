"""What each client used, and whose turn it is among those that wait, by class, share and work.

    resting   an account that waits and runs nothing: what it used stays as it is
    busy      an account that runs something: what it used changes at any step, and is read then

There are at most as many busy ones as places: these are looked at one by one, and a step costs an
addition. So are the resting ones as long as they are few. Of many, the first claim of each lies in
heaps by its work, one for each range of what was used, and the first of all that used at most so
much is the least of a few ranges. So a turn takes about as long behind ten thousand as behind ten.

Entries of heaps are numbers that are checked when they come to the top, against what holds then;
all are made anew when most may be stale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, TypeAlias

from kakeya.core.errors import InvariantBroken
from kakeya.engine.policy import CLASSES, EQUAL_TOKENS, Account, ClaimT

_KEPT_CLIENTS = 1024
_FEW = 32
"""Resting accounts that are looked at one by one."""
_WIDE, _NARROW = EQUAL_TOKENS, 32
"""Of ranges, in tokens, and 1: a window of EQUAL_TOKENS is one of the widest at most, and less than
32 of each other width."""
_STALE_ENTRIES = 4
"""For each resting account, before all are made anew."""
_SPARE = 256
"""Entries that may be stale beside these."""
Turn: TypeAlias = tuple[float, int]
"""When a claim's prompt would be done if alone, in seconds, and its number: an order of claims."""
_LAST: Turn = (math.inf, 0)


@dataclass(slots=True, eq=False)
class _Class:
    """The accounts of one priority. `level` is what the one that waited and used least had used
    when the last one began. The heaps are filled while `is_many`."""

    accounts: dict[str, Account] = field(default_factory=dict)
    level: int = 0
    kept_limit: int = _KEPT_CLIENTS
    claims: int = 0
    busy: dict[Account, None] = field(default_factory=dict)
    resting: dict[Account, None] = field(default_factory=dict)
    is_many: bool = False
    by_use: list[tuple[int, int, Account]] = field(default_factory=list)
    wide: dict[int, list[Turn]] = field(default_factory=dict)
    narrow: dict[int, list[Turn]] = field(default_factory=dict)
    exact: dict[int, list[Turn]] = field(default_factory=dict)
    entries: int = 0


class FairShares(Generic[ClaimT]):
    """The accounts of all clients that are there, the debts of those that left, and the claims
    that wait, by their numbers."""

    def __init__(self) -> None:
        self.waiting: dict[int, ClaimT] = {}
        self._classes = tuple(_Class() for _ in range(CLASSES))
        self._serial = 0

    def __iter__(self) -> Iterator[Account]:
        """All accounts that are remembered."""
        return (account for peers in self._classes for account in peers.accounts.values())

    # --- accounts

    def arrive(self, client: str, priority: int) -> Account:
        """A generation of this client waits from now on; `add` its claim."""
        priority = min(max(priority, 0), CLASSES - 1)
        peers = self._classes[priority]
        account = peers.accounts.get(client)
        if account is None:
            self._serial += 1
            account = peers.accounts[client] = Account(client, priority, serial=self._serial)
        if not account.waiting:
            least = self._least_resting(peers)
            for one in peers.busy:
                if one.used < least and one is not account:
                    least = one.used
            account.used = max(account.used, peers.level, 0 if least == math.inf else int(least))
            if not account.running:
                self._rest(peers, account)
        account.waiting += 1
        return account

    def begin(self, account: Account) -> None:
        """A waiting generation runs from now on, chosen by the shares."""
        peers = self._classes[account.priority]
        peers.level = max(peers.level, int(self._least_waiting(peers)))
        account.waiting -= 1
        if not account.running:
            del peers.resting[account]
            peers.busy[account] = None
        account.running += 1

    def set_aside(self, account: Account) -> None:
        """A running generation waits from now on; `add` its claim."""
        account.waiting += 1
        self._stop(account)

    def leave(self, account: Account, *, was_running: bool) -> None:
        """A generation is over."""
        peers = self._classes[account.priority]
        if was_running:
            self._stop(account)
        else:
            account.waiting -= 1
        if account.waiting or account.running:
            return
        peers.resting.pop(account, None)
        if not peers.resting and not peers.busy:
            # Nobody is there to be fair to: the next ones begin anew.
            peers.accounts, peers.level, peers.kept_limit = {}, 0, _KEPT_CLIENTS
            self._renew(peers)
        elif len(peers.accounts) > peers.kept_limit:
            # Who would be lifted to the level anyway need not be remembered.
            peers.accounts = {
                client: one
                for client, one in peers.accounts.items()
                if one.waiting or one.running or one.used > peers.level
            }
            peers.kept_limit = max(_KEPT_CLIENTS, 2 * len(peers.accounts))

    def _stop(self, account: Account) -> None:
        account.running -= 1
        if not account.running:
            peers = self._classes[account.priority]
            del peers.busy[account]
            if account.waiting:
                self._rest(peers, account)

    # --- claims

    def add(self, claim: ClaimT) -> Turn:
        """It waits from now on; its account says so already. Where it stands in its class."""
        claim.alone_s = claim.arrived_s + claim.work_s
        turn = claim.alone_s, claim.number
        self.waiting[claim.number] = claim
        account = claim.account
        peers = self._classes[account.priority]
        peers.claims += 1
        turns = account.turns
        if len(turns) > 2 * account.waiting + _SPARE:
            turns = account.turns = [one for one in turns if self._claim(one) is not None]
            heapify(turns)
        heappush(turns, turn)
        if peers.is_many and turns[0] is turn and not account.running:
            self._lead(peers, account.used, turn)
        return turn

    def remove(self, claim: ClaimT) -> Turn:
        """It waits no longer; `begin` or `leave` tells its account. Where it stood."""
        del self.waiting[claim.number]
        account = claim.account
        peers = self._classes[account.priority]
        peers.claims -= 1
        turns = account.turns
        if turns[0][1] == claim.number:
            # The first entry of each account is never a stale one.
            heappop(turns)
            while turns and self._claim(turns[0]) is None:
                heappop(turns)
            if peers.is_many and turns and not account.running:
                self._lead(peers, account.used, turns[0])
        return claim.alone_s, claim.number

    def first(self) -> ClaimT | None:
        """Whose turn it is by class, share and work; None = nobody waits."""
        for peers in self._classes:
            if not peers.claims:
                continue
            most = int(self._least_waiting(peers)) + EQUAL_TOKENS
            best = _LAST
            if peers.is_many:
                best = self._first_of_many(peers, most)
            else:
                for account in peers.resting:
                    if account.used <= most and account.turns and account.turns[0] < best:
                        best = account.turns[0]
            for account in peers.busy:
                if account.used <= most and account.turns and account.turns[0] < best:
                    best = account.turns[0]
            found = self._claim(best)
            if found is None:
                raise InvariantBroken("shares", f"{peers.claims} wait, and nobody is first")
            return found
        return None

    def _claim(self, turn: Turn) -> ClaimT | None:
        claim = self.waiting.get(turn[1])
        return claim if claim is not None and claim.alone_s == turn[0] else None

    # --- resting accounts

    def _rest(self, peers: _Class, account: Account) -> None:
        """What it used stays as it is from now on."""
        peers.resting[account] = None
        if peers.is_many:
            heappush(peers.by_use, (account.used, account.serial, account))
            if account.turns:
                self._lead(peers, account.used, account.turns[0])
            else:
                self._note(peers)
        elif len(peers.resting) > _FEW:
            self._renew(peers)

    def _lead(self, peers: _Class, used: int, turn: Turn) -> None:
        """It is the first of an account that rests with so much used."""
        for width, ranges in ((_WIDE, peers.wide), (_NARROW, peers.narrow), (1, peers.exact)):
            entries = ranges.get(used // width)
            if entries is None:
                ranges[used // width] = [turn]
            else:
                heappush(entries, turn)
        self._note(peers)

    def _note(self, peers: _Class) -> None:
        """There is one entry more."""
        peers.entries += 1
        if peers.entries > _STALE_ENTRIES * len(peers.resting) + _SPARE:
            self._renew(peers)

    def _renew(self, peers: _Class) -> None:
        """Make all entries anew, if there are to be any."""
        peers.by_use, peers.wide, peers.narrow, peers.exact = [], {}, {}, {}
        peers.entries = 0
        peers.is_many = 2 * len(peers.resting) > _FEW
        if not peers.is_many:
            return
        peers.by_use = sorted((one.used, one.serial, one) for one in peers.resting)
        heads = sorted((one.turns[0], one.used) for one in peers.resting if one.turns)
        for width, ranges in ((_WIDE, peers.wide), (_NARROW, peers.narrow), (1, peers.exact)):
            for turn, used in heads:
                ranges.setdefault(used // width, []).append(turn)

    def _least_resting(self, peers: _Class) -> float:
        """What the resting account used that used least; infinity without one."""
        if not peers.is_many:
            least = math.inf
            for account in peers.resting:
                if account.used < least:
                    least = account.used
            return least
        while peers.by_use:
            used, _, account = peers.by_use[0]
            if account.used == used and account in peers.resting:
                return used
            heappop(peers.by_use)
        return math.inf

    def _least_waiting(self, peers: _Class) -> float:
        """What the account used that waits and used least."""
        least = self._least_resting(peers)
        for account in peers.busy:
            if account.waiting and account.used < least:
                least = account.used
        return least

    def _first_of_many(self, peers: _Class, most: int) -> Turn:
        """The first claim of the resting accounts that used at most so much."""
        least, best = self._least_resting(peers), _LAST
        if least > most:
            return best
        at = int(least)
        for width, ranges in ((_WIDE, peers.wide), (_NARROW, peers.narrow), (1, peers.exact)):
            # Whole ranges of this width up to `most`, behind those that were wider.
            start, end = at // width, (most + 1) // width
            indexes: Iterable[int] = range(start, end)
            if len(ranges) < end - start:
                indexes = [index for index in ranges if start <= index < end]
            for index in indexes:
                entries = ranges.get(index)
                if entries is not None:
                    best = min(best, self._top(entries, width, index))
                    if not entries:
                        del ranges[index]
            at = max(at, end * width)
        return best

    def _top(self, entries: list[Turn], width: int, index: int) -> Turn:
        while entries:
            claim = self._claim(entries[0])
            if claim is not None:
                account = claim.account
                if not account.running and account.used // width == index:
                    return entries[0]
            heappop(entries)
        return _LAST
