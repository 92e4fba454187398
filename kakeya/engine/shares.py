"""What each client used, and whose turn it is among those that wait, by class, share and work.

    resting   an account that waits and runs nothing: what it used stays as it is
    busy      an account that runs something: what it used changes at any step, and is read then

There are at most as many busy ones as places: these are looked at one by one, and a step costs an
addition. Resting ones that used the same lie together, in a heap by the first claim of each. Those
of them that used at most EQUAL_TOKENS more than the least are `near`: they lie in a heap by the
first claims of all, and whose turn it is, is at its top. The others are `far`, by what they used,
and come near as the least one goes on. So a turn takes about as long behind ten thousand as behind
ten.

Entries of heaps are checked when they come to the top, against what holds then; all are made anew
when most may be stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic

from kakeya.core.errors import InvariantBroken
from kakeya.engine.policy import CLASSES, EQUAL_TOKENS, Account, ClaimT, Equals, Turn

_KEPT_CLIENTS = 1024
_STALE_ENTRIES = 4
"""For each one that may be right, before all are made anew."""
_SPARE = 256
"""Entries that may be stale beside these."""


@dataclass(slots=True, eq=False)
class _Class:
    """The accounts of one priority. `level` is what the one that waited and used least had used
    when the last one began. `equals` are the resting ones, by what they used; `uses` is a heap of
    that, whose first entry is never a stale one, `far` of those that are not near, and `near` one
    of first claims."""

    accounts: dict[str, Account] = field(default_factory=dict)
    level: int = 0
    kept_limit: int = _KEPT_CLIENTS
    claims: int = 0
    busy: dict[Account, None] = field(default_factory=dict)
    equals: dict[int, Equals] = field(default_factory=dict)
    uses: list[int] = field(default_factory=list)
    far: list[int] = field(default_factory=list)
    near: list[tuple[Turn, int]] = field(default_factory=list)


class FairShares(Generic[ClaimT]):
    """The accounts of all clients that are there, the debts of those that left, and the claims
    that wait, by their numbers."""

    def __init__(self) -> None:
        self.waiting: dict[int, ClaimT] = {}
        self._classes = tuple(_Class() for _ in range(CLASSES))

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
            account = peers.accounts[client] = Account(client, priority)
        if not account.waiting:
            account.used = self._lifted(peers, account)
            if not account.running:
                self._rest(peers, account)
        account.waiting += 1
        return account

    def begin(self, account: Account) -> None:
        """A waiting generation runs from now on, chosen by the shares."""
        peers = self._classes[account.priority]
        least = min(account.used, peers.uses[0]) if peers.uses else account.used
        if least > peers.level:
            for one in peers.busy:
                if one.used < least and one.waiting:
                    least = one.used
            peers.level = max(least, peers.level)
        account.waiting -= 1
        if not account.running:
            self._wake(peers, account)
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
            if not account.waiting and not account.running:
                self._wake(peers, account)
        if account.waiting or account.running:
            return
        if not peers.equals and not peers.busy:
            # Nobody is there to be fair to: the next ones begin anew.
            peers.accounts, peers.level, peers.kept_limit = {}, 0, _KEPT_CLIENTS
        elif len(peers.accounts) > peers.kept_limit:
            # Who would be lifted to the level anyway need not be remembered.
            peers.accounts = {
                client: one
                for client, one in peers.accounts.items()
                if one.waiting or one.running or one.used > peers.level
            }
            peers.kept_limit = max(_KEPT_CLIENTS, 2 * len(peers.accounts))

    def _lifted(self, peers: _Class, account: Account) -> int:
        """What one that comes back counts as having used: no less than who used least of those that
        are there."""
        used = max(account.used, peers.level)
        least = peers.uses[0] if peers.uses else None
        if least is not None and least <= used:
            return used
        for one in peers.busy:
            if one is not account and (least is None or one.used < least):
                least = one.used
        return used if least is None or least < used else least

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
        if turns[0] is turn and account.equals is not None:
            self._lead(peers, account.equals, turn)
        return turn

    def remove(self, claim: ClaimT) -> Turn:
        """It waits no longer; `begin` or `leave` tells its account. Where it stood."""
        number = claim.number
        del self.waiting[number]
        account = claim.account
        peers = self._classes[account.priority]
        peers.claims -= 1
        turns = account.turns
        if turns[0][1] == number:
            # The first entry of each account is never a stale one.
            heappop(turns)
            while turns and self._claim(turns[0]) is None:
                heappop(turns)
            if turns and account.equals is not None:
                self._lead(peers, account.equals, turns[0])
        return claim.alone_s, number

    def first(self) -> ClaimT | None:
        """Whose turn it is by class, share and work; None = nobody waits."""
        for peers in self._classes:
            if peers.claims:
                return self._first_of(peers)
        return None

    def _first_of(self, peers: _Class) -> ClaimT:
        least = peers.uses[0] if peers.uses else None
        busy = [one for one in peers.busy if one.waiting]
        for account in busy:
            if least is None or account.used < least:
                least = account.used
        most = EQUAL_TOKENS + (least or 0)
        best = self._first_resting(peers, most)
        for account in busy:
            turns = account.turns
            if account.used <= most and turns and (best is None or turns[0] < best):
                best = turns[0]
        if best is None:
            raise InvariantBroken("shares", f"{peers.claims} wait, and nobody is first")
        return self.waiting[best[1]]

    def _claim(self, turn: Turn) -> ClaimT | None:
        claim = self.waiting.get(turn[1])
        return claim if claim is not None and claim.alone_s == turn[0] else None

    # --- resting accounts

    def _rest(self, peers: _Class, account: Account) -> None:
        """What it used stays as it is from now on."""
        used = account.used
        same = peers.equals.get(used)
        if same is None:
            same = peers.equals[used] = Equals(used)
            heappush(peers.uses, used)
            heappush(peers.far, used)
            self._renew_if_stale(peers)
        same.accounts += 1
        account.equals = same
        if account.turns:
            self._lead(peers, same, account.turns[0])

    def _wake(self, peers: _Class, account: Account) -> None:
        """It rests no longer."""
        same, account.equals = account.equals, None
        if same is None:
            raise InvariantBroken("shares", f"{account.client} waits, and did not rest")
        same.accounts -= 1
        if not same.accounts:
            equals, uses = peers.equals, peers.uses
            del equals[same.used]
            while uses and uses[0] not in equals:
                heappop(uses)

    def _lead(self, peers: _Class, same: Equals, turn: Turn) -> None:
        """It is the first of an account that rests among these."""
        heads = same.heads
        heappush(heads, turn)
        if heads[0] is turn and same.is_near:
            heappush(peers.near, (turn, same.used))
            self._renew_if_stale(peers)
        if len(heads) > _STALE_ENTRIES * same.accounts + _SPARE:
            same.heads = sorted(one for one in set(heads) if self._leads(one, same))

    def _leads(self, turn: Turn, same: Equals) -> bool:
        claim = self.waiting.get(turn[1])
        return claim is not None and claim.alone_s == turn[0] and claim.account.equals is same

    def _renew_if_stale(self, peers: _Class) -> None:
        most = _STALE_ENTRIES * len(peers.equals) + _SPARE
        if len(peers.uses) <= most and len(peers.far) <= most and len(peers.near) <= most:
            return
        equals = peers.equals.values()
        peers.uses = sorted(peers.equals)
        peers.far = [used for used in peers.uses if not peers.equals[used].is_near]
        peers.near = sorted((one.heads[0], one.used) for one in equals if one.is_near and one.heads)

    def _first_resting(self, peers: _Class, most: int) -> Turn | None:
        """The first claim of the resting accounts that used at most so much."""
        far, near, equals = peers.far, peers.near, peers.equals
        while far and far[0] <= most:
            same = equals.get(heappop(far))
            if same is not None and not same.is_near:
                same.is_near = True
                if same.heads:
                    heappush(near, (same.heads[0], same.used))
        while near:
            turn, used = near[0]
            same = equals.get(used)
            if same is None or not same.is_near:
                heappop(near)
            elif used > most:
                # Somebody waits who used less than the least one did before.
                heappop(near)
                same.is_near = False
                heappush(far, used)
            else:
                heads = same.heads
                while heads and not self._leads(heads[0], same):
                    heappop(heads)
                if not heads:
                    heappop(near)
                elif heads[0] == turn:
                    return turn
                else:
                    heapreplace(near, (heads[0], used))
        return None
