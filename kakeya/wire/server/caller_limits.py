"""Limits for one caller: a rate of exchanges, a number of calls, a number of connections.

Each caller has its own account, by identity if it has one, else by IP. Gossip has a separate
budget, so that the gossip of a peer that runs many generations still gets through. Decisions are
synchronous and take `now`; `authorization.py` makes one for each call from another machine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from kakeya.core.clock import Clock
from kakeya.core.errors import Refused


class Budget(StrEnum):
    """The budget that pays for a call. An exchange costs merging, other gossip only an answer."""

    EXCHANGE = "exchanges"
    GOSSIP = "gossip calls"
    WORK = "calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """The limits of one caller. An honest node needs an exchange each 5 s or less."""

    exchanges_per_s: float = 2.0
    exchange_burst: float = 10.0
    gossip_per_s: float = 20.0
    gossip_burst: float = 100.0
    """A limit of its own for renewals, since each costs a signature and a line in the log."""
    concurrent_work: int = 128
    """A node sends what its clients ask, with a quote before each answer."""
    concurrent_gossip: int = 8
    connections: int = 4
    connections_per_host: int = 64
    """The limit over all callers of one IP, connections without a call included."""
    callers: int = 4096


@dataclass(slots=True)
class TokenBucket:
    """A rate limit: `rate` calls per second, and after a rest `burst` calls at once."""

    rate: float
    burst: float
    _tokens: float = field(init=False)
    _since_mono: float = field(init=False, default=float("-inf"))

    def __post_init__(self) -> None:
        self._tokens = self.burst

    def take(self, now: float) -> float:
        """Take one token and return 0, or return the seconds until a token is there."""
        rested = max(0.0, now - self._since_mono)
        self._tokens = min(self.burst, self._tokens + rested * self.rate)
        self._since_mono = now
        # After exactly the told wait, rounding may leave slightly less than one token.
        if self._tokens >= 1 - 1e-9:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self.rate


@dataclass(slots=True)
class _Account:
    exchanges: TokenBucket
    gossip: TokenBucket
    running: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})


class CallerAccounts:
    """The accounts of all callers; the account that rests the longest is forgotten first."""

    def __init__(self, clock: Clock, limits: CallerLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits or CallerLimits()
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    @contextmanager
    def turn(self, caller: str, budget: Budget) -> Iterator[None]:
        """Count one call while it runs. Raises Refused naming the exhausted limit and the wait."""
        account = self._account(caller)
        is_gossip = budget is not Budget.WORK
        limits = self._limits
        most = limits.concurrent_gossip if is_gossip else limits.concurrent_work
        if account.running[is_gossip] >= most:
            raise Refused(
                f"{caller} has {account.running[is_gossip]} {budget} running here and may have "
                f"{most} at once; wait for one to end"
            )
        if is_gossip:
            bucket = account.exchanges if budget is Budget.EXCHANGE else account.gossip
            wait_s = bucket.take(self._clock.mono())
            if wait_s > 0:
                raise Refused(
                    f"{caller} makes more than {bucket.rate:g} {budget} a second; "
                    f"try again in {max(wait_s, 0.1):.1f} s",
                    retry_after_s=wait_s,
                )
        account.running[is_gossip] += 1
        try:
            yield
        finally:
            account.running[is_gossip] -= 1

    def _account(self, caller: str) -> _Account:
        account = self._accounts.get(caller)
        if account is None:
            limits = self._limits
            account = self._accounts[caller] = _Account(
                exchanges=TokenBucket(limits.exchanges_per_s, limits.exchange_burst),
                gossip=TokenBucket(limits.gossip_per_s, limits.gossip_burst),
            )
            self._forget_one()
        self._accounts.move_to_end(caller)
        return account

    def _forget_one(self) -> None:
        """Drop the account that rested the longest. An account with running calls stays."""
        if len(self._accounts) <= self._limits.callers:
            return
        for caller, account in self._accounts.items():
            if not any(account.running.values()):
                del self._accounts[caller]
                return
