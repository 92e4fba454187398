"""The gossip loop: a round now, one each interval, and one soon after the own card changes.

Each round drops what expired, chooses targets, exchanges, keeps counts and logs one line.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, every
from kakeya.fleet.cards import DEFAULT_INTERVAL_S, CardFault, Offer
from kakeya.fleet.exchange import DEFAULT_TIMEOUT_S, Round, exchange_once, push_card
from kakeya.fleet.registry import CapabilityRegistry
from kakeya.fleet.targets import DEFAULT_FANOUT, choose_targets
from kakeya.wire.channels import Channels

_log = logging.getLogger(__name__)
MAX_FAREWELLS = 64
"""Peers told of a departure; the others hear it from them, or wait for the TTL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipConfig:
    """How often, to how many, how patiently."""

    seeds: tuple[str, ...] = ()
    interval_s: float = DEFAULT_INTERVAL_S
    jitter: float = 0.1
    fanout: int = DEFAULT_FANOUT
    timeout_s: float = DEFAULT_TIMEOUT_S
    debounce_s: float = 0.5
    """Changes of the own card within this time share one round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipStats:
    """Counts since the start; `dropped` by the reason of the card's fault."""

    rounds: int = 0
    exchanges: int = 0
    failures: int = 0
    cards_changed: int = 0
    sent_bytes: int = 0
    last_round_s: float = 0.0
    last_round_at: float = 0.0
    dropped: dict[CardFault, int] = field(default_factory=dict)

    def after(self, done: Round, now: float) -> GossipStats:
        """The counts with one more round in them."""
        failed = len(done.errors)
        dropped = dict(self.dropped)
        for fault, count in done.dropped.items():
            dropped[fault] = dropped.get(fault, 0) + count
        return GossipStats(
            rounds=self.rounds + 1,
            exchanges=self.exchanges + len(done.outcomes) - failed,
            failures=self.failures + failed,
            cards_changed=self.cards_changed + done.changed,
            sent_bytes=self.sent_bytes + done.sent_bytes,
            last_round_s=done.seconds,
            last_round_at=now,
            dropped=dropped,
        )


class Gossip:
    """Keeps one registry in step with the fleet."""

    def __init__(
        self,
        registry: CapabilityRegistry,
        config: GossipConfig,
        *,
        channels: Channels,
        clock: Clock,
        rng: random.Random,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        self._registry = registry
        self._config = config
        self._channels = channels
        self._clock = clock
        self._rng = rng
        self._on_round = on_round
        self._wake = asyncio.Event()
        self._is_poked = False
        self._dialled: set[str] = set()
        self._stats = GossipStats()

    @property
    def stats(self) -> GossipStats:
        """Counts since the start."""
        return self._stats

    def start(self, supervisor: Supervisor) -> None:
        """Run the loop under a supervisor; its first round begins at once."""
        supervisor.start("gossip", self.run)

    async def run(self) -> None:
        """Gossip for ever."""
        await every(
            self._config.interval_s,
            self._tick,
            clock=self._clock,
            rng=self._rng,
            jitter=self._config.jitter,
            wake=self._wake,
        )

    def poke(self) -> None:
        """Ask for a round soon; many pokes within the debounce time are one."""
        self._is_poked = True
        self._wake.set()

    def announce(self, offer: Offer) -> None:
        """Say something new of this node and spread it soon; the same again does nothing."""
        if offer != self._registry.offer:
            clock = self._clock
            self._registry.announce(offer, now=clock.wall(), mono=clock.mono())
            self.poke()

    async def round(self, targets: Sequence[str] | None = None) -> Round:
        """Do one round now, with chosen targets or given ones."""
        now = self._clock.wall()
        gone = self._registry.expire(now)
        if targets is None:
            targets = self._choose(now)
        await self._close_forgotten(targets, now)
        done = await exchange_once(
            self._registry,
            targets,
            channels=self._channels,
            clock=self._clock,
            rng=self._rng,
            timeout_s=self._config.timeout_s,
        )
        self._stats = self._stats.after(done, self._clock.wall())
        self._log_round(done, gone=len(gone))
        if self._on_round is not None:
            self._on_round(done)
        return done

    async def farewell(self, timeout_s: float = 2.0) -> int:
        """Tell the live peers that this node leaves; returns how many heard it."""
        clock = self._clock
        card = self._registry.farewell(now=clock.wall(), mono=clock.mono())
        peers = self._registry.live_addresses(clock.wall())
        told = self._rng.sample(peers, min(MAX_FAREWELLS, len(peers)))
        answers = await asyncio.gather(
            *(push_card(card, peer, channels=self._channels, timeout_s=timeout_s) for peer in told),
            return_exceptions=True,
        )
        heard = sum(not isinstance(answer, BaseException) for answer in answers)
        event(_log, "farewell", told=len(told), heard=heard)
        return heard

    async def _tick(self) -> None:
        if self._is_poked and self._stats.rounds:
            await self._clock.sleep(self._config.debounce_s)
            self._wake.clear()
        self._is_poked = False
        await self.round()

    def _choose(self, now: float) -> tuple[str, ...]:
        registry = self._registry
        return choose_targets(
            live=registry.live_addresses(now),
            remembered=registry.remembered_addresses(now),
            seeds=self._config.seeds,
            own=registry.own_addresses,
            fanout=self._config.fanout,
            rng=self._rng,
        )

    async def _close_forgotten(self, targets: Sequence[str], now: float) -> None:
        # An open channel to nobody would try to connect every few seconds for ever.
        registry = self._registry
        wanted = {*registry.live_addresses(now), *registry.remembered_addresses(now)}
        wanted.update(self._config.seeds, targets)
        for address in self._dialled - wanted:
            await self._channels.discard(address)
        self._dialled = (self._dialled & wanted).union(targets)

    def _log_round(self, done: Round, *, gone: int) -> None:
        is_quiet = not (done.changed or gone or done.errors or done.dropped)
        event(
            _log,
            "round",
            level=logging.DEBUG if is_quiet and not done.outcomes else logging.INFO,
            peers=len(done.outcomes),
            changed=done.changed,
            known=len(self._registry),
            gone=gone,
            dropped=sum(done.dropped.values()),
            errors="; ".join(done.errors.values()) or "none",
            seconds=done.seconds,
        )
