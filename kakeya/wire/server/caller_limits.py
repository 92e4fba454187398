"""How much one caller may ask at once: a rate for exchanges, a number of calls, of connections.

Each caller has its own account, by identity where it has one, else by IP. Gossip has a budget of
its own, so that a peer whose generations fill theirs is still heard. Decisions are synchronous and
take `now`; `authorization.py` asks them for each call from another machine.
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
    """What a call is paid from. An exchange makes the registry work, gossip only answers."""

    EXCHANGE = "exchanges"
    GOSSIP = "gossip calls"
    WORK = "calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """What one caller may have. A node's own round needs an exchange each 5 s or less."""

    exchanges_per_s: float = 2.0
    exchange_burst: float = 10.0
    gossip_per_s: float = 20.0
    gossip_burst: float = 100.0
    """Other gossip calls; a renewal costs a signature and a line in the log."""
    concurrent_work: int = 32
    concurrent_gossip: int = 8
    connections: int = 4
    connections_per_host: int = 64
    """Over all callers of one IP, those that have made no call yet included."""
    callers: int = 4096


@dataclass(slots=True)
class TokenBucket:
    """Lets `rate` per second through, after a rest `burst` at once."""

    rate: float
    burst: float
    _tokens: float = field(init=False)
    _since_mono: float = field(init=False, default=float("-inf"))

    def __post_init__(self) -> None:
        self._tokens = self.burst

    def take(self, now: float) -> float:
        """Take one token; return 0, or the seconds until there is one."""
        rested = max(0.0, now - self._since_mono)
        self._tokens = min(self.burst, self._tokens + rested * self.rate)
        self._since_mono = now
        # A wait that was kept exactly may leave a rounding error short of one.
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
    """The accounts of all callers; those at rest the longest are forgotten first."""

    def __init__(self, clock: Clock, limits: CallerLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits or CallerLimits()
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    @contextmanager
    def turn(self, caller: str, budget: Budget) -> Iterator[None]:
        """Hold one call of a caller. Raises Refused with what is exhausted and for how long."""
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
        """Make room: drop the account that rested longest. One with calls under way stays."""
        if len(self._accounts) <= self._limits.callers:
            return
        for caller, account in self._accounts.items():
            if not any(account.running.values()):
                del self._accounts[caller]
                return
