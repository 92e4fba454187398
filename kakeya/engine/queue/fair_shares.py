"""Fair shares: the tokens that each client used, and each of its users, in each priority.

An account counts the tokens of its generations. Accounts of one group are fair to each other: all
clients of a priority are a group, and so are all users that one client names. Use of
a user counts as its client's too, so a client with many users gets no more than a client with one.

These are the virtual counters of "Fairness in Serving Large Language Models" (Sheng et al. 2024).
An account that comes back is lifted to the least of those that are present, so a client cannot
save up tokens while it asks for nothing; one that used more keeps its debt.
"""

from __future__ import annotations

from collections.abc import Iterator

from kakeya.engine.queue.policy import CLASSES, Account

_MOST_DEBTS = 1024
"""Debts of a group, before those are dropped that the level has reached."""


class FairShares:
    """The accounts of all clients and users that have a generation here."""

    def __init__(self) -> None:
        self._clients = tuple(_Group() for _ in range(CLASSES))
        self._users: dict[Account, _Group] = {}

    def arrive(self, client: str, priority: int, user: str = "") -> Account:
        """Count a generation as waiting; `user` = "" when its client names no user."""
        priority = min(max(priority, 0), CLASSES - 1)
        account = self._clients[priority].arrive(Account(client, priority))
        if not user:
            return account
        users = self._users.setdefault(account, _Group())
        return users.arrive(Account(client, priority, user=user, owner=account))

    def begin(self, account: Account) -> None:
        """Count a waiting generation as running."""
        for group, one in self._groups(account):
            group.begin(one)

    def park(self, account: Account) -> None:
        """Count a running generation as waiting."""
        for _, one in self._groups(account):
            one.running -= 1
            one.waiting += 1

    def leave(self, account: Account, *, was_running: bool) -> None:
        """Count a generation as over."""
        for group, one in self._groups(account):
            group.leave(one, was_running=was_running)
        owner = account.owner or account
        if not owner.is_present:
            self._users.pop(owner, None)

    def _groups(self, account: Account) -> Iterator[tuple[_Group, Account]]:
        """The account and its client's, each with the group in which it is fair."""
        if account.owner is not None:
            yield self._users[account.owner], account
        yield self._clients[account.priority], account.owner or account


class _Group:
    """Accounts that are fair to each other.

    `accounts` are those that have a generation here. `level` is the least use of a waiting account
    when the last generation began; `debts` is the use of accounts that left and are above it.
    """

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self._debts: dict[str, int] = {}
        self._level = 0
        self._most_debts = _MOST_DEBTS

    def arrive(self, account: Account) -> Account:
        """Count a generation as waiting, in the account of this name that is here, if one is."""
        account = self.accounts.setdefault(account.name, account)
        account.used += self._debts.pop(account.name, 0)
        if not account.waiting:
            others = (one.used for one in self.accounts.values() if one is not account)
            account.used = max(account.used, self._level, min(others, default=0))
        account.waiting += 1
        return account

    def begin(self, account: Account) -> None:
        least = min(one.used for one in self.accounts.values() if one.waiting)
        self._level = max(self._level, least)
        account.waiting -= 1
        account.running += 1

    def leave(self, account: Account, *, was_running: bool) -> None:
        account.running -= was_running
        account.waiting -= not was_running
        if account.is_present:
            return
        del self.accounts[account.name]
        if not self.accounts:
            # No client is left to be fair to: the next ones begin anew.
            self._debts, self._level, self._most_debts = {}, 0, _MOST_DEBTS
        elif account.used > self._level:
            self._debts[account.name] = account.used
            self._forget()

    def _forget(self) -> None:
        """Drop debts that the level has reached: their accounts would be lifted to it anyway."""
        if len(self._debts) > self._most_debts:
            debts = self._debts.items()
            self._debts = {name: used for name, used in debts if used > self._level}
            self._most_debts = max(_MOST_DEBTS, 2 * len(self._debts))
