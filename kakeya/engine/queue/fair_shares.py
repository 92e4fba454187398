"""What each client used, and whose turn it is among those that wait, by class, share and work.

Clients of a class are fair to each other, and so are the users that a client names: what they use
counts as the client's, so however many they are, they divide its share. What a client asks for
nobody in particular goes by work alone beside them. Each has an account, among its `_Peers`:

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

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic

from kakeya.core.errors import InvariantBroken
from kakeya.engine.queue.policy import (
    CLASSES,
    EQUAL_TOKENS,
    Account,
    ClaimT,
    Equals,
    GenerationClaim,
    Turn,
)

_KEPT_CLIENTS = 1024
_STALE_ENTRIES = 4
"""For each one that may be right, before all are made anew."""
_SPARE = 256
"""Entries that may be stale beside these."""


class _Peers(ABC):
    """Accounts that are fair to each other. `level` is what the one that waited and used least had
    used when the last one began. `equals` are the resting ones, by what they used; `uses` is a heap
    of that, whose first entry is never a stale one, `far` of those that are not near, and `near`
    one of first claims."""

    def __init__(self, waiting: Mapping[int, GenerationClaim]) -> None:
        self._waiting = waiting
        self.accounts: dict[str, Account] = {}
        self._level = 0
        self._kept_limit = _KEPT_CLIENTS
        self._busy: dict[Account, None] = {}
        self._equals: dict[int, Equals] = {}
        self._uses: list[int] = []
        self._far: list[int] = []
        self._near: list[tuple[Turn, int]] = []

    @abstractmethod
    def _open(self, name: str) -> Account:
        """A new account."""

    def _leads(self, turn: Turn, same: Equals) -> bool:
        """Whether it is of an account that rests among these: the first one, or as good as that."""
        claim = self._waiting.get(turn[1])
        return claim is not None and claim.alone_s == turn[0] and claim.account.equals is same

    # --- accounts

    def arrive(self, name: str) -> Account:
        """A generation of this one waits from now on."""
        account = self.accounts.get(name)
        if account is None:
            account = self.accounts[name] = self._open(name)
        if not account.waiting:
            account.used = self._lifted(account)
            if not account.running:
                self._rest(account)
        account.waiting += 1
        return account

    def begin(self, account: Account) -> None:
        """A waiting generation runs from now on, chosen by the shares."""
        least = min(account.used, self._uses[0]) if self._uses else account.used
        if least > self._level:
            for one in self._busy:
                if one.used < least and one.waiting:
                    least = one.used
            self._level = max(least, self._level)
        account.waiting -= 1
        if not account.running:
            self._wake(account)
            self._busy[account] = None
        account.running += 1

    def set_aside(self, account: Account) -> None:
        """A running generation waits from now on."""
        account.waiting += 1
        self._stop(account)

    def leave(self, account: Account, *, was_running: bool) -> None:
        """A generation is over."""
        if was_running:
            self._stop(account)
        else:
            account.waiting -= 1
            if not account.waiting and not account.running:
                self._wake(account)
        if account.waiting or account.running:
            return
        if not self._equals and not self._busy:
            # Nobody is there to be fair to: the next ones begin anew.
            self.accounts, self._level, self._kept_limit = {}, 0, _KEPT_CLIENTS
        elif len(self.accounts) > self._kept_limit:
            # Who would be lifted to the level anyway need not be remembered.
            self.accounts = {
                name: one
                for name, one in self.accounts.items()
                if one.waiting or one.running or one.used > self._level
            }
            self._kept_limit = max(_KEPT_CLIENTS, 2 * len(self.accounts))

    def _lifted(self, account: Account) -> int:
        """What one that comes back counts as having used: no less than who used least of those that
        are there."""
        used = max(account.used, self._level)
        least = self._uses[0] if self._uses else None
        if least is not None and least <= used:
            return used
        for one in self._busy:
            if one is not account and (least is None or one.used < least):
                least = one.used
        return used if least is None or least < used else least

    def _stop(self, account: Account) -> None:
        account.running -= 1
        if not account.running:
            del self._busy[account]
            if account.waiting:
                self._rest(account)

    # --- turns

    def lead(self, account: Account) -> None:
        """The first claim of an account is another one now, or the account rests only now."""
        same = account.equals
        turn = account.head() if same is not None else None
        if same is None or turn is None:
            return
        heads = same.heads
        heappush(heads, turn)
        if heads[0] is turn and same.is_near:
            heappush(self._near, (turn, same.used))
            self._renew_if_stale()
        if len(heads) > _STALE_ENTRIES * same.accounts + _SPARE:
            same.heads = sorted(one for one in set(heads) if self._leads(one, same))

    def first(self) -> Turn | None:
        """Whose turn it is by share and work; None = nobody waits."""
        least = self._uses[0] if self._uses else None
        busy = [one for one in self._busy if one.waiting]
        for account in busy:
            if least is None or account.used < least:
                least = account.used
        most = EQUAL_TOKENS + (least or 0)
        best = self._first_resting(most)
        for account in busy:
            turn = account.head() if account.used <= most else None
            if turn is not None and (best is None or turn < best):
                best = turn
        return best

    def _first_resting(self, most: int) -> Turn | None:
        """The first claim of the resting accounts that used at most so much."""
        far, near, equals = self._far, self._near, self._equals
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

    # --- resting accounts

    def _rest(self, account: Account) -> None:
        """What it used stays as it is from now on."""
        used = account.used
        same = self._equals.get(used)
        if same is None:
            same = self._equals[used] = Equals(used)
            heappush(self._uses, used)
            heappush(self._far, used)
            self._renew_if_stale()
        same.accounts += 1
        account.equals = same
        self.lead(account)

    def _wake(self, account: Account) -> None:
        """It rests no longer."""
        same, account.equals = account.equals, None
        if same is None:
            raise InvariantBroken("shares", f"{account.client} waits, and did not rest")
        same.accounts -= 1
        if not same.accounts:
            equals, uses = self._equals, self._uses
            del equals[same.used]
            while uses and uses[0] not in equals:
                heappop(uses)

    def _renew_if_stale(self) -> None:
        most = _STALE_ENTRIES * len(self._equals) + _SPARE
        if len(self._uses) <= most and len(self._far) <= most and len(self._near) <= most:
            return
        equals = self._equals.values()
        self._uses = sorted(self._equals)
        self._far = [used for used in self._uses if not self._equals[used].is_near]
        self._near = sorted((one.heads[0], one.used) for one in equals if one.is_near and one.heads)


class _Users(_Peers):
    """The users of one client."""

    def __init__(self, owner: Account, waiting: Mapping[int, GenerationClaim]) -> None:
        super().__init__(waiting)
        self._owner = owner

    def _open(self, name: str) -> Account:
        return Account(self._owner.client, self._owner.priority, owner=self._owner)


@dataclass(slots=True, eq=False)
class _Client(Account):
    """The account of a client, and those of its users once it names any."""

    users: _Users | None = None

    def head(self) -> Turn | None:
        """The first of its claims that wait; None = it has none."""
        if self.users is None:
            return self.turns[0] if self.turns else None
        turns = (*self.turns[:1], self.users.first())
        return min((turn for turn in turns if turn is not None), default=None)


class _Class(_Peers):
    """The clients of one priority. `claims` is how many wait."""

    def __init__(self, priority: int, waiting: Mapping[int, GenerationClaim]) -> None:
        super().__init__(waiting)
        self._priority = priority
        self.claims = 0

    def _open(self, name: str) -> Account:
        return _Client(name, self._priority)

    def _leads(self, turn: Turn, same: Equals) -> bool:
        claim = self._waiting.get(turn[1])
        if claim is None or claim.alone_s != turn[0]:
            return False
        owner = claim.account.owner
        if owner is None:
            return claim.account.equals is same
        return owner.equals is same and owner.head() == turn


class FairShares(Generic[ClaimT]):
    """The accounts of all clients that are there, the debts of those that left, and the claims
    that wait, by their numbers."""

    def __init__(self) -> None:
        self.waiting: dict[int, ClaimT] = {}
        self._classes = tuple(_Class(priority, self.waiting) for priority in range(CLASSES))

    def __iter__(self) -> Iterator[Account]:
        """The accounts of all clients that are remembered."""
        return (account for peers in self._classes for account in peers.accounts.values())

    # --- accounts

    def arrive(self, client: str, priority: int, user: str = "") -> Account:
        """A generation of this client, for one of its users, waits from now on; `add` its claim."""
        account = self._classes[min(max(priority, 0), CLASSES - 1)].arrive(client)
        if not user:
            return account
        owner = _client(account)
        if owner.users is None:
            owner.users = _Users(owner, self.waiting)
        return owner.users.arrive(user)

    def begin(self, account: Account) -> None:
        """A waiting generation runs from now on, chosen by the shares."""
        if account.owner is not None:
            _users(account.owner).begin(account)
            account = account.owner
        self._classes[account.priority].begin(account)

    def set_aside(self, account: Account) -> None:
        """A running generation waits from now on; `add` its claim."""
        if account.owner is not None:
            _users(account.owner).set_aside(account)
            account = account.owner
        self._classes[account.priority].set_aside(account)

    def leave(self, account: Account, *, was_running: bool) -> None:
        """A generation is over."""
        owner = account.owner
        if owner is None:
            self._classes[account.priority].leave(account, was_running=was_running)
            return
        _users(owner).leave(account, was_running=was_running)
        peers = self._classes[owner.priority]
        peers.leave(owner, was_running=was_running)
        peers.lead(owner)  # it may have been the user that used least: others have their turn

    # --- claims

    def add(self, claim: ClaimT) -> Turn:
        """It waits from now on; its account says so already. Where it stands in its class."""
        claim.alone_s = claim.arrived_s + claim.work_s
        turn = claim.alone_s, claim.number
        self.waiting[claim.number] = claim
        account = claim.account
        self._classes[account.priority].claims += 1
        turns = account.turns
        if len(turns) > 2 * account.waiting + _SPARE:
            turns = account.turns = [one for one in turns if self._is_waiting(one)]
            heapify(turns)
        heappush(turns, turn)
        if turns[0] is turn:
            self._lead(account)
        return turn

    def remove(self, claim: ClaimT) -> Turn:
        """It waits no longer; `begin` or `leave` tells its account. Where it stood."""
        number = claim.number
        del self.waiting[number]
        account = claim.account
        self._classes[account.priority].claims -= 1
        turns = account.turns
        if turns[0][1] == number:
            # The first entry of each account is never a stale one.
            heappop(turns)
            while turns and not self._is_waiting(turns[0]):
                heappop(turns)
            self._lead(account)
        return claim.alone_s, number

    def first(self) -> ClaimT | None:
        """Whose turn it is by class, share and work; None = nobody waits."""
        for peers in self._classes:
            if peers.claims:
                turn = peers.first()
                if turn is None:
                    raise InvariantBroken("shares", f"{peers.claims} wait, and nobody is first")
                return self.waiting[turn[1]]
        return None

    def _lead(self, account: Account) -> None:
        if account.owner is not None:
            _users(account.owner).lead(account)
            account = account.owner
        self._classes[account.priority].lead(account)

    def _is_waiting(self, turn: Turn) -> bool:
        claim = self.waiting.get(turn[1])
        return claim is not None and claim.alone_s == turn[0]


def _client(account: Account) -> _Client:
    if not isinstance(account, _Client):
        raise InvariantBroken("shares", f"an account of {account.client} was opened elsewhere")
    return account


def _users(owner: Account) -> _Users:
    users = _client(owner).users
    if users is None:
        raise InvariantBroken("shares", f"a user of {owner.client} is there, and it names none")
    return users
